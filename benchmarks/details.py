"""Which details of GRPO matter? One is changed at a time, with the same seeds and the same SFT model.

    python benchmarks/details.py   # an hour for each seed on one quiet core

A detail's effect is the difference of the accuracy on held-out questions, mean over the validations of a run,
from that of the defaults with the same seed. Writes runs/sums with data and model, and runs/details:
results.json, and a run directory each; what is there already is not run again.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.stages import Stages, curve
from benchmarks.lib.workload import ROOT, markdown, save
from system.arguments import command_line

SUMS = ROOT / "runs/sums"  # data and model
# four optimizer steps in a step: with one, clips and old policies do nothing
DEFAULTS = (
    "--max_prompt_length 16 --max_response_length 8 --train_batch_size 32 --ppo_mini_batch_size 8"
    " --group_size 8 --lr 1e-4 --weight_decay 0 --test_freq 5 --save_freq 0"
    " --gradient_checkpointing none"
)
# of the tiny model's SFT, on 600 of the 6,000 answers
SFT = (
    "--max_length 32 --train_batch_size 64 --lr 1e-3 --lr_schedule constant"
    " --warmup_steps 20 --test_freq 50 --gradient_checkpointing none --save_freq 0"
)
DETAILS = {  # what is changed: flags
    "defaults": "",
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
    "KL loss, 0.05, k3": "--use_kl_loss --kl_loss_coef 0.05 --kl_kind k3",
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


@dataclass
class Args:
    output_dir: Path = ROOT / "runs/details"
    """Directory of the runs."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Seeds of a run's data order and sampling."""


def write_sums():
    """Two-digit sums and a tiny model that has seen some of them."""
    stages = Stages(SUMS, 3)
    words = ["data_prep/arithmetic.py", "--test_size", 512, "--local_save_dir", SUMS / "data"]
    stages.run("data", "data", words)
    seen = SUMS / "data/sft.parquet"
    pq.write_table(pq.read_table(SUMS / "data/train.parquet").slice(0, 600), seen)
    stages.run("model", "model", ["data_prep/tiny_model.py", "--local_save_dir", SUMS / "model"])
    words = ["algos/sft.py", "--model", SUMS / "model", "--train_files", seen]
    words += ["--val_files", SUMS / "data/val.parquet"]
    stages.train("sft", "SFT", words + SFT.split(), 400, ranks=2)


def accuracy(stages, detail, seed):
    """On held-out questions, mean over the validations of a run after the first."""
    script = "algos/dapo.py" if "DAPO" in detail else "algos/grpo.py"
    words = [script, "--model", SUMS / "sft/checkpoints/latest/hf", "--seed", seed]
    words += ["--train_files", SUMS / "data/train.parquet", "--val_files", SUMS / "data/val.parquet"]
    name = f"{detail.replace(' ', '_')}_{seed}"
    stages.train(name, detail[:20], words + DEFAULTS.split() + DETAILS[detail].split(), 60)
    _, values = curve(stages.out / name, "val-core/arithmetic/acc/mean@1")
    return statistics.mean(values[1:])


def interval(differences):
    """Half of a 95 % interval of the mean, by Student's t."""
    n = len(differences)
    quantile = np.quantile(np.random.default_rng(0).standard_t(n - 1, 10**6), 0.975)
    return quantile * np.std(differences, ddof=1) / np.sqrt(n)


def main():
    args = command_line(Args)
    write_sums()
    stages = Stages(args.output_dir, len(DETAILS) * len(args.seeds))
    found = {detail: [] for detail in DETAILS}
    for seed in args.seeds:  # seed by seed: a run that is stopped has whole ones
        for detail in DETAILS:
            found[detail].append(accuracy(stages, detail, seed))
    rows = []
    for detail, values in found.items():
        effect = np.array(values) - found["defaults"]
        half = ""
        if len(args.seeds) > 1 and effect.any():
            half = f"± {100 * interval(effect):.1f}"
        rows.append([detail, f"{np.mean(values):.1%}", f"{100 * effect.mean():+.1f}", half])
    print(markdown(["", "accuracy", "effect", "95 %"], rows))
    save(args.output_dir / "results.json", args, dict(accuracy=found))


if __name__ == "__main__":
    main()
