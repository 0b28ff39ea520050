"""A prompt, and a reply to it: a string or messages. A reply may begin with a thought."""

import ast
import json
import re
from contextlib import suppress

THOUGHTS = {  # marks of a thought
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "◁think▷": "◁/think▷",
}
OPENED = THOUGHTS | {"<|channel>": "<channel|>", "<|channel|>analysis": "<|end|>"}  # Gemma 4, gpt-oss
MARK_OF_THOUGHT = re.compile("|".join(map(re.escape, (*THOUGHTS, *THOUGHTS.values()))))


def spoken(text, role, name):
    """A text as one message; ValueError if it is the text of messages, of JSON or of Python.

    Messages stay as they are.
    """
    if not isinstance(text, str):
        return text
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
    prompt = spoken(prompt, "user", "prompt")
    if prompt[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with a turn of the assistant, and a response is a turn: remove it")
    return prompt


def after(system, messages):
    """Messages after the words of a system, with which they may begin."""
    first = messages[0]
    if first["role"] != "system":
        return [dict(role="system", content=system), *messages]
    if first["content"].strip() != system.strip():
        raise ValueError("the words of the system, said twice, differ: keep one")
    return messages


def pair_of(prompt, *replies):
    """-> the messages of a prompt and of the replies to it, two or one; each may be a string.

    Replies may be whole conversations, which have the prompt, and perhaps turns before it.
    """
    names = ("chosen", "rejected") if len(replies) == 2 else ("completion",)
    given = [spoken(reply, "assistant", name) for name, reply in zip(names, replies)]
    prompt, size = asked(prompt) if prompt else [], 0  # size: of what both begin with
    while size < min(map(len, given)) and given[0][size] == given[-1][size]:
        size += 1
    same, words = (
        [(m["role"], m["content"].strip(), m.get("tool_calls")) for m in messages]
        for messages in (given[0][:size], [m for m in prompt if m["role"] != "system"])
    )
    for end in range(size, 0, -1):  # replies begin with turns of the assistant, after what has the prompt
        speak = all(len(reply) > end and reply[end]["role"] == "assistant" for reply in given)
        if speak and same[-1][0] != "assistant" and same[max(0, end - len(words)) :] == words[-end:]:
            break
        same.pop()
    if same and (same[0][0] != "assistant" or given[0][: len(prompt)] == prompt):
        if len(words) < len(same):
            system = [m["content"] for m in prompt if m["role"] == "system"]
            prompt = given[0][: len(same)]
            prompt = after(system[0], prompt) if system else prompt
        given = [reply[len(same) :] for reply in given]
    if not prompt or any(reply[0]["role"] != "assistant" for reply in given):
        said = "'chosen' and 'rejected' are not two replies" if names[1:] else "'completion' is no reply"
        begin = "each begins with a turn of the assistant, or with all that was said before it"
        raise ValueError(f"{said} to one prompt: {begin}")
    return [prompt, *given]


def answer(value):
    """The text of an answer: a string, or one message of the assistant."""
    text = value[0].get("content") if isinstance(value, list) and isinstance(value[0], dict) else value
    if isinstance(text, str) and value in (text, [dict(role="assistant", content=text)]):
        return text
    problem = f"an answer must be a string or one message of the assistant, not {value!r:.60}"
    raise ValueError(f"{problem}; conversations: --messages_key")


def opens_only(text, prompt=""):
    """Whether a response does not close a thought that it, or its prompt, has opened."""
    begins, end = text.lstrip(), prompt.rstrip()
    opened = [y for x, y in OPENED.items() if begins.startswith(x) or end.endswith(x)]
    return any(closing not in text for closing in opened)


def answer_after(prompt, text):
    """What follows a prompt that may have opened a thought: the answer, which opens it only once.

    An answer without a thought has an empty one, as the templates of Qwen have it. ValueError if an answer
    opens a thought and does not close it, or thinks where its prompt does not.
    """
    end, begins = prompt.rstrip(), text.lstrip()
    for opening, closing in THOUGHTS.items():
        before, closed, answer = text.partition(closing)
        opens, thought = begins.startswith(opening), before.lstrip().removeprefix(opening)
        if opens and not closed:
            raise ValueError(f"the answer opens {opening} and does not close it by {closing}")
        if end.endswith(closing) and closed:
            if thought.strip():
                remedy = "let it open one (--chat_template_kwargs), or leave out the thought"
                raise ValueError(f"the answer has a thought and its prompt an empty one: {remedy}")
            return answer.lstrip("\n")
        if end.endswith(opening):
            if closed and opening in thought:
                raise ValueError(f"the answer opens {opening} in its middle, and its prompt has opened it")
            if not closed:
                return f"\n{closing}\n\n" + text.lstrip("\n")
            return begins.removeprefix(opening).removeprefix("\n" * prompt.endswith("\n")) if opens else text
    return text


def thought_apart(message):
    """A message of which a thought at the beginning is its reasoning."""
    for opening, closing in THOUGHTS.items():
        thought, closed, said = message["content"].partition(closing)
        if closed and thought.lstrip().startswith(opening) and not message.get("reasoning_content"):
            thought = thought.lstrip().removeprefix(opening).strip("\n")
            return message | dict(content=said.lstrip("\n"), reasoning_content=thought)
    return message
