"""Runs untrusted Python programs, such as a model writes, where they can reach nothing.

A program is one process of this interpreter, with the standard library and nothing else: it starts threads,
but no process, and has no network.  Its memory, threads, open files, output and time are limited; it ends
with the thread that started it.  Its time is that of a processor, and as many run at a time as there are
cores, so no program fails because others are at work.
What holds it (`tier()`; the first that works on this machine is taken):
  namespaces  user, mount, pid, net and ipc namespaces with a root directory of its own: the interpreter's
              libraries, read only, and an empty directory of limited size.  Linux 5.14.
  landlock    the same libraries can be read, no file written.  Linux 5.13; for containers without namespaces.
  rlimits     all files of the user (of nobody, if the caller is root) can be read and changed.  Only where
              the environment asks for it: REWARDS_SANDBOX=rlimits.
In each, the program has no privileges (as root: it is nobody) and may make few system calls (seccomp).
"""

import fcntl
import functools
import marshal
import os
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rewards.manager.worker import BUSY, read_bytes, still_at_work

CHILD = Path(__file__).with_name("child.py")
TIERS = ("namespaces", "landlock", "rlimits")
MEMORY_MB = 1024
OUTPUT_BYTES = 4 << 20
START_S = 60  # limit for starting a sandbox, beyond the time of a program
IDLE_S = 5  # a program that has slept for so long, in sum, is ended
LOST = "the machine did not run a program to its end: it had no processor or memory, or was stopped"
MEND = (
    "allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns;"
    " docker run --security-opt seccomp=unconfined) or Landlock (Linux 5.13), keep Python where any user can"
    " read it, or set REWARDS_SANDBOX=rlimits, which protects no files"
)


class SandboxError(ValueError):
    """A sandbox could not be set up, or a program was LOST: nothing is known of what it would have done."""


class Result(NamedTuple):
    """What became of a program.

    returncode: as in subprocess, the negative number of the signal that ended it.
    reason: None if it ended by itself; "timeout" or "output" (too much on stdout) if it was ended for that.
    Want of memory is a MemoryError in the program.
    """

    stdout: str
    stderr: str
    returncode: int
    reason: str | None


def run_python(source, stdin="", timeout_s=10, memory_mb=MEMORY_MB):
    """Run a program -> Result.  timeout_s: of a processor; memory_mb: address space.  Raises SandboxError."""
    [result] = run_tests(source, [stdin], timeout_s, memory_mb=memory_mb)
    return result


def run_tests(source, stdins, timeout_s=10, **limits):
    """Run a program once with each stdin, in one sandbox, each time from a clean state; yields the Results.

    A test that takes timeout_s halves it for the tests after it.  So time-outs cost less than twice
    timeout_s in all.  output_bytes: limit of stdout.  total_s: of a processor, for all tests.  imports:
    modules that are loaded once for all tests.
    """
    with a_core(), _started(tier(), source, stdins, timeout_s, **limits) as process:
        for _ in stdins:
            still_at_work()
            yield _receive(process, timeout_s)
        process.wait()


@contextmanager
def a_core():
    """One of as many places as there are cores; all processes of the user share them."""
    folder = _own_folder()
    with ExitStack() as stack:
        files = []
        for i in range(len(os.sched_getaffinity(0))):
            files.append(os.open(folder / str(i), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            stack.callback(os.close, files[-1])
        while not any(map(_is_locked, files)):
            still_at_work()
            time.sleep(0.02)
        yield


def _own_folder():
    """Where the user's processes meet, and nobody else; if another user has its name, one of this process."""
    path = Path(tempfile.gettempdir(), f"rewards-sandbox-{os.getuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    private = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o077 == 0
    return path if private and found.st_uid == os.getuid() else Path(_folder_of_process().name)


@functools.cache
def _folder_of_process():
    return tempfile.TemporaryDirectory()  # it goes with the process


def _is_locked(file):
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True


def run_judge(judge, program, timeout_s=10):
    """Run two programs, each in a sandbox, stdout of one being stdin of the other -> Result of `judge`."""
    name = tier()
    judge_in, program_out = os.pipe()
    program_in, judge_out = os.pipe()
    # While one is at work, the other sleeps.
    idle_s = BUSY * timeout_s
    with (
        a_core(),
        _started(name, program, [""], timeout_s, streams=(program_in, program_out), idle_s=idle_s) as other,
        _started(name, judge, [""], timeout_s, streams=(judge_in, judge_out), idle_s=idle_s) as process,
    ):
        result = _receive(process, timeout_s)
        if result.reason or not result.returncode:
            return result
        return result._replace(reason=_receive(other, timeout_s).reason)


@functools.cache
def tier():
    """Name of the tier in use.  Raises SandboxError, in one line, if there is none."""
    asked = os.environ.get("REWARDS_SANDBOX")
    if asked and asked not in TIERS:
        raise SandboxError(f"REWARDS_SANDBOX={asked}; known: {', '.join(TIERS)}")
    if not hasattr(os, "pidfd_open"):
        raise SandboxError("programs are scored on Linux only: the sandbox is made of what its kernel offers")
    problems = []
    for name in [asked] if asked else TIERS[:2]:
        source = "import decimal; print(decimal.Decimal(42))"  # a shared library that is not loaded yet
        try:
            with _started(name, source, [""], START_S) as process:
                result = _receive(process, START_S)
            if result.stdout == "42\n":
                return name
            problem = result.stderr.strip().rpartition("\n")[2] or result.reason
        except SandboxError as error:
            problem = error
        problems.append(f"{name}: {problem}")
    raise SandboxError(f"no sandbox for untrusted programs ({'; '.join(problems)}): {MEND}")


@contextmanager
def _started(tier, source, stdins, timeout_s, streams=(), **limits):
    """A sandbox at work.  streams: descriptors for stdin and stdout of the program, closed here."""
    request = dict(memory_mb=MEMORY_MB, output_bytes=OUTPUT_BYTES, total_s=1e9, idle_s=IDLE_S, imports=())
    request |= dict(tier=tier, source=source, timeout_s=timeout_s, streams=streams) | limits
    request["stdins"] = [stdin.encode("utf-8", "surrogatepass") for stdin in stdins]
    with open(os.memfd_create("request"), "w+b") as file:
        marshal.dump(request, file)
        file.seek(0)
        process = subprocess.Popen(
            # a program may print integers of any length: its time is limited
            [sys.executable, "-I", "-S", "-X", "utf8", "-X", "int_max_str_digits=0", CHILD, str(os.getpid())],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            pass_fds=streams,
            start_new_session=True,
        )
    for fd in streams:
        os.close(fd)
    with process:
        try:
            yield process
        finally:
            process.kill()


def _receive(process, timeout_s):
    """The next Result; `child.frame` is what arrives."""
    deadline = time.monotonic() + START_S + BUSY * timeout_s
    try:
        reason, returncode, *sizes = read_bytes(process.stdout, 64, deadline).decode().split()
        outputs = (read_bytes(process.stdout, int(n), deadline) for n in sizes)
        stdout, stderr = (output.decode("utf-8", "replace") for output in outputs)
    except (EOFError, TimeoutError, ValueError):  # ValueError: no such header
        raise SandboxError(LOST) from None
    if reason in ("setup", "lost"):
        raise SandboxError(stderr if reason == "setup" else LOST)
    return Result(stdout, stderr, int(returncode), None if reason == "ended" else reason)
