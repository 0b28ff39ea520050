"""What is in parquet files: rows, sources, an example, prompt lengths, the validator's verdict, repetitions.

python data_prep/inspect.py data/gsm8k/train.parquet data/gsm8k/test.parquet --tokenizer models/tiny

Ends with code 1 if a row is not as `data_prep/lib/schema.py` says. A data source without a reward of this
repository is named: it takes a reward of your own.
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

from common.arguments import no_model
from data_prep.lib.chats import plain_rows
from data_prep.lib.prepare import prompt_key, repeated_prompts, run
from data_prep.lib.schema import KINDS, check_row, open_parquet
from data_prep.lib.templates import render, use_template
from rewards import check_sources

BINS, WIDTH = 10, 50  # of the histogram, in rows and characters
SHOWN = 5  # faults that are printed of a file


@dataclass
class Args:
    files: tyro.conf.Positional[tuple[str, ...]]
    """Parquet files."""
    tokenizer: str | None = None
    """Directory or hub name of a tokenizer; it counts tokens with its chat template.  None: characters."""
    chat_template: str | None = None
    """Jinja file in place of its chat template."""
    chat_template_kwargs: str = "{}"
    """Values of the template's variables, as JSON: {"enable_thinking": false}."""


def read(path):
    """Kind and rows of a file; ValueError if there are none."""
    rows = plain_rows(open_parquet(path, ())[0].read())
    kind = next((kind for kind, names in KINDS.items() if rows[0].keys() >= set(names)), None)
    if kind is None:
        kinds = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in KINDS.items())
        raise ValueError(f"{path}: columns {', '.join(rows[0])} are of no kind of the schema ({kinds})")
    return kind, rows


def check(path, rows):
    """The rows as trainers read them, and what the validator says of the others, one line each."""
    good, lines = [], []
    for i, row in enumerate(rows):
        try:
            good.append(check_row(row, f"{path}: row {i}"))
        except ValueError as error:
            lines.append(str(error))
    return good, lines


def unrewarded(path, sources):
    """Yield a line for each data source that no reward of this repository scores here."""
    for source in sources:
        try:
            check_sources([source])
        except ValueError as error:
            yield f"{path}: {error}"


def prompt_lengths(path, rows, tokenizer):
    """Length of each prompt, or dialogue, in tokens (no tokenizer: in characters)."""
    chats = [row.get("prompt") or row["messages"] for row in rows]
    if tokenizer is None:
        return [sum(len(message["content"]) for message in chat) for chat in chats]
    prompted, lengths = "prompt" in rows[0], []
    for i, chat in enumerate(chats):
        try:
            text = render(chat, tokenizer, rows[i].get("tools"), prompted)
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
    tokenizer, prompts, valid = None, {}, True
    if not args.tokenizer and (args.chat_template or args.chat_template_kwargs != "{}"):
        raise ValueError("--chat_template and --chat_template_kwargs need --tokenizer, which they are for")
    if problem := no_model(vars(args), ["tokenizer"], "tokenizer_config.json"):
        raise ValueError(problem)
    if args.tokenizer:
        from data_prep.lib.images import load_tokenizer  # slow to import

        tokenizer = load_tokenizer(args.tokenizer)
        use_template(tokenizer, args)
    for path in args.files:
        kind, rows = read(path)
        sources = Counter(str(row.get("data_source")) for row in rows).most_common()
        print(f"{path}: {kind}, {len(rows)} rows ({', '.join(f'{name} {n}' for name, n in sources)})")
        Console().print(Pretty(rows[0], max_string=600))
        if kind == "RL":
            for line in unrewarded(path, dict.fromkeys(str(row["data_source"]) for row in rows)):
                print(line)
        rows, lines = check(path, rows)
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
