"""Conversations as chat templates read them, whatever wrote the file.

A message is {role, content}, perhaps with more of FIELDS, or {from, value} as ShareGPT has it. A tool call is
{function: {name, arguments}} or {name, arguments}; its arguments are a dict, in a file also JSON text. Fields
that say the same have one name here: reasoning_content, and train, which is there where it is False.
"""

import json
import sys
from collections import Counter

from data_prep.lib.source import tidy

FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "train")
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = dict(human="user", gpt="assistant", observation="tool", function_response="tool")  # its roles
REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
TRAIN = ("train", "weight", "training", "trainable", "loss", "loss_mask", "loss_scale")  # 1: it is trained
MASKED = ("masked",)  # 1: it is not
IN_PARTS = "mask", "train_detail", "training_detail"  # parts of a turn
unknown = Counter()  # of the fields of messages that have no name here


def conversation(value, name):
    """Messages of a column, as a chat template reads them; ValueError if they are none."""
    if not isinstance(value, list):
        raise ValueError(f"{name!r} must be a list of messages, not {value!r:.60}")
    if not value:
        raise ValueError(f"{name!r} is empty; it needs at least one {{role, content}} message")
    return in_order([_message(message, f"{name}[{i}]") for i, message in enumerate(value)])


def in_order(messages):
    """The results of a turn's calls in the order of the calls, by their ids, which templates do not show."""
    keys, turn, places = [], 0, {}
    for i, message in enumerate(messages):
        if message["role"] != "tool":
            places = {str(x["id"]): n for n, x in enumerate(message.get("tool_calls", ())) if "id" in x}
            turn = i
        place = places.get(str(message.get("tool_call_id")), len(places)) if turn < i else -1
        keys.append((turn, place))
    return [messages[i] for i in sorted(range(len(messages)), key=keys.__getitem__)]


def say_unknown(what="only a chat template that names it reads it"):
    """A line for each field of messages that is not known here, once."""
    for name, count in sorted(unknown.items()):
        print(f"note: {count} messages have a field {name!r}: {what}", file=sys.stderr)
    unknown.clear()


def _message(value, where):
    message = parsed(value, where, dict, "{role, content}")
    message = {key: x for key, x in message.items() if x is not None}
    if "from" in message and "value" in message:
        message["role"], said = message.pop("from"), message.pop("value")
        called = message["role"] == "function_call"
        message |= dict(role="assistant", tool_calls=[said]) if called else dict(content=said)
    if message.get("role") in [*SHAREGPT]:
        message["role"] = SHAREGPT[message["role"]]
    if message.get("role") not in ROLES:
        raise ValueError(f"'{where}.role' is {message.get('role')!r:.40}; use {', '.join(ROLES)}")
    if called := message.pop("function_call", None):  # the older name
        if message.get("tool_calls"):
            raise ValueError(f"'{where}' has 'function_call' and 'tool_calls': keep one")
        message["tool_calls"] = [called]
    calls = parsed(message.pop("tool_calls", None) or [], f"{where}.tool_calls", list, "a list")
    if calls:  # CAREFUL: with an empty list some templates write a turn of calls
        message["tool_calls"] = [_call(x, f"{where}.tool_calls[{i}]") for i, x in enumerate(calls)]
        message.setdefault("content", "")  # as vLLM does: a template may write a null as "None"
    content = message.get("content")
    if isinstance(content, list) and all(map(_is_text, content)):
        message["content"] = content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"'{where}' must be {{role, content}} with a string content, or {{type, text}}")
    thoughts = {key: message.pop(key) for key in REASONING if key in message}
    if any(not isinstance(thought, str) for thought in thoughts.values()):
        raise ValueError(f"'{where}.{next(iter(thoughts))}' must be a string")
    thoughts = {*filter(None, thoughts.values())}
    if len(thoughts) > 1:
        raise ValueError(f"'{where}' has two fields of reasoning, and they differ: keep one")
    if thoughts:
        message["reasoning_content"] = thoughts.pop()
    if not _trained(message, where):
        message["train"] = False
    unknown.update(message.keys() - FIELDS)
    return message


def _is_text(part):
    """Whether a part of a message says its text and nothing else: not whether it is trained, for one."""
    said = tidy(part, inside=True)
    return isinstance(said, dict) and said == dict(type="text", text=str(said.get("text")))


def _trained(message, where):
    """Whether a turn is trained, for all that the data say; takes what they say out of the message."""
    said = {key: message.pop(key) for key in (*TRAIN, *MASKED, *IN_PARTS) if key in message}
    for key, value in said.items():
        if key in IN_PARTS or value not in (0, 1):
            remedy = "write 'train', 1 or 0: a turn is trained or not"
            raise ValueError(f"'{where}.{key}' is {value!r:.40}; {remedy}")
        if value == (key in TRAIN) and message.get("role") != "assistant":
            raise ValueError(f"'{where}.{key}': only turns of the assistant are trained; leave it out")
    return message.get("role") != "assistant" or all(v == (key in TRAIN) for key, v in said.items())


def tools_of(value):
    """JSON schemas of tools, from a column or its JSON text; without what Arrow fills in."""
    tools = []
    for i, tool in enumerate(parsed(value or [], "tools", list, "a list of JSON schemas")):
        tool = tidy(parsed(tool, f"tools[{i}]", dict, "a JSON schema"), inside=True)
        tools.append(tool if "function" in tool else dict(type="function", function=tool))
        function = tools[-1]["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problem = f"must be a JSON schema with the name of a tool, not {tool!r:.60}"
            raise ValueError(f"'tools[{i}]' {problem}")
    return tools


def _call(value, where):
    form = "{function: {name, arguments}}"
    call = parsed(value, where, dict, form)
    function = parsed(call.get("function", call), where, dict, form)
    if not isinstance(function.get("name"), str):
        raise ValueError(f"'{where}' must be {form} with the name of a tool, not {value!r:.60}")
    odd = function.keys() - {"name", "arguments"}
    odd |= call.keys() - {"function"} if "function" in call else set()
    if odd := odd - {"id", "type", "index", "strict", "description"}:
        raise ValueError(f"'{where}' has {min(odd)!r}, which is not read: write 'name' and 'arguments'")
    arguments = parsed(function.get("arguments") or {}, f"{where}: arguments", dict, "an object")
    try:
        json.dumps(arguments)
    except TypeError as error:
        raise ValueError(f"'{where}: arguments': {error}; write them as JSON text") from None
    function = function | dict(arguments=arguments)
    return call | dict(function=function) if "function" in call else function


def parsed(value, where, kind, form):
    """A value, or that of which it is the JSON text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, kind):
        raise ValueError(f"'{where}' must be {form} or its JSON text, not {value!r:.60}")
    return found


def in_text(message):
    """A message with arguments as JSON text: a file has one struct for those of all tools."""

    def text(call):
        if "function" in call:
            return call | dict(function=text(call["function"]))
        return call | dict(arguments=json.dumps(call["arguments"], ensure_ascii=False))

    calls = [*map(text, message.get("tool_calls", ()))]
    return message | dict(tool_calls=calls) if calls else message
