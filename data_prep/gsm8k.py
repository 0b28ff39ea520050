"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168), as train and test parquet.

python data_prep/gsm8k.py --local_save_dir data/gsm8k                              from the hub
python data_prep/gsm8k.py --local_save_dir data/gsm8k --local_dataset_path DIR     from its jsonl files
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.schema import write_parquet

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # as in verl's recipe


@dataclass
class Args:
    local_save_dir: str = "data/gsm8k"
    """Directory for train.parquet and test.parquet."""
    local_dataset_path: str | None = None
    """Directory with the original train.jsonl and test.jsonl; None: download from the hub."""
    max_samples: int | None = None
    """Keep the first so many rows of each split; None: all."""


def read_split(split, local_dataset_path):
    """List of {question, answer}; ValueError naming the file and what is wrong with it."""
    if local_dataset_path is None:
        from datasets import load_dataset  # slow to import, and not needed for local files

        return list(load_dataset(DATA_SOURCE, "main", split=split))
    path = Path(local_dataset_path) / f"{split}.jsonl"
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; --local_dataset_path needs GSM8K's train.jsonl and test.jsonl"
        )
    records = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                records.append({"question": record["question"], "answer": record["answer"]})
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}: line {number}: {type(error).__name__}: {error}") from None
    return records


def make_row(split, index, question, answer):
    """One row of the schema; the ground truth is the number after the answer's `#### `, without commas."""
    _, marker, ground_truth = answer.rpartition("#### ")
    if not marker:
        raise ValueError(f"{split} row {index}: 'answer' does not end in '#### NUMBER': {answer[-60:]!r}")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def main(args):
    """Write both files and say how many rows each has."""
    if args.max_samples is not None and args.max_samples < 1:
        raise ValueError(f"--max_samples is {args.max_samples}; it must be at least 1")
    for split in ("train", "test"):
        records = read_split(split, args.local_dataset_path)[: args.max_samples]
        path = Path(args.local_save_dir) / f"{split}.parquet"
        write_parquet([make_row(split, i, r["question"], r["answer"]) for i, r in enumerate(records)], path)
        print(f"{path}: {len(records)} rows")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except ValueError as error:
        sys.exit(f"gsm8k.py: {error}")
