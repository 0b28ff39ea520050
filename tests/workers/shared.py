"""What workers share: fixed rows, adapters that say something, an optimizer that keeps its gradients."""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from system.batches import token_logps
from system.ranks import leave

# tokens of the prompts and of three responses to each: very unequal
LENGTHS = {5: (40, 1, 2), 60: (3, 25, 7)}


def make_rows():
    """The rows of a step, on every rank all of them."""
    generator, rows = torch.Generator().manual_seed(0), []
    for group, (prompt, responses) in enumerate(LENGTHS.items()):
        prompt_ids = torch.randint(6, 100, (prompt,), generator=generator).tolist()
        for n in responses:
            ids = torch.randint(6, 100, (n,), generator=generator).tolist()
            logp_t = -4.6 + 0.3 * torch.randn(n, generator=generator)
            row = dict(prompt_ids=prompt_ids, response_ids=ids, rollout_logp_t=logp_t, group=group)
            row |= dict(mask_t=np.ones(n, bool), ref_logp_t=logp_t - 0.1, old_logp_t=logp_t + 0.05)
            row |= dict(prompt_length=prompt, length=n, rank=len(rows) % dist.get_world_size())
            rows.append(row | dict(finish_reason="stop"))
    for row, adv in zip(rows, torch.randn(len(rows), generator=generator)):
        row["adv_t"] = adv.expand(row["length"])
    return rows


def full(x):
    return x.full_tensor().clone() if isinstance(x, DTensor) else x.clone()


class Capture(torch.optim.SGD):
    """Keeps the gradient of the step, and does not move."""

    def step(self):
        self.grads = [full(p.grad) for group in self.param_groups for p in group["params"]]


def trained(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def fill_adapters(lm):
    """Matrices that are 0 at first become random: else the others would get no gradient."""
    generator = torch.Generator().manual_seed(1)
    adaptive = any(".lora_E" in name for name, _ in lm.named_parameters())
    for name, p in lm.named_parameters():
        if ".lora_B" in name or (adaptive and ".lora_" in name):
            x = torch.empty(p.shape).normal_(0, 0.2 if adaptive else 0.02, generator=generator)
            p.data.copy_(distribute_tensor(x, p.device_mesh, p.placements) if isinstance(p, DTensor) else x)


def gap(policy, rows, temperature):
    """Largest difference of the log-probs of sampled tokens, sampler against trainer."""
    with torch.no_grad():
        logp_nt, _ = token_logps(policy, rows, temperature)
    ours = torch.cat([logp_t[: row["length"]] for row, logp_t in zip(rows, logp_nt)])
    return (ours - torch.cat([torch.from_numpy(row["rollout_logp_t"]) for row in rows])).abs().max().item()


def plain_logps(lm, prompt_ids, response_ids, temperature=1.0):
    """Log-probs of all tokens at the places of a response, [T, V], by the logits of its text alone."""
    ids = torch.tensor([prompt_ids + response_ids])
    logits = lm(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def clipped_loss(ratio_t, adv_t, low, high):
    """The clipped loss of each token, with the dual clip at 3."""
    loss_t = torch.maximum(-ratio_t * adv_t, -ratio_t.clamp(low, high) * adv_t)
    return torch.where(adv_t < 0, torch.minimum(loss_t, -3.0 * adv_t), loss_t)


def save(results, out):
    """Write the results of the first rank, and end."""
    if dist.get_rank() == 0:
        torch.save(results, out)
    leave()


def norm(grads):
    return torch.stack([g.norm() for g in grads]).norm().item()


def distance(a, b):
    """Relative difference of two gradients, over the norm of all parameters."""
    return norm([x - y for x, y in zip(a, b, strict=True)]) / norm(b)
