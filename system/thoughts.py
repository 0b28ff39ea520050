"""The thought at the beginning of what a model writes: where it ends, by the marks that chat templates write.

The marks of most models are tags with a name such as think, thought or reasoning. Only a thought at the
beginning counts. A prompt may have opened it, so a text may have its end alone.
"""

import re
from functools import cache

NAME = r"[\w:]{0,20}(?:think|thought|reason)[\w:]{0,20}"
MARKS = (  # what opens a thought, and what closes it; {}: the NAME
    ("<{}>", "</{}>"),
    ("[THINK]", "[/THINK]"),
    ("◁{}▷", "◁/{}▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_{}|>", "<|end_of_{}|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis", "<|end|>"),  # gpt-oss, whose prompts open none
)
AROUND = ("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<response>", "</response>")  # of a reply
BETWEEN = re.compile(r"\s*(?:<\|start\|>assistant)?")  # messages
QUOTES = "\"'`"
WORDS_BEFORE = 50  # characters that a model may write before it opens its thought
FINAL = re.compile(BETWEEN.pattern + r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")


@cache
def pattern(mark):
    return re.compile(re.escape(mark).replace(r"\{\}", f"({NAME})"))


OPENING = re.compile("|".join(pattern(opening).pattern for opening, _ in MARKS))
CLOSING = re.compile("|".join(pattern(closing).pattern for _, closing in MARKS[:-1]))
OPENED = re.compile(rf"(?:{OPENING.pattern})(?:<\|message\|>)?\s*\Z")  # the end of a prompt


def after_thought(text, prompt=""):
    """What a text says after the thought at its beginning; None if that has no end.

    prompt: what stands before the text, as far as it is known.
    """
    opened = OPENED.search(prompt[-100:])
    if opened:
        text = opened[0] + text
    place = 0
    if not closing_at(text, 0):  # the prompt has opened its thought, or a few words stand before that
        end = first(CLOSING, text)
        opening = end and OPENING.search(text, 0, end.start())
        if end and (not opening or (opening.start() <= WORDS_BEFORE and text[end.end() :].strip())):
            place = end.end()
    closing = closing_at(text, place)
    while closing:
        end = first(re.compile(re.escape(closing)), text, place)
        if end is None:
            return None
        place = end.end()
        closing = closing_at(text, place)
    final = FINAL.match(text, place)
    return text[final.end() if final else place :]


def with_opening(text, prompt):
    """A text, behind the opening of its thought where the prompt has opened one that the text does not end.

    So that `reply_of` finds no reply in it without the prompt.
    """
    opened = OPENED.search(prompt[-100:])
    if opened and after_thought(text, prompt) is None:
        return opened[0] + text
    return text


def reply_of(text):
    """What counts of a response: `after_thought`, without marks around it.

    Empty for a thought without an end.
    """
    reply = after_thought(text) or ""
    said = reply.strip()
    for opening, closing in AROUND:
        if said.startswith(opening):
            return said.removeprefix(opening).removesuffix(closing)
    return reply


def closing_at(text, place):
    """What closes the thought that is opened at a place of a text, or None."""
    place = BETWEEN.match(text, place).end()
    for opening, closing in MARKS:
        found = pattern(opening).match(text, place)
        if found:
            return closing.format(*found.groups())
    return None


def first(mark, text, place=0):
    """The first mark from a place on that is not between quotation marks, or None."""
    for found in mark.finditer(text, place):
        before = text[max(found.start() - 2, 0) : found.start()]
        quote = before[-1:]
        quoted = quote and quote in QUOTES and text.startswith(quote, found.end())
        if not quoted or before == quote * 2:  # as in a fence
            return found
    return None
