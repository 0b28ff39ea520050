"""The form in which a chat template shows messages, tried on marks in the place of what the messages say."""

import json
import re
from functools import lru_cache
from itertools import product

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from data_prep.lib.chats import in_text
from data_prep.lib.replies import MARK_OF_THOUGHT
from data_prep.lib.special import RENDER_ERRORS
from system.text import one_line

PARTS = re.compile(f"({MARK_OF_THOUGHT.pattern})")
TYPES = dict(text="string", number="integer", names="array", on="boolean")
TOOL = {  # with parameters of every type; no text of a template has its name
    "name": "zqtool",
    "description": "zq",
    "parameters": {
        "type": "object",
        "properties": {name: {"type": kind, "description": "zq"} for name, kind in TYPES.items()},
        "required": [*TYPES],
    },
}
TOOL["parameters"]["properties"]["names"]["items"] = {"type": "string"}
TOOLS = [dict(type="function", function=TOOL)]
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that says itself what is trained


def written(messages, tokenizer, given, prompted):
    """What the template writes, and the places in it that it marks as trained; ValueError: it cannot."""
    given = given | dict(tools=given["tools"] or None, add_generation_prompt=prompted)
    try:
        if not MARKED.search(str(tokenizer.chat_template)):
            return tokenizer.apply_chat_template(messages, tokenize=False, **given), ()
        text_only = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
        template = text_only.get_chat_template(None, given["tools"])
        given |= text_only.special_tokens_map | dict(return_assistant_tokens_mask=True)
        [text], [spans] = render_jinja_template([messages], chat_template=template, **given)
    except RENDER_ERRORS as error:
        name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ValueError(one_line(f"the chat template: {name}{error}")) from None
    return text, spans


def formed(message, parts, text, none):
    """A message in a form that some templates want.

    parts: its content is a list. Calls are as OpenAI has them; text: their arguments are JSON text; none: no
    content is None where there are calls.
    """
    if parts and isinstance(message["content"], str):
        message = message | dict(content=[dict(type="text", text=message["content"])])
    if not message.get("tool_calls"):
        return message
    calls = (in_text(message) if text else message)["tool_calls"]
    calls = [dict(type="function") | call | dict(function=call.get("function", call)) for call in calls]
    return message | dict(tool_calls=calls, content=message["content"] or (None if none else ""))


def kinds(messages):
    """Of each message what its form may depend on: role, type, the parts of its words, calls, fields."""
    found = []
    for m in messages:
        parts = ["x" * bool(m["content"])]
        if m["role"] == "assistant" and isinstance(m["content"], str):  # thoughts and spaces part its words
            parts = PARTS.split(m["content"])
            for n, part in enumerate(parts[::2]):
                begins, ends = len(part) - len(part.lstrip()), len(part.rstrip())
                parts[2 * n] = part[:begins] + "x" + part[ends:] if ends else part
        fields = sorted({"reasoning_content", "name"} & m.keys())
        found.append((m["role"], type(m["content"]), (*parts,), len(m.get("tool_calls") or ()), *fields))
    return tuple(found)


def in_marks(i, kind):
    """Message number i of a kind, with a mark in the place of each part, and {mark: what it stands for}."""
    role, form, parts, calls, *fields = kind
    marks, said = {}, ""
    for n, part in enumerate(parts):
        mark = f"zq{i}said{n}z"
        if n % 2 == 0 and "x" in part:
            marks[mark], part = f"what message {i} ({role}) says", part.replace("x", mark)
        said += part
    message = dict(role=role, content=said)
    if form is list and said:
        message["content"] = [dict(type="image"), dict(type="text", text=said)]
    for field in fields:
        message[field] = f"zq{i}{field}z"
    if "reasoning_content" in fields:
        marks[f"zq{i}reasoning_contentz"] = f"of message {i} its reasoning"
        message |= dict.fromkeys(("reasoning", "thinking"), message["reasoning_content"])
    for j in range(calls):
        name, value = f"zq{i}name{j}z", f"zq{i}value{j}z"
        call = dict(function=dict(name=name, arguments=dict(x=value)))
        message.setdefault("tool_calls", []).append(call)
        marks[name] = marks[value] = f"tool calls: number {j} of message {i}"
    return message, marks


@lru_cache(10000)
def tried(about, tokenizer, template, given, prompted):
    """The form in which a template shows messages like these, tried on marks; the text, and its spans.

    All but the assistant's words must be shown, which a template may rewrite; see turns.py.
    """
    marks, messages, given = {}, [], json.loads(given)
    for i, kind in enumerate(about):
        message, found = in_marks(i, kind)
        messages.append(message)
        marks |= {x: what for x, what in found.items() if kind[0] != "assistant" or "call" in what}
    given["tools"] = given["tools"] and TOOLS
    # a list only where text will not do, and other calls only where there are any
    forms, problem = [*product((False, True), repeat=3)], None
    for form in forms if any(calls for _, _, _, calls, *_ in about) else forms[::4]:
        try:
            text, spans = written([formed(x, *form) for x in messages], tokenizer, given, prompted)
        except ValueError:
            continue
        lost = [what for mark, what in marks.items() if mark not in text]
        if not lost:
            return form, text, spans
        problem = problem or f"the chat template leaves out {lost[0]}; take a model whose template shows it"
    if problem:
        raise ValueError(problem)
    return (False,) * 3, None, ()  # the messages themselves may say why
