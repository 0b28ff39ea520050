"""Runs a function in a helper process that can be killed: time-outs that hold for any code, from any thread.

The process is started by exec, not by fork (the caller may hold a GPU, sockets and threads), and serves one
call after the other.  The scorers that do mathematics and the prime reward manager use it.
"""

import contextlib
import functools
import json
import os
import pickle
import pkgutil
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import cloudpickle

from system import plugins

START_S = 120  # limit for starting Python and importing the function; the time of a call begins after that
MEMORY_MB = 4096  # address space of the process of `call_in_worker`
BUSY = 30  # its calls may take this much longer by the clock than on a processor
ORPHAN_S = 5  # a process whose caller is gone ends by itself this long after the time-out of its call
# What a call may raise in the caller. CAREFUL: the process only names it, and never chooses another class.
ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, IndexError, KeyError),
    *(LookupError, ModuleNotFoundError, NotImplementedError, OSError, OverflowError, RecursionError),
    *(FileNotFoundError, RuntimeError, TypeError, ValueError, ZeroDivisionError),
)
ERRORS = {error.__name__: error for error in ERRORS}
MAX_BYTES = 256 << 20  # of a reply
STARTER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from rewards.manager.worker import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)


class WorkerError(RuntimeError):
    """The process ended during the call (out of memory, a crash, an exit), raised what is not in ERRORS, or
    sent what is no reply."""


