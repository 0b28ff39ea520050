"""Runs a function in a helper process that can be killed: time-outs that hold for any code, from any thread.

The process is started by exec, not by fork (the caller may hold a GPU, sockets and threads), and serves one
call after the other.  The scorers that do mathematics and the prime reward manager use it.
"""

import contextlib
import functools
import io
import json
import operator
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

from rewards import load_file

START_S = 120  # limit for starting Python and importing the function; the time of a call begins after that
ORPHAN_S = 5  # a process whose caller is gone ends by itself this long after the time-out of its call
MEMORY_MB = 4096  # address space of the process of `call_in_worker`
MAX_BYTES = 256 << 20  # of a reply
# What a call may raise in the caller. CAREFUL: the process only names it, and never chooses another class.
ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, IndexError, KeyError),
    *(LookupError, ModuleNotFoundError, NotImplementedError, OSError, OverflowError, RecursionError),
    *(FileNotFoundError, RuntimeError, TypeError, ValueError, ZeroDivisionError),
)
ERRORS = {error.__name__: error for error in ERRORS}
STARTER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from rewards.manager.worker import _serve; _serve(int(sys.argv[2]), int(sys.argv[3]))"
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

    def call(self, function, *args, timeout_s, patience_s=None, on_slow=None):
        """Return function(*args); with patience_s, call on_slow() when the result is not there after it.

        function: any that can be pickled, or "package.module:name" to import it over there only.  The result
        travels as JSON (tuples become lists).  timeout_s: seconds; imports are not counted.
        Raises TimeoutError (the process is killed then), WorkerError, and what the function raises of ERRORS.
        """
        number = secrets.token_hex(8)
        message = number.encode() + _pickled((function, args, timeout_s))
        if self._process is not None and (self._process.poll() is not None or _is_readable(self._socket, 0)):
            self.close()  # it ended, or it speaks without being asked
        if self._process is None:
            self._start()
        try:
            _send(self._socket, message, time.monotonic() + START_S)
            kind, value = self._receive(number, time.monotonic() + START_S)
            if kind == "loaded":
                deadline = time.monotonic() + timeout_s
                if patience_s is not None and not _is_readable(self._socket, min(patience_s, timeout_s)):
                    on_slow()
                kind, value = self._receive(number, deadline)
        except TimeoutError:
            self.close()
            raise TimeoutError(f"no result after {timeout_s} s") from None
        except (EOFError, OSError):
            returncode = self.close()
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
        theirs, kind, value = json.loads(_read(self._socket, deadline))
        if theirs != number:
            raise ValueError("it belongs to no call")
        if not isinstance(kind, str) or not (kind == "result" or isinstance(value, str)):
            raise TypeError("neither a result nor an error with its text")
        return kind, value


# A message is its length in 8 bytes, then its text. All of it must arrive in time: half of one may be sent.
def _send(sock, message, deadline=None):
    sock.settimeout(deadline and max(deadline - time.monotonic(), 0.001))
    sock.sendall(len(message).to_bytes(8, "big"))
    sock.sendall(message)


def _read(sock, deadline=None):
    size = int.from_bytes(_read_bytes(sock, 8, deadline), "big")
    if deadline and size > MAX_BYTES:
        raise ValueError(f"{size} bytes, at most {MAX_BYTES}")
    return _read_bytes(sock, size, deadline)


def _read_bytes(sock, size, deadline):
    data = bytearray()
    while len(data) < size:
        sock.settimeout(deadline and max(deadline - time.monotonic(), 0.001))
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _is_readable(sock, timeout_s):
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


_local = threading.local()  # a worker for each thread, which ends with its thread


def call_in_worker(function, *args, timeout_s):
    """`Worker.call` in the process of this thread, limited to MEMORY_MB."""
    if not hasattr(_local, "worker"):
        _local.worker = Worker(MEMORY_MB)
    return _local.worker.call(function, *args, timeout_s=timeout_s)


class _Pickler(cloudpickle.Pickler):
    """Pickles local functions too, and what is in a file of --reward_fn by the file: no import finds it."""

    def reducer_override(self, value):
        module, name = (getattr(value, key, None) for key in ("__module__", "__qualname__"))
        if isinstance(name, str) and str(module).startswith("reward_fn_") and module in sys.modules:
            with contextlib.suppress(AttributeError):  # a local function has no such name
                if operator.attrgetter(name)(sys.modules[module]) is value:
                    return _from_file, (sys.modules[module].__file__, module, name)
        return super().reducer_override(value)


def _pickled(message):
    file = io.BytesIO()
    _Pickler(file).dump(message)
    return file.getvalue()


_loaded = functools.cache(load_file)


def _from_file(file, module, name):
    """What has this name, with dots or without, in the file."""
    return operator.attrgetter(name)(_loaded(file, module))


def _serve(fd, memory_mb):
    """The helper process: answer calls until the caller closes the connection."""
    if memory_mb:
        with contextlib.suppress(ValueError):  # macOS refuses any such limit
            resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    sock = socket.socket(fileno=fd)

    def reply(kind, value):
        _send(sock, json.dumps([number, kind, value], default=lambda x: x.item()).encode())

    while True:
        try:
            message = _read(sock)
        except (EOFError, OSError):
            return
        number = message[:16].decode()
        try:
            function, args, timeout_s = pickle.loads(message[16:])
            if isinstance(function, str):
                function = pkgutil.resolve_name(function)
            reply("loaded", "")
            # The default action of SIGALRM ends the process even in the middle of C code.
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_S)
            reply("result", function(*args))
        except MemoryError:
            sys.exit(1)  # a fresh process is safer than one that had no memory left
        except Exception as error:  # whatever it is, it belongs to the caller
            name = type(error).__name__
            is_known = ERRORS.get(name) is type(error)
            reply(name if is_known else "WorkerError", str(error) if is_known else repr(error))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
