"""What driver.py launches: the `main` of a script in algos/, with a sampler and a model that cost nothing.

    driver_worker.py ROOT ALGO OUT start|step FLAGS OF THE SCRIPT ...

Only `build_engine` and the forward of the models are replaced, so that every line of the script's own runs.
Each rank writes what it measured to OUT/rankN.json.
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


def score(data_source, solution_str, ground_truth, extra_info):
    """The reward: every second prompt has right and wrong responses, the others only wrong ones."""
    return float(extra_info["index"] % 2 and zlib.crc32(solution_str[:32].encode()) % 2)


class Clock:
    """Wall and CPU seconds (children's too), and peak memory, of what runs between two marks.

    What an `away` function takes is in no part.
    """

    def __init__(self):
        self.parts, self.away_s = [], np.zeros(2)
        self.last = self.now()
        self.base = self.memory("VmRSS")

    def now(self):
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = time.process_time() + children.ru_utime + children.ru_stime
        return np.array([time.perf_counter(), cpu]) - self.away_s

    def memory(self, kind):
        """MB now (VmRSS), or the peak since the last call (VmHWM)."""
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        Path("/proc/self/clear_refs").write_text("5")
        return int(lines[kind].split()[0]) / 1024

    def mark(self, name):
        self.parts.append([name, *(self.now() - self.last), self.memory("VmHWM") - self.base])
        self.last = self.now()

    def away(self, function):
        @wraps(function)
        def wrapper(*args, **kwargs):
            begin = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.away_s += self.now() - begin

        return wrapper


class Engine:
    """In place of vLLM: random tokens, lengths from a log-normal distribution with a mean of a quarter.

    A response is a function of its seed, on any number of ranks. As from vLLM, it holds its tokens twice, its
    log-probs, and their places. `generate` makes all of them at once, `llm_engine.step` one at a time.
    """

    def __init__(self, clock, vocab, barrier):
        self.llm_engine, self.vocab, self.queue = self, vocab, []
        nothing = lambda *args, **kwargs: None
        self.wake_up = self.apply_model = self.reset_prefix_cache = nothing
        self.sleep = clock.away(lambda level: barrier())  # what a rank waits for the slowest sampler
        self.generate, self.step = clock.away(self._generate), clock.away(self._step)

    def _generate(self, prompts, params, use_tqdm=False):
        return [self.answer(str(i), p) for i, p in enumerate(params)]

    def add_request(self, request_id, prompt, params):
        self.queue.append((request_id, params))

    def has_unfinished_requests(self):
        return bool(self.queue)

    def _step(self):
        return [self.answer(*self.queue.pop())]  # not in the order in which they came

    def answer(self, request_id, params):
        rng, limit = np.random.default_rng(params.seed), params.max_tokens
        n = int(np.clip(rng.lognormal(np.log(0.17 * limit)), 1, limit))
        ids, flat = (
            rng.integers(self.vocab, size=n),
            SimpleNamespace(ranks=[1] * n, decoded_tokens=[None] * n),
        )
        flat.logprobs, flat.token_ids = (-1e-6 * rng.random(n)).tolist(), ids.tolist()
        flat.start_indices, flat.end_indices = [*range(n)], [*range(1, n + 1)]
        reason = "length" if n == limit else "stop"
        output = SimpleNamespace(index=0, token_ids=ids.tolist(), logprobs=flat, finish_reason=reason)
        return SimpleNamespace(request_id=request_id, finished=True, outputs=[output])


def forward(self, input_ids, position_ids, attention_mask, where, target, temperature):
    """Log-probs of 0, whose gradient is 0."""
    zeros_l = target * 0 + 0 * self.lm.get_input_embeddings().weight[0].sum()
    return zeros_l, zeros_l


def watch_steps(algo, clock, steps):
    """Fake sampler and models; a mark at both ends of every `timed` block, a step ends with its log."""
    import torch

    def build_engine(args, device):
        # as where there is a GPU: what is freed goes back, so that a part's peak is its own
        ctypes.CDLL("libc.so.6").mallopt(-4, 65536)  # M_MMAP_MAX
        ctypes.CDLL("libc.so.6").mallopt(-1, 1 << 26)  # M_TRIM_THRESHOLD
        vocab = algo.AutoConfig.from_pretrained(args.model).vocab_size
        return Engine(clock, vocab, torch.distributed.barrier)

    @contextmanager
    def marked(timing, name, timed=algo.timed):
        clock.mark(f"{clock.parts[-1][0] if clock.parts else 'log'} to {name}")
        with timed(timing, name):
            yield
        clock.mark(name)

    def check_engines(*args, check=algo.check_engines):
        check(*args)
        clock.__init__()  # the loop begins

    class Logger(algo.Logger):
        def log(self, *args, **shown):
            super().log(*args, **shown)
            clock.mark(f"{clock.parts[-1][0]} to log")
            steps.append(clock.parts)
            clock.parts = []

    algo.build_engine, algo.timed, algo.Logger = build_engine, marked, Logger
    algo.check_engines = check_engines
    torch.Tensor.backward = clock.away(torch.Tensor.backward)
    for name in {"TokenLogps", "TokenValues"} & vars(algo).keys():
        getattr(algo, name).forward = forward
        getattr(algo, name).__call__ = clock.away(torch.nn.Module.__call__)


class Ready(Exception):
    """The rows are there: a model would be loaded now."""


def watch_start(algo, clock, steps):
    """Stop where the first model would be loaded; joining the other ranks does not count."""

    def stop(*args):
        clock.mark("rows")
        steps.append([*clock.parts, ["held", 0, 0, clock.memory("VmRSS") - clock.base]])
        raise Ready

    algo.setup_distributed = clock.away(algo.setup_distributed)
    algo.build_engine = algo.load_policy = stop


def main():
    root, name, out, kind = sys.argv[1:5]
    sys.argv[1:5], sys.path[0] = [], root
    spec = importlib.util.spec_from_file_location("algo", Path(root) / f"algos/{name}.py")
    algo = sys.modules["algo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(algo)
    args, steps = algo.Args(**algo.parse(algo.Args)), []
    clock = Clock()
    dict(step=watch_steps, start=watch_start)[kind](algo, clock, steps)
    with suppress(Ready):
        algo.main(args)
    report = dict(steps=steps + [clock.parts] * (kind == "step"))  # what comes last: the checkpoint
    Path(out, f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
