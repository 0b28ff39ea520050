"""The stages of post-training one after the other, on its sums: each takes what the last one made.

    python benchmarks/experiments/pipeline.py     # a quarter of an hour on two cores

SFT -> its samples, scored -> RFT; DPO; reward model -> PPO, whose judge is that model alone. SFT -> GRPO ->
its right samples teach a smaller model -> DPO on its own pairs. Writes runs/pipeline: a directory a stage,
eval/, summary.json; what is done is not run again. The commands one by one: docs/guides/pipeline.md
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.experiments.sums import FLAGS
from benchmarks.lib.stages import ROOT, run
from system.arguments import command_line

STEP = "--save_freq 0 --lr_schedule constant --gradient_checkpointing none"
SFT = f"{STEP} --max_length 32 --train_batch_size 64 --warmup_steps 20 --test_freq 0"
PAIRS = f"{STEP} --max_length 32 --train_batch_size 64 --warmup_steps 5 --test_freq 0"
RL = f"{FLAGS['grpo']} --total_steps 60 --save_freq 0"
LIMITS, SAMPLES = FLAGS["generate"], "--n_samples 8 --temperature 1"


@dataclass
class Args:
    output_dir: Path = ROOT / "runs/pipeline"
    """Directory of the stages."""
    seed: int = 1
    """Seed of the trainers."""
    ranks: int = min(2, os.cpu_count())
    """Processes of the trainers, one thread each."""


def main():
    args, seconds = command_line(Args), {}
    out = args.output_dir
    train, val = ("--train_files", out / "data/train.parquet"), ("--val_files", out / "data/val.parquet")
    hf = lambda name: out / name / "checkpoints/latest/hf"

    def once(name, made, script, *flags, **options):
        if not made.exists():
            run(name, seconds, script, *flags, **options)

    def trainer(name, script, flags, *more):
        common = "--output_dir", out / name, "--seed", args.seed, *flags.split()
        once(name, hf(name), f"algos/{script}.py", *common, *more, ranks=args.ranks)

    def samples(name):
        """Responses of a model to the training prompts, scored, as rows for SFT and pairs -> where."""
        answers, scored, rows = (out / f"{name}_{x}" for x in ("samples.parquet", "scored", "rows"))
        flags = "--model", hf(name), "--data", train[1], "--output", answers, *f"{SAMPLES} {LIMITS}".split()
        once(f"{name}: samples", answers, "algos/generate.py", *flags)
        flags = "--data", answers, "--output", scored
        once(f"{name}: scores", scored / "results.json", "algos/eval.py", *flags, stdout=DEVNULL)
        flags = scored / "scored_A.parquet", "--local_save_dir", rows
        once(f"{name}: rows", rows, "data_prep/rejection.py", *flags)
        return rows

    once("data", out / "data", "data_prep/arithmetic.py", "--local_save_dir", out / "data")
    once("model", out / "model", "data_prep/tiny_model.py", "--local_save_dir", out / "model")
    small = "--hidden_size", 64, "--heads", 2, "--kv_heads", 2, "--intermediate_size", 256
    once("small", out / "small", "data_prep/tiny_model.py", "--local_save_dir", out / "small", *small)
    # ---- supervised, then its own samples, four ways
    trainer("sft", "sft", f"{SFT} --total_steps 250 --lr 1e-3", "--model", out / "model", *train)
    start, rows = ("--model", hf("sft")), samples("sft")
    trainer("rft", "sft", f"{SFT} --total_steps 150 --lr 3e-4", *start, "--train_files", rows / "sft.parquet")
    pairs = "--train_files", rows / "pairs.parquet"
    trainer("dpo", "dpo", f"{PAIRS} --total_steps 100 --lr 1e-4", *start, *pairs)
    trainer("rm", "rm", f"{PAIRS} --total_steps 200 --lr 3e-4", *start, *pairs)
    # the judge is the reward model; the rules, of weight 0, only look on
    judge = "--reward_model", hf("rm"), *"--reward_weights 0 1 --critic_lr 1e-3".split()
    trainer("ppo", "ppo", RL, *start, *train, *val, *judge)
    # ---- by rules, then what it found taught to a smaller model
    trainer("grpo", "grpo", RL, *start, *train, *val)
    right = "--train_files", samples("grpo") / "sft.parquet"
    trainer("student", "sft", f"{SFT} --total_steps 800 --lr 2e-3", "--model", out / "small", *right)
    pairs = "--train_files", samples("student") / "pairs.parquet"
    trainer("student_dpo", "dpo", f"{PAIRS} --total_steps 100 --lr 1e-4", "--model", hf("student"), *pairs)

    # ---- held-out sums
    names = "sft", "rft", "dpo", "ppo", "grpo", "student", "student_dpo"
    for name in names:
        answers = out / name / "test.parquet"
        files = "--model", hf(name), "--data", out / "data/test.parquet", "--output", answers
        once(f"{name}: test", answers, "algos/generate.py", *files, *LIMITS.split())
    answers = [out / name / "test.parquet" for name in names]
    run("eval", seconds, "algos/eval.py", "--data", *answers, "--output", out / "eval", stdout=DEVNULL)
    results = json.loads((out / "eval/results.json").read_text()).values()
    right = {name: file["all"]["mean@1"] for name, file in zip(names, results, strict=True)}
    (out / "summary.json").write_text(json.dumps(dict(right=right, seconds=seconds), indent=2) + "\n")
    table = Table("", "right", title="512 held-out sums, greedy")
    for name, share in right.items():
        table.add_row(name, f"{share:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
