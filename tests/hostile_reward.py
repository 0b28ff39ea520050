"""A reward that hangs, ends its process or raises, as the response says. Its process loads no torch."""

import os
import time

import numpy as np


def hostile_reward(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        while True:
            time.sleep(1)
    if solution_str == "crash":
        os._exit(1)
    if solution_str == "raise":
        raise ValueError("broken")
    return {"score": float(solution_str), "acc": True, "pred": np.float32(2)}
