"""SAPO (arXiv 2511.20347)."""

import torch

TAU = 1.0, 1.05  # steepness of the gate where the advantage is positive, and where it is not


def sapo(logp_nt, old_logp_nt, adv_nt, mask_nt, loss_agg="seq-mean-token-mean"):
    """-A sigma(tau (r - 1)) 4 / tau: a gate that closes slowly, no clip (eq. 5).

    A = 1, tau = 1, r = 1 -> -2, with the slope of r.
    """
    ratio_nt = (logp_nt - old_logp_nt).clamp(-20, 20).exp()
    tau_nt = torch.where(adv_nt > 0, *TAU)
    loss_nt = -adv_nt * torch.sigmoid(tau_nt * (ratio_nt - 1)) * 4 / tau_nt  # eq: grpo.sapo
    return loss_nt, torch.zeros_like(loss_nt), torch.zeros_like(loss_nt)
