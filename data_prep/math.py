"""MATH (Hendrycks et al. 2021, arXiv 2103.03874): train 7,500, test 5,000, and its 500 of PRM800K (math500).

python data_prep/math.py --local_save_dir data/math
python data_prep/math.py --local_dataset_path DIR --splits math500    of DIR/math500.jsonl only
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass

from data_prep import prepare
from rewards.boxed import last_boxed

INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."  # as in verl's recipe


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/math"
    """Directory for train.parquet, test.parquet and math500.parquet."""


def hub(split):
    """Arguments of `datasets.load_dataset`."""
    if split == "math500":
        return {"path": "HuggingFaceH4/MATH-500", "split": "test"}
    return {"path": "DigitalLearningGmbH/MATH-lighteval", "split": split}


def make_row(record, split, index):
    """One row of the schema; the ground truth is the last box of the solution."""
    ground_truth = last_boxed(record["solution"])
    if ground_truth is None:
        raise ValueError(f"no \\boxed{{}} in the 'solution': {record['solution'][-60:]!r}")
    is_math500 = "unique_id" in record
    return {
        "data_source": "HuggingFaceH4/MATH-500" if is_math500 else "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": f"{record['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": record["problem"],
            "answer": record["solution"],
            "subject": record["subject" if is_math500 else "type"],
            "level": str(record["level"]).removeprefix("Level "),
        },
    }


def main(args):
    prepare.prepare(args, ("train", "test", "math500"), hub, make_row)


if __name__ == "__main__":
    prepare.run(main, Args)
