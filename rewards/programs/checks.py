"""Runs the tests of a program: a check yields (is_right, reason) for each test.

Expected values never enter the program's sandbox.  What is an assert: prime_code.py.
"""

import ast
import builtins
import json
import operator
import sys
from pathlib import Path

from rewards.programs.outputs import same_text
from rewards.sandbox import calls as calls_of_sandbox
from rewards.sandbox import run_judge, run_tests
from rewards.sandbox.calls import GIVEN_MODULES, decode

TIMEOUT_S, TOTAL_S = 4, 20  # of a processor: for a test, and for all tests of a program
OUTPUT_BYTES = 1 << 16  # that a program may print beyond four times the longest expected output
CHILD = Path(calls_of_sandbox.__file__).read_text()
BUILTINS = frozenset(dir(builtins))


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
        except (ArithmeticError, KeyError, ValueError, TypeError, RecursionError):
            is_right = False  # it wrote no reply
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
    limits = dict(output_bytes=size, total_s=TOTAL_S, imports=GIVEN_MODULES)
    yield from zip(run_tests(program, stdins, TIMEOUT_S, **limits), tests)


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
