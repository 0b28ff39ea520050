"""What does --partial_rollout of dapo.py buy where a few answers are long? The task of the demo, with a tail.

    python benchmarks/experiments/partial_rollout.py     # about 40 minutes on one core

Calculations of 4 to 24 operands, most of them short; an answer that is worked out has two tokens an operand.
Both runs of a seed have the same steps and are compared after the same CPU seconds. Writes
runs/partial_rollout: results.json, partial_rollout.png, a run directory each; what is done is not run again.
"""

import json
import random
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.demo import FLAGS
from benchmarks.lib.stages import ROOT, Stages
from benchmarks.lib.workload import curve, launch, read_metrics, save
from data_prep.arithmetic import STEPS, answer_at_once, make_row
from data_prep.lib.schema import write_parquet
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt

LONGEST = 24  # operands
SIZES = dict(train=8000, test=256)
SFT = "--max_length 128"
DAPO = (
    "--max_prompt_length 56 --max_response_length 56 --train_batch_size 16 --ppo_mini_batch_size 16"
    " --group_size 8 --lr 3e-4 --warmup_steps 5 --weight_decay 0 --overlong_buffer 0 --test_freq 10"
    " --save_freq 0 --gradient_checkpointing none"
)
ARMS = {
    "wait": "",
    "partial": "--partial_rollout",
    "partial, not corrected": "--partial_rollout --rollout_is None",
}
ACCURACY = "val-core/arithmetic/acc/mean@1"
SEEN = {  # means over the steps
    "idle": "dapo/idle",
    "age 0": "dapo/token_age_0",
    "age 1": "dapo/token_age_1",
    "age 2+": "dapo/token_age_2_or_more",
    "dropped": "dapo/dropped_stale",
    "effective sample size": "rollout_corr/rollout_is_eff_sample_size",
    "gen s": "timing_s/gen",
    "tokens": "dapo/tokens_generated",
    "sampler steps": "dapo/sampler_steps",
}


@dataclass
class Args:
    output_dir: Path = ROOT / "runs/partial_rollout"
    """Directory of the runs."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of data order and sampling; the SFT model is one."""
    steps: int = 200
    """RL steps of a run."""
    arms: tuple[str, ...] = ("wait", "partial")
    """Runs of a seed; also there: partial, not corrected."""
    rounds: int = 3
    """Short runs of each arm, in turn, that measure what a step costs in CPU seconds and memory."""


def questions(count, rng, seen):
    """Calculations of the demo; most have 4 or 5 operands, one in thirteen has over 12."""
    found = []
    while len(found) < count:
        terms = min(3 + int(rng.paretovariate(1.15) + 0.5), LONGEST)
        question = rng.randrange(10), *rng.choices([*STEPS], k=terms - 1)
        if terms < 7 or question not in seen:  # there are few short ones
            seen.add(question)
            found.append(question)
    return found


def write_data(out):
    """train, test and sft.parquet; a third of SFT's answers write the steps down, as in the demo."""
    rng, seen = random.Random(0), set()
    for split, count in reversed(SIZES.items()):
        rows = [
            make_row(split, i, *q, operation="last_digit") for i, q in enumerate(questions(count, rng, seen))
        ]
        write_parquet(rows, out / f"{split}.parquet")
    rows = [row if i < 0.35 * len(rows) else answer_at_once(row) for i, row in enumerate(rows)]
    write_parquet(rows, out / "sft.parquet")


def train(args, arm, seed, steps, name=""):
    """One run, if it is not there in whole -> its directory, and CPU seconds at each line of its metrics."""
    out = args.output_dir / f"{name}{arm}_{seed}".replace(", ", "_").replace(" ", "_")
    if not (out / "cpu.json").exists():
        stamps, data = [], args.output_dir / "data"
        files = "--train_files", data / "train.parquet", "--val_files", data / "test.parquet"
        files += "--model", args.output_dir / "sft/checkpoints/latest/hf", "--output_dir", out
        flags = f"{DAPO} {ARMS[arm]} --total_steps {steps} --seed {seed} --resume never".split()
        script = "benchmarks/experiments/partial_rollout_worker.py"
        peak = launch(script, *files, *flags, watch=(out / "metrics.jsonl", stamps))
        (out / "peak.json").write_text(json.dumps(peak))
        (out / "cpu.json").write_text(json.dumps([cpu for _, cpu in stamps]))
    return out, np.array(json.loads((out / "cpu.json").read_text()))


def main(args):
    stages, out = Stages(args.output_dir, 2), args.output_dir
    if not (out / "data/sft.parquet").exists():
        write_data(out / "data")
    stages.run("model", "model", *FLAGS["tiny"]["model"].split(), "--local_save_dir", out / "model")
    flags = *FLAGS["tiny"]["sft"].split(), *SFT.split(), "--save_freq", 0
    files = "--model", out / "model", "--train_files", out / "data/sft.parquet", "--output_dir", out / "sft"
    stages.run("sft", "SFT: imitate answers", "algos/sft.py", *files, *flags)

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    table = Table("seed", "run", "steps", "accuracy", "CPU s a step", *SEEN)
    results = {}
    for seed in args.seeds:
        runs = {arm: train(args, arm, seed, args.steps) for arm in args.arms}
        budget = min(cpu[-1] - cpu[0] for _, cpu in runs.values())  # line 0: validation before training
        for number, (arm, (run, cpu)) in enumerate(runs.items()):
            steps, accuracy = map(np.array, curve(run, ACCURACY))
            steps = steps.astype(int)
            seconds = cpu - cpu[0]
            at = np.interp(budget, seconds[steps], accuracy)
            lines = read_metrics(run, 1)
            seen = {name: float(np.mean([m.get(key, 0) for m in lines])) for name, key in SEEN.items()}
            done = int(np.searchsorted(seconds, budget, "right")) - 1
            to_45 = seconds[steps[np.argmax(accuracy >= 0.45)]]  # the first validation that has 45 %
            result = dict(steps=done, accuracy=at, last=accuracy[-1], start=accuracy[0], to_45=to_45)
            results[f"{arm} {seed}"] = result | dict(budget=budget, seconds=seconds[-1] / len(lines)) | seen
            shown = f"{seconds[-1] / len(lines):.2f}", *(f"{x:.3g}" for x in seen.values())
            table.add_row(
                str(seed), arm, f"{done}", f"{accuracy[0]:.1%} {at:.1%} ({accuracy[-1]:.1%})", *shown
            )
            style = dict(color=f"C{number}", alpha=0.8, label=arm if seed == args.seeds[0] else None)
            axes[0].plot(steps, accuracy, **style)
            axes[1].plot(seconds[steps], accuracy, **style)
    axes[0].set(xlabel="step", ylabel="accuracy, held out, greedy")
    axes[1].set(xlabel="CPU seconds of training")
    for panel in axes:
        panel.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(out / "partial_rollout.png", dpi=120)
    Console(width=200).print(table)
    costs = {arm: [] for arm in args.arms}
    for number, arm in product(range(args.rounds), args.arms):
        run, cpu = train(args, arm, 1, 20, name=f"cost_{number}_")
        costs[arm].append((float(cpu[-1] - cpu[0]) / 20, json.loads((run / "peak.json").read_text())))
    Console().print("CPU seconds of a step and peak memory in GB, first 20 steps:", costs)
    save(out / "results.json", args, dict(runs=results, costs=costs))


if __name__ == "__main__":
    main(command_line(Args))
