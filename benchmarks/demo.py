"""`make demo`: from random weights to a model that adds, in minutes on a laptop's CPU.

`make demo-smollm2` is the same flow with a real model, which needs no SFT: it learns to follow instructions.

data -> random model -> sft.py -> grpo.py -> generate.py and eval.py on held-out rows, before and after GRPO.
Writes runs/demo: a run directory a stage, reward.png, summary.json. An earlier demo is moved aside first.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import pyarrow.parquet as pq
import tyro
from rich.console import Console
from rich.table import Table

matplotlib.use("agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
# CPUs that multiply in bfloat16 are twice as fast in it: AVX512-BF16, AMX, some of ARM
cpuinfo = Path("/proc/cpuinfo")
NATIVE = " --compute_dtype bfloat16" if cpuinfo.exists() and "bf16" in cpuinfo.read_text() else ""
# flags of a stage. SFT sees few answers, so that how right it is depends less on the step at which it stops;
# at a constant rate, since GRPO's first, noisy steps destroy what a decayed rate has settled
FLAGS = {
    "tiny": dict(
        model="data_prep/tiny_model.py",
        data="data_prep/arithmetic.py --test_size 512",
        sft="--max_length 32 --train_batch_size 64 --total_steps 400 --lr 1e-3 --lr_schedule constant"
        " --warmup_steps 20 --test_freq 50 --no-gradient_checkpointing",
        grpo="--max_prompt_length 16 --max_response_length 8 --train_batch_size 32 --ppo_mini_batch_size 32"
        " --group_size 16 --lr 3e-4 --lr_schedule linear --warmup_steps 20 --weight_decay 0"
        " --test_freq 10 --no-gradient_checkpointing",
        # for seeds.py and race.py: TRL's flags for the same work
        trl="--algo grpo --group_size 16 --response_length 8 --warmup_steps 20",
        generate="--max_prompt_length 16 --max_response_length 8",
    ),
    "smollm2": dict(
        model="data_prep/smollm2.py",
        data="data_prep/instructions.py",
        grpo="--max_prompt_length 128 --max_response_length 48 --train_batch_size 16 --ppo_mini_batch_size 16"
        " --lr 2e-5 --warmup_steps 5 --use_kl_loss --kl_loss_coef .05 --test_freq 8"
        " --max_tokens_per_microbatch 2048 --no-gradient_checkpointing" + NATIVE,
        trl="--algo grpo --group_size 8 --response_length 48 --beta .05"
        " --warmup_steps 5 --lr_schedule constant_with_warmup" + " --bf16" * bool(NATIVE),
        generate="--max_prompt_length 128 --max_response_length 48",
    ),
}
TITLES = {
    "tiny": "Two-digit sums, 1M parameters",
    "smollm2": "Verifiable instructions, SmolLM2-135M-Instruct",
}
QUIET = dict(TORCH_CPP_LOG_LEVEL="ERROR", TORCH_LOGS="-torch._library")  # of vLLM's NUMA nodes, of Triton
SFT_ROWS = 600  # of the 6,000 questions, those that SFT sees with their answers
GRPO_STEPS = {"tiny": 100, "smollm2": 24}
ONE_THREAD = dict(OMP_NUM_THREADS="1")
# a tiny model is faster in processes of one thread; of a larger one each process takes gigabytes
LAUNCH = {"tiny": dict(ranks=min(2, os.cpu_count())), "smollm2": dict(ranks=1, threads={})}
# what a stage does, and how long it takes with the tiny model on two cores, faster and slower ones
STAGES = {
    "data": ("Questions for training, validation and test", "a second"),
    "model": ("A model: SmolLM2, or a small one with random weights", "5 to 10 seconds"),
    "sft": ("Supervised fine-tuning: the model learns what an answer looks like", "45 to 75 seconds"),
    "grpo": (
        "GRPO: the model tries several answers to a question and learns from the right ones",
        "80 to 120 seconds",
    ),
    "before": ("Held-out questions, answered by the model as it was before GRPO", "10 to 20 seconds"),
    "after": ("The same questions, answered by the model after GRPO", "10 to 20 seconds"),
    "eval": ("Both scored", "2 seconds"),
}


@dataclass
class Args:
    size: Literal["tiny", "smollm2"] = "tiny"
    """tiny: sums, 1M random parameters; smollm2: instructions that rules can check, SmolLM2-135M-Instruct."""
    output_dir: Path = ROOT / "runs/demo"
    """Directory of the demo."""
    seed: int = 1
    """Seed of training."""


def run(name, seconds, script, *flags, ranks=0, threads=ONE_THREAD, **options):
    """Run one script as a user would, and note how long it took."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*(launcher if ranks else [sys.executable]), ROOT / script, *flags]
    print(
        f"$ {'torchrun --nproc_per_node ' + str(ranks) if ranks else 'python'} {script}", *flags, flush=True
    )
    begin = time.perf_counter()
    if subprocess.run(list(map(str, command)), env=os.environ | QUIET | threads, **options).returncode:
        raise SystemExit(f"error: the stage {name} failed")
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin


