"""What a row says: in which columns, what a message is, and what a reply to a prompt is.

A row walks down this file. `columns_of` finds its columns under the names that libraries give them.
`read_row` makes messages of them, as chat templates read them, and checks the other columns. `pair_of` parts
the prompt from the replies. A column that would change what the model is shown is refused where a row fills
it in; FIELDS are for rewards; any other is named in the first lines of a run as not read.
"""

import ast
import json
import os
import re
import sys
from collections import Counter
from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path

from data_prep.lib.source import Source, as_json, as_text, tidy

# ---- columns

NAMES = {  # what a row says: the columns that may say it, the first that a file has is read
    "messages": ("messages", "conversations"),
    "prompt": ("prompt", "instruction", "question", "query", "input"),
    "completion": ("completion", "response", "output", "answer"),
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response", "rejected_messages"),
    "label": ("label", "kto_tag"),  # whether a completion is a good one
    "ground_truth": ("solution", "ground_truth", "answer", "label"),  # of RL
}
FIELDS = dict(data_source=str, ability=str, reward_model=dict, extra_info=dict)  # see schema.py
CONVERSATIONS = ("messages", "prompt", "chosen", "rejected")
RL = {name: name for name in ("data_source", "prompt", "reward_model", "extra_info")}
ANSWER = dict(prompt="prompt", completion="extra_info.answer")  # the defaults of sft.py, columns of RL
PAIR = dict(prompt="prompt", chosen="chosen", rejected="rejected")
KTO = dict(prompt="prompt", completion="completion", label="label")
PROMPT = dict(prompt="prompt")
FORMS = [  # where a file lacks the columns of a script's defaults: what it may have in their place
    (PROMPT, ["prompt"]),
    (ANSWER, ["messages"]),
    (ANSWER, ["prompt", "completion"]),
    (KTO, ["prompt", "completion", "label"]),
    (KTO, ["messages", "label"]),
]
for default in (PAIR, KTO):
    FORMS += [
        (default, ["prompt", "chosen", "rejected"]),
        (default, ["messages", "chosen", "rejected"]),
        (default, ["chosen", "rejected"]),
        (default, ["messages", "rejected"]),
        (default, ["prompt", "completion", "rejected"]),
    ]
