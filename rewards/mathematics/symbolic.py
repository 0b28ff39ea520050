r"""Compares two normalized formulas by what they mean; imported only in a process of `manager/worker.py`.

- Lists and sets count in any order, pairs and intervals in theirs with their brackets; \pm is two entries.
- Where only one formula is an equation, its right side counts: x = 5 is 5, while 7 = 5 is not.
- Expressions are equal if their values are: exactly for rational numbers, to DIGITS digits for others, with
  variables at several points where both are real.  A sum, an integral or a limit is a task and no answer.
- Relations are equal if their two sides differ by proportional amounts.  The rest is left to math-verify.
No text is evaluated: latex2sympy2 parses with a grammar (sympify, parse_expr, math_verify.parse call eval()).
"""

import logging
import random
import re
from functools import lru_cache, reduce
from itertools import combinations

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from math_verify import verify

from rewards.mathematics.equivalence import number

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time-out; our caller has

DIGITS = 50
POINTS, POINTS_NEEDED = 8, 3  # where expressions with variables are compared, where they must be defined
INTEGERS = {"n", "k", "m"}  # variables that may be none but integers
MATRICES = sympy.MatrixBase | sympy.MatrixExpr
VALUES = sympy.Expr | sympy.MatrixBase
RELATIONS = sympy.core.relational.Relational | sympy.And
TASKS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.")
OPENERS = ("{", "(", "[", "\\{")
CLOSERS = ("}", ")", "]", "\\}")
RELATION = re.compile(r"[<>=]|\\(?:le|ge|ne|in)(?![A-Za-z])")
# What an equation may give the value of: x, \theta, x_{1}, f(x), total, (x,y), |AB|, \frac{AB}{CD}, V:W
NAME = re.compile(
    r"\\?[A-Za-z]+(?:_\{\\?\w+\})?(?:\([a-z](?:,[a-z])*\))?|\([a-z](?:,[a-z])+\)|\|[A-Z]{2}\|"
    r"|\\frac\{[A-Z]{2}\}\{[A-Z]{2}\}|[A-Z]+(?:_\{\w+\})?:[A-Z]+(?:_\{\w+\})?"
)
VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]|\\(?:alpha|beta|gamma|theta|phi|omega|lambda|mu)(?![A-Za-z])")
WORD = re.compile(r"(?<![\\A-Za-z])(?!pmatrix\})[A-Za-z]{4,}")
SENTENCE = re.compile(  # 59 no, not x
    r"\d.*(?<![\\A-Za-z])[a-z]{2}|(?<![\\A-Za-z])[a-z]{2}.*\d|(?<![\\A-Za-z])(?:not?|never|reject|discard) "
)
NO_VALUE = re.compile(
    r"\d \d|\d_|\\approx|\\equiv|!!|(?<!pmatrix\})\^\{T\}"  # 1 9 is not 1*9, 12_{8} no 12, x^{T} not x
    r"|(?<![\dA-Za-z.])0[bx][\dA-F]|^(?:\d+/\d+/\d+|\d{4}-\d\d?-\d\d?|\d\d?-\d\d?-\d{4})$"  # 0x10, dates
    r"|(?<![\\A-Za-z])(?:[A-Za-z]\^\{\(\w\)|[f-hy]\^\{-1\}\()"  # x^{(2)} is no x^2, f^{-1}(x) an inverse
    r"|\\\{[A-Za-z]\\\}|(?<!sqrt)\[(?:[A-Za-z]|\\frac\{[A-Za-z]\}\{\d+\})\]"  # \{x\}, [x]
)
NO_ELEMENT = re.compile(r"\\\{(?:\\emptyset|[A-Za-z])\\\}")  # \{\emptyset\} is not empty, \{x\} a part of x
LABEL = re.compile(r"\((\d|i{1,3}|iv|vi*|[a-d])\)(?=[-\dA-Za-z]|\\(?:frac|sqrt|pi|\{))")
LETTERS = re.compile(r"[A-Z]{2,}")  # an order of letters, or a Roman number
REPEATING = re.compile(r"\d+\.\d*\\overline\{\d+\}")
DECIMAL = re.compile(r"(\d+)\.(\d+)")
SCIENTIFIC = re.compile(r"^(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})$")
PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
PURE_FRACTION = re.compile(r"\\frac\{\d+\}\{\d+\}")
IMAGINARY = sympy.Symbol("i")


