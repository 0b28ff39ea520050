"""How long a step of a 7B model takes with and without `--partial_rollout`: simulated, no model is run.

    python benchmarks/experiments/when_partial_pays.py     # a minute

Eight GPUs, 64 groups of 16 responses a step. Lengths are lognormal, on average 1,000 tokens, at most 8,192.
A step of a sampler takes as long as reading the weights, and a bit more for each response that it serves; an
update takes its tokens over a speed. The constants follow docs/results/gpu.md. As dapo.py does it: places for
the responses of a step, two groups begun for each one that is waited for, old groups dropped.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from system.arguments import command_line

GPUS, GROUPS, GROUP, LONGEST, MEAN = 8, 64, 16, 8192, 1000
READ_S = 0.009  # 15 GB of weights at 3.35 TB/s, times two: 1.7 s for 480 steps of 6 GB were measured
RESPONSE_S = 32e-6  # 15 GFLOP at half of the data sheet, and 57 MB of keys and values
TOKENS_S = 13_000  # of the update on a GPU: 34,000 with 3B weights, 16,384 tokens in a micro-batch


@dataclass
class Args:
    steps: int = 100
    """Steps of a run."""
    staleness: tuple[int, ...] = (1, 2, 4)
    """Values of --max_staleness."""


def lengths(rng, spread, groups):
    """Tokens of the responses of groups, [groups, GROUP]; the prompt decides half of the spread."""
    of_prompt, own = rng.normal(size=(groups, 1)), rng.normal(size=(groups, GROUP))
    x = np.exp(spread * (of_prompt + own) / np.sqrt(2))
    return np.clip(MEAN * x / np.exp(spread**2 / 2), 1, LONGEST).round()


def sampling(left, places, enough):
    """Sample until `enough` groups are complete -> seconds, tokens made; `left`: tokens to go, [N, GROUP].

    Responses begin in order. left is changed in place.
    """
    flat, seconds, made = left.reshape(-1), 0.0, 0
    while (left == 0).all(1).sum() < enough:
        running = np.flatnonzero(flat)[:places]
        n = flat[running].min()  # steps until the next response ends and another one begins
        seconds += n * (READ_S + RESPONSE_S * len(running) / GPUS)
        made += n * len(running)
        flat[running] -= n
    return seconds, made


def simulate(rng, spread, steps, staleness):
    """Means over steps: seconds of sampling and update, share of old tokens, of tokens thrown away."""
    places, sums = GROUPS * GROUP, np.zeros(4)
    whole, left, begun = np.zeros((0, GROUP)), np.zeros((0, GROUP)), np.zeros(0)
    for step in range(steps):
        new = GROUPS if staleness is None else max(2 * GROUPS - len(left), 0)
        drawn = lengths(rng, spread, new)
        whole, left = np.concatenate([whole, drawn]), np.concatenate([left, drawn])
        begun, before = np.concatenate([begun, np.full(new, step)]), left.copy()
        seconds, made = sampling(left, places, GROUPS)
        done = (left == 0).all(1)
        trained = whole[done].sum()
        kept = ~done & (step + 1 - begun <= (staleness or 0))
        fresh = (before - left)[done].sum()
        untouched = ~done & (left == whole).all(1)
        begun[untouched] = step + 1
        kept |= untouched
        lost = (whole - left)[~done & ~kept].sum()
        sums += seconds, trained / GPUS / TOKENS_S, (trained - fresh) / trained, lost / made
        whole, left, begun = whole[kept], left[kept], begun[kept]
    return sums / steps


def main(args):
    table = Table("lengths", "", "sampling, s", "update, s", "step, s", "faster", "old tokens", "lost tokens")
    for name, spread in (("even", 0.3), ("usual", 0.8), ("long tail", 1.3)):
        base = None
        for staleness in (None, *args.staleness):
            seconds, update, old, lost = simulate(np.random.default_rng(0), spread, args.steps, staleness)
            base = base or seconds + update
            what = "wait" if staleness is None else f"--max_staleness {staleness}"
            times = f"{seconds:.1f}", f"{update:.1f}", f"{seconds + update:.1f}"
            table.add_row(name, what, *times, f"{base / (seconds + update):.2f}", f"{old:.0%}", f"{lost:.1%}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main(command_line(Args))
