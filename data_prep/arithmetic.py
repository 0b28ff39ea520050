"""Sums, products, chains of sums, or last digits of calculations: train, val and test parquet.

    python data_prep/arithmetic.py --local_save_dir data/arithmetic
    python data_prep/arithmetic.py --operation multiply --tool_share 0.33 --local_save_dir data/multiplication
    python data_prep/arithmetic.py --operation chain --digits 1 --local_save_dir data/chain
    python data_prep/arithmetic.py --operation last_digit --worked_share 0.35 --local_save_dir data/last_digit

It needs no network. a+b and b+a stay in one split.  So no val or test question is a train question with its
operands in another order.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from data_prep.lib.schema import write_parquet
from data_prep.prepare import run

STEPS = {"+1": (1, 1), "-1": (1, -1), "*2": (2, 0)}  # of last_digit: factor, then summand


@dataclass
class Args:
    local_save_dir: str = "data/arithmetic"
    """Directory for train.parquet, val.parquet and test.parquet."""
    digits: int = 2
    """With --operation add or multiply or chain: digits of each operand, 1 to 9."""
    train_size: int = 6000
    """Questions in train."""
    val_size: int = 256
    """Questions in val, no two with the same operands."""
    test_size: int = 512
    """Questions in test, no two with the same operands."""
    seed: int = 0
    """Seed of the choice and the order of the questions."""
    operation: Literal["add", "multiply", "chain", "last_digit"] = "add"
    """What is asked: 37+85=, 37*85=, or 37+85+14=, whose answer has the totals on the way: 122 136; or
    7+1*2-1, from left to right, of which only last digits are kept: >7 8 6 5."""
    terms: int = 10
    """With --operation chain or last_digit: 2 to this many operands; of last_digit their number."""
    tool_share: float | None = None
    """Share of train's questions that ask a calculator in sft.parquet, conversations; None: no file."""
    worked_share: float | None = None
    """Share of train's questions that sft.parquet answers as train does, >7 8 6 5; the others: =5."""


def splits(args):
    """Return {split: list of operands}; ValueError if there are not enough questions of that many digits."""
    for name in ("digits", "train_size", "val_size", "test_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.digits > 9:
        raise ValueError(f"--digits is {args.digits}; it must be at most 9")
    if args.terms < 2:
        raise ValueError(f"--terms is {args.terms}; it must be at least 2")
    for name in ("tool_share", "worked_share"):
        if not 0 <= (getattr(args, name) or 0) <= 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be from 0 to 1")
    if args.tool_share is not None and args.worked_share is not None:
        raise ValueError("--tool_share and --worked_share both write sft.parquet; choose one")
    low = 10 ** (args.digits - 1) if args.digits > 1 else 0
    n = 10**args.digits - low  # operands
    n_pairs = n * (n + 1) // 2
    held_out = args.val_size + args.test_size
    rng = random.Random(args.seed)
    if args.operation == "chain":
        sizes = (rng.randint(2, args.terms) for _ in range(3 * (held_out + args.train_size)))
        drawn = (rng.choices(range(low, low + n), k=size) for size in sizes)
        chains = [*{tuple(sorted(chain)): chain for chain in drawn}.values()]
        rng.shuffle(chains)  # there are few short ones, and the first draws have most of them
        return divide(args, chains[held_out:], chains[:held_out], rng)
    if args.operation == "last_digit":
        draws = range(3 * (held_out + args.train_size))
        drawn = ((rng.randrange(10), *rng.choices([*STEPS], k=args.terms - 1)) for _ in draws)
        questions = [*dict.fromkeys(drawn)]  # each once
        return divide(args, questions[held_out:], questions[:held_out], rng)
    sample = rng.sample(range(n_pairs), min(n_pairs, held_out + args.train_size))
    pairs = []
    for i in sample:  # pair i of (0,0) (0,1) (1,1) (0,2) ..., counted along the triangle
        b = (math.isqrt(8 * i + 1) - 1) // 2
        pairs.append((low + i - b * (b + 1) // 2, low + b))
    train = sorted({question for a, b in pairs[held_out:] for question in ((a, b), (b, a))})
    return divide(args, train, [rng.choice(((a, b), (b, a))) for a, b in pairs[:held_out]], rng)


def divide(args, train, held_out, rng):
    """`splits` of the questions that training may have and of those that it may not."""
    if len(train) < args.train_size:
        raise ValueError(
            f"--train_size {args.train_size}: only {len(train)} such questions are left"
            f" besides --val_size {args.val_size} and --test_size {args.test_size}"
        )
    return {
        "train": rng.sample(train, args.train_size),
        "val": held_out[: args.val_size],
        "test": held_out[args.val_size :],
    }


def last_digits(first, *steps):
    """The last digit after each step, from left to right: 7 *2 -1 -> 7 4 3."""
    digits = [first]
    for step in steps:
        factor, summand = STEPS[step]
        digits.append((digits[-1] * factor + summand) % 10)
    return digits


def make_row(split, index, *operands, operation="add"):
    """One row of the schema for a sum, a product, a chain or a last digit."""
    if operation == "last_digit":
        question = "".join(map(str, operands))
        digits = last_digits(*operands)
        answer = ">" + " ".join(map(str, digits))
        truth = str(digits[-1])
    else:
        question = ("*" if operation == "multiply" else "+").join(map(str, operands)) + "="
        truth = str(math.prod(operands) if operation == "multiply" else sum(operands))
        totals = " ".join(map(str, [*accumulate(operands)][1:]))
        answer = totals if operation == "chain" else truth
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def converse(row, with_tool):
    """A row -> one for SFT: the answer, or <<37*85>>, the tool's answer to it, and the answer."""
    answer = row["reward_model"]["ground_truth"]
    call = f"<<{row['extra_info']['question'].rstrip('=')}>>"
    said = [("assistant", call), ("tool", answer)] * with_tool + [("assistant", answer)]
    messages = row["prompt"] + [{"role": role, "content": content} for role, content in said]
    return {name: row[name] for name in ("data_source", "extra_info")} | {"messages": messages}


def answer_at_once(row):
    """A row whose answer is =, then the truth, without what is on the way."""
    answer = "=" + row["reward_model"]["ground_truth"]
    return row | {"extra_info": row["extra_info"] | {"answer": answer}}


def main(args):
    """Write the files and say how many rows each has."""
    files = {
        split: [
            make_row(split, i, *operands, operation=args.operation) for i, operands in enumerate(questions)
        ]
        for split, questions in splits(args).items()
    }
    if args.tool_share is not None:  # the questions are in random order
        with_tool = round(args.tool_share * args.train_size)
        files["sft"] = [converse(row, i < with_tool) for i, row in enumerate(files["train"])]
    if args.worked_share is not None:
        worked = round(args.worked_share * args.train_size)
        files["sft"] = [row if i < worked else answer_at_once(row) for i, row in enumerate(files["train"])]
    for name, rows in files.items():
        path = Path(args.local_save_dir) / f"{name}.parquet"
        write_parquet(rows, path)
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    run(main, Args)
