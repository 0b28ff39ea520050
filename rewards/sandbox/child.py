"""Runs inside the sandbox: puts up the walls, then runs the program once for each test.  See __init__.py.

The supervisor, started by exec, enters new namespaces and then only waits.
Its child, the driver, is the first process there; it never runs code of the program, but forks a process for
each test, which gives up everything and becomes the program.  When one of them dies, the kernel ends its
child.  Few imports: they are most of the time that a sandbox costs.
"""

import _sitebuiltins
import builtins
import marshal
import os
import resource
import select
import sys
import time
import types

sys.path.append(os.path.dirname(__file__))  # it is started without any path of this repository
import walls

sys.path.pop()

STDERR_BYTES = 1 << 16  # what is beyond is read and dropped
THREADS = 64
OPEN_FILES = 256
HOME_BYTES = 64 << 20
LOOK_S = 0.1  # at most, between two looks at a program


def main():
    """Returns the program's text, in the process that is to run it."""
    walls.die_with(os.pidfd_open(int(sys.argv[1])))
    with open(0, "rb", closefd=False) as file:
        request = marshal.load(file)
    try:
        walls.prefer_for_oom_kill()
        request["proc"] = os.open("/proc", os.O_RDONLY)  # no program inherits it
        if request["tier"] == "namespaces":
            walls.enter_namespaces()
        supervisor = os.pidfd_open(os.getpid())
        driver = os.fork()
        if driver:
            os.closerange(2, OPEN_FILES)
            os.waitpid(driver, 0)
            os._exit(0)
        walls.die_with(supervisor)
        for name in request["imports"]:
            __import__(name)
        if request["tier"] == "namespaces":
            walls.make_root()
        drive(request)
    except OSError as error:
        os.write(1, frame("setup", 1, b"", str(error).encode()))
        os._exit(1)
    return request["source"]


def drive(request):
    """Run the tests and write a frame for each.  Returns in the process of a program only."""
    driver = os.pidfd_open(os.getpid())
    for stdin in request["stdins"]:
        timeout_s = min(request["timeout_s"], request["total_s"])
        if timeout_s <= 0:
            os.write(1, frame("timeout", -9, b"", b""))
            continue
        if request["tier"] == "namespaces":
            walls.fresh_home(HOME_BYTES + len(stdin))
            # /dev/stdin leads there
            stdin_fd = os.open(f"{walls.HOME}/.stdin", os.O_CREAT | os.O_RDWR, 0o644)
        else:
            stdin_fd = os.memfd_create("stdin")
        os.write(stdin_fd, stdin)
        os.lseek(stdin_fd, 0, os.SEEK_SET)
        stdout, stdout_fd = os.pipe()
        stderr, stderr_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            become_program(request, [stdin_fd, stdout_fd, stderr_fd, driver])
            return
        for fd in (stdin_fd, stdout_fd, stderr_fd, *request["streams"]):
            os.close(fd)
        reason, out, err = watch(pid, stdout, stderr, timeout_s, request)
        os.kill(pid, 9)  # a zombie, if it ended
        _, status, usage = os.wait4(pid, 0)
        used_s = usage.ru_utime + usage.ru_stime
        code = os.waitstatus_to_exitcode(status)
        request["total_s"] -= used_s
        if reason == "ended" and used_s >= timeout_s:  # at its limit, and `watch` had no core to see it
            reason = "timeout"
        if reason == "ended" and code == -9:  # by the kernel, which had no memory, or by a user
            reason = "lost"
        request["timeout_s"] /= 1 + (reason == "timeout")
        os.write(1, frame(reason, code, out, err))
    os._exit(0)


