"""`make demo-images`: a random model of under 1M parameters learns from rewards what it sees, on a CPU.

data -> random model -> sft.py, on answers that were drawn blindly: it learns the form of an answer -> from
there grpo.py -> held-out pictures, before and after. Writes runs/demo-images: a run directory a stage,
images.png, summary.json; what is done is not run again.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.stages import RANKS, Stages, draw
from benchmarks.lib.workload import ROOT
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt

SFT = (
    "--response_key extra_info.guess --max_length 64 --train_batch_size 64 --lr 1e-3 --lr_schedule constant"
    " --warmup_steps 20 --gradient_checkpointing none --test_freq 0"
)
LIMITS = "--max_prompt_length 64 --max_response_length 8"
RL = (
    "--train_batch_size 32 --group_size 16 --test_freq 25 --lr 5e-4 --warmup_steps 5 --weight_decay 0"
    " --gradient_checkpointing none --max_tokens_per_microbatch 16384"
)


@dataclass
class Args:
    output_dir: Path = ROOT / "runs/demo-images"
    """Directory of the demo."""
    seed: int = 1
    """Seed of the whole flow but the data."""


def plot(run, path):
    """The training score and greedy validation accuracy."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    draw(axes, run, "critic/score/mean", "sampled", "-")
    draw(axes, run, "val-core/shapes/acc/mean@1", "greedy, held out", "o-")
    axes.set(xlabel="GRPO step", ylabel="share right", ylim=(0, 1.02))
    axes.set_title("The colour of a shape, under 1M parameters")
    figure.savefig(path, dpi=120)


def main():
    args = command_line(Args)
    out = args.output_dir
    stages = Stages(out, 7)
    stages.run("data", "data", ["data_prep/shapes.py", "--local_save_dir", out / "data"])
    seed = ["--seed", args.seed]
    stages.run("model", "model", ["data_prep/tiny_vlm.py", "--local_save_dir", out / "model"] + seed)
    common = ["--train_files", out / "data/train.parquet", "--val_files", out / "data/val.parquet"]
    common += ["--save_freq", 0] + seed

    words = ["algos/sft.py", "--model", out / "model"] + SFT.split() + common
    stages.train("sft", "SFT: form of an answer", words, 80, ranks=RANKS)
    words = ["algos/grpo.py", "--model", out / "sft/checkpoints/latest/hf"] + LIMITS.split() + RL.split()
    stages.train("grpo", "GRPO: try and select", words + common, 75, ranks=RANKS)

    stages.answer("before", "sft", LIMITS.split())
    stages.answer("after", "grpo", LIMITS.split())
    before, after = stages.scores(["sft", "grpo"])
    plot(out / "grpo", out / "images.png")
    results = dict(before=dict(accuracy=before), after=dict(accuracy=after))
    stages.finish("512 held-out pictures, greedy", results)


if __name__ == "__main__":
    main()
