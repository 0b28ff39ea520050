"""How much does GRPO learn with adapters of each rank, and with all weights? On the demo's task.

    make demo                     # data, and the SFT model to start from
    python benchmarks/lora.py     # twelve runs, twenty minutes on one core

Greedy accuracy on the held-out rows after training. What is there already is not run again.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from demo import FLAGS, GRPO_STEPS, ROOT, run
from rich.console import Console
from rich.table import Table
from workload import read_metrics, save


@dataclass
class Args:
    demo: Path = ROOT / "runs/demo"
    """Directory of `make demo`."""
    output_dir: Path = ROOT / "runs/lora"
    """Directory of the runs."""
    lora_ranks: tuple[int, ...] = (0, 1, 8, 32)
    """Ranks of the adapters; 0: all weights are trained."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of GRPO; its first model is one and the same."""
    lr: float = 3e-3
    """Learning rate of the adapters; all weights are trained at the demo's."""
    split: str = "test"
    """Rows that are scored: test, or val to choose a learning rate by."""


def accuracy(args, lora_rank, seed):
    """Train, if it is not done yet -> the share of right greedy answers."""
    flags = f"{FLAGS['tiny']['grpo']} --total_steps {GRPO_STEPS['tiny']}"
    if lora_rank:
        flags = flags.replace("--lr 3e-4", f"--lr {args.lr} --lora_rank {lora_rank}")
    out = args.output_dir / f"{args.split}_rank_{lora_rank}_lr_{args.lr if lora_rank else 3e-4}_{seed}"
    if not (out / "done").exists():
        files = [args.demo / f"data/{split}.parquet" for split in ("train", args.split)]
        files = "--train_files", files[0], "--val_files", files[1], "--no-val_before_train"
        model = "--model", args.demo / "sft/checkpoints/latest/hf", "--output_dir", out, "--seed", seed
        run("GRPO", {}, "algos/grpo.py", *model, *files, *flags.split(), "--save_freq", 0, "--test_freq", 0)
        (out / "done").touch()
    return read_metrics(out, 0)[-1]["val-core/arithmetic/acc/mean@1"]


def main():
    args = tyro.cli(Args)
    rows = {rank: [accuracy(args, rank, seed) for seed in args.seeds] for rank in args.lora_ranks}
    table = Table("rank", *(f"seed {seed}" for seed in args.seeds), "mean")
    for rank, row in rows.items():
        table.add_row(f"{rank or 'full'}", *(f"{x:.1%}" for x in row), f"{np.mean(row):.1%}")
    Console().print(table)
    save(args.output_dir / "results.json", args, dict(accuracy=rows))


if __name__ == "__main__":
    main()
