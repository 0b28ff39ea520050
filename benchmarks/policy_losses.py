"""The four policy losses of grpo.py on the demo's task: does each of them learn, with the paper's clips?

    make demo                              # data and the SFT model
    python benchmarks/policy_losses.py     # eight minutes on one core

Two mini-batches a step, so that the second one's ratios are not 1. Writes runs/policy_losses: results.json,
policy_losses.png, a run directory each; what is there already is not run again.
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro
from demo import FLAGS, ROOT, run
from seeds import curve
from workload import save

matplotlib.use("agg")
import matplotlib.pyplot as plt

SIZES = "--ppo_mini_batch_size 16 --total_steps 60"


@dataclass
class Args:
    demo: Path = ROOT / "runs/demo"
    """Directory of `make demo`, for its data and its SFT model."""
    output_dir: Path = ROOT / "runs/policy_losses"
    """Directory of the runs."""


def train(args, out, *flags):
    """grpo.py on the demo's data from its SFT model, if `out` is not there in whole."""
    files = "--train_files", args.demo / "data/train.parquet", "--val_files", args.demo / "data/val.parquet"
    places = "--model", args.demo / "sft/checkpoints/latest/hf", "--output_dir", out
    if not (out / "done").exists():
        both = *FLAGS["tiny"]["grpo"].split(), *flags
        run(out.name, {}, "algos/grpo.py", *places, *files, "--save_freq", 0, *both)
        (out / "done").touch()


def main():
    args, found = tyro.cli(Args), {}
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for loss in ("clip", "gspo", "cispo", "sapo"):
        train(args, args.output_dir / loss, *SIZES.split(), "--policy_loss", loss)
        found[loss] = curve(args.output_dir / loss, "val-core/arithmetic/acc/mean@1")
        axes.plot(*found[loss], "o-", label=loss, markersize=4)
    axes.set(
        xlabel="step", ylabel="share right, greedy", ylim=(0.5, 1), title="Two-digit addition, 1M parameters"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.output_dir / "policy_losses.png", dpi=120)
    for loss, (_, values) in found.items():
        print(f"{loss}: {values[0]:.1%} -> {values[-1]:.1%}")
    save(args.output_dir / "results.json", args, found)


if __name__ == "__main__":
    main()
