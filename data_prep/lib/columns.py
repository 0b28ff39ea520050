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
TALKS = ("messages", "prompt", "chosen", "rejected")
PAIR = dict(prompt="prompt", chosen="chosen", rejected="rejected")
KTO = dict(prompt="prompt", completion="completion", label="label")
PAIRS = [("prompt", "chosen", "rejected"), ("messages", "chosen", "rejected"), ("chosen", "rejected")]
FORMS = [  # where a file lacks the columns of a script's defaults: what it may have in their place
    (ANSWER, [("messages",), ("prompt", "completion")]),
    (PAIR, PAIRS),
    (KTO, [("prompt", "completion", "label"), ("messages", "label"), *PAIRS]),
]
# read in any row
SHOWN = ("images", "image", "tools", "system", "system_prompt", "chat_template_kwargs")
ALPACA = ("instruction", "input")  # the second is part of the first
EMPTY = (None, "", [], {})
SAID = set()  # the first lines of this process
IN_MESSAGES = "write the turns in a column 'messages', and "
IN_PROMPT = "write them in the prompt, and "
KTO_LABEL = "dpo.py --loss kto reads it; else keep the good completions, and "
REFUSED = {  # what libraries show a model, and nothing here does; what to do before the column is dropped
    "history": IN_MESSAGES,
    "segments": IN_MESSAGES,
    "functions": "write them in a column 'tools', and ",
    "enable_thinking": "write it in a column 'chat_template_kwargs', and ",
    "documents": IN_PROMPT,
    "context": IN_PROMPT,
    "article": IN_PROMPT,
    "choices": IN_PROMPT,
    "label": KTO_LABEL,
    "kto_tag": KTO_LABEL,
    "videos": "",
    "video": "",
    "audios": "",
    "audio": "",
    "objects": "",
}


def root(column):
    """The column of a file that a possibly dotted column is in."""
    return column.partition(".")[0]


def columns_of(names, wanted):
    """{what: column} of a file with these names; it is `wanted`, or where it has defaults, another form."""
    if all(root(column) in names for column in wanted.values()):
        return wanted
    for default, forms in FORMS:
        if wanted != default:
            continue
        for form in forms:
            found = {}
            for what in form:
                known = [name for name in NAMES[what] if name in names]
                if known and known[0] not in found.values():
                    found[what] = known[0]
            if len(found) == len(form):
                return found
    return wanted


def opened(path, wanted, say=True):
    """A file, and {what: column} that it has of `wanted`; say: what is read of it, in a run's first lines."""
    source = Source(path)
    if source.empty:
        raise ValueError(f"{path}: no rows; write it again with at least one")
    columns = columns_of(source.names, wanted)
    for column in columns.values():
        name = root(column)
        if name not in source.names:
            remedy = "; plain texts: --text_key text" if source.names == ["text"] else ""
            raise ValueError(f"{path}: no column {name!r}; it has {', '.join(source.names)}{remedy}")
    for name in source.media:
        if name not in SHOWN and name not in REFUSED:
            remedy = "name it 'images' if these are pictures, or drop the column"
            raise ValueError(f"{path}: the column {name!r} is not read: {remedy}")

    roots = roots_of(columns)
    read = [name for name in source.names if name in roots]
    rest = [name for name in source.names if name not in (*roots, *SHOWN, *FIELDS)]
    if columns != wanted:
        note(f"{path}: rows of {', '.join(read)}", say)
    if rest:
        note(f"{path}: not read: {', '.join(rest)}", say)
    return source, columns


def note(line, say):
    """A line for people, once in a process."""
    if say and line not in SAID and os.environ.get("RANK", "0") == "0":
        print(f"note: {line}", file=sys.stderr)
    SAID.add(line)


def roots_of(columns):
    """The columns of a file that {what: column} is made of."""
    roots = [root(column) for column in columns.values()]
    if ALPACA[0] in roots:
        roots += ALPACA
    return roots


def used(source, columns):
    """The columns of a file to read: those in `columns`, of any row, of prompts, and those refused."""
    names = {*roots_of(columns), *SHOWN, *REFUSED, *NAMES["prompt"]}
    return [name for name in source.names if name in names]


