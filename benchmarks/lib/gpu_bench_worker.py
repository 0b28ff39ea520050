"""The parts of gpu_bench.py that run no script: DIRECTORY TABLE END training|sampling.

Each is a process, because a sampler wants an empty GPU. END: when its time is over.
"""

import gc
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import grpo
from benchmarks.gpu_bench import CUDA, DEEP, ROWS, SHORT, Budget
from benchmarks.lib.update import grpo_args, load_policy, update
from benchmarks.lib.workload import random_model, row_of
from system.metrics import speed_metrics
from system.ranks import leave, setup_distributed

BUDGETS = (8192, 16384) if CUDA else (128, 256)  # tokens of a micro-batch


def clock(function):
    """Seconds of a call, until the GPU has done it."""
    if CUDA:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def empty():
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak():
    if CUDA:
        return f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    return "peak: needs CUDA"


def make_rows(vocabulary):
    """Rows of one step."""
    prompts, group, prompt_length, length = ROWS
    rng = np.random.default_rng(0)
    rows = []
    for g in range(prompts):
        prompt = [7 + g % (vocabulary - 7)] * prompt_length
        for _ in range(group):
            row = row_of(g, prompt, rng.integers(7, vocabulary, length).astype(np.int32))
            row["rollout_logp_t"] = np.full(length, -9.0, np.float32)
            rows.append(row)
    return rows


def speed(policy, args, took):
    """Tokens/s with each response's prompt, MFU against a measured product and against the data sheet."""
    prompts, group, prompt_length, length = ROWS
    lengths = [prompt_length + length] * (prompts * group)
    trained = prompts * (prompt_length + group * length)
    timing = dict(step=took, update_actor=took)
    metrics = speed_metrics(lengths, policy, timing, args.compute_dtype, trained)
    words = f"{took:.3f} s, {sum(lengths) / took:.0f} tokens/s, MFU {metrics['perf/mfu/actor']:.3f}"
    if "perf/mfu_data_sheet/actor" in metrics:
        words += f", {metrics['perf/mfu_data_sheet/actor']:.3f} by the data sheet"
    return words


# ---- training ----------------------------------------------------------------------------------------------
class Training:
    """Parts that need no sampler."""

    def __init__(self, budget, directory):
        self.budget = budget
        self.directory = directory
        self.device, self.mesh = setup_distributed()
        self.rows = make_rows(SHORT[-1])
        grpo.families.from_files = cache(grpo.families.from_files)  # read once

    def write(self):
        """Random weights of both models."""
        for name, sizes in (("deep", DEEP), ("short", SHORT)):
            begin = time.perf_counter()
            random_model(sizes, self.directory / name, device=self.device)
            empty()
            took = time.perf_counter() - begin
            self.budget.say(f"write the {name} model, {sizes[2]} layers", f"{took:.1f} s")

    def updates(self, recompute, compiled):
        """Updates with each budget of tokens."""
        sizes = dict(ppo_mini_batch_size=ROWS[0], group_size=ROWS[1])
        flags = dict(gradient_checkpointing=recompute, compile=compiled)
        args = grpo_args(self.directory / "short", **sizes, **flags)
        policy = load_policy(args, self.mesh, self.device)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-9)  # Adam's moments would leave no room
        kind = "compiled" if compiled else "eager"
        for tokens in BUDGETS:
            name = f"update, recompute {recompute}, {kind}, {tokens} tokens"
            now = replace(args, max_tokens_per_microbatch=tokens)
            self.budget.run(name, 6, self.one_budget, name, policy, optimizer, now)

    def one_budget(self, name, policy, optimizer, args):
        empty()
        update(policy, optimizer, self.rows, args)  # warms up
        took = clock(lambda: update(policy, optimizer, self.rows, args))
        self.budget.say(name, f"{speed(policy, args, took)}, {peak()}")


def training(budget, directory):
    parts = Training(budget, directory)
    budget.run("write models", 35, parts.write)
    for recompute in ("full", "selective", "none"):
        budget.run(f"update, recompute {recompute}, eager", 16, parts.updates, recompute, False)
        empty()
    if CUDA:
        for recompute in ("selective", "full", "none"):
            budget.run(f"update, recompute {recompute}, compiled", 80, parts.updates, recompute, True)
            empty()
    else:
        budget.say("update, compiled", "needs CUDA")
    leave()


# ---- sampling ----------------------------------------------------------------------------------------------
def sampling(budget, directory):
    """A sampler next to a trainer with adapters: what it takes to wake it with their weights."""
    device, mesh = setup_distributed()
    lengths = dict(max_prompt_length=256, max_response_length=256)
    args = grpo_args(directory / "deep", lora_rank=16, **lengths)
    begin = time.perf_counter()
    engine = grpo.build_engine(args, device)
    budget.say("sampler, start", f"{time.perf_counter() - begin:.1f} s")
    cache_config = engine.vllm_config.cache_config
    tokens = cache_config.num_gpu_blocks * cache_config.block_size
    budget.say("sampler, KV cache", f"{tokens} tokens")
    policy = load_policy(args, mesh, device)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)
    for offload in ("none", "sampling"):
        name = f"sampler, wake, sync, sleep with --offload {offload}"
        if offload == "sampling" and not CUDA:
            budget.say(name, "needs CUDA")
            continue
        times = []
        for _ in range(3):
            timing = {}
            with grpo.awake(engine, [policy], optimizer, replace(args, offload=offload), timing):
                pass
            times.append(f"{timing['sync']:.3f}")
        budget.say(name, f"{', '.join(times)} s")
    leave()  # here, because an engine takes the process group with it


def main(directory, table, end, name):
    budget = Budget(table, end)
    if name == "training":
        training(budget, Path(directory))
    else:
        sampling(budget, Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
