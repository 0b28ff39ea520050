"""Metrics of a step: what all trainers report."""

import re
import sys
import time
import timeit
from contextlib import contextmanager
from functools import cache

import numpy as np
import psutil
import torch
import torch.distributed as dist

from system.families import unused_weights
from system.gpu import compute_device
from system.model import merge_error


@contextmanager
def timed(timing, name):
    """Add the seconds of a block to timing[name]."""
    start = time.perf_counter()
    yield
    timing[name] = timing.get(name, 0.0) + time.perf_counter() - start


def stats(name, values):
    """Mean, largest and smallest of numbers as metrics."""
    values = np.asarray(values, dtype=np.float64)
    return {f"{name}/mean": values.mean(), f"{name}/max": values.max(), f"{name}/min": values.min()}


@cache
def matmul_speed(dtype):
    """FLOP/s of a large matrix product on this rank, the best of six: the yardstick of perf/mfu."""
    n = 8192 if torch.cuda.is_available() else 1024
    a = torch.randn(n, n, device=compute_device(), dtype=getattr(torch, dtype))
    return 2 * n**3 / min(timeit.repeat(lambda: (a @ a)[0, 0].item(), number=1, repeat=6))  # item waits


# dense TFLOP/s in bfloat16 of the data sheets of SXM modules, or of the only form
DATA_SHEET = dict(
    A100=312, A800=312, H20=148, H100=989, H800=989, H200=989, GH200=989, B200=2250, L4=121, L40S=362
)


def data_sheet_speed(dtype):
    """FLOP/s of this rank's GPU by its data sheet; None: not known, or no bfloat16."""
    if not torch.cuda.is_available() or dtype != "bfloat16":
        return None
    words = re.findall(r"\w+", torch.cuda.get_device_name())
    return next((DATA_SHEET[word] * 1e12 for word in words if word in DATA_SHEET), None)


def step_metrics(rows, load, policy, timing, dtype, sampled=None):
    """Scores, lengths, balance and time of a step: what all algorithms have.

    load: number of tokens that each rank, or group of ranks with --sp_size, has trained on.
    sampled: the rows that were sampled, where they are not those that were trained on.
    """
    ranks = dist.get_world_size()
    prompts = [row["prompt_length"] for row in rows]
    responses = [row["length"] for row in rows]
    lengths = [a + b for a, b in zip(prompts, responses)]
    results = [row["reward"] for row in rows]
    if sampled is None:
        sampled = rows
    rank_tokens = [0] * ranks
    for row in sampled:
        rank_tokens[row["rank"]] += row["prompt_length"] + row["length"]
    balanced = [tokens * len(load) / ranks for tokens in load]
    metrics = stats("critic/score", [result["score"] for result in results])
    metrics |= failure_metrics(results)
    metrics |= stats("response_length", responses)
    metrics |= stats("prompt_length", prompts)
    metrics |= speed_metrics(lengths, policy, timing, dtype, sum(load))
    if dtype == "bfloat16":  # of the sampler
        metrics |= merge_error(policy.lm, torch.bfloat16)
    metrics |= {
        "response_length/clip_ratio": np.mean([row["finish_reason"] == "length" for row in rows]),
        "global_seqlen/mean": sum(lengths) / ranks,
        "global_seqlen/minmax_diff": max(rank_tokens) - min(rank_tokens),
        "global_seqlen/min": min(rank_tokens),
        "global_seqlen/max": max(rank_tokens),
        "global_seqlen/balanced_min": min(balanced),
        "global_seqlen/balanced_max": max(balanced),
    }
    if "gen" in timing:
        metrics["timing_per_token_ms/gen"] = 1000 * timing["gen"] / sum(responses)
    for name in ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"):
        if name in timing:
            metrics[f"timing_per_token_ms/{name}"] = 1000 * timing[name] / sum(lengths)
    return metrics


def failure_metrics(results):
    """Failed rewards: reward/timeouts, reward/crashes (a process died) and reward/errors (all others)."""
    kinds = [result["failure"].partition(":")[0] for result in results if "failure" in result]
    timeouts = kinds.count("TimeoutError")
    crashes = kinds.count("WorkerError")
    errors = len(kinds) - timeouts - crashes
    return {"reward/timeouts": timeouts, "reward/crashes": crashes, "reward/errors": errors}


def speed_metrics(lengths, policy, timing, dtype, trained=None):
    """Time and memory of a step; trained: tokens computed, if texts of these lengths share prompts.

    dtype: that of products, for MFU, which counts the weights of the language model.
    """
    tokens = sum(lengths)
    ranks = dist.get_world_size()
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing.items()}
    metrics |= {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": timing["step"],
        "perf/throughput": tokens / timing["step"] / ranks,
        "perf/max_memory_allocated_gb": (torch.cuda.max_memory_allocated() - sampler_memory()) / 2**30,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }
    metrics |= merge_error(policy.lm)
    if "update_actor" in timing:
        flops = training_flops(policy.lm, trained or tokens, lengths)
        speed = flops / timing["update_actor"] / ranks
        metrics["perf/mfu/actor"] = speed / matmul_speed(dtype)
        if sheet := data_sheet_speed(dtype):
            metrics["perf/mfu_data_sheet/actor"] = speed / sheet
    return metrics


def sampler_memory():
    """Bytes that the sampler holds on this GPU, which torch counts as its own."""
    allocator = sys.modules.get("vllm.device_allocator.cumem")
    if not torch.cuda.is_available() or not allocator:
        return 0
    return allocator.CuMemAllocator.get_instance().get_current_usage()


def training_flops(lm, tokens, lengths):
    """FLOPs of an update: 6 a weight and token, 4 if frozen, and causal attention's 6 L H T^2."""
    config = lm.config.get_text_config()
    unused = unused_weights(lm, sees_images=False)
    parameters = [p for name, p in lm.named_parameters() if name not in unused]
    weights = sum(p.numel() for p in parameters)
    attention = config.num_hidden_layers * config.hidden_size * sum(n * n for n in lengths)
    each = 6 if all(p.requires_grad for p in parameters) else 4
    return each * (weights * tokens + attention)
