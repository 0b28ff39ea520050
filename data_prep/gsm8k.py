"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): train 7,473, test 1,319.

python data_prep/gsm8k.py --local_save_dir data/gsm8k
python data_prep/gsm8k.py --local_save_dir data/gsm8k --local_dataset_path DIR    with train.jsonl, test.jsonl
python data_prep/gsm8k.py --local_save_dir data/gsm8k --tool_traces    also conversations with a calculator
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from data_prep import prepare
from envs.calculator import Calculator

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # as in verl's recipe
ANNOTATION = re.compile("<<([^<>=]*)=([^<>=]*)>>")


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/gsm8k"
    """Directory for train.parquet and test.parquet."""
    tool_traces: bool = False
    """Also a column messages, in which a calculator answers the annotations <<48/2=24>>."""


def hub(split):
    """Arguments of `datasets.load_dataset`."""
    return {"path": DATA_SOURCE, "name": "main", "split": split}


def tool_trace(answer):
    """The answer as messages: a turn ends with each annotation, <<48/2>>, and a tool gives its result, 24."""
    messages = []
    (said, *rest) = ANNOTATION.split(answer)
    for expression, result, following in zip(rest[::3], rest[1::3], rest[2::3]):
        messages.append({"role": "assistant", "content": f"{said}<<{expression}>>"})
        messages += Calculator({}).step(messages[-1]["content"])
        if Fraction(messages[-1]["content"]) != Fraction(result):  # one is 3/4
            raise prepare.LeftOut("the calculator gives another result")
        said = following
    return [*messages, {"role": "assistant", "content": said}]


def make_row(record, split, index, tool_traces=False):
    """One row of the schema; the ground truth is the number after the answer's `#### `, without commas."""
    question = record["question"]
    answer = record["answer"]
    _, marker, ground_truth = answer.rpartition("#### ")
    if not marker:
        raise ValueError(f"'answer' does not end in '#### NUMBER': {answer[-60:]!r}")
    prompt = [{"role": "user", "content": f"{question} {INSTRUCTION}"}]
    return {
        "data_source": DATA_SOURCE,
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
        **({"messages": prompt + tool_trace(answer)} if tool_traces else {}),
    }


def main(args):
    prepare.prepare(args, ("train", "test"), hub, partial(make_row, tool_traces=args.tool_traces))


if __name__ == "__main__":
    prepare.run(main, Args)
