r"""MATH: 1 if the last \boxed{} of the response equals the ground truth, else 0.

A thought gives no answer.  The rules of equality: mathematics/equivalence.py.
"""

from rewards import math_verify
from rewards.boxed import last_boxed
from rewards.mathematics.equivalence import judge
from system.thoughts import reply_of


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score, acc, pred}.  With `extra_info["use_math_verify"]` an answer needs no box.

    A ground truth that is no formula equals only its own spelling.
    """
    if (extra_info or {}).get("use_math_verify"):
        return math_verify.compute_score(data_source, solution_str, ground_truth, extra_info)
    return judge(last_boxed(reply_of(solution_str)), ground_truth)
