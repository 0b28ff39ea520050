"""PPO against reward models alone: what they say of its responses, and what share of them is right.

    make demo                               # data and SFT model
    python benchmarks/reward_hacking.py     # a quarter of an hour on two cores

Three reward models, which differ by their seed, learn from pairs of the SFT model's samples. PPO has one of
them, one and a KL term, the minimum of all. Writes runs/reward_hacking: results.json, reward_hacking.png, a
directory a stage; what is there already is not made again.
"""

from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import matplotlib
import numpy as np
import pyarrow.parquet as pq
import tyro
from demo import FLAGS, ROOT, run
from rich.console import Console
from rich.table import Table
from seeds import curve
from workload import read_metrics, save

matplotlib.use("agg")
import matplotlib.pyplot as plt

SAMPLES = f"{FLAGS['tiny']['generate']} --n_samples 8 --temperature 1"
RM = "--max_length 32 --lr 3e-4 --total_epochs 3 --test_freq 40 --save_freq 0 --no-gradient_checkpointing"
PPO = f"{FLAGS['tiny']['grpo']} --save_freq 0 --total_steps 20 --critic_lr 1e-3"
PPO = PPO.replace("--test_freq 10", "--test_freq 2")
# the rules, of weight 0, only look on
CONTESTANTS = {
    "one model": "--reward_weights 0 1",
    "one model, KL": "--reward_weights 0 1 --use_kl_in_reward --kl_coef 0.1",
    "minimum of three": "--reward_weights 0 1 1 1 --reward_aggregation min",
}
SCORE, RIGHT = "critic/score/mean", "val-core/arithmetic/acc/mean@1"


@dataclass
class Args:
    demo: Path = ROOT / "runs/demo"
    """Directory of `make demo`, for its data and its SFT model."""
    output_dir: Path = ROOT / "runs/reward_hacking"
    """Directory of the runs."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of PPO; that with one model has the one of the same seed."""


def train(args):
    """All runs -> {contestant: directories of its runs}, those of the reward models."""
    out, data, sft = args.output_dir, args.demo / "data", args.demo / "sft/checkpoints/latest/hf"

    def once(made, script, *flags, **options):
        if not made.exists():
            run(script, {}, script, *flags, **options)

    def trainer(name, script, flags, seed, *more):
        common = "--model", sft, "--output_dir", out / name, "--seed", seed, *flags.split(), *more
        once(out / name / "checkpoints/latest/hf", f"algos/{script}.py", *common)
        return out / name

    # ---- pairs: those of the last prompts are for validation
    prompts, answers, scored = (out / f"{name}.parquet" for name in ("prompts", "answers", "scored_A"))
    out.mkdir(parents=True, exist_ok=True)
    pq.write_table(pq.read_table(data / "train.parquet").slice(0, 2500), prompts)
    flags = "--model", sft, "--data", prompts, "--output", answers, *SAMPLES.split()
    once(answers, "algos/generate.py", *flags)
    once(scored, "algos/eval.py", "--data", answers, "--output", out, stdout=DEVNULL)
    for name, rows in (("train", (0, 2000)), ("val", (2000, 500))):
        (out / name).mkdir(exist_ok=True)
        pq.write_table(pq.read_table(scored).slice(*rows), out / name / "scored.parquet")
        flags = out / name / "scored.parquet", "--local_save_dir", out / name
        once(out / name / "pairs.parquet", "data_prep/rejection.py", *flags)
    # ---- judges, and PPO
    files = "--train_files", out / "train/pairs.parquet", "--val_files", out / "val/pairs.parquet"
    judges = [trainer(f"rm_{seed}", "rm", RM, seed, *files) for seed in (1, 2, 3)]
    files, runs = ("--train_files", data / "train.parquet", "--val_files", data / "val.parquet"), {}
    for seed in args.seeds:
        for name, flags in CONTESTANTS.items():
            used = judges if "three" in name else [judges[(seed - 1) % 3]]
            models = "--reward_model", *(judge / "checkpoints/latest/hf" for judge in used)
            where = f"{name.replace(',', '').replace(' ', '_')}_{seed}"
            runs.setdefault(name, []).append(trainer(where, "ppo", f"{PPO} {flags}", seed, *files, *models))
    return runs, judges


def main():
    args = tyro.cli(Args)
    runs, judges = train(args)
    figure, panels = plt.subplots(1, len(runs), figsize=(13, 3.6), layout="constrained", sharey=True)
    table = Table("", "reward, first step", "last step", "right at first", "most", "at last")
    results = dict(judges=[read_metrics(judge, 0)[-1]["val/accuracy"] for judge in judges])
    for axes, (name, outs) in zip(panels, runs.items(), strict=True):
        (steps, score), (tests, right) = (
            [*zip(*(curve(out, key) for out in outs))] for key in (SCORE, RIGHT)
        )
        score, right, beside = np.array(score), np.array(right), axes.twinx()
        for side, x, y, color in ((axes, steps[0], score, "C3"), (beside, tests[0], right, "C0")):
            side.plot(x, y.mean(0), color=color)
            side.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.15, lw=0)
        axes.set(title=name, xlabel="step")
        beside.set(ylim=(0, 1))
        results[name] = dict(reward=score.tolist(), right=right.tolist())
        values = right[:, 0], right.max(1), right[:, -1]
        shares = (f"{x.mean():.1%} ({x.min():.1%} to {x.max():.1%})" for x in values)
        table.add_row(name, *(f"{x:.2f}" for x in score.mean(0)[[0, -1]]), *shares)
    panels[0].set_ylabel("reward of the models", color="C3")
    beside.set_ylabel("validation accuracy", color="C0")
    figure.savefig(args.output_dir / "reward_hacking.png", dpi=120)
    Console().print(table)
    save(args.output_dir / "results.json", args, results)


if __name__ == "__main__":
    main()
