"""DAPO that dies after step 3, between the first and the second generation batch of a step."""

import os
import sys

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import dapo

rollout, steps = dapo.rollout, []


def dying_rollout(engine, args, timing, prompts, step, *rest, **sampling):
    steps.append(step)
    if step > 3 and steps.count(step) == 2:
        os._exit(9)
    return rollout(engine, args, timing, prompts, step, *rest, **sampling)


dapo.rollout = dying_rollout
dapo.main(dapo.Args(**dapo.parse(dapo.Args)))
