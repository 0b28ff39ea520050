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
from itertools import accumulate, pairwise

import numpy as np

from data_prep import prepare
from rewards.reasoning_gym import check_task


@dataclass
class Args:
    task: str
    """Name of the task in the library."""
    local_save_dir: str = "data/reasoning_gym"
    """Directory for train.parquet, val.parquet and test.parquet."""
    train_size: int = 1000
    """Questions that are generated for train; of equal ones the first is kept."""
    val_size: int = 0
    """Questions that are generated for val; those that train has are left out. 0: no such file."""
    test_size: int = 100
    """Questions that are generated for test; those that train or val has are left out."""
    seed: int = 0
    """Seed of the questions."""
    answer_only: bool = False
    """Ask for nothing but the answer: no system prompt, no thoughts, no tags. The response is the answer."""


def make_row(entry, split, index, task, answer_only, seen):
    """One row of the schema; extra_info's `entry` is the library's entry as a Python literal, for scoring."""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    question, answer = entry["question"], entry["answer"]
    if question in seen:
        raise prepare.LeftOut("the question of an earlier row")
    seen.add(question)
    with np.printoptions(legacy="1.25"):  # a numpy string prints as 'a', not as np.str_('a')
        literal = repr(entry)
    if ast.literal_eval(literal) != entry:
        raise ValueError("the entry cannot be stored as a literal")
    system = [] if answer_only else [{"role": "system", "content": SYSTEM_PROMPTS["DeepSeekZero"]}]
    said = "" if answer is None else answer
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [*system, {"role": "user", "content": question}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": answer or ""},  # None: many are right
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "answer": said if answer_only or not said else f"<answer>{said}</answer>",
            "answer_only": answer_only,
            "entry": literal,
        },
    }


def main(args):
    sizes = {"train": args.train_size, "val": args.val_size, "test": args.test_size}
    for split, size in sizes.items():
        if size < (split != "val"):
            raise ValueError(f"--{split}_size is {size}; it must be at least {int(split != 'val')}")
    check_task(args.task)
    import reasoning_gym

    entries = reasoning_gym.create_dataset(args.task, seed=args.seed, size=sum(sizes.values()))
    records = [(f"{args.task} seed {args.seed} entry {i}", entries[i]) for i in range(len(entries))]
    ends = [*accumulate(sizes.values(), initial=0)]
    sources = {split: records[a:b] for split, (a, b) in zip(sizes, pairwise(ends), strict=True) if a < b}
    make = partial(make_row, task=args.task, answer_only=args.answer_only, seen=set())
    prepare.write_splits(args.local_save_dir, sources, make)


if __name__ == "__main__":
    prepare.run(main, Args)
