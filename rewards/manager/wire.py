"""What a worker and its process send each other: messages over a socket, and functions as pickles."""

import functools
import os
import pickle
import select
import sys
import time

import cloudpickle

from system.plugins import load_file

MAX_BYTES = 256 << 20  # of a reply


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
    loaded = ((name, module) for name, module in [*sys.modules.items()] if name.startswith("reward_fn_"))
    files = {name: module.__file__ for name, module in loaded if name.encode() in data}
    return pickle.dumps((files, data))


def unpickled(data):
    files, data = pickle.loads(data)
    for name, file in files.items():
        _loaded(file, name)
    return pickle.loads(data)


_loaded = functools.cache(load_file)
