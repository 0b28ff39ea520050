"""A prompt, and a reply to it: a string or messages."""

import ast
import json
from contextlib import suppress
from itertools import takewhile


def spoken(text, role, name):
    """A text as one message; ValueError if it is the text of messages, of JSON or of Python."""
    found = []
    for read in (json.loads, ast.literal_eval) if "".join(text[:99].split())[:2] == "[{" else ():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = found or read(text.strip())
    named = {"role", "content"}, {"from", "value"}
    if found and all(isinstance(x, dict) and any(names <= x.keys() for names in named) for x in found):
        raise ValueError(f"{name!r} is the text of messages: write it as a list of {{role, content}}")
    return [dict(role=role, content=text)]


def asked(prompt):
    """The messages of a prompt, or of a string, which is the user's. A response begins a turn after them."""
    prompt = spoken(prompt, "user", "prompt") if isinstance(prompt, str) else prompt
    if prompt[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with a turn of the assistant, and a response is a turn: remove it")
    return prompt


def replied(prompt, reply, name):
    """The messages of a reply, or of a string, the assistant's; ValueError if it repeats its prompt."""
    reply = spoken(reply, "assistant", name) if isinstance(reply, str) else reply
    if prompt[-1] in takewhile(lambda message: message["role"] != "assistant", reply):
        remedy = "leave it out of one of them, as data_prep/preference.py does"
        raise ValueError(f"the prompt is in 'prompt' and once more in {name!r}: {remedy}")
    return reply


def answer(value):
    """The text of an answer: a string, or one message of the assistant."""
    text = value[0].get("content") if isinstance(value, list) and isinstance(value[0], dict) else value
    if isinstance(text, str) and value in (text, [dict(role="assistant", content=text)]):
        return text
    problem = f"an answer must be a string or one message of the assistant, not {value!r:.60}"
    raise ValueError(f"{problem}; conversations: --messages_key")
