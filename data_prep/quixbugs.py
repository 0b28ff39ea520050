"""QuixBugs (Lin et al. 2017): short functions tested by calls, for evaluation only.

python data_prep/quixbugs.py --local_dataset_path DIR     a clone of its repository
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import ast
import json
from dataclasses import dataclass
from pathlib import Path

from data_prep import prepare

SHOWN = 3  # calls in the prompt: the programs come without a description


@dataclass
class Args:
    local_dataset_path: str
    """Directory with json_testcases/NAME.json and correct_python_programs/NAME.py."""
    local_save_dir: str = "data/quixbugs"
    """Directory for test.parquet."""


def make_row(record, split, index):
    """One row of the schema; a line of the record's tests is [arguments, result]."""
    name, program, lines = record
    tests = [json.loads(line) for line in lines.splitlines() if line.strip()]
    calls = [
        (arguments if isinstance(arguments, list) else [arguments], result) for arguments, result in tests
    ]
    signature = next(node for node in ast.parse(program).body if getattr(node, "name", None) == name).args
    examples = "\n".join(f"{name}({', '.join(map(repr, x))}) == {y!r}" for x, y in calls[:SHOWN])
    question = f"Write the Python function {name}({ast.unparse(signature)}) for which\n{examples}"
    ground_truth = {
        "inputs": ["\n".join(map(json.dumps, arguments)) for arguments, _ in calls],
        "outputs": [json.dumps(result) for _, result in calls],
        "fn_name": name,
    }
    return {
        "data_source": "quixbugs",
        "prompt": [
            {"role": "user", "content": f"{question}\n\nPresent the code in a block ```python ... ```."}
        ],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(ground_truth)},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "answer": f"```python\n{program}\n```",
        },
    }


def main(args):
    root = Path(args.local_dataset_path)
    records = []
    for path in sorted((root / "json_testcases").glob("*.json")):
        program = root / "correct_python_programs" / f"{path.stem}.py"
        records.append((str(path), (path.stem, program.read_text(), path.read_text())))
    if not records:
        raise ValueError(
            f"{root}: no json_testcases/*.json; --local_dataset_path is a clone of jkoppel/QuixBugs"
        )
    prepare.write_splits(args.local_save_dir, {"test": records}, make_row)


if __name__ == "__main__":
    prepare.run(main, Args)
