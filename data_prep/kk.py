"""Knights and knaves, 3 to 7 people (Xie et al., arXiv 2410.23123), with the prompt of Logic-RL (2502.14768).

python data_prep/kk.py --local_save_dir data/kk
python data_prep/kk.py --local_save_dir data/kk --local_dataset_path DIR     DIR/3ppl/train.parquet and so on

Logic-RL's own files hold prompts with a chat template written out; here they are messages, for any template.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass

from data_prep import prepare

SYSTEM = (
    "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind and"
    " then provides the user with the answer. The reasoning process and answer are enclosed within <think>"
    " </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think>"
    "<answer> answer here </answer>. Now the user asks you to solve a logical reasoning problem. After"
    " thinking, when you finally reach a conclusion, clearly state the identity of each character within"
    " <answer> </answer> tags. i.e., <answer> (1) Zoey is a knight\n(2) ... </answer>."
)


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/kk"
    """Directory for train.parquet and test.parquet."""


def hub(split):
    """Arguments of `datasets.load_dataset`."""
    return {"path": "K-and-K/knights-and-knaves", "name": split, "split": "3ppl+4ppl+5ppl+6ppl+7ppl"}


def make_row(record, split, index):
    """One row of the schema; the data source is kk_logic for Logic-RL's files, which say so, else kk."""
    if not 3 <= len(record["names"]) <= 7:
        raise prepare.LeftOut("not 3 to 7 people")
    thoughts = " ".join([record["cot_head"], *record["cot_repeat_steps"], record["cot_foot"]])
    solution = record["solution_text_format"]
    return {
        "data_source": record.get("data_source", "kk"),
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": record["quiz"]}],
        "ability": "logic",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"solution_text_format": solution, "statements": str(record["statements"])},
        },
        "extra_info": {
            "split": split,
            "index": index,
            "question": record["quiz"],
            "answer": f"<think>{thoughts}</think>\n<answer>{solution}</answer>",
            "people": len(record["names"]),
        },
    }


def main(args):
    prepare.prepare(args, ("train", "test"), hub, make_row)


if __name__ == "__main__":
    prepare.run(main, Args)
