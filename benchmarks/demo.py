"""`make demo`: from random weights to a model that writes its work down, in minutes on a laptop's CPU.

`make demo-smollm2` is the same flow with a real model, which needs no SFT: it learns to follow instructions.

data -> random model -> sft.py -> grpo.py, with held-out questions before and after -> report.py
Writes runs/demo: a run directory a stage, logs/, reward.png, report.html, summary.json. A stopped
demo is resumed; a finished one is moved aside first.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.stages import DEVICE, RANKS, Stages, draw
from benchmarks.lib.workload import ROOT, read_metrics
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt

TASKS = {  # scripts of the stages, and their flags
    "tiny": dict(
        title="The last digit of a calculation, 0.5M parameters",
        model="data_prep/tiny_model.py --layers 2 --init_std .05",
        data="data_prep/arithmetic.py --operation last_digit --terms 9 --worked_share .35 --train_size 8000"
        " --test_size 512",
        # a third of its answers write the steps down; the others are guesses for so small a model
        sft="algos/sft.py --max_length 64 --train_batch_size 64 --lr 4e-3"
        " --lr_schedule cosine --warmup_steps 20 --gradient_checkpointing none",
        grpo="algos/grpo.py --max_prompt_length 24 --max_response_length 24 --train_batch_size 32"
        " --group_size 16 --lr 3e-4 --warmup_steps 5 --weight_decay 0 --test_freq 2"
        " --gradient_checkpointing none",
    ),
    "smollm2": dict(
        title="Verifiable instructions, SmolLM2-135M-Instruct",
        model="data_prep/smollm2.py",
        data="data_prep/instructions.py",
        grpo="algos/grpo.py --max_prompt_length 128 --max_response_length 48 --train_batch_size 16"
        " --lr 2e-5 --warmup_steps 5 --use_kl_loss --kl_loss_coef .05 --test_freq 8"
        " --max_tokens_per_microbatch 2048 --gradient_checkpointing none",
    ),
}
NEXT = r"""
next: your own data and reward (README.md), or a 7B model on GPUs, in an environment for GPUs (README.md):

python data_prep/gsm8k.py --local_save_dir data/gsm8k
torchrun --standalone --nproc_per_node 8 \
    algos/grpo.py --output_dir runs/grpo-7b \
    --model Qwen/Qwen2.5-7B-Instruct \
    --train_files data/gsm8k/train.parquet \
    --val_files data/gsm8k/test.parquet \
    --train_batch_size 128 --group_size 8 \
    --ppo_mini_batch_size 64 --lr 1e-6 \
    --max_response_length 1024 \
    --total_epochs 2 --test_freq 10 \
    --save_freq 10 --rollout_dump
"""


@dataclass
class Args:
    size: Literal["tiny", "smollm2"] = "tiny"
    """tiny: calculations, 0.5M random parameters; smollm2: instructions, SmolLM2-135M-Instruct."""
    output_dir: Path = ROOT / "runs/demo"
    """Directory of the demo."""
    seed: int = 1
    """Seed of training."""


def multiplies_in_bfloat16():
    """CPUs that do are twice as fast in it: AVX512-BF16, AMX, some of ARM."""
    return "bf16" in Path("/proc/cpuinfo").read_text()


def plot(run, accuracy, path, title):
    """Accuracy and response length over the steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    draw(left, run, "critic/score/mean", "training, sampled", "-")
    draw(left, run, accuracy, "held out, greedy", "o-")
    draw(right, run, "response_length/mean", "training, sampled", "-")
    left.set(xlabel="GRPO step", title="accuracy", ylim=(0, 1.02))
    right.set(xlabel="GRPO step", title="response length in tokens", ylim=(0, None))
    figure.suptitle(f"{title}, GRPO on {DEVICE}")
    figure.savefig(path, dpi=120)


def example(path):
    """A question of a step and the first sampled response, in one line."""
    row = json.loads(path.read_text().splitlines()[0])
    text = " ".join(f"{row['prompt_str']} {row['solution_str']}".split())
    mark = "correct" if row["score"] > 0.5 else f"wrong, it is {row['ground_truth']}"
    return f"{text[:400]}  ({mark})"


def main(args):
    begin = time.perf_counter()
    out = args.output_dir
    if (out / "summary.json").exists():
        out.rename(out.with_name(f"{out.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
    task = {name: words.split() for name, words in TASKS[args.size].items()}
    how = dict(ranks=RANKS)  # on a CPU a tiny model is faster in processes of one thread
    if args.size == "smollm2" and DEVICE == "a CPU":
        how = dict(threads=0)  # of a larger one each process takes gigabytes
    stages = Stages(out, 5 if "sft" in task else 4)
    stages.run("data", "data", task["data"] + ["--local_save_dir", out / "data"])
    stages.run("model", "model", task["model"] + ["--local_save_dir", out / "model"])
    common = ["--save_freq", 0, "--seed", args.seed]
    model = out / "model"
    if "sft" in task:
        words = task["sft"] + ["--model", model, "--train_files", out / "data/sft.parquet"] + common
        stages.train("sft", "SFT: imitate answers", words, 160, **how)
        model = out / "sft/checkpoints/latest/hf"
    words = task["grpo"] + ["--model", model, "--rollout_dump"] + common
    words += ["--train_files", out / "data/train.parquet", "--val_files", out / "data/test.parquet"]
    if args.size == "smollm2" and multiplies_in_bfloat16():
        words += ["--compute_dtype", "bfloat16"]
    stages.train("grpo", "GRPO: try and select", words, 24, **how)
    stages.run("report", "report", ["algos/report.py", out / "grpo", "--output", out / "report.html"])

    lines = read_metrics(out / "grpo")
    [accuracy] = [key for key in lines[0] if "acc/mean@1" in key]
    plot(out / "grpo", accuracy, out / "reward.png", TASKS[args.size]["title"])
    before = lines[0][accuracy]
    after = lines[-1][accuracy]
    short = lines[1]["response_length/mean"]
    long = lines[-1]["response_length/mean"]
    summary = dict(
        accuracy_before=before,
        accuracy_after=after,
        tokens_before=short,
        tokens_after=long,
        seconds=time.perf_counter() - begin,
        seconds_per_stage=stages.seconds,
    )
    (out / "summary.json").write_text(json.dumps(summary, indent=2))
    print(f"\n{'':30}{'before GRPO':>14}{'after GRPO':>14}")
    print(f"{'accuracy, held-out questions':30}{before:>14.1%}{after:>14.1%}")
    print(f"{'tokens of a response':30}{short:>14.1f}{long:>14.1f}\n")
    rollouts = sorted((out / "grpo/rollouts").glob("step_*.jsonl"))
    print(f"a response of the first step: {example(rollouts[0])}")
    print(f"a response of the last step:  {example(rollouts[-1])}\n")
    print(f"report: {out}/report.html   picture: {out}/reward.png   logs: {out}/logs")
    print(NEXT)


if __name__ == "__main__":
    main(command_line(Args))
