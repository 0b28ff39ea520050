"""GRPO whose sampler gets other weights in step 3."""

import sys

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import grpo


def change(model):
    next(model.parameters()).data.mul_(1.5)


def broken(engine, args, prompts, step, *rest, rollout=grpo.rollout, **sampling):
    if step == 3:
        engine.apply_model(change)
    return rollout(engine, args, prompts, step, *rest, **sampling)


grpo.rollout = broken
grpo.main(grpo.Args(**grpo.parse(grpo.Args)))
