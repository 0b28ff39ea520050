r"""Geometry3K: 0.9 for a correct answer in the last \boxed{}, and 0.1 for the format.

The format: the response begins with a thought, and a \boxed{...} follows it. A thought gives no answer.
"""

from rewards.boxed import last_boxed
from rewards.mathematics.equivalence import judge
from system.thoughts import OPENING, reply_of


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score: 1.0 | 0.9 | 0.1 | 0.0, acc, pred, format}."""
    reply = reply_of(solution_str)
    _, _, box = reply.partition("\\boxed{")
    has_format = bool(OPENING.match(solution_str)) and "}" in box
    result = judge(last_boxed(reply), ground_truth)
    return {**result, "score": round(0.9 * result["acc"] + 0.1 * has_format, 1), "format": has_format}
