"""A user's code, which a flag names as FILE.py:NAME. It is a guest: it changes nothing but its result."""

import faulthandler
import functools
import gc
import importlib.util
import itertools
import locale
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import warnings
import zlib
from concurrent.futures import thread as pools
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

# What a process has once, and any code may change: a module, its functions that read and set it, and what
# both are given first. Further ones: `paired`.
SETTINGS = [
    ("os", "getcwd", "chdir"),
    ("os", "getpgid", "setpgid", 0),
    ("os", "sched_getaffinity", "sched_setaffinity", 0),
    ("locale", "setlocale", "setlocale", locale.LC_ALL),
    ("torch", "is_autocast_enabled", "set_autocast_enabled", "cpu"),
    ("torch", "is_autocast_enabled", "set_autocast_enabled", "cuda"),
]
for number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}:
    SETTINGS.append(("signal", "getsignal", "signal", number))
for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "STACK"):
    SETTINGS.append(("resource", "getrlimit", "setrlimit", getattr(resource, f"RLIMIT_{name}")))
for backend in ("generic", "cuda", "mkldnn"):
    for products in ("all", "matmul", "conv", "rnn"):
        functions = "_get_fp32_precision_getter", "_set_fp32_precision_setter"
        SETTINGS.append(("torch._C", *functions, backend, products))
for part in ("path", "warnings", "logging", "collector", "device", "process_group"):
    SETTINGS.append((__name__, f"read_{part}", f"write_{part}"))
PAIRED = "sys", "gc", "random", "socket", "numpy", "numpy.random", "torch", "torch._C", "torch.backends.cuda"
# not these: it slows down all that follows (`write_device`), or may be set once
UNPAIRED = "set_default_device", "set_num_interop_threads"
STOPS = signal.SIGTERM, signal.SIGINT  # they end a run with a whole step, also while a guest is at work
kept = dict(settings={}, variables={}, streams={})  # what guests have changed, as the last one left it
at_work = []  # the guest that is at work


