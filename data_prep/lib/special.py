"""Special tokens of a tokenizer, as a text could spell them."""

import re
from functools import cache

import jinja2

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
