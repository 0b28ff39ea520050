"""The columns of a row: what each says, under the names that libraries give it.

A column is read, or is for rewards (FIELDS), or is named in the first lines of a run as not read. One that
would change what the model is shown is refused where a row fills it in.
"""

import os
import sys

from data_prep.lib.chats import conversation, parsed, tools_of
from data_prep.lib.replies import after, spoken
from data_prep.lib.source import Source
from data_prep.lib.special import MARK

NAMES = {  # what a row says: the columns that may say it, the first that a file has is read
    "messages": ("messages", "conversations"),
    "prompt": ("prompt", "instruction", "question", "query", "input"),
    "completion": ("completion", "response", "output", "answer"),
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
    "label": ("label", "kto_tag"),  # whether a completion is a good one
}
FIELDS = dict(data_source=str, ability=str, reward_model=dict, extra_info=dict)  # see schema.py
ANSWER = dict(prompt="prompt", completion="extra_info.answer")  # the defaults of sft.py, columns of RL
TALKS = "messages", "prompt", "chosen", "rejected"
PAIR = dict(prompt="prompt", chosen="chosen", rejected="rejected")
KTO = dict(prompt="prompt", completion="completion", label="label")
PAIRS = (*PAIR,), ("messages", "chosen", "rejected"), ("chosen", "rejected")
FORMS = {  # where a file lacks the columns of a script's defaults: what it may have in their place
    (*ANSWER,): (("messages",), ("prompt", "completion")),
    (*PAIR,): PAIRS,
    (*KTO,): ((*KTO,), ("messages", "label"), *PAIRS),
}
SHOWN = "images", "image", "tools", "system", "system_prompt", "chat_template_kwargs"  # read in any row
ALPACA = "instruction", "input"  # the second is part of the first
SAID = set()  # the first lines of this process
REFUSED = {  # what libraries show a model, and nothing here does; what to do before the column is dropped
    **dict.fromkeys(("history", "segments"), "write the turns in a column 'messages', and "),
    "functions": "write them in a column 'tools', and ",
    "enable_thinking": "write it in a column 'chat_template_kwargs', and ",
    **dict.fromkeys(("documents", "context", "article", "choices"), "write them in the prompt, and "),
    **dict.fromkeys(NAMES["label"], "dpo.py --loss kto reads it; else keep the good completions, and "),
    **dict.fromkeys(("videos", "video", "audios", "audio", "objects"), ""),
}


def columns_of(names, wanted):
    """{what: column} of a file with these names; it is `wanted`, or where it has defaults, another form."""
    forms = FORMS.get((*wanted,), ()) if wanted in (ANSWER, PAIR, KTO) else ()
    roots = {column.partition(".")[0] for column in wanted.values()}
    if not forms or roots <= {*names}:
        return wanted
    for form in forms:
        found = {what: next((x for x in NAMES[what] if x in names), None) for what in form}
        if None not in found.values() and len({*found.values()}) == len(found):
            return found
    return wanted


def opened(path, wanted, say=True):
    """A file, and {what: column} that it has of `wanted`; say: what is read of it, in a run's first lines."""
    source = Source(path)
    if source.empty:
        raise ValueError(f"{path}: no rows; write it again with at least one")
    columns = columns_of(source.names, wanted)
    for name in (column.partition(".")[0] for column in columns.values()):
        if name not in source.names:
            remedy = "; plain texts: --text_key text" if source.names == ["text"] else ""
            raise ValueError(f"{path}: no column {name!r}; it has {', '.join(source.names)}{remedy}")
    for name in [name for name in source.media if name not in (*SHOWN, *REFUSED)]:
        remedy = "name it 'images' if these are pictures, or drop the column"
        raise ValueError(f"{path}: the column {name!r} is not read: {remedy}")
    roots = roots_of(columns)
    rest = [name for name in source.names if name not in (*roots, *SHOWN, *FIELDS)]
    lines = [f"rows of {', '.join(x for x in source.names if x in roots)}"] * (columns != wanted)
    lines += [f"not read: {', '.join(rest)}"] * bool(rest)
    for line in (f"note: {path}: {line}" for line in lines):
        if say and line not in SAID and not int(os.environ.get("RANK", 0)):
            print(line, file=sys.stderr)
        SAID.add(line)
    return source, columns


def roots_of(columns):
    """The columns of a file that {what: column} is made of."""
    roots = [column.partition(".")[0] for column in columns.values()]
    return [*roots, *(ALPACA if ALPACA[0] in roots else ())]


def used(source, columns):
    """The columns of a file to read: those in `columns`, of any row, of prompts, and those refused."""
    return [x for x in source.names if x in (*roots_of(columns), *SHOWN, *REFUSED, *NAMES["prompt"])]


