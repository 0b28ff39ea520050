"""A penalty of length relative to the correct responses of the group (Arora and Zanette, arXiv 2502.04463).

--reward_fn rewards rewards/length.py:score --reward_weights 1 0.2

The score of a correct response is -sigmoid((length - mean) / std): near 0 for a short one, -1 for a long one.
Mean and std are those of the correct responses to the prompt. A wrong response has 0: a short wrong answer
gains nothing, and with a weight below 1 a correct response stays better than a wrong one.
A response is correct if the rewards before it in --reward_fn gave `acc` 1, or where a single
one gives no `acc`, if its own score is 1. Several without `acc` are refused.
Lengths are in characters; in a conversation those of the last turn.
"""

import math
import statistics


def score(solution_strs, results, **_):
    """results: those of the rewards before it.

    Correct, with 10 and 30 characters: -0.27 and -0.73; wrong: 0. A single correct one: -0.5.
    """
    correct = [is_correct(result) for result in results]
    lengths = [len(text) for text, good in zip(solution_strs, correct, strict=True) if good] or [0]
    mean = statistics.fmean(lengths)
    std = statistics.pstdev(lengths)
    penalties = []
    for text, good in zip(solution_strs, correct, strict=True):
        z = (len(text) - mean) / (std + 1e-6)
        penalties.append(-1 / (1 + math.exp(-z)) if good else 0.0)
    return penalties


def is_correct(result):
    if "acc" in result or "failure" in result:
        return result.get("acc", 0) >= 1 and "failure" not in result
    scores = [x for name, x in result.items() if name.startswith("score/")] or [result["score"]]
    if len(scores) > 1:
        raise ValueError(
            "several rewards before rewards/length.py and no `acc`: nothing says what is correct"
        )
    return scores[0] >= 1
