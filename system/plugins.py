"""A user's code, which a flag names as FILE.py:NAME."""

import importlib.util
import os
import sys
import zlib
from pathlib import Path


def load_file(path, name):
    """The Python file as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def load_from(spec, flag):
    """What NAME is in the Python file FILE, for a flag whose value is FILE.py:NAME.

    Raises ValueError, in one line, when the file or the name is missing or the file cannot be run.
    """
    file, _, name = spec.rpartition(":")
    if not file or not name:
        raise ValueError(f"{flag} {spec}: write it as FILE.py:NAME")
    path = Path(file).expanduser().resolve()
    shipped = Path(__file__).parents[1] / file
    if not path.exists() and shipped.is_file():  # for a script that was copied elsewhere
        path = shipped
    if not path.exists():
        raise ValueError(f"{flag} {spec}: no such file, {path}")
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"{flag} {spec}: {path} is not a Python file")
    folder = f"{zlib.crc32(os.fsencode(path.parent)):08x}"  # two folders may have files of one name
    try:
        module = load_file(path, f"{flag.strip('-')}_{path.stem}_{folder}")
    except KeyboardInterrupt:  # of whoever looks at the terminal
        raise
    except BaseException as error:  # anything in a user's file, SystemExit of its argparse too
        raise ValueError(f"{flag} {spec}: {path} cannot be loaded: {error!r}") from error
    if not hasattr(module, name):
        raise ValueError(f"{flag} {spec}: {path} defines no {name!r}")
    return getattr(module, name)
