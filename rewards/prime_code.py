"""Programs: the share of all tests that the response's Python program passes.

The program is the last block fenced as python (without one the last block, without a fence all the text)
after the thought.  The ground truth is JSON text, or a dict: {"inputs": [...], "outputs": [...]} and
- no more: input and output are texts, or lists of lines.  Lines are compared word by word, blank lines left
  out.  An expected number with a point or an exponent allows TOLERANCE, an expected integer any spelling of
  its value without leading zeros (010 may be binary): 3.0 for 3, 1e8, and 2.9999999999 (ROUNDING).  Any other
  word must be the same.
  A program that ends with an exception fails, whatever it printed; after sys.exit its output counts.
- "fn_name": an input is a JSON argument on each line, an output is JSON; or an input is a list of arguments,
  and an output a value, or a list of that one value.  The program defines a function of
  that name, or a class Solution with such a method.  An argument that is a dict with texts of integers for
  keys gets integers, which JSON cannot write; in LiveCodeBench's list it does not.  The result is compared as
  JSON: a tuple is a list, keys are strings, True is 1; a float allows TOLERANCE.
- "test": Python code with `check(candidate)`, of LeetCode's data and HumanEval, and "entry_point", what it is
  called with, such as `Solution().f`; or with functions `test_...` of pytest, as in KodCode.  Each assert in
  such a function is an assert_case, after the imports, constants and helpers of the file; a function with
  other statements is one as a whole.
- "assert_case": texts of Python code that must hold; inputs and outputs do not matter.  Of
  `assert f(3) == 9` only `f(3)` goes into the program's sandbox.  Any other code runs in a second sandbox,
  where functions of the program are stand-ins that ask for their results.  So no code of the program
  runs near an assert.  Names of builtins, and of standard modules before a dot, are never the program's.
  Code that calls nothing of the program fails.
As in the graders of these data, a program may use GIVEN of sandbox/calls.py without an import.
A list of {"input", "output"}, with "metadata": {"func_name"} for a function, is read as such a dict.
How tests are run: programs/checks.py; TOLERANCE, ROUNDING: programs/outputs.py.  A test has TIMEOUT_S
seconds of a processor, after each time-out half as long, and all tests have TOTAL_S.  A program that sleeps
has failed the tests that are left.
"""

import ast
import json
import re
import sys
import textwrap
from contextlib import closing, contextmanager
from functools import partial

from rewards.programs.checks import check_asserts, check_calls, check_texts
from rewards.programs.outputs import same_json
from rewards.sandbox.calls import encode
from system.thoughts import reply_of

# The first word is the language
FENCE = re.compile(r"[ \t]*+```+[ \t]*+([\w+-]*+)(?:[^\w`+-][^`]*+)?")
BEHIND_WORDS = re.compile(rf"(?<=[^`])(?=```+[ \t]*+\w){FENCE.pattern}\Z")
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
def check_row(data_source, ground_truth, extra_info):
    if not read_tests(ground_truth)[1]:
        raise ValueError("the ground truth has no test of a program")


