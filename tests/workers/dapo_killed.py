"""DAPO that is killed in step 5, while it samples, by the signal that cannot be caught."""

import os
import signal
import sys

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import dapo

extend, steps = dapo.extend, []


def dying_extend(row, output, step):
    steps.append(step)
    if step > 4 and steps.count(step) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return extend(row, output, step)


dapo.extend = dying_extend
dapo.main(dapo.Args(**dapo.parse(dapo.Args)))
