r"""GSM8K: 1 if the response's final number equals the ground truth, else 0.

Strict: the last `#### number` counts.  Flexible: the last number of the text counts.  Both ways:
- numbers are compared by value: 1,234 = 1234, 40.00 = 40; a currency sign before the number and a unit,
  percent sign or sentence punctuation after it are no part of the value;
- what only contains the number is not the number: 9,9,3  3/4  97^2  67e3  5 + 3  55 or 56  5\pi  5 million;
- a thought gives no answer, and with more than WINDOW characters after it a number is no final answer.  (verl
  cuts off all but the last 300 characters, which can cut a number in two.)
Linear in the length of the response.
"""

import re

import regex

from rewards.mathematics.units import NUMBER_WORD
from system.thoughts import reply_of

WINDOW = 1000  # characters that may follow the answer
DIGITS = frozenset("0123456789")
TO_ASCII = str.maketrans("０１２３４５６７８９−－–＋．，\u00a0", "0123456789---+., ", "\u2009\u202f")
# What makes another value of a number, behind it and in front of it: only bounded text next to it is read.
DENIED = (  # 5 is wrong; 5, which cannot be; is it 5?
    r"\s{0,3}(?:\?|(?:,? ?(?:which|that|but (?:it|that|this)) )?(?:(?:is|was|seems|would be|must be) )?"
    r"(?:not|no|wrong|false|incorrect|impossible|cannot|can't|isn't|wasn't)\b)"
)
GOES_ON = (
    rf"[$*)]{{0,3}}{DENIED}",
    r"[ \t]{0,3}\([ \t]?-?[0-9][0-9.,]*[ \t]?\)",  # 5 (6)
    r"[ \t]?[eE][+-]?[0-9]|[:_][0-9]|'[ \t]?[0-9]|(?:ft|h)[ \t]?[0-9]",  # 67e3, 5:30, 101_2, 5'6
    r"[π√∞]|(?:pi|sqrt)\b|[a-zA-Z](?<![mghsLl])(?![A-Za-z])",  # 5π, 5x; but 5m is a length
    r"[ \t]{0,3}\\(?!(?:text|math|circ|degree|q?quad|right|end)|[^A-Za-z])",  # 5\pi
    r"[ \t]{0,3}(?:[\p{Sm}\p{Pd}*/^·;&%]|[!<>]=|\(?or |(?:and|to|x|plus|minus|times|over|divided by|out of) )"
    r"[ \t]{0,3}(?:-?\$?[0-9]|[nxyz]\b)",  # 5 - 3, 5 or -6, 5/x
    r"[ \t]{1,3}[0-9]|[ \t][A-Za-z]{1,20},?[ \t](?:and[ \t])?[0-9]",  # 5 1/2, 5 hours 30 minutes
    r"[ \t]{0,3}(?:\\(?:text|mathrm|mbox)\{[ ~]{0,3})?"  # 5 million, 5\text{ tenths}
    rf"(?i:(?:and a half|or (?:more|less|fewer)|(?:more|less|fewer) than|pi|squared|cubed"
    rf"|factorial|k|{NUMBER_WORD})\b)",
    r"[ \t]{0,3}[百千万亿](?![克米瓦])|[ \t]?(?:个?半|成|分之|或)",
)
BEGAN = (
    r"[0-9](?:[eE][+-]?|:|[ \t]{0,3}[+*/^×÷·~][ \t]{0,3}|[ \t]{1,3}(?:-|or|x|times|plus|out of)[ \t]{1,3})",
    r"(?:[=:]|\bis)[ \t]{0,3}-[ \t]{1,3}|-\(|[A-Za-z]_?",  # = - 5, x_5
    r"(?:[√∛^/≤≥≠±≈~<]|(?:[^A-Za-z\"'/=-]|\b[A-Za-z])>|!=|[0-9A-Za-z]\})[ \t({]{0,3}",  # √5, x > 5, {2}{5}
    r"\\(?:frac|le|ge|ne|lt|gt|leq|geq|neq|pm|mp|pi|cdot|times)[ \t({]{0,3}",
    r"(?<![A-Za-z])(?:not|sqrt|log|ln|sin|cos|tan|minus|negative)[ \t({]{0,3}",
    r"(?i:(?<![A-Za-z])(?:at (?:least|most)|(?:more|less|fewer|greater) than|about|approximately|roughly"
    r"|nearly|almost|half of|twice|cannot be)|n't(?: be)?)[ \t$]{1,3}",
)
GOES_ON = regex.compile("|".join(GOES_ON))
BEGAN = re.compile(rf"(?:{'|'.join(BEGAN)})\Z")
NUMBER = regex.compile(r"([ \t\\+*\p{Sc}-]*+)([0-9.,]*+)")  # Sc: currency signs
CURRENCY = regex.compile(r"[\\\p{Sc}]+\Z")
RAISED = regex.compile(r"[ \t]?\p{No}")  # No: ² or ½
# From the end. CAREFUL: the format is '#### 7', not '####7'
MARKS = regex.compile(r"(?r)####(?=[ \t])")
LAST = regex.compile(r"(?r)[0-9,.]*+[0-9]")
TAG = re.compile(r"(?:.*<[|｜][^<>]*[|｜]>[ \t]*|<[^<>]*>)$", re.DOTALL)  # final<|message|> 5; <answer>5


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score: 1.0 | 0.0, acc, pred}.  `extra_info["method"]`: strict | flexible.

    Default: strict; for arithmetic flexible.  Raises ValueError for another method, and for a ground truth
    that is no number.
    """
    method, truth = _read(data_source, ground_truth, extra_info)
    text = reply_of(solution_str).translate(TO_ASCII).rstrip()
    answer = _after_last_marker(text) if method == "strict" else _last_number(text)
    correct = answer == truth
    return {"score": float(correct), "acc": correct, "pred": answer or ""}


def _read(data_source, ground_truth, extra_info):
    """The method, and the value of the ground truth.  Raises ValueError."""
    method = (extra_info or {}).get("method")
    if not method:
        method = "flexible" if data_source == "arithmetic" else "strict"
    if method not in ("strict", "flexible"):
        raise ValueError(f"extra_info['method'] is {method!r}; it must be 'strict' or 'flexible'")
    truth, _ = _number_at(str(ground_truth).translate(TO_ASCII), 0)
    if truth is None:
        raise ValueError(f"the ground truth is no number: {ground_truth!r:.60}")
    return method, truth


def _after_last_marker(text):
    """Value of the last `#### number`, or None."""
    for mark in MARKS.finditer(text):
        value, end = _number_at(text, mark.end())
        if end and len(text) - end <= WINDOW:
            return value
        if end:
            return None
    return None


def _number_at(text, i):
    """Read [sign and currency] number from text[i:]; return its value or None, and its end (0: no digits)."""
    found = NUMBER.match(text, i)
    lead, token = found.groups()
    if DIGITS.isdisjoint(token):
        return None, 0
    end = found.end()
    if lead.count("-") + lead.count("+") > 1 or GOES_ON.match(text, end) or RAISED.match(text, end):
        return None, end
    return _value(token, "-" in lead), end


def _last_number(text):
    """Value of the last number of the text, or None."""
    found = LAST.search(text)
    if not found or len(text) - found.end() > WINDOW:
        return None
    token = found[0]
    end = found.end()
    if token.startswith((",", "..")):  # punctuation of the sentence
        token = token.lstrip(",.")
    if _value(token, False) is None:  # 'the sides are 3,4,5': a list, whose last entry counts
        token = token.rpartition(",")[2]
    start = end - len(token)
    left = TAG.sub("", text[max(start - 30, 0) : start])
    if BEGAN.search(left) or GOES_ON.match(text, end) or RAISED.match(text, end):
        return None
    left = CURRENCY.sub("", left)
    before = left[-2:-1]
    is_dash = before in (")", "]") or (before.isascii() and before.isalnum())  # of 'pages 3-31'
    return _value(token, left.endswith("-") and not is_dash)


def _value(token, is_minus):
    """One text for a value: 1234.5 for '1,234.50'; None if the token is no such number."""
    head, dot, decimals = token.rstrip(".,").partition(".")
    first, *groups = head.split(",")
    if groups:
        if not 0 < len(first) < 4 or first[0] == "0":
            return None
        if any(len(group) != 3 for group in groups):
            return None
    whole = first + "".join(groups)
    if not whole + decimals or not DIGITS.issuperset(whole + decimals):
        return None
    if dot and not decimals:
        return None
    whole = whole.lstrip("0")
    decimals = decimals.rstrip("0")
    value = whole or "0"
    if decimals:
        value += "." + decimals
    if is_minus and value != "0":
        value = "-" + value
    return value
