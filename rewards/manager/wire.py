"""What a worker and its process send each other: messages over a socket, and functions as pickles."""

import contextlib
import functools
import io
import operator
import select
import sys
import time

import cloudpickle

from rewards import load_file

MAX_BYTES = 256 << 20  # of a reply


# A message is its length in 8 bytes, then its text. All of it must arrive in time: half of one may be sent.
def send(sock, message, deadline=None):
    sock.settimeout(deadline and max(deadline - time.monotonic(), 0.001))
    sock.sendall(len(message).to_bytes(8, "big"))
    sock.sendall(message)


def read(sock, deadline=None):
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


def is_readable(sock, timeout_s):
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


class _Pickler(cloudpickle.Pickler):
    """Pickles local functions too, and what is in a file of --reward_fn by the file: no import finds it."""

    def reducer_override(self, value):
        module, name = (getattr(value, key, None) for key in ("__module__", "__qualname__"))
        if isinstance(name, str) and str(module).startswith("reward_fn_") and module in sys.modules:
            with contextlib.suppress(AttributeError):  # a local function has no such name
                if operator.attrgetter(name)(sys.modules[module]) is value:
                    return _from_file, (sys.modules[module].__file__, module, name)
        return super().reducer_override(value)


def pickled(message):
    file = io.BytesIO()
    _Pickler(file).dump(message)
    return file.getvalue()


_loaded = functools.cache(load_file)


def _from_file(file, module, name):
    """What has this name, with dots or without, in the file."""
    return operator.attrgetter(name)(_loaded(file, module))
