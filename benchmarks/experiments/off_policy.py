"""How old, and how coarse, may the sampler's weights be? grpo.py on its task.

    python benchmarks/experiments/sums.py  # data and the SFT model
    python benchmarks/experiments/off_policy.py     # an hour and a half on one core

Two losses x three corrections x three lags x with and without int8 in the sampler, a seed after the other.
Writes runs/off_policy: results.json, off_policy.png, a run directory each; what is done is not run again.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.experiments.sums import FLAGS
from benchmarks.lib.stages import ROOT, run
from benchmarks.lib.workload import read_metrics, save
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt

# two mini-batches: in the first of a step the losses are one
SIZES = "--train_batch_size 8 --ppo_mini_batch_size 4 --total_steps 40 --lr 1.5e-4 --test_freq 0"
CORRECTIONS = {
    "none": "--rollout_is None",
    "token IS": "--rollout_is token",
    "IcePop": "--rollout_is_threshold 5 --rollout_rs token --rollout_rs_threshold 0.5 5",
}
LOSSES, LAGS, NOISES = ("clip", "cispo"), (0, 4, 16), (None, "int8")
ACCURACY = "val-core/arithmetic/acc/mean@1"
SEEN = {  # means over the steps; what is not logged without a correction
    "gap of log-probs": ("training/rollout_logp_diff_mean", None),
    "effective sample size": ("rollout_corr/rollout_is_eff_sample_size", 1.0),
    "rejected": ("actor/rollout_rs_masked", 0.0),
}


@dataclass
class Args:
    demo: Path = ROOT / "runs/sums"
    """Directory of sums.py, for its data and its SFT model."""
    output_dir: Path = ROOT / "runs/off_policy"
    """Directory of the runs."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of data order and sampling; the SFT model is one."""
    losses: tuple[str, ...] = LOSSES
    """Losses to run now; of the other the table has what is there."""
    dry: bool = False
    """Run nothing, and report what is there."""


def train(args, loss, correction, lag, noise, seed):
    """One run, if it is not there in whole -> what it has shown, or None."""
    out = args.output_dir / f"{loss}_{correction}_{lag}_{noise}_{seed}".replace(" ", "_")
    if not (out / "done").exists() and not args.dry and loss in args.losses:
        shutil.rmtree(out, ignore_errors=True)
        files = (
            "--train_files",
            args.demo / "data/train.parquet",
            "--val_files",
            args.demo / "data/test.parquet",
        )
        flags = (
            "--model",
            args.demo / "sft/checkpoints/latest/hf",
            "--output_dir",
            out,
            "--seed",
            seed,
            *files,
        )
        flags += (*FLAGS["grpo"].split(), *SIZES.split(), "--policy_loss", loss, "--save_freq", 0)
        flags += (*CORRECTIONS[correction].split(),)
        run(out.name, {}, "benchmarks/experiments/off_policy_worker.py", "grpo", lag, noise or "none", *flags)
        (out / "done").touch()
    if (out / "done").exists():
        lines = read_metrics(out, 1)  # without the validation before training
        seen = {name: float(np.mean([m.get(*key) for m in lines])) for name, key in SEEN.items()}
        score = [m["critic/score/mean"] for m in lines]
        return dict(accuracy=lines[-1][ACCURACY], score=score, **seen)


def report(args, found, start):
    """The table, and the figure: a point is a seed, a line goes through the means."""
    table = Table("", *(f"lag {lag}, {noise or 'exact'}" for noise, lag in product(NOISES, LAGS)))
    figure, panels = plt.subplots(2, 2, figsize=(10, 7), layout="constrained", sharex=True, sharey=True)
    for (row, loss), (number, correction) in product(enumerate(LOSSES), enumerate(CORRECTIONS)):
        texts, style = [], dict(color=f"C{number}")
        for axes, noise in zip(panels[row], NOISES, strict=True):
            cells = [[x["accuracy"] for x in found.get((loss, correction, lag, noise), [])] for lag in LAGS]
            for place, values in enumerate(cells):
                where = place + 0.06 * (number - 1)
                axes.plot([where] * len(values), values, "o", markersize=4, alpha=0.6, **style)
                spread = f"{np.mean(values):.1%} ({min(values):.0%} to {max(values):.0%})" if values else "-"
                texts.append(f"{spread}, {len(values)}")
            means = [np.mean(values) if values else np.nan for values in cells]
            axes.plot([i + 0.06 * (number - 1) for i in range(len(LAGS))], means, label=correction, **style)
            axes.set(title=f"{loss}, sampler {noise or 'exact'}", xticks=range(len(LAGS)), xticklabels=LAGS)
            axes.set(ylim=(0, 1), xlabel="lag, steps", ylabel="right of 512 held-out questions")
            axes.axhline(start, color="gray", lw=0.8, ls=":")
            axes.grid(alpha=0.3)
        table.add_row(f"{loss}, {correction}", *texts)
    panels[0, 0].legend()
    figure.savefig(args.output_dir / "off_policy.png", dpi=120)
    Console(width=220).print(f"before training {start:.1%}; mean (range), seeds", table)


def main(args):
    found = {}
    for seed, *cell in product(args.seeds, LOSSES, CORRECTIONS, LAGS, NOISES):
        if result := train(args, *cell, seed):
            found.setdefault(tuple(cell), []).append(result)
    report(args, found, json.loads((args.demo / "summary.json").read_text())["accuracy_before"])
    save(args.output_dir / "results.json", args, {" ".join(map(str, cell)): x for cell, x in found.items()})


if __name__ == "__main__":
    main(command_line(Args))
