"""NuminaMath: 1 if the response's final answer equals the ground truth, else 0, as in `rewards.math_verify`.

(verl's scorer of this name refuses unreduced fractions, and takes 600 or 0.06 for 6.)
"""

from rewards import math_verify


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score, acc, pred}; see `rewards.math_verify.compute_score`."""
    return math_verify.compute_score(data_source, solution_str, ground_truth, extra_info)
