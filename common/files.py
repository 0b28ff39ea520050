"""Files and directories that appear whole or not at all, and the identity of a model's weights."""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
from pathlib import Path

from common.arguments import fail

HELD = {}  # locks of directories, until the process ends


@contextlib.contextmanager
def replacing(path):
    """Yield a free path next to `path`; what the body writes there takes its place when the body ends well.

    Raises ValueError if `path` is a directory that holds other things than a model.
    """
    path = Path(path).absolute()
    if path.is_dir() and any(path.iterdir()) and not (path / "config.json").is_file():
        raise ValueError(f"{path} is a directory with other things in it; choose another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    try:
        yield new
        if path.is_dir():  # a directory cannot be renamed over one that is not empty
            path.rename(old)
        os.replace(new, path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)


def json_line(value):
    """A line of JSON, with null for NaN and infinity, which JSON does not have, and text for other things."""
    value = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    return json.dumps(value) + "\n"


def hold(out, flag):
    """Stop if another process writes to this directory. A kill frees the lock; workers do not inherit it."""
    if int(os.environ.get("RANK", 0)) or out in HELD:
        return
    out.mkdir(parents=True, exist_ok=True)
    HELD[out] = file = (out / ".lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        fail(f"{flag} is in use by {file.read()}: wait for it, or choose another")
    except OSError:  # a file system without locks
        return
    file.truncate(0)
    print(f"process {os.getpid()} of {platform.node()}", end="", file=file, flush=True)


@functools.cache
def weights_digest(model):
    """Digest of weights in a directory; a hub name's commit.

    Of safetensors the headers and the start of each weight; of other formats a part of every megabyte.
    """
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import hf_hub_download  # here, because it takes longer than a short script

        with contextlib.suppress(OSError, ValueError):  # whoever loads the model says what is wrong
            return Path(hf_hub_download(model, "config.json")).parent.name
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(header)
            for name, weight in json.loads(header).items():
                if name != "__metadata__":
                    file.seek(8 + len(header) + weight["data_offsets"][0])
                    digest.update(file.read(1024))
    for path in sorted({*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")}):
        with path.open("rb") as file:
            for start in range(0, path.stat().st_size, 2**20):
                file.seek(start)
                digest.update(file.read(1024))
    return digest.hexdigest()[:16]


@functools.cache
def file_digest(name):
    """Digest of a file, FILE or FILE:NAME, as it was when this process first asked; "": there is none."""
    path = next((path for path in (Path(name), Path(name.rpartition(":")[0])) if path.is_file()), None)
    if not path:
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
