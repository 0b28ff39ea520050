"""Additions of numbers with a fixed count of digits, as train, val and test parquet; needs no network.

    python data_prep/arithmetic.py --local_save_dir data/arithmetic

a+b and b+a stay in one split, so that no val or test question is a train question with its operands swapped.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import math
import random
from dataclasses import dataclass
from pathlib import Path

import tyro

from data_prep.schema import write_parquet


@dataclass
class Args:
    local_save_dir: str = "data/arithmetic"
    """Directory for train.parquet, val.parquet and test.parquet."""
    digits: int = 2
    """Digits of each operand, 1 to 9."""
    train_size: int = 6000
    """Questions in train."""
    val_size: int = 256
    """Questions in val, of which no two have the same operands."""
    test_size: int = 512
    """Questions in test, of which no two have the same operands."""
    seed: int = 0
    """Seed of the choice and the order of the questions."""


def splits(args):
    """Return {split: list of (a, b)}; ValueError if there are not enough questions of that many digits."""
    for name in ("digits", "train_size", "val_size", "test_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.digits > 9:
        raise ValueError(f"--digits is {args.digits}; it must be at most 9")
    low = 10 ** (args.digits - 1) if args.digits > 1 else 0
    n = 10**args.digits - low  # operands
    n_pairs, held_out = n * (n + 1) // 2, args.val_size + args.test_size
    rng = random.Random(args.seed)
    sample = rng.sample(range(n_pairs), min(n_pairs, held_out + args.train_size))
    pairs = []
    for i in sample:  # pair i of (0,0) (0,1) (1,1) (0,2) ..., counted along the triangle
        b = (math.isqrt(8 * i + 1) - 1) // 2
        pairs.append((low + i - b * (b + 1) // 2, low + b))
    train = sorted({question for a, b in pairs[held_out:] for question in ((a, b), (b, a))})
    if len(train) < args.train_size:
        raise ValueError(
            f"--train_size {args.train_size}: only {len(train)} questions of {args.digits} digits are left"
            f" beside --val_size {args.val_size} and --test_size {args.test_size}"
        )
    eval_questions = [rng.choice(((a, b), (b, a))) for a, b in pairs[:held_out]]
    return {
        "train": rng.sample(train, args.train_size),
        "val": eval_questions[: args.val_size],
        "test": eval_questions[args.val_size :],
    }


def make_row(split, index, a, b):
    """One row of the schema for a + b."""
    question, answer = f"{a}+{b}=", str(a + b)
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def main(args):
    """Write the three files and say how many rows each has."""
    for split, questions in splits(args).items():
        path = Path(args.local_save_dir) / f"{split}.parquet"
        write_parquet([make_row(split, i, a, b) for i, (a, b) in enumerate(questions)], path)
        print(f"{path}: {len(questions)} rows")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except ValueError as error:
        sys.exit(f"arithmetic.py: {error}")
