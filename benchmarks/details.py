"""Which details of GRPO matter? One is changed at a time, with the same seeds and the same SFT model.

    python benchmarks/details.py   # an hour for each seed on one quiet core

SmolLM2, with what makes the greatest difference at equal cost; an hour for each seed on two quiet cores:

    make demo-smollm2                          # data and model
    python benchmarks/details.py --size smollm2 --seeds 1 --output_dir runs/details-smollm2

A detail's effect is the difference of the accuracy on held-out questions, mean over the validations of a run,
from that of the defaults with the same seed. Writes runs/sums with data and model, and runs/details:
results.json, and a run directory each; what is there already is not run again.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.demo import FLAGS
from benchmarks.lib.stages import ONE_THREAD, ROOT, Stages, run
from benchmarks.lib.workload import curve, save
from system.arguments import command_line

# four optimizer steps in a step: with one, clips and old policies do nothing
DEFAULTS = "--max_prompt_length 16 --max_response_length 8 --train_batch_size 32 --ppo_mini_batch_size 8"
DEFAULTS += " --group_size 8 --lr 1e-4 --weight_decay 0 --total_epochs 9 --total_steps 60 --test_freq 5"
DEFAULTS += " --save_freq 0 --gradient_checkpointing none"
# of the tiny model's SFT, on 600 of the 6,000 answers
SFT = "--max_length 32 --train_batch_size 64 --total_epochs 50 --total_steps 400 --lr 1e-3"
SFT += " --lr_schedule constant --warmup_steps 20 --test_freq 50 --gradient_checkpointing none --save_freq 0"
DETAILS = {  # what is changed: flags
    "advantage by batch (REINFORCE++)": "--adv_estimator reinforce_plus_plus_baseline",
    "advantage without the std (Dr. GRPO)": "--adv_estimator dr_grpo",
    "leave-one-out baseline (RLOO)": "--adv_estimator rloo",
    "mean over responses": "--loss_agg seq-mean-token-mean",
    "sum over tokens, constant norm": "--loss_agg seq-mean-token-sum-norm",
    "clip higher (0.28)": "--clip_ratio_high 0.28",
    "no clip": "--clip_ratio_low 1 --clip_ratio_high 1e9",
    "GSPO": "--policy_loss gspo",
    "CISPO": "--policy_loss cispo",
    "KL loss, 0.001": "--use_kl_loss",
    "KL loss, 0.05": "--use_kl_loss --kl_loss_coef 0.05",
    "entropy bonus, 0.01": "--entropy_coeff 0.01",
    "one optimizer step a step": "--ppo_mini_batch_size 32",
    "two passes over the responses": "--ppo_epochs 2",
    "64 prompts x 4": "--train_batch_size 64 --ppo_mini_batch_size 16 --group_size 4",
    "16 prompts x 16": "--train_batch_size 16 --ppo_mini_batch_size 4 --group_size 16",
    "bfloat16, importance weights": "--compute_dtype bfloat16",
    "bfloat16, no importance weights": "--compute_dtype bfloat16 --rollout_is None",
    "bfloat16, masked importance weights": "--compute_dtype bfloat16 --rollout_is None --rollout_rs token"
    " --rollout_rs_threshold 2",
    "constant groups sampled again (DAPO)": "",
}


class Size(NamedTuple):
    """A model with its data, and what is tried on it."""

    data: Path  # directory that `write_sums` or the demo writes
    model: str  # in it
    data_source: str
    flags: str  # of all runs
    details: dict
    threads: dict  # variables of the environment


SIZES = {
    "sums": Size(
        data=ROOT / "runs/sums",
        model="sft/checkpoints/latest/hf",
        data_source="arithmetic",
        flags=DEFAULTS,
        details=DETAILS,
        threads=ONE_THREAD,
    ),
    "smollm2": Size(
        data=ROOT / "runs/demo-smollm2",
        model="model",
        data_source="ifeval",
        flags=FLAGS["smollm2"]["grpo"] + " --total_steps 16 --test_freq 4 --save_freq 0",
        details={
            "32 prompts x 4": "--train_batch_size 32 --group_size 4",
            "8 prompts x 16": "--train_batch_size 8 --group_size 16",
        },
        threads={},
    ),
}


@dataclass
class Args:
    size: Literal["sums", "smollm2"] = "sums"
    """sums: a tiny model, every detail; smollm2: SmolLM2-135M-Instruct, the number of prompts."""
    data: Path | None = None
    """Directory of data and model; None: runs/sums, which is made, or that of the demo."""
    output_dir: Path = ROOT / "runs/details"
    """Directory of the runs."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Seeds of a run's data order and sampling."""


def write_sums(out):
    """Two-digit sums and a tiny model that has seen some of them."""
    stages = Stages(out, 3)
    train, val, sft = (out / f"data/{split}.parquet" for split in ("train", "val", "sft"))
    data = "--test_size", 512, "--local_save_dir", out / "data"
    stages.run("data", "data", "data_prep/arithmetic.py", *data)
    pq.write_table(pq.read_table(train).slice(0, 600), sft)
    stages.run("model", "model", "data_prep/tiny_model.py", "--local_save_dir", out / "model")
    files = "--train_files", sft, "--val_files", val, "--output_dir", out / "sft"
    stages.run("sft", "SFT", "algos/sft.py", "--model", out / "model", *files, *SFT.split(), ranks=2)


def train(args, name, flags, seed):
    """Accuracy on held-out questions of one run, mean over its validations after the first."""
    out = args.output_dir / f"{name.replace(' ', '_')}_{seed}"
    script = "algos/dapo.py" if "DAPO" in name else "algos/grpo.py"
    size = SIZES[args.size]
    data = args.data or size.data
    if not (out / "done").exists():
        files = ["--model", data / size.model, "--output_dir", out, "--seed", seed]
        for split in ("train", "val"):
            files += [f"--{split}_files", data / f"data/{split}.parquet"]
        run(name, {}, script, *files, *size.flags.split(), *flags.split(), ranks=1, threads=size.threads)
        (out / "done").touch()
    return float(np.mean(curve(out, f"val-core/{size.data_source}/acc/mean@1")[1][1:]))


def interval(differences):
    """Half of a 95 % interval of the mean, by Student's t."""
    n = len(differences)
    quantile = np.quantile(np.random.default_rng(0).standard_t(n - 1, 10**6), 0.975)
    return quantile * np.std(differences, ddof=1) / np.sqrt(n)


def main():
    args, found = command_line(Args), {}
    if args.size == "sums" and not args.data:
        write_sums(SIZES["sums"].data)
    for seed in args.seeds:  # seed by seed: a run that is stopped has whole ones
        for name, flags in {"defaults": "", **SIZES[args.size].details}.items():
            found.setdefault(name, []).append(train(args, name, flags, seed))
    base, table = np.array(found["defaults"]), Table("", "accuracy", "effect", "95 %")
    for name, values in found.items():
        effect = np.array(values) - base
        half = f"± {100 * interval(effect):.1f}" if len(base) > 1 and effect.any() else ""
        table.add_row(name, f"{np.mean(values):.1%}", f"{100 * effect.mean():+.1f}", half)
    Console().print(table)
    save(args.output_dir / "results.json", args, dict(accuracy=found))


if __name__ == "__main__":
    main()
