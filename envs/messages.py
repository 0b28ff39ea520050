"""Messages of an environment as the token ids that a model reads."""

import re

from data_prep.lib.templates import RENDER_ERRORS, special_tokens, without_special
from system.text import one_line


class Unrenderable(ValueError):
    """The chat template cannot write messages, or leaves out what they say; in one line."""


def observation(tokenizer, messages, tools, last, after=None):
    """Ids of an environment's messages, as the chat template has them after a turn whose last id is `last`.

    The template writes them after a mark in place of the turn, and then the prompt of the next turn: sampled
    text is not rendered, so no template can change it.  after: what it writes, with the messages and without,
    known already.  Raises Unrenderable.
    """
    text, alone = after or after_words(tokenizer, messages, tools)
    for message in messages:
        words = re.findall("[A-Za-z0-9]+", message["content"])
        if words and max(words, key=len) not in text:
            silent = f"the chat template of {tokenizer.name_or_path} shows no role {message['role']}"
            raise Unrenderable(f"{silent}: take another by --chat_template, or let the environment use user")
    ids = tokenizer.encode(text, add_special_tokens=False)
    special = special_tokens(tokenizer)
    ended = last is not None and special.fullmatch(tokenizer.decode([last]))
    both = ended and special.match(alone) and special.match(text)  # it ended by another than the template's
    return ids[ids[:1] == [last] or bool(both) :]  # one end a turn: a cut one keeps the template's


def after_words(tokenizer, messages, tools):
    """What the template writes after a turn, with messages that answer it, and without them."""
    mark = "[what it said]"
    texts = []
    chat = [dict(role="user", content="x"), dict(role="assistant", content=mark)]
    for more in (messages, []):
        options = dict(tools=tools, tokenize=False, add_generation_prompt=bool(more))
        try:
            text = tokenizer.apply_chat_template(chat + more, **options)
        except RENDER_ERRORS as error:
            raise Unrenderable(f"the chat template: {one_line(error)}") from None
        texts.append(text.partition(mark)[2])
    return texts


def shorten(tokenizer, messages, limit):
    """The messages without special tokens, cut to `limit` tokens each, and how many of them were longer."""
    short = []
    longer = 0
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
