"""The parts of gpu_check.py inside a process: MODEL ROWS DIRECTORY PROMPT_LENGTH RESPONSE_LENGTH.

Alone it samples rows, and writes them and worker.json. Under torchrun it writes to ranks.json the gradient
norms of these rows with one and with two copies of the sharded model.
"""

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import grpo
from algos.variants import load_loss
from data_prep.lib.cache import load_prompts
from data_prep.lib.images import load_processor
from system import batches, families
from system.batches import distribute, pad, token_logps
from system.ranks import leave, setup_distributed

PROMPTS, GROUP = 4, 4


def used():
    """GiB of the GPU that are taken, by whatever."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def step(policy, optimizer, rows, args):
    """An update with advantages 1 and -1 -> the gradient norm."""
    rows = [dict(row) for row in rows]
    for i, row in enumerate(rows):
        row["adv_t"] = np.full(row["length"], 1.0 - 2 * (i % 2), np.float32)
        row["mask_t"] = np.ones(row["length"], bool)
    args, token_loss = load_loss(args, clip=grpo.policy_loss)
    loss = partial(grpo.actor_loss, args, token_loss)
    mini_batches, _, _ = distribute(rows, 1, args.max_tokens_per_microbatch, policy.packed)
    return grpo.update_actor(policy, optimizer, mini_batches, loss, args)["actor/grad_norm"]


def norm(policy, rows, args):
    """The gradient norm, without an update."""
    return step(policy, torch.optim.SGD(policy.parameters(), lr=0.0), rows, args)


def layouts(args, config):
    """name -> the arguments with which a model has this layout."""
    found = {"padded": replace(args, attn_implementation="eager")}
    return found | ({} if families.special_layers(config) else {"one row": args})


@torch.no_grad()
def logps(policy, rows, args):
    return token_logps(policy, rows, args.temperature)[0].cpu()


@contextmanager
def without_borders():
    """Texts in one row as one text: a mistake."""
    one_row = batches.one_row

    def wrong(prompts, responses):
        inputs, where = one_row(prompts, responses)
        n = inputs["input_ids"].shape[1]
        whole = dict(kv_index=torch.arange(n), shapes=np.array([(n, n)]), longest=(n, n))
        whole |= dict(cu_seqlens=torch.tensor([[0, n]] * 2).int())
        return inputs | whole, where

    batches.one_row = wrong
    yield
    batches.one_row = one_row


def alone(args, train_files, work):
    device, mesh = setup_distributed()
    torch.zeros(1, device=device)
    empty, result = used(), dict(gaps={}, norms={})
    engine = grpo.build_engine(args, device)
    engine.wake_up()
    result["awake"] = used() - empty
    engine.sleep(level=2)
    result |= dict(asleep=used() - empty, total=torch.cuda.mem_get_info()[1] / 2**30 if used() else 0.0)

    load = lambda args: grpo.load_model(args, mesh, device, None, grpo.adapters_of(args))
    policy = load(replace(args, attn_implementation="eager"))
    tokenizer = load_processor(args.model)
    prompts = load_prompts([train_files], tokenizer, args.max_prompt_length)[0][:PROMPTS]
    sampling = dict(temperature=1.0, stop_token_ids=[tokenizer.eos_token_id])
    with grpo.awake(engine, [policy], None, args, {}):
        rows = grpo.rollout(engine, args, prompts, 1, GROUP, **sampling)
    keep = "prompt_ids response_ids rollout_logp_t prompt_length length rank group sample".split()
    kept = [{name: row[name] for name in keep} for row in rows]
    (work / "rows.json").write_text(json.dumps(kept, default=np.ndarray.tolist))

    logp_nt, models = {"sampler": pad([row["rollout_logp_t"] for row in rows])}, {}
    mask_nt = pad([np.ones(len(row["response_ids"]), bool) for row in rows])
    gap = lambda a_nt, b_nt: (a_nt - b_nt).abs()[mask_nt].mean().item()
    for name, of_layout in layouts(args, policy.lm.config).items():
        models[name] = load(of_layout)
        logp_nt[name], result["norms"][name] = logps(models[name], rows, args), norm(models[name], rows, args)
    for a, b in combinations(reversed(logp_nt), 2):
        result["gaps"][f"{a} : {b}"] = gap(logp_nt[a], logp_nt[b])
    with without_borders():
        result["borders"] = gap(logps(models.get("one row", policy), rows, args), logp_nt["padded"])

    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    before = step(policy, optimizer, rows, args)
    moments = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    result["owned"] = sum(x.to_local().nbytes for x in [*policy.parameters(), *moments]) / 2**30
    del moments  # the list would keep them on the GPU
    here = used()
    grpo.move("cpu", [policy], optimizer)
    result["freed"] = (here - used()) / result["owned"]
    grpo.move(device, [policy], optimizer)
    result["offloaded"] = step(policy, optimizer, rows, args), before
    optimizer.param_groups[0]["lr"] = 1e-3
    step(policy, optimizer, rows, args)
    result["stale"] = gap(logps(policy, rows, args), logp_nt["sampler"])
    (work / "worker.json").write_text(json.dumps(result))
    leave()


def together(args, work):
    device, _ = setup_distributed()
    rows, result = json.loads((work / "rows.json").read_text()), dict(layout="one row")
    for copies in (1, 2):
        shape = copies, dist.get_world_size() // copies
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if copies > 1 else mesh["shard"]
        policy = grpo.load_model(args, mesh, device, None, grpo.adapters_of(args))
        result[str(copies)] = norm(policy, rows, args)
    if dist.get_rank() == 0:
        (work / "ranks.json").write_text(json.dumps(result))
    leave()


def main(model, train_files, work, prompt_length, response_length):
    lengths = dict(max_prompt_length=2 * int(prompt_length), max_response_length=int(response_length))
    sizes = dict(group_size=GROUP, train_batch_size=PROMPTS, ppo_mini_batch_size=PROMPTS)
    args = grpo.Args(model=model, train_files=(), output_dir="", **lengths, **sizes)
    run = together if os.environ.get("RANK") else partial(alone, train_files=train_files)
    run(args, work=Path(work))


if __name__ == "__main__":
    main(*sys.argv[1:])
