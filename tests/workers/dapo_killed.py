"""DAPO that dies after step 3, between the first and the second generation batch of a step.

With --partial_rollout it is killed while it samples, by the signal that cannot be caught.
"""

import os
import signal
import sys

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import dapo

rollout, extend, steps = dapo.rollout, dapo.extend, []


def dying_rollout(engine, args, prompts, step, *rest, **sampling):
    steps.append(step)
    if step > 3 and steps.count(step) == 2:
        os._exit(9)
    return rollout(engine, args, prompts, step, *rest, **sampling)


def dying_extend(row, output, step):
    steps.append(step)
    if step > 4 and steps.count(step) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return extend(row, output, step)


dapo.rollout, dapo.extend = dying_rollout, dying_extend
dapo.main(dapo.Args(**dapo.parse(dapo.Args)))
