"""What keeps a program in: namespaces and a root directory of its own, Landlock, seccomp, no privileges.

Talks to the kernel through ctypes, so nothing must be installed.  Used by child.py, in the
sandbox.  The names of constants are the kernel's.
"""

import ctypes
import os
import select
import struct
import sys

NOBODY = 65534
# All that the interpreter needs to read. CAREFUL: not all of /usr, under which a project may live.
LIBRARIES = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
LIBRARIES += [
    f"{prefix}/{lib}" for prefix in (sys.base_prefix, sys.base_exec_prefix) for lib in ("lib", "lib64")
]
DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
HOME = "/sandbox"
NAMESPACES = 0x10000000 | 0x20000 | 0x8000000 | 0x20000000 | 0x40000000  # CLONE_NEWUSER, NS, IPC, PID, NET

# System calls that fail with EPERM: name, number on x86_64, number on aarch64 (-: not there).
DENIED = " ".join(
    (
        # No second process, and no other program: the limits of one process are the limits of all.
        "fork 57 -  vfork 58 -  execve 59 221  execveat 322 281",
        # No signals, no meddling with other processes (of the same user, where there is no pid namespace).
        "kill 62 129  tkill 200 130  tgkill 234 131  rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240",
        "pidfd_open 434 434  pidfd_send_signal 424 424  pidfd_getfd 438 438  ptrace 101 117  kcmp 312 272",
        "process_vm_readv 310 270  process_vm_writev 311 271  process_madvise 440 440",
        "process_mrelease 448 448  move_pages 279 239  migrate_pages 256 238  setpriority 141 140",
        "sched_setaffinity 203 122  sched_setscheduler 144 119  sched_setparam 142 118",
        "sched_setattr 314 274  ioprio_set 251 30  mq_open 240 180",
        # No sockets; no interfaces with a long history of holes.
        "socket 41 198  io_uring_setup 425 425  bpf 321 280  userfaultfd 323 282  perf_event_open 298 241",
        "unshare 272 97  setns 308 268  keyctl 250 219  add_key 248 217  request_key 249 218",
        # No memory that RLIMIT_AS does not count.
        "shmget 29 194  msgget 68 186  semget 64 190  memfd_create 319 279  memfd_secret 447 447",
        # What changes a file by its name, and Landlock lets pass.
        "truncate 76 45  chmod 90 -  fchmod 91 52  fchmodat 268 53  chown 92 -  lchown 94 -  fchown 93 55",
        "fchownat 260 54  utime 132 -  utimes 235 -  futimesat 261 -  utimensat 280 88",
        "setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7",
        "removexattr 197 14  lremovexattr 198 15  fremovexattr 199 16",
    )
)
NEWEST_SYSCALL = 449  # later ones do not exist for the program; nor do the x32 numbers, from 1 << 30
CLONE3 = 435  # nor does it: libc falls back to clone, whose flags a filter can see
CLONE_THREAD = 0x10000
LOAD = 0x20
EQUAL = 0x15
GREATER_EQUAL = 0x35
ANY_BIT = 0x45
RETURN = 0x06
ALLOW = 0x7FFF0000
KILL = 0x80000000
EPERM = 0x50001
ENOSYS = 0x50026
MACHINES = {  # AUDIT_ARCH; column in DENIED; numbers of pivot_root, clone, prlimit64, fcntl, ioctl, prctl
    "x86_64": (0xC000003E, 0, 155, 56, 302, 72, 16, 157),
    "aarch64": (0xC00000B7, 1, 41, 220, 261, 25, 29, 167),
}

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *args):
    """libc.name(*args); OSError names the call that failed."""
    result = getattr(libc, name)(*args)
    if result < 0:
        raise OSError(f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option, *args):
    call("prctl", option, *(ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4]))


def machine():
    name = os.uname().machine
    if name not in MACHINES:
        raise OSError(f"no system call numbers for {name}")
    return MACHINES[name]


def die_with(parent):
    """The kernel ends this process with its parent, whose pidfd this is."""
    prctl(1, 9)  # PR_SET_PDEATHSIG
    if select.select([parent], [], [], 0)[0]:  # it ended before the line above
        os._exit(1)


