"""Prompts of an environment that brings its own: envs/verifiers.py, envs/openenv.py.

    python data_prep/environment.py --env envs/verifiers.py:TASKSET --local_save_dir data/TASKSET

Test has the first tasks, train those after them. Train with --reward_fn rewards/env.py:compute_score.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass
from itertools import chain, islice

from data_prep import prepare
from envs import load_env


@dataclass
class Args:
    env: str
    """Environment, FILE.py:NAME, a class with `rows`."""
    local_save_dir: str = "data/environment"
    """Directory for train.parquet and test.parquet."""
    train_size: int = 1000
    """Tasks of train; fewer if the environment has no more."""
    test_size: int = 100
    """Tasks of test; 0: train.parquet alone."""


def make_row(record, split, index):
    prompt, extra_info = record
    return {
        "data_source": "environment",
        "prompt": prompt,
        "ability": "agent",
        "reward_model": {"style": "model"},  # the environment's own reward
        "extra_info": {"split": split, "index": index, **extra_info},
    }


def main(args):
    env = load_env(args.env)
    if not hasattr(env, "rows"):
        raise ValueError(f"--env {args.env} has no `rows`: write the prompts by a script of your own")
    records = ((f"{args.env} task {i}", row) for i, row in enumerate(env.rows()))
    first = [*islice(records, args.test_size + 1)]
    if len(first) <= args.test_size:
        raise ValueError(f"--test_size {args.test_size}: {len(first)} tasks leave none to train")
    train = islice(chain(first[-1:], records), args.train_size)
    splits = dict(test=first[:-1], train=train) if args.test_size else dict(train=train)
    prepare.write_splits(args.local_save_dir, splits, make_row)


if __name__ == "__main__":
    prepare.run(main, Args)
