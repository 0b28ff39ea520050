"""How much does GRPO learn with adapters of each rank, and with all weights? And SFT with LoRA, with AdaLoRA?

    python benchmarks/experiments/sums.py  # its task: data, and the SFT model to start from
    python benchmarks/experiments/lora.py                  # twelve runs, twenty minutes on one core
    python benchmarks/experiments/lora.py --algo sft --lora_ranks 1 4

Greedy accuracy on the held-out rows after training. What is there already is not run again.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.experiments.sums import FLAGS
from benchmarks.lib.stages import ROOT, run
from benchmarks.lib.workload import read_metrics, save
from system.arguments import command_line

SFT = (
    "--max_length 32 --train_batch_size 64 --total_steps 300 --warmup_steps 20 --test_freq 0 --save_freq 0"
    " --gradient_checkpointing none"
)


@dataclass
class Args:
    demo: Path = ROOT / "runs/sums"
    """Directory of sums.py."""
    output_dir: Path = ROOT / "runs/lora"
    """Directory of the runs."""
    algo: Literal["grpo", "sft"] = "grpo"
    """grpo: adapters of each rank, or all weights; sft: LoRA and AdaLoRA of each rank."""
    lora_ranks: tuple[int, ...] = (0, 1, 8, 32)
    """Ranks of the adapters; 0: all weights are trained."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds; the first model is one and the same."""
    lr: float | None = None
    """Learning rate of the adapters; None: the best on another seed. All weights learn at its."""
    split: str = "test"
    """Rows that are scored: test, or val to choose a learning rate by."""


def tuned(args, kind, lora_rank, seed):
    """SFT, if it is not done yet -> the loss and the share of right greedy answers."""
    lr = args.lr or 1e-2
    out = args.output_dir / f"{args.split}_{kind}_{lora_rank}_lr_{lr}_{seed}"
    train, held_out = (args.demo / f"data/{split}.parquet" for split in ("train", args.split))
    if not (out / "eval/results.json").exists():
        files = "--train_files", train, "--val_files", held_out, "--output_dir", out
        model = "--model", args.demo / "sft/checkpoints/latest/hf", "--seed", seed
        adapters = "--lora_kind", kind, "--lora_rank", lora_rank, "--lr", lr
        run("SFT", {}, "algos/sft.py", *model, *files, *adapters, *SFT.split())
        files = "--model", out, "--data", held_out, "--output", out / "answers.parquet"
        run("generate", {}, "algos/generate.py", *files, *FLAGS["generate"].split())
        run("eval", {}, "algos/eval.py", "--data", out / "answers.parquet", "--output", out / "eval")
    [scores] = json.loads((out / "eval/results.json").read_text()).values()
    return read_metrics(out, 0)[-1]["val/loss"], scores["all"]["mean@1"]


def accuracy(args, lora_rank, seed):
    """GRPO, if it is not done yet -> the share of right greedy answers."""
    lr = args.lr or 3e-3
    flags = f"{FLAGS['grpo']} --total_steps 60"
    if lora_rank:
        flags = flags.replace("--lr 3e-4", f"--lr {lr} --lora_rank {lora_rank}")
    out = args.output_dir / f"{args.split}_rank_{lora_rank}_lr_{lr if lora_rank else 3e-4}_{seed}"
    if not (out / "done").exists():
        files = [args.demo / f"data/{split}.parquet" for split in ("train", args.split)]
        files = "--train_files", files[0], "--val_files", files[1]
        model = "--model", args.demo / "sft/checkpoints/latest/hf", "--output_dir", out, "--seed", seed
        run("GRPO", {}, "algos/grpo.py", *model, *files, *flags.split(), "--save_freq", 0, "--test_freq", 0)
        (out / "done").touch()
    return read_metrics(out, 0)[-1]["val-core/arithmetic/acc/mean@1"]


def main():
    args = command_line(Args)
    if args.algo == "sft":
        names = [(kind, rank) for rank in args.lora_ranks for kind in ("lora", "adalora")]
        found = {f"{kind} {r}": [tuned(args, kind, r, seed) for seed in args.seeds] for kind, r in names}
        losses, rows = ({name: [pair[i] for pair in pairs] for name, pairs in found.items()} for i in (0, 1))
    else:
        rows = {rank: [accuracy(args, rank, seed) for seed in args.seeds] for rank in args.lora_ranks}
        losses = {}
    table = Table("rank", *(f"seed {seed}" for seed in args.seeds), "mean", "mean loss")
    for rank, row in rows.items():
        loss = f"{np.mean(losses[rank]):.4f}" if losses else ""
        table.add_row(f"{rank or 'full'}", *(f"{x:.1%}" for x in row), f"{np.mean(row):.1%}", loss)
    Console().print(table)
    save(args.output_dir / "results.json", args, dict(accuracy=rows, loss=losses))


if __name__ == "__main__":
    main()
