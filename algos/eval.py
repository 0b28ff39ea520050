"""Score the responses in parquet files: mean@n, pass@k, maj@k over the prompts, per data source and in all.

pass@k is unbiased (arXiv 2107.03374, eq. 1), maj@k exact; means and paired differences have 95 % intervals.

Command:    python algos/eval.py --data before.parquet after.parquet --output runs/eval
Docs: docs/guides/evaluate.md
"""

import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_uppercase
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")


@dataclass
class Args:
    data: tuple[str, ...]  # parquet files with responses, from generate.py; each is compared with the first
    output: str  # directory for results.json, pass_at_k.png, scored_A.parquet: the first file with its scores
    response_key: str = "responses"  # column of the responses: lists of strings of one length, or strings
    k: tuple[int, ...] = ()  # k of maj@k and, in the table, of pass@k; none: powers of two and all responses
    reward_manager: Literal["naive", "prime"] = "naive"  # naive: in this process; prime: in processes
    reward_fn: tuple[str, ...] = ("rewards",)  # FILE.py:NAME; rewards: the scorer of each row's data_source
    reward_weights: tuple[float, ...] = ()  # weight of each reward_fn; none: all 1
    reward_workers: int = 4  # processes of the prime manager
    reward_timeout_s: float = 30.0  # seconds for each response: with prime, or an async reward


if __name__ == "__main__":
    flags = parse(Args)  # before the libraries below are loaded: a wrong flag is answered at once

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_prep.lib.schema import load_rows
from data_prep.lib.source import Source
from rewards.manager import RewardManager, check_results
from rewards.manager.combined import load_rewards
from system.files import replacing

SAMPLE = ("data_source", "ground_truth", "extra_info", "prompt")  # what a reward gets besides the response
Z = 1.96  # z of a 95 % interval
MORE = -0.71, 0.71  # two prompts more for a difference (Agresti, Min 2005): 30 times 0 is not exactly 0
ENDS = ("", "_stderr", "_low", "_high")  # of a metric's names: its mean, standard error, 95 % interval


@cache
def pass_at_k(n, c, k):
    """Probability that k of n responses, c of them correct, hold a correct one: 1 - C(n-c, k) / C(n, k).

    pass_at_k(4, 2, 2) = 1 - 1/6.  The quotient is a product of k factors up to 1, so nothing overflows.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k: n={n}, c={c}, k={k}; it must be 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.prod(max(n - c - i, 0) / (n - i) for i in range(k))  # eq: eval.pass


def maj_at_k(answers, correct, k):
    """Expected correctness of the most frequent of k answers, over all subsets of size k; ties share evenly.

    answers: n texts, None is no vote; correct: how correct each is, 0 to 1.  Answers a a b of which a is
    correct, k = 2 -> subsets aa ab ab -> (1 + 1/2 + 1/2) / 3.  Exact for any n: subsets are counted.
    """
    if len(answers) != len(correct) or not 1 <= k <= len(answers):
        raise ValueError(f"maj_at_k: {len(answers)} answers, {len(correct)} verdicts, k={k}")
    votes, value, expected = Counter(answers), Counter(), 0.0
    for answer, right in zip(answers, correct, strict=True):
        value[answer] += float(right) / votes[answer]
    silent = votes.pop(None, 0)
    for answer in [answer for answer in votes if value[answer]]:
        others = [votes[other] for other in votes if other != answer]
        for most in range(1, min(votes[answer], k) + 1):  # it is drawn `most` times, and no other more often
            # {(still to draw, tied answers): subsets}; all answers too rare for a tie are drawn as one
            pool, own = silent + sum(n for n in others if n < most), math.comb(votes[answer], most)
            ways = {(k - most - i, 0): own * math.comb(pool, i) for i in range(min(pool, k - most) + 1)}
            for other in [n for n in others if n >= most]:
                new = Counter()
                for (left, ties), count in ways.items():
                    for drawn in range(min(other, most, left) + 1):
                        new[left - drawn, ties + (drawn == most)] += count * math.comb(other, drawn)
                ways = new
            subsets = {ties: count for (left, ties), count in ways.items() if left == 0}
            wins = sum(n / (math.comb(len(answers), k) * (ties + 1)) for ties, n in subsets.items())
            expected += value[answer] * wins  # eq: eval.maj
    return expected


def load_responses(path, key):
    """Rows of a file with `texts`, the responses: a list of strings, of one length in the whole file."""
    source = Source(path)
    extra = {"response_tokens", "finish_reasons", "episodes", "prompt"} & {*source.names}
    rows = load_rows(path, ["data_source", "reward_model", "extra_info", key, *extra])
    if clash := {"scores", "results"} & {*source.schema.names}:
        raise ValueError(f"{path}: it has a column {min(clash)!r} already; use the file without")
    for i, row in enumerate(rows):
        truth = row["reward_model"].get("ground_truth")
        row |= dict(index=i, ground_truth=truth, prompt=row.get("prompt"))
        row["texts"] = texts = [row[key]] if isinstance(row[key], str) else row[key]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{path}: row {i}: {key!r} must be a string or a list of strings")
        if len(texts) != len(rows[0]["texts"]):
            raise ValueError(f"{path}: row {i}: {len(texts)} responses, row 0 {len(rows[0]['texts'])}")
    return rows


def measure(rows, results, ks):
    """{metric: a value for each prompt}. A response's value is `acc` if its scorer gives it, or the score."""
    n = len(results[0])
    values = [[float(result.get("acc", result["score"])) for result in row] for row in results]
    columns = {f"mean@{n}": [sum(v) / n for v in values]}
    for k in range(1, n + 1):
        columns[f"pass@{k}"] = [pass_at_k(n, sum(x >= 1 for x in v), k) for v in values]
    if all("pred" in result or "failure" in result for row in results for result in row):
        votes = [[result.get("pred") for result in row] for row in results]
        for k in ks:
            columns[f"maj@{k}"] = [maj_at_k(*pair, k) for pair in zip(votes, values, strict=True)]
    columns["reward_errors"] = [sum("failure" in result for result in row) / n for row in results]
    if "response_tokens" in rows[0]:
        columns["response_length/mean"] = [np.mean(row["response_tokens"]) for row in rows]
    if "finish_reasons" in rows[0]:
        columns["response_length/clip_ratio"] = [row["finish_reasons"].count("length") / n for row in rows]
        columns["prompts_too_long"] = [row["finish_reasons"].count("prompt_too_long") / n for row in rows]
    return {name: np.array(column) for name, column in columns.items()}


