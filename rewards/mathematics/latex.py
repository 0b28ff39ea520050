r"""Brings answers into one spelling.

Text only: `\dfrac12`, `\frac{1}{2}` and `1/2` are one spelling; to see that 2^{-1} is equal is a calculation.
Spellings of Chinese and European sources are read too: `答案：５元`, `]0;1,5[`, `\tg x`, `1\,000`.
"""

import re
from functools import lru_cache

from rewards.boxed import LABEL
from rewards.mathematics.tex import with_braces
from rewards.mathematics.units import split_unit

MAX_CHARS, MAX_NESTED = 1000, 200  # a longer answer, or with more that can be nested, stays as it is
NESTED = re.compile(r"[{(\[^_|]|\\[A-Za-z]+")

UNICODE = (
    r"°=^\circ π=\pi ∞=\infty √=\sqrt ∛=\sqrt[3] ∜=\sqrt[4] ∅=\emptyset Ø=\emptyset ×=\times ÷=\div ·=\cdot"
    r" ⋅=\cdot ∙=\cdot ∗=* ⁄=/ ∕=/ ±=\pm ≤=\le ≦=\le ⩽=\le ≥=\ge ≧=\ge ⩾=\ge ≠=\ne ∪=\cup ∈=\in ∣=| ∶=:"
    r" ½=\frac12 ⅓=\frac13 ⅔=\frac23 ¼=\frac14 ¾=\frac34 ⅕=\frac15 ⅙=\frac16 ⅛=\frac18 ℝ=\mathbb{R} 、=,"
    r" ℃=^\circ\mathrm{C} …=\ldots"
)
# lb, as "pounds" is read so
CURRENCIES = {r"\$": "dollar", "€": "euro", "£": "lb", "¥": "yuan", "￥": "yuan"}
UNICODE = {char: f"{latex} " for char, latex in (pair.split("=") for pair in UNICODE.split())}
UNICODE |= {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)}  # full width
UNICODE = str.maketrans(UNICODE | dict(zip("−–—﹣‑。【】", "-----.[]")))
RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
LOWERED = "₀₁₂₃₄₅₆₇₈₉"
ON_THE_LINE = str.maketrans(RAISED + LOWERED, "0123456789+-n" + "0123456789")
THIN = re.compile("(?<=\\d)[\u2009\u202f\u00a0’](?=\\d{3}(?!\\d))")  # thousands