def equal(answer, truth):
    """Whether two formulas are equal; False where no decision is possible."""
    if answer == truth:
        return True
    if "\\not" in TOKEN.findall(answer + truth) or (LETTERS.fullmatch(answer) and LETTERS.fullmatch(truth)):
        return False
    x = number(answer)
    y = number(truth)
    if x is not None and y is not None:
        return x == y

    entries = _entries(answer)
    others = _entries(truth)
    if len(entries) > 1 or len(others) > 1:
        return _same_list(entries, others)
    if entries != [answer] or others != [truth]:  # a set of one
        has_no_element = NO_ELEMENT.fullmatch(answer) or NO_ELEMENT.fullmatch(truth)
        return not has_no_element and equal(entries[0], others[0])
    if LABEL.match(answer) or LABEL.match(truth):
        return _all_equal(LABEL.split(answer)[1:], LABEL.split(truth)[1:])
    entries = _split(answer, "\\cup")
    others = _split(truth, "\\cup")
    if len(entries) > 1 and len(others) > 1:
        return _match(entries, others)

    sides = _split(answer, "=", "\\in")
    others = _split(truth, "=", "\\in")
    if len(sides) > 1 and len(others) == 1 and "\\cup" not in sides[0]:
        values = [side for side in sides if side and not _is_symbolic(side)]
        return all(equal(value, truth) for value in values or sides[-1:])
    if len(sides) == 1 and len(others) > 1:
        return bool(NAME.fullmatch(others[0])) and equal(answer, others[-1])
    if not RELATION.search(answer + truth):
        entries = _coordinates(answer)
        others = _coordinates(truth)
        if len(entries) > 1 and len(others) > 1:
            same_brackets = answer[0] == truth[0] and answer[-1] == truth[-1]
            return same_brackets and _all_equal(entries, others)
    entries = _split(answer, ":")
    others = _split(truth, ":")
    if len(entries) > 2 or len(others) > 2:
        return _same_ratios(entries, others)
    return _same_meaning(answer, truth)


def _all_equal(entries, others):
    return len(entries) == len(others) and all(map(equal, entries, others))


def _same_list(entries, others):
    """Whether two lists are equal: in any order, but where one of them names its entries in order."""
    if _are_named(entries) == _are_named(others):
        return _match(entries, others)
    is_free = len(entries) > 1 and not _are_named(entries)  # a list in the order of the truth's names
    if len(entries) == 1 and entries[0][0] == "(":
        entries = _coordinates(entries[0])
    if len(others) == 1 and others[0][0] == "(":
        others = _coordinates(others[0])
    names = [entry.partition("=")[0] for entry in entries + others if "=" in entry]
    in_order = is_free or names == sorted(names)  # y=1,x=2 is not (1,2)
    return in_order and _all_equal(entries, others)


def _same_ratios(entries, others):
    """Whether 1:2:3 and 2:4:6 are the same: each pair by its cross products."""
    if len(entries) != len(others):
        return False
    for i, j in combinations(range(len(entries)), 2):
        if not equal(f"({entries[i]})({others[j]})", f"({entries[j]})({others[i]})"):
            return False
    return True


def _split(text, *separators):
    """Parts of the text between the separators that are outside brackets."""
    parts = [""]
    depth = 0
    for token in TOKEN.findall(text):
        depth += (token in OPENERS) - (token in CLOSERS)
        if depth == 0 and token in separators:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def _entries(text):
    r"""Entries of a list or of a set in \{ \}, each \pm taken both ways; one entry if it is neither."""
    if text.startswith("\\{") and text.endswith("\\}") and len(_split(text[2:-2], "\\}")) == 1:
        text = text[2:-2]
    entries = []
    for entry in _split(text, ","):
        if PLUS_MINUS.search(entry):
            entries += [PLUS_MINUS.sub(sign, entry).lstrip("+") for sign in "+-"]
        else:
            entries.append(entry)
    return _solutions(entries)


