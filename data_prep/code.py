"""Programming problems with tests: CodeContests, APPS, Codeforces, TACO.

python data_prep/code.py --dataset apps --local_save_dir data/apps
python data_prep/code.py --dataset taco --local_save_dir data/taco --local_dataset_path DIR

Problems that plain tests cannot judge are left out: those without tests, with input from a file, interactive
ones, and those whose checker accepts several outputs (where the source says so).
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

INSTRUCTION = (  # as in PRIME's Eurus-2-RL-Data
    "Write Python code to solve the problem. Present the code in\n```python\nYour code\n```\nat the end."
)


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/code"
    """Directory for train.parquet and test.parquet."""
    dataset: Literal["codecontests", "apps", "codeforces", "taco"] = "apps"
    """Data set to prepare."""
    max_tests: int = 50
    """First tests of a problem to keep. Scoring runs all of them, and some problems have hundreds."""


def hub(split, dataset):
    """Arguments of `datasets.load_dataset`."""
    # CAREFUL: `datasets` refuses apps and taco for their loading scripts; it reads the files next to them.
    apps = f"hf://datasets/codeparrot/apps/{split}.jsonl"
    taco = f"hf://datasets/BAAI/TACO/{split}/*.arrow"
    return {
        "codecontests": {"path": "deepmind/code_contests", "split": split},
        "apps": {"path": "json", "data_files": apps, "split": "train"},
        "codeforces": {"path": "open-r1/codeforces", "name": "verifiable", "split": split},
        "taco": {"path": "arrow", "data_files": taco, "split": "train"},
    }[dataset]


def codecontests(record):
    """(question, tests, program or None); 3 is the number of the language Python 3."""
    if record["input_file"] or record["output_file"]:
        raise prepare.LeftOut("input from a file")
    sets = [record[f"{kind}_tests"] for kind in ("public", "private", "generated")]
    tests = {f"{key}s": sum((tests[key] for tests in sets), []) for key in ("input", "output")}
    solutions = record["solutions"]
    programs = zip(solutions["language"], solutions["solution"], strict=True)
    return record["description"], tests, next((x for language, x in programs if language == 3), None)


def codeforces(record):
    """(question, tests, None)."""
    if record["input_mode"] == "file":
        raise prepare.LeftOut("input from a file")
    if record["interaction_format"]:
        raise prepare.LeftOut("interactive")
    if record["generated_checker"]:
        raise prepare.LeftOut("several outputs are correct")
    tests = {f"{key}s": [case[key] for case in record["official_tests"] or []] for key in ("input", "output")}
    parts = [record["description"], "Input", record["input_format"], "Output", record["output_format"]]
    for example in record["examples"] or []:
        parts += ["Example input", example["input"], "Example output", example["output"]]
    return "\n\n".join(part for part in [*parts, record["note"]] if part), tests, None


def apps(record):
    """(question, tests, program or None) of APPS and TACO; the columns are JSON text."""
    tests = json.loads(record["input_output"] or "{}")
    question = record["question"]
    name = tests.get("fn_name")
    if name:
        tests["inputs"] = ["\n".join(map(json.dumps, arguments)) for arguments in tests["inputs"]]
        outputs = tests["outputs"]
        if "codewars" in (record["url"] or "") and all(isinstance(x, list) and len(x) == 1 for x in outputs):
            outputs = [x[0] for x in outputs]  # CAREFUL: only the rows from there put each result in a list
        tests["outputs"] = list(map(json.dumps, outputs))
        question += f"\n\nThe code is called as the function {name}."
    if record.get("starter_code"):
        question += f"\n\nBegin with\n```python\n{record['starter_code'].strip()}\n```"
    return question, tests, next(iter(json.loads(record["solutions"] or "[]")), None)


def make_row(record, split, index, dataset, max_tests):
    """One row of the schema; the ground truth is JSON text, {"inputs", "outputs"} and maybe "fn_name"."""
    read = {"codecontests": codecontests, "codeforces": codeforces}.get(dataset, apps)
    question, tests, program = read(record)
    if not tests.get("inputs"):
        raise prepare.LeftOut("no tests")
    if len(tests["inputs"]) != len(tests["outputs"]):
        raise ValueError(f"{len(tests['inputs'])} inputs and {len(tests['outputs'])} outputs")
    ground_truth = {key: tests[key][:max_tests] for key in ("inputs", "outputs")}
    ground_truth |= {"fn_name": tests["fn_name"]} if tests.get("fn_name") else {}
    answer = f"```python\n{program}\n```" if program else ""
    return {
        "data_source": dataset,
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(ground_truth)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def main(args):
    if args.max_tests < 1:
        raise ValueError(f"--max_tests is {args.max_tests}; it must be at least 1")
    row = partial(make_row, dataset=args.dataset, max_tests=args.max_tests)
    prepare.prepare(args, ("train", "test"), partial(hub, dataset=args.dataset), row)


if __name__ == "__main__":
    prepare.run(main, Args)
