"""NuminaMath-CoT (Li et al. 2024): the problems of six sources that have an answer in a box.

python data_prep/numina.py --local_save_dir data/numina
python data_prep/numina.py --local_save_dir data/numina --local_dataset_path DIR
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass

from data_prep import prepare
from rewards.boxed import last_boxed

SOURCES = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
INSTRUCTION = r"Present the answer in LaTex format: \boxed{Your answer}"  # as in PRIME's Eurus-2-RL-Data


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/numina"
    """Directory for train.parquet and test.parquet."""


def hub(split):
    """Arguments of `datasets.load_dataset`."""
    return {"path": "AI-MO/NuminaMath-CoT", "split": split}


def make_row(record, split, index):
    """One row of the schema; the ground truth is the last box of the solution."""
    problem = record["problem"]
    solution = record["solution"]
    if record["source"] not in SOURCES:
        raise prepare.LeftOut("of another source")
    ground_truth = last_boxed(solution)
    if ground_truth is None:
        raise prepare.LeftOut("no box in the solution, as in proofs")
    return {
        "data_source": f"numina_{record['source']}",
        "prompt": [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "question": problem, "answer": solution},
    }


def main(args):
    prepare.prepare(args, ("train", "test"), hub, make_row)


if __name__ == "__main__":
    prepare.run(main, Args)
