"""Two-digit sums, the task that most experiments begin with: data, a random model, SFT, GRPO.

    python benchmarks/experiments/sums.py     # five minutes on two cores

Writes runs/sums: a run directory a stage. SFT sees 600 of the 6,000 answers, at a constant rate.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.stages import ROOT, Stages
from system.arguments import command_line

FLAGS = dict(
    sft="--max_length 32 --train_batch_size 64 --total_epochs 50 --total_steps 400 --lr 1e-3"
    " --lr_schedule constant --warmup_steps 20 --test_freq 50 --gradient_checkpointing none",
    grpo="--max_prompt_length 16 --max_response_length 8 --train_batch_size 32 --ppo_mini_batch_size 32"
    " --group_size 16 --lr 3e-4 --lr_schedule linear --warmup_steps 20 --weight_decay 0"
    " --test_freq 10 --gradient_checkpointing none",
    trl="--algo grpo --group_size 16 --response_length 8 --warmup_steps 20",
    generate="--max_prompt_length 16 --max_response_length 8",
)


@dataclass
class Args:
    output_dir: Path = ROOT / "runs/sums"
    """Directory of the stages."""
    seed: int = 1
    """Seed of training."""
    ranks: int = 2
    """Processes of the trainers, one thread each."""


def main(args):
    out, options = args.output_dir, dict(ranks=args.ranks)
    stages, common = Stages(out, 4), ("--save_freq", 0, "--seed", args.seed)
    train, val, sft = (out / f"data/{split}.parquet" for split in ("train", "val", "sft"))
    stages.run(
        "data", "data", "data_prep/arithmetic.py", "--test_size", 512, "--local_save_dir", out / "data"
    )
    pq.write_table(pq.read_table(train).slice(0, 600), sft)
    stages.run("model", "model", "data_prep/tiny_model.py", "--local_save_dir", out / "model")
    files = "--train_files", sft, "--val_files", val, "--output_dir", out / "sft"
    flags = "--model", out / "model", *files, *common, *FLAGS["sft"].split()
    stages.run("sft", "SFT", "algos/sft.py", *flags, **options)
    files = "--train_files", train, "--val_files", val, "--output_dir", out / "grpo"
    flags = "--model", out / "sft/checkpoints/latest/hf", *files, *common, *FLAGS["grpo"].split()
    stages.run("grpo", "GRPO", "algos/grpo.py", *flags, "--total_steps", 100, **options)


if __name__ == "__main__":
    main(command_line(Args))
