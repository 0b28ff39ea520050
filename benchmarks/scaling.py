"""How a trainer's step grows: time and peak memory over model size, response length, group size and ranks.

    python benchmarks/scaling.py --model models/tiny --output benchmarks/results/scaling.json

One size changes at a time, the others stay at the first of their lists. Training only, with random responses:
the sampler's cache would hide the trainer's memory. The peak is of the largest process, with a second copy
of the weights in the sampler's place.
"""

import itertools
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from os import getloadavg
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table
from throughput import Args as Step
from throughput import trainer_flags
from workload import launch, make_model, make_rows, read_metrics, save


@dataclass
class Args:
    model: str
    """Hugging Face directory of the model."""
    algo: str = "grpo"
    """Name of a script in algos/."""
    hidden_size: tuple[int, ...] = (128, 256, 512)
    """Widths of the model."""
    response_length: tuple[int, ...] = (64, 128, 256)
    """Tokens of each response."""
    group_size: tuple[int, ...] = (4, 8, 16)
    """Responses to each prompt, of which there are 4."""
    ranks: tuple[int, ...] = (1, 2)
    """Processes; they share all cores."""
    rounds: int = 3
    """Times over all sizes."""
    output: Path | None = None
    """JSON file for the results; None: the table only."""


def measure(args, work, size):
    """Run a few steps at one size -> seconds of the update, tokens of a step, and peak memory."""
    step = Step(args.model, args.algo, prompts=4, group_size=size["group_size"], prompt_length=64, steps=3)
    step.response_length = size["response_length"]
    shutil.rmtree(work / "run", ignore_errors=True)
    shutil.rmtree(work / "model", ignore_errors=True)
    width = size["hidden_size"]
    make_model(args.model, work / "model", dict(hidden_size=width, intermediate_size=3 * width))
    make_rows(work / "model", work / "rows.parquet", step.prompts, step.prompt_length, step.response_length)
    memory = launch(
        f"algos/{args.algo}.py",
        *trainer_flags(step, work / "model", work / "rows.parquet", work / "run"),
        ranks=size["ranks"],
        path=[Path(__file__).parent / "no_vllm"],
    )
    steps = read_metrics(work / "run", step.warmup)
    return dict(
        size,
        update_actor_s=statistics.median(m["timing_s/update_actor"] for m in steps),
        tokens=statistics.median(m["perf/total_num_tokens"] for m in steps),
        peak_memory_gb=memory,
        load=getloadavg()[0],
    )


def main():
    args = tyro.cli(Args)
    lists = {name: getattr(args, name) for name in ("hidden_size", "response_length", "group_size", "ranks")}
    base = {name: values[0] for name, values in lists.items()}
    sizes = [base] + [base | {name: v} for name, values in lists.items() for v in values[1:]]
    with tempfile.TemporaryDirectory() as work:
        measured = [
            measure(args, Path(work), size) for _, size in itertools.product(range(args.rounds), sizes)
        ]
    columns = "width", "response", "group", "ranks", "tokens", "update, s", "ms/token", "peak, GB"
    table = Table(*columns, title=f"algos/{args.algo}.py")
    for size in sizes:
        runs = [m for m in measured if m.items() >= size.items()]
        middle = {
            k: statistics.median(m[k] for m in runs) for k in ("update_actor_s", "tokens", "peak_memory_gb")
        }
        per_token = 1000 * middle["update_actor_s"] / middle["tokens"]
        figures = f"{middle['tokens']:.0f}", f"{middle['update_actor_s']:.2f}", f"{per_token:.2f}"
        table.add_row(*map(str, size.values()), *figures, f"{middle['peak_memory_gb']:.2f}")
    Console().print(table)
    if args.output:
        save(args.output, args, dict(runs=measured))


if __name__ == "__main__":
    main()
