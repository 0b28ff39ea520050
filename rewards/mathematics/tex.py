r"""Writes the braces and parentheses that TeX and print let one leave out: \frac12, x^2, \sqrt\pi, \sin 2x.

- A command takes one token as its argument: \frac12x is \frac{1}{2}x, \sqrt ab is \sqrt{a}b.  But a number
  stays whole where no one means its first digit: \sqrt10 and x^12.  The base of \log_28 is 2, of \log_10x it
  is 10.
- A function takes the factors up to the next sign, bracket or function: \ln 2x/3 is \ln(2x)/3.  Only parts of
  \pi are divided first: \sin 2\pi/3.
"""

import re

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|.", re.DOTALL)
CLOSERS = {"{": "}", "(": ")]", "[": ")]"}
ARGUMENTS = {"\\frac": 2, "\\binom": 2}
ARGUMENTS |= dict.fromkeys(["\\sqrt", "\\overline", "\\pmod", "\\mathbb", "^", "_"], 1)
BASIC = "sin", "cos", "tan", "cot", "sec", "csc"
TRIGONOMETRIC = {f"\\{arc}{f}{h}" for arc in ("", "arc", "ar") for f in BASIC for h in ("", "h")}
FUNCTIONS = TRIGONOMETRIC | {"\\ln", "\\log", "\\exp"}
FACTOR = re.compile(  # what can be part of a function's argument
    r"[\dA-Za-z{^_!]|\\(?:frac|sqrt|binom|pi|infty|alpha|beta|gamma|delta|theta|phi|varphi|omega|lambda|mu)"
)
LAST_DIGITS = re.compile(r"[-+*/=<>,)\]}|]|\\(?:cdot|times|le|ge|ne)")  # what follows \log_28


def with_braces(text):
    """The text with all arguments in braces, and those of functions in parentheses."""
    tokens = TOKEN.findall(text)[::-1]
    parts = []
    while tokens:
        parts.append(_item(tokens))
    return "".join(parts)


def _item(tokens):
    """Text of the next token (the list is in reverse) with all that belongs to it."""
    token = text = tokens.pop()
    if token in CLOSERS:
        while tokens and tokens[-1] not in CLOSERS[token]:
            text += _item(tokens)
        return text + (tokens.pop() if tokens else "")
    if token in FUNCTIONS:
        return _function(token, tokens)
    if token == "\\sqrt" and _next(tokens) == "[":
        text += _item(tokens)
    for _ in range(ARGUMENTS.get(token, 0)):
        text += f"{{{_argument(tokens, token)}}}"
    return text


def _next(tokens):
    """The next token that is no blank, or an empty text."""
    while tokens and tokens[-1] == " ":
        tokens.pop()
    return tokens[-1] if tokens else ""


def _argument(tokens, command):
    if not _next(tokens):
        return ""
    if tokens[-1].isdecimal() and ARGUMENTS[command] == 2:
        return _digit(tokens)
    text = _item(tokens)
    if text in "+-" and command == "^":
        return text + _argument(tokens, command)
    return text[1:-1] if text[0] + text[-1] in ("{}", "()") else text


def _digit(tokens):
    digits = tokens.pop()
    tokens.extend([digits[1:]] if digits[1:] else [])
    return digits[0]


def _function(name, tokens):
    text = name
    while _next(tokens) in ("^", "_"):
        text += _base(tokens) if name + tokens[-1] == "\\log_" else _item(tokens)
    if _next(tokens) in ("", "(", "["):
        return text
    argument = tokens.pop() if tokens[-1] in "+-" else ""
    if _next(tokens) in FUNCTIONS:
        argument += _item(tokens)
    while tokens and (tokens[-1] == " " or FACTOR.match(tokens[-1])):
        argument += _item(tokens)
    if name in TRIGONOMETRIC and "\\pi" in argument and re.fullmatch(r"/ ?\d+", "".join(tokens[:-3:-1])):
        argument += tokens.pop() + _next(tokens)
        tokens.pop()
    return f"{text}({argument})" if argument else text


def _base(tokens):
    """Of a logarithm: 2 in \\log_28, where nothing else can be the argument."""
    underscore = tokens.pop()
    digits = _next(tokens)
    after = "".join(tokens[-2:-1])
    if digits.isdecimal() and len(digits) > 1 and (not after or LAST_DIGITS.match(after)):
        return f"_{{{_digit(tokens)}}}"
    return f"_{{{_argument(tokens, underscore)}}}"
