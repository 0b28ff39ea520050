"""Score the responses in files of rows: mean@n, pass@k, maj@k over the prompts, per data source and in all.

pass@k is unbiased (arXiv 2107.03374, eq. 1), maj@k exact; means and paired differences have 95 % intervals.

Command:    python algos/eval.py --data before.parquet after.parquet --output runs/eval
Docs: docs/guides/evaluate.md
"""

import json
import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from string import ascii_uppercase
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import one_line_errors, parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")


@dataclass
class Args:
    data: tuple[str, ...]  # files with responses, from generate.py; each is compared with the first
    output: str  # directory for results.json, pass_at_k.png, scored_A.parquet: the first file with its scores
    response_key: str = "responses"  # column of the responses: lists of strings of one length, or strings
    k: tuple[int, ...] = ()  # k of maj@k and, in the table, of pass@k; none: powers of two and all responses
    reward_manager: Literal["naive", "prime"] = "naive"  # naive: in this process; prime: in processes
    reward_fn: tuple[str, ...] = ("rewards",)  # FILE.py:NAME; rewards: by each row's data_source
    reward_weights: tuple[float, ...] = ()  # weight of each reward_fn; none: all 1
    # with --reward_manager prime or --reward_fn FILE.py:NAME: processes; naive: 16 times as many async
    # calls at once
    reward_workers: int = 4
    # with --reward_manager prime or --reward_fn FILE.py:NAME: seconds for each response; naive: if async
    reward_timeout_s: float = 30.0


if __name__ == "__main__":
    flags = parse(Args)  # before the libraries below are loaded: a wrong flag is answered at once

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy.stats import binom

from data_prep.lib.conversations import RL, columns_of
from data_prep.lib.schema import read_rows
from data_prep.lib.source import Source
from rewards.manager import RewardManager, check_results
from rewards.manager.combined import load_rewards
from system.files import replacing

SAMPLE = ("data_source", "ground_truth", "extra_info", "prompt")  # what a reward gets besides the response
SAME = ("mean@1", "pass@1", "maj@1")  # metrics that are often one number
OPTIONAL = ("response_tokens", "finish_reasons", "episodes")  # columns
Z = 1.96  # z of a 95 % interval


def pass_at_k(n, c):
    """Probabilities that k of n responses, c of them correct, hold a correct one, for k = 1 to n.

    1 - C(n-c, k) / C(n, k): n = 4, c = 2 -> 1/2, 5/6, 1, 1.
    """
    if not 0 <= c <= n:
        raise ValueError(f"pass_at_k: {c} correct responses of {n}")
    drawn = np.arange(n)
    wrong = np.clip(n - c - drawn, 0, None) / (n - drawn)  # the next one, if all before it were
    return 1.0 - np.cumprod(wrong)  # eq: eval.pass


