"""VAPO's parts, one by one and together, on chains of sums: what does each add to PPO?

    python benchmarks/experiments/sums.py  # the random model
    python benchmarks/experiments/vapo.py      # three quarters of an hour on one core

Every run begins from one SFT model. Writes runs/vapo: results.json, curves.png, a run directory each;
what is there already is not run again.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.experiments.seeds import plt
from benchmarks.lib.stages import ROOT, run
from benchmarks.lib.workload import curve, save
from system.arguments import command_line

SFT = (
    "--max_length 40 --train_batch_size 64 --total_steps 600 --lr 1e-3 --lr_schedule constant"
    " --warmup_steps 20 --test_freq 50 --gradient_checkpointing none --save_freq 0"
)
PPO = (
    "--max_prompt_length 24 --max_response_length 24 --train_batch_size 32 --ppo_mini_batch_size 16"
    " --group_size 4 --lr 1e-4 --critic_lr 3e-4 --warmup_steps 5 --weight_decay 0 --lam .95"
    " --test_freq 10 --gradient_checkpointing none --save_freq 0"
)
STEPS, WARM_UP = 40, 10  # of the actor, and before them of the critic alone
RUNS = {
    "PPO": "",
    "+ critic warm-up": f"--critic_warmup {WARM_UP}",
    "+ decoupled GAE": "--critic_lam 1",
    "+ length-adaptive GAE": "--lam_alpha 1.5",  # 0.95 at the mean length
    "+ positive NLL": "--positive_nll_coef .1",
}
RUNS["VAPO: all, and clip-higher"] = " ".join([*RUNS.values(), "--clip_ratio_high .28"])
KEYS = {
    "held-out accuracy (greedy)": "val-core/arithmetic/acc/mean@1",
    "score of sampled responses": "critic/score/mean",
    "explained variance of the returns": "critic/vf_explained_var",
}


@dataclass
class Args:
    model: Path = ROOT / "runs/sums/model"
    """The random model of sums.py."""
    output_dir: Path = ROOT / "runs/vapo"
    """Directory of the runs."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of PPO."""


def stage(out, script, *flags, directory="--output_dir"):
    """Run a script with its output in `out`, unless it has been run -> out."""
    if not (out / "done").exists():
        run(out.name, {}, script, directory, out, *flags)
        (out / "done").touch()
    return out


def plot(runs, outs_of, path):
    """Mean over the seeds, and the range of the first and of the last."""
    figure, panels = plt.subplots(1, len(KEYS), figsize=(16, 4.5), layout="constrained")
    for axes, (title, key) in zip(panels, KEYS.items()):
        for name, outs in outs_of.items():
            curves = [curve(out, key) for out in outs]
            steps = np.array(curves[0][0]) - WARM_UP * ("critic_warmup" in runs[name])
            values = np.array([values for _, values in curves])
            [line] = axes.plot(steps, values.mean(0), label=name, lw=1 if name[0] == "+" else 2)
            if name[0] != "+":
                axes.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.1)
        axes.set(xlabel="step of the actor; below 0 of the critic alone", title=title)
    axes.legend(fontsize=8)
    figure.suptitle(f"Sums of 2 to 7 numbers: mean of {len(outs)} seeds; thick lines have their range")
    figure.savefig(path, dpi=100)


def compare(args, runs):
    """Run PPO with the flags of each of `runs` from one SFT model; a table, a plot and a JSON file."""
    outs_of = {}
    out, chain = args.output_dir, "--operation chain --digits 1 --terms 7".split()
    data = stage(out / "data", "data_prep/arithmetic.py", *chain, directory="--local_save_dir")
    files = "--train_files", data / "train.parquet", "--val_files"
    flags = "--model", args.model, *files, data / "val.parquet", *SFT.split()
    sft = stage(out / "sft", "algos/sft.py", *flags)
    files = "--model", sft / "checkpoints/latest/hf", *files, data / "test.parquet"
    for seed in args.seeds:
        for number, (name, more) in enumerate(runs.items()):
            steps = STEPS + WARM_UP * ("critic_warmup" in more)
            flags = f"{PPO} {more} --seed {seed} --total_steps {steps}".split()
            done = stage(out / f"ppo_{number}_{seed}", "algos/ppo.py", *files, *flags)
            outs_of.setdefault(name, []).append(done)
    plot(runs, outs_of, out / "curves.png")
    table, results = Table("", *(f"seed {x}" for x in args.seeds), "mean", "sd", *[*KEYS][1:]), {}
    for name, outs in outs_of.items():
        ends = [[curve(out, key)[1][-10:] for out in outs] for key in KEYS.values()]  # 10 steps
        last, score, explained = [x[-1] for x in ends[0]], np.mean(ends[1]), np.mean(ends[2])
        results[name] = dict(held_out=last, score=score, explained=explained)
        cells = [f"{x:.1%}" for x in (*last, np.mean(last), np.std(last, ddof=1), score)]
        table.add_row(name, *cells, *(f"{np.mean(x):.2f}" if x[0] else "" for x in ends[2:]))
    Console().print(table)
    save(out / "results.json", args, results)


if __name__ == "__main__":
    compare(command_line(Args), RUNS)
