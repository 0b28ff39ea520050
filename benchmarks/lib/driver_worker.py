"""What driver.py launches: the `main` of a script in algos/, with a sampler and models that cost nothing.

    driver_worker.py ROOT ALGO OUT start|step FLAGS OF THE SCRIPT ...

Only `build_engine` and the models' forward are replaced: all else that runs is the script's own. Each rank
writes what it measured to OUT/rankN.json.
"""

import ctypes
import importlib.util
import json
import os
import resource
import sys
import time
import zlib
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "{} on the device"


def score(data_source, solution_str, ground_truth, extra_info):
    """The reward: every second prompt has right and wrong responses, the others only wrong ones."""
    return float(extra_info["index"] % 2 and zlib.crc32(solution_str[:32].encode()) % 2)


class Clock:
    """Wall and CPU seconds (children's too) and peak memory of what runs between marks, without `away`."""

    def __init__(self):
        self.parts, self.before, self.part, self.away_s = {}, "log", "log", np.zeros(2)
        self.last, self.base = self.now(), self.memory("VmRSS")

    def now(self):
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = time.process_time() + children.ru_utime + children.ru_stime
        return np.array([time.perf_counter(), cpu]) - self.away_s

    def memory(self, kind):
        """MB now (VmRSS), or the peak since the last call (VmHWM)."""
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return int(lines[kind].split()[0]) / 1024

    def mark(self, name):
        """What ran since the last mark is of the part `name`."""
        wall, cpu, peak = self.parts.get(name, (0, 0, 0))
        spent, here = self.now() - self.last, self.memory("VmHWM") - self.base
        self.parts[name] = wall + spent[0], cpu + spent[1], max(peak, here)
        self.last = self.now()

    def away(self, function):
        """The function, such that what it takes is in no part."""

        @wraps(function)
        def wrapper(*args, **kwargs):
            begin = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.away_s += self.now() - begin

        return wrapper


class Engine:
    """In place of vLLM: slices of a text, lengths from a log-normal distribution with a mean of a quarter.

    text: its token ids, to be repeated. A response is a function of its seed, on any number of ranks. As
    vLLM's, it holds its tokens twice, their log-probs and places.
    """

    def __init__(self, clock, text, barrier):
        self.text, self.queue = np.array(text), []
        self.model_config = SimpleNamespace(dtype=None, hf_config=None)
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=256))
        self.wake_up = self.apply_model = self.collective_rpc = lambda *args, **kwargs: None
        self.reset_prefix_cache = self.reset_encoder_cache = self.wake_up
        self.sleep = clock.away(lambda level: barrier())  # a rank waits here for the slowest sampler
        self.step = clock.away(self._step)

    def add_request(self, request_id, prompt, params):
        self.queue.append((request_id, prompt, params))

    def has_unfinished_requests(self):
        return bool(self.queue)

    def get_num_unfinished_requests(self):
        return len(self.queue)

    def _step(self):
        return [self.answer(*self.queue.pop())]  # not in the order in which they came

    def answer(self, request_id, prompt, params):
        rng, limit = np.random.default_rng(params.seed), params.max_tokens
        n = int(np.clip(rng.lognormal(np.log(0.17 * limit)), 1, limit))
        ids = self.text.take(rng.integers(len(self.text)) + np.arange(n), mode="wrap")
        logps = -1e-6 * rng.random(n)  # 0 but for rounding: no alarm
        flat = dict(token_ids=ids.tolist(), logprobs=logps.tolist(), ranks=[1] * n, decoded_tokens=[None] * n)
        flat = SimpleNamespace(start_indices=[*range(n)], end_indices=[*range(1, n + 1)], **flat)
        reason = "length" if n == limit else "stop"
        output = SimpleNamespace(index=0, token_ids=ids.tolist(), logprobs=flat, finish_reason=reason)
        ids = prompt.get("prompt_token_ids")
        return SimpleNamespace(request_id=request_id, prompt_token_ids=ids, outputs=[output])