@long_integers()
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {"score": share of tests passed, "acc": 1.0 if all are, "timeouts": n}.  No tests: score 0.

    Raises ValueError, in one line, if the ground truth is broken; SandboxError for a program that
    the machine did not run to its end: that is a counted failure and no score of 0.
    """
    check, tests = read_tests(ground_truth)
    passed = 0
    timeouts = 0
    with closing(check(find_program(solution_str), tests)) as verdicts:
        for is_right, reason in verdicts:
            passed += is_right
            timeouts += reason == "timeout"
    score = passed / max(len(tests), 1)
    acc = float(0 < passed == len(tests))
    return {"score": score, "acc": acc, "timeouts": timeouts}


def find_program(response):
    """Text of the program in a response."""
    text = reply_of(response)
    blocks, is_open = [], False  # of (language, lines)
    for line in text.split("\n"):
        fence = FENCE.fullmatch(line)
        if not fence and not is_open:  # one behind words has a language
            fence = BEHIND_WORDS.search(line)
        if fence and (fence[1] or not is_open):
            blocks.append((fence[1].lower(), []))
            is_open = True
        elif is_open:
            is_open = not line.rstrip().endswith("```")
            blocks[-1][1].append(line if is_open else line.rstrip().rstrip("`"))
    python = [block for block in blocks if re.fullmatch(r"py(?:thon)?\d*", block[0])]
    return textwrap.dedent("\n".join((python or blocks)[-1][1])) if blocks else text


def read_tests(ground_truth):
    """Return (check, tests): check(program, tests) yields (is_right, reason) for each test."""
    try:
        given = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        truth = as_dict(given)
        if truth.get("test"):
            truth = dict(assert_case=asserts_of(truth["test"], truth.get("entry_point")))
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
        arguments = [
            x if isinstance(x, list) else [json.loads(line) for line in x.split("\n") if line.strip()]
            for x, _ in pairs
        ]
        if given is truth:
            arguments = [[*map(with_int_keys, args)] for args in arguments]
        # TACO and APPS: lists of arguments, and the result alone in a list
        outputs = [json.loads(y) if isinstance(y, str) else y[0] if is_alone(y) else y for _, y in pairs]
        requests = [[function, encode(args), encode({})] for args in arguments]
        return partial(check_calls, same_json), list(zip(requests, outputs))
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
        read = "inputs and outputs, assert_case, or test"
        raise ValueError(f"broken tests of a program: {error!r}; what is read: {read}") from None


def asserts_of(test, entry_point):
    """The asserts of the test functions of a file, with the entry point in the place of their parameter.

    Imports, constants and helpers of the file come before each. A function with other statements is one test.
    """
    functions = []
    before = []
    for statement in ast.parse(test).body:
        if isinstance(statement, ast.FunctionDef) and re.match("check$|test", statement.name):
            functions.append(statement)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            before += imported(statement)
        elif not is_docstring(statement):
            before.append(ast.unparse(statement))
    found = []
    for function in functions:
        parameters = [parameter.arg for parameter in function.args.args]
        if function.decorator_list or (parameters and not entry_point):
            raise ValueError(f"{function.name} of the test needs arguments that are not given")
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in parameters:
                node.id = entry_point
        body = [statement for statement in function.body if not is_docstring(statement)]
        tests = [[statement] for statement in body if calls_something(statement)]
        if not all(isinstance(statement, ast.Assert) for statement in body):
            tests = [body]
        found += ["\n".join([*before, *map(ast.unparse, statements)]) for statements in tests]
    return found


def imported(statement):
    """The lines of an import of a test; what is the program's is there.

    ValueError for what is not installed.
    """
    modules = [getattr(statement, "module", None)]
    if modules == ["__future__"]:  # it has to be the first line of a file
        return []
    if modules == ["solution"]:
        return [f"{name.asname} = {name.name}" for name in statement.names if name.asname]
    if isinstance(statement, ast.Import):
        modules = [name.name for name in statement.names]
    for module in modules:
        if str(module).partition(".")[0] not in sys.stdlib_module_names:
            raise ValueError(f"the test imports {module}, which the sandbox does not have")
    return [ast.unparse(statement)]


def is_docstring(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def calls_something(statement):
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))


def as_dict(truth):
    """The list of {input, output, testtype, metadata} of LiveCodeBench and DeepCoder as one dict."""
    if not isinstance(truth, list):
        return truth
    names = {(test.get("metadata") or {}).get("func_name") for test in truth}
    if len(names) != 1:
        raise ValueError("the tests name several functions, or there are none")
    pairs = {"inputs": [test["input"] for test in truth], "outputs": [test["output"] for test in truth]}
    return pairs | {"fn_name": names.pop()}


def with_int_keys(argument):
    """{"1": x} as {1: x}, any other argument as it is: so do APPS, TACO and PRIME."""
    try:
        return {int(key): value for key, value in argument.items()}
    except (AttributeError, ValueError):
        return argument


def is_alone(output):
    return isinstance(output, list) and len(output) == 1
