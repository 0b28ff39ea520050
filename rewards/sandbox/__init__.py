"""Runs untrusted Python programs, such as a model writes, where they can reach nothing.

A program is one process of this interpreter, with the standard library and nothing else: it starts threads,
but no process, and has no network.  Its memory, threads, open files, output and time are limited; it ends
with the thread that started it.  What holds it (`tier()`; the first that works on this machine is taken):
  namespaces  user, mount, pid, net and ipc namespaces with a root directory of its own: the interpreter's
              libraries, read only, and an empty directory of limited size.  Linux 5.14.
  landlock    the same libraries can be read, no file written.  Linux 5.13; for containers without namespaces.
  rlimits     all files of the user (of nobody, if the caller is root) can be read and changed.  Only where
              the environment asks for it: REWARDS_SANDBOX=rlimits.
In each, the program has no privileges (as root: it is nobody) and may make few system calls (seccomp).
"""

import functools
import marshal
import os
import select
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CHILD = Path(__file__).with_name("child.py")
TIERS = ("namespaces", "landlock", "rlimits")
MEMORY_MB = 1024
OUTPUT_BYTES = 4 << 20
START_S = 60  # limit for starting a sandbox, beyond the time of a program
MEND = (
    "allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns;"
    " docker run --security-opt seccomp=unconfined) or Landlock (Linux 5.13), keep Python where any user can"
    " read it, or set REWARDS_SANDBOX=rlimits, which protects no files"
)


class SandboxError(RuntimeError):
    """A sandbox could not be set up."""


class Result(NamedTuple):
    """What became of a program.

    returncode: as in subprocess, the negative number of the signal that ended it.
    reason: None if it ended by itself; "timeout" or "output" (too much on stdout) if it was ended for that;
    "lost" if its sandbox broke down.  Want of memory is a MemoryError in the program.
    """

    stdout: str
    stderr: str
    returncode: int
    reason: str | None


def run_python(source, stdin="", timeout_s=10, memory_mb=MEMORY_MB):
    """Run a program -> Result.  timeout_s: on the clock; memory_mb: address space.  Raises SandboxError."""
    [result] = run_tests(source, [stdin], timeout_s, memory_mb)
    return result


def run_tests(source, stdins, timeout_s=10, memory_mb=MEMORY_MB, output_bytes=OUTPUT_BYTES, imports=()):
    """Run a program once with each stdin, in one sandbox, each time from a clean state; yields the Results.

    A test that takes timeout_s halves it for the tests after it.  So time-outs cost less than twice
    timeout_s in all.  output_bytes: limit of stdout.  imports: modules that are loaded once for all tests.
    """
    with _started(tier(), source, stdins, timeout_s, memory_mb, output_bytes, imports) as process:
        for _ in stdins:
            yield _receive(process, timeout_s)
        process.wait()


def run_judge(judge, program, timeout_s=10, memory_mb=MEMORY_MB):
    """Run two programs, each in a sandbox, stdout of one being stdin of the other -> Result of `judge`."""
    name = tier()
    judge_in, program_out = os.pipe()
    program_in, judge_out = os.pipe()
    limits = (memory_mb, OUTPUT_BYTES)
    with (  # the program outlasts the judge: if it hangs, the judge has the time-out
        _started(name, program, [""], START_S + timeout_s, *limits, streams=(program_in, program_out)),
        _started(name, judge, [""], timeout_s, *limits, streams=(judge_in, judge_out)) as process,
    ):
        return _receive(process, timeout_s)


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
            with _started(name, source, [""], START_S, MEMORY_MB, OUTPUT_BYTES) as process:
                result = _receive(process, START_S)
            if result.stdout == "42\n":
                return name
            problem = result.stderr.strip().rpartition("\n")[2] or result.reason
        except SandboxError as error:
            problem = error
        problems.append(f"{name}: {problem}")
    raise SandboxError(f"no sandbox for untrusted programs ({'; '.join(problems)}): {MEND}")


@contextmanager
def _started(tier, source, stdins, timeout_s, memory_mb, output_bytes, imports=(), streams=()):
    """A sandbox at work.  streams: descriptors for stdin and stdout of the program, closed here."""
    request = {
        "tier": tier,
        "source": source,
        "stdins": [stdin.encode("utf-8", "surrogatepass") for stdin in stdins],
        "timeout_s": timeout_s,
        "memory_mb": memory_mb,
        "output_bytes": output_bytes,
        "imports": imports,
        "streams": streams,
        "lifetime_s": START_S + len(stdins) * (timeout_s + 1),
    }
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
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _receive(process, timeout_s):
    """The next Result; `child.frame` is what arrives."""
    deadline = time.monotonic() + START_S + timeout_s
    try:
        reason, returncode, *sizes = _read(process.stdout, 64, deadline).decode().split()
        stdout, stderr = (_read(process.stdout, int(n), deadline).decode("utf-8", "replace") for n in sizes)
    except (EOFError, TimeoutError, ValueError):  # ValueError: no such header
        return Result("", "", -9, "lost")
    if reason == "setup":
        raise SandboxError(stderr)
    return Result(stdout, stderr, int(returncode), None if reason == "ended" else reason)


def _read(file, size, deadline):
    poll = select.poll()
    poll.register(file, select.POLLIN)
    data = bytearray()
    while len(data) < size:
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise TimeoutError
        chunk = os.read(file.fileno(), min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
