r"""Random values of mathematics: spellings of each, and spellings of wrong values near it.

A kind is a function of a random generator that returns (value, values near it, function from a value to its
spellings).  Values are exact and compared with ==, so no value near is the value.  Nothing is written that a
person would call ambiguous: 1,234 for a decimal, 1/2x, or a bare 30 for 30 %.
"""

import random
from fractions import Fraction

import sympy

KINDS = {}
MARKS = {
    (1, 2): "½",
    (1, 3): "⅓",
    (2, 3): "⅔",
    (1, 4): "¼",
    (3, 4): "¾",
    (1, 5): "⅕",
    (1, 6): "⅙",
    (1, 8): "⅛",
}


def cases(seed, rounds, spellings=3):
    """(kind, right spellings, wrong spellings) of `rounds` values of each kind."""
    for i in range(rounds):
        for name, kind in KINDS.items():
            rng = random.Random(f"{seed} {name} {i}")
            value, near, spell = kind(rng)
            rights = [*dict.fromkeys(spell(value))]
            wrongs = [x for other in near if other != value for x in pick(rng, spell(other), spellings)]
            yield name, pick(rng, rights, len(rights)), [*dict.fromkeys(wrongs)]


def pick(rng, texts, n):
    texts = [*texts]
    return rng.sample(texts, min(n, len(texts)))


def kind(function):
    KINDS[function.__name__] = function
    return function


def sign_of(value):
    return "-" if value < 0 else ""


def times(number, symbol):
    return {1: symbol, -1: f"-{symbol}"}.get(number, f"{number}{symbol}")


# numbers


def digits_near(n):
    """Integers that a slip makes of n: its sign, one more, a digit, a place, digits in another order."""
    text = str(abs(n))
    near = {
        -n,
        n + 1,
        n - 1,
        n * 10,
        n * 2,
        n + 10,
        int(text[::-1]),
        int(text[:-1] or 0),
        int(text + text[-1]),
    }
    near |= {int(text[:i] + str((int(text[i]) + 1) % 10) + text[i + 1 :]) for i in range(len(text))}
    return sorted(near)


@kind
def integer(rng):
    def spell(n):
        text, full_width = str(n), str(n).translate({48 + i: 0xFF10 + i for i in range(10)})
        yield from (text, f"{text}.0", f"{text}.", f"${text}$", rf"\text{{{text}}}", f"({text})", full_width)
        yield from (text.replace("-", "−"), rf"\frac{{{2 * n}}}{{2}}", f"x = {text}", rf"\mathbf{{{text}}}")
        yield rf"{sign_of(n)}\sqrt{{{n * n}}}"
        if abs(n) > 9999:
            yield from (f"{n:,}".replace(",", mark) for mark in (",", "{,}", r"\,", r",\!", "\u2009", " "))
        if n and n % 100 == 0:
            yield rf"{n // 100} \times 10^2"
        if n > 1:
            yield r" \cdot ".join(f"{p}^{{{k}}}" if k > 1 else str(p) for p, k in sympy.factorint(n).items())

    n = rng.choice([rng.randint(-20, 20), rng.randint(-999, 999), rng.randint(10**4, 10**7), 4200])
    return n, digits_near(n), spell


@kind
def decimal(rng):
    places = rng.choice([1, 2, 4, 5])

    def spell(value):
        digits = str(abs(value) * 10**places).rjust(places + 1, "0")
        whole, rest, sign = digits[:-places], digits[-places:], sign_of(value)
        yield from (f"{sign}{whole}.{rest}", f"{sign}{whole}.{rest}0", f"−{whole}.{rest}"[not sign :])
        yield from (f"{sign}{whole},{rest}", rf"\text{{{sign}{whole}.{rest}}}")
        yield rf"{sign}\frac{{{digits}}}{{1{'0' * places}}}"
        yield from (f"{sign}.{rest}" if whole == "0" else f"{sign}{int(whole):,}.{rest}", str(value))
        yield rf"{value * 10**places} \times 10^{{-{places}}}"

    n = rng.choice([1, -1]) * (rng.randint(1, 10 ** rng.randint(1, 8)) * 10 + rng.randint(1, 9))
    near = [Fraction(x, 10**places) for x in digits_near(n) if x]
    return Fraction(n, 10**places), near, spell


