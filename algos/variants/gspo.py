"""GSPO (Zheng et al. 2025, arXiv 2507.18071)."""

import torch

DUAL_CLIP = 3.0  # as in grpo.py


def gspo(
    logp_nt, old_logp_nt, adv_nt, mask_nt, clip_low=3e-4, clip_high=4e-4, loss_agg="seq-mean-token-mean"
):
    """The clipped loss of grpo.py with one ratio a response: e to the mean of its log-ratios (eq. 14).

    Log-ratios 0.1 and 0.3 of a response: both tokens have the ratio e^0.2, each its own gradient.
    """
    d_nt = (logp_nt - old_logp_nt).detach() * mask_nt
    mean_n1 = d_nt.sum(-1, keepdim=True) / mask_nt.sum(-1, keepdim=True).clamp(min=1)
    ratio_nt = (logp_nt - logp_nt.detach() + mean_n1).clamp(-20, 20).exp()
    plain_nt = -ratio_nt * adv_nt
    clip_nt = -ratio_nt.clamp(1 - clip_low, 1 + clip_high) * adv_nt
    loss_nt = torch.maximum(plain_nt, clip_nt)  # eq: grpo.gspo
    dual_nt = -DUAL_CLIP * adv_nt
    lower_nt = (adv_nt < 0) & (loss_nt > dual_nt)
    return torch.where(lower_nt, dual_nt, loss_nt), clip_nt > plain_nt, lower_nt
