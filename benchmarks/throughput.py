"""A trainer's step, part by part, against the raw limits of the machine.

    python benchmarks/throughput.py --algo grpo --model models/smollm2
    python benchmarks/throughput.py --algo sft --model models/tiny

Each round runs the real script as a user would, then lib/raw.py on the same rows with the same threads. Every
step has the same prompts and fixed response lengths (see lib/workload.py). `overhead` is the step over the
sum of its raw parts.
"""

import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib import workload
from benchmarks.lib.workload import markdown, medians, spread
from system.arguments import command_line

# the raw part that does the work of a timing_s/* key; parts without one (sync, reward, adv) are all overhead
LIMITS = dict(
    gen="generate",
    values="forward",
    update_actor="train",
    update_critic="train",
)


@dataclass
class Args:
    model: str
    """Hugging Face directory of the model."""
    algo: Literal["grpo", "dapo", "ppo", "sft"] = "grpo"
    """Which trainer."""
    prompts: int = 8
    """Prompts of a step, or rows for sft."""
    group_size: int = 4
    """Responses to each prompt."""
    prompt_length: int = 96
    """Mean tokens of a prompt."""
    response_length: int = 64
    """Tokens of each response, for sft their mean."""
    temperature: float = 1.0
    """Sampling temperature; a low one makes a random model so confident that it does not sample EOS."""
    rounds: int = 3
    """Pairs of trainer and raw parts."""
    warmup: int = 1
    """First steps of a trainer that do not count, at least one."""
    steps: int = 2
    """Steps of a trainer that count."""
    output: Path | None = None
    """JSON file for the results; None: the table only."""


def parts_of(metrics):
    """Seconds of a step's parts, and of all that is in no part."""
    parts = {}
    for name, value in metrics.items():
        if name.startswith("timing_s/"):
            parts[name.removeprefix("timing_s/")] = value
    step = parts.pop("step")
    parts.pop("save_checkpoint", None)  # after the last step
    parts["other"] = step - sum(parts.values())
    return parts


def measure(args, work):
    """One round -> seconds of each part of the step, medians over its steps, and the raw limits."""
    shutil.rmtree(work / "run", ignore_errors=True)
    flags = workload.trainer_flags(args, work, args.warmup + args.steps)
    memory = workload.launch(f"algos/{args.algo}.py", workload.words_of(flags))
    steps = workload.read_metrics(work / "run")[args.warmup :]
    group_size = 0
    if args.algo != "sft":
        group_size = args.group_size
        if min(m["response_length/min"] for m in steps) < args.response_length:
            raise SystemExit(
                "error: a response ended early; lower --temperature or shorten --response_length"
            )

    flags = dict(
        model=work / "model",
        train_files=work / "rows.parquet",
        output=work / "raw.json",
        group_size=group_size,
        response_length=args.response_length,
        temperature=args.temperature,
    )
    workload.launch("benchmarks/lib/raw.py", workload.words_of(flags))
    raw = json.loads((work / "raw.json").read_text())
    parts = medians([parts_of(metrics) for metrics in steps])
    limits = {name: raw[LIMITS[name]] for name in parts if name in LIMITS}
    step = statistics.median(m["timing_s/step"] for m in steps)
    mfu = statistics.median(m["perf/mfu/actor"] for m in steps)
    return dict(
        parts_s=parts,
        limits_s=limits,
        step_s=step,
        overhead=step / sum(limits.values()),
        mfu=mfu,
        raw_mfu=mfu * parts["update_actor"] / limits["update_actor"],
        peak_memory_gb=memory,
    )


def show(rounds):
    """The table: medians over the rounds."""
    parts = medians([x["parts_s"] for x in rounds])
    limits = medians([x["limits_s"] for x in rounds])
    rows = []
    for name, seconds in parts.items():
        row = [name, f"{seconds:.3f}", "", ""]
        if name in limits:
            row[2] = f"{limits[name]:.3f}"
            row[3] = f"{seconds / limits[name]:.2f}"
        rows.append(row)
    print(markdown(["part", "seconds", "raw limit, s", "ratio"], rows))
    for name in ("overhead", "mfu", "raw_mfu", "peak_memory_gb"):
        print(name, spread([x[name] for x in rounds]))


def main():
    args = command_line(Args)
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        workload.write_work(args, work, args.prompts)
        rounds = [measure(args, work) for _ in range(args.rounds)]
    show(rounds)
    if args.output:
        workload.save(args.output, args, dict(rounds=rounds))


if __name__ == "__main__":
    main()
