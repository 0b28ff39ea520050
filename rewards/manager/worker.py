"""Runs a function in a helper process that can be killed: time-outs that hold for any code, from any thread.

The process is started by exec, not by fork (the caller may hold a GPU, sockets and threads), and serves one
call after the other.  The scorers that do mathematics and the prime reward manager use it.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time

from rewards.manager.serve import ERRORS
from rewards.manager.wire import is_readable, pickled, read, send

START_S = 120  # limit for starting Python and importing the function; the time of a call begins after that
MEMORY_MB = 4096  # address space of the process of `call_in_worker`
BUSY = 30  # its calls may take this much longer by the clock than on a processor
STARTER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from rewards.manager.serve import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
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
