"""`make demo-agent`: a random model of 1M parameters learns to use a calculator, in minutes on a CPU.

data -> random model -> sft.py, on conversations of which a third ask the calculator -> from there agent.py
with the calculator and, to compare, grpo.py without -> held-out products, before and after. Writes
runs/demo-agent: a run directory a stage, logs/, agent.png, summary.json. A finished stage is not run again.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.stages import RANKS, Stages, draw
from benchmarks.lib.workload import ROOT
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt

ENV = ["--env", ROOT / "envs/calculator.py:Calculator"]
SFT = (
    "--messages_key messages --max_length 48 --train_batch_size 64 --lr 1e-3 --lr_schedule constant"
    " --warmup_steps 20 --gradient_checkpointing none"
)
LIMITS = "--max_prompt_length 16 --max_response_length 32"
RL = (
    "--train_batch_size 16 --group_size 8 --test_freq 5 --lr 3e-4 --warmup_steps 2 --weight_decay 0"
    " --gradient_checkpointing none"
)


@dataclass
class Args:
    output_dir: Path = ROOT / "runs/demo-agent"
    """Directory of the demo."""
    seed: int = 1
    """Seed of the whole flow but the data."""


def plot(out):
    """Greedy validation accuracy, and the share that calls the tool."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    accuracy = "val-core/arithmetic/acc/mean@1"
    draw(axes, out / "agent", accuracy, "with the calculator: right, greedy", "o-")
    draw(axes, out / "agent", "env/used_ratio", "with the calculator: asks it, sampled", "--")
    draw(axes, out / "grpo", accuracy, "without: right, greedy", "o-")
    axes.set(xlabel="GRPO step", ylabel="share of responses", ylim=(0, 1.02))
    axes.set_title("Two-digit multiplication, 1M parameters")
    figure.savefig(out / "agent.png", dpi=120)


def asked(path):
    """The share of answers that called the calculator: they have several turns."""
    answers = pq.read_table(path).to_pylist()
    episodes = [json.loads(text) for row in answers for text in row.get("episodes", ())]
    return sum(episode["turns"] > 1 for episode in episodes) / len(answers)


def main():
    args = command_line(Args)
    out = args.output_dir
    stages = Stages(out, 9)
    words = ["data_prep/arithmetic.py", "--operation", "multiply", "--tool_share", 0.33]
    stages.run("data", "data", words + ["--local_save_dir", out / "data"])
    seed = ["--seed", args.seed]
    words = ["data_prep/tiny_model.py", "--tool_role", "--local_save_dir", out / "model"]
    stages.run("model", "model", words + seed)

    words = ["algos/sft.py", "--model", out / "model", "--train_files", out / "data/sft.parquet"]
    words += SFT.split() + ["--save_freq", 0] + seed
    stages.train("sft", "SFT: a third use the tool", words, 320, ranks=RANKS)
    words = ["--model", out / "sft/checkpoints/latest/hf", "--save_freq", 0] + seed
    words += ["--train_files", out / "data/train.parquet", "--val_files", out / "data/val.parquet"]
    words += LIMITS.split() + RL.split()
    stages.train("agent", "GRPO with calculator", ["algos/agent.py"] + words + ENV, 30, ranks=RANKS)
    stages.train("grpo", "GRPO without", ["algos/grpo.py"] + words, 30, ranks=RANKS)

    stages.answer("before", "sft", LIMITS.split() + ENV)
    stages.answer("with calculator", "agent", LIMITS.split() + ENV)
    stages.answer("without", "grpo", LIMITS.split())
    runs = {"before": "sft", "with the calculator": "agent", "without": "grpo"}
    results = {}
    for (name, run), right in zip(runs.items(), stages.scores(runs.values()), strict=True):
        results[name] = dict(right=right, asks=asked(out / run / "test.parquet"))
    plot(out)
    stages.finish("512 held-out products, greedy", results)


if __name__ == "__main__":
    main()