def read(record, columns):
    """{what: value} of a record, by {what: column}, and its images, tools, chat_template_kwargs.

    Messages are as chat templates read them. ValueError, in one line, for what is missing or refused.
    """
    check_fields(record, columns.values())
    row, system = shown(record, columns.values())
    for what, column in columns.items():
        value = value_of(record, column)
        spoken = what in TALKS or (what == "completion" and isinstance(value, list | dict))
        row[what] = talk_of(value, what, column) if spoken else value
    if columns.get("prompt") == ALPACA[0] and (more := record.get(ALPACA[1])):
        *before, last = row["prompt"]
        row["prompt"] = [*before, dict(last, content=f"{last['content']}\n{more}")]
    if {"completion", "chosen"} & row.keys() and columns.get("prompt") in NAMES["prompt"]:
        check_said(record, row["prompt"], columns["prompt"])
    if "label" in row:
        if row["label"] not in (0, 1):
            raise ValueError(f"{columns['label']!r} must be true or false, not {row['label']!r:.60}")
        if "messages" in row:
            said = row.pop("messages")
            row |= dict(prompt=said[:-1], completion=said[-1:])
    if "chosen" in row:  # see `pair_of`
        row["prompt"] = row.pop("messages", None) or row.get("prompt")
    for what in [x for x in TALKS if row.get(x)] if system else ():
        if what in ("messages", "prompt") or not row["prompt"]:
            row[what] = after(system, row[what])
    if not row["images"] and any(has_mark(m) for what in TALKS for m in row.get(what) or ()):
        raise ValueError(f"it has the mark {MARK}, and no picture in 'images' or 'image'")
    return row


def check_said(record, prompt, column):
    """ValueError if another column of a prompt says what the prompt, which is read of one, does not."""
    said = " ".join(" ".join(message["content"] for message in prompt).split())
    for name in NAMES["prompt"]:
        if isinstance(text := record.get(name), str) and " ".join(text.split()) not in said:
            raise ValueError(f"{column!r} lacks what {name!r} says: join them in one, or drop {name!r}")


def check_fields(row, names=FIELDS):
    """ValueError if a row is no object, or one of its columns for rewards is not as defined above."""
    if isinstance(row, ValueError) or not isinstance(row, dict):
        raise ValueError(f"no JSON of an object: {row!s:.200}")
    for name, kind in FIELDS.items():
        if name in row and name in names and not isinstance(row[name], kind):
            raise ValueError(f"{name!r} must be a {kind.__name__}, not {row[name]!r:.60}")
    if "reward_model" in row and "reward_model" in names:
        style, truth = (row["reward_model"].get(key) for key in ("style", "ground_truth"))
        # published data sets name a kind of rule too, such as rule-lighteval/MATH_v2
        if not isinstance(style, str) or not (style == "model" or style.startswith("rule")):
            raise ValueError(f"'reward_model.style' is {style!r}; use 'rule' or 'model'")
        if style != "model" and truth is None:
            raise ValueError("'reward_model.ground_truth' is missing; a rule compares with it")


def talk_of(value, what, column):
    """Messages of a column, which may be one: of the assistant in a reply. A string is one too."""
    if isinstance(value, str) and what != "messages":
        return spoken(value, "user" if what == "prompt" else "assistant", column)
    return conversation([value] if isinstance(value, dict) else value, column)


def has_mark(message):
    """Whether a message begins with the mark of a picture, or has it alone on a line."""
    text = message["content"]
    marked = text.startswith(MARK) or MARK in map(str.strip, text.splitlines())
    return marked and message["role"] != "assistant" and "</image>" not in text


def value_of(record, column):
    """The value of a possibly dotted column; ValueError if it is not there, null, or an empty list."""
    value = record
    for key in column.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        raise ValueError(f"{column!r} is missing or null; fill it in or drop the row")
    if value == []:
        raise ValueError(f"{column!r} is empty; fill it in or drop the row")
    return value


def shown(record, columns=()):
    """Of a record: dict(images, tools, chat_template_kwargs), and the words of its system.

    ValueError if it fills in a column that others show a model, and that is none of `columns`.
    """
    for name, value in record.items():
        label = name in NAMES["label"] and value not in (0, 1)  # of a class, or a score
        filled = value not in (None, "", [], {}) and not label
        if filled and name in REFUSED and name not in columns:
            raise ValueError(f"the column {name!r} is not read: {REFUSED[name]}drop the column")
    system, *other = [record[x] for x in ("system", "system_prompt") if record.get(x)] or [""]
    if not isinstance(system, str):
        raise ValueError(f"'system' must be a string, not {system!r:.60}")
    if other not in ([], [system]):
        raise ValueError("'system' and 'system_prompt' differ: keep one")
    options = record.get("chat_template_kwargs") or {}
    options = parsed(options, "chat_template_kwargs", dict, "an object").items()
    options = {name: x for name, x in options if x not in (None, "", [], {})}
    tools = tools_of(record.get("tools"))
    return dict(images=images_of(record), tools=tools, chat_template_kwargs=options), system


def images_of(record):
    """Pictures of a record, each {bytes, path}, from a list or one, by their files or themselves."""
    given = [record[name] for name in ("images", "image") if record.get(name) not in (None, [])]
    if len(given) > 1:
        raise ValueError("it has pictures in 'images' and in 'image': keep one column")
    images = [x for some in given for x in (some if isinstance(some, list) else [some])]
    for i, image in enumerate(images):
        if isinstance(image, str | bytes):
            name = "path" if isinstance(image, str) else "bytes"
            images[i] = image = dict(bytes=None, path=None) | {name: image}
        if not isinstance(image, dict) or not (image.get("bytes") or image.get("path")):
            raise ValueError(f"'images[{i}]' must be {{bytes, path}}, with one of them, or a path")
    return images
