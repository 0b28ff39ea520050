"""The parts of gpu_check.py inside a process: MODEL ROWS DIRECTORY PROMPT_LENGTH RESPONSE_LENGTH.

Alone it samples rows, and writes them and worker.json. Under torchrun it writes to ranks.json the gradient
norms of these rows with one and with two copies of the sharded model.
"""

import dataclasses
import json
import sys
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos import grpo
from data_prep.cache import load_prompts

PROMPTS, GROUP = 4, 4
FLASH = "flash_attention_2"


def used():
    """GiB of the GPU that are taken, by whatever."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def step(policy, optimizer, rows, args, device):
    """An update with advantages 1 and -1 -> the gradient norm."""
    adv_n = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(rows) // 2)
    batch, _ = grpo.make_batch(rows, adv_n, args, device)
    return grpo.update_actor(policy, optimizer, batch, args)[0]["actor/grad_norm"]


def norm(policy, rows, args, device):
    """The gradient norm, without an update."""
    return step(policy, torch.optim.SGD(policy.parameters(), lr=0.0), rows, args, device)


def layouts(config, args):
    """name -> layout, attention of the model, the argument that makes the trainer take this layout."""
    found = {"padded": (grpo.padded, "sdpa", "sdpa")}
    if not grpo.recurrent(config):
        found["packed"] = grpo.packed, "sdpa", FLASH  # by a mask that transformers makes of position ids
    if (
        grpo.share_prefixes(dataclasses.replace(args, attn_implementation="sdpa")).attn_implementation
        == "shared"
    ):
        found["shared"] = grpo.shared, "shared", "shared"
    if args.attn_implementation == FLASH:
        found |= {"padded flash": (grpo.padded, FLASH, "sdpa"), "packed flash": (grpo.packed, FLASH, FLASH)}
    return found


@torch.no_grad()
def logps(policy, rows, layout):
    texts = [[row[name] for row in rows] for name in ("prompt_ids", "response_ids")]
    return grpo.token_logps(policy, *texts, 1.0, layout)[0].cpu()


def without_borders(prompts, responses):
    """Packed rows as one: a mistake."""
    inputs, where = grpo.packed(prompts, responses)
    return dict(input_ids=inputs["input_ids"]), where


def alone(args, train_files, work):
    device, mesh = grpo.setup_distributed(1, 300.0)
    torch.zeros(1, device=device)
    empty, result = used(), dict(gaps={}, norms={})
    engine = grpo.build_engine(args, device)
    engine.wake_up()
    result["awake"] = used() - empty
    engine.sleep(level=2)
    result |= dict(asleep=used() - empty, total=torch.cuda.mem_get_info()[1] / 2**30 if used() else 0.0)

    sdpa = dataclasses.replace(args, attn_implementation="sdpa")
    policy = grpo.load_model(sdpa, mesh, device)
    tokenizer = grpo.load_processor(args.model)
    prompts = load_prompts([train_files], tokenizer, args.max_prompt_length, True)[0][:PROMPTS]
    sampling = dict(temperature=1.0, stop_token_ids=[tokenizer.eos_token_id])
    with grpo.awake(engine, [policy], None, args, {}, **sampling) as sample:
        rows = sample(prompts, 1, GROUP)
    keep = "prompt_ids", "response_ids", "rollout_logps", "prompt_length", "length", "rank", "group", "sample"
    kept = [{name: row[name] for name in keep} for row in rows]
    (work / "rows.json").write_text(json.dumps(kept, default=grpo.np.ndarray.tolist))

    logp_nt = {"sampler": grpo.pad([row["rollout_logps"] for row in rows])}
    mask_nt = grpo.response_mask([len(row["response_ids"]) for row in rows])
    gap = lambda a_nt, b_nt: (a_nt - b_nt).abs()[mask_nt].mean().item()
    for name, (layout, attention, kernel) in layouts(policy.lm.config, args).items():
        model = policy
        if attention != "sdpa":
            model = grpo.load_model(dataclasses.replace(args, attn_implementation=attention), mesh, device)
        logp_nt[name] = logps(model, rows, layout)
        how = dataclasses.replace(args, attn_implementation=kernel)
        result["norms"][name] = norm(model, rows, how, device)
    for a, b in combinations(reversed(logp_nt), 2):
        result["gaps"][f"{a} : {b}"] = gap(logp_nt[a], logp_nt[b])
    result["borders"] = gap(logps(policy, rows, without_borders), logp_nt["padded"])

    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    before = step(policy, optimizer, rows, sdpa, device)
    owned = [x for state in optimizer.state.values() for x in state.values() if x.dim()] + [
        *policy.parameters()
    ]
    result["owned"] = sum(x.to_local().nbytes for x in owned) / 2**30
    here = used()
    grpo.move("cpu", [policy], optimizer)
    result["freed"] = (here - used()) / result["owned"]
    grpo.move(device, [policy], optimizer)
    result["offloaded"] = step(policy, optimizer, rows, sdpa, device), before
    optimizer.param_groups[0]["lr"] = 1e-3
    step(policy, optimizer, rows, sdpa, device)
    result["stale"] = gap(logps(policy, rows, grpo.padded), logp_nt["sampler"])
    (work / "worker.json").write_text(json.dumps(result))
    grpo.leave()


def together(args, work):
    device, _ = grpo.setup_distributed(1, 300.0)
    flash, rows = args.attn_implementation == FLASH, json.loads((work / "rows.json").read_text())
    result = dict(layout="packed flash" if flash else "padded")
    for copies in (1, 2):
        shape = copies, dist.get_world_size() // copies
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        policy = grpo.load_model(args, mesh if copies > 1 else mesh["shard"], device)
        result[str(copies)] = norm(policy, rows, args, device)
    if dist.get_rank() == 0:
        (work / "ranks.json").write_text(json.dumps(result))
    grpo.leave()


def main(model, train_files, work, prompt_length, response_length):
    lengths = dict(max_prompt_length=2 * int(prompt_length), max_response_length=int(response_length))
    sizes = dict(group_size=GROUP, train_batch_size=PROMPTS, ppo_mini_batch_size=PROMPTS)
    args = grpo.Args(model=model, train_files=(), output_dir="", **lengths, **sizes)
    run = together if grpo.os.environ.get("RANK") else partial(alone, train_files=train_files)
    run(args, work=Path(work))


if __name__ == "__main__":
    main(*sys.argv[1:])
