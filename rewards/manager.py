"""Scores a batch of responses and shows some of them."""

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rewards import compute_score

SHOWN_CHARS = 1200  # of one cell of the sample table


class RewardManager:
    """Scores rows with `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    mode: "naive" scores in this process, one row after the other.
    num_examine: samples of each data source that every call of `score` prints.
    """

    def __init__(self, mode="naive", compute_score=compute_score, num_examine=0):
        if mode != "naive":
            raise ValueError(f"unknown reward manager {mode!r}; known: naive")
        self.compute_score = compute_score
        self.num_examine = num_examine

    def score(self, rows):
        """Score dicts with data_source, solution_str, ground_truth, extra_info (and prompt_str, to be shown).

        Returns one dict a row: `score` (float) and the extra keys of the reward.  A reward that fails gives
        score 0.0 and `error`, e.g. "TypeError: ..."; no row can raise, so that one bad row ends no training.
        """
        results = [self._score_row(row) for row in rows]
        if self.num_examine:
            _print_samples(rows, results, self.num_examine)
        return results

    def _score_row(self, row):
        try:
            result = self.compute_score(
                data_source=row["data_source"],
                solution_str=row["solution_str"],
                ground_truth=row["ground_truth"],
                extra_info=row.get("extra_info"),
            )
            result = dict(result) if isinstance(result, dict) else {"score": result}
            if not math.isfinite(result["score"]):  # TypeError if it is no number
                raise ValueError(f"the reward returned {result['score']}")
            return {**result, "score": float(result["score"])}
        # CAREFUL: the one place that catches everything. A reward is anybody's code run on anything a model
        # writes; its failure is reported in the row, where the trainer counts it, not disguised as a 0.
        except Exception as error:
            return {"score": 0.0, "error": f"{type(error).__name__}: {error}"}


def validation_metrics(rows):
    """val-core/{source}/{acc|reward}/{mean@N,best@N,maj@N}: means over prompts with N responses each.

    rows: dicts with data_source, index (of the prompt) and reward (a result of `score`).  The value is `acc`
    where the scorer returns it, else the score; maj, the value of the most frequent `pred`, needs a `pred`.
    A response whose reward failed counts 0.
    """
    metrics = {}
    for source in sorted({row["data_source"] for row in rows}):
        groups = {}
        for row in rows:
            if row["data_source"] == source:
                groups.setdefault(row["index"], []).append(row["reward"])
        results = [result for group in groups.values() for result in group]
        kind, key = ("acc", "acc") if any("acc" in result for result in results) else ("reward", "score")
        values = [[float(result.get(key, 0)) for result in group] for group in groups.values()]
        prefix, n = f"val-core/{source}/{kind}", len(values[0])
        metrics[f"{prefix}/mean@{n}"] = sum(sum(v) / len(v) for v in values) / len(values)
        metrics[f"{prefix}/best@{n}"] = sum(max(v) for v in values) / len(values)
        if any("pred" in result for result in results):
            votes = [[str(result.get("pred")) for result in group] for group in groups.values()]
            winner = [v[vote.index(max(vote, key=vote.count))] for v, vote in zip(values, votes, strict=True)]
            metrics[f"{prefix}/maj@{n}"] = sum(winner) / len(values)
    return metrics


def _print_samples(rows, results, num_examine):
    """Print the first `num_examine` rows of each data source as tables."""
    console, shown = Console(), {}
    for row, result in zip(rows, results, strict=True):
        source = str(row.get("data_source"))
        shown[source] = shown.get(source, 0) + 1
        if shown[source] > num_examine:
            continue
        table = Table(
            title=_plain(f"{source}, sample {shown[source]}", console), show_header=False, show_lines=True
        )
        for name, value in (
            ("prompt", row.get("prompt_str", "")),
            ("response", row.get("solution_str")),
            ("ground truth", row.get("ground_truth")),
            *result.items(),
        ):
            table.add_row(_plain(name, console), _plain(value, console))
        console.print(table)


def _plain(value, console):
    """Text for the console: no markup or control characters, in its encoding, long text cropped."""
    text = str(value)
    if len(text) > SHOWN_CHARS:
        half = SHOWN_CHARS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return Text(text.encode(console.encoding, "backslashreplace").decode(console.encoding), overflow="fold")
