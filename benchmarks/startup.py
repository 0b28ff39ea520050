"""CPU seconds from the command to the first step, sample or result, of each script with a tiny model.

    python benchmarks/startup.py
    python benchmarks/startup.py --scripts grpo sft --before OTHER_CHECKOUT --output startup.json

Seconds are of the process and of those that it starts. `first`: a trainer has written the first line of
metrics.jsonl, or another script has ended. With --before each round has both checkouts in turn.
"""

import resource
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from os import getloadavg
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib import workload
from benchmarks.lib.workload import ROOT, launch, make_model, make_rows, medians, save
from system.arguments import command_line

STEP = "--model model --train_files rows.parquet --output_dir new --total_steps 1 --train_batch_size 4"
RL = f"{STEP} --ppo_mini_batch_size 4 --max_prompt_length 96 --max_response_length 16"
RL += f" --reward_fn {ROOT}/benchmarks/lib/alternating.py:score"
SCRIPTS = {  # in this order: some read what those before have left; `new` is removed before each
    "data_prep/arithmetic": "--local_save_dir new --train_size 64 --val_size 8 --test_size 8",
    "data_prep/tiny_model": "--local_save_dir new --layers 2",
    "algos/sft": STEP,
    "algos/rm": STEP,
    "algos/dpo": STEP,
    "algos/grpo": RL,
    "algos/dapo": RL,
    "algos/ppo": RL,
    "algos/agent": f"{RL} --env {ROOT}/benchmarks/lib/talk_env.py:Calls --tool_parser hermes",
    "algos/distill": f"{RL} --teacher model",
    "algos/generate": "--model model --data rows.parquet --output new --max_response_length 16",
    "algos/eval": "--data answers.parquet --output new",
    "algos/report": "run --output new",
    "algos/export": "run new --save_dtype bfloat16",
    "algos/quantize": "model new",
}
PARTS = {"first_cpu_s": "first, CPU s", "end_cpu_s": "end, CPU s", "first_s": "first, s"}
KEPT = {"algos/generate": "answers.parquet", "algos/sft": "run"}  # what the others read


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(SCRIPTS)
    """Scripts that are measured."""
    before: Path | None = None
    """Another checkout to measure in turn with this one."""
    rounds: int = 3
    """Runs of each script; the table has their medians."""
    output: Path | None = None
    """JSON file for the results; None: the table only."""


def measure(script, root, work):
    """Run a script of the checkout `root` -> CPU and wall seconds to the first step and to the end."""
    shutil.rmtree(work / "new", ignore_errors=True)
    (work / "new").unlink(missing_ok=True)
    inputs = "new", *(path.name for path in work.iterdir())
    words = [work / word if word in inputs else word for word in SCRIPTS[script].split()]
    workload.ROOT, stamps, usage = root, [], resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    launch(f"{script}.py", *words, watch=(work / "new/metrics.jsonl", stamps))
    wall, now = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - usage.ru_utime - usage.ru_stime
    first, first_cpu = stamps[0] if stamps else (begin + wall, cpu)
    cpu = max(cpu, first_cpu)  # without processes of environments, which outlive the script for a moment
    return dict(first_cpu_s=first_cpu, end_cpu_s=cpu, first_s=first - begin, load=getloadavg()[0])


def prepare(work):
    """The inputs: a model, rows with answers and pairs, a finished run and its model's answers."""
    sizes = "--layers 2 --tool_role --max_positions 1024".split()
    launch("data_prep/tiny_model.py", "--local_save_dir", work / "tiny", *sizes)
    make_model(work / "tiny", work / "model", {})
    make_rows(work / "model", work / "rows.parquet", 8, 32, 16, pairs=True)
    for script, name in KEPT.items():
        measure(script, ROOT, work)
        (work / "new").rename(work / name)


def show(results):
    """The table: medians over the rounds, a row for each script."""
    names = next(iter(results.values()))
    table = Table("script", *(f"{name}: {part}" for name in names for part in PARTS.values()))
    for script, by_root in results.items():
        middle = [medians(rounds) for rounds in by_root.values()]
        table.add_row(script, *(f"{m[part]:.2f}" for m in middle for part in PARTS))
    Console().print(table)


def main():
    args = command_line(Args)
    roots = dict(before=args.before.resolve()) if args.before else {}
    roots["now"] = ROOT
    results = {script: {name: [] for name in roots} for script in args.scripts}
    with tempfile.TemporaryDirectory() as work:
        prepare(Path(work))
        for _ in range(args.rounds):
            for script in args.scripts:
                for name, root in roots.items():
                    results[script][name].append(measure(script, root, Path(work)))
    workload.ROOT = ROOT
    show(results)
    if args.output:
        save(args.output, args, dict(seconds=results))


if __name__ == "__main__":
    main()
