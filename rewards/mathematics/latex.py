r"""Finds the answer in a response, and brings answers into one spelling.

Text only: `\dfrac12`, `\frac{1}{2}` and `1/2` are one spelling; to see that 2^{-1} is equal is a calculation.
"""

import re

MAX_CHARS, MAX_NESTED = 1000, 200  # a longer answer, or with more that can be nested, stays as it is
NESTED = re.compile(r"[{(\[^_]|\\(?:frac|sqrt|binom)")

BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s{0,9}|\\(?!\\?(?:boxed|fbox)).|[{}]", re.DOTALL)
BARE_ANSWER = re.compile(r"[^\s${}]{1,99}(?:\{[^{}$]{0,99}\}){0,2}")  # of \boxed 5, \boxed\frac{1}{2}

UNICODE = (
    r"°=^\circ π=\pi ∞=\infty √=\sqrt ∅=\emptyset ×=\times ÷=\div ·=\cdot ⋅=\cdot ±=\pm ≤=\le ≥=\ge ≠=\ne"
    r" ∪=\cup ∈=\in ²=^2 ³=^3 ½=\frac12 ¼=\frac14 ¾=\frac34 €= £= ¥="
)
UNICODE = {char: f"{latex} " for char, latex in (pair.split("=") for pair in UNICODE.split())}
UNICODE |= dict(zip("０１２３４５６７８９（）［］，．：；％＝＋－−–", "0123456789()[],.:;%=+---"))
UNICODE = str.maketrans(UNICODE)

NAMES = "(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|sqrt|pi|log|ln|exp|gcd|lcm|min|max|infty"
RULES = [  # (pattern, replacement), in this order
    (r"\\(?:boxed|fbox|left|right|[bB]igg?[lr]?|displaystyle)(?![A-Za-z])", ""),
    (r"(?<!\\)\\[()\[\]]", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\(le|ge|ne)(?:q|qslant)(?![A-Za-z])", r"\\\1 "),
    (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\[lr]vert(?![A-Za-z])", "|"),
    (r"\\(begin|end)\s*\{[pb]?(?:matrix|array)\}(?:\s*\{[lcr|\s]*\})?", r"\\\1{pmatrix}"),
    (
        r"((?:sin|cos|tan|cot|sec|csc)\s{0,9}\(?)(\d{1,9})\s{0,9}\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?",
        r"\1\\frac{\2\\pi}{180}",
    ),
    (r"\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])", " "),
    (r"(?<=\d)(?:\{,\}|,\s*\\!|\\[,;: ]|~)\s*(?=\d{3}(?!\d))", ""),  # thousands, as LaTeX writes them
    (r"\\!", ""),
    (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])", " "),
    (r" +", " "),
]
WORD_RULES = [  # when the units and the \text commands are gone
    (r" +", " "),  # CAREFUL: first, as the time of a rule below grows with the cube of the blanks in a row
    (rf"(?<![\\A-Za-z])({NAMES})(?![A-Za-z])", r"\\\1 "),
    (r"\s*;\s*|\s*,?\s*(?<![\\A-Za-z])(?:or|and)(?![A-Za-z])\s*", ","),
    (r"\*\*", "^"),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"!=", r"\\ne "),
    (r"(?<![\d.^_/}])(\d+) */ *(\d+)(?![\d.^_!/])", r"\\frac{\1}{\2}"),
    (r"^(-?\d{1,3}) (\d{3}(?: \d{3})*)$", lambda match: match[0].replace(" ", "")),
    (r"(?<![\d.])(?=\.\d)", "0"),
    (r"(\.\d*?)0+(?!\d)", r"\1"),
    (r"(?<=\d)\.(?![\d.]|\\overline)", ""),
    (r"(?<![\d.])0+(?=\d)", ""),
    (r"^\+", ""),
    (r" +", " "),
]
RULES, WORD_RULES = ([(re.compile(p), new) for p, new in rules] for rules in (RULES, WORD_RULES))
THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")
# The blanks that say nothing: all but those between two digits or two letters.
BLANK = re.compile(r" (?![A-Za-z\d])|(?<![A-Za-z\d]) |(?<=\d) (?!\d)|(?<=[A-Za-z]) (?![A-Za-z])")

TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname\*?)\s*\{([^{}]*)\}"
)
VALUE = re.compile(r"\d|\\(?!text|math|mbox)")  # what has a unit
UNIT = (  # any words but those that make another value
    r"(?!.*\b(?:or|and|to|not|more|less|most|least|dozen|half|halves|thirds?|plus|minus|times|over|squared|cubed"
    r"|factorial)\b)"
)
POWER = r"\s*(?:\^\s*\{?\s*([23])\s*\}?)?$"
TEXT_UNIT = re.compile(
    rf"(?<![_^{{\s])\s*\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{{(?!\s*[iej]\s*\}}){UNIT}([^{{}}\d]+)\}}{POWER}"
)
PLAIN_UNIT = re.compile(
    r"(?<=[\d)}\]])\s*(?=\s[A-Za-z.]{3}|(?:[mck]m|in|ft|yd|mi|kg|lb|oz|min|sec|hr|mph)(?:s|\b))"
    rf"{UNIT}([A-Za-z.\s/]+){POWER}"
)
UNIT_NAMES = (
    "millimeter=mm centimeter=cm meter=m kilometer=km inch=in inche=in foot=ft feet=ft yard=yd mile=mi gram=g"
    " kilogram=kg pound=lb ounce=oz hour=hr minute=min second=sec percent=% degree= unit= square= sq= cubic="
)
UNIT_NAMES = dict(pair.split("=") for pair in UNIT_NAMES.split())
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|.", re.DOTALL)
ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "^": 1, "_": 1}
CLOSERS = {"{": "}", "(": ")]", "[": ")]"}


