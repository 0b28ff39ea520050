"""What is in files of rows: rows, sources, an example, prompt lengths, the validator's verdict, repetitions.

python data_prep/inspect.py data/gsm8k/train.parquet data/gsm8k/test.parquet --tokenizer models/tiny

Ends with code 1 if a row is not as `data_prep/lib/schema.py` says, if its trainer refuses it, or if a reward
cannot score it. A data source without a reward of this repository is named: it takes a reward of your own.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from collections import Counter
from dataclasses import dataclass

import numpy as np
import tyro
from rich.console import Console
from rich.pretty import Pretty

from data_prep.lib.conversations import (
    READERS,
    answer,
    check_prompt,
    kind_of,
    opened,
    pair_of,
    read_row,
    says_nothing,
)
from data_prep.lib.schema import KINDS
from data_prep.lib.source import Source
from data_prep.lib.templates import given_by, render, use_template
from data_prep.lib.turns import trained_turns
from data_prep.prepare import prompt_key, repeated_prompts, run
from rewards.manager import RewardManager
from rewards.manager.combined import load_rewards
from system.arguments import no_model

BINS, WIDTH = 10, 50  # of the histogram, in rows and characters
SHOWN = 5  # faults that are printed of a file


@dataclass
class Args:
    files: tyro.conf.Positional[tuple[str, ...]]
    """Files of rows: parquet or JSON."""
    tokenizer: str | None = None
    """Directory or hub name of a tokenizer; it counts tokens with its chat template.  None: characters."""
    chat_template: str | None = None
    """Jinja file in place of the model's chat template."""
    chat_template_kwargs: str = "{}"
    """Values of its variables, as JSON: {"enable_thinking": false}."""
    reward_fn: tuple[str, ...] = ("rewards",)
    """FILE.py:NAME of a reward that will score the rows; rewards: the scorer of each row's data_source."""


def read_file(path):
    """Kind of a file, its first record, the rows as trainers read them, and the lines of the others."""
    source = Source(path)
    good = []
    lines = []
    silent = 0
    kind = kind_of(source)
    if kind is None:
        kinds = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in KINDS.items())
        raise ValueError(f"{path}: columns {', '.join(source.names)} are of no kind of the schema ({kinds})")
    wanted, _ = READERS[kind]
    _, columns = opened(path, wanted)  # says what is read
    first = next(record for _, record in source.rows() if isinstance(record, dict))
    for where, record in source.rows():
        try:
            row, is_silent = checked(read_row(record, columns, path))
            silent += is_silent
            good.append(row | dict(index=len(good) + len(lines)))
        except (ValueError, TypeError) as error:
            lines.append(f"{where}: {error}")
    if silent:
        print(f"{path}: {silent} rows have no answer, or an empty turn: sft.py drops them")
    return kind, first, good, lines or [f"{path}: no row has an answer"] * (0 < silent == len(good))


def checked(row):
    """A row with the messages of its prompt; whether sft.py drops it. ValueError as its trainer raises it."""
    if "messages" in row:
        return row, says_nothing(row["messages"]) or not trained_turns(row["messages"])
    names = [name for name in ("chosen", "rejected", "completion") if name in row]
    if "chosen" in row or "label" in row:
        prompt, *replies = pair_of(row["prompt"], *map(row.get, names))
        for name, reply in zip(names, replies):
            if says_nothing(reply):
                raise ValueError(f"{name!r} is empty, or has an empty turn")
        if replies == [replies[-1]] * 2:
            raise ValueError("'chosen' and 'rejected' are equal")
        return row | dict(prompt=prompt), False
    silent = "completion" in row and says_nothing(row["completion"])
    if "completion" in row and not silent:
        answer(row["completion"])
    check_prompt(row["prompt"])
    return row, silent


def unscored(path, rows, manager):
    """Lines for rows that the rewards cannot score; prints which data sources none of them scores here."""
    lines = []
    of_source = {}
    for row in rows:
        of_source.setdefault(row["data_source"], []).append(row)
    for source, some in of_source.items():
        try:
            lines += [f"{path}: {fault}" for fault in manager.faults([source], some)]
        except ValueError as error:
            print(f"{path}: {error}")
    return lines


def prompt_lengths(path, rows, tokenizer):
    """Length of each prompt, or dialogue, in tokens (no tokenizer: in characters)."""
    chats = [row.get("prompt") or row["messages"] for row in rows]
    if tokenizer is None:
        return [sum(len(message["content"]) for message in chat) for chat in chats]
    prompted = "prompt" in rows[0]
    lengths = []
    for i, chat in enumerate(chats):
        try:
            text = render(chat, tokenizer, given_by(rows[i], None, tokenizer), prompted)
        except ValueError as error:
            raise ValueError(f"{path}: row {i}: {error}") from None
        lengths.append(len(tokenizer.encode(text, add_special_tokens=False)))
    return lengths


def print_histogram(lengths, unit):
    """Bars of the numbers of prompts by length."""
    counts, edges = np.histogram(lengths, BINS)
    low, middle, high = np.percentile(lengths, (0, 50, 95)).astype(int)
    print(f"prompt length in {unit}: min {low}, median {middle}, 95 % {high}, max {max(lengths)}")
    for count, left, right in zip(counts, edges, edges[1:], strict=False):
        bar = "#" * int(np.ceil(WIDTH * count / max(counts)))
        print(f"{left:8.0f} to {right:6.0f} {count:8} {bar}")


def main(args):
    tokenizer = None
    prompts = {}
    valid = True
    manager = RewardManager(compute_score=load_rewards(args.reward_fn, ()))
    if not args.tokenizer and (args.chat_template or args.chat_template_kwargs != "{}"):
        raise ValueError("--chat_template and --chat_template_kwargs need --tokenizer, which they are for")
    if problem := no_model(vars(args), ["tokenizer"], "tokenizer_config.json"):
        raise ValueError(problem)
    if args.tokenizer:
        from data_prep.lib.images import load_tokenizer  # slow to import

        tokenizer = load_tokenizer(args.tokenizer)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
    for path in args.files:
        kind, first, rows, lines = read_file(path)
        sources = Counter(str(row.get("data_source")) for row in rows)
        about = ", ".join(f"{name} {n}" for name, n in sources.most_common())
        print(f"{path}: {kind}, {len(rows) + len(lines)} rows ({about})")
        Console().print(Pretty(first, max_string=600))
        if kind == "RL":
            lines += unscored(path, rows, manager)
        if lines:
            valid = False
            print(*lines[:SHOWN], f"{path}: {len(lines)} rows with a fault", sep="\n")
        else:
            prompts[path] = [prompt_key(row) for row in rows]
            print_histogram(prompt_lengths(path, rows, tokenizer), "tokens" if tokenizer else "characters")
            print(f"{path}: valid")
    for line in repeated_prompts(prompts):
        print(line)
    sys.exit(not valid)


if __name__ == "__main__":
    run(main, Args)