class Lent:
    """A stream of the run, which a guest can neither close nor change."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def close(self):
        """The run still needs it."""

    def reconfigure(self, **_):
        """The run writes in its own encoding."""

    def detach(self):
        return self.stream.buffer


@contextmanager
def guest(name, lasting=True):
    """Run a user's code in the block. After it the process is as it was before; the next block has again what
    guests have changed, as in a process of their own.

    name: of the code, for the line that says what cannot be put back. lasting: False for what computes with
    the settings of the run, as a loss.
    """
    if at_work:
        yield
        return
    at_work.append(name)
    mine = kept if lasting else {part: {} for part in kept}
    process = os.getpid()
    leave = os._exit

    def stay(code):  # it ends the guest and not the run
        if os.getpid() != process:
            leave(code)
        if at_work:  # else it is of an atexit
            raise SystemExit(f"os._exit({code})")

    os._exit = stay
    watch = faulthandler.dump_traceback_later
    faulthandler.dump_traceback_later = lambda *_, **__: None  # a process has one, which is the run's
    here = threading.current_thread()
    was_daemon = here.daemon
    here._daemonic = True  # so new threads are, too: those that a guest leaves hold up no end
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    own_mask = os.umask(0o077)
    os.umask(own_mask)
    own = read_settings()
    own_variables = dict(os.environ)
    own_streams = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}
    copies = {}
    for number in (0, 1, 2):
        with suppress(OSError):  # a process may have none
            copies[number] = os.dup(number)
    for setting, value in mine["settings"].items():
        with suppress(Exception):  # as in a directory that is gone
            put(setting, value)
    for variable, value in mine["variables"].items():
        put_variable(variable, value)
    for stream_name, stream in own_streams.items():
        setattr(sys, stream_name, mine["streams"].get(stream_name) or Lent(stream))
    try:
        yield
    finally:
        here._daemonic = was_daemon
        os._exit = leave
        faulthandler.dump_traceback_later = watch
        if os.getpid() != process:  # a fork that the guest has not ended: it must not go on as a second run
            leave(1)
        lost = put_back(own, own_variables, mine)
        os.umask(own_mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for stream_name, stream in own_streams.items():
            found = getattr(sys, stream_name)
            # what a guest has put there is kept: its end would close what it wraps
            mine["streams"][stream_name] = None if type(found) is Lent else found
            setattr(sys, stream_name, stream)
        for number, copy in copies.items():
            os.dup2(copy, number)
            os.close(copy)
        if any(stream is not None and stream.closed for stream in own_streams.values()):
            lost.append("a stream that it has closed")
        at_work.clear()
        if lost:
            raise SystemExit(f"error: {name} has changed what cannot be put back: {'; '.join(lost)}")


def let_go():
    """Leave behind what guests have left, threads of pools and processes: Python would wait for them."""
    for worker in [*pools._threads_queues]:
        if worker.daemon:
            del pools._threads_queues[worker]
    for child in multiprocessing.active_children():
        child.kill()


threading._register_atexit(let_go)  # before those of concurrent.futures and multiprocessing


def put_back(own, own_variables, mine):
    """Undo what a guest has changed -> what cannot be undone. mine: what the next one has again."""
    lost = []
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    theirs = read_settings()
    mine["settings"].clear()
    for setting, value in own.items():
        found = theirs.get(setting)
        if same(found, value):
            continue
        if setting[-1] not in STOPS:
            mine["settings"][setting] = found
        try:
            put(setting, value)
        except Exception as error:  # whatever a function of SETTINGS raises: the run ends with it
            lost.append(f"{setting[0]}.{setting[2]}: {error}")
    mine["variables"].clear()
    for variable in {*os.environ, *own_variables}:
        found = os.environ.get(variable)
        value = own_variables.get(variable)
        if found != value:
            mine["variables"][variable] = found
            put_variable(variable, value)
    return lost


def read_settings():
    found = {}
    pairs = [paired(name) for name in PAIRED if name in sys.modules]
    for setting in itertools.chain(*pairs, SETTINGS):
        module, read, _, *which = setting
        if module in sys.modules:
            with suppress(Exception):  # a directory that is gone, a precision that is set in two ways
                found[setting] = getattr(sys.modules[module], read)(*which)
    return found


@functools.cache
def paired(name):
    """The settings of a module whose functions have names as get_x and set_x."""
    module = sys.modules[name]
    found = []
    for write in sorted({*dir(module)} - {*UNPAIRED}):
        readers = write.replace("set", "get", 1), write.replace("set", "is", 1)
        if write.startswith("enable_"):
            readers = (write.removeprefix("enable_") + "_enabled",)
        elif not write.startswith(("set", "_set")):
            continue
        for read in filter(partial(hasattr, module), readers):
            with suppress(Exception), warnings.catch_warnings(action="error"):  # of what is deprecated
                getattr(module, read)()
                found.append((name, read, write))
    return found


def read_path():
    return list(sys.path)


def write_path(value):
    sys.path[:] = value


def read_warnings():
    return list(warnings.filters)


def write_warnings(value):
    warnings.resetwarnings()
    warnings.filters.extend(value)


def read_logging():
    """{logger: what a configuration of logging changes of it}, and the level that is off for all."""
    root = logging.getLogger()
    known = [root, *(x for x in root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    found = {x: (x.level, x.disabled, x.propagate, tuple(x.handlers)) for x in known}
    return found, root.manager.disable


def write_logging(value):
    found, off = value
    for logger, (level, disabled, propagate, handlers) in found.items():
        logger.level = level  # setLevel would walk through all loggers; `disable` does so below
        logger.disabled = disabled
        logger.propagate = propagate
        logger.handlers[:] = handlers
    logging.disable(off)


def read_collector():
    return gc.isenabled()


def write_collector(on):
    if on:
        gc.enable()
    else:
        gc.disable()


def read_device():
    return sys.modules["torch"].get_default_device() if "torch" in sys.modules else None


def write_device(value):
    if value:  # torch's own default is none
        sys.modules["torch"].set_default_device(None if value.type == "cpu" else value)


def read_process_group():
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_initialized())


def write_process_group(value):
    if value != read_process_group():
        raise RuntimeError("it was made or destroyed")


def put(setting, value):
    module, _, name, *which = setting
    write = getattr(sys.modules[module], name)
    try:
        write(*which, value)
    except (TypeError, ValueError, RuntimeError):
        if isinstance(value, dict):
            write(**value)
        elif isinstance(value, tuple) and not which:
            write(*value)
        else:
            raise


def put_variable(name, value):
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def same(found, value):
    """Whether two values of a setting are equal; of arrays, which random states have, it is not asked."""
    try:
        return bool(found == value)
    except (ValueError, RuntimeError):
        return False


def load_file(path, name):
    """The Python file as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look there
    writes_none = sys.dont_write_bytecode
    # Python takes what it has compiled for a new text of the same second and size
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes_none
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
        with guest(f"{flag} {spec}"):
            module = load_file(path, f"{flag.strip('-')}_{path.stem}_{folder}")
    except KeyboardInterrupt:  # of whoever looks at the terminal
        raise
    except BaseException as error:  # anything in a user's file, SystemExit of its argparse too
        raise ValueError(f"{flag} {spec}: {path} cannot be loaded: {error!r}") from error
    if not hasattr(module, name):
        raise ValueError(f"{flag} {spec}: {path} defines no {name!r}")
    return getattr(module, name)


def looked_at(what, function, *given):
    """What a plug-in returns for these arguments, as a tuple of finite tensors of the shape of the second.

    ValueError if it returns something else, raises, or changes an argument in place.
    """
    import torch  # here, because flags are checked before it is loaded

    own = [x for x in given if torch.is_tensor(x)]
    before = [x.detach().clone() for x in own]
    try:
        found = function(*given)
    except (Exception, SystemExit) as error:  # of a user's function
        raise ValueError(f"{what} raises {type(error).__name__}: {error}") from error
    found = found if isinstance(found, tuple) else (found,)
    check_shapes(what, found, given[1].shape)
    if not all(x.isfinite().all() for x in found):
        raise ValueError(f"{what} returns a number that is not finite")
    if not all(map(torch.equal, own, before)):
        raise ValueError(f"{what} changes an argument in place: change a copy")
    return found


def check_shapes(what, found, shape):
    """ValueError unless a plug-in has returned tensors of this shape."""
    for x in found:
        if getattr(x, "shape", None) != shape:
            raise ValueError(f"{what} must return tensors of shape {[*shape]}, as its second argument has")