def plot(run_dir, path, size):
    """Score of the training responses and greedy validation accuracy over the steps."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, label, style in (
        ("critic/score/mean", "training score (sampled, T = 1)", "-"),
        (next(key for key in lines[0] if "acc/mean@1" in key), "validation accuracy (greedy)", "o-"),
    ):
        points = [(m["training/global_step"], m[key]) for m in lines if key in m]
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set(
        xlabel="GRPO step",
        ylabel="share right",
        ylim=(0, 1),
        title=f"{TITLES[size]}, GRPO on a CPU",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(args):
    out, seconds, begin = args.output_dir, {}, time.perf_counter()
    if out.exists():
        out.rename(out.with_name(f"{out.name}-{time.strftime('%Y%m%d-%H%M%S')}"))

    def stage(name, *command, **options):
        what, duration = STAGES[name]
        number = f"[{stages.index(name) + 1}/{len(stages)}]"
        print(f"\n{number} {what}" + f": {duration}" * (args.size == "tiny"))
        run(name, seconds, *command, **options)

    sft, train, val, test = (out / f"data/{split}.parquet" for split in ("sft", "train", "val", "test"))
    flags = {name: value.split() for name, value in FLAGS[args.size].items()}
    flags["grpo"] += ["--total_steps", GRPO_STEPS[args.size]]
    stages = [name for name in STAGES if name in flags or name not in FLAGS["tiny"]]
    stage("data", *flags["data"], "--local_save_dir", out / "data")
    stage("model", *flags["model"], "--local_save_dir", out / "model")
    common = "--val_files", val, "--save_freq", 0, "--seed", args.seed
    model = out / "model"
    if "sft" in flags:
        pq.write_table(pq.read_table(train).slice(0, SFT_ROWS), sft)
        directories = "--model", model, "--train_files", sft, "--output_dir", out / "sft"
        stage("sft", "algos/sft.py", *directories, *common, *flags["sft"], **LAUNCH[args.size])
        model = out / "sft/checkpoints/latest/hf"
    directories = "--model", model, "--train_files", train, "--output_dir", out / "grpo"
    stage("grpo", "algos/grpo.py", *directories, *common, *flags["grpo"], **LAUNCH[args.size])
    for name, answerer in (("before", model), ("after", out / "grpo")):
        files = "--model", answerer, "--data", test, "--output", out / f"{name}.parquet"
        stage(name, "algos/generate.py", *files, *flags["generate"], **LAUNCH[args.size])
    answers = out / "before.parquet", out / "after.parquet"
    stage("eval", "algos/eval.py", "--data", *answers, "--output", out / "eval")
    plot(out / "grpo", out / "reward.png", args.size)

    results = json.loads((out / "eval/results.json").read_text())
    before, after = (file["all"]["mean@1"] for file in results.values())
    total = time.perf_counter() - begin
    summary = dict(accuracy_before=before, accuracy_after=after, seconds=total, seconds_per_stage=seconds)
    (out / "summary.json").write_text(json.dumps(summary, indent=2))
    table = Table(title=f"{TITLES[args.size]}: held-out questions, greedy answers")
    for column in ("", "accuracy", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("before GRPO", f"{before:.1%}", f"{seconds['sft']:.0f}" if "sft" in seconds else "")
    table.add_row("after GRPO", f"{after:.1%}", f"{seconds['grpo']:.0f}")
    table.add_row("everything", "", f"{total:.0f}")
    Console().print(table)
    print(f"{out}/reward.png  {out}/summary.json")


if __name__ == "__main__":
    main(tyro.cli(Args))
