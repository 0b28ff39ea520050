"""Messages of an environment as the token ids that a model reads."""

import re
from functools import cache

import jinja2

from envs import one_line

MARK = "<image>"  # the place of an image in a text, and for some tokenizers a special token

# of a template, which is a program: what it raises itself, and what its operations raise for these messages
RENDER_ERRORS = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)


@cache
def special_tokens(tokenizer):
    """A pattern of the special tokens, as a text could spell them."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    texts = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} - {MARK}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def without_special(value, tokenizer):
    """A text, message or conversation with a space for each special token: nobody speaks as somebody else."""
    if isinstance(value, str):
        return special_tokens(tokenizer).sub(" ", value)
    if isinstance(value, list):
        return [without_special(x, tokenizer) for x in value]
    if isinstance(value, dict):
        return {without_special(k, tokenizer): without_special(x, tokenizer) for k, x in value.items()}
    return value


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
    ids, special = tokenizer.encode(text, add_special_tokens=False), special_tokens(tokenizer)
    ended = last is not None and special.fullmatch(tokenizer.decode([last]))
    both = ended and special.match(alone) and special.match(text)  # it ended by another than the template's
    return ids[ids[:1] == [last] or bool(both) :]  # one end a turn: a cut one keeps the template's


def after_words(tokenizer, messages, tools):
    """What the template writes after a turn, with messages that answer it, and without them."""
    mark, texts = "[what it said]", []
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
