"""Metrics of a step: what all trainers report."""

import time
from contextlib import contextmanager
from functools import cache
from itertools import chain

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer


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
def matmul_speed(dtype, device):
    """FLOP/s of a large matrix product on this rank: the yardstick of perf/mfu."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    timer = Timer("a @ a", globals=dict(a=a), num_threads=torch.get_num_threads())
    return 2 * n**3 / min(timer.timeit(2).mean for _ in range(5))  # others may be at work in between


def step_metrics(rows, load, policy, timing, args, sampled=None):
    """Scores, lengths, balance and time of a step: what all algorithms have.

    load: token counts of what each rank, or group of ranks with --sp_size, has trained on.
    sampled: the rows that were sampled, where they are not those that were trained on.
    """
    pool = 0  # bytes of the sampler, which torch counts too, asleep or not
    if torch.cuda.is_available():
        from vllm.device_allocator.cumem import CuMemAllocator

        pool = CuMemAllocator.get_instance().get_current_usage()
    responses, prompts = [row["length"] for row in rows], [row["prompt_length"] for row in rows]
    ranks, results = dist.get_world_size(), [row["reward"] for row in rows]
    rank_tokens, balanced = [0] * ranks, [sum(tokens) * len(load) / ranks for tokens in load]
    for row in rows if sampled is None else sampled:
        rank_tokens[row["rank"]] += row["prompt_length"] + row["length"]
    total, seconds = sum(responses) + sum(prompts), timing["step"]
    metrics = stats("critic/score", [result["score"] for result in results]) | failure_metrics(results)
    metrics |= stats("response_length", responses) | stats("prompt_length", prompts)
    metrics |= {
        "response_length/clip_ratio": np.mean([row["finish_reason"] == "length" for row in rows]),
        "prompt_length/clip_ratio": np.mean([n == args.max_prompt_length for n in prompts]),
        "global_seqlen/mean": total / ranks,
        "global_seqlen/minmax_diff": max(rank_tokens) - min(rank_tokens),
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds,
        "perf/throughput": total / seconds / ranks,
        "perf/max_memory_allocated_gb": (torch.cuda.max_memory_allocated() - pool) / 2**30,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }
    for kind, tokens in (("", rank_tokens), ("balanced_", balanced)):
        metrics |= {f"global_seqlen/{kind}min": min(tokens), f"global_seqlen/{kind}max": max(tokens)}
    if "update_actor" in timing:  # FLOPs: 6 a weight and token, 4 if frozen, and causal attention's 6 L H T^2
        weights, config = sum(p.numel() for p in policy.parameters()), policy.lm.config.get_text_config()
        attention = config.num_hidden_layers * config.hidden_size  # read once: transformers takes 5 us
        flops = weights * sum(chain(*load)) + attention * sum(
            (a + b) ** 2 for a, b in zip(prompts, responses)
        )
        flops *= 4 if args.lora_rank else 6
        peak = matmul_speed(args.compute_dtype, next(policy.parameters()).device) * ranks
        metrics["perf/mfu/actor"] = flops / timing["update_actor"] / peak
    for name, seconds in timing.items():
        metrics[f"timing_s/{name}"] = seconds
        if name in ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"):
            tokens = sum(responses) if name == "gen" else total
            metrics[f"timing_per_token_ms/{name}"] = 1000 * seconds / tokens
    return metrics


def failure_metrics(results):
    """Failed rewards: reward/timeouts, reward/crashes (a process died) and reward/errors (all others)."""
    kinds = [result["failure"].partition(":")[0] for result in results if "failure" in result]
    timeouts, crashes = kinds.count("TimeoutError"), kinds.count("WorkerError")
    return {
        "reward/timeouts": timeouts,
        "reward/crashes": crashes,
        "reward/errors": len(kinds) - timeouts - crashes,
    }


def validation_metrics(rows):
    """val-core/{source}/{acc|reward}/{mean@N,best@N,maj@N}: means over prompts with N responses each.

    rows: dicts with data_source, index (of the prompt) and reward (a result of the reward manager).
    The value is `acc` where the scorer returns it, else the score; maj, the value of the most frequent
    `pred`, needs one, and is 0 where no response has any. A response whose reward failed counts 0.
    """
    metrics = {}
    for source in sorted({row["data_source"] for row in rows}):
        groups = {}
        for row in rows:
            if row["data_source"] == source:
                groups.setdefault(row["index"], []).append(row["reward"])
        results = [result for group in groups.values() for result in group]
        kind, key = ("acc", "acc") if any("acc" in result for result in results) else ("reward", "score")
        values = [[float(result.get(key, 0)) for result in group] for group in groups.values()]
        prefix, n = f"val-core/{source}/{kind}", len(values[0])
        metrics[f"{prefix}/mean@{n}"] = sum(sum(v) / len(v) for v in values) / len(values)
        metrics[f"{prefix}/best@{n}"] = sum(max(v) for v in values) / len(values)
        if any("pred" in result for result in results):
            votes = [[result.get("pred") for result in group] for group in groups.values()]
            winners = []
            for value, vote in zip(values, votes, strict=True):
                cast = [answer for answer in vote if answer is not None]
                winners.append(value[vote.index(max(cast, key=cast.count))] if cast else 0.0)
            metrics[f"{prefix}/maj@{n}"] = sum(winners) / len(values)
    return metrics


def speed_metrics(lengths, policy, timing, args):
    """Time and memory of a step over texts of these lengths."""
    tokens, ranks, config = sum(lengths), dist.get_world_size(), policy.lm.config.get_text_config()
    # FLOPs: 6 a weight and token, 4 if frozen, and causal attention's 6 L H T^2 a text
    weights = sum(p.numel() for p in policy.parameters())
    attention = config.num_hidden_layers * config.hidden_size
    flops = (4 if args.lora_rank else 6) * sum(n * (weights + attention * n) for n in lengths)
    peak = matmul_speed(args.compute_dtype, next(policy.parameters()).device) * ranks
    return {f"timing_s/{name}": seconds for name, seconds in timing.items()} | {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": timing["step"],
        "perf/throughput": tokens / timing["step"] / ranks,
        "perf/mfu/actor": flops / timing["update_actor"] / peak,
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }
