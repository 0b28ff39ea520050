"""A trainer with faults: faulty.py ALGO FAULTS NOTES flags...

FAULTS: PHASE:RANK:STEP:kill|hang|full|hf|link, separated by commas.
Each fault strikes once, in the first pass of a phase at STEP or later: kill -9 of the rank, at a random
moment within the time that the phase took before; or it sleeps; or no file grows over 100 kB (a full disk);
or it ends as the weights of hf/ are about to be written; or no symbolic link can be made.
NOTES is a directory where those that have struck are noted, over all restarts. FAULTY_TIMEOUT_S: in the
environment, how long ranks wait for one another.
"""

import errno
import importlib
import os
import random
import resource
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
name, faults, notes = sys.argv[1:4]
del sys.argv[1:4]
algo = importlib.import_module(f"algos.{name}")
checkpoints, ranks, run = (importlib.import_module(f"system.{x}") for x in ("checkpoints", "ranks", "run"))
timed, log, write, lasted = algo.timed, run.Run.log, run.write_checkpoint, {}


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def strike(kind, note, seconds):
    note.touch()
    if kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    elif kind == "hf":
        checkpoints.save_torch_state_dict = lambda *_, **__: os._exit(1)
    elif kind == "link":
        os.symlink = no_room
    elif kind == "kill":
        threading.Timer(random.uniform(0, seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun gives ranks that keep on half a minute
        time.sleep(10_000)


@contextmanager
def faulty_timed(timing, phase):
    struck = []
    for fault in faults.split(","):
        where, rank, first, kind = fault.split(":")
        note = Path(notes) / fault
        if (where, rank) == (phase, os.environ["RANK"]) and algo.step >= int(first) and not note.exists():
            struck.append((kind, note, lasted.get(phase, 0)))
    start = time.perf_counter()
    with timed(timing, phase):
        for fault in struck:
            strike(*fault)
        yield
    lasted[phase] = time.perf_counter() - start


def counting_log(self, metrics, **shown):
    algo.step = self.step + 1
    log(self, metrics, **shown)


def faulty_write(*args):
    with faulty_timed({}, "save_checkpoint"):
        return write(*args)


run.write_checkpoint = faulty_write
algo.timed, run.Run.log, algo.step = faulty_timed, counting_log, 0
ranks.TIMEOUT_S = float(os.environ.get("FAULTY_TIMEOUT_S", ranks.TIMEOUT_S))
algo.main(algo.Args(**algo.parse(algo.Args)))