def last_boxed(text):
    r"""Content of the \boxed{} or \fbox{} that is closed last (of nested ones the outer one), or None.

    `\boxed 5` counts too.  A box that is never closed does not.
    """
    best, opens, stack = None, -1, []
    for token in BOX_TOKEN.finditer(text):
        if token[0] == "{":
            stack.append(token.end() if token.start() == opens else None)
        elif token[0] == "}":
            start = stack.pop() if stack else None
            best = (start, token.start()) if start else best
        elif token[0].startswith(("\\boxed", "\\fbox")):
            opens = token.end()
            bare = BARE_ANSWER.match(text, opens)
            best = bare.span() if bare else best
    return best and text[slice(*best)]


def normalize(answer):
    r"""(value, unit) of an answer: (r"\frac{1}{2}", "cm") of r"$\dfrac12\text{ centimeters}$"."""
    text = _bare(answer.replace("\\boxed", "").strip(" \n$"))
    if len(text) > MAX_CHARS or len(NESTED.findall(text)) > MAX_NESTED:
        return text, ""
    text = _replace(" ".join(text.translate(UNICODE).split()), RULES)
    unit = "dollar" if r"\$" in text else ""
    text = text.replace(r"\$", " ").replace("$", " ").lstrip().rstrip(" .,")
    if text.endswith("%"):
        text, unit = text.rstrip(" \\%"), "%"
    for pattern in (TEXT_UNIT, PLAIN_UNIT):
        match = pattern.search(text)
        if match and VALUE.search(text, 0, match.start()):
            scale, unit = _unit(match, unit)
            text = text[: match.start()] + scale
        text = TEXT.sub(r" \1 ", text).strip()
    joined = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if not {",", "(", "["} & {*joined}:  # (1,234) is a pair
        text = joined
    return _bare(BLANK.sub("", _items(TOKEN.findall(_replace(text, WORD_RULES))[::-1]))), unit


def _bare(text):
    """The text without braces around it, and without parentheses unless they hold a pair."""
    text = _unwrap(text, "{", "}")
    return text if "," in text else _unwrap(text, "(", ")")


def _unwrap(text, opener, closer):
    """Take off the pairs of brackets that enclose the whole text."""
    pairs = depth = min(len(text) - len(text.lstrip(opener)), len(text) - len(text.rstrip(closer)))
    for char in text[pairs : len(text) - pairs] if pairs else "":
        depth += (char == opener) - (char == closer)
        pairs = min(pairs, depth)
    return text[pairs : len(text) - pairs].strip() if pairs > 0 else text


def _replace(text, rules):
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _unit(match, unit):
    """(factor of words such as million, name of the unit) of a match of a unit pattern."""
    words = [word.rstrip("s") for word in match[1].lower().replace(".", "").split()]
    factor = rf"\cdot 10^{{{SCALES[words.pop(0)]}}}" if words and words[0] in SCALES else ""
    power = match[2] or ("2" if {"square", "sq"} & {*words} else "3" if "cubic" in words else "")
    name = " ".join(filter(None, (UNIT_NAMES.get(word, word) for word in words)))
    return factor, name + power if name else unit


def _items(tokens, closers=""):
    r"""Text of the tokens (last one first) up to a closer, with the braces that TeX lets one leave out."""
    text = ""
    while tokens and tokens[-1] not in closers:
        text += _item(tokens)
    return text + (tokens.pop() if tokens else "")


def _item(tokens):
    token = text = tokens.pop()
    if token in CLOSERS:
        text += _items(tokens, CLOSERS[token])
    if token == "\\sqrt" and tokens and tokens[-1] == "[":
        text += _item(tokens)
    for _ in range(ARGUMENTS.get(token, 0)):
        text += f"{{{_argument(tokens, token)}}}"
    return text


def _argument(tokens, command):
    """Next argument: a group, or the next token; numbers are split as TeX does, but not in 2^10."""
    while tokens and tokens[-1] == " ":
        tokens.pop()
    if not tokens:
        return ""
    if tokens[-1].isdecimal() and command.startswith("\\"):
        digits = tokens.pop()
        tokens.extend([digits[1:]] if digits[1:] else [])
        return digits[0]
    text = _item(tokens)
    if text in "+-" and command == "^":
        return text + _argument(tokens, command)
    return text[1:-1] if text[0] + text[-1] in ("{}", "()") else text
