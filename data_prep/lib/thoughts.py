"""Thoughts of a model: where they open and close, and how an answer follows a prompt that opens one."""

import re

THOUGHTS = {  # marks of a thought
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "◁think▷": "◁/think▷",
}
OPENED = THOUGHTS | {"<|channel>": "<channel|>", "<|channel|>analysis": "<|end|>"}  # Gemma 4, gpt-oss
MARK_OF_THOUGHT = re.compile("|".join(map(re.escape, (*THOUGHTS, *THOUGHTS.values()))))


def opens_only(text, prompt=""):
    """Whether a response does not close a thought that it, or its prompt, has opened."""
    begins, end = text.lstrip(), prompt.rstrip()
    opened = [y for x, y in OPENED.items() if begins.startswith(x) or end.endswith(x)]
    return any(closing not in text for closing in opened)


def whole_thought(text):
    """A response whose prompt opened its thought, with the opening."""
    for opening, closing in THOUGHTS.items():
        if closing in text and opening not in text.partition(closing)[0]:
            return f"{opening}\n{text}"
    return text


def answer_after(prompt, text):
    """What follows a prompt that may have opened a thought: the answer, which opens it only once.

    An answer without a thought has an empty one, as the templates of Qwen have it.
    """
    check_thought(text, prompt)
    end, begins = prompt.rstrip(), text.lstrip()
    for opening, closing in THOUGHTS.items():
        if end.endswith(opening) and begins.startswith(opening):
            return begins.removeprefix(opening).removeprefix("\n" * prompt.endswith("\n"))
        if end.endswith(opening) and closing not in text:
            return f"\n{closing}\n\n" + text.lstrip("\n")
        if end.endswith(closing) and closing in text:
            return text.partition(closing)[2].lstrip("\n")
    return text


def check_thought(text, prompt):
    """ValueError if an answer opens a thought and does not close it, or thinks where its prompt does not."""
    end = prompt.rstrip()
    for opening, closing in THOUGHTS.items():
        before, closed, _ = text.partition(closing)
        thought = before.lstrip().removeprefix(opening)
        if text.lstrip().startswith(opening) and not closed:
            raise ValueError(f"the answer opens {opening} and does not close it by {closing}")
        if end.endswith(opening) and closed and opening in thought:
            raise ValueError(f"the answer opens {opening} in its middle, and its prompt has opened it")
        if end.endswith(closing) and closed and thought.strip():
            remedy = "let it open one (--chat_template_kwargs), or leave out the thought"
            raise ValueError(f"the answer has a thought and its prompt an empty one: {remedy}")


def thought_apart(message):
    """A message of which a thought at the beginning is its reasoning."""
    for opening, closing in THOUGHTS.items():
        thought, closed, said = message["content"].partition(closing)
        if closed and thought.lstrip().startswith(opening) and not message.get("reasoning_content"):
            thought = thought.lstrip().removeprefix(opening).strip("\n")
            return message | dict(content=said.lstrip("\n"), reasoning_content=thought)
    return message
