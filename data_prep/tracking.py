"""The log of a run: terminal, log.txt, metrics.jsonl, TensorBoard or Weights & Biases; metrics; its end."""

import atexit
import json
import os
import shutil
import sys
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer
from tqdm import tqdm

from data_prep.atomic import replacing
from rewards.manager import failure_metrics


def check_tracker(args):
    """Raise ValueError if --tracker cannot work, before anything is loaded."""
    if args.tracker != "none" and not find_spec(args.tracker):
        how = "pip install --no-deps -r requirements-extra.txt"
        raise ValueError(f"--tracker {args.tracker} is not installed: {how}")
    if args.wandb_project and args.tracker != "wandb":
        raise ValueError(f"--wandb_project {args.wandb_project} needs --tracker wandb, not {args.tracker}")


def open_tracker(args, step):
    """-> a function of (metrics, step). What TensorBoard has of steps after `step` goes: they come again."""
    out = Path(args.output_dir)
    if args.tracker == "wandb":  # WANDB_MODE=offline: without a network
        import wandb

        about = dict(project=args.wandb_project, name=out.name, config=asdict(args))
        return wandb.init(dir=out, **about).log
    if args.tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out / "tensorboard", purge_step=step + 1)

        def track(metrics, step):
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()  # it writes every two minutes, and not at exit

        return track
    return lambda metrics, step: None


class Logger:
    """Terminal, log.txt, metrics.jsonl and the tracker of rank 0; the other ranks are silent."""

    def __init__(self, args, step, total_steps):
        self.out, self.rank0 = Path(args.output_dir), dist.get_rank() == 0
        self.bar = tqdm(total=total_steps, initial=step, desc="step", disable=not self.rank0)
        if not self.rank0:
            return
        for unfinished in self.out.glob("checkpoints/.step_*"):
            shutil.rmtree(unfinished)
        self.metrics = self.out / "metrics.jsonl"
        lines = self.metrics.read_text().splitlines() if step and self.metrics.exists() else []
        # steps after the checkpoint, without one all steps, are done again: their lines go, and one cut short
        keep = lambda line: line.endswith("}") and json.loads(line)["training/global_step"] <= step
        kept = "".join(f"{line}\n" for line in filter(keep, lines))
        for name, text in (("metrics.jsonl", kept), ("args.json", json.dumps(asdict(args), indent=2))):
            with replacing(self.out / name) as new:
                new.write_text(text)
        self.track = open_tracker(args, step)

    def say(self, message):
        """A line for people, in the terminal and in log.txt."""
        if self.rank0:
            self.bar.write(message)
            with (self.out / "log.txt").open("a") as file:
                file.write(message + "\n")

    def log(self, metrics, step, **shown):
        """One dict a step; shown: metrics at the progress bar, under shorter names."""
        metrics = {name: float(value) for name, value in metrics.items()}
        if self.rank0:
            with self.metrics.open("a") as file:
                file.write(json.dumps(metrics) + "\n")
            self.bar.set_postfix({k: f"{metrics[name]:.4g}" for k, name in shown.items()}, refresh=False)
            self.bar.update(step - self.bar.n)
            self.track(metrics, step)

    def close(self, args):
        """Say where everything lies, and what to do next."""
        self.bar.close()
        done = "done" if self.bar.n == self.bar.total else "stopped; the same command goes on"
        weights = f"{self.out}/checkpoints/latest/{'hf' if args.save_hf else 'dcp'}"
        self.say(f"step {self.bar.n} of {self.bar.total}, {done}\nweights: {weights}")
        self.say(f"report:  python algos/report.py {self.out} --output report.html")


def leave():
    """End the process with those of the other ranks: the last call of a script.

    Python's own end is left out: a thread of gloo that still has a tensor would abort in it, and
    destroy_process_group does not wait for such threads (pytorch PR 179291).
    """
    dist.barrier()
    atexit._run_exitfuncs()  # of libraries: W&B sends its last metrics in one
    sys.stdout.flush()
    os._exit(0)


def ranks_on(device):
    """How many ranks on what, for a run's first line; on a CPU also which cores they leave idle."""
    ranks = dist.get_world_size()
    here = ranks // int(os.environ.get("GROUP_WORLD_SIZE", 1))  # vLLM replaces LOCAL_WORLD_SIZE on a CPU
    words, threads = f"{ranks} rank{'s' * (ranks > 1)} on {device.type}", torch.get_num_threads()
    cores = psutil.cpu_count(logical=False) or here * threads  # unknown on some machines
    if device.type == "cuda" or here * threads >= cores:
        return words
    idle = f"{cores - here * threads} of {cores} cores idle"
    return f"{words}, {idle}: OMP_NUM_THREADS={cores // here} or --nproc_per_node {cores} would take them"


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


def step_metrics(rows, rank_tokens, load, policy, timing, args):
    """Scores, lengths, balance and time of a step: what all algorithms have."""
    pool = 0  # bytes of the sampler, which torch counts too, asleep or not
    if torch.cuda.is_available():
        from vllm.device_allocator.cumem import CuMemAllocator

        pool = CuMemAllocator.get_instance().get_current_usage()
    responses, prompts = [row["length"] for row in rows], [row["prompt_length"] for row in rows]
    ranks, results = dist.get_world_size(), [row["reward"] for row in rows]
    balanced = [sum(tokens) * len(load) / ranks for tokens in load]  # of groups of ranks with --sp_size
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
