"""CISPO (MiniMax-M1, arXiv 2506.13585); with these clips as in ScaleRL (2510.13786), ratios from 0 to 5."""

import torch


def cispo(logp_nt, old_logp_nt, adv_nt, mask_nt, clip_low=1.0, clip_high=4.0):
    """-sg(clip(r, 1 - low, 1 + high)) A log p: no token loses its gradient (eq. 4).

    A = 1, log p = -2, r = 6, high = 4 -> 10, clipped.
    """
    ratio_nt = (logp_nt - old_logp_nt).detach().exp()
    clip_nt = ratio_nt.clamp(1 - clip_low, 1 + clip_high)
    return -clip_nt * adv_nt * logp_nt, clip_nt != ratio_nt, torch.zeros_like(clip_nt)  # eq: grpo.cispo
