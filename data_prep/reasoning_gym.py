"""Procedural tasks of the library reasoning-gym (arXiv 2505.24760), with its default difficulty of each.

python data_prep/reasoning_gym.py --task leg_counting --local_save_dir data/leg_counting

The library: pip install --no-deps -r requirements-reasoning-gym.txt
Tasks whose scorer cannot be used for training are refused: see rewards/reasoning_gym.py.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import ast
from dataclasses import dataclass
from functools import partial

import numpy as np

from data_prep import prepare
from rewards.reasoning_gym import check_task


@dataclass
class Args:
    task: str
    """Name of the task in the library."""
    local_save_dir: str = "data/reasoning_gym"
    """Directory for train.parquet and test.parquet."""
    train_size: int = 1000
    """Questions to generate for train; equal questions are kept once."""
    test_size: int = 100
    """Questions to generate for test; questions that are in train are left out."""
    seed: int = 0
    """Seed of the questions."""


def make_row(entry, split, index, task, seen):
    """One row of the schema; extra_info's `entry` is the library's entry as a Python literal, for scoring."""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    question = entry["question"]
    answer = entry["answer"]
    if question in seen:
        raise prepare.LeftOut("the question of an earlier row")
    seen.add(question)
    with np.printoptions(legacy="1.25"):  # a numpy string prints as 'a', not as np.str_('a')
        literal = repr(entry)
    if ast.literal_eval(literal) != entry:
        raise ValueError("the entry cannot be stored as a literal")
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPTS["DeepSeekZero"]},
            {"role": "user", "content": question},
        ],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": answer or ""},  # None: many are correct
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "answer": "" if answer is None else f"<answer>{answer}</answer>",
            "entry": literal,
        },
    }


def main(args):
    for name in ("train_size", "test_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    check_task(args.task)
    import reasoning_gym

    size = args.train_size + args.test_size
    entries = reasoning_gym.create_dataset(args.task, seed=args.seed, size=size)
    records = [(f"{args.task} seed {args.seed} entry {i}", entries[i]) for i in range(size)]
    sources = {"train": records[: args.train_size], "test": records[args.train_size :]}
    prepare.write_splits(args.local_save_dir, sources, partial(make_row, task=args.task, seen=set()))


if __name__ == "__main__":
    prepare.run(main, Args)
