"""Score the responses in parquet files: mean@n, pass@k, maj@k over the prompts, per data source and in all.

1. pass@k is the unbiased estimator of HumanEval (arXiv 2107.03374, eq. 1).
2. maj@k is the exact expectation over all subsets of k responses; ties are split evenly.

Command:    python algos/eval.py --data before.parquet after.parquet --output runs/eval
Docs: docs/eval.md
"""

import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.atomic import replacing
from data_prep.schema import load_rows
from rewards import check_sources
from rewards.combined import load_rewards
from rewards.manager import RewardManager


@dataclass
class Args:
    data: tuple[str, ...]
    """Parquet files with responses, as generate.py writes them; each is a column of the table."""
    output: str
    """Directory for results.json."""
    response_key: str = "responses"
    """Column of the responses: a list of strings, as many in each row, or one string."""
    k: tuple[int, ...] = ()
    """Responses of pass@k and maj@k; none: the powers of two up to a prompt's number of responses."""
    reward_manager: Literal["naive", "prime"] = "naive"
    """How rewards are computed; naive: in process, one by one; prime: a pool of processes with a time-out."""
    reward_fn: tuple[str, ...] = ("rewards",)
    """Rewards: FILE.py:NAME for your own; `rewards` is the scorer of each row's data_source."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward_fn; none: all 1."""
    reward_aggregation: Literal["sum", "mean", "min"] = "sum"
    """How several rewards become one; min: the worst case."""
    reward_workers: int = 4
    """Processes of the prime manager on each rank."""
    reward_timeout_s: float = 30.0
    """Seconds that the prime manager gives a sample before it scores 0."""
    seed: int = 1
    """Seed of the bootstrap."""


# ------------------------------------------------------------------------------------------------------------
# The mathematics
# ------------------------------------------------------------------------------------------------------------
def pass_at_k(n, c, k):
    """Probability that k of n responses, c of them correct, hold a correct one: 1 - C(n-c, k) / C(n, k).

    pass_at_k(4, 2, 2) = 1 - 1/6.  The quotient is a product of k factors up to 1, so nothing overflows.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k: n={n}, c={c}, k={k}; it must be 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.prod(max(n - c - i, 0) / (n - i) for i in range(k))  # eq: eval.pass


def maj_at_k(answers, correct, k):
    """Expected correctness of the most frequent of k answers, over all subsets of size k; ties share evenly.

    answers: n hashable answers; correct: how correct each is, 0 to 1.  Answers a a b of which a is correct,
    k = 2 -> subsets aa ab ab -> (1 + 1/2 + 1/2) / 3.  Exact for any n: subsets are counted, not listed.
    """
    if len(answers) != len(correct) or not 1 <= k <= len(answers):
        raise ValueError(f"maj_at_k: {len(answers)} answers, {len(correct)} verdicts, k={k}")
    votes, points = Counter(answers), Counter()
    for answer, value in zip(answers, correct, strict=True):
        points[answer] += float(value)
    wins = {}  # answers with as many votes win as often
    for size in {votes[answer] for answer in votes if points[answer]}:
        others = Counter(votes.values()) - Counter([size])
        wins[size] = win_share(size, tuple(sorted(others.elements())), k)
    return sum(wins[votes[a]] * points[a] / votes[a] for a in votes if points[a])  # eq: eval.maj


@cache
def win_share(size, others, k):
    """How often an answer that `size` responses give wins against answers that `others` of them give."""
    subsets, share = math.comb(size + sum(others), k), 0.0
    for most in range(1, min(size, k) + 1):  # it is drawn `most` times, and no other answer more often
        # (still to draw, answers tied with it) -> subsets; those that cannot tie with it are drawn as one
        pool, left = sum(other for other in others if other < most), k - most
        ways = {(left - i, 0): math.comb(size, most) * math.comb(pool, i) for i in range(min(pool, left) + 1)}
        for other in [other for other in others if other >= most]:
            new = Counter()
            for (left, ties), count in ways.items():
                for drawn in range(min(other, most, left) + 1):
                    new[left - drawn, ties + (drawn == most)] += count * math.comb(other, drawn)
            ways = new
        share += sum(n / (subsets * (ties + 1)) for (left, ties), n in ways.items() if left == 0)
    return share


def bootstrap_error(values, seed):
    """Standard error of the mean of `values`, one a prompt, by resampling the prompts 1000 times."""
    values, rng = np.asarray(values), np.random.default_rng(seed)
    return float(np.std([rng.choice(values, len(values)).mean() for _ in range(1000)]))


# ------------------------------------------------------------------------------------------------------------
# The evaluation
# ------------------------------------------------------------------------------------------------------------
def load_responses(path, key):
    """Rows of a file with `texts`, the responses: a list of strings, of one length in the whole file."""
    rows = load_rows(path, ["data_source", "reward_model", "extra_info", key])
    known = {"response_tokens", "finish_reasons"}.intersection(pq.read_schema(path).names)
    rows = [row | more for row, more in zip(rows, load_rows(path, [key, *known]), strict=True)]
    for i, row in enumerate(rows):
        row["texts"] = texts = [row[key]] if isinstance(row[key], str) else row[key]
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{path}: row {i}: {key!r} must be a string or a list of strings")
        if len(texts) != len(rows[0]["texts"]):
            raise ValueError(f"{path}: row {i}: {len(texts)} responses, row 0 {len(rows[0]['texts'])}")
    return rows


def score(rows, manager):
    """rows with `results`, the manager's dict for each of a row's responses."""
    samples = []
    for row in rows:
        sample = dict(ground_truth=row["reward_model"].get("ground_truth"), extra_info=row["extra_info"])
        samples += [dict(sample, data_source=row["data_source"], solution_str=text) for text in row["texts"]]
    results = iter(manager.score(samples))
    return [row | dict(results=[next(results) for _ in row["texts"]]) for row in rows]


def evaluate(rows, ks, seed):
    """The metrics of scored rows. A response's value is `acc` where the scorer returns it, else the score."""
    n, results = len(rows[0]["texts"]), [result for row in rows for result in row["results"]]
    values = [[float(result.get("acc", result["score"])) for result in row["results"]] for row in rows]
    by_prompt = {f"mean@{n}": [sum(v) / n for v in values]}
    for k in ks:
        by_prompt[f"pass@{k}"] = [pass_at_k(n, sum(x >= 1 for x in v), k) for v in values]
    if all("pred" in result or "error" in result for result in results):  # an error votes for None
        votes = [[str(result.get("pred")) for result in row["results"]] for row in rows]
        for k in ks:
            by_prompt[f"maj@{k}"] = [maj_at_k(*pair, k) for pair in zip(votes, values, strict=True)]
    metrics = {"prompts": len(rows)}
    for name, value in by_prompt.items():
        metrics |= {name: float(np.mean(value)), f"{name}_stderr": bootstrap_error(value, seed)}
    metrics["reward_errors"] = sum("error" in result for result in results)
    if lengths := [
        n for row in rows for n in row.get("response_tokens", ()) if n
    ]:  # 0: the prompt was too long
        metrics["response_length/mean"] = float(np.mean(lengths))
    if reasons := [reason for row in rows for reason in row.get("finish_reasons", ())]:
        missing = reasons.count("prompt_too_long")
        metrics["response_length/clip_ratio"] = reasons.count("length") / max(len(reasons) - missing, 1)
        metrics["prompts_too_long"] = missing // n
    return metrics


