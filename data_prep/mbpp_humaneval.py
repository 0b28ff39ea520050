"""MBPP (Austin et al. 2021, arXiv 2108.07732), sanitized, and HumanEval (Chen et al. 2021, arXiv 2107.03374).

python data_prep/mbpp_humaneval.py --dataset mbpp --local_save_dir data/mbpp
python data_prep/mbpp_humaneval.py --dataset humaneval --local_save_dir data/humaneval
python data_prep/mbpp_humaneval.py --dataset humaneval --local_dataset_path DIR --splits test=HumanEval
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import json
from dataclasses import dataclass
from functools import partial
from typing import Literal

from data_prep import prepare

INSTRUCTION = "Present the code in\n```python\nYour code\n```\nat the end."


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/code"
    """Directory for train.parquet (MBPP only) and test.parquet."""
    dataset: Literal["mbpp", "humaneval"] = "mbpp"
    """Data set to prepare."""


HUB = {
    "mbpp": {"path": "google-research-datasets/mbpp", "name": "sanitized"},
    "humaneval": {"path": "openai/openai_humaneval"},
}
SPLITS = {"mbpp": ("train", "test"), "humaneval": ("test",)}


def mbpp(record):
    """(question, asserts, program); the first assert shows the function's name and arguments."""
    tests = ["\n".join([*record["test_imports"], test]) for test in record["test_list"]]
    return (
        f"{record['prompt']}\nYour code should pass this test: {record['test_list'][0]}",
        tests,
        record["code"],
    )


def humaneval(record):
    """(question, asserts, program); all asserts are one test, since they share what is set up before them."""
    question = f"Complete this Python function:\n```python\n{record['prompt']}```\nRepeat what is given."
    test = f"{record['test']}\ncheck({record['entry_point']})"
    return question, [test], record["prompt"] + record["canonical_solution"]


def make_row(record, split, index, dataset):
    """One row of the schema; the ground truth is JSON text, {"assert_case": [Python code that must hold]}."""
    question, tests, program = mbpp(record) if dataset == "mbpp" else humaneval(record)
    return {
        "data_source": "mbpp" if dataset == "mbpp" else "openai_humaneval",
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps({"assert_case": tests})},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "answer": f"```python\n{program}\n```",
            "id": str(record["task_id"]),
        },
    }


def main(args):
    def hub(split):
        return HUB[args.dataset] | {"split": split}

    prepare.prepare(args, SPLITS[args.dataset], hub, partial(make_row, dataset=args.dataset))


if __name__ == "__main__":
    prepare.run(main, Args)
