"""A trainer's step, part by part, against the raw limits of the machine.

    python benchmarks/throughput.py --algo grpo --model models/smollm2
    python benchmarks/throughput.py --algo sft --model models/tiny --config hidden_size 512

Each round runs the real script as a user would, then raw.py on the same rows with the same threads. Every
step has the same prompts and fixed response lengths (see workload.py), or with --real lengths with a long
tail and half of the groups constant. `overhead` is the step over the sum of its raw parts; `cpu_overhead` the
same in CPU seconds, which other processes on the machine disturb less.
"""

import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from os import getloadavg
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.workload import durations, launch, make_model, make_rows, medians, read_metrics, save
from system.arguments import command_line

# the raw part that does the work of a timing_s/* key; parts without one (sync, reward, adv) are all overhead
LIMITS = dict(gen="generate", old_log_prob="forward", ref="forward", values="forward")
LIMITS |= dict(update_actor="train", update_critic="train")


@dataclass
class Args:
    model: str
    """Hugging Face directory of the model."""
    algo: str = "grpo"
    """Name of a script in algos/."""
    config: dict[str, int] = field(default_factory=dict)
    """Sizes that replace those of the model's config.json, such as `hidden_size 512`: random weights."""
    prompts: int = 8
    """Prompts of a step, or rows for sft."""
    group_size: int = 4
    """Responses to each prompt."""
    prompt_length: int = 96
    """Mean tokens of a prompt."""
    response_length: int = 64
    """Tokens of each response, for sft their mean; with --real their limit."""
    real: bool = False
    """Geometric lengths, with a mean of about a quarter of the limit, and every second group constant."""
    temperature: float = 1.0
    """Sampling temperature; a low one makes a random model so confident that it does not sample EOS."""
    max_tokens_per_microbatch: int = 2048
    """Tokens of a forward pass on one rank, padding included."""
    flags: str = ""
    """More flags of the trainer, in one string."""
    ranks: int = 1
    """Processes; they share all cores."""
    rounds: int = 3
    """Pairs of trainer and raw parts."""
    warmup: int = 1
    """First steps of a trainer that do not count, at least one."""
    steps: int = 2
    """Steps of a trainer that count."""
    output: Path | None = None
    """JSON file for the results; None: the table only."""


def trainer_flags(args, model, rows, out):
    """The command line of one run of the trainer."""
    flags = dict(model=model, train_files=rows, output_dir=out, save_freq=0)
    flags |= dict(train_batch_size=args.prompts, total_steps=args.warmup + args.steps)
    flags |= dict(max_tokens_per_microbatch=args.max_tokens_per_microbatch)
    if args.algo != "sft":
        flags |= dict(ppo_mini_batch_size=args.prompts, temperature=args.temperature)
        score = "half_constant" if args.real else "score"
        flags |= dict(reward_fn=f"{Path(__file__).parent / 'lib/alternating.py'}:{score}")
        flags |= dict(max_prompt_length=2 * args.prompt_length, max_response_length=args.response_length)
        flags |= {} if args.algo == "ppo" else dict(group_size=args.group_size)
    return [x for k, v in flags.items() for x in (f"--{k}", v)] + [
        "--gradient_checkpointing",
        "none",
        *args.flags.split(),
    ]


def measure(args, work):
    """One round -> seconds of each part of the step, medians over its steps, and the raw limits."""
    shutil.rmtree(work / "run", ignore_errors=True)
    before, stamps = getloadavg()[0], []
    memory = launch(
        f"algos/{args.algo}.py",
        *trainer_flags(args, work / "model", work / "rows.parquet", work / "run"),
        ranks=args.ranks,
        watch=(work / "run/metrics.jsonl", stamps),
    )
    steps = read_metrics(work / "run", args.warmup)
    early = args.algo != "sft" and not args.real
    if early and any(m["response_length/min"] < args.response_length for m in steps):
        raise SystemExit("error: a response ended early; lower --temperature or shorten --response_length")
    run = json.loads((work / "run/args.json").read_text())
    prefix, steps_s = "timing_s/", []
    for metrics in steps:
        step = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
        other = step["step"] - sum(v for k, v in step.items() if k not in ("step", "save_checkpoint"))
        steps_s.append(step | dict(other=other))
    step = medians(steps_s)
    launch(
        "benchmarks/lib/raw.py",
        *("--model", work / "model", "--train_files", work / "rows.parquet", "--output", work / "raw.json"),
        *("--group_size", 0 if args.algo == "sft" else run.get("group_size", 1)),
        *("--response_length", args.response_length, "--temperature", args.temperature),
        *("--attn_implementation", run["attn_implementation"], "--compute_dtype", run["compute_dtype"]),
        *("--max_tokens_per_microbatch", args.max_tokens_per_microbatch),
        ranks=args.ranks,
    )
    raw = json.loads((work / "raw.json").read_text())
    cpu = statistics.median(durations(stamps[args.warmup - 1 :])[1])
    parts = {name: seconds for name, seconds in step.items() if name not in ("step", "save_checkpoint")}
    passes = {name: run.get("ppo_epochs", 1) if name.startswith("update") else 1 for name in parts}
    limits, cpu_limits = (
        {name: raw[LIMITS[name] + unit] * passes[name] for name in parts if name in LIMITS}
        for unit in ("_s", "_cpu_s")
    )
    return dict(
        parts_s=parts,
        limits_s=limits,
        step_s=step["step"],
        overhead=step["step"] / sum(limits.values()),
        cpu_overhead=cpu / sum(cpu_limits.values()),
        mfu=raw["train_flops"] * passes["update_actor"] / parts["update_actor"] / raw["matmul_flops_per_s"],
        raw_mfu=raw["train_flops"] / raw["train_s"] / raw["matmul_flops_per_s"],
        matmul_gflops=raw["matmul_flops_per_s"] / 1e9,
        tokens=steps[-1]["perf/total_num_tokens"],
        peak_memory_gb=memory,
        load=(before, getloadavg()[0]),
    )


def show(args, rounds):
    """The table: medians over the rounds."""
    parts, limits = medians([r["parts_s"] for r in rounds]), medians([r["limits_s"] for r in rounds])
    table = Table("part", "seconds", "share", "raw limit, s", "ratio", title=f"algos/{args.algo}.py, a step")
    total = statistics.median(r["step_s"] for r in rounds)
    for name, seconds in parts.items():
        limit = limits.get(name)
        against = (f"{limit:.2f}", f"{seconds / limit:.2f}") if limit else ("", "")
        table.add_row(name, f"{seconds:.3f}", f"{seconds / total:.1%}", *against)
    Console().print(table)
    for name in ("overhead", "cpu_overhead", "mfu", "raw_mfu", "matmul_gflops", "peak_memory_gb"):
        values = [r[name] for r in rounds]
        print(f"{name} {statistics.median(values):.3g}  ({min(values):.3g} to {max(values):.3g})")


def main():
    args = command_line(Args)
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        ends = args.response_length // 4 if args.real else None  # one of so many tokens ends a response
        make_model(args.model, work / "model", args.config, ends)
        make_rows(
            work / "model", work / "rows.parquet", args.prompts, args.prompt_length, args.response_length
        )
        rounds = [measure(args, work) for _ in range(args.rounds)]
    show(args, rounds)
    if args.output:
        save(args.output, args, dict(rounds=rounds))


if __name__ == "__main__":
    main()