def _solutions(entries):
    """x=1,y=2,x=3,y=4 as two entries, x=1,y=2 and x=3,y=4; any others as they are."""
    names = [_name(entry) for entry in entries if "=" in entry]
    size = len(set(names))
    if len(names) < len(entries) or not 1 < size < len(entries):
        return entries
    solutions = []
    for i in range(0, len(entries), size):
        if len(set(names[i : i + size])) < size:
            return entries
        solutions.append(",".join(entries[i : i + size]))
    return solutions


def _coordinates(text):
    """Entries of a pair, a longer tuple or an interval; one entry if the text is none."""
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        return _split(text[1:-1], ",")
    return [text]


def _name(equation):
    """x of x_1=2."""
    return equation.partition("=")[0].partition("_")[0]


def _are_named(entries):
    """Whether each entry gives another quantity its value: x=1,y=2, but not x_1=1,x_2=2."""
    names = [_name(entry) for entry in entries if "=" in entry and len(_split(entry, ",")) == 1]
    return len(set(names)) == len(names) == len(entries)


def _match(entries, others, same=equal):
    """Whether the entries are the same in some order."""
    others = list(others)
    for entry in entries:
        for i, other in enumerate(others):
            if same(entry, other):
                del others[i]
                break
        else:
            return False
    return not others


def _is_symbolic(side):
    """Whether the side of an equation only names what is computed: x, m+n, f(2), total; but no 59 then x."""
    return bool(VARIABLE.search(side)) and not SENTENCE.search(side)


class _Parser(_Latex2Sympy):
    r"""CAREFUL: the library reads any integers side by side, 2(3) or \frac42\frac12, as a mixed number."""

    def convert_postfix_list(self, arr, i=0):
        texts = [item.getText() for item in arr]
        factors = [self.convert_postfix(item) for item in arr]
        for k in reversed(range(1, len(arr))):
            if texts[k - 1].isdecimal() and PURE_FRACTION.fullmatch(texts[k]):
                factors[k - 1] += factors.pop(k)
        return reduce(self.mul_flat, factors)

    def parse_number(self, text):
        return sympy.Integer(text)  # the library's sympy.Number(text) would end in eval()

    def convert_binom(self, binom):
        return sympy.binomial(self.convert_expr(binom.upper), self.convert_expr(binom.lower), evaluate=False)


@lru_cache(maxsize=256)  # the same ground truth comes with every response of a group
def _parse(text):
    """The sympy object of a formula.  Raises many exceptions for what is none."""
    if WORD.search(text) or NO_VALUE.search(text):
        raise ValueError(f"{text} is text")
    text = SCIENTIFIC.sub(r"\1\\cdot10^{\2}", text)
    # Decimals become fractions, which are exact: rounding makes 0.0000001 equal to 0.
    text = REPEATING.sub(lambda m: f"({number(m[0])})", text)
    text = DECIMAL.sub(lambda m: rf"{{\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}}}", text)
    formula = _Parser(is_real=None, config=ConversionConfig(lowercase_symbols=False)).parse(text)
    functions = [part for part in sympy.preorder_traversal(formula) if isinstance(part, sympy.Function)]
    of_matrix = any(isinstance(x, MATRICES) for function in functions for x in function.args)
    if of_matrix or formula.has(*TASKS):
        raise ValueError(f"{text} is not computed")
    return formula


def _same_meaning(answer, truth):
    try:
        x = _parse(answer)
        y = _parse(truth)
        if isinstance(x, VALUES) and isinstance(y, VALUES):
            return _same_value(x, y)
        if isinstance(x, RELATIONS) and isinstance(y, RELATIONS):
            return _match(_relations(x), _relations(y), _same_relation)
        return verify(y, x, allow_set_relation_comp=True, timeout_seconds=None)
    except Exception:  # what the grammar raises, and sympy almost anything, for what makes no sense
        return False


def _relations(x):
    """The two relations of 1 < x < 2."""
    return x.args if isinstance(x, sympy.And) else [x]