def read(record, columns):
    """{what: value} of a record, by {what: column}, and its images, tools, chat_template_kwargs.

    Messages are as chat templates read them. ValueError, in one line, for what is missing or refused.
    """
    check_fields(record, columns.values())
    row, system = shown(record, columns.values())
    for what, column in columns.items():
        value = value_of(record, column)
        if what in TALKS or (what == "completion" and isinstance(value, list | dict)):
            value = talk_of(value, what, column)
        row[what] = value
    prompt_column = columns.get("prompt")
    more = record.get(ALPACA[1])
    if prompt_column == ALPACA[0] and more:
        row["prompt"][-1]["content"] += f"\n{more}"
    if prompt_column in NAMES["prompt"] and ("completion" in row or "chosen" in row):
        check_said(record, row["prompt"], prompt_column)

    if "label" in row:
        if row["label"] not in (0, 1):
            raise ValueError(f"{columns['label']!r} must be true or false, not {row['label']!r:.60}")
        if "messages" in row:
            said = row.pop("messages")
            row["prompt"] = said[:-1]
            row["completion"] = said[-1:]
    if "chosen" in row:  # see `pair_of`
        row["prompt"] = row.pop("messages", None) or row.get("prompt")
    if system:
        for what in TALKS:
            alone = what in ("messages", "prompt") or not row.get("prompt")
            if row.get(what) and alone:
                row[what] = after(system, row[what])
    if not row["images"]:
        for what in TALKS:
            if any(has_mark(message) for message in row.get(what) or ()):
                raise ValueError(f"it has the mark {MARK}, and no picture in 'images' or 'image'")
    return row


def words(text):
    return " ".join(text.split())


def check_said(record, prompt, column):
    """ValueError if another column of a prompt says what the prompt, which is read of one, does not."""
    said = words(" ".join(message["content"] for message in prompt))
    for name in NAMES["prompt"]:
        text = record.get(name)
        if isinstance(text, str) and words(text) not in said:
            raise ValueError(f"{column!r} lacks what {name!r} says: join them in one, or drop {name!r}")


def check_fields(row, names=FIELDS):
    """ValueError if a row is no object, or one of its columns for rewards is not as defined above."""
    if isinstance(row, ValueError) or not isinstance(row, dict):
        raise ValueError(f"no JSON of an object: {row!s:.200}")
    for name, kind in FIELDS.items():
        if name in row and name in names and not isinstance(row[name], kind):
            raise ValueError(f"{name!r} must be a {kind.__name__}, not {row[name]!r:.60}")
    if "reward_model" in row and "reward_model" in names:
        style = row["reward_model"].get("style")
        # published data sets name a kind of rule too, such as rule-lighteval/MATH_v2
        if style != "model" and not str(style).startswith("rule"):
            raise ValueError(f"'reward_model.style' is {style!r}; use 'rule' or 'model'")
        if style != "model" and row["reward_model"].get("ground_truth") is None:
            raise ValueError("'reward_model.ground_truth' is missing; a rule compares with it")


def talk_of(value, what, column):
    """Messages of a column, which may be one: of the assistant in a reply. A string is one too."""
    if isinstance(value, str) and what != "messages":
        role = "user" if what == "prompt" else "assistant"
        return spoken(value, role, column)
    if isinstance(value, dict):
        value = [value]
    return conversation(value, column)


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
        if name not in REFUSED or name in columns or value in EMPTY:
            continue
        if name in NAMES["label"] and value not in (0, 1):  # of a class, or a score
            continue
        raise ValueError(f"the column {name!r} is not read: {REFUSED[name]}drop the column")
    system = record.get("system") or record.get("system_prompt") or ""
    if not isinstance(system, str):
        raise ValueError(f"'system' must be a string, not {system!r:.60}")
    if (record.get("system_prompt") or system) != system:
        raise ValueError("'system' and 'system_prompt' differ: keep one")
    options = record.get("chat_template_kwargs") or {}
    options = parsed(options, "chat_template_kwargs", dict, "an object")
    row = {
        "images": images_of(record),
        "tools": tools_of(record.get("tools")),
        "chat_template_kwargs": {name: x for name, x in options.items() if x not in EMPTY},
    }
    return row, system


def images_of(record):
    """Pictures of a record, each {bytes, path}, from a list or one, by their files or themselves."""
    given = [record[name] for name in ("images", "image") if record.get(name) not in (None, [])]
    if not given:
        return []
    if len(given) > 1:
        raise ValueError("it has pictures in 'images' and in 'image': keep one column")
    images = []
    for i, image in enumerate(given[0] if isinstance(given[0], list) else given):
        if isinstance(image, str):
            image = {"bytes": None, "path": image}
        if isinstance(image, bytes):
            image = {"bytes": image, "path": None}
        if not isinstance(image, dict) or not (image.get("bytes") or image.get("path")):
            raise ValueError(f"'images[{i}]' must be {{bytes, path}}, with one of them, or a path")
        images.append(image)
    return images
