"""Programs: the share of all tests that the response's Python program passes.

The program is the last block fenced as python (without one the last block, without a fence all the text)
after the last `</think>`.  The ground truth is JSON text, or a dict: {"inputs": [...], "outputs": [...]} and
- no more: input and output are texts, or lists of lines.  Lines are compared word by word, blank lines left
  out.  An expected number with a point or an exponent allows TOLERANCE, an expected integer any spelling of
  exactly its value: 3.0 for 3, 1e8.  All other words must be the same.
  A program that ends with an error fails, whatever it printed.
- "fn_name": an input is a JSON argument on each line, an output is JSON.  The program defines a function of
  that name, or a class Solution with such a method.  The result is compared as JSON: a tuple is a list, keys
  are strings, True is 1; a float allows TOLERANCE.
- "assert_case": texts of Python code that must hold; inputs and outputs do not matter.  Of
  `assert f(3) == 9` only `f(3)` goes into the program's sandbox.  Any other code runs in a second sandbox,
  where functions of the program are stand-ins that ask for their results.  So no code of the program
  runs near an assert.  Names of builtins, and of standard modules before a dot, are never the program's.
  Code that calls nothing of the program fails.
As in the graders of these data, a program may use GIVEN of sandbox/calls.py without an import.
Expected values never enter the program's sandbox.  A test has TIMEOUT_S seconds, after each time-out half as
long; what is not done after TOTAL_S seconds has failed.
"""

import ast
import builtins
import json
import math
import operator
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path

from rewards.sandbox import run_judge, run_tests
from rewards.sandbox.calls import GIVEN_MODULES, decode, encode

TIMEOUT_S = 4
TOTAL_S = 20  # below the time that the prime manager gives a response
OUTPUT_BYTES = 1 << 16  # that a program may print beyond four times the longest expected output
TOLERANCE = dict(rel_tol=1e-5, abs_tol=1e-8)
CHILD = Path(__file__).with_name("sandbox").joinpath("calls.py").read_text()
FENCE = re.compile(r"[ \t]*+```+[ \t]*+([\w+-]*+)\s*+")
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")
LEADING_ZERO = re.compile(r"[+-]?0[0-9]")
INTEGER = re.compile(r"[+-]?[0-9]+")
BUILTINS = frozenset(dir(builtins))
DIGITS = 100_000  # of an integer. CAREFUL: not without a limit, as the time to read it grows with the square


@contextmanager
def long_integers():
    """Tests and results have integers of more than Python's 4,300 digits."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


@long_integers()
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {"score": share of tests passed, "acc": 1.0 if all are, "timeouts": n, "lost": n}.

    lost: tests whose sandbox broke down.  No tests: score 0.
    Raises ValueError, in one line, if the ground truth is broken, and SandboxError.
    """
    check, tests = read_tests(ground_truth)
    passed, reasons = 0, Counter()
    deadline = time.monotonic() + TOTAL_S
    with closing(check(find_program(solution_str), tests)) as verdicts:
        for is_right, reason in verdicts:
            passed += is_right
            reasons[reason] += 1
            if time.monotonic() > deadline:
                break
    return {
        "score": passed / max(len(tests), 1),
        "acc": float(0 < passed == len(tests)),
        "timeouts": reasons["timeout"],
        "lost": reasons["lost"],
    }


def find_program(response):
    """Text of the program in a response."""
    text = response.rpartition("</think>")[2]
    blocks, is_open = [], False  # of (language, lines)
    for line in text.split("\n"):
        fence = FENCE.fullmatch(line)
        if fence and (fence[1] or not is_open):
            blocks.append((fence[1].lower(), []))
            is_open = True
        elif is_open:
            is_open = not line.rstrip().endswith("```")
            blocks[-1][1].append(line if is_open else line.rstrip().rstrip("`"))
    python = [block for block in blocks if block[0] in ("python", "python3", "py")]
    return textwrap.dedent("\n".join((python or blocks)[-1][1])) if blocks else text


