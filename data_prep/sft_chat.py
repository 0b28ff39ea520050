"""Dialogues for supervised fine-tuning, from `messages`, or any other columns that sft.py reads by itself.

Calls of tools are kept, and the other columns that sft.py reads. A dialogue with an empty turn is left out.

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

from data_prep import prepare
from data_prep.lib.conversations import ANSWER, KEYS, columns_of, messages_of, read_row, says_nothing
from data_prep.lib.schema import OPTIONAL


@dataclass
class Args(prepare.Args):
    local_save_dir: str = "data/sft_chat"
    """Directory for train.parquet and test.parquet."""
    dataset: str = "HuggingFaceH4/ultrachat_200k"
    """Name on the hub, and the rows' data source."""


def make_row(record, split, index, dataset):
    """One row of the schema."""
    columns = columns_of(record, ANSWER)
    if columns == ANSWER and "extra_info" not in record:
        raise KeyError("messages, conversations, or prompt and completion")
    found = read_row(record, columns)
    if "completion" in found:
        found["messages"] = found["prompt"] + messages_of(found["completion"], "completion", "completion")
    messages = [{key: x[key] for key in KEYS if key in x} for x in found["messages"]]
    if messages[-1]["role"] != "assistant":
        raise ValueError("the last message is not the assistant's")
    if says_nothing(messages):
        raise prepare.LeftOut("an empty turn of the assistant")
    row = {"data_source": dataset, "messages": messages, "extra_info": {"split": split, "index": index}}
    return row | {name: found[name] for name in OPTIONAL if found[name]}


def main(args):
    def hub(split):
        return {"path": args.dataset, "split": split}

    splits = ("train=train_sft", "test=test_sft")
    prepare.prepare(args, splits, hub, partial(make_row, dataset=args.dataset))


if __name__ == "__main__":
    prepare.run(main, Args)
