"""A calculator, in the manner of GSM8K's annotations: a turn that ends in <<48/2>> is answered by 24.

Calculator: the model writes <<EXPRESSION>> and ends its turn; any other turn is the last one.
TOOLS: the same as the tool calculate(expression), in the model's own format of calls.

An expression has numbers, + - * / // % **, and parentheses; $ and the commas of 1,000 are skipped, and 20% is
0.2 where no number follows.  Arithmetic is exact; what is no integer is shown with at most 6 decimals.
"""

import ast
import operator
import re
from fractions import Fraction

from system.thoughts import reply_of

MAX_CHARS, MAX_BITS = 200, 256  # of an expression; of a numerator or denominator
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class Calculator:
    def __init__(self, extra_info):
        pass

    def step(self, text):
        call = re.search(r"<<([^<>]*)>>\s*$", reply_of(text))
        if not call:
            return None
        try:
            content = calculate(call[1])
        except ValueError as error:
            content = f"error: {error}"
        return [{"role": "tool", "content": content}]


def calculate(expression: str) -> str:
    """Calculates the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, such as "(3 + 4) * 12.5"
    """
    if len(expression) > MAX_CHARS:
        raise ValueError("the expression is too long")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression.replace("$", "")).strip()
    text = re.sub(r"(\d+\.?\d*|\.\d+)\s*%(?=\s*([-+*/)]|$))", r"(\1/100)", text)
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError, OverflowError):
        raise ValueError("the expression is not arithmetic") from None
    value = round(value, 6)
    if value.denominator == 1:
        return str(value.numerator)
    digits = f"{abs(value.numerator) * 10**6 // value.denominator:07d}"
    return f"{'-' * (value < 0)}{digits[:-6]}.{digits[-6:]}".rstrip("0")


def _value(node):
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(repr(number))  # of 0.1 as it is written
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _value(operand) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            left = _value(left)
            right = _value(right)
            if isinstance(op, ast.Pow):
                if abs(right) * _bits(left) > 2 * MAX_BITS:
                    raise ValueError("the power is too large")
                if right.denominator > 1 and left < 0:
                    raise ValueError("a root of a negative number")
            value = Fraction(OPERATORS[type(op)](left, right))  # a root is a float
        case _:
            raise ValueError("the expression is not arithmetic")
    if _bits(value) > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _bits(value):
    return max(value.numerator.bit_length(), value.denominator.bit_length())


TOOLS = [calculate]
