"""GDPO (arXiv 2601.05242): no reward hides in the spread of another."""

import torch

from algos.variants import members


def gdpo(score_n, group_n, length_n, parts):
    """The advantages of grpo.py for each reward, weighted and summed (eq. 4 to 6), then with variance 1.

    One group, weights 1 and 1, scores 1 0 and 0 10 -> 0 0: both rewards count as much. Groups of one have
    the batch's mean as baseline: 1 1 0 1 -> 0.5 0.5 -1.5 0.5.
    """
    groups = members(group_n)
    sum_n = torch.zeros(len(group_n), dtype=torch.float64)
    for weight, scores in parts:
        score_n = torch.tensor(scores, dtype=torch.float64)
        for member in groups:
            s = score_n[member]
            if len(s) > 1:
                s = s - s[0]  # so that a constant group has exactly 0
                s = (s - s.mean()) / (s.std() + 1e-6)
            sum_n[member] += weight * s
    if any(len(member) == 1 for member in groups):  # else the mean is 0, as in each group
        sum_n = sum_n - sum_n.mean()
    variance = (sum_n**2).sum() / max(len(sum_n) - 1, 1)
    return sum_n * (variance + 1e-8).rsqrt()  # eq: grpo.gdpo
