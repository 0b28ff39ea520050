"""REINFORCE++ with baseline (arXiv 2501.03262)."""

from algos.variants import members


def reinforce_plus_plus_baseline(score_n, group_n, length_n, parts):
    """A = s - mean_g, then with mean 0 and variance 1 over all tokens of the batch.

    Two groups with scores 1 0 and 1 0, one token each -> 0.87 -0.87 0.87 -0.87. A group of one has mean 0.
    """
    adv_n = score_n.clone()
    for member in members(group_n):
        if len(member) > 1:
            adv_n[member] -= score_n[member].mean()
    adv_n = adv_n - (adv_n * length_n).sum() / length_n.sum()
    variance = (adv_n**2 * length_n).sum() / (length_n.sum() - 1).clamp(min=1)
    return adv_n * (variance + 1e-8).rsqrt()  # eq: grpo.whiten
