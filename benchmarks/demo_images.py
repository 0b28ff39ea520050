"""`make demo-images`: a random model of under 1M parameters learns from rewards what it sees, on a CPU.

data -> random model -> sft.py, on answers that were drawn blindly: it learns the form of an answer -> from
there grpo.py -> held-out pictures, before and after. Writes runs/demo-images: a run directory a stage and
seed, images.png, summary.json; what is done is not run again.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.stages import RANKS, ROOT, Stages
from benchmarks.lib.workload import curve
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt

SFT = "--response_key extra_info.guess --max_length 64 --train_batch_size 64 --total_steps 80 --lr 1e-3"
SFT += " --lr_schedule constant --warmup_steps 20 --gradient_checkpointing none --test_freq 0"
LIMITS = "--max_prompt_length 64 --max_response_length 8"
RL = "--train_batch_size 32 --group_size 16 --total_steps 75 --test_freq 25"
RL += " --lr 5e-4 --warmup_steps 5 --weight_decay 0 --gradient_checkpointing none"
RL += " --max_tokens_per_microbatch 16384"


@dataclass
class Args:
    output_dir: Path = ROOT / "runs/demo-images"
    """Directory of the demo."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the whole flow but the data."""
    ranks: int = RANKS
    """Processes of the trainers, one thread each; by default one on each GPU, or two."""


def plot(outs, path):
    """Mean and range over the seeds of the training score and of greedy validation accuracy."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    lines = ("sampled", "critic/score/mean", "-"), ("greedy, held out", "val-core/shapes/acc/mean@1", "o-")
    for color, (label, key, style) in enumerate(lines):
        curves = [curve(out, key) for out in outs]
        steps, values = curves[0][0], np.array([values for _, values in curves])
        axes.plot(steps, values.mean(0), style, label=label, color=f"C{color}", markersize=4)
        axes.fill_between(steps, values.min(0), values.max(0), color=f"C{color}", alpha=0.15, lw=0)
    axes.set(xlabel="GRPO step", ylabel="share right", ylim=(0, 1.02))
    axes.set_title(f"The colour of a shape, under 1M parameters, seeds: {len(outs)}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main():
    args = command_line(Args)
    out, tests = args.output_dir, {}
    stages = Stages(out, 2 + 5 * len(args.seeds))
    data = "data_prep/shapes.py", "--local_save_dir", out / "data"
    stages.run("data", "data", *data)
    files = "--train_files", out / "data/train.parquet", "--val_files", out / "data/val.parquet"
    for seed in args.seeds:
        model, sft, rl = (out / f"{name}_{seed}" for name in ("model", "sft", "grpo"))
        flags = "--local_save_dir", model, "--seed", seed
        stages.run(model.name, "model", "data_prep/tiny_vlm.py", *flags)
        common = *files, "--seed", seed, "--save_freq", 0
        flags = "--model", model, "--output_dir", sft, *SFT.split(), *common
        stages.run(sft.name, "SFT: form of an answer", "algos/sft.py", *flags, ranks=args.ranks)
        flags = (
            "--model",
            sft / "checkpoints/latest/hf",
            "--output_dir",
            rl,
            *LIMITS.split(),
            *RL.split(),
            *common,
        )
        stages.run(rl.name, "GRPO: try and select", "algos/grpo.py", *flags, ranks=args.ranks)
        tests |= {f"before, seed {seed}": sft, f"after, seed {seed}": rl}
    answers = [model / "test.parquet" for model in tests.values()]
    for (name, model), path in zip(tests.items(), answers, strict=True):
        flags = "--model", model, "--data", out / "data/test.parquet", "--output", path, *LIMITS.split()
        stages.run(f"answers_{model.name}", f"answers {name}", "algos/generate.py", *flags)
    stages.run("eval", "score", "algos/eval.py", "--data", *answers, "--output", out / "eval")
    plot([out / f"grpo_{seed}" for seed in args.seeds], out / "images.png")

    results = json.loads((out / "eval/results.json").read_text()).values()
    summary = {name: file["all"]["mean@1"] for name, file in zip(tests, results, strict=True)}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    table = Table("", "accuracy", title="512 held-out pictures, greedy")
    for name, right in summary.items():
        table.add_row(name, f"{right:.1%}")
    Console().print(table)
    print(f"{out}/images.png  {out}/summary.json")


if __name__ == "__main__":
    main()
