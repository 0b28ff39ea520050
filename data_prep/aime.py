"""AIME, the American Invitational Mathematics Examination: 30 problems a year, for evaluation only.

python data_prep/aime.py --local_save_dir data/aime24 --year 2024
python data_prep/aime.py --local_save_dir data/aime25 --year 2025 --local_dataset_path DIR
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass
from functools import partial
from typing import Literal

from data_prep import prepare

PROMPT = (  # as in DAPO's recipe
    "Solve the following math problem step by step. The last line of your response should be of the form"
    " Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/aime"
    """Directory for test.parquet."""
    year: Literal["2024", "2025"] = "2024"
    """Year of the two examinations."""


def hub(split, year):
    """Arguments of `datasets.load_dataset`."""
    if year == "2024":
        return {"path": "Maxwell-Jia/AIME_2024", "split": "train"}  # the only split there
    return {"path": "math-ai/aime25", "split": split}


def make_row(record, split, index, year):
    """One row of the schema; the sets of 2024 and 2025 name their columns with and without a capital."""
    record = {name.lower(): value for name, value in record.items()}
    problem = record["problem"]
    answer = str(record["answer"])
    return {
        "data_source": f"aime{year}",
        "prompt": [{"role": "user", "content": PROMPT.format(problem=problem)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem,
            "answer": f"{record.get('solution', '')}\nAnswer: {answer}".strip(),
            "id": str(record["id"]),
        },
    }


def main(args):
    prepare.prepare(args, ("test",), partial(hub, year=args.year), partial(make_row, year=args.year))


if __name__ == "__main__":
    prepare.run(main, Args)