def prefer_for_oom_kill():
    """When memory runs out, the kernel takes this process and its descendants, not the trainer."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def enter_namespaces():
    """New user, mount, ipc, pid and net namespaces; the next child is the first process of the pid namespace.

    As root, root and NOBODY are mapped to themselves; else only the user is.
    """
    uid = os.getuid()
    gid = os.getgid()
    pid = os.getpid()
    nobody = f"\n{NOBODY} {NOBODY} 1" if uid == 0 else ""
    files = {"uid_map": f"{uid} {uid} 1{nobody}", "gid_map": f"{gid} {gid} 1{nobody}"}
    if uid:
        files = {"setgroups": "deny"} | files  # without it an ordinary user may not write gid_map
    wait, go = os.pipe()
    helper = os.fork()  # only a process of the old namespace may map more than one id
    if helper == 0:
        os.close(go)
        os.read(wait, 1)
        try:
            for name, text in files.items():
                with open(f"/proc/{pid}/{name}", "w") as file:
                    file.write(text)
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    call("unshare", NAMESPACES)
    os.close(go)
    os.close(wait)
    status = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if status:
        raise OSError(f"uid_map: {os.strerror(status)}")


def mount(source, target, kind=None, flags=0, options=None):
    args = (x if x is None else os.fsencode(x) for x in (source, target, kind))
    call("mount", *args, ctypes.c_ulong(flags), options and options.encode())


def make_read_only(path, recursive):
    attributes = struct.pack("QQQQ", 1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    size = ctypes.c_size_t(len(attributes))
    call("syscall", 442, -100, os.fsencode(path), 0x8000 * recursive, attributes, size)  # mount_setattr


def make_root():
    """A root directory with LIBRARIES, read only, DEVICES, and a place for `fresh_home`; nothing else."""
    mount(None, "/", flags=0x4000 | 0x40000)  # MS_REC | MS_PRIVATE
    sources = {path: os.path.realpath(path) for path in LIBRARIES + DEVICES if os.path.exists(path)}
    mount("tmpfs", "/tmp", "tmpfs", 2 | 4, "size=1m,mode=755")  # MS_NOSUID | MS_NODEV
    os.chdir("/tmp")
    os.mkdir("old")
    call("syscall", machine()[2], b".", b"old")  # pivot_root
    os.chdir("/")
    for path, source in sources.items():
        if path in DEVICES:
            os.makedirs("/dev", exist_ok=True)
            os.close(os.open(path, os.O_CREAT))
        else:
            os.makedirs(path, exist_ok=True)
        mount(f"/old{source}", path, flags=0x1000 | 0x4000)  # MS_BIND | MS_REC
        make_read_only(path, recursive=True)
    call("umount2", b"/old", 2)  # MNT_DETACH
    os.rmdir("/old")
    os.mkdir(HOME)
    if not os.path.exists("/tmp"):  # it does when the interpreter is in there
        os.symlink(HOME, "/tmp")
    os.symlink(f"{HOME}/.stdin", "/dev/stdin")
    make_read_only("/", recursive=False)


def fresh_home(size):
    """An empty directory HOME in memory, which the program may fill with `size` bytes."""
    if os.path.ismount(HOME):
        call("umount2", HOME.encode(), 2)  # MNT_DETACH
    mount("tmpfs", HOME, "tmpfs", 2 | 4, f"size={size},nr_inodes=4k,mode=1777")


def give_up_privileges(parent, with_landlock):
    """No root, no capabilities and no way to them, few system calls; Landlock where it is asked for."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    die_with(parent)  # not earlier: a change of user ends it
    os.close(parent)
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    if with_landlock:
        restrict_files()
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))  # _LINUX_CAPABILITY_VERSION_3, no capability
    code = seccomp_filter()
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HP", len(code) // 8, ctypes.addressof(buffer)))
    prctl(22, 2, ctypes.addressof(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def restrict_files():
    """Landlock: LIBRARIES can be read, DEVICES read and written, no other file opened, made or removed."""
    abi = call("syscall", 444, None, ctypes.c_size_t(0), 1)  # landlock_create_ruleset, its version
    rights = (1 << 13) - 1 | (abi >= 2) << 13 | (abi >= 3) << 14 | (abi >= 5) << 15  # all that it knows
    ruleset = call("syscall", 444, struct.pack("Q", rights), ctypes.c_size_t(8), 0)
    for path in filter(os.path.exists, LIBRARIES + DEVICES):
        fd = os.open(path, os.O_PATH)
        allowed = 2 | 4 if path in DEVICES else 4 | 8  # WRITE_FILE 2, READ_FILE 4, READ_DIR 8
        rule = struct.pack("=Qi", allowed, fd)
        call("syscall", 445, ruleset, 1, rule, 0)  # landlock_add_rule, LANDLOCK_RULE_PATH_BENEATH
        os.close(fd)
    call("syscall", 446, ruleset, 0)  # landlock_restrict_self
    os.close(ruleset)


def seccomp_filter():
    """BPF program: DENIED fails, and some others with certain arguments; all else passes."""
    arch, column, _, clone, prlimit64, fcntl, ioctl, prctl_ = machine()
    words = DENIED.split()
    numbers = [int(n) for n in words[1 + column :: 3] if n != "-"]
    checks = [  # number, argument, comparison, with, whether it is denied when that holds
        (clone, 0, ANY_BIT, CLONE_THREAD, False),
        (prlimit64, 0, EQUAL, 0, False),  # of this process only
        (fcntl, 1, EQUAL, 8, True),  # F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP: signals by the back door
        (fcntl, 1, EQUAL, 15, True),
        (ioctl, 1, EQUAL, 0x8901, True),
        (ioctl, 1, EQUAL, 0x8902, True),
        (prctl_, 0, EQUAL, 1, True),  # PR_SET_PDEATHSIG
    ]
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    code += [(GREATER_EQUAL, 0, 1, NEWEST_SYSCALL + 1), (RETURN, 0, 0, ENOSYS)]
    code += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ENOSYS)]
    for number in numbers:
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, EPERM)]
    for number, argument, comparison, value, deny in checks:
        code += [(EQUAL, 0, 4, number), (LOAD, 0, 0, 16 + 8 * argument)]
        code += [(comparison, 1 - deny, deny, value), (RETURN, 0, 0, EPERM), (LOAD, 0, 0, 0)]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
