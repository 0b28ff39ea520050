"""Files and directories that appear whole or not at all."""

import contextlib
import os
import shutil
from pathlib import Path


@contextlib.contextmanager
def replacing(path):
    """Yield a free path beside `path`; what the body writes there takes its place when the body ends well.

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