COMMANDS = (  # one spelling of several, those of Europe too
    r"dfrac=\frac tfrac=\frac cfrac=\frac dbinom=\binom tbinom=\binom bar=\overline lt=< gt=> leq=\le"
    r" leqq=\le leqslant=\le geq=\ge geqq=\ge geqslant=\ge neq=\ne varnothing=\emptyset O=\emptyset lvert=|"
    r" rvert=| vert=| mid=| lbrace=\{ rbrace=\} arcctg=\arccot arccotg=\arccot arctg=\arctan ctg=\cot"
    r" cotg=\cot tg=\tan cosec=\csc lg=\log_{10} sh=\sinh ch=\cosh th=\tanh cth=\coth"
)
COMMANDS = dict(pair.split("=") for pair in COMMANDS.split())
NAMES = "(?:arc?)?(?:sin|cos|tan|cot|sec|csc)h?|sqrt|pi|log|ln|exp|gcd|lcm|min|max|infty"
# Rules: (pattern, replacement, what it does to an example), in this order
RULES = [
    (r"^\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}$", r"\1", r"\text{B} -> B"),
    (rf"^(?i:{LABEL})\s*(?:[:是为]\s*)+|^故?选\s*(?=[A-H]\b)", "", "故选 C -> C"),
    (
        r"(?<![\dA-Za-z)}\]])\{?\}?\^\{?(\d)\}?\s*\\sqrt(?![A-Za-z[])",
        r"\\sqrt[\1]",
        r"^3\sqrt{x} -> \sqrt[3]{x}",
    ),
    (r"\\(?:left|right)\s*\.", "", r"x\right. -> x"),
    (
        r"\\(?:boxed|fbox|left|right|[bB]igg?[lr]?|(?:display|text)style|[hv]line|rm)(?![A-Za-z])",
        "",
        r"\left(1,2\right) -> (1,2)",
    ),
    (r"(\\\\)\s*\[[-\d.]+\s*[a-z]{2}\]", r"\1", r"1\\[2pt]2 -> 1\\2"),  # rows of a matrix
    (r"(?<!\\)\\[()\[\]]", "", r"\(x\) -> x"),
    (
        rf"\\(?:(?:operatorname|mathrm|text)\s*\{{\s*)?({'|'.join(COMMANDS)})(?![A-Za-z])(?:\s*\}})?",
        lambda match: COMMANDS[match[1]] + " ",
        r"\operatorname{tg}x -> \tan x",
    ),
    (r"\\not *=", r"\\ne ", r"x\not=1 -> x\ne 1"),
    (r"\.{3,}", r"\\ldots ", r"1,2,...,9 -> 1,2,\ldots ,9"),
    (r"(?<![\\A-Za-z])log_?(\d+)(?=\()", r"\\log_{\1}", r"log2(x) -> \log_{2}(x)"),
    (r"\\\{\s*\\\}", r"\\emptyset ", r"\{\} -> \emptyset "),
    (r"\\mathbb\s*\{?R\}?", r"(-\\infty,\\infty)", r"\mathbb{R} -> (-\infty,\infty)"),
    (r"\\math(?:rm|bf|it)\s+([A-Za-z])(?![A-Za-z])", r"\1", r"\mathrm A -> A"),
    (
        r"(?<=[\d.,])\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?",
        r"\\overline{\1\2\3}",
        r"0.\dot{1}2\dot{3} -> 0.\overline{123}",
    ),
    (
        r"(?:\\\{\s*\\begin\{array\}\s*\{l\}|(?:\\\{\s*)?\\begin\{cases\})([^&]*?)\\end\{(?:array|cases)\}",
        lambda match: match[1].replace("\\\\", ", "),
        r"\begin{cases}x=1\\y=2\end{cases} -> x=1, y=2",
    ),
    (
        r"\\(begin|end)\s*\{(?:[pb]|small)?(?:matrix|array)\}(?:\s*\{[lcr|\s]*\})?",
        r"\\\1{pmatrix}",
        r"\begin{array}{cc} -> \begin{pmatrix}",
    ),
    (
        r"((?:sin|cos|tan|cot|sec|csc)\s{0,9}\(?)(\d{1,9}(?:\.\d{1,9})?)\s{0,9}\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?",
        r"\1\\frac{\2\\pi}{180}",
        r"\sin 30^\circ -> \sin \frac{30\pi}{180}",
    ),
    (r"\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])", " ", r"90^{\circ} -> 90 "),
    (r"(?<!\d)0\{,\}(?=\d)", "0.", "0{,}5 -> 0.5"),
    (r"(?<=\d)\{,\}(?=\d)(?!\d{3}(?!\d))|(?<=\d),(?=\\overline)", ".", "3{,}14 -> 3.14"),
    (r"(?<=\d)(?: ?\{, ?\}|,\s*\\!|\\[,;: ]|[~'])\s*(?=\d{3}(?!\d))", "", r"10\,000 -> 10000"),
    (r"(?<!\\)\\[,;:>! ]|(?<!\A)~|\\q?quad(?![A-Za-z])", " ", r"a\quad b\;c -> a  b c"),
    (r" +", " ", "a  b -> a b"),
]
WORD_RULES = [  # when the units and the \text commands are gone
    (
        r" +",
        " ",
        "a  b -> a b",
    ),  # CAREFUL: first, as the time of a rule below grows with the cube of the blanks
    (rf"(?<![\\A-Za-z])({NAMES})(?![A-Za-z])", r"\\\1 ", r"sqrt(2) -> \sqrt (2)"),
    (r"\*\*", "^", "x**2 -> x^2"),
    (r"<=", r"\\le ", r"x<=1 -> x\le 1"),
    (r">=", r"\\ge ", r"x>=1 -> x\ge 1"),
    (r"!=", r"\\ne ", r"x!=1 -> x\ne 1"),
    (r"(?<=[①-⑳]),? ?(?=[①-⑳])", "", "①, ② -> ①②"),
    (
        r"^(-?\d{1,3}) (\d{3}(?: \d{3})*)(?![ \d])",
        lambda match: match[0].replace(" ", ""),
        "1 000 000 -> 1000000",
    ),
    (r"^-?\d{1,3}(?:\.\d{3}){2,}$", lambda match: match[0].replace(".", ""), "1.000.000 -> 1000000"),
    (r"^(-?\d+)[.,](\d*)\((\d+)\)$", r"\1.\2\\overline{\3}", r"0,1(6) -> 0.1\overline{6}"),
    (r"(?<![\d.])(?=\.\d)", "0", ".5 -> 0.5"),
]
NUMBER_RULES = [  # when all arguments have braces
    (r"(?<![A-Za-z\\}]) ?C ?_\{(\d+)\}\^\{(\d+)\}", r"\\binom{\1}{\2}", r"C_{5}^{2} -> \binom{5}{2}"),
    (r"(?<![\d.^_/}])(\d+) */ *(\d+)(?![\d.^_!/])", r"\\frac{\1}{\2}", r"1/2 -> \frac{1}{2}"),
    (r"(\.\d*?)0+(?!\d|\\overline)", r"\1", "1.50 -> 1.5"),
    (r"(?<=\d)\.(?![\d.]|\\overline)", "", "1. -> 1"),
    (r"(?<![\d.])(?<!\\overline\{)0+(?=\d)", "", "007 -> 7"),
    (r"^\+", "", "+1 -> 1"),
    (r" +", " ", "a  b -> a b"),
    (r"^[({](\d+)[)}](?=_\{\d+\}$)", r"\1", "(101)_{2} -> 101_{2}"),
    (r"^[a-z] ?\\in ?(?=\\\{)", "", r"x\in \{1,2\} -> \{1,2\}"),
]
RAISED_TEXT = re.compile(f"[{RAISED}]+")
LOWERED_TEXT = re.compile(f"[{LOWERED}]+")
JOINED = r"\s*,?\s*(?:(?<![\\A-Za-z])%s(?![A-Za-z])|\b(?:%s)\b|[%s])\s*"
OR = re.compile(JOINED % ("or", "oder|ou|или", "或"))
AND = re.compile(JOINED % ("and", "und|et|и", "和与且"))
INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
SEMICOLONS = re.compile(r"[(\[\]][^()\[\]]*;[^()\[\]]*[)\]\[]|^[^()\[\]]*;[^()\[\]]*$")
INSIDE = r"(?:[^()\[\]]|\([^()]*\)|\\sqrt\[[^\]]*\])*"
INTERVAL = re.compile(rf"((?<!sqrt)[(\[]|\](?!\{{))({INSIDE},{INSIDE})([)\]]|(?<!sqrt)\[)")
SET = re.compile(r"\\\{[a-z](?:\|(?=[^|]*$)|:)(.*)\\\}")  # \{x|x>1\}
THOUSANDS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:,\d{3})+(?!\d)")
# The blanks that say nothing: all but those between two digits or two letters.
BLANK = re.compile(r" (?![A-Za-z\d])|(?<![A-Za-z\d]) |(?<=\d) (?!\d)|(?<=[A-Za-z]) (?![A-Za-z])")


