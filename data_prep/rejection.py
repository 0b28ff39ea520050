"""Rejection sampling (RFT, arXiv 2308.01825): correct responses as rows for SFT, correct and wrong as pairs.

python algos/generate.py --model MODEL --data train.parquet --output all.parquet --n_samples 8 --temperature 1
python algos/eval.py --data all.parquet --output runs/eval
python data_prep/rejection.py runs/eval/scored_A.parquet --local_save_dir data/rft

Writes sft.parquet, which sft.py takes with its default columns, and pairs.parquet for rm.py and dpo.py.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from data_prep.difficulty import unanswered, whole_rows
from data_prep.lib.conversations import says_nothing
from data_prep.lib.schema import OPTIONAL, write_parquet
from data_prep.prepare import run
from system.thoughts import MARKS, after_thought, first, pattern


@dataclass
class Args:
    files: tyro.conf.Positional[tuple[str, ...]]
    """Files with responses and scores, as eval.py writes them; the same prompt may be in several."""
    local_save_dir: str
    """Directory for sft.parquet and pairs.parquet."""
    keep: Literal["all", "first", "shortest"] = "all"
    """Correct responses to a prompt that become rows for SFT: max_per_prompt different ones, or one."""
    max_per_prompt: int = 4
    """With --keep all: most rows for SFT from one prompt."""
    max_pairs: int = 4
    """Most pairs from one prompt; no two are the same."""
    right: float = 1.0
    """A response is correct if its accuracy, or else its score, is at least this."""


def whole_thought(text):
    """A response whose prompt opened its thought, with the opening."""
    for opening, closing in MARKS:
        end = first(pattern(closing), text)
        if end and not pattern(opening).search(text, 0, end.start()):
            return f"{opening.format(*end.groups())}\n{text}"
    return text


def judged(path, right, left_out):
    """Yield each row as it was before generate.py, its key, [(messages that follow, whether correct)]."""
    for i, row in enumerate(whole_rows(path, ["results", "responses", "data_source", "prompt"])):
        if len(row["responses"]) != len(row["results"]):
            raise ValueError(f"{path}: row {i}: 'responses' and 'results' differ in length; score it again")
        found = []
        for k, (text, result) in enumerate(zip(row["responses"], map(json.loads, row["results"]))):
            reason = row["finish_reasons"][k] if "finish_reasons" in row else "stop"
            reply = [{"role": "assistant", "content": text}]
            if "episodes" in row:  # a conversation with an environment
                reply = json.loads(row["episodes"][k]).get("messages", reply)
            turns = [message for message in reply if message["role"] == "assistant"]
            for message in turns:
                message["content"] = whole_thought(message["content"])
            if "failure" in result:
                left_out["their reward failed"] += 1
            elif says_nothing(reply):
                left_out["empty"] += 1
            elif reason == "thought" or any(after_thought(message["content"]) is None for message in turns):
                left_out["a thought is not closed"] += 1
            elif reason != "stop":
                left_out["cut off"] += 1  # as a row it would teach to stop early
            else:
                found.append((reply, result.get("acc", result["score"]) >= right))
        yield *unanswered(row), found


def different(replies):
    """The first of those that are the same up to white space."""
    first = {}
    for reply in replies:
        first.setdefault(" ".join(" ".join(message["content"] for message in reply).split()), reply)
    return [*first.values()]


def pairs(right, wrong, most):
    """At most so many pairs; each response comes once before one comes twice.

    a b against x y z, five pairs -> ax by az bx ay.
    """
    turn = math.lcm(len(right), len(wrong)) or 1  # after which the same pairs would come again
    numbers = range(min(most, len(right) * len(wrong)))
    return [(right[i % len(right)], wrong[(i + i // turn) % len(wrong)]) for i in numbers]


def main(args):
    for name in ("max_per_prompt", "max_pairs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")

    def characters(reply):
        return sum(len(message["content"]) for message in reply)

    prompts = {}
    left_out = Counter()
    shares = Counter()
    rows = {"sft": [], "pairs": []}
    for path in args.files:
        for row, key, found in judged(path, args.right, left_out):
            prompts.setdefault(key, (row, []))[1].extend(found)
    talks = any(len(reply) > 1 for _, found in prompts.values() for reply, _ in found)
    for index, (row, found) in enumerate(prompts.values()):
        right, wrong = (different([reply for reply, good in found if good is kind]) for kind in (True, False))
        kept_columns = [name for name in ("data_source", "prompt", *OPTIONAL) if name in row]
        about = {name: row[name] for name in kept_columns}
        info = dict(split="train", index=index)
        kept = sorted(right, key=characters) if args.keep == "shortest" else right
        kept = kept[: args.max_per_prompt if args.keep == "all" else 1]
        made = pairs(right, wrong, args.max_pairs)
        for reply in kept:
            answer = dict(messages=row["prompt"] + reply, extra_info=info | dict(answer=reply[-1]["content"]))
            rows["sft"].append(about | answer)
            if talks:
                rows["sft"][-1].pop("prompt")  # then sft.py needs --messages_key
        rows["pairs"] += [about | dict(chosen=a, rejected=b, extra_info=info) for a, b in made]
        shares += Counter(sft=bool(kept), pairs=bool(made))
    if not rows["sft"]:
        raise ValueError(f"{', '.join(args.files)}: no response is correct, by --right {args.right}")
    for name, some in rows.items():
        path = Path(args.local_save_dir) / f"{name}.parquet"
        path.unlink(missing_ok=True)  # of an earlier run; this run may have no pairs
        count = write_parquet(some, path) if some else 0
        share = f"{shares[name]} of {len(prompts)} prompts ({shares[name] / len(prompts):.1%})"
        print(f"{path}: {count} rows from {share}")
    if left_out:
        print("responses left out: " + "; ".join(f"{n} {why}" for why, n in left_out.items()))


if __name__ == "__main__":
    run(main, Args)