def wilson(values, n_samples):
    """95 % interval of a mean of shares: Wilson's, of as many yes or no as have its variance, at most all."""
    p, n = values.mean(), len(values)
    if 0 < p < 1:
        n = min(n * p * (1 - p) / max(values.var(), 1e-9), n * n_samples)
    centre, half = p + Z**2 / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return np.clip(np.array([centre - half, centre + half]) / (1 + Z**2 / n), 0, 1)  # eq: eval.wilson


def summarize(columns, n_samples):
    """Means over the prompts, their standard errors, and 95 % intervals: Wilson's, else the normal one."""
    found = {}
    for name, values in columns.items():
        is_share = values.min() >= 0 and values.max() <= 1 and not name.endswith(("_diff", "length/mean"))
        seen = np.append(values, MORE) if name.endswith("_diff") and "length" not in name else values
        half = Z * seen.std() / math.sqrt(len(seen))
        interval = wilson(values, n_samples) if is_share else (seen.mean() - half, seen.mean() + half)
        stats = values.mean(), values.std() / math.sqrt(len(values)), *interval
        found |= {name + end: float(x) for end, x in zip(ENDS, stats, strict=True)}
    return found


def print_table(title, columns, sources, names, template, ends):
    """Files side by side. columns: {heading: {source: metrics}}; template: text of the values name + ends."""
    table = Table("", *columns, title=title, title_justify="left")
    for source in sources:
        parts = [column.get(source, {}) for column in columns.values()]
        table.add_row(Text(source, "bold"), *(f"{part.get('prompts', 0)} prompts" for part in parts))
        for name in names:
            there = [[part[name + end] for end in ends if name + end in part] for part in parts]
            table.add_row(f"  {name}", *(template.format(*values) if values else "-" for values in there))
        table.add_section()
    Console().print(table)


