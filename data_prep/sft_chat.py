"""Dialogues for supervised fine-tuning, from `messages`, `conversations`, or `prompt` and `completion`.

Calls of tools are kept, and a column `tools`. A dialogue with an empty turn of the assistant is left out.

python data_prep/sft_chat.py --local_save_dir data/ultrachat
python data_prep/sft_chat.py --dataset allenai/tulu-3-sft-mixture --splits train --local_save_dir data/tulu3
python data_prep/sft_chat.py --local_dataset_path mine --splits train --local_save_dir data/mine
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass
from functools import partial

from data_prep.lib import prepare
from data_prep.lib.chats import read_messages
from data_prep.lib.turns import says_nothing

FORMS = ("messages",), ("conversations",), ("prompt", "completion")  # columns of a dialogue


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/sft_chat"
    """Directory for train.parquet and test.parquet."""
    dataset: str = "HuggingFaceH4/ultrachat_200k"
    """Name on the hub, and the rows' data source."""


def make_row(record, split, index, dataset):
    """One row of the schema."""
    forms = [names for names in FORMS if names[0] in record]
    if not forms:
        raise KeyError("messages, conversations, or prompt and completion")
    messages = [message for name in forms[0] for message in read_messages(record[name], name)]
    if messages[-1]["role"] != "assistant":
        raise ValueError("the last message is not the assistant's")
    if says_nothing(messages):
        raise prepare.LeftOut("an empty turn of the assistant")
    row = {"data_source": dataset, "messages": messages, "extra_info": {"split": split, "index": index}}
    return row | ({"tools": record["tools"] or None} if "tools" in record else {})


def main(args):
    def hub(split):
        return {"path": args.dataset, "split": split}

    splits = ("train=train_sft", "test=test_sft")
    prepare.prepare(args, splits, hub, partial(make_row, dataset=args.dataset))


if __name__ == "__main__":
    prepare.run(main, Args)
