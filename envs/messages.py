"""Messages of an environment as the token ids that a model reads."""

import re

import jinja2

from data_prep.lib.turns import without_special
from envs import one_line

# of a template, which is a program: what it raises itself, and what its operations raise for these messages
RENDER_ERRORS = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)


class Unrenderable(ValueError):
    """The chat template cannot write messages, or leaves out what they say; in one line."""


def observation(tokenizer, messages, tools, last):
    """Ids of an environment's messages, as the chat template has them after a turn whose last id is `last`.

    The template writes them after a mark in place of the turn, and after them the prompt of the next turn:
    sampled text is not rendered, so no template can change it.  Raises Unrenderable.
    """
    mark = "[what it said]"
    chat = [dict(role="user", content="x"), dict(role="assistant", content=mark)]
    options = dict(tools=tools, tokenize=False, add_generation_prompt=True)
    try:
        text = tokenizer.apply_chat_template([*chat, *messages], **options).partition(mark)[2]
    except RENDER_ERRORS as error:
        raise Unrenderable(f"the chat template: {one_line(error)}") from None
    for message in messages:
        words = re.findall("[A-Za-z0-9]+", message["content"])
        if words and max(words, key=len) not in text:
            raise Unrenderable(f"the chat template leaves out what the role {message['role']!r} says")
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[ids[:1] == [last] :]  # after a turn without EOS the template's is kept


def shorten(tokenizer, messages, limit):
    """The messages without special tokens, cut to `limit` tokens each, and how many of them were longer."""
    short, longer = [], 0
    for message in messages:
        # no token has more than 100 characters: a megabyte is cut before it is tokenised
        message = without_special(message | dict(content=message["content"][: 100 * limit]), tokenizer)
        text = message["content"]
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > limit:
            text = tokenizer.decode(ids[:limit])
            longer += 1
        short.append(message | dict(content=text))
    return short, longer