def read_tests(ground_truth):
    """Return (check, tests): check(program, tests) yields (is_right, reason) for each test."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        for key in ("inputs", "outputs", "assert_case"):
            if not isinstance(truth.get(key) or [], list):
                raise TypeError(f"{key} is no list")
        if truth.get("assert_case"):
            return check_asserts, [(text, ast.parse(text)) for text in truth["assert_case"]]
        pairs = list(zip(truth["inputs"], truth["outputs"], strict=True))
        if not truth.get("fn_name"):
            return check_texts, [[x if isinstance(x, str) else "\n".join(x) for x in pair] for pair in pairs]
        name = truth["fn_name"]
        is_method = f"hasattr(globals().get('Solution'), {name!r})"
        function = ast.unparse(ast.parse(f"Solution().{name} if {is_method} else {name}", mode="eval"))
        arguments = [[json.loads(line) for line in text.split("\n") if line.strip()] for text, _ in pairs]
        outputs = [json.loads(text) for _, text in pairs]
        requests = [[function, encode(args), encode({})] for args in arguments]
        return partial(check_calls, same_json), list(zip(requests, outputs))
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"broken tests of a program: {error!r}") from None


def check_texts(program, tests):
    """tests: (input, expected output)."""
    for result, (_, expected) in run(f"{CHILD}\nrun({program!r})\n", tests):
        is_right = result.reason is None and result.returncode == 0 and same_text(result.stdout, expected)
        yield is_right, result.reason


def check_calls(same, program, tests):
    """tests: (request of sandbox/calls.py, expected value); same(value, expected) decides."""
    tests = [(json.dumps(request), expected) for request, expected in tests]
    for result, (_, expected) in run(served(program), tests):
        try:
            kind, value = json.loads(result.stdout)
            is_right = result.reason is None and kind == "value" and same(decode(value), expected)
        except (
            ArithmeticError,
            ValueError,
            TypeError,
            RecursionError,
        ):  # it ended before the reply, or wrote what is none
            is_right = False
        yield is_right, result.reason


def check_asserts(program, tests):
    """tests: (text, its syntax tree)."""
    calls = [split_assert(tree) for _, tree in tests]
    timeout_s = TIMEOUT_S
    for verdict in check_calls(operator.eq, program, [call for call in calls if call]):
        timeout_s /= 1 + (verdict[1] == "timeout")
        yield verdict
    for text, tree in [test for test, call in zip(tests, calls) if not call]:
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - BUILTINS
        modules = {node.value.id for node in ast.walk(tree) if is_of_module(node)}
        imports = "".join(f"import {module}\n" for module in sorted(modules))
        judge = f"{CHILD}\njudge({imports + text!r}, {sorted(names - modules)!r})\n"
        result = run_judge(judge, served(program), timeout_s)
        timeout_s /= 1 + (result.reason == "timeout")
        yield result.reason is None and result.returncode == 0, result.reason


def run(program, tests):
    """Yield (Result, test) for tests of (stdin, what is expected)."""
    size = OUTPUT_BYTES + 4 * max((len(str(expected)) for _, expected in tests), default=0)
    stdins = [stdin for stdin, _ in tests]
    results = run_tests(program, stdins, TIMEOUT_S, output_bytes=size, imports=GIVEN_MODULES)
    yield from zip(results, tests)


def served(program):
    return f"{CHILD}\nserve({program!r})\n"


def split_assert(tree):
    """(request, expected value) of `assert CALL == LITERAL` where CALL is of the program, else None."""
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[expected]))]:
            root = call.func
        case _:
            return None
    while isinstance(root, (ast.Attribute, ast.Call)) and not is_of_module(root):  # Solution().method(3)
        root = root.value if isinstance(root, ast.Attribute) else root.func
    if not isinstance(root, ast.Name) or not is_literal(expected):
        return None
    # `sum(10, 15) == 6` is about a function of the program; `set(f(3)) == {9}` about the builtin.
    if root.id in BUILTINS and not all(map(is_literal, call.args)):
        return None
    return [ast.unparse(call), None, None], ast.literal_eval(expected)


def is_of_module(node):
    """math.isclose, for one"""
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in sys.stdlib_module_names


def is_literal(node):
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def same_text(text, expected):
    """Whether two outputs are the same by the rules above."""
    mine, theirs = ([line.split() for line in x.split("\n") if line.strip()] for x in (text, expected))
    same_shape = [len(words) for words in mine] == [len(words) for words in theirs]
    return same_shape and all(map(same_word, chain(*mine), chain(*theirs)))


def same_word(word, expected):
    if word == expected or not (NUMBER.fullmatch(expected) and NUMBER.fullmatch(word)):
        return word == expected
    if not INTEGER.fullmatch(expected):
        return math.isclose(float(word), float(expected), **TOLERANCE)
    # Exactly, as LiveCodeBench does. CAREFUL: 010 and 10 may be binary
    has_zeros = any(LEADING_ZERO.match(x) for x in (word, expected))
    return not has_zeros and Decimal(word) == Decimal(expected)


def same_json(value, expected):
    """Whether a result is the expected JSON by the rules above."""
    if isinstance(expected, list) and isinstance(value, (list, tuple, Iterator)):
        items = list(value)
        return len(items) == len(expected) and all(map(same_json, items, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        items = {key if isinstance(key, str) else json.dumps(key, default=str): value[key] for key in value}
        return items.keys() == expected.keys() and all(same_json(items[key], expected[key]) for key in items)
    if isinstance(expected, float) and isinstance(value, float):
        return math.isclose(value, expected, **TOLERANCE)
    return value == expected
