"""A reward that does, at import and in each call, whatever a user's code might do to the process of a run."""

import faulthandler
import gc
import logging.config
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import warnings
from contextlib import suppress

import numpy as np
import torch


def misbehave():
    os.chdir(tempfile.gettempdir())
    os.environ.clear()
    os.environ["WORLD_SIZE"] = "7"
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.umask(0o777)
    socket.setdefaulttimeout(0.001)
    torch.set_autocast_enabled("cpu", True)
    sys.setrecursionlimit(2000)
    sys.path[:] = []
    gc.disable()
    np.seterr(all="raise")
    torch.autograd.set_detect_anomaly(True)
    logging.disable()
    warnings.simplefilter("error")
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.fp32_precision = "tf32"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    sys.setprofile(lambda *_: None)
    faulthandler.dump_traceback_later(0.05, exit=True)
    threading.Thread(target=threading.Event().wait).start()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    sys.stdout.reconfigure(encoding="ascii")
    sys.stderr.detach()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    for number in (0, 1, 2):
        with suppress(OSError):
            os.close(number)


misbehave()
logging.config.dictConfig(dict(version=1, root=dict(level="ERROR")))  # it disables those that there are


def before(solution_str, extra_info, **_):
    return float("split" in extra_info) * solution_str.startswith("1")


after = calm = calm_too = also_calm = before


def score(solution_str, extra_info, **_):
    found = before(solution_str, extra_info)
    extra_info.clear()
    misbehave()
    return found


async def score_async(solution_str, extra_info, **_):
    return score(solution_str, extra_info)


def score_group(solution_strs, extra_infos, results, **_):
    results.clear()
    return [*map(score, solution_strs, extra_infos)]


def digits(solution_str, **_):
    misbehave()
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)


def calm_loss(logp_nt, old_logp_nt, adv_nt, mask_nt):
    return -adv_nt * (logp_nt - old_logp_nt).exp(), torch.zeros_like(logp_nt), torch.zeros_like(logp_nt)


def bad_loss(logp_nt, old_logp_nt, adv_nt, mask_nt):
    found = calm_loss(logp_nt, old_logp_nt, adv_nt, mask_nt)
    misbehave()
    return found


def calm_adv(score_n, group_n, length_n, parts):
    return score_n - score_n.mean()


def bad_adv(score_n, group_n, length_n, parts):
    found = calm_adv(score_n, group_n, length_n, parts)
    misbehave()
    return found


class Env:
    def step(self, text):
        misbehave()
