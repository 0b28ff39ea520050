r"""Whether two answers of a mathematics problem are equal; shared by the scorers of mathematics.

Equal spellings (`latex.py`) and plain numbers are decided here.  The rest goes to `symbolic.py`, in a process
that is killed after TIMEOUT_S.  Rules:
- A unit counts only where both answers have one; 6% is 6 or 0.06.
- Words are compared as words, without regard to case.
- What is no formula, or is too long, equals only its own spelling.
"""

import re
from fractions import Fraction
from functools import lru_cache

from rewards.boxed import NO_TRUTH
from rewards.manager.worker import WorkerError, call_in_worker
from rewards.mathematics.latex import MAX_CHARS, normalize

# algebra sees no difference: letters in another hand, the order of a cross product
AS_SPELLED = re.compile(r"\\math(?:cal|bb|frak|scr)|\\vec.*\\times|\\times.*\\vec")
TIMEOUT_S = 2.0  # of a processor
DECIMAL = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")
FRACTION = re.compile(r"(-?)(\d*)\\frac\{(\d+)\}\{(0*[1-9]\d*)\}")
REPEATING = re.compile(r"(-?\d+\.(\d*))\\overline\{(\d+)\}")
# 0,5 or 1.234,56; "3, 4" and (1,2) are lists
DECIMAL_COMMA = re.compile(r"(?!\{)([^,(\[;]*\d),(\d*[1-9]\d*(?![\d,])[^,(\[;]*)")
WORDS = re.compile(r"[A-Za-z][A-Za-z ]+")
# CAREFUL: no quotes, and no dot but in a decimal. So what passes can name no attribute and hold no string,
# even if some library evaluated it.
FORMULA = re.compile(r"(?:[A-Za-z0-9\\{}()\[\]^_+\-*/=<>|,!&: ]|(?<=\d)\.(?=\d|\\overline))+")


def judge(answer, truth):
    """Result of a scorer, {score: 1.0 | 0.0, acc, pred}, for an answer (None: there is none)."""
    correct = answer is not None and equal(answer, str(truth))
    return {"score": float(correct), "acc": correct, "pred": spelling(answer or "")}


def spelling(answer):
    r"""One text for answers that are cheaply seen to be equal, as 1/2 for 0.5 and \frac12: one vote."""
    text, _ = normalize(answer)
    value = number(text)
    if value is not None:
        text = str(value)
    elif WORDS.fullmatch(text):
        text = text.lower()
    return text[:MAX_CHARS]


def equal(answer, truth):
    """Whether the answer equals the ground truth.  Never raises; what cannot be decided is not equal."""
    a, a_unit = normalize(answer)
    b, b_unit = normalize(truth)
    if "," in a and "," not in b:
        a, a_unit = normalize(with_point(answer))
    elif "," in b and "," not in a:
        b, b_unit = normalize(with_point(truth))
    if not a or b.lower() in NO_TRUTH or (a_unit and b_unit and a_unit != b_unit):
        return False
    x = number(a)
    y = number(b)
    if x is not None and y is not None:
        if (a_unit, b_unit) == ("%", ""):
            return x in (y, y * 100)
        if (a_unit, b_unit) == ("", "%"):
            return x in (y, y / 100)
        return x == y
    if a == b or (WORDS.fullmatch(a) and a.lower() == b.lower()):
        return True
    if AS_SPELLED.search(a + b) or not (FORMULA.fullmatch(a) and FORMULA.fullmatch(b)):
        return False
    return max(len(a), len(b)) <= MAX_CHARS and _same_meaning(a, b)


@lru_cache(maxsize=1024)  # many responses of a group have the same answer
def _same_meaning(a, b):
    try:
        return call_in_worker("rewards.mathematics.symbolic:equal", a, b, timeout_s=TIMEOUT_S) is True
    except (TimeoutError, WorkerError):  # a tower of powers; out of memory
        return False


def with_point(text):
    """A single number with a decimal comma, with a point; any other text as it is."""
    match = DECIMAL_COMMA.fullmatch(text.strip()[:MAX_CHARS])
    if not match:
        return text
    whole = re.sub(r"(?<=\d)\.(?=\d{3})", "", match[1])
    return f"{whole}.{match[2]}"


def number(text):
    """Exact value of a normalized decimal, repeating decimal, fraction or mixed number, or None."""
    if len(text) > MAX_CHARS:
        return None
    if DECIMAL.fullmatch(text):
        return Fraction(text)
    if match := REPEATING.fullmatch(text):
        sign = -1 if text[0] == "-" else 1
        period = Fraction(int(match[3]), 10 ** len(match[3]) - 1) / 10 ** len(match[2])
        return Fraction(match[1] + "0") + sign * period
    if match := FRACTION.fullmatch(text):
        value = int(match[2] or 0) + Fraction(int(match[3]), int(match[4]))
        return -value if match[1] else value
    return None
