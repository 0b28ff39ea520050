"""Sampler against trainer after an update, after sleep and wake, at two temperatures: MODEL TP_SIZE."""

import dataclasses
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from shared import gap

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import grpo
from system.ranks import leave

EOS = [1, *range(20, 50)]  # of the model's generation config


def sampled_gap(engine, policy, args, temperature):
    """Largest log-prob difference on sampled tokens."""
    prompts = [dict(prompt_ids=[8, 9, 10 + i], index=i) for i in range(3)]
    sampling = dict(temperature=temperature, max_tokens=12, stop_token_ids=[1])
    with grpo.awake(engine, [policy], None, args, {}):
        rows = grpo.rollout(engine, args, prompts * args.tp_size, 1, 1, **sampling)
    return gap(policy, rows, temperature)


def learn(policy, optimizer, response):
    """A step towards a response."""
    logp_nt, _ = grpo.token_logps(policy, [dict(prompt_ids=[8, 9, 10], response_ids=response)])
    (-logp_nt.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def forgets_to_merge(engine, lm, sees_images, sync_weights=grpo.sync_weights):
    layers = [m for m in lm.modules() if hasattr(m, "lora_A")]
    before = [layer.scaling["default"] for layer in layers]
    assert len(layers) == 2 * 7
    for layer in layers:
        layer.scaling["default"] = 0.0
    sync_weights(engine, lm, sees_images)
    for layer, scaling in zip(layers, before, strict=True):
        layer.scaling["default"] = scaling


def main(model, tp_size):
    device, mesh = grpo.setup_distributed(1)
    args = grpo.Args(model=model, train_files=(), output_dir="", tp_size=int(tp_size))
    args = dataclasses.replace(args, max_prompt_length=16, max_response_length=16)
    engine = grpo.build_engine(args, device)
    shared_memory = [*Path("/dev/shm").glob(f"{os.getppid()}-*")]
    assert not shared_memory, f"it would stay behind: {shared_memory}"
    policy = grpo.load_model(args, mesh, device, None, grpo.adapters_of(args))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)

    gaps = {"start": sampled_gap(engine, policy, args, 1.0)}
    learn(policy, optimizer, [20, 21, 22])
    sync_weights, grpo.sync_weights = grpo.sync_weights, lambda *_: None
    gaps["stale"] = sampled_gap(engine, policy, args, 1.0)
    grpo.sync_weights = sync_weights
    for temperature in (1.0, 0.7):
        gaps[f"synced {temperature}"] = sampled_gap(engine, policy, args, temperature)
    # more prompt tokens than vLLM takes in one step: no prompt may be cut, or its seed fails on a CPU
    many = [dict(prompt_ids=[8 + i // 20, 8 + i % 20] + [9] * 14, index=i) for i in range(300)]
    with grpo.awake(engine, [policy], None, args, {}):
        rows = grpo.rollout(engine, args, many, 1, 1, temperature=1.0, max_tokens=1)
        ended = grpo.rollout(engine, args, many, 1, 1, temperature=1.0, max_tokens=16)
    assert len(rows) == 300 // dist.get_world_size()
    # every EOS token of the model's generation config ends a response
    ends = {row["response_ids"][-1] for row in ended if row["finish_reason"] == "stop"}
    assert len(ends) > 5 and ends <= set(EOS)
    assert not any(set(EOS) & set(row["response_ids"][:-1]) for row in ended)
    # adapters, after a step that gives them something to say
    adapted = dataclasses.replace(args, lora_rank=4)
    policy = grpo.load_model(adapted, mesh, device, None, grpo.adapters_of(adapted))
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        learn(policy, optimizer, [30, 31, 32])
    gaps["LoRA"] = sampled_gap(engine, policy, args, 1.0)
    grpo.sync_weights = forgets_to_merge
    gaps["not merged"] = sampled_gap(engine, policy, args, 1.0)
    if dist.get_rank() == 0:
        print("GAPS", gaps)
    assert gaps.pop("stale") > 0.05, gaps
    assert gaps.pop("not merged") > 0.05, gaps
    assert max(gaps.values()) < 1e-4, gaps
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