def maj_at_k(answers, correct, k):
    """Expected correctness of the most frequent of k answers, over all subsets of size k; ties share evenly.

    answers: n texts, None is no vote; correct: how correct each is, 0 to 1.  Answers a a b of which a is
    correct, k = 2 -> subsets aa ab ab -> (1 + 1/2 + 1/2) / 3.  Exact for any n: subsets are counted.

    A subset is a draw of each response with probability k / n, given that k are drawn: so an answer is drawn
    by a binomial distribution, and its number of draws is the exponent of a polynomial.
    """
    n = len(answers)
    if n != len(correct) or not 1 <= k <= n:
        raise ValueError(f"maj_at_k: {n} answers, {len(correct)} verdicts, k={k}")
    votes = Counter(answers)
    value = Counter()  # the mean correctness of those that gave an answer
    for answer, right in zip(answers, correct, strict=True):
        value[answer] += right / votes[answer]
    del votes[None]
    draws = {count: binom.pmf(np.arange(count + 1), count, k / n) for count in {*votes.values()}}
    highest = max((votes[answer] for answer in votes if value[answer]), default=0)
    all_drawn = binom.pmf(k, n, k / n)
    expected = 0.0
    for most in range(1, min(highest, k) + 1):  # the winner is drawn `most` times, and no other more often
        able = [answer for answer in votes if votes[answer] >= most]
        won = sum(draws[votes[answer]][most] for answer in able)
        no_more = math.prod(draws[votes[answer]][: most + 1].sum() for answer in able)
        if min(won, no_more) < 1e-15 * all_drawn:  # so rare that a float64 does not show it
            continue
        rest = n - sum(votes[answer] for answer in able)
        # a winner of 1 + ties has 1 / (ties + 1), the integral of t^ties from 0 to 1: Gauss' rule is exact
        t_s, share_s = np.polynomial.legendre.leggauss(len(able) // 2 + 1)
        t_s = (t_s + 1) / 2
        before_sk = np.tile(binom.pmf(np.arange(k + 1), rest, k / n), (len(t_s), 1))  # no winner so far
        after_sk = np.zeros_like(before_sk)
        for answer in able:
            chances = draws[votes[answer]][: most + 1]
            won_sk = value[answer] * chances[most] * drawn_more(before_sk, most)
            chances = [*chances[:most], t_s[:, None] * chances[most]]
            after_sk = times(after_sk, chances) + won_sk
            before_sk = times(before_sk, chances)
        expected += share_s @ after_sk[:, k] / 2  # eq: eval.maj
    return float(expected / all_drawn)


def drawn_more(chance_sk, draws):
    """Chances of each number of draws, [S, K + 1], with so many draws more."""
    more_sk = np.zeros_like(chance_sk)
    more_sk[:, draws:] = chance_sk[:, : chance_sk.shape[1] - draws]
    return more_sk


def times(chance_sk, chances):
    """Chances of each number of draws with those of one answer more, which has chances of 0, 1, ... draws."""
    return sum(chance * drawn_more(chance_sk, draws) for draws, chance in enumerate(chances))


def load_responses(path, key):
    """Rows of a file with `texts`, the responses: a list of strings, of one length in the whole file."""
    source = Source(path)
    names = [key, *(name for name in OPTIONAL if name in source.names)]
    asked = source.metadata.get(b"prompt_key", b"prompt").decode()  # by generate.py
    wanted = RL | {name: name for name in names} | dict(prompt=asked)
    if columns_of(source.names, dict(prompt=asked))["prompt"] not in source.names:
        del wanted["prompt"]
    rows = list(chain.from_iterable(read_rows(path, wanted, say=False)))
    for name in ("results", "scores"):
        if name in source.schema.names:
            raise ValueError(f"{path}: it has a column {name!r} already; use the file without")
    for i, row in enumerate(rows):
        row["index"] = i
        row["ground_truth"] = row["reward_model"].get("ground_truth")
        row.setdefault("prompt", None)
        texts = row[key]
        if isinstance(texts, str):
            texts = [texts]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{path}: row {i}: {key!r} must be a string or a list of strings")
        row["texts"] = texts
        n = len(rows[0]["texts"])
        if len(texts) != n:
            raise ValueError(f"{path}: row {i}: {len(texts)} responses, row 0 {n}")
    return rows


def load_files(args):
    """-> the reward manager, and {path: rows}; ValueError for what cannot be scored."""
    reward_fn = load_rewards(args.reward_fn, args.reward_weights)
    manager = RewardManager(
        args.reward_manager,
        reward_fn,
        num_examine=1,
        timeout_s=args.reward_timeout_s,
        workers=args.reward_workers,
    )
    if len(args.data) > len(ascii_uppercase):
        raise ValueError(f"--data: {len(args.data)} files, at most {len(ascii_uppercase)}")
    files = {}
    for path in args.data:
        rows = load_responses(path, args.response_key)
        n = len(rows[0]["texts"])
        for k in args.k:
            if not 1 <= k <= n:
                raise ValueError(f"--k {k}: {path} has {n} responses a prompt")
        sources = {row["data_source"] for row in rows}
        for fault in manager.faults(sources, rows):
            raise ValueError(f"{path}: {fault}")
        files[path] = rows
    return manager, files


def score(rows, manager):
    """The results of the responses of each row."""
    samples = []
    groups = []
    for row in rows:
        episodes = row.get("episodes", ["{}"] * len(row["texts"]))
        for text, episode in zip(row["texts"], episodes, strict=True):
            sample = {key: row[key] for key in SAMPLE}
            sample["solution_str"] = text
            if row["prompt"]:
                sample["prompt_str"] = row["prompt"][-1]["content"]
            sample["extra_info"] = row["extra_info"] | json.loads(episode)  # of a conversation
            samples.append(sample)
            groups.append(row["index"])
    scored = check_results(manager.score(samples, groups))
    n = len(rows[0]["texts"])
    return [scored[i : i + n] for i in range(0, len(scored), n)]


def measure(rows, results, ks):
    """{metric: a value for each prompt}. A response's value is `acc` if its scorer gives it, or the score."""
    n = len(results[0])
    has_answers = all("pred" in x or "failure" in x for row_results in results for x in row_results)
    columns = defaultdict(list)
    for row, row_results in zip(rows, results, strict=True):
        values = [float(result.get("acc", result["score"])) for result in row_results]
        columns[f"mean@{n}"].append(sum(values) / n)
        correct = sum(value >= 1 for value in values)
        for k, chance in enumerate(pass_at_k(n, correct), 1):
            columns[f"pass@{k}"].append(chance)
        if has_answers:
            answers = [result.get("pred") for result in row_results]
            for k in ks:
                columns[f"maj@{k}"].append(maj_at_k(answers, values, k))
        failures = sum("failure" in result for result in row_results)
        columns["reward_errors"].append(failures / n)
        if "response_tokens" in row:
            columns["response_length/mean"].append(np.mean(row["response_tokens"]))
        if "finish_reasons" in row:
            reasons = row["finish_reasons"]
            columns["response_length/clip_ratio"].append(reasons.count("length") / n)
            columns["prompts_too_long"].append(reasons.count("prompt_too_long") / n)
    return {name: np.array(values) for name, values in columns.items()}


def wilson(values, n_samples):
    """95 % interval of a mean of shares: Wilson's, of as many yes or no as have its variance, at most all."""
    p = values.mean()
    n = len(values)
    if 0 < p < 1:
        n = min(n * p * (1 - p) / max(values.var(), 1e-9), n * n_samples)
    centre = p + Z**2 / (2 * n)
    half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    ends = np.array([centre - half, centre + half])
    return np.clip(ends / (1 + Z**2 / n), 0, 1)  # eq: eval.wilson


def interval(name, values, n_samples):
    """95 % interval of the mean of a metric: Wilson's of shares, else the normal one.

    A difference has two prompts more, as far from the mean as the farthest, as after Agresti, Min (2005): few
    prompts show little of what is rare. Without any spread they are as far as 0, or 1 away if all are 0.
    """
    is_difference = name.endswith("_diff")
    is_length = "length/mean" in name
    if not is_difference and not is_length and values.min() >= 0 and values.max() <= 1:
        return wilson(values, n_samples)
    squares = (values - values.mean()) ** 2
    total = squares.sum()
    if is_difference and not is_length:
        farthest = squares.max() if np.ptp(values) else values.mean() ** 2
        total += 2 * (farthest or 1.0)  # 30 times 0 is not exactly 0
    half = Z * math.sqrt(total) / len(values)
    return values.mean() - half, values.mean() + half


def summarize(columns, n_samples):
    """Means over the prompts, their standard errors, and 95 % intervals."""
    metrics = {}
    for name, values in columns.items():
        low, high = interval(name, values, n_samples)
        metrics[name] = float(values.mean())
        metrics[f"{name}_stderr"] = float(values.std() / math.sqrt(len(values)))
        metrics[f"{name}_low"] = float(low)
        metrics[f"{name}_high"] = float(high)
    return metrics


def mean_cell(metrics, name):
    if name in metrics:
        return f"{metrics[name]:.3f} ({metrics[f'{name}_stderr']:.3f})"
    return "-"


def difference_cell(metrics, name):
    name = f"{name}_diff"
    if name in metrics:
        low = metrics[f"{name}_low"]
        high = metrics[f"{name}_high"]
        return f"{metrics[name]:+.3f} [{low:+.3f}, {high:+.3f}]"
    return "-"


def print_table(title, columns, sources, names, cell):
    """Files side by side. columns: {heading: {source: metrics}}; cell: makes a text of metrics and a name.

    What is one number with one response to a prompt, where all are 0 or 1, has one row.
    """
    table = Table("", *columns, title=title, title_justify="left")
    for source in sources:
        parts = [column.get(source, {}) for column in columns.values()]
        prompts = [f"{part.get('prompts', 0)} prompts" for part in parts]
        table.add_row(Text(source, "bold"), *prompts)
        rows = {}  # {cells, name that shares its row with no other: names}
        for name in names:
            cells = tuple(cell(part, name) for part in parts)
            alone = "" if name in SAME else name
            rows.setdefault((cells, alone), []).append(name)
        for (cells, _), alike in rows.items():
            table.add_row("  " + " = ".join(alike), *cells)
        table.add_section()
    Console().print(table)


def plot(entries, sources, path):
    """pass@k over k with 95 % intervals, a panel for each data source."""
    figure = Figure(figsize=(6, 3.5 * len(sources)), layout="constrained")
    axes = figure.subplots(len(sources), squeeze=False)[:, 0]
    for axis, source in zip(axes, sources, strict=True):
        axis.set(title=plain(source), xlabel="k", ylabel="pass@k")
        for label, (name, entry) in zip(ascii_uppercase, entries.items(), strict=False):
            metrics = entry.get(source, {})
            ks = []
            while f"pass@{len(ks) + 1}" in metrics:
                ks.append(len(ks) + 1)
            mean = [metrics[f"pass@{k}"] for k in ks]
            low = [metrics[f"pass@{k}_low"] for k in ks]
            high = [metrics[f"pass@{k}_high"] for k in ks]
            axis.plot(ks, mean, "o-", markersize=3, label=plain(f"{label}: {Path(name).name}"))
            axis.fill_between(ks, low, high, alpha=0.2)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.legend()
    figure.savefig(path, dpi=120, format="png")


def plain(text):
    """A text without formulas, for matplotlib."""
    return text.replace("$", r"\$")


def by_source(rows, columns, n_samples):
    """{data source, or all: metrics} of the values for each prompt."""
    entry = {}
    for source in [*sorted({row["data_source"] for row in rows}), "all"]:
        here = [source in (row["data_source"], "all") for row in rows]
        part = {name: values[here] for name, values in columns.items()}
        entry[source] = {"prompts": sum(here)} | summarize(part, n_samples)
    return entry


def write_scores(path, rows_path, results):
    """The file of the rows, with the scores of the responses."""
    scores = [[result["score"] for result in row] for row in results]
    texts = [[json.dumps(result, default=str) for result in row] for row in results]
    with replacing(path) as new:
        Source(rows_path).write(new, iter([pa.table({"scores": scores, "results": texts})]))


def main(args):
    # ---- everything is read and checked before anything is scored
    out = Path(args.output)
    with one_line_errors():
        manager, files = load_files(args)
        out.mkdir(parents=True, exist_ok=True)

    # ---- score and measure
    labels = ascii_uppercase[: len(files)]
    entries = {}  # {path: {source: metrics}}
    names = []  # of the metrics in the tables
    for label, (path, rows) in zip(labels, files.items(), strict=True):
        results = score(rows, manager)
        n = len(results[0])
        powers = [2**i for i in range(n.bit_length())]
        ks = sorted(set(args.k) or {*powers, n})
        columns = measure(rows, results, ks)
        hidden = [f"pass@{k}" for k in range(1, n + 1) if k not in ks]
        for name in columns:
            if name not in names and name not in hidden:
                names.append(name)

        prompts = [[row[key] for key in SAMPLE] for row in rows]
        if label == "A":
            first_prompts = prompts
            first_columns = columns
        elif prompts == first_prompts:  # paired differences
            for name in [*columns]:
                if name in first_columns:
                    columns[f"{name}_diff"] = columns[name] - first_columns[name]
        entries[path] = by_source(rows, columns, n)
        write_scores(out / f"scored_{label}.parquet", path, results)

    # ---- report
    sources = sorted({source for entry in entries.values() for source in entry} - {"all"})
    if len(sources) > 1:
        sources.append("all")
    with replacing(out / "results.json") as new:
        new.write_text(json.dumps(entries, indent=2) + "\n")
    with replacing(out / "pass_at_k.png") as new:
        plot(entries, sources, new)
    print()
    for label, path in zip(labels, entries, strict=True):
        print(f"{label}: {path}")
    columns = dict(zip(labels, entries.values(), strict=True))
    print_table("mean (standard error)", columns, sources, names, mean_cell)
    del columns["A"]
    differences = {f"{label} - A": entry for label, entry in columns.items()}
    if differences:
        title = "paired difference [95 % interval]"
        print_table(title, differences, sources, names, difference_cell)


if __name__ == "__main__":
    main(Args(**flags))
