"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): train 7,473, test 1,319.

python data_prep/gsm8k.py --local_save_dir data/gsm8k
python data_prep/gsm8k.py --local_save_dir data/gsm8k --local_dataset_path DIR    with train.jsonl, test.jsonl
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass

from data_prep import prepare

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # as in verl's recipe


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/gsm8k"
    """Directory for train.parquet and test.parquet."""


def hub(split):
    """Arguments of `datasets.load_dataset`."""
    return {"path": DATA_SOURCE, "name": "main", "split": split}


def make_row(record, split, index):
    """One row of the schema; the ground truth is the number after the answer's `#### `, without commas."""
    question, answer = record["question"], record["answer"]
    _, marker, ground_truth = answer.rpartition("#### ")
    if not marker:
        raise ValueError(f"'answer' does not end in '#### NUMBER': {answer[-60:]!r}")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def main(args):
    prepare.prepare(args, ("train", "test"), hub, make_row)


if __name__ == "__main__":
    prepare.run(main, Args)
