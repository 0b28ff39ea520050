"""DAPO-Math-17k (Yu et al. 2025, arXiv 2503.14476): the prompts as published, each once.

python data_prep/dapo_math.py --local_save_dir data/dapo_math
python data_prep/dapo_math.py --local_save_dir data/dapo_math --local_dataset_path DIR

The published file holds each of its 17 thousand problems about a hundred times.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass
from functools import partial

from data_prep import prepare


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/dapo_math"
    """Directory for train.parquet."""


def hub(split):
    """Arguments of `datasets.load_dataset`."""
    return {"path": "BytedTsinghua-SIA/DAPO-Math-17k", "split": split}


def make_row(record, split, index, seen):
    """One row of the schema; `seen` collects the problems."""
    question = record["prompt"][0]["content"]
    ground_truth = record["reward_model"]["ground_truth"]
    if question in seen:
        raise prepare.LeftOut("a copy of an earlier row")
    seen.add(question)
    return {
        "data_source": "math_dapo",
        "prompt": record["prompt"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "answer": f"Answer: {ground_truth}",
            "id": record["extra_info"]["index"],
        },
    }


def main(args):
    prepare.prepare(args, ("train",), hub, partial(make_row, seen=set()))


if __name__ == "__main__":
    prepare.run(main, Args)
