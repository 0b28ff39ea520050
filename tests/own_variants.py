"""A user's policy loss and advantage estimator, taken by FILE.py:NAME."""

import torch

from algos.variants.gdpo import gdpo


def reinforce(logp_nt, old_logp_nt, adv_nt, mask_nt, clip_high=0.7, loss_agg="seq-mean-token-sum"):
    """Says that all tokens were clipped, by which its run is known."""
    return -adv_nt * logp_nt, torch.ones_like(logp_nt), torch.zeros_like(logp_nt)


def twice_gdpo(score_n, group_n, length_n, parts):
    return 2 * gdpo(score_n, group_n, length_n, parts)
