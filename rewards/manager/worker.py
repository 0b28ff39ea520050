"""Runs a function in a helper process that can be killed: time-outs that hold for any code, from any thread.

The process is started by exec, not by fork (the caller may hold a GPU, sockets and threads), and serves one
call after the other.  The scorers that do mathematics and the prime reward manager use it.
"""

import builtins
import contextlib
import functools
import io
import json
import os
import pickle
import pkgutil
import resource
import signal
import subprocess
import sys
import threading
import time
import types
from multiprocessing.connection import Connection, Pipe

import cloudpickle

from rewards import load_reward_fn

START_S = 120  # limit for starting Python and importing the function; the time of a call begins after that
ORPHAN_S = 5  # a process whose caller is gone ends by itself this long after the time-out of its call
MEMORY_MB = 4096  # address space of the process of `call_in_worker`
STARTER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from rewards.manager.worker import _serve; _serve(int(sys.argv[2]), int(sys.argv[3]))"
)


class WorkerError(RuntimeError):
    """The process ended during the call (out of memory, a crash, an exit), or raised what is not built in."""


class Worker:
    """A helper process, started at the first call and again after it was killed.  One call at a time.

    memory_mb: limit of its address space, 0 = none; macOS has no such limit.
    """

    def __init__(self, memory_mb=0):
        self.memory_mb = memory_mb
        self._process = self._connection = None

    def call(self, function, *args, timeout_s, patience_s=None, on_slow=None):
        """Return function(*args); with patience_s, call on_slow() when the result is not there after it.

        function: any that can be pickled, or "package.module:name" to import it over there only.  The result
        travels as JSON (tuples become lists).  timeout_s: seconds; imports are not counted.
        Raises TimeoutError (the process is killed then), WorkerError, and the function's own built-in errors.
        """
        message = _pickled((function, args, timeout_s))
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._connection.send_bytes(message)
            kind, value = self._receive(START_S)
            if kind == "loaded":
                deadline = time.monotonic() + timeout_s
                if patience_s is not None and not self._connection.poll(min(patience_s, timeout_s)):
                    on_slow()
                kind, value = self._receive(deadline - time.monotonic())
        except (EOFError, OSError):
            self.close()
            raise WorkerError(f"the worker process ended with code {self._process.returncode}") from None
        if kind == "time-out":
            self.close()
            raise TimeoutError(f"no result after {timeout_s} s")
        if kind == "result":
            return value
        raise getattr(builtins, kind, WorkerError)(value)

    def close(self):
        """Kill the process, and the processes of its group."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._connection.close()

    def __del__(self):
        self.close()

    def _start(self):
        self._connection, theirs = Pipe()
        command = [sys.executable, "-c", STARTER, json.dumps(sys.path), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(self.memory_mb)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _receive(self, timeout_s):
        if not self._connection.poll(max(timeout_s, 0)):
            return "time-out", None
        # CAREFUL: not recv(), which unpickles; a process that a hostile answer took over sends no code.
        return json.loads(self._connection.recv_bytes())


_local = threading.local()  # a worker for each thread, which ends with its thread


def call_in_worker(function, *args, timeout_s):
    """`Worker.call` in the process of this thread, limited to MEMORY_MB."""
    if not hasattr(_local, "worker"):
        _local.worker = Worker(MEMORY_MB)
    return _local.worker.call(function, *args, timeout_s=timeout_s)


class _Pickler(cloudpickle.Pickler):
    """Pickles local functions too, and those of `load_reward_fn` by their file: no import finds them."""

    def reducer_override(self, value):
        if isinstance(value, types.FunctionType) and value.__module__.startswith("reward_fn_"):
            return _load_file, (f"{value.__code__.co_filename}:{value.__qualname__}",)
        return super().reducer_override(value)


def _pickled(message):
    file = io.BytesIO()
    _Pickler(file).dump(message)
    return file.getvalue()


@functools.cache
def _load_file(spec):
    return load_reward_fn(spec)


def _serve(fd, memory_mb):
    """The helper process: answer calls until the caller closes the connection."""
    if memory_mb:
        with contextlib.suppress(ValueError):  # macOS refuses any such limit
            resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    connection = Connection(fd)

    def reply(kind, value=None):
        connection.send_bytes(json.dumps([kind, value], default=lambda x: x.item()).encode())

    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, args, timeout_s = pickle.loads(message)
            if isinstance(function, str):
                function = pkgutil.resolve_name(function)
            reply("loaded")
            # The default action of SIGALRM ends the process even in the middle of C code.
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_S)
            reply("result", function(*args))
        except MemoryError:
            sys.exit(1)  # a fresh process is safer than one that had no memory left
        except Exception as error:  # whatever it is, it belongs to the caller
            is_plain = type(error).__module__ == "builtins" and len(error.args) == 1
            reply(*((type(error).__name__, str(error)) if is_plain else ("WorkerError", repr(error))))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
