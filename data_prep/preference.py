"""Preferences: two replies to a prompt, of which one was chosen.

python data_prep/preference.py --local_save_dir data/ultrafeedback
python data_prep/preference.py --dataset Anthropic/hh-rlhf --splits train test --local_save_dir data/hh_rlhf

Reads the columns `chosen` and `rejected` of any such data set: whole dialogues, as messages or as text with
`Human:` and `Assistant:`.  What both begin with is the prompt.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import itertools
import re
from dataclasses import dataclass
from functools import partial

from data_prep.lib import prepare
from data_prep.lib.chats import read_messages

ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/preference"
    """Directory for train.parquet and test.parquet."""
    dataset: str = "HuggingFaceH4/ultrafeedback_binarized"
    """Name on the hub, and the rows' data source."""


def read_dialogue(value, name):
    """Messages of a dialogue in column `name`."""
    if isinstance(value, str) and "\n\nHuman:" in value:  # a dialogue, as Anthropic writes it
        _, *parts = re.split(r"\n\n(Human|Assistant):", value)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return [{"role": ROLES[name], "content": content.strip()} for name, content in pairs]
    return read_messages(value, name)


def make_row(record, split, index, dataset):
    """One row of the schema."""
    chosen, rejected = (read_dialogue(record[name], name) for name in ("chosen", "rejected"))
    if "prompt" in record and "assistant" == chosen[0]["role"] == rejected[0]["role"]:  # replies alone
        prompt = read_messages(record["prompt"], "prompt")
        chosen, rejected = prompt + chosen, prompt + rejected
    if chosen == rejected:
        raise prepare.LeftOut("both replies are the same")
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    prompt = [message for message, _ in same]
    chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt or any(not reply or reply[0]["role"] != "assistant" for reply in (chosen, rejected)):
        raise ValueError("'chosen' and 'rejected' are not two replies to one prompt")
    replies = {"chosen": chosen, "rejected": rejected}
    return {
        "data_source": dataset,
        "prompt": prompt,
        **replies,
        "extra_info": {"split": split, "index": index},
    }


def main(args):
    def hub(split):
        return {"path": args.dataset, "split": split}

    splits = ("train=train_prefs", "test=test_prefs")
    prepare.prepare(args, splits, hub, partial(make_row, dataset=args.dataset))


if __name__ == "__main__":
    prepare.run(main, Args)
