"""What people read of scored responses: a few in the terminal, means over a validation."""

import random
import sys
from collections import Counter

SHOWN_CHARS = 240  # of a text


def print_samples(rows, results, num_examine):
    """Print the first rows of each data source."""
    if not num_examine:
        return
    seen = Counter()
    for row, result in zip(rows, results, strict=True):
        source = str(row.get("data_source"))
        seen[source] += 1
        if seen[source] <= num_examine:
            print(sample_text(row, result), flush=True)


def sample_text(row, result):
    """Two lines for a row that was scored."""
    names = "data_source", "prompt_str", "ground_truth", "solution_str"
    source, prompt, truth, response = (_one_line(row.get(name, "")) for name in names)
    return f"{source}: {prompt} [{truth}]\n  {response} -> {_one_line(result)}"


def validation_summary(rows, number):
    """-> `validation_metrics`, and text: of each data source a response, drawn by `number`, and the means.

    rows: those of the manager's `score_responses`, of all ranks.
    """
    metrics = validation_metrics(rows)
    texts = []
    for some in by_source(rows).values():
        row = random.Random(number).choice(some)
        texts.append(sample_text(row["sampled"], row["reward"]))
    texts += [f"{name} {value:.3f}" for name, value in metrics.items() if "/mean@" in name]
    return metrics, "\n".join(texts)


def _one_line(value):
    """Text for the terminal: no control characters, in its encoding, the middle of a long text left out."""
    text = str(value)
    if len(text) > SHOWN_CHARS:
        text = f"{text[: SHOWN_CHARS // 2]} [...] {text[-SHOWN_CHARS // 2 :]}"
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def validation_metrics(rows):
    """val-core/{source}/{acc|reward}/{mean@N,best@N,maj@N}: means over prompts with N responses each.

    rows: dicts with data_source, index (of the prompt) and reward (a result of the reward manager).
    The value is `acc` where the scorer returns it, else the score; maj, the value of the most frequent
    `pred`, needs one, and is 0 where no response has any. A response whose reward failed counts 0.
    """
    metrics = {}
    for source, some in by_source(rows).items():
        groups = {}
        for row in some:
            groups.setdefault(row["index"], []).append(row["reward"])
        groups = list(groups.values())
        returned = {key for group in groups for result in group for key in result}
        kind = "reward"
        key = "score"
        if "acc" in returned:
            kind = "acc"
            key = "acc"
        values = [[float(result.get(key, 0)) for result in group] for group in groups]
        n = len(values[0])
        prefix = f"val-core/{source}/{kind}"
        metrics[f"{prefix}/mean@{n}"] = mean([mean(value) for value in values])
        metrics[f"{prefix}/best@{n}"] = mean([max(value) for value in values])
        if "pred" in returned:
            majorities = [value_of_majority(group, value) for group, value in zip(groups, values)]
            metrics[f"{prefix}/maj@{n}"] = mean(majorities)
    return metrics


def by_source(rows):
    """{data source: its rows}, by name."""
    found = {}
    for row in rows:
        found.setdefault(row["data_source"], []).append(row)
    return dict(sorted(found.items()))


def mean(values):
    return sum(values) / len(values)


def value_of_majority(results, values):
    """The value of the first result with the most frequent `pred`; 0 where none has any."""
    votes = [result.get("pred") for result in results]
    cast = [answer for answer in votes if answer is not None]
    if not cast:
        return 0.0
    [(winner, _)] = Counter(cast).most_common(1)
    return values[votes.index(winner)]
