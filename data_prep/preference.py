"""Preferences: two replies to a prompt, of which one was chosen.

python data_prep/preference.py --local_save_dir data/ultrafeedback
python data_prep/preference.py --dataset Anthropic/hh-rlhf --splits train test --local_save_dir data/hh_rlhf

Reads the columns that dpo.py reads by itself, and whole dialogues as a text with `Human:` and `Assistant:`.
What both replies begin with is the prompt.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import re
from dataclasses import dataclass
from functools import partial

from data_prep import prepare
from data_prep.lib.conversations import KEYS, PAIR, columns_of, pair_of, read_row
from data_prep.lib.schema import OPTIONAL

ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/preference"
    """Directory for train.parquet and test.parquet."""
    dataset: str = "HuggingFaceH4/ultrafeedback_binarized"
    """Name on the hub, and the rows' data source."""


def read_dialogue(value):
    """A dialogue as Anthropic writes it, as messages."""
    if not isinstance(value, str) or "\n\nHuman:" not in value:
        return value
    _, *parts = re.split(r"\n\n(Human|Assistant):", value)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": ROLES[name], "content": content.strip()} for name, content in pairs]


def make_row(record, split, index, dataset):
    """One row of the schema."""
    columns = columns_of(record, PAIR)
    replies = [column for what, column in columns.items() if what in ("chosen", "rejected")]
    record.update({name: read_dialogue(record[name]) for name in replies})
    found = read_row(record, columns)
    if found["chosen"] == found["rejected"]:
        raise prepare.LeftOut("both replies are the same")
    row = {"data_source": dataset, "extra_info": {"split": split, "index": index}}
    for name, said in zip(PAIR, pair_of(*(found[name] for name in PAIR))):
        row[name] = [{key: x[key] for key in KEYS if key in x} for x in said]
    return row | {name: found[name] for name in OPTIONAL if found[name]}


def main(args):
    def hub(split):
        return {"path": args.dataset, "split": split}

    splits = ("train=train_prefs", "test=test_prefs")
    prepare.prepare(args, splits, hub, partial(make_row, dataset=args.dataset))


if __name__ == "__main__":
    prepare.run(main, Args)