def plot(entries, sources, path):
    """pass@k over k with 95 % intervals, a panel for each data source."""
    figure = Figure(figsize=(6, 3.5 * len(sources)), layout="constrained")
    for axis, source in zip(figure.subplots(len(sources), squeeze=False)[:, 0], sources, strict=True):
        axis.set(title=source.replace("$", r"\$"), xlabel="k", ylabel="pass@k")
        for label, (name, entry) in zip(ascii_uppercase, entries.items(), strict=False):
            ks = [int(x[5:]) for x in entry.get(source, ()) if x.startswith("pass@") and x[5:].isdigit()]
            mean, _, low, high = ([entry[source][f"pass@{k}{end}"] for k in ks] for end in ENDS)
            axis.plot(ks, mean, "o-", markersize=3, label=f"{label}: {Path(name).name}".replace("$", r"\$"))
            axis.fill_between(ks, low, high, alpha=0.2)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.legend()
    figure.savefig(path, dpi=120, format="png")


def main(args):
    # ---- everything is read and checked before anything is scored
    out, loaded = Path(args.output), {}
    try:
        reward_fn = load_rewards(args.reward_fn, args.reward_weights)
        manager = RewardManager(args.reward_manager, reward_fn, 1, args.reward_timeout_s, args.reward_workers)
        if len(args.data) > len(ascii_uppercase):
            raise ValueError(f"--data: {len(args.data)} files, at most {len(ascii_uppercase)}")
        for path in args.data:
            loaded[path] = rows = load_responses(path, args.response_key)
            if wrong := [k for k in args.k if not 1 <= k <= len(rows[0]["texts"])]:
                raise ValueError(f"--k {wrong[0]}: {path} has {len(rows[0]['texts'])} responses a prompt")
            for fault in manager.faults({row["data_source"] for row in rows}, rows):
                raise ValueError(f"{path}: {fault}")
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        sys.exit("error: " + " ".join(str(error).split()))

    # ---- score and measure
    entries, names = {path: {} for path in loaded}, []
    for label, (path, rows) in zip(ascii_uppercase, loaded.items(), strict=False):
        samples = [{x: row[x] for x in SAMPLE} | dict(solution_str=y) for row in rows for y in row["texts"]]
        episodes = [json.loads(x) for row in rows for x in row.get("episodes", ["{}"] * len(row["texts"]))]
        for sample, episode in zip(samples, episodes, strict=True):  # what a conversation's reward looks at
            sample["extra_info"] = sample["extra_info"] | episode
        n, prompts = len(rows[0]["texts"]), [[row[x] for x in SAMPLE] for row in rows]
        scored = check_results(manager.score(samples, [i // n for i in range(len(samples))]))
        results = [scored[i : i + n] for i in range(0, len(scored), n)]
        ks = sorted(set(args.k) or {n, *(2**i for i in range(n.bit_length()))})
        columns = measure(rows, results, ks)
        shown = [name for name in columns if not name.startswith("pass@") or int(name[5:]) in ks]
        names += [name for name in shown if name not in names]
        if label == "A":
            first, first_prompts = columns, prompts
        elif prompts == first_prompts:
            columns |= {f"{name}_diff": columns[name] - first[name] for name in columns if name in first}
        source_p = np.array([row["data_source"] for row in rows])
        for source in [*sorted(set(source_p)), "all"]:
            here = (source_p == source) | (source == "all")
            part = {name: column[here] for name, column in columns.items()}
            entries[path][source] = {"prompts": int(here.sum())} | summarize(part, n)
        texts = [[json.dumps(result, default=str) for result in row] for row in results]
        scores = [[result["score"] for result in row] for row in results]
        with replacing(out / f"scored_{label}.parquet") as new:
            Source(path).write(new, iter([pa.table(dict(scores=scores, results=texts))]))

    # ---- report
    sources = [*sorted({source for entry in entries.values() for source in entry} - {"all"}), "all"]
    sources = sources if len(sources) > 2 else sources[:1]  # "all" repeats a single one
    with replacing(out / "results.json") as new:
        new.write_text(json.dumps(entries, indent=2) + "\n")
    with replacing(out / "pass_at_k.png") as new:
        plot(entries, sources, new)
    columns = dict(zip(ascii_uppercase, entries.values(), strict=False))
    print("", *map("{}: {}".format, columns, entries), sep="\n")
    print_table("mean (standard error)", columns, sources, names, "{:.3f} ({:.3f})", ("", "_stderr"))
    if others := {f"{label} - A": column for label, column in columns.items() if label != "A"}:
        ends, template = ("_diff", "_diff_low", "_diff_high"), "{:+.3f} [{:+.3f}, {:+.3f}]"
        print_table("paired difference [95 % interval]", others, sources, names, template, ends)


if __name__ == "__main__":
    main(Args(**flags))
