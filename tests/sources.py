"""Python parses a whole file for a class whose source it is asked for; tyro asks for one seventeen times."""

import inspect
import os

seen = {}  # {class of a file: its source, or the error that there is none}


def find_source(thing, find=inspect.findsource):
    """inspect.findsource, which looks once for a class of a file that has not changed."""
    if not inspect.isclass(thing):
        return find(thing)
    file = inspect.getsourcefile(thing)
    key = file, os.path.exists(file) and os.stat(file).st_mtime_ns, thing.__qualname__
    try:
        found = seen[key] if key in seen else find(thing)
    except OSError as error:
        found = error
    seen[key] = found
    if isinstance(found, OSError):
        raise found.with_traceback(None)
    return found