READERS = {  # kinds of rows: their columns, and who reads them
    "preferences": (PAIR, "dpo.py and rm.py"),
    "labelled responses, for dpo.py --loss kto": (KTO, "dpo.py --loss kto"),
    "SFT": (ANSWER, "sft.py"),
    "RL": (RL, "grpo.py, or another column as response: sft.py --response_key"),
    "prompts": (PROMPT, "generate.py"),
}
# read in any row
SHOWN = ("images", "image", "tools", "system", "system_prompt", "chat_template_kwargs")
WITH_PROMPT = {"history", "input"}  # of Alpaca: turns before a prompt, and what follows an instruction
EMPTY = (None, "", [], {})
IN_MESSAGES = "write the turns in a column 'messages', and "
IN_PROMPT = "write them in the prompt, and "
KTO_LABEL = "dpo.py --loss kto reads it; else keep the good completions, and "
REFUSED = {  # what libraries show a model, and nothing here does; what to do before the column is dropped
    "history": IN_MESSAGES,  # without a prompt
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
    """{what: column} of a file with these names; it is `wanted`, or where it has defaults, another form.

    What a reward gets has no column, None, where a file has it in others: see `fields_of`.
    """
    if all(root(column) in names for column in wanted.values()):
        return wanted
    if "reward_model" in wanted:
        found = {what: what if what in names else None for what in RL if what != "prompt"}
        if found["reward_model"] is None:
            found |= first_columns(names, ["ground_truth"])
        if found.get("ground_truth") == "label" and first_columns(names, ["completion"]):  # KTO's
            del found["ground_truth"]
        shown = {what: column for what, column in wanted.items() if what not in FIELDS}
        if "prompt" in shown:
            found |= columns_of(names, dict(prompt=shown.pop("prompt")))
        return found | shown
    for default, form in FORMS:
        found = first_columns(names, form)
        if wanted == default and len(found) == len(form):
            return found
    if wanted == PROMPT and first_columns(names, ["messages"]):  # which end with the user
        return dict(prompt=first_columns(names, ["messages"])["messages"])
    return wanted


def first_columns(names, form):
    """{what: the first of its columns that a file has}."""
    found = {}
    for what in form:
        known = [name for name in NAMES[what] if name in names]
        if known:
            found[what] = known[0]
    return found


def kind_of(source):
    """The kind of the rows of a file, of READERS, by its columns and its first row; None: it is unknown."""
    first = next((row for _, row in source.rows() if isinstance(row, dict)), {})
    columns = {kind: columns_of(source.names, wanted) for kind, (wanted, _) in READERS.items()}
    if columns["RL"] == RL:
        return "RL"
    truth = columns["RL"]["reward_model"] or columns["RL"].get("ground_truth")
    for kind, found in columns.items():
        if not roots_of(found) - WITH_PROMPT <= {*source.names}:
            continue
        if first.get(found.get("label"), 1) not in (0, 1):  # of a class, or a score
            continue
        if kind == "RL" and not truth:
            continue
        if truth and kind != "prompts" and has_answer(first, found) == (kind == "RL"):
            continue
        return kind
    return None


def has_answer(record, columns):
    """Whether what a script reads of a record has an answer, after a prompt."""
    if columns == ANSWER:
        info = record.get("extra_info")
        return isinstance(info, dict) and "answer" in info
    for what in ("messages", "prompt"):
        column = columns.get(what)
        if column in NAMES["messages"]:
            with suppress(ValueError):
                return conversation(record.get(column), column)[-1]["role"] == "assistant"
    return "reward_model" not in columns


def opened(path, wanted, say=True):
    """A file, and {what: column} that it has of `wanted`; say: what is read of it, in a run's first lines."""
    source = Source(path)
    if source.empty:
        raise ValueError(f"{path}: no rows; write it again with at least one")
    columns = columns_of(source.names, wanted)
    for column in filter(None, columns.values()):
        name = root(column)
        if name not in source.names:
            kind = kind_of(source)
            remedy = ""
            if kind:
                remedy = f"; {kind}: {READERS[kind][1]}"
            if source.names == ["text"]:
                remedy = "; plain texts: --text_key text"
            raise ValueError(f"{path}: no column {name!r}; it has {', '.join(source.names)}{remedy}")
    for name in source.media:
        if name not in SHOWN and name not in REFUSED:
            remedy = "name it 'images' if these are pictures, or drop the column"
            raise ValueError(f"{path}: the column {name!r} is not read: {remedy}")

    read = [name for name in source.names if name in roots_of(columns)]
    rest = further(source.names, columns)
    if say and columns != wanted:
        note(f"{path}: rows of {', '.join(read)}")
    if say and rest:
        where = "not read"
        if columns.get("extra_info", "") is None:
            where = "in extra_info"
        note(f"{path}: {where}: {', '.join(rest)}")
    return source, columns


@cache  # once in a process
def note(line):
    """A line for people."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {line}", file=sys.stderr)


def roots_of(columns):
    """The columns of a file that {what: column} is made of."""
    roots = {root(column) for column in columns.values() if column}
    if columns.get("prompt") == "instruction":
        roots.add("input")  # Alpaca's
    if "prompt" in columns:
        roots.add("history")
    return roots


def further(names, columns):
    """The columns that are neither shown nor known."""
    known = {*roots_of(columns), *SHOWN, *FIELDS}
    return [name for name in names if name not in known]


def used(source, columns):
    """The columns of a file to read: those in `columns`, of any row, of prompts, and those refused."""
    if columns.get("extra_info", "") is None:
        return source.names
    names = {*roots_of(columns), *SHOWN, *REFUSED, *NAMES["prompt"]}
    return [name for name in source.names if name in names]


# ---- rows


def read_row(record, columns, path=""):
    """{what: value} of a record of a file, by {what: column}, and its images, tools, chat_template_kwargs.

    Messages are as chat templates read them. ValueError, in one line, for what is missing or refused.
    """
    check_fields(record, columns.values())
    check_refused(record, roots_of(columns))
    row, system = inputs_of(record)
    is_text = not columns.keys() & {"label", "rejected"}  # of an answer
    for what, column in columns.items():
        if column is None:
            continue
        value = value_of(record, column)
        if (
            what in CONVERSATIONS
            or what == "completion"
            and not (is_text and not isinstance(value, list | dict))
        ):
            value = messages_of(value, what, column)
        row[what] = value
    if "reward_model" in columns:
        row |= fields_of(record, columns, row, path)
    prompt_column = columns.get("prompt")
    if prompt_column == "instruction" and record.get("input") not in (None, ""):  # Alpaca's
        row["prompt"][-1]["content"] += f"\n{in_words(record['input'])}"
    if prompt_column in NAMES["prompt"] and ("completion" in row or "chosen" in row or "rejected" in row):
        check_other_prompts(record, row["prompt"], prompt_column)
    earlier = history_of(record)
    if earlier:
        if "completion" in row and is_text:  # of sft.py: they are trained too
            row["messages"] = [
                *row.pop("prompt"),
                dict(role="assistant", content=answer(row.pop("completion"))),
            ]
        what = "prompt" if "prompt" in row else "messages"
        first = sum(message["role"] == "system" for message in row[what][:1])
        row[what][first:first] = earlier

    if "label" in row:  # KTO's
        if row["label"] not in (0, 1):
            raise ValueError(f"{columns['label']!r} must be true or false, not {row['label']!r:.60}")
        if "messages" in row:
            messages = row.pop("messages")
            row["prompt"] = messages[:-1]
            row["completion"] = messages[-1:]
    if "rejected" in row and "chosen" not in row:  # ms-swift's
        row["chosen"] = row.pop("completion", None) or row["messages"]
        if "messages" in row and row["rejected"][0]["role"] == "assistant":
            row["chosen"] = row["messages"][-1:]
            row["messages"] = row["messages"][:-1]
        elif "messages" in row:
            row["messages"] = []
    if "chosen" in row:  # the messages before the replies, or none; see `pair_of`
        row["prompt"] = row.pop("messages", None) or row.get("prompt", [])
    given = [what for what in CONVERSATIONS if row.get(what)]
    if system:
        for what in given:
            if what in ("messages", "prompt") or not row.get("prompt"):
                row[what] = with_system(system, row[what])
    if not row["images"]:
        for what in given:
            if any(has_image_mark(message) for message in row[what]):
                raise ValueError(f"it has the mark {IMAGE}, and no picture in 'images' or 'image'")
    return row


def fields_of(record, columns, row, path):
    """What a reward gets, of other columns than those of its name: a ground truth, all that is not shown."""
    found = {}
    if columns["data_source"] is None:
        found["data_source"] = Path(path).name
    if columns["reward_model"] is None:
        style = "rule" if "ground_truth" in row else "model"
        found["reward_model"] = dict(style=style, ground_truth=row.get("ground_truth"))
    if columns["extra_info"] is None:
        info = {name: record[name] for name in further(record, columns)}
        for column in first_columns(record, ["completion"]).values():
            info.setdefault("answer", record[column])
        found["extra_info"] = as_json(info)
    return found


def history_of(record):
    """The turns before a prompt, of pairs of texts as Alpaca has them."""
    turns = []
    for pair in parsed(given(record, "history", []), "history", list, "a list of pairs of texts"):
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise ValueError(f"'history' must be a list of pairs of texts, not {pair!r:.60}")
        turns += [dict(role=role, content=text) for role, text in zip(("user", "assistant"), pair)]
    return turns


def given(record, name, default):
    """The value of a column, or of a field; none: null, or an empty text."""
    value = record.get(name)
    return default if value is None or value == "" else value


def in_words(value):
    """A value as a text."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=as_text)


def check_fields(row, names=FIELDS):
    """ValueError if a row is no object, or one of its columns for rewards is not as defined above."""
    if isinstance(row, ValueError) or not isinstance(row, dict):
        raise ValueError(f"no JSON of an object: {row!s:.200}")
    for name, kind in FIELDS.items():
        if name in row and name in names and not isinstance(row[name], kind):
            raise ValueError(f"{name!r} must be a {kind.__name__}, not {row[name]!r:.60}")
    if "reward_model" in row and "reward_model" in names:
        style = row["reward_model"].get("style")
        if style == "model":
            return
        # published data sets name a kind of rule too, such as rule-lighteval/MATH_v2
        if not str(style).startswith("rule"):
            raise ValueError(f"'reward_model.style' is {style!r}; use 'rule' or 'model'")
        if row["reward_model"].get("ground_truth") is None:
            raise ValueError("'reward_model.ground_truth' is missing; a rule compares with it")


def check_refused(record, columns=()):
    """ValueError if a record fills in a column that others show a model, and that is none of `columns`."""
    for name, value in record.items():
        if name not in REFUSED or name in columns or value in EMPTY:
            continue
        if name in NAMES["label"] and value not in (0, 1):  # of a class, or a score
            continue
        raise ValueError(f"the column {name!r} is not read: {REFUSED[name]}drop the column")


def inputs_of(record):
    """What a model is shown besides messages: dict(images, tools, chat_template_kwargs); a system prompt."""
    other = given(record, "system_prompt", "")
    system = given(record, "system", other)
    if not isinstance(system, str):
        raise ValueError(f"'system' must be a string, not {system!r:.60}")
    if other not in ("", system):
        raise ValueError("'system' and 'system_prompt' differ: keep one")
    options = given(record, "chat_template_kwargs", {})
    options = parsed(options, "chat_template_kwargs", dict, "an object")
    inputs = {
        "images": images_of(record),
        "tools": tools_of(given(record, "tools", [])),
        "chat_template_kwargs": {name: x for name, x in options.items() if x is not None},
    }
    return inputs, system


def value_of(record, column):
    """The value of a possibly dotted column; ValueError if it is not there, null, or an empty list."""
    value = record
    for key in column.split("."):
        if not isinstance(value, dict):
            value = {}
        value = value.get(key)
    if value is None:
        raise ValueError(f"{column!r} is missing or null; fill it in or drop the row")
    if value == []:
        raise ValueError(f"{column!r} is empty; fill it in or drop the row")
    return value


def check_other_prompts(record, prompt, column):
    """ValueError if another column of a prompt says what the prompt, which is read of one, does not."""
    text = " ".join(message["content"] for message in prompt)
    text = " ".join(text.split())
    for name in NAMES["prompt"]:
        other = record.get(name)
        if isinstance(other, str) and " ".join(other.split()) not in text:
            raise ValueError(f"{column!r} lacks what {name!r} says: join them in one, or drop {name!r}")


IMAGE = "<image>"  # the place of a picture in a text, and for some tokenizers a special token


def has_image_mark(message):
    """Whether a message begins with the mark of a picture, or has it alone on a line."""
    text = message["content"]
    if message["role"] == "assistant" or "</image>" in text:
        return False
    return text.startswith(IMAGE) or IMAGE in map(str.strip, text.splitlines())


def images_of(record):
    """Pictures of a record, each {bytes, path}, from a list or one, by their files or themselves."""
    given = [record[name] for name in ("images", "image") if record.get(name) not in (None, [])]
    if not given:
        return []
    if len(given) > 1:
        raise ValueError("it has pictures in 'images' and in 'image': keep one column")
    if isinstance(given[0], list):
        given = given[0]
    images = []
    for i, image in enumerate(given):
        if isinstance(image, str):
            image = {"bytes": None, "path": image}
        if isinstance(image, bytes):
            image = {"bytes": image, "path": None}
        if not isinstance(image, dict) or not (image.get("bytes") or image.get("path")):
            raise ValueError(f"'images[{i}]' must be {{bytes, path}}, with one of them, or a path")
        images.append(image)
    return images


def tools_of(value):
    """JSON schemas of tools, from a column or its JSON text; without what Arrow fills in."""
    tools = []
    for i, given in enumerate(parsed(value, "tools", list, "a list of JSON schemas")):
        tool = tidy(parsed(given, f"tools[{i}]", dict, "a JSON schema"), inside=True)
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problem = f"must be a JSON schema with the name of a tool, not {tool!r:.60}"
            raise ValueError(f"'tools[{i}]' {problem}")
        if "function" not in tool:
            tool = dict(type="function", function=tool)
        tools.append(tool)
    return tools


def parsed(value, where, kind, form):
    """A value, or that of which it is the JSON text."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, kind):
        raise ValueError(f"'{where}' must be {form} or its JSON text, not {value!r:.60}")
    return found


# ---- messages: {role, content}, perhaps with more of KEYS, or {from, value} as ShareGPT has it

KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "train")
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = dict(human="user", gpt="assistant", observation="tool", function_response="tool")  # its roles
REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
TRAINED = {  # fields that say whether a turn is trained: with which value it is
    "train": 1,
    "weight": 1,
    "training": 1,
    "trainable": 1,
    "loss": 1,
    "loss_mask": 1,
    "loss_scale": 1,
    "masked": 0,
    "mask": None,  # of parts of a turn
    "train_detail": None,
    "training_detail": None,
}
unknown = Counter()  # of the fields of messages that have no name here


def messages_of(value, what, column):
    """Messages of a column, which may be one: of the assistant in a reply. A string is one too."""
    if isinstance(value, str) and what != "messages":
        if is_text_of_messages(value):
            remedy = "write it as a list of {role, content}"
            raise ValueError(f"{column!r} is the text of messages: {remedy}")
        role = "assistant"
        if what == "prompt":
            role = "user"
        return [dict(role=role, content=value)]
    if isinstance(value, dict):
        value = [value]
    return conversation(value, column)


def is_text_of_messages(text):
    """Whether a text is a list of messages in JSON or in Python."""
    if not re.match(r"\s*\[\s*{", text):
        return False
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return all(is_message(value) for value in read(text.strip()))
    return False


def is_message(value):
    names = [{"role", "content"}, {"from", "value"}]
    return isinstance(value, dict) and any(value.keys() >= x for x in names)


def conversation(value, name):
    """Messages of a column, as a chat template reads them; ValueError if they are none."""
    if not isinstance(value, list):
        raise ValueError(f"{name!r} must be a list of messages, not {value!r:.60}")
    if not value:
        raise ValueError(f"{name!r} is empty; it needs at least one {{role, content}} message")
    return in_order([message_of(message, f"{name}[{i}]") for i, message in enumerate(value)])


def in_order(messages):
    """The results of a turn's calls in the order of the calls, by their ids, which templates do not show."""
    ordered = []
    numbers = {}
    for is_result, run in groupby(messages, lambda message: message["role"] == "tool"):
        run = list(run)
        if is_result:
            run.sort(key=lambda result: numbers.get(str(result.get("tool_call_id")), len(numbers)))
        calls = run[-1].get("tool_calls", ())
        numbers = {str(call["id"]): n for n, call in enumerate(calls) if "id" in call}
        ordered += run
    return ordered


def message_of(value, where):
    """A message as a chat template reads it: fields that say the same have one name."""
    message = parsed(value, where, dict, "{role, content}")
    message = {key: x for key, x in message.items() if x is not None}
    if "from" in message and "value" in message:
        role = message.pop("from")
        text = message.pop("value")
        said = dict(role=SHAREGPT.get(str(role), role), content=text)
        if role == "function_call":
            said = dict(role="assistant", tool_calls=[text])
        if any(message.get(key, x) != x for key, x in said.items()):
            raise ValueError(f"'{where}' has 'from' and 'value', and something else in their place: keep one")
        message |= said

    role = message.get("role")
    if isinstance(role, str):
        message["role"] = SHAREGPT.get(role, role)
    if message.get("role") not in ROLES:
        raise ValueError(f"'{where}.role' is {role!r:.40}; use {', '.join(ROLES)}")

    called = message.pop("function_call", None)  # the older name
    if called not in EMPTY:
        if message.get("tool_calls"):
            raise ValueError(f"'{where}' has 'function_call' and 'tool_calls': keep one")
        message["tool_calls"] = [called]
    calls = parsed(given(message, "tool_calls", []), f"{where}.tool_calls", list, "a list")
    message.pop("tool_calls", None)
    if calls:  # CAREFUL: with an empty list some templates write a turn of calls
        message["tool_calls"] = [call_of(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        message.setdefault("content", "")  # as vLLM does: a template may write a null as "None"

    content = message.get("content")
    if isinstance(content, list) and all(is_text(part) for part in content):
        content = "\n".join(part["text"] for part in content)
        message["content"] = content
    if not isinstance(content, str):
        raise ValueError(f"'{where}' must be {{role, content}} with a string content, or {{type, text}}")

    thoughts = set()
    for key in REASONING:
        thought = message.pop(key, "")
        if not isinstance(thought, str):
            raise ValueError(f"'{where}.{key}' must be a string")
        thoughts.add(thought)
    thoughts.discard("")
    if len(thoughts) > 1:
        raise ValueError(f"'{where}' has two fields of reasoning, and they differ: keep one")
    if thoughts:
        message["reasoning_content"] = thoughts.pop()
    if not take_trained(message, where):
        message["train"] = False
    unknown.update(message.keys() - KEYS)
    return message


def is_text(part):
    """Whether a part of a message says its text and nothing else: not whether it is trained, for one."""
    if not isinstance(part, dict):
        return False
    part = tidy(part, inside=True)
    return part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)


def take_trained(message, where):
    """Whether a message may be trained, for all that the data say; takes what they say out of it."""
    trained = True
    for key, value_if_trained in TRAINED.items():
        if key not in message:
            continue
        value = message.pop(key)
        if value_if_trained is None or value not in (0, 1):
            remedy = "write 'train', 1 or 0: a turn is trained or not"
            raise ValueError(f"'{where}.{key}' is {value!r:.40}; {remedy}")
        if message["role"] != "assistant":
            if value == value_if_trained:
                raise ValueError(f"'{where}.{key}': only turns of the assistant are trained; leave it out")
        elif value != value_if_trained:
            trained = False
    return trained


def call_of(value, where):
    """A call of a tool, {function: {name, arguments}} or {name, arguments}; its arguments are a dict."""
    form = "{function: {name, arguments}}"
    call = parsed(value, where, dict, form)
    function = parsed(call.get("function", call), where, dict, form)
    if not isinstance(function.get("name"), str):
        raise ValueError(f"'{where}' must be {form} with the name of a tool, not {value!r:.60}")
    odd = function.keys() - {"name", "arguments"}
    if "function" in call:
        odd |= call.keys() - {"function"}
        call = call | dict(function=function)
    odd -= {"id", "type", "index", "strict", "description"}
    if odd:
        raise ValueError(f"'{where}' has {min(odd)!r}, which is not read: write 'name' and 'arguments'")
    arguments = parsed(given(function, "arguments", {}), f"{where}: arguments", dict, "an object")
    try:
        json.dumps(arguments)
    except TypeError as error:
        raise ValueError(f"'{where}: arguments': {error}; write them as JSON text") from None
    return with_arguments(call, arguments)


def with_arguments(call, arguments):
    if "function" in call:
        return call | dict(function=call["function"] | dict(arguments=arguments))
    return call | dict(arguments=arguments)


def in_text(message):
    """A message with arguments as JSON text: a file has one struct for those of all tools."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call.get("function", call)["arguments"]
        calls.append(with_arguments(call, json.dumps(arguments, ensure_ascii=False)))
    if calls:
        message = message | dict(tool_calls=calls)
    return message


def say_unknown(what="only a chat template that names it reads it"):
    """A line for each field of messages that is not known here, once."""
    for name, count in sorted(unknown.items()):
        print(f"note: {count} messages have a field {name!r}: {what}", file=sys.stderr)
    unknown.clear()


# ---- prompts and replies


def check_prompt(messages):
    """ValueError if a prompt ends with a turn of the assistant: a response begins a turn after it."""
    if messages[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with a turn of the assistant, and a response is a turn: remove it")


def with_system(system, messages):
    """Messages after a system prompt, with which they may begin."""
    first = messages[0]
    if first["role"] != "system":
        return [dict(role="system", content=system), *messages]
    if first["content"].strip() != system.strip():
        raise ValueError("the words of the system, said twice, differ: keep one")
    return messages


def pair_of(prompt, *replies):
    """-> the prompt and the replies to it, two or one.

    Replies may be whole conversations, which have the prompt, and perhaps turns before it.
    """
    if prompt:
        check_prompt(prompt)
    size = size_of_prompt(prompt, replies)
    system = [message["content"] for message in prompt if message["role"] == "system"]
    if size > len(prompt) - len(system):
        prompt = replies[0][:size]
        if system:
            prompt = with_system(system[0], prompt)
    replies = [reply[size:] for reply in replies]
    if not prompt or any(reply[0]["role"] != "assistant" for reply in replies):
        problem = "'chosen' and 'rejected' are not two replies"
        if len(replies) == 1:
            problem = "'completion' is no reply"
        begin = "each begins with a turn of the assistant, or with all that was said before it"
        raise ValueError(f"{problem} to one prompt: {begin}")
    return [prompt, *replies]


def size_of_prompt(prompt, replies):
    """How many messages all replies begin with that end a prompt, or are all of it and turns before it."""
    first = replies[0]
    last = replies[-1]
    most = min(map(len, replies)) - 1  # a turn of the assistant follows
    size = 0
    while size < most and first[size] == last[size]:
        size += 1
    heard = [content_of(message) for message in prompt if message["role"] != "system"]
    same = [content_of(message) for message in first]
    for end in range(size, 0, -1):
        if first[end - 1]["role"] == "assistant":
            continue
        if any(reply[end]["role"] != "assistant" for reply in replies):
            continue
        pairs = zip(reversed(same[:end]), reversed(heard))
        if any(message != other for message, other in pairs):
            continue
        if first[0]["role"] == "assistant" and first[: len(prompt)] != prompt:
            return 0
        return end
    return 0


def content_of(message):
    return message["role"], message["content"].strip(), message.get("tool_calls")


def answer(value):
    """The text of an answer: a string, or one message of the assistant."""
    if isinstance(value, str):
        return value
    text = value[0]["content"]
    if value == [dict(role="assistant", content=text)]:
        return text
    problem = f"an answer must be a string or one message of the assistant, not {value!r:.60}"
    raise ValueError(f"{problem}; conversations: --messages_key")


def says_nothing(reply):
    """Whether an answer, a string or messages, has an empty turn of the assistant: it would train silence."""
    if isinstance(reply, str):
        return not reply.strip()
    if not isinstance(reply, list):
        raise ValueError(f"an answer must be a string or messages, not {reply!r:.60}")
    for message in reply:
        if message["role"] != "assistant" or not message.get("train", True):
            continue
        if not message["content"].strip() and not message.keys() & {"tool_calls", "reasoning_content"}:
            return True
    return False
