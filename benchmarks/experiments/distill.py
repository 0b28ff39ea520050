"""The sums' model after GRPO teaches its model before: distill.py, GRPO and SFT on the teacher's samples.

    python benchmarks/experiments/sums.py; python benchmarks/experiments/distill.py

Each has 60 optimizer steps on 512 responses: of the student to 32 prompts; for SFT of the teacher, 6 to each
training prompt. Rates are those of its GRPO. Writes runs/distill: results.json, distill.png, a run
directory each; what is there already is not run again.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.experiments.seeds import held_out
from benchmarks.experiments.sums import FLAGS
from benchmarks.lib.stages import ROOT, run
from benchmarks.lib.workload import curve, read_metrics, save
from data_prep.lib.schema import write_parquet
from system.arguments import command_line

METHODS = "distill full", "distill sampled", "GRPO", "SFT"
RL = f"{FLAGS['grpo']} --total_steps 60 --save_freq 0"
SFT = "--max_length 32 --train_batch_size 512 --lr 3e-4 --lr_schedule linear --warmup_steps 5"
SFT += " --weight_decay 0 --gradient_checkpointing none --total_steps 60 --save_freq 0"
SAMPLES = FLAGS["generate"].split() + "--n_samples 6 --temperature 1".split()


@dataclass
class Args:
    demo: Path = ROOT / "runs/sums"
    """Directory of sums.py: its data, and its model after GRPO, the teacher."""
    student: Path = ROOT / "runs/sums/sft/checkpoints/latest/hf"
    """The student: a Hugging Face directory."""
    output_dir: Path = ROOT / "runs/distill"
    """Directory of the runs."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the runs."""
    ranks: int = 1
    """Processes of the trainers, one thread each."""


def train(args, name, seed):
    """One method with one seed -> its directory."""
    out, data = args.output_dir / f"{name.replace(' ', '_')}_{seed}", args.demo / "data/train.parquet"
    teacher, (script, *kl) = args.demo / "grpo/checkpoints/latest/hf", name.lower().split()
    if (out / "done").exists():
        return out
    if script == "sft":
        files = "--model", teacher, "--data", data, "--output", out / "samples.parquet", "--seed", seed
        run("samples", {}, "algos/generate.py", *files, *SAMPLES, ranks=args.ranks)
        rows, data = pq.read_table(out / "samples.parquet").to_pylist(), out / "train.parquet"
        texts = ((row["prompt"], text) for row in rows for text in row["responses"])
        write_parquet((dict(prompt=p, extra_info=dict(answer=text)) for p, text in texts), data)
    flags = "--model", args.student, "--train_files", data, "--val_files", args.demo / "data/val.parquet"
    flags += "--output_dir", out, "--seed", seed, *(SFT if script == "sft" else RL).split()
    flags += ("--teacher", teacher, "--kl", *kl) if kl else ()
    run(name, {}, f"algos/{script}.py", *flags, ranks=args.ranks)
    (out / "done").touch()
    return out


def plot(runs, teacher, sft, path):
    """Accuracy, and KL from the teacher, over the tokens sampled so far: mean and range of the seeds."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axes, names, title, key, scale in (
        (left, METHODS[:3], "validation accuracy (greedy)", "val-core/arithmetic/acc/mean@1", "linear"),
        (right, METHODS[:2], "KL of student and teacher a token", "actor/teacher_kl", "log"),
    ):
        for color, name in enumerate(names):
            lengths = np.mean([curve(out, "response_length/mean")[1] for out in runs[name]], 0)
            curves = [curve(out, key) for out in runs[name]]
            tokens = np.cumsum([0, *512 * lengths])[np.array(curves[0][0], int)] / 1000
            values = np.array([values for _, values in curves])
            axes.plot(tokens, values.mean(0), label=name, color=f"C{color}")
            axes.fill_between(tokens, values.min(0), values.max(0), color=f"C{color}", alpha=0.15, lw=0)
        axes.set(xlabel="sampled tokens, thousands", title=title, yscale=scale)
        axes.grid(alpha=0.3)
    left.axhline(teacher, color="black", ls="--", label="teacher (held-out)")
    left.axhline(sft, color="C3", ls=":", label="SFT on its samples (held-out)")
    left.legend()
    figure.savefig(path, dpi=120)


def main():
    args = command_line(Args)
    runs = {name: [train(args, name, seed) for seed in args.seeds] for name in METHODS}
    right = np.array(held_out(args, [out for outs in runs.values() for out in outs])).reshape(len(runs), -1)
    teacher = json.loads((args.demo / "summary.json").read_text())["accuracy_after"]  # on the same rows
    plot(runs, teacher, right[-1].mean(), args.output_dir / "distill.png")
    columns = *(f"seed {seed}" for seed in args.seeds), "mean", "deviation", "seconds per step"
    results, table = (
        {},
        Table(f"teacher {teacher:.1%}", *columns),
    )
    for (name, outs), row in zip(runs.items(), right, strict=True):
        lines = [read_metrics(out, 2) for out in outs]
        steps = [np.median([m["timing_s/step"] - m.get("timing_s/testing", 0) for m in x]) for x in lines]
        results[name] = dict(held_out=row.tolist(), seconds_a_step=min(steps))  # others may be at work
        figures = *(f"{x:.1%}" for x in (*row, row.mean(), row.std(ddof=1))), f"{min(steps):.2f}"
        table.add_row(name, *figures)
    Console().print(table)
    save(args.output_dir / "results.json", args, dict(teacher=teacher, methods=results))


if __name__ == "__main__":
    main()
