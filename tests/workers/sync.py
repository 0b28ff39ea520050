"""Sampler against trainer after an update, after sleep and wake, at two temperatures: MODEL TP_SIZE."""

import dataclasses
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import grpo


def gap(engine, policy, args, temperature):
    """Largest log-prob difference on sampled tokens."""
    prompts = [[8, 9, 10 + i] for i in range(3)]
    rows = [dict(prompt_ids=p, index=i, sample=0) for i, p in enumerate(prompts)]
    rows = grpo.generate(engine, rows, args, [1], 1, temperature=temperature, max_tokens=12)
    with torch.no_grad():
        responses = [row["response_ids"] for row in rows]
        logp_nt, _ = grpo.token_logps(policy, prompts, responses, temperature, grpo.padded)
    rollout = torch.tensor([x for row in rows for x in row["rollout_logps"]])
    return (logp_nt[grpo.response_mask([len(r) for r in responses])] - rollout).abs().max().item()


def main(model, tp_size):
    device, mesh = grpo.setup_distributed(1)
    args = grpo.Args(model=model, train_files=(), output_dir="", tp_size=int(tp_size))
    args = dataclasses.replace(args, max_prompt_length=16, max_response_length=16)
    engine = grpo.build_engine(args, device)
    policy = grpo.load_model(args, mesh, device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)

    def wake():
        engine.wake_up(tags=["weights"])
        grpo.sync_weights(engine, policy.lm)
        engine.wake_up(tags=["kv_cache"])

    wake()
    gaps = {"start": gap(engine, policy, args, 1.0)}
    logp_nt, _ = grpo.token_logps(policy, [[8, 9, 10]], [[20, 21, 22]], 1.0, grpo.padded)
    (-logp_nt.sum()).backward()
    optimizer.step()
    gaps["stale"] = gap(engine, policy, args, 1.0)
    engine.sleep(level=2)
    wake()
    for temperature in (1.0, 0.7):
        gaps[f"synced {temperature}"] = gap(engine, policy, args, temperature)
    # more prompt tokens than vLLM takes in one step: no prompt may be cut, or its seed fails on a CPU
    many = [dict(prompt_ids=[8 + i // 20, 8 + i % 20] + [9] * 21, index=i, sample=0) for i in range(300)]
    assert len(grpo.generate(engine, many, args, [1], 1, temperature=1.0, max_tokens=1)) == 300
    if dist.get_rank() == 0:
        print("GAPS", gaps)
    assert gaps.pop("stale") > 0.05, gaps
    assert max(gaps.values()) < 1e-4, gaps
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
