"""An update of grpo.py on given rows, which gpu_check.py and gpu_bench.py try and measure."""

from functools import partial

import numpy as np

from algos import grpo
from algos.variants import load_loss
from system.batches import distribute


def grpo_args(model, **flags):
    return grpo.Args(model=str(model), train_files=(), output_dir="", **flags)


def load_policy(args, mesh, device):
    return grpo.load_model(args, mesh, device, None, grpo.adapters_of(args))


def update(policy, optimizer, rows, args):
    """Update with advantages 1 and -1; the rows get no old log-probs -> metrics."""
    rows = [dict(row) for row in rows]
    for i, row in enumerate(rows):
        row["adv_t"] = np.full(row["length"], 1.0 - 2 * (i % 2), np.float32)
        row["mask_t"] = np.ones(row["length"], bool)
    args, token_loss = load_loss(args, clip=grpo.policy_loss)
    loss = partial(grpo.actor_loss, args, token_loss)
    mini_batches, _, _ = distribute(rows, 1, args.max_tokens_per_microbatch, policy.packed)
    return grpo.update_actor(policy, optimizer, mini_batches, loss, args)
