"""MaxRL (arXiv 2602.02710), for scores from 0 to 1."""

from algos.variants import members
from system.arguments import fail


def maxrl(score_n, group_n, length_n, parts):
    """A = (s - mean_g) / mean_g, 0 where the mean is 0. Scores 1 0 0 0 -> 3 -1 -1 -1."""
    if (score_n < 0).any():
        fail(f"--adv_estimator maxrl is for scores from 0 to 1, and one is {score_n.min():g}: use rloo")
    adv_n = score_n.clone()
    for member in members(group_n):
        s = score_n[member]
        centred = (s - s[0]) - (s - s[0]).mean()  # so that a constant group has exactly 0
        adv_n[member] = centred / s.mean() if s.any() else 0.0  # eq: grpo.maxrl
    return adv_n