def spell_fraction(value):
    value = Fraction(value)
    p, q, sign = abs(value.numerator), value.denominator, sign_of(value)
    yield from (rf"{sign}{frac}{{{p}}}{{{q}}}" for frac in (r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"))
    yield from (rf"\frac{{{sign}{p}}}{{{q}}}", f"{sign}{p}/{q}", rf"{sign}\frac{{{3 * p}}}{{{3 * q}}}")
    yield rf"({sign}{p})/{q}"
    yield from (rf"{sign}\left(\frac{{{p}}}{{{q}}}\right)", rf"{sign}{p}\cdot {q}^{{-1}}")
    yield rf"{sign}\frac{{1}}{{{q}}}\cdot {p}"
    if p < 10 and q < 10:
        yield from (rf"{sign}\frac{p}{q}", rf"{sign}\frac {p} {q}", rf"{sign}\dfrac{p}{{{q}}}")
    if p > q > 1:
        whole, rest = divmod(p, q)
        yield from (rf"{sign}{whole}\frac{{{rest}}}{{{q}}}", f"{sign}{whole} {rest}/{q}")
        yield rf"{sign}{whole}\,\tfrac{{{rest}}}{{{q}}}"
        yield (
            f"{sign}{whole}{MARKS[rest, q]}"
            if (rest, q) in MARKS
            else rf"{sign}({whole}+\frac{{{rest}}}{{{q}}})"
        )
    if 10**6 % q == 0:
        yield f"{float(value):.6f}"
    elif period := next((k for k in range(1, 7) if (10**k - 1) % q == 0), 0):
        digits = str(p % q * (10**period - 1) // q).rjust(period, "0")
        yield from (rf"{sign}{p // q}.\overline{{{digits}}}", rf"{sign}{p // q}.\bar{{{digits}}}")


def fractions_near(value):
    p, q = value.numerator, value.denominator
    near = [-value, value + 1, value * 2, value / 2, value * 10, value * value, Fraction(p, q + 1)]
    return near + [Fraction(p + 1, q), Fraction(q, p or 1), Fraction(int(f"{p}{q}"))]


@kind
def fraction(rng):
    value = Fraction(
        rng.choice([-1, 1, 1]) * rng.randint(1, rng.choice([9, 400])),
        rng.choice([2, 3, 4, 6, 7, 8, 9, 16, 37, 99]),
    )
    return value, fractions_near(value), spell_fraction


@kind
def percent(rng):
    def spell(value):
        text = f"{float(value * 100):.4f}".rstrip("0").rstrip(".")
        yield from (rf"{text}\%", f"{text}%", rf"{text} \%", rf"{text}\text{{ percent}}", f"{text} percent")
        yield from (rf"\text{{{text}\%}}", f"{float(value):.6f}")
        yield rf"\frac{{{value.numerator}}}{{{value.denominator}}}"

    value = Fraction(rng.randint(1, 1500), 1000)
    return value, [value + Fraction(1, 100), value * 10, value / 10, value * 2, value * 1000], spell


@kind
def surd(rng):
    """b sqrt(n) / c, or (a + b sqrt(n)) / c."""
    a, n, c = (
        rng.choice([0, 0, 3, 7, -2]),
        rng.choice([2, 3, 5, 6, 7, 10, 15, 30]),
        rng.choice([1, 1, 2, 3, 7]),
    )
    b = rng.choice([-1, 1, 1]) * rng.choice([1, 2, 3, 5, 12])

    def spell(value):
        _, (a, b, c, n) = value
        for root in (
            rf"\sqrt{{{n}}}",
            f"√{n}",
            f"sqrt({n})",
            rf"\sqrt {n}",
            rf"\sqrt{n}" if n < 10 else f"√({n})",
        ):
            text, sign = times(b, root), "+" if b > 0 else ""
            if a:
                yield from (rf"\frac{{{a}{sign}{text}}}{{{c}}}", rf"\left({a} {sign}{text}\right)/{c}")
                yield rf"\frac{{{text}{a:+d}}}{{{c}}}"
                yield rf"\frac{{{a}}}{{{c}}}+\frac{{{text}}}{{{c}}}"
            else:
                yield from (f"{text}/{c}", rf"\frac{{{text}}}{{{c}}}", rf"\frac{{{b}}}{{{c}}}{root}")
        yield rf"\frac{{{a or ''}{'-' if b < 0 else '+' if a else ''}\sqrt{{{b * b * n}}}}}{{{c}}}"
        yield rf"\frac{{{a * n}{b * n:+d}\sqrt{{{n}}}}}{{{c * n}}}"
        yield rf"\frac{{{a}{b:+d} \cdot {n}^{{1/2}}}}{{{c}}}"

    def value(a, b, c, n):
        return (a + b * sympy.sqrt(n)) / c, (a, b, c, n)

    near = [
        (a, -b, c, n),
        (a, b + 4, c, n),
        (a, b, c + 1, n),
        (a, b, c, n + 1),
        (a + 1, b, c, n),
        (a, b, c * n, n),
    ]
    near += [(a, b, c, b * b * n), (a, b * 10, c, n), (a, b, c, n * n), (a, b, c, n * c * c)]
    right = value(a, b, c, n)
    return right, [value(*x) for x in near if value(*x)[0] != right[0]], spell


# several numbers


def entry(rng):
    """A number of a list, as a pair of its value and a spelling."""
    n, q = rng.choice([rng.randint(1, 9), rng.randint(-99, -1), rng.randint(1, 99)]), rng.choice([2, 3, 4, 7])
    if rng.random() < 0.2:
        return n * sympy.sqrt(q + 3), rng.choice(
            [rf"{n}\sqrt{{{q + 3}}}", f"{n}√{q + 3}"]
        ) if q != 3 else rf"{n}\sqrt6"
    q = rng.choice([1, 1, q])
    texts = [*spell_fraction(Fraction(n, q))] + [f"{n}", f"{n}.0"] * 9 * (q == 1)
    return sympy.Rational(n, q), rng.choice([x for x in texts if " " not in x])


def respelled(rng, value):
    """Another spelling of an entry."""
    if value.is_Rational:
        texts = (
            [*spell_fraction(Fraction(int(value.p), int(value.q)))]
            if value.q > 1
            else [str(value), f"{value}.0"]
        )
        return rng.choice([x for x in texts if " " not in x])
    return rng.choice([sympy.latex(value), sympy.latex(value).replace(" ", "")])


def numbers(rng, n):
    """n different numbers."""
    found = {}
    while len(found) < n:
        found.setdefault(entry(rng)[0])
    return (*found,)


def lists_near(rng, values):
    i = rng.randrange(len(values))
    yield from (
        (*values[:i], x, *values[i + 1 :])
        for x in (-values[i], values[i] + 1, values[i] * 10)
        if x not in values
    )
    other = next(x for x in numbers(rng, 9) if x not in values)
    yield (*values, other)
    yield values[1:]


@kind
def set_of_numbers(rng):
    def spell(values):
        texts = [respelled(rng, x) for x in rng.sample([*values], len(values))]
        commas = ", ".join(texts)
        yield from (commas, ",".join(texts), rf"\{{{commas}\}}", rf"\left\{{{commas}\right\}}")
        yield from (f"x = {commas}", "; ".join(texts))
        yield from (r"\text{ or }".join(f"x={x}" for x in texts), "$" + "$, $".join(texts) + "$")
        yield r",\ ".join(texts)
        if len(texts) > 1:
            yield from (rf"{', '.join(texts[:-1])}\text{{ and }}{texts[-1]}", rf"x \in \{{{commas}\}}")

    values = numbers(rng, rng.randint(2, 4))
    return frozenset(values), [*map(frozenset, lists_near(rng, values))], spell


@kind
def tuple_of_numbers(rng):
    def spell(values):
        texts = [respelled(rng, x) for x in values]
        commas = ", ".join(texts)
        yield from (f"({commas})", f"({','.join(texts)})", rf"\left({commas}\right)")
        yield from (rf"\bigl( {commas} \bigr)", f"$({commas})$")
        yield f"(x, y, z) = ({commas})" if len(texts) == 3 else f"({commas})"
        if len(texts) == 2:
            yield from (f"x={texts[0]}, y={texts[1]}", f"(x,y) = ({commas})")

    values = numbers(rng, rng.randint(2, 4))
    near = [x for x in lists_near(rng, values) if len(x) > 1]
    return values, [*near, values[::-1], values[1:] + values[:1]], spell


@kind
def interval(rng):
    flipped = {r"\le": r"\ge", "<": ">"}

    def spell(value):
        opens, a, b, closes = value
        low, high = (r"\le" if bracket in "[]" else "<" for bracket in (opens, closes))
        x, y = (sympy.latex(z) if z.is_infinite else respelled(rng, z) for z in (a, b))
        yield from (f"{opens}{x},{y}{closes}", rf"\left{opens}{x}, {y}\right{closes}")
        yield rf"x \in {opens}{x}, {y}{closes}"
        if a.is_infinite or b.is_infinite:
            one = f"x {high} {y}" if a.is_infinite else f"{x} {low} x"
            other = f"{y} {flipped[high]} x" if a.is_infinite else f"x {flipped[low]} {x}"
            yield from (one, other, rf"\{{x \mid {one}\}}")
            yield f"{opens}{x}, {y}{closes}".replace(r"\infty", "∞")
        else:
            yield from (f"{x} {low} x {high} {y}", f"{y} {flipped[high]} x {flipped[low]} {x}")

    a, b = sorted(numbers(rng, 2), key=sympy.N)
    a, b = rng.choice([(a, b), (a, b), (-sympy.oo, b), (a, sympy.oo)])
    opens, closes = "(" if a.is_infinite else rng.choice("(["), ")" if b.is_infinite else rng.choice(")]")
    near = [
        (opens, a, b + 1, closes),
        (opens, a - 1, b, closes),
        ("(", -sympy.oo, b, closes),
        (opens, a, sympy.oo, ")"),
    ]
    near += [] if a.is_infinite else [({"(": "[", "[": "("}[opens], a, b, closes)]
    near += [] if b.is_infinite else [(opens, a, b, {")": "]", "]": ")"}[closes])]
    return (opens, a, b, closes), [x for x in near if not (x[1].is_infinite and x[2].is_infinite)], spell


# units

UNITS = {
    "cm": "centimeters",
    "km": "kilometers",
    "mm": "millimeters",
    "ft": "feet",
    "kg": "kilograms",
    "hr": "hours",
}


@kind
def unit(rng):
    def spell(value):
        number, name, power = value
        text = str(number) if number.denominator == 1 else f"{float(number):.2f}"
        raised = f"^{power}" if power > 1 else ""
        words = ["", "square ", "cubic "][power - 1] + UNITS[name]
        yield from (rf"{text}\text{{ {name}}}{raised}", rf"{text} \mathrm{{~{name}}}{raised}")
        yield rf"{text}\,\mathrm{{{name}}}{raised}"
        yield from (f"{text} {name}{raised}", rf"{text}\text{{ {words}}}", f"{text} {words}")
        yield rf"{text} \mbox{{ {words}}}"

    number, (name, other), power = (
        Fraction(rng.randint(2, 9000), rng.choice([1, 1, 10])),
        rng.sample([*UNITS], 2),
        rng.choice([1, 1, 2, 3]),
    )
    near = [
        (number, other, power),
        (number, name, power % 3 + 1),
        (number + 1, name, power),
        (number * 10, name, power),
        (-number, name, power),
    ]
    return (number, name, power), near, spell
