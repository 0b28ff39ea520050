"""Rewards: scores per second of each scorer, in one process and in a pool; a batch with samples that hang.

Command:    python benchmarks/rewards.py --workers 2 --output benchmarks/results/rewards.json
The rows are plain ones of tests/golden, repeated; for math_verify, new formulas.  Compare within one run.
"""

import json
import sys
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data_prep.atomic import replacing
from rewards.manager import RewardManager


@dataclass
class Args:
    workers: int = 2
    """Processes of the pool."""
    rows: int = 256
    """Rows of a batch."""
    timeout_s: float = 10.0
    """Time-out of a sample, in seconds."""
    hanging: int = 5
    """Samples of the last batch that never end."""
    output: str = ""
    """JSON file for the results; empty: the table only."""


def batch(family, n):
    """n rows from the golden cases of a family, without those that are made to be slow."""
    cases = [json.loads(line) for line in (ROOT / "tests/golden" / f"{family}.jsonl").open()]
    plain = [case for case in cases if case["kind"] == "agree" and "bounded" not in case["why"]]
    keys = "data_source", "solution_str", "ground_truth", "extra_info"
    return [{key: case[key] for key in keys} for case in islice(cycle(plain), n)]


def formulas(n):
    """n rows of mathematics, each with another formula: the scorer remembers those that it has parsed."""
    rows = []
    for i in range(n):
        root, a, b = i % 7 + 2, i + 3, 2 * i + 1
        text = rf"So it is \boxed{{\frac{{{2 * a}\sqrt{{{root}}} + {b}}}{{2}}}}."
        truth = rf"{a}\sqrt{{{root}}} + \frac{{{b}}}{{2}}"
        row = dict(data_source="lighteval/MATH", solution_str=text, ground_truth=truth)
        rows.append(row | dict(extra_info={"use_math_verify": True}))
    return rows


def seconds(manager, rows):
    start = time.perf_counter()
    results = manager.score(rows)
    return time.perf_counter() - start, results


def hang_on_request(data_source, solution_str, ground_truth, extra_info=None):
    """The reward of the hanging batch: 20 ms of work, or no end."""
    end = time.perf_counter() + (float("inf") if solution_str == "hang" else 0.02)
    while time.perf_counter() < end:
        pass
    return 1.0


def main():
    args = tyro.cli(Args)
    naive = RewardManager("naive")
    pool = RewardManager("prime", timeout_s=args.timeout_s, workers=args.workers)
    results = {"workers": args.workers, "rows": args.rows, "scorers": {}}
    table = Table("scorer", "one process", f"pool of {args.workers}", "ratio", title="scores per second")
    batches = {path.stem: batch(path.stem, args.rows) for path in (ROOT / "tests/golden").glob("*.jsonl")}
    batches["math_verify"] = formulas(args.rows)
    for name, rows in sorted(batches.items()):
        for manager in (naive, pool):
            manager.score(rows[:32])  # processes start, libraries load
        (one, a), (many, b) = seconds(naive, rows), seconds(pool, rows)
        wrong = sum(x["score"] != y["score"] for x, y in zip(a, b, strict=True))
        if wrong:
            sys.exit(f"error: {name}: {wrong} scores of the pool differ from those of one process")
        results["scorers"][name] = {"naive_per_s": args.rows / one, "pool_per_s": args.rows / many}
        table.add_row(name, f"{args.rows / one:,.0f}", f"{args.rows / many:,.0f}", f"{one / many:.2f}")
    Console().print(table)

    pool = RewardManager("prime", hang_on_request, timeout_s=args.timeout_s, workers=args.workers)
    row = dict(data_source="none", ground_truth="", extra_info={})
    texts = ["ends"] * (args.rows - args.hanging)
    others, _ = seconds(pool, [dict(row, solution_str=text) for text in texts])
    step = args.rows // args.hanging
    for i in range(args.hanging):
        texts.insert(i * step, "hang")
    both, scores = seconds(pool, [dict(row, solution_str=text) for text in texts])
    timeouts = sum(result.get("failure", "").startswith("TimeoutError") for result in scores)
    results["hanging"] = dict(
        samples=args.hanging, timeouts=timeouts, timeout_s=args.timeout_s, others_s=others, all_s=both
    )
    ratio = both / (args.timeout_s + others)
    print(
        f"{args.rows} rows of which {args.hanging} hang: {both:.1f} s = {ratio:.2f} x (time-out"
        f" {args.timeout_s:.0f} s + the others' {others:.1f} s); {timeouts} time-outs"
    )
    if args.output:
        with replacing(Path(args.output)) as new:
            new.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
