"""A long run: does the memory of a rank grow, or its open files and threads; are old checkpoints removed?

    python benchmarks/endurance.py --model models/tiny --train_files data/arithmetic/train.parquet \
        --val_files data/arithmetic/val.parquet

GRPO with validations and checkpoints. Every rank is looked at once a second; the slope is that of a line
through what was seen after the first third of the steps.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import tyro
from rich.console import Console
from rich.table import Table
from workload import CORES, ROOT, save


@dataclass
class Args:
    model: str
    """Hugging Face directory of the model."""
    train_files: str
    """Parquet file of training prompts."""
    val_files: str
    """Parquet file of validation prompts."""
    ranks: int = 2
    """Processes."""
    steps: int = 300
    """Steps of the run."""
    flags: str = (
        "--max_prompt_length 16 --max_response_length 8 --train_batch_size 16 --ppo_mini_batch_size 16"
    )
    """More flags of the trainer, in one string."""
    output: Path | None = None
    """JSON file for the results; None: the table only."""


def look(process):
    """{rank: (MB of memory, open files, threads)} of the ranks that live below a launcher."""
    seen = {}
    for child in process.children():
        try:
            rank = int(child.environ()["RANK"])
            seen[rank] = child.memory_info().rss / 2**20, child.num_fds(), child.num_threads()
        except (psutil.Error, KeyError):  # it ends, or is no rank
            continue
    return seen


def main():
    args = tyro.cli(Args)
    work = Path(tempfile.mkdtemp())
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={args.ranks}",
    ]
    command += [
        ROOT / "algos/grpo.py",
        "--model",
        args.model,
        "--output_dir",
        work / "run",
        *args.flags.split(),
    ]
    command += ["--train_files", args.train_files, "--val_files", args.val_files, "--total_steps", args.steps]
    command += ["--save_freq", 20, "--test_freq", 20, "--keep_checkpoints", 2]
    env = os.environ | dict(OMP_NUM_THREADS=str(max(1, CORES // args.ranks)))
    with (work / "log").open("w") as log:
        process = psutil.Popen(list(map(str, command)), env=env, stdout=log, stderr=subprocess.STDOUT)
    seen, metrics = [], work / "run/metrics.jsonl"
    while process.poll() is None:
        time.sleep(1)
        step = metrics.read_bytes().count(b"\n") - 1 if metrics.exists() else 0
        seen += [
            (step, rank, *values)
            for rank, values in look(process).items()
            if args.steps / 3 < step < args.steps
        ]
    if process.returncode:
        raise SystemExit((work / "log").read_text()[-4000:])
    table, results = Table("rank", "memory, MB", "slope, MB per 100 steps", "open files", "threads"), []
    for rank in range(args.ranks):
        step, _, memory, files, threads = np.array([x for x in seen if x[1] == rank]).T
        slope = 100 * np.polyfit(step, memory, 1)[0]
        spans = [(int(x.min()), int(x.max())) for x in (files, threads)]
        results.append(dict(memory_mb=[memory[0], memory[-1]], slope=slope, files=spans[0], threads=spans[1]))
        first, last = f"{memory[0]:.0f} to {memory[-1]:.0f}", [f"{a} to {b}" for a, b in spans]
        table.add_row(str(rank), first, f"{slope:+.2f}", *last)
    kept = sorted(path.name for path in (work / "run/checkpoints").iterdir())
    Console().print(table)
    print("checkpoints:", *kept)
    if args.output:
        save(args.output, args, dict(ranks=results, checkpoints=kept))


if __name__ == "__main__":
    main()
