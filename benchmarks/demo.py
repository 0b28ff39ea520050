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
from benchmarks.lib.stages import DEVICE, RANKS, ROOT, Stages
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt

# CPUs that multiply in bfloat16 are twice as fast in it: AVX512-BF16, AMX, some of ARM
cpuinfo = Path("/proc/cpuinfo")
NATIVE = " --compute_dtype bfloat16" if cpuinfo.exists() and "bf16" in cpuinfo.read_text() else ""
# flags of a stage. A third of SFT's answers write the steps down; the others are guesses for so small a model
FLAGS = {
    "tiny": dict(
        model="data_prep/tiny_model.py --layers 2 --init_std .05",
        data="data_prep/arithmetic.py --operation last_digit --terms 9 --worked_share .35 --train_size 8000"
        " --test_size 512",
        sft="--max_length 64 --train_batch_size 64 --total_epochs 2 --total_steps 160 --lr 4e-3"
        " --lr_schedule cosine --warmup_steps 20 --test_freq 0 --gradient_checkpointing none",
        grpo="--max_prompt_length 24 --max_response_length 24 --train_batch_size 32"
        " --group_size 16 --lr 3e-4 --warmup_steps 5 --weight_decay 0 --test_freq 2"
        " --gradient_checkpointing none",
    ),
    "smollm2": dict(
        model="data_prep/smollm2.py",
        data="data_prep/instructions.py",
        grpo="--max_prompt_length 128 --max_response_length 48 --train_batch_size 16"
        " --lr 2e-5 --warmup_steps 5 --use_kl_loss --kl_loss_coef .05 --test_freq 8"
        " --max_tokens_per_microbatch 2048 --gradient_checkpointing none" + NATIVE,
    ),
}
TITLES = {
    "tiny": "The last digit of a calculation, 0.5M parameters",
    "smollm2": "Verifiable instructions, SmolLM2-135M-Instruct",
}
GRPO_STEPS = {"tiny": 24, "smollm2": 24}
# on a CPU a tiny model is faster in processes of one thread; of a larger one each takes gigabytes
LAUNCH = {"tiny": dict(ranks=RANKS), "smollm2": dict(ranks=1 if DEVICE == "a CPU" else RANKS, threads={})}
NEXT = """
next: your data  python data_prep/gsm8k.py --local_save_dir data/gsm8k    (README: your own data and reward)
      your GPUs  torchrun --nproc_per_node 8 algos/grpo.py --model Qwen/Qwen2.5-7B-Instruct \\
                     --train_files data/gsm8k/train.parquet --output_dir runs/grpo
"""


@dataclass
class Args:
    size: Literal["tiny", "smollm2"] = "tiny"
    """tiny: calculations, 0.5M random parameters; smollm2: instructions, SmolLM2-135M-Instruct."""
    output_dir: Path = ROOT / "runs/demo"
    """Directory of the demo."""
    seed: int = 1
    """Seed of training."""


def plot(lines, path, title):
    """Accuracy and response length over the steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    accuracy = next(key for key in lines[0] if "acc/mean@1" in key)
    for axes, key, label, style in (
        (left, "critic/score/mean", "training, sampled", "-"),
        (left, accuracy, "held out, greedy", "o-"),
        (right, "response_length/mean", "training, sampled", "-"),
    ):
        points = [(m["training/global_step"], m[key]) for m in lines if key in m]
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    left.set(xlabel="GRPO step", title="accuracy", ylim=(0, 1.02))
    right.set(xlabel="GRPO step", title="response length in tokens", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{title}, GRPO on {DEVICE}")
    figure.savefig(path, dpi=120)


def example(path):
    """A question of a step and the first sampled response, in one line."""
    row = json.loads(path.read_text().splitlines()[0])
    said = " ".join(f"{row['prompt_str']} {row['solution_str']}".split())
    mark = "correct" if row["score"] > 0.5 else f"wrong, it is {row['ground_truth']}"
    return f"{said[:400]}  ({mark})"


def main(args):
    out, begin = args.output_dir, time.perf_counter()
    if (out / "summary.json").exists():
        out.rename(out.with_name(f"{out.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
    flags = {name: value.split() for name, value in FLAGS[args.size].items()}
    stages = Stages(out, 5 if "sft" in flags else 4)
    train, test = (out / f"data/{split}.parquet" for split in ("train", "test"))
    stages.run("data", "data", *flags["data"], "--local_save_dir", out / "data")
    stages.run("model", "model", *flags["model"], "--local_save_dir", out / "model")
    model, common = out / "model", ("--save_freq", 0, "--seed", args.seed)
    if "sft" in flags:
        files = "--model", model, "--train_files", out / "data/sft.parquet", "--output_dir", out / "sft"
        title = "SFT: imitate answers"
        stages.run("sft", title, "algos/sft.py", *files, *common, *flags["sft"], **LAUNCH[args.size])
        model = out / "sft/checkpoints/latest/hf"
    files = "--model", model, "--train_files", train, "--val_files", test, "--output_dir", out / "grpo"
    steps = "--total_steps", GRPO_STEPS[args.size], "--rollout_dump"
    title = "GRPO: try and select"
    stages.run("grpo", title, "algos/grpo.py", *files, *common, *flags["grpo"], *steps, **LAUNCH[args.size])
    stages.run("report", "report", "algos/report.py", out / "grpo", "--output", out / "report.html")

    lines = [json.loads(line) for line in (out / "grpo/metrics.jsonl").read_text().splitlines()]
    plot(lines, out / "reward.png", TITLES[args.size])
    key = next(key for key in lines[0] if "acc/mean@1" in key)
    before, after = lines[0][key], lines[-1][key]
    short, long = lines[1]["response_length/mean"], lines[-1]["response_length/mean"]
    rollouts = sorted((out / "grpo/rollouts").glob("step_*.jsonl"))
    summary = dict(accuracy_before=before, accuracy_after=after, seconds=time.perf_counter() - begin)
    summary |= dict(tokens_before=short, tokens_after=long, seconds_per_stage=stages.seconds)
    (out / "summary.json").write_text(json.dumps(summary, indent=2))
    print(f"\n{'':30}{'before GRPO':>14}{'after GRPO':>14}")
    print(f"{'accuracy, held-out questions':30}{before:>14.1%}{after:>14.1%}")
    print(f"{'tokens of a response':30}{short:>14.1f}{long:>14.1f}\n")
    print(f"a response of the first step: {example(rollouts[0])}")
    print(f"a response of the last step:  {example(rollouts[-1])}\n")
    print(f"report: {out}/report.html   picture: {out}/reward.png   logs: {out}/logs")
    print(NEXT)


if __name__ == "__main__":
    main(command_line(Args))
