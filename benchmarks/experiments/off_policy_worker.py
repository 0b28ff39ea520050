"""A script of algos/ whose training samples with older or rounded weights: ALGO LAG NOISE FLAGS ...

LAG: steps by which the sampler's weights are behind; each rank keeps LAG + 1 copies of its shards in host
memory. NOISE: int8, fp8 or none: what every matrix is rounded to. Validation has exact and current weights.
"""

import importlib
import math
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def rounded(x, kind):
    """A matrix as int8 or fp8 (e4m3) holds it, with a scale for each output channel, which is a row.

    int8, row 127 -63.6 0.4 -> 127 -64 0.
    """
    largest = dict(int8=127, fp8=448)[kind]
    scale = (x.abs().amax(-1, keepdim=True).float() / largest).clamp(min=1e-30)
    y = x / scale
    return ((y.round() if kind == "int8" else y.to(torch.float8_e4m3fn).float()) * scale).to(x.dtype)


def change_sampler(algo, lag, noise, training):
    """Let training rollouts of a script sample with the weights of `lag` training steps ago, rounded.

    training: whether its first rollout is one of training. The first `lag` steps have the first weights.
    """
    sync_weights, log, history = algo.sync_weights, algo.Run.log, []
    # it differs on purpose; NaN still stops
    algo.families.rounding_limit = lambda *_: (math.inf, False)

    def sync(engine, lm, args):
        nonlocal training
        if not training:
            return sync_weights(engine, lm, args)
        training = False  # a second rollout of a step is its validation
        shards = [x.to_local() if isinstance(x, DTensor) else x for x in lm.state_dict().values()]
        history.append([x.to("cpu", copy=True) for x in shards])
        del history[: -lag - 1]
        for x, old in zip(shards, history[0]):
            x.copy_(rounded(old, noise) if noise and x.dim() > 1 else old)
        sync_weights(engine, lm, args)
        for x, current in zip(shards, history[-1]):
            x.copy_(current)

    def count(self, *args, **shown):
        nonlocal training
        training = True  # a line of metrics ends a step
        log(self, *args, **shown)

    algo.sync_weights, algo.Run.log = sync, count


def main(name, lag, noise):
    algo = importlib.import_module(f"algos.{name}")
    args = algo.Args(**algo.parse(algo.Args))
    if Path(args.output_dir, "checkpoints/latest").exists():
        sys.exit(f"error: {args.output_dir}: no checkpoint has the weights of earlier steps: begin again")
    change_sampler(algo, int(lag), None if noise == "none" else noise, training=not args.val_files)
    algo.main(args)


if __name__ == "__main__":
    own = sys.argv[1:4]
    del sys.argv[1:4]
    main(*own)
