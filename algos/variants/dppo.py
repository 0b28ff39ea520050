"""DPPO with binary total variation (arXiv 2602.04879)."""

import torch

MAX_RATIO = 20.0  # of new to old policy, as a weight


def dppo(logp_nt, old_logp_nt, adv_nt, mask_nt, clip_low=0.15, clip_high=0.15):
    """-sg(min(r, 20)) A log p, without tokens whose probability, not its ratio, has moved too far.

    A = 1, p_old = 0.5, high = 0.15: p = 0.6 -> -1.2 log 0.6; p = 0.7 -> 0, clipped.
    """
    ratio_nt = (logp_nt - old_logp_nt).detach().exp().clamp(max=MAX_RATIO)
    moved_nt = logp_nt.exp() - old_logp_nt.exp()
    far_nt = torch.where(adv_nt > 0, moved_nt > clip_high, moved_nt < -clip_low)
    loss_nt = -ratio_nt * adv_nt * logp_nt.where(~far_nt, 0.0)  # eq: grpo.dppo
    return loss_nt, far_nt, torch.zeros_like(loss_nt)
