"""How fast GRPO is on one GPU, part by part, with random weights of 7B's width: ten minutes on an H100.

    python benchmarks/gpu_bench.py
    python benchmarks/gpu_bench.py --minutes 5

Each line is printed when it is measured, and is then in OUTPUT_DIR/gpu_bench.md. A part begins only if the
time that is planned for it is left. On a CPU the same parts run with a tiny model, in about a minute.
Docs: docs/results/gpu.md
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

BEGIN = time.time()
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu_memory import SIZES
from system.arguments import parse


@dataclass(kw_only=True)
class Args:
    minutes: float = 10.5  # budget; a part that does not fit is left out, and what runs at its end is stopped
    output_dir: Path = ROOT / "runs/gpu_bench"  # directory of the table and of the parts' output


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import torch

from benchmarks.lib import workload

CUDA = torch.cuda.is_available()
if CUDA:
    DEEP = SIZES["7B"]
    SHORT = (*DEEP[:2], 8, *DEEP[3:])  # eight of its layers
    ROWS = (8, 8, 256, 480)  # prompts, responses to each, tokens of both
else:
    DEEP = workload.TINY
    SHORT = workload.TINY
    ROWS = (4, 4, 16, 12)
# seconds on an H100, and all of a part's process
PLAN = {"training": 350, "sampling": 150, "GRPO": 75}
GRPO = "algos/grpo.py"
METRICS = (  # of a step, as the table has them
    "timing_s/gen",
    "timing_s/sync",
    "timing_s/update_actor",
    "perf/throughput",
    "perf/mfu/actor",
    "training/rollout_logp_diff_mean",
    "perf/max_memory_allocated_gb",
)


class Budget:
    """Time until `end`, and the table, which gets each line when it is measured."""

    def __init__(self, table, end):
        self.table = Path(table)
        self.end = float(end)

    def left(self):
        return self.end - time.time()

    def until(self, seconds):
        """When a part ends that is stopped after so many seconds, on a GPU."""
        if CUDA:
            return min(self.end, time.time() + seconds)
        return self.end

    def say(self, what, value):
        line = f"| {what} | {value} |"
        print(line, flush=True)
        with self.table.open("a") as file:
            file.write(line + "\n")

    def run(self, what, seconds, part, *inputs):
        """Run a part if the seconds that it takes on an H100 are left; if it fails the next one begins."""
        if not CUDA:
            seconds = 1
        if self.left() < seconds:
            self.say(what, f"left out: it takes {seconds} s, and {max(self.left(), 0):.0f} s are left")
            return
        try:
            part(*inputs)
        except (RuntimeError, ValueError, TypeError, OSError, LookupError, AttributeError) as error:
            first = (str(error).strip() or repr(error)).splitlines()[0].replace("|", "/")
            self.say(what, f"failed: {type(error).__name__}: {first[:200]}")


def follow(words, log, end, read=None):
    """Run a program until a time. RuntimeError with its last line if it fails.

    read: called now and then; says what is new, and returns whether that is enough.
    """
    env = os.environ | dict(HF_HUB_OFFLINE="1", OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
    with log.open("w") as output:
        stdout = output if read else None  # a worker writes lines of the table
        process = subprocess.Popen(words, stdout=stdout, stderr=output, env=env)
        try:
            while process.poll() is None and time.time() < end:
                time.sleep(0.1)
                if read and read():
                    return
            running = process.poll() is None
        finally:
            process.kill()
            process.wait()
    if read and read():
        return
    if running:
        raise RuntimeError("stopped at the end of its time")
    if process.returncode:
        raise RuntimeError((log.read_text().strip().splitlines() or ["no output"])[-1])


def worker(name, out, budget):
    """A process of lib/gpu_bench_worker.py, which writes its own lines."""
    end = budget.until(PLAN[name])
    words = workload.command("benchmarks/lib/gpu_bench_worker.py", [out, budget.table, end, name])
    follow(words, out / f"{name}.log", end)


def grpo(out, budget):
    """Run grpo.py for three steps, a line for each. Then it is stopped: it would save a checkpoint."""
    prompts, _, prompt_length, length = ROWS
    workload.make_rows(out / "short", out / "rows.parquet", 4 * prompts, prompt_length, length)
    flags = workload.sampling_flags(*ROWS)
    flags |= dict(model=out / "short", train_files=out / "rows.parquet", output_dir=out / "grpo")
    flags |= dict(total_steps=4, save_freq=0, gpu_memory_utilization=0.4)
    said = []

    def read():
        if (out / "grpo/metrics.jsonl").exists():
            for metrics in workload.read_metrics(out / "grpo")[len(said) : 3]:
                said.append(metrics)
                words = [f"{key} {metrics[key]:.4g}" for key in METRICS]
                budget.say(f"GRPO, step {len(said)}", ", ".join(words))
        return len(said) == 3

    shutil.rmtree(out / "grpo", ignore_errors=True)
    try:
        words = workload.command(GRPO, workload.words_of(flags))
        follow(words, out / "grpo.log", budget.until(PLAN["GRPO"]), read)
    finally:
        shutil.rmtree(out / "grpo", ignore_errors=True)


def main(args):
    out = args.output_dir.resolve()
    out.mkdir(parents=True, exist_ok=True)
    budget = Budget(out / "gpu_bench.md", BEGIN + 60 * args.minutes)
    head = f"gpu_bench at {workload.where(workload.machine())}\n\n| Part | Measured |\n|---|---|"
    print(head, flush=True)
    budget.table.write_text(head + "\n")
    budget.run("training", 90, worker, "training", out, budget)  # its parts look at the time themselves
    budget.run("sampling", PLAN["sampling"], worker, "sampling", out, budget)
    budget.run("GRPO", PLAN["GRPO"], grpo, out, budget)
    budget.say("all", f"{time.time() - BEGIN:.0f} s")
    for name in ("deep", "short"):  # gigabytes
        shutil.rmtree(out / name, ignore_errors=True)


if __name__ == "__main__":
    main(Args(**flags))
