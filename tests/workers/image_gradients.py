"""Gradients of rows with two images, one and none, for ways to cut the work: MODEL FILE OUT; FILE has images.

Three optimizer steps of GRPO, and of SFT: of two ranks one has no image in the first, none in the second.
"""

import dataclasses
import io
import sys
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from shared import clipped_loss, full
from transformers import AutoModelForImageTextToText, AutoProcessor

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import grpo, sft
from data_prep.lib.images import encode_prompt
from system.ranks import leave

# (images, characters of the prompt, tokens of the response) of each row
STEPS = [[(1, 90, 4), (0, 60, 9), (0, 50, 2)], [(0, 30, 2)] * 3, [(0, 9, 3), (2, 5, 7), (1, 20, 1)]]


def picture(seed):
    pixels = torch.randint(256, (40 * 24 * 3,), generator=torch.Generator().manual_seed(seed))
    Image.frombytes("RGB", (40, 24), bytes(pixels.tolist())).save(file := io.BytesIO(), "PNG")
    return dict(bytes=file.getvalue(), path=None)


def make_rows(model):
    processor, generator, rows = grpo.load_processor(model, sees=True), torch.Generator().manual_seed(0), []
    for group, step in enumerate(STEPS):
        for images, size, n in step:
            row = dict(images=[picture(len(rows) + 10 * i) for i in range(images)])
            row["prompt"] = [dict(role="user", content="<image>" * images + "a" * size)]
            row |= encode_prompt(row, processor)
            ids = torch.randint(6, 100, (n,), generator=generator).tolist()
            logp_t = -4.6 + 0.3 * torch.randn(n, generator=generator)
            row |= dict(response_ids=ids, rollout_logp_t=logp_t, old_logp_t=logp_t + 0.05, group=group)
            row |= dict(mask_t=np.ones(n, bool), finish_reason="stop")
            row |= dict(prompt_length=len(row["prompt_ids"]), length=n)
            row |= dict(rank=len(rows) % dist.get_world_size(), trained=[True] * n)
            rows.append(row)
    for row, adv in zip(rows, torch.randn(len(rows), generator=generator)):
        row["adv_t"] = adv.expand(row["length"])
    return rows


class Capture(torch.optim.SGD):
    """Keeps the gradients of all steps, and takes none."""

    def step(self):
        grads = {name: full(p.grad) for name, p in self.names.items()}
        self.grads = [*getattr(self, "grads", []), grads]


def capture(policy):
    optimizer = Capture(policy.parameters(), lr=1.0)
    optimizer.names = dict(policy.lm.named_parameters())
    return optimizer


def naive(args, kind):
    """A row after the other through transformers' model and processor; no code of the scripts."""
    rows = make_rows(args.model)
    lm, processor = (x.from_pretrained(args.model) for x in (AutoModelForImageTextToText, AutoProcessor))
    found = []
    for step in range(3):
        some = [i for i, row in enumerate(rows) if row["group"] == step]
        tokens, loss = sum(rows[i]["length"] for i in some), 0.0
        for i in some:
            row, prompt = rows[i], rows[i]["prompt"][0]["content"]
            pictures = [Image.open(io.BytesIO(image["bytes"])) for image in row["images"]] or None
            given = processor(text=[f"<|user|>{prompt}<|assistant|>"], images=pictures, return_tensors="pt")
            ids = torch.cat([given.pop("input_ids"), torch.tensor([row["response_ids"]])], 1)
            given.pop("attention_mask")
            logits = lm(input_ids=ids, **given).logits[0, -1 - row["length"] : -1] / args.temperature
            logits[:, processor.image_token_id] = -1e4
            all_logps = logits.log_softmax(-1)
            logp = all_logps[range(row["length"]), row["response_ids"]]
            if kind == "sft":
                loss = loss - logp.sum() / tokens
                continue
            old, theirs = row["old_logp_t"], row["rollout_logp_t"]
            pg = clipped_loss((logp - old).exp(), row["adv_t"], 0.8, 1.2)
            entropy = -(all_logps.exp() * all_logps).sum(-1)
            pg = pg * (old - theirs).exp().clamp(max=2.0) - args.entropy_coeff * entropy
            loss = loss + pg.sum() / tokens
        lm.zero_grad()
        loss.backward()
        found.append({name: x.grad.clone() for name, x in lm.named_parameters() if x.grad is not None})
    return found


def main(model, file, out):
    device, mesh = grpo.setup_distributed(1)
    how = dict(model=model, train_files=(file,), output_dir="", attn_implementation="sdpa")
    args = grpo.Args(**how, entropy_coeff=0.01, group_size=3, ppo_mini_batch_size=1, temperature=0.7)
    args = dataclasses.replace(args, grad_clip=1e9, gradient_checkpointing="full")
    args, token_loss = grpo.load_loss(args, clip=grpo.policy_loss)
    loss = partial(grpo.actor_loss, args, token_loss)
    processor = grpo.load_processor(model, sees=True)
    sft_args = sft.Args(**how, grad_clip=1e9)
    results = {}
    policy = grpo.load_model(args, mesh, device, processor, grpo.adapters_of(args))
    plain = sft.load_model(sft_args, mesh, device, processor)
    sft.check_layout(plain, make_rows(model), sft_args)  # the model's own logits have none of images, too
    for budget in (10, 170, 100_000):
        rows, some = make_rows(model), dataclasses.replace(args, max_tokens_per_microbatch=budget)
        mini_batches, _, _ = grpo.distribute(rows, 3, budget, policy.packed)
        optimizer = capture(policy)
        grpo.update_actor(policy, optimizer, mini_batches, loss, some)
        results["grpo", budget] = optimizer.grads
        some, optimizer = dataclasses.replace(sft_args, max_tokens_per_microbatch=budget), capture(plain)
        for step in range(3):
            sft.update(plain, optimizer, [row for row in rows if row["group"] == step], some)
        results["sft", budget] = optimizer.grads
    if dist.get_rank() == 0:
        if dist.get_world_size() == 1:
            results["grpo", "naive"] = naive(args, "grpo")
            results["sft", "naive"] = naive(dataclasses.replace(args, temperature=1.0), "sft")
        torch.save(results, out)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