class Worker:
    """A helper process, started at the first call and again after it was killed.  One call at a time.

    A hostile answer may have taken it over.  Its replies are plain data, and of this call only: each call has
    a number that nobody can guess, and a process that sends anything else is killed.
    memory_mb: limit of its address space, 0 = none; macOS has no such limit.
    """

    def __init__(self, memory_mb=0):
        self.memory_mb = memory_mb
        self._process = self._socket = None

    def call(self, function, *args, timeout_s, cpu_s=0, patience_s=None, on_slow=None):
        """Return function(*args); with patience_s, call on_slow() when the result is not there after it.

        function: any that can be pickled, or "package.module:name" to import it over there only.  The result
        travels as JSON (tuples become lists).  timeout_s: seconds; imports are not counted.  cpu_s: seconds
        of a processor, 0 = no limit.
        Raises TimeoutError (the process is killed then), WorkerError, and what the function raises of ERRORS.
        """
        number = secrets.token_hex(8)
        message = number.encode() + pickled((function, args, timeout_s, cpu_s))
        if self._process is not None and (self._process.poll() is not None or is_readable(self._socket, 0)):
            self.close()  # it ended, or it speaks without being asked
        if self._process is None:
            self._start()
        try:
            send(self._socket, message, time.monotonic() + START_S)
            kind, value = self._receive(number, time.monotonic() + START_S)
            begin = time.monotonic()
            while kind == "at work":
                deadline = time.monotonic() + timeout_s
                wait_s = min(max(begin + patience_s - time.monotonic(), 0), timeout_s) if on_slow else 0
                if on_slow and not is_readable(self._socket, wait_s):
                    on_slow()
                    on_slow = None
                kind, value = self._receive(number, deadline)
        except TimeoutError:
            self.close()
            raise TimeoutError(f"no result after {timeout_s} s") from None
        except (EOFError, OSError):
            returncode = self.close()
            if returncode == -signal.SIGPROF:
                raise TimeoutError(f"no result after {cpu_s} s of a processor") from None
            raise WorkerError(f"the worker process ended with code {returncode}") from None
        except (ValueError, TypeError, RecursionError) as error:  # JSON of something else, or none
            self.close()
            raise WorkerError(f"the worker process sent no reply: {str(error)[:200]}") from None
        if kind == "result":
            return value
        raise ERRORS.get(kind, WorkerError)(value)

    def close(self):
        """Kill the process, and the processes of its group -> its exit code."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        returncode = self._process.wait()
        self._socket.close()
        self._process = self._socket = None
        return returncode

    def __del__(self):
        self.close()

    def _start(self):
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-c", STARTER, json.dumps(sys.path), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(self.memory_mb)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _receive(self, number, deadline):
        """The kind and the value of a reply to the call of this number."""
        # CAREFUL: JSON, not a pickle; a process that a hostile answer took over sends no code.
        theirs, kind, value = json.loads(read(self._socket, deadline))
        if theirs != number:
            raise ValueError("it belongs to no call")
        if not isinstance(kind, str) or not (kind == "result" or isinstance(value, str)):
            raise TypeError("neither a result nor an error with its text")
        return kind, value


_local = threading.local()  # a worker for each thread, which ends with its thread


def call_in_worker(function, *args, timeout_s):
    """`Worker.call` in the process of this thread, limited to MEMORY_MB.

    timeout_s: seconds of a processor, so what a function returns does not depend on what else runs.
    """
    if not hasattr(_local, "worker"):
        _local.worker = Worker(MEMORY_MB)
    return _local.worker.call(function, *args, timeout_s=BUSY * timeout_s, cpu_s=timeout_s)


_say = []  # what informs the caller of this process, where it is a helper


def still_at_work():
    """The time of a call starts again: for what has limits of its own, and may wait for a processor."""
    for say in _say:
        say()


def serve(fd, memory_mb):
    plugins.at_work.append("this process")  # nobody else has it
    if memory_mb:
        with contextlib.suppress(ValueError):  # macOS refuses any such limit
            resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    sock = socket.socket(fileno=fd)

    def reply(kind, value):
        send(sock, json.dumps([number, kind, value], default=lambda x: x.item()).encode())

    def begin():
        reply("at work", "")
        signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_S)

    _say.append(begin)
    while True:
        try:
            message = read(sock)
        except (EOFError, OSError):
            return
        number = message[:16].decode()
        try:
            function, args, timeout_s, cpu_s = unpickled(message[16:])
            if isinstance(function, str):
                function = pkgutil.resolve_name(function)
            # The default action of these signals ends the process even in the middle of C code.
            begin()
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            reply("result", function(*args))
        except MemoryError:
            sys.exit(1)  # a fresh process is safer than one that had no memory left
        except BaseException as error:  # whatever it is, SystemExit too: it belongs to the caller
            name = type(error).__name__
            is_known = ERRORS.get(name) is type(error)
            reply(name if is_known else "WorkerError", str(error) if is_known else repr(error))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)


# A message is its length in 8 bytes, then its text. All of it must arrive in time: half of one may be sent.
def send(sock, message, deadline=None):
    sock.settimeout(deadline and max(deadline - time.monotonic(), 0.001))
    sock.sendall(len(message).to_bytes(8, "big"))
    sock.sendall(message)


def read(sock, deadline=None):
    size = int.from_bytes(read_bytes(sock, 8, deadline), "big")
    if deadline and size > MAX_BYTES:
        raise ValueError(f"{size} bytes, at most {MAX_BYTES}")
    return read_bytes(sock, size, deadline)


def read_bytes(file, size, deadline):
    """So many bytes of a socket or a pipe. Raises EOFError, and TimeoutError at the deadline."""
    data = bytearray()
    while len(data) < size:
        if deadline and not is_readable(file, max(deadline - time.monotonic(), 0)):
            raise TimeoutError
        chunk = os.read(file.fileno(), min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def is_readable(file, timeout_s):
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def pickled(message):
    """A pickle, and the files of --reward_fn that it needs, which no import finds."""
    data = cloudpickle.dumps(message)
    files = {}
    if b"reward_fn_" in data:  # a process has thousands of modules
        for name, module in [*sys.modules.items()]:
            if name.startswith("reward_fn_") and name.encode() in data:
                files[name] = module.__file__
    return pickle.dumps((files, data))


def unpickled(data):
    files, data = pickle.loads(data)
    for name, file in files.items():
        _loaded(file, name)
    return pickle.loads(data)


_loaded = functools.cache(plugins.load_file)