def watch(pid, stdout, stderr, timeout_s, request):
    """Read both pipes until the program has ended, or is to be killed -> (reason, stdout, stderr).

    timeout_s: of a processor.  A program that has slept for idle_s, in sum, is ended.  It sleeps while it
    neither runs nor waits for a processor.  Only time of looking at it counts.
    """
    output_bytes, clock = request["output_bytes"], ~pid << 3 | 2  # the kernel's clock of that process
    asleep_s = 0
    looked, seen_s, waited_s = time.monotonic(), 0, 0
    data = {stdout: bytearray(), stderr: bytearray()}
    program = os.pidfd_open(pid)
    waiting = {stdout, stderr, program}
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    reason = "ended"
    while waiting and reason == "ended":
        used_s = time.clock_gettime(clock)
        if used_s >= timeout_s:
            reason = "timeout"
        elif program in waiting and time.monotonic() > looked + LOOK_S / 2:
            now, before_s = time.monotonic(), waited_s
            waited_s = waited(program, request["proc"])
            if None not in (before_s, waited_s):
                busy_s = used_s - seen_s + max(waited_s - before_s, 0)
                asleep_s += max(min(now - looked, LOOK_S) - busy_s, 0)
            looked, seen_s = now, used_s
            if asleep_s > request["idle_s"]:
                reason, request["total_s"] = "timeout", 0  # no time for the tests after it
        wait_s = min(max(timeout_s - used_s, 0.001), LOOK_S)
        ready = poll.poll(wait_s * 1000) if reason == "ended" else ()
        for fd, _ in ready:
            chunk = os.read(fd, 1 << 16) if fd in data else b""
            if not chunk:
                poll.unregister(fd)
                waiting.remove(fd)
                os.close(fd)
            elif fd == stdout or len(data[stderr]) < STDERR_BYTES:
                data[fd] += chunk
        if len(data[stdout]) > output_bytes:
            reason = "output"
    for fd in waiting:
        os.close(fd)
    return reason, bytes(data[stdout][:output_bytes]), bytes(data[stderr])


def waited(program, proc):
    """Seconds that its threads have waited for a processor; None: one does now, or runs, or is stopped."""

    def read(path):
        with open(os.open(path, os.O_RDONLY, dir_fd=proc)) as file:
            return file.read()

    pid = read(f"self/fdinfo/{program}").partition("\nPid:\t")[2].split()[0]  # outside of the namespaces
    try:
        folder = os.open(f"{pid}/task", os.O_RDONLY, dir_fd=proc)
        threads = os.listdir(folder)
        os.close(folder)
        stats = [read(f"{pid}/task/{thread}/stat") for thread in threads]
        times = [read(f"{pid}/task/{thread}/schedstat").split() for thread in threads]
    except OSError:  # it or a thread has just ended
        return None
    if {stat.rpartition(")")[2].split()[0] for stat in stats} != {"S"}:
        return None
    return sum(int(wait) for _, wait, _ in times) / 1e9


def frame(reason, returncode, stdout, stderr):
    """What the caller reads: 64 bytes of header, then both outputs."""
    header = f"{reason} {returncode} {len(stdout)} {len(stderr)}"
    return header.encode().ljust(64) + stdout + stderr


def become_program(request, fds):
    """Give up all that the program must not have."""
    fds[: len(request["streams"])] = request["streams"]
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    os.closerange(4, OPEN_FILES)
    in_namespaces = request["tier"] == "namespaces"
    limits = {
        "AS": request["memory_mb"] << 20,
        "CPU": int(request["timeout_s"]) + 2,  # threads may burn more than the clock shows
        "FSIZE": HOME_BYTES if in_namespaces else 0,
        "NOFILE": OPEN_FILES,
        **dict.fromkeys(["CORE", "MEMLOCK", "MSGQUEUE"], 0),
    }
    if in_namespaces:  # CAREFUL: elsewhere all processes of the user count
        limits["NPROC"] = THREADS
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    os.chdir(walls.HOME if in_namespaces else "/")
    walls.give_up_privileges(parent=3, with_landlock=request["tier"] == "landlock")
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D")  # Python runs with -S


if __name__ == "__main__":
    source = main()
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["program.py"]
    exec(compile(source, "program.py", "exec"), program.__dict__)