def normalize(answer):
    r"""(value, unit) of an answer: (r"\frac{1}{2}", "cm") of r"$\dfrac12\text{ centimeters}$"."""
    return _normalize(answer) if len(answer) <= MAX_CHARS else _normalize.__wrapped__(answer)


@lru_cache(maxsize=1024)  # the same ground truth comes with every response of a group
def _normalize(answer):
    text = answer.replace("\\boxed", "").strip(" \n$")
    if text.endswith("\\"):  # of 5\$, or a slip
        text = text.rstrip("\\") + ("\\$" if answer.rstrip(" \n").endswith("\\$") else "")
    text = _bare(text if text.isascii() else _ascii(text))
    if len(text) > MAX_CHARS or len(NESTED.findall(text)) > MAX_NESTED:
        return text, ""
    text = SEMICOLONS.sub(_decimals, _replace(" ".join(text.split()), RULES))
    unit = next((CURRENCIES[sign] for sign in CURRENCIES if sign in text), "")
    for sign in [*CURRENCIES, "$"]:
        text = text.replace(sign, " ")
    text = text.lstrip().rstrip(" .,")
    if text.endswith("%"):
        text = text.rstrip(" \\%")
        unit = "%"
    text, unit = split_unit(text, unit)
    joined = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if not {",", "(", "["} & {*joined} and "\\{" not in joined:  # (1,234) is a pair
        text = joined
    text = _replace(text, WORD_RULES)
    text = OR.sub(r"\\cup " if INEQUALITY.search(text) else ",", text)
    text = with_braces(AND.sub(",", text).replace(";", ","))
    text = BLANK.sub("", _replace(text, NUMBER_RULES))
    match = SET.fullmatch(text)
    text = match[1] if match and INEQUALITY.search(match[1]) else text
    return _bare(INTERVAL.sub(_interval, text)), unit


def _ascii(text):
    """Text with LaTeX for characters that have it."""
    text = RAISED_TEXT.sub(lambda match: f"^{{{match[0].translate(ON_THE_LINE)}}}", text)
    text = LOWERED_TEXT.sub(lambda match: f"_{{{match[0].translate(ON_THE_LINE)}}}", text)
    return THIN.sub("", text).translate(UNICODE)


def _decimals(match):
    """Of numbers that semicolons part: a comma between digits is a decimal point."""
    return re.sub(r"(?<=\d),(?=\d)", ".", match[0])


def _interval(match):
    """]0,1[ as (0,1)."""
    opener = match[1].replace("]", "(")
    closer = match[3].replace("[", ")")
    return opener + match[2] + closer


def _bare(text):
    """The text without braces around it, and without parentheses unless they hold a pair."""
    text = _unwrap(text, "{", "}")
    return text if "," in text or ";" in text else _unwrap(text, "(", ")")


def _unwrap(text, opener, closer):
    """Take off the pairs of brackets that enclose the whole text."""
    pairs = depth = min(len(text) - len(text.lstrip(opener)), len(text) - len(text.rstrip(closer)))
    for char in text[pairs : len(text) - pairs] if pairs else "":
        depth += (char == opener) - (char == closer)
        pairs = min(pairs, depth)
    return text[pairs : len(text) - pairs].strip() if pairs > 0 else text


def _replace(text, rules):
    for pattern, replacement, _ in rules:
        text = re.sub(pattern, replacement, text)
    return text