def print_table(entries):
    """Files side by side; in brackets the standard errors."""
    console, parts = Console(), list(entries.values())
    table = Table("data source")
    table.add_column("metric", no_wrap=True)
    for path in entries:
        table.add_column(plain(path, console))
    sources = dict.fromkeys(source for part in parts for source in part if source != "all")
    for source in [*sources, "all"] if len(sources) > 1 else sources:
        columns = [part.get(source, {}) for part in parts]
        for name in dict.fromkeys(name for metrics in columns for name in metrics):
            if not name.endswith("_stderr"):
                table.add_row(plain(source, console), name, *(number(metrics, name) for metrics in columns))
        table.add_section()
    console.print(table)


def plain(text, console):
    """Text without markup, in the console's encoding."""
    return Text(text.encode(console.encoding, "backslashreplace").decode(console.encoding), overflow="fold")


def number(metrics, name):
    """The cell of a metric."""
    value, error = metrics.get(name, "-"), metrics.get(f"{name}_stderr")
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if error is None else f"{text} ({error:.3f})"


def main():
    # ---- everything is read and checked before anything is scored
    args = tyro.cli(Args)
    try:
        files = {path: load_responses(path, args.response_key) for path in args.data}
        reward_fn = load_rewards(args.reward_fn, args.reward_weights, args.reward_aggregation)
        limits = dict(timeout_s=args.reward_timeout_s, workers=args.reward_workers)
        manager, entries = RewardManager(args.reward_manager, reward_fn, **limits), {}
        if "rewards" in args.reward_fn:
            check_sources({row["data_source"] for rows in files.values() for row in rows})
        for path, rows in files.items():
            if wrong := [k for k in args.k if not 1 <= k <= len(rows[0]["texts"])]:
                raise ValueError(f"--k {wrong[0]}: {path} has {len(rows[0]['texts'])} responses a prompt")
        Path(args.output).mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        sys.exit("error: " + " ".join(str(error).split()))

    # ---- score
    for path, rows in files.items():
        rows, n = score(rows, manager), len(rows[0]["texts"])
        ks, entries[path] = sorted(set(args.k)) or [2**i for i in range(n.bit_length())], {}
        for source in sorted({row["data_source"] for row in rows}):
            part = [row for row in rows if row["data_source"] == source]
            entries[path][source] = evaluate(part, ks, args.seed)
        entries[path]["all"] = evaluate(rows, ks, args.seed)

    # ---- report
    with replacing(Path(args.output) / "results.json") as new:
        new.write_text(json.dumps(entries, indent=2) + "\n")
    print_table(entries)


if __name__ == "__main__":
    main()
