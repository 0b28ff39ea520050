"""The parts of gpu_check.py inside a process: MODEL ROWS DIRECTORY PROMPT_LENGTH RESPONSE_LENGTH.

Alone it samples rows, and writes them and worker.json. Under torchrun it writes to ranks.json the gradient
norms of these rows with one and with two copies of the sharded model.
"""

import json
import os
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import grpo
from benchmarks.lib.update import grpo_args, load_policy, update
from data_prep.lib.cache import load_prompts
from data_prep.lib.images import load_processor
from system.batches import pad, token_logps
from system.ranks import leave, setup_distributed

PROMPTS = 4
GROUP = 4
KEPT = "prompt_ids response_ids rollout_logp_t prompt_length length rank group sample".split()


def used():
    """GiB of the GPU that are taken, by whatever."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def norm(policy, rows, args, optimizer=None):
    """The gradient norm of an update, by default one that changes nothing."""
    optimizer = optimizer or torch.optim.SGD(policy.parameters(), lr=0.0)
    return update(policy, optimizer, rows, args)["actor/grad_norm"]


@torch.no_grad()
def logps(policy, rows, args):
    return token_logps(policy, rows, args.temperature)[0].cpu()


def start_engine(args, device):
    """A sleeping sampler, and the memory that it takes."""
    torch.zeros(1, device=device)
    empty = used()
    engine = grpo.build_engine(args, device)
    engine.wake_up()
    awake = used() - empty
    engine.sleep(level=2)
    found = dict(awake=awake, asleep=used() - empty)
    if torch.cuda.is_available():
        found["total"] = torch.cuda.mem_get_info()[1] / 2**30
    return engine, found


def sample(engine, policy, args, train_files):
    """Rows of the first prompts of a file."""
    tokenizer = load_processor(args.model)
    prompts, _ = load_prompts([train_files], tokenizer, args.max_prompt_length)
    sampling = dict(temperature=1.0, stop_token_ids=[tokenizer.eos_token_id])
    with grpo.awake(engine, [policy], None, args, {}):
        return grpo.rollout(engine, args, prompts[:PROMPTS], 1, GROUP, **sampling)


def alone(args, work, train_files):
    device, mesh = setup_distributed()
    engine, result = start_engine(args, device)
    padded = load_policy(replace(args, attn_implementation="eager"), mesh, device)
    rows = sample(engine, padded, args, train_files)
    kept = [{name: row[name] for name in KEPT} for row in rows]
    (work / "rows.json").write_text(json.dumps(kept, default=np.ndarray.tolist))

    # ---- log-probs and gradients
    policies = dict(padded=padded)
    own = load_policy(args, mesh, device)
    if own.packed:
        policies["one row"] = own
    logp_nt = dict(sampler=pad([row["rollout_logp_t"] for row in rows]))
    mask_nt = pad([row["mask_t"] for row in rows])

    def gap(a_nt, b_nt):
        return (a_nt - b_nt).abs()[mask_nt].mean().item()

    result |= dict(norms={}, gaps={})
    for name, policy in policies.items():
        logp_nt[name] = logps(policy, rows, args)
        result["norms"][name] = norm(policy, rows, args)
    for a, b in combinations(reversed(logp_nt), 2):
        result["gaps"][f"{a} against {b}"] = gap(logp_nt[a], logp_nt[b])

    # ---- --offload, and an update that the sampler has not seen
    optimizer = torch.optim.AdamW(padded.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    result["onloaded"] = norm(padded, rows, args, optimizer)
    owned = sum(p.to_local().nbytes for p in padded.parameters())
    for state in optimizer.state.values():
        owned += sum(x.to_local().nbytes for x in state.values() if x.dim())
    result["owned"] = owned / 2**30
    here = used()
    grpo.move("cpu", [padded], optimizer)
    result["freed"] = (here - used()) / result["owned"]
    grpo.move(device, [padded], optimizer)
    result["offloaded"] = norm(padded, rows, args, optimizer)
    optimizer.param_groups[0]["lr"] = 1e-3
    norm(padded, rows, args, optimizer)
    result["stale"] = gap(logps(padded, rows, args), logp_nt["sampler"])
    (work / "worker.json").write_text(json.dumps(result))
    leave()


def together(args, work):
    device, _ = setup_distributed()
    rows = json.loads((work / "rows.json").read_text())
    result = {}
    for copies in (1, 2):
        shape = copies, dist.get_world_size() // copies
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        if copies == 1:
            mesh = mesh["shard"]
        result[str(copies)] = norm(load_policy(args, mesh, device), rows, args)
    if dist.get_rank() == 0:
        (work / "ranks.json").write_text(json.dumps(result))
    leave()


def main(model, train_files, work, prompt_length, response_length):
    args = grpo_args(
        model,
        max_prompt_length=2 * int(prompt_length),
        max_response_length=int(response_length),
        group_size=GROUP,
        train_batch_size=PROMPTS,
        ppo_mini_batch_size=PROMPTS,
    )
    if "RANK" in os.environ:
        together(args, Path(work))
    else:
        alone(args, Path(work), train_files)


if __name__ == "__main__":
    main(*sys.argv[1:])
