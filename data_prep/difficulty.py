"""Prompts of middle difficulty: those that a model answers correctly sometimes, by its scored responses.

python algos/generate.py --model MODEL --data train.parquet --output all.parquet --n_samples 8 --temperature 1
python algos/eval.py --data all.parquet --output runs/eval
python data_prep/difficulty.py runs/eval/scored_A.parquet --local_save_dir data/middle --low 0.1 --high 0.9

Writes train.parquet: the rows as they were before generate.py, with the pass rate in extra_info.pass_rate.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro

from data_prep.lib.conversations import opened, say_unknown
from data_prep.lib.schema import check_row, write_parquet
from data_prep.prepare import run

ANSWERS = "responses", "response_tokens", "finish_reasons", "episodes", "scores", "results"  # columns
PLACE = "split", "index", "pass_rate"  # of extra_info: where a row was, and what was measured of it


@dataclass
class Args:
    files: tyro.conf.Positional[tuple[str, ...]]
    """Files with responses and scores, as eval.py writes them; the same prompt may be in several."""
    local_save_dir: str
    """Directory for train.parquet."""
    low: float = 0.1
    """Lowest share of correct responses of a prompt that is kept."""
    high: float = 0.9
    """Highest share of correct responses of a prompt that is kept."""
    right: float = 1.0
    """A response is correct if its accuracy, or else its score, is at least this."""


def whole_rows(path, columns):
    """Yield the rows of a file, whole; `columns` may not be null. Raises as `load_rows`."""
    source, _ = opened(path, dict(zip(columns, columns)), say=False)
    for where, record in source.rows():
        row = check_row(record, where)
        if empty := [name for name in columns if row[name] is None]:
            raise ValueError(f"{where}: {empty[0]!r} is null; fill it in or drop the row")
        yield row
    say_unknown()


def unanswered(row):
    """-> the row as it was before generate.py and eval.py, and a key that rows of one question share.

    Two rows with one text may ask different things: of another picture, with other tools, of another game.
    """
    row = {name: x for name, x in row.items() if name not in ANSWERS}
    info = {name: x for name, x in (row.get("extra_info") or {}).items() if name not in PLACE}
    text = json.dumps(row | dict(extra_info=info), default=str)
    return row, hashlib.sha256(text.encode()).digest()


def judged(path, right):
    """Yield each row as it was before generate.py, its key, and of each response whether it is correct."""
    for row in whole_rows(path, ["results", "prompt", "extra_info"]):
        results = map(json.loads, row["results"])
        found = [result.get("acc", result["score"]) >= right for result in results if "failure" not in result]
        yield *unanswered(row), found


def main(args):
    if not 0 <= args.low <= args.high <= 1:
        raise ValueError(f"--low {args.low} --high {args.high}: it must be 0 <= low <= high <= 1")
    prompts = {}
    counts = Counter()
    rows = []
    for path in args.files:
        for row, key, found in judged(path, args.right):
            prompts.setdefault(key, (row, []))[1].extend(found)
    for row, found in prompts.values():
        rate = sum(found) / len(found) if found else None
        if rate is None:
            counts["no response could be scored"] += 1
        elif rate < args.low:
            counts[f"correct in less than {args.low:.0%}"] += 1
        elif rate > args.high:
            counts[f"correct in more than {args.high:.0%}"] += 1
        else:
            rows.append(row | dict(extra_info=row["extra_info"] | dict(pass_rate=rate)))
    left_out = "; ".join(f"{n} {why}" for why, n in counts.items())
    if not rows:
        raise ValueError(f"{', '.join(args.files)}: no prompt from --low to --high: {left_out}")
    path = Path(args.local_save_dir) / "train.parquet"
    mean = sum(row["extra_info"]["pass_rate"] for row in rows) / len(rows)
    share = f"{len(rows)} of {len(prompts)} prompts ({len(rows) / len(prompts):.1%})"
    print(f"{path}: {write_parquet(rows, path)} rows, {share}, correct on average in {mean:.1%}")
    if left_out:
        print(f"prompts left out: {left_out}")


if __name__ == "__main__":
    run(main, Args)
