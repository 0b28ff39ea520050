"""The helper process of a worker: answers calls until the caller closes the connection."""

import contextlib
import json
import pkgutil
import resource
import signal
import socket
import sys

from rewards.manager.wire import read, send, unpickled

ORPHAN_S = 5  # a process whose caller is gone ends by itself this long after the time-out of its call
# What a call may raise in the caller. CAREFUL: the process only names it, and never chooses another class.
ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, IndexError, KeyError),
    *(LookupError, ModuleNotFoundError, NotImplementedError, OSError, OverflowError, RecursionError),
    *(FileNotFoundError, RuntimeError, TypeError, ValueError, ZeroDivisionError),
)
ERRORS = {error.__name__: error for error in ERRORS}
_say = []  # what informs the caller of this process, where it is one


def still_at_work():
    """The time of a call starts again: for what has limits of its own, and may wait for a processor."""
    for say in _say:
        say()


def serve(fd, memory_mb):
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
