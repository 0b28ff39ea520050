"""Geometry3K (Lu et al. 2021, arXiv 2105.04165): problems with their pictures.

python data_prep/geometry3k.py --local_save_dir data/geometry3k
python data_prep/geometry3k.py --local_dataset_path DIR --splits train=examples

Reads the columns of hiyouga/geometry3k: its pictures go to the column `images`, and the prompt has a mark
<image> for each.  The authors' own files have no pictures, without which few problems can be solved.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass

from data_prep import prepare

INSTRUCTION = (  # as in verl's recipe
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer."
    " The reasoning process MUST BE enclosed within <think> </think> tags."
    r" The final answer MUST BE put in \boxed{}."
)


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/geometry3k"
    """Directory for train.parquet, validation.parquet and test.parquet."""


def hub(split):
    """Arguments of `datasets.load_dataset`."""
    return {"path": "hiyouga/geometry3k", "split": split}


def make_row(record, split, index):
    """One row of the schema."""
    if "choices" in record:  # the authors' files
        problem = record["annotat_text"]
        answer = record["choices"]["ABCD".index(record["answer"])]
    else:
        problem = record["problem"]
        answer = record["answer"]
    text = problem if record.get("images") else problem.replace("<image>", "").strip()
    row = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"{text} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem,
            "answer": f"<think></think> \\boxed{{{answer}}}",
        },
    }
    return row | ({"images": record["images"]} if "images" in record else {})


def main(args):
    prepare.prepare(args, ("train", "validation", "test"), hub, make_row)


if __name__ == "__main__":
    prepare.run(main, Args)