def _same_relation(x, y):
    """Whether the differences of the two sides are proportional, for inequalities with a positive factor."""
    if x.rel_op.replace(">", "<") != y.rel_op.replace(">", "<"):
        return False
    if x.free_symbols != y.free_symbols or not x.free_symbols:  # f(1)=2 has none
        return False
    x_gap = _gap(x)
    y_gap = _gap(y)
    point = next(_points(x.free_symbols))
    x_there = x_gap.xreplace(point)
    y_there = y_gap.xreplace(point)
    if hasattr(x, "gts") and not sympy.N(x_there * y_there).is_positive:
        return False
    return y_there != 0 and _same_value(x_gap * y_there, y_gap * x_there)


def _gap(relation):
    """The greater side of a relation minus the less, or the left minus the right."""
    if hasattr(relation, "gts"):
        return relation.gts - relation.lts
    return relation.lhs - relation.rhs


def _same_value(x, y):
    x = x.doit()
    y = y.doit()
    if isinstance(x, MATRICES) or isinstance(y, MATRICES):
        same_shape = getattr(x, "shape", None) == getattr(y, "shape", None)
        return same_shape and all(map(_same_value, sympy.Matrix(x), sympy.Matrix(y)))
    symbols = (x.free_symbols | y.free_symbols) - {IMAGINARY}
    if not symbols:
        unit = {IMAGINARY: sympy.I}
        return _same_number(x.xreplace(unit), y.xreplace(unit)) is True
    is_complex = x.has(IMAGINARY, sympy.I) or y.has(IMAGINARY, sympy.I)
    is_absolute = x.has(sympy.Abs) != y.has(sympy.Abs)  # sqrt(|x|) is more than sqrt(x)
    agreed = 0
    for i, point in enumerate(_points(symbols)):
        if i >= POINTS and agreed >= POINTS_NEEDED:
            break
        verdict = _same_number(x.xreplace(point), y.xreplace(point))
        if verdict:
            agreed += 1
        elif is_complex:
            if verdict is False:
                return False
        else:
            defined = [_is_real(x, point), _is_real(y, point)]
            if (verdict is False and all(defined)) or (is_absolute and any(defined)):
                return False
    return agreed >= POINTS_NEEDED


def _points(symbols):
    """Values for the variables: POINTS of all signs and sizes, more for small domains and integers."""
    rng = random.Random(0)
    symbols = sorted(symbols, key=str)

    def point(scale, signs=(1,)):
        # CAREFUL: odd over even, as (-1)^x is real for odd over odd
        values = {symbol: rng.choice(signs) * (2 * rng.randint(1, 99) + 1) * scale / 2 for symbol in symbols}
        return values | {IMAGINARY: sympy.I}

    small = sympy.Rational(1, 37)
    unit = sympy.Rational(1, 101)
    middle = sympy.Rational(101, 103)
    for _ in range(4):
        yield point(small)
    yield point(small, [-1])
    yield point(small, [1, -1])
    yield point(small * 1001)
    yield point(small * 1001, [-1])
    for _ in range(3):
        yield point(unit)
        yield point(middle)
    if {str(symbol) for symbol in symbols} <= INTEGERS:
        for _ in range(9):
            yield {symbol: sympy.Integer(rng.randint(1, 12)) for symbol in symbols}


def _is_real(x, point):
    """Whether an expression and all its parts are real at a point: sqrt(a)*sqrt(b) is not where a, b < 0."""
    parts = (part for part in sympy.preorder_traversal(x) if isinstance(part, sympy.Pow | sympy.Function))
    return all(sympy.N(sympy.real_root(part.xreplace(point).doit())).is_real for part in parts)


def _same_number(x, y):
    """True or False, or None where a value is undefined only one is real."""
    x = sympy.real_root(x.doit())  # the cube root of -8 is -2
    y = sympy.real_root(y.doit())
    if x.has(sympy.nan, sympy.zoo) or y.has(sympy.nan, sympy.zoo):
        return None
    if x == y:
        return True
    if (x - y).is_Rational:
        return False
    gap = sympy.N(x - y, 20, maxn=3 * DIGITS)
    size_x = sympy.N(x, 20, maxn=3 * DIGITS)
    size_y = sympy.N(y, 20, maxn=3 * DIGITS)
    if not gap.is_number:
        return None
    if gap.is_finite and abs(gap) <= sympy.Float(10) ** -DIGITS * (abs(size_y) or 1):
        return True
    return False if size_x.is_real == size_y.is_real else None