def forward(self, *args, **inputs):
    """In place of TokenLogps': log-probs of 0, whose gradient is 0."""
    target = args[-2]  # before the arguments
    zeros_l = target * 0 + 0 * self.lm.get_input_embeddings().weight[0].sum()
    return zeros_l, zeros_l


def watch_steps(algo, clock, parts):
    """Marks at both ends of every `timed` block; a step begins and ends with its log.

    In the blocks that run a model, what comes between its forward and the next layout, and the check of the
    sampler, is arithmetic on tensors of the model's device. It is a part of its own: a GPU would do it.
    """
    import torch

    def build_engine(args, device):
        # as where there is a GPU: what is freed goes back, so that a part's peak is its own
        ctypes.CDLL("libc.so.6").mallopt(-4, 65536)  # M_MMAP_MAX
        ctypes.CDLL("libc.so.6").mallopt(-1, 1 << 26)  # M_TRIM_THRESHOLD
        pages = [path.read_text() for path in sorted(ROOT.glob("docs/**/*.md"))]
        text = algo.load_processor(args.model).encode("".join(pages), add_special_tokens=False)
        return Engine(clock, text, torch.distributed.barrier)

    @contextmanager
    def timed(timing, name, timed=algo.timed):
        clock.mark(f"{clock.before} to {name}")
        clock.before, clock.part = name, name
        with timed(timing, name):
            yield
        clock.mark(clock.part)

    def on_host(function):
        @wraps(function)
        def wrapper(*args):
            clock.mark(clock.part)
            result = function(*args)
            clock.mark(clock.before)
            return result

        return wrapper

    def call(self, *args, **inputs):
        clock.mark(clock.before)
        clock.part = DEVICE.format(clock.before)  # from here on, but for what is `on_host`
        return away_call(self, *args, **inputs)

    def check_sampler(*args, check=algo.check_sampler):
        metrics = check(*args)
        clock.mark(DEVICE.format("check_sampler"))
        return metrics

    class Run(algo.Run):
        def start(self, *args):
            super().start(*args)
            clock.__init__()  # the loop begins

        def save(self):
            with timed({}, "save_checkpoint"):
                return super().save()

        def log(self, *args, **shown):
            super().log(*args, **shown)
            clock.mark(f"{clock.before} to log")
            parts.append(clock.parts)
            clock.parts, clock.before = {}, "log"

    for function in (build_engine, timed, check_sampler, Run):
        setattr(algo, function.__name__, function)
    for name in {"padded", "one_row", "split_micro_batches", "response_mask"} & vars(algo).keys():
        setattr(algo, name, on_host(getattr(algo, name)))
    torch.Tensor.backward = clock.away(torch.Tensor.backward)
    away_call = clock.away(torch.nn.Module.__call__)
    for name in {"TokenLogps", "TokenValues"} & vars(algo).keys():
        getattr(algo, name).forward, getattr(algo, name).__call__ = forward, call


class Ready(Exception):
    """The rows are there: now a model would be loaded."""


def watch_start(algo, clock, parts):
    """One part, up to the first model; joining the other ranks does not count."""

    def stop(*args):
        clock.mark("peak")
        clock.parts["held"] = 0, 0, clock.memory("VmRSS") - clock.base
        raise Ready

    algo.setup_distributed = clock.away(algo.setup_distributed)
    algo.build_engine = algo.load_policy = stop


def main():
    root, name, out, kind = sys.argv[1:5]
    sys.argv[1:5], sys.path[0] = [], root
    spec = importlib.util.spec_from_file_location("algo", Path(root) / f"algos/{name}.py")
    algo = sys.modules["algo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(algo)
    args, clock, parts = algo.Args(**algo.parse(algo.Args)), Clock(), []
    dict(step=watch_steps, start=watch_start)[kind](algo, clock, parts)
    run = sys.modules["system.run"]
    run.leave, leave = lambda _: None, run.leave  # the figures are still to be written
    with suppress(Ready):
        algo.main(args)
    parts.append(clock.parts)  # of a start, or what comes behind the last step: the checkpoint
    Path(out, f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(parts))
    leave()


if __name__ == "__main__":
    main()
