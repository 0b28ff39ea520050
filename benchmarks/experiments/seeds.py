"""From random weights to a model that adds, by each algorithm, with several seeds: how much does which learn?

    python benchmarks/experiments/sums.py  # data and model
    python benchmarks/experiments/seeds.py     # an hour or two on two cores

A seed is that of the whole flow: its SFT model is the start of every algorithm. TRL's GRPOTrainer, where it
is installed (requirements-bench.txt), is the reference row. Writes runs/seeds: results.json, seeds.png, a
run directory each; what is there already is not run again.
"""

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.experiments.sums import FLAGS
from benchmarks.lib.stages import ROOT, run
from benchmarks.lib.workload import curve, save
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt


@dataclass
class Args:
    demo: Path = ROOT / "runs/sums"
    """Directory of sums.py, for its data and its random model."""
    output_dir: Path = ROOT / "runs/seeds"
    """Directory of the runs."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Seeds of the whole flow."""
    ranks: int = 2
    """Processes of the trainers, one thread each."""


def train(args, name, seed, model):
    """One stage of one seed -> its directory, a Hugging Face model in hf/ or in the latest checkpoint."""
    out = args.output_dir / f"{name.replace(' ', '_')}_{seed}"
    data = args.demo / "data"
    rows = data / ("sft.parquet" if name == "SFT" else "train.parquet")
    flags = (FLAGS["sft"] if name == "SFT" else f"{FLAGS['grpo']} --total_steps 150").split()
    if name == "TRL GRPO":
        script, flags = "benchmarks/lib/peer_trl.py", FLAGS["trl"].split()
        flags += ["--total_steps", 150, "--lr", 3e-4]
        flags += ["--per_device_batch", 512 // args.ranks, "--accumulation", 1]
    else:
        script = f"algos/{name.lower()}.py"
        flags += ["--val_files", data / "val.parquet", "--save_freq", 0] + (
            ["--critic_lr", "1e-3"] if name == "PPO" else []
        )
    if not (out / "done").exists():
        flags += ["--model", model, "--train_files", rows, "--output_dir", out, "--seed", seed]
        run(name, {}, script, *flags, ranks=args.ranks)
        (out / "done").touch()
    return out


def held_out(args, runs):
    """Greedy accuracy on the held-out rows of each run, by generate.py and eval.py."""
    files = []
    for out in runs:
        files.append(out / "test.parquet")
        hf = out / "hf" if (out / "hf").exists() else out / "checkpoints/latest/hf"
        flags = "--model", hf, "--data", args.demo / "data/test.parquet", "--output", files[-1]
        if not files[-1].exists():
            run(
                "generate",
                {},
                "algos/generate.py",
                *flags,
                *FLAGS["generate"].split(),
                ranks=args.ranks,
            )
    flags = "--data", *files, "--output", args.output_dir / "eval"
    run("eval", {}, "algos/eval.py", *flags, stdout=DEVNULL)  # its tables are too wide for so many files
    results = json.loads((args.output_dir / "eval/results.json").read_text())
    return [file["all"]["mean@1"] for file in results.values()]


def plot(runs, path):
    """Mean over the seeds, and their range, of validation accuracy and of the score of sampled responses."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for axes, names, title, keys in (
        (left, ("GRPO", "PPO", "DAPO"), "validation accuracy (greedy)", ["val-core/arithmetic/acc/mean@1"]),
        # DAPO's score is that of the groups which it keeps, and so says little
        (right, ("GRPO", "PPO", "TRL GRPO"), "score of sampled responses", ["critic/score/mean", "reward"]),
    ):
        for color, name in enumerate(runs):
            if name not in names:
                continue
            curves = [curve(out, *keys) for out in runs[name]]
            steps, values = curves[0][0], np.array([values for _, values in curves])
            axes.plot(steps, values.mean(0), label=name, color=f"C{color}")
            axes.fill_between(steps, values.min(0), values.max(0), color=f"C{color}", alpha=0.15, lw=0)
        axes.set(xlabel="step", title=title, ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"Two-digit addition from the same SFT models: mean and range of {len(curves)} seeds")
    figure.savefig(path, dpi=120)


def main():
    args = command_line(Args)
    names = ["GRPO", "PPO", "DAPO"] + ["TRL GRPO"] * (importlib.util.find_spec("trl") is not None)
    runs = {name: [] for name in ("SFT", *names)}
    for seed in args.seeds:
        runs["SFT"].append(train(args, "SFT", seed, args.demo / "model"))
        for name in names:
            runs[name].append(train(args, name, seed, runs["SFT"][-1] / "checkpoints/latest/hf"))
    accuracies = held_out(args, [out for outs in runs.values() for out in outs])
    rows = dict(zip(runs, np.array(accuracies).reshape(len(runs), -1).tolist(), strict=True))
    plot(runs, args.output_dir / "seeds.png")
    table = Table("", *(f"seed {seed}" for seed in args.seeds), "mean", "standard deviation")
    for name, row in rows.items():
        table.add_row(name, *(f"{x:.1%}" for x in row), f"{np.mean(row):.1%}", f"{np.std(row, ddof=1):.1%}")
    Console().print(table)
    save(args.output_dir / "results.json", args, dict(held_out=rows))


if __name__ == "__main__":
    main()
