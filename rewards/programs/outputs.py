"""Whether what a program printed or returned is what a test expects; the rules: prime_code.py."""

import json
import math
import re
from collections.abc import Iterator
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from itertools import chain

TOLERANCE = dict(rel_tol=1e-5, abs_tol=1e-8)
ROUNDING = 5e-10  # of a float near an expected integer, whatever its size
EXACT = Context(Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")
LEADING_ZERO = re.compile(r"[+-]?0[0-9]")
INTEGER = re.compile(r"[+-]?[0-9]+")


def same_text(text, expected):
    """Whether two outputs are the same by the rules above."""
    lines = words_of_lines(text)
    expected_lines = words_of_lines(expected)
    same_shape = list(map(len, lines)) == list(map(len, expected_lines))
    return same_shape and all(map(same_word, chain(*lines), chain(*expected_lines)))


def words_of_lines(text):
    return [line.split() for line in text.split("\n") if line.strip()]


def same_word(word, expected):
    if word == expected:
        return True
    if not NUMBER.fullmatch(expected) or not NUMBER.fullmatch(word):
        return False
    if not INTEGER.fullmatch(expected):
        return math.isclose(float(word), float(expected), **TOLERANCE)
    # CAREFUL: 010 and 10 may be binary
    if LEADING_ZERO.match(word) or LEADING_ZERO.match(expected):
        return False
    return EXACT.subtract(Decimal(word), Decimal(expected)).copy_abs() < ROUNDING


def same_json(value, expected):
    """Whether a result is the expected JSON by the rules above."""
    if isinstance(expected, list) and isinstance(value, (list, tuple, Iterator)):
        items = list(value)
        return len(items) == len(expected) and all(map(same_json, items, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        items = {}
        for key, item in value.items():
            items[key if isinstance(key, str) else json.dumps(key, default=str)] = item
        return items.keys() == expected.keys() and all(same_json(items[key], expected[key]) for key in items)
    if isinstance(expected, float) and isinstance(value, float):
        return math.isclose(value, expected, **TOLERANCE)
    if isinstance(value, float) and type(expected) is int and abs(expected) < 1 << 53:
        return abs(value - expected) < ROUNDING
    return value == expected
