"""Programs in answers: comparisons, tests as code, and programs that cheat."""

import contextlib
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from conftest import golden

from rewards import load_reward_fn, prime_code, sandbox
from rewards.manager import RewardManager
from rewards.prime_code import check_row, compute_score, find_program
from rewards.programs import checks
from rewards.programs.outputs import same_json, same_text
from rewards.sandbox.calls import decode, encode
from system.metrics import failure_metrics

FENCE = "```"


def score(program, truth):
    return compute_score("taco", f"So:\n{FENCE}python\n{program}\n{FENCE}", truth)["score"]


def score_asserts(program, *asserts):
    return score(program, {"assert_case": list(asserts)})


def score_calls(program, tests, name="f"):
    inputs, outputs = zip(*tests)
    return score(program, {"fn_name": name, "inputs": list(inputs), "outputs": list(outputs)})


@pytest.mark.parametrize("case", golden("programs_in_answers"))
def test_find_program(case):
    assert find_program(case["response"]).strip() == case["program"]


@pytest.mark.parametrize("case", golden("outputs_of_programs"))
def test_same_text(case):
    assert same_text(case["text"], case["expected"]) is case["same"]


def test_a_long_text_is_no_number():
    assert not same_text("9" * 100_000 + "x", "1.5")


@pytest.mark.parametrize("case", golden("values_of_programs"), ids=lambda case: case["value"])
def test_same_json(case):
    assert same_json(eval(case["value"]), case["expected"]) is case["same"]


def test_values_travel():
    values = [None, True, 1, -1.5, "a\ud800", [1, (2,)], (), {(1, 2): {3}}, frozenset("a"), 1 - 2j, b"\0\xff"]
    for value in values:
        copy = decode(json.loads(json.dumps(encode(value))))
        assert copy == value and type(copy) is type(value)
    assert list(decode(encode(x for x in range(2)))) == [0, 1]
    assert decode(encode(object())) != decode(encode(object()))


@pytest.mark.parametrize("case", golden("calls_of_programs"))
def test_calls(case):
    """A program that defines no such function has not solved the task, though Python has the name."""
    assert score_calls(case["program"], case["tests"], case.get("name", "f")) == case["score"]


def test_asserts():
    program = """
import math
def f(x): return 3 * x
def g(x): return [x, (x, x)]
def half(x): return x / 2
def sum(a, b): return a - b
def up(n): yield from range(n)
class Box:
    def __init__(self, x): self.x = x
    def get(self, factor=1): return self.x * factor
"""
    cases = golden("asserts")
    for case in cases:
        assert score_asserts(program, case["case"]) == case["right"], case
    right = [case["case"] for case in cases if case["right"]]
    wrong = [case["case"] for case in cases if not case["right"]]
    assert score_asserts(program, *right[:3], *right[-3:], *wrong[:2]) == 6 / 8


CHEATS = {
    "ends well before the test": "import sys; sys.exit(0)",
    "ends well in the call": "import os\ndef f(x): os._exit(0)",
    "raises what would end the judge well": "def f(x): raise SystemExit(0)",
    "raises what would end an iteration": "def f(x): raise StopIteration",
    "equals everything": """
class E(int):
    __eq__ = __ne__ = __lt__ = __gt__ = lambda self, other: True
    __sub__ = __rsub__ = lambda self, other: self
    __hash__ = int.__hash__
def f(x): return E(0)
""",
    "own builtins": """
import builtins
builtins.abs = builtins.all = builtins.set = builtins.sorted = lambda *x: 0
abs = all = set = sorted = builtins.abs
def f(x): return 99
""",
    "own modules": """
import json, math, sys
json.dumps = json.loads = lambda *x: ["value", 424242424242]
math.isclose = lambda *x: True
class math:
    isclose = lambda *x: True
def f(x): return 99
""",
    "silent errors": """
import atexit, os, sys
sys.excepthook = lambda *x: None
atexit.register(os._exit, 0)
def f(x): return 99
""",
    "own verdict": """
import os
for fd in range(64):
    for text in (b"ended 0 0 0".ljust(64) * 9, b'["value", true]\\n' * 9):
        try: os.write(fd, text)
        except OSError: pass
def f(x): return 99
""",
    "kills the sandbox": """
import os
try: os.kill(-1, 9)
except OSError: pass
def f(x): return 99
""",
    "hunts for what is expected": """
import gc, sys
text = str([*map(repr, gc.get_objects()), *[sys._getframe(i).f_locals for i in range(2)]])
n = 42
def f(x): return n * 10101010101 if str(n * 10101010101) in text else 99
""",
}


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_cheats_win_nothing(program):
    asserts = [
        "assert f(2) == 424242424242",
        "assert abs(f(2) - 424242424242) < 1e-6",
        "assert math.isclose(f(2), 424242424242)",
        "assert set([f(2)]) == set([424242424242])",
        "assert all(f(x) == 424242424242 for x in [2, 2])",
        "assert list(map(f, [2, 2])) == sorted([424242424242, 424242424242])",
    ]
    assert score_asserts(program, *asserts) == 0
    assert score_calls(program, [("2", "424242424242")]) == 0
    assert score(program, {"inputs": ["2"], "outputs": ["424242424242"]}) == 0


@pytest.mark.parametrize("case", golden("shapes_of_tests"))
def test_published_shapes_of_tests(case):
    """As LiveCodeBench, DeepCoder, Codeforces, TACO, APPS and PRIME publish them."""
    program = case["program"]
    for given in (case["truth"], json.dumps(case["truth"])):
        for info in ("python", 'python title="a.py"', "python {.line-numbers}"):
            assert compute_score("taco", f"So:\n{FENCE}{info}\n{program}\n{FENCE}\nDone.", given)["acc"] == 1


def test_tests_of_a_program_do_not_meet():
    program = (
        "import builtins\nn = getattr(builtins, 'n', 0)\nbuiltins.n = n + 1\nprint(n)\ndef f(): return n"
    )
    assert score(program, {"inputs": ["", ""], "outputs": ["0", "1"]}) == 0.5
    assert score_calls(program, [("", "0"), ("", "1")]) == 0.5
    assert score_asserts(program, "assert f() == 0", "assert f() == 1") == 0.5


def test_time_outs(monkeypatch):
    """Of many tests, or of few; tests after a time-out still count."""
    monkeypatch.setattr(checks, "TIMEOUT_S", 1)
    truth = {"inputs": [str(i) for i in range(40)], "outputs": [str(i) for i in range(40)]}
    result = compute_score("apps", "n = int(input())\nwhile n > 1: pass\nprint(n)", truth)
    assert result == {"score": 2 / 40, "acc": 0.0, "timeouts": 38}
    result = compute_score("apps", "n = int(input())\nwhile n == 1: pass\nprint(n)", truth)
    assert result["score"] == 39 / 40 and result["timeouts"] == 1
    asserts = {"assert_case": ["assert f(1) == 1", *["assert f(1) != 2"] * 5, "assert f(3) == 3"]}
    result = compute_score("mbpp", "def f(x):\n    while x == 1: pass\n    return x", asserts)
    assert result["score"] == 1 / 7 and result["timeouts"] == 6
    monkeypatch.setattr(checks, "TOTAL_S", 1)
    truth = {"inputs": ["1"] * 20, "outputs": ["1"] * 20}
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(1)"
    assert 1 / 20 < compute_score("apps", busy, truth)["score"] < 6 / 20


MINE = """from rewards import prime_code, sandbox
sandbox.IDLE_S = 1
def score(extra_info, **row):
    sandbox.START_S, sandbox.BUSY = extra_info["clock_s"], 0
    return prime_code.compute_score(**row)
"""
PROGRAM = "import time\nwhile time.process_time() < 0.05: pass\nprint(input(), flush=True)\ntime.sleep({})"
LOST = dict(score=0, failure=f"SandboxError: {sandbox.LOST} (mine.py, line 5)")
ENDS = [  # how long a program sleeps, what it gets meanwhile, whether its whole sandbox does, its result
    (99, None, False, dict(score=0, acc=0, timeouts=2)),
    (0.3, signal.SIGSTOP, False, LOST),
    (0.3, signal.SIGKILL, False, LOST),
    (0.3, signal.SIGSTOP, True, dict(score=1, acc=1, timeouts=0)),  # as if the machine stood still
]


@pytest.mark.parametrize("mode", ["naive", "prime"])
def test_what_the_machine_ends_is_a_failure(mode, tmp_path, monkeypatch):
    """A counted one, and no score of 0, which a program gets that sleeps longer than IDLE_S."""
    for name in ("IDLE_S", "START_S", "BUSY"):
        monkeypatch.setattr(sandbox, name, 1)
    (tmp_path / "mine.py").write_text(MINE)
    truth = {"inputs": ["1"] * 2, "outputs": ["1"] * 2}
    manager = RewardManager(mode, load_reward_fn(f"{tmp_path}/mine.py:score"), workers=1)
    for sleep_s, sent, to_all, expected in ENDS:
        text = PROGRAM.format(sleep_s)
        row = dict(data_source="apps", solution_str=text, ground_truth=truth)
        row |= dict(extra_info=dict(clock_s=2 if expected is LOST else 60))
        with ThreadPoolExecutor(1) as thread:
            scored = thread.submit(manager.score, [row])
            while sent and not (sleeping := asleep()):
                time.sleep(0.02)
            if sent and not to_all:
                sleeping.send_signal(sent)
            if to_all:
                group = os.getpgid(sleeping.pid)
                os.killpg(group, sent)
                time.sleep(3 * sandbox.IDLE_S)
                os.killpg(group, signal.SIGCONT)
            [result] = scored.result()
        assert result == expected
        assert failure_metrics([result])["reward/errors"] == (expected is LOST)


def asleep():
    """The process of a program that sleeps, in a sandbox below this process."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            above = process.parent().parent()
            if "sandbox/child.py" in " ".join(above.cmdline()) and process.status() == "sleeping":
                return process
    return None


def test_large_output():
    assert score("print('1 ' * 1_000_000)", {"inputs": [""], "outputs": ["1 " * 1_000_000]}) == 1
    assert score("print('1 ' * 9_000_000)", {"inputs": [""], "outputs": ["1 " * 1_000_000]}) == 0


@pytest.mark.parametrize("case", golden("broken_tests"), ids=lambda case: str(case["truth"]))
def test_broken_truth(case):
    with pytest.raises(ValueError, match="broken tests of a program") as error:
        compute_score("apps", "print(1)", case["truth"])
    assert "\n" not in str(error.value)


BIG = 10**20_000 // 7  # more digits than Python reads and writes by default


@pytest.fixture
def big():
    before = sys.get_int_max_str_digits()
    with prime_code.long_integers():
        yield str(BIG)
    assert sys.get_int_max_str_digits() == before


def test_integers_of_any_length(big):
    other = big[:-1] + "0"
    assert score("print(int(input()) + 1)", {"inputs": [other], "outputs": [other[:-1] + "1"]}) == 1
    assert score("print(int(input()))", {"inputs": [other], "outputs": [other[:-1] + "1"]}) == 0
    assert score("print(f'{int(input()):,}'.replace(',', ''))", {"inputs": [big], "outputs": [big]}) == 1
    assert score_calls("def f(x): return [x, str(x)]", [(big, f'[{big}, "{big}"]')]) == 1
    assert score_calls("def f(x): return x + 1", [(big, big)]) == 0
    assert (
        score_asserts("def f(x): return x", f"assert f({big}) == {big}", f"assert f({big}) != {big}") == 0.5
    )
    truth = json.dumps({"fn_name": "f", "inputs": [big], "outputs": [big]})
    assert compute_score("taco", "def f(x): return x", truth)["acc"] == 1
    assert sys.get_int_max_str_digits() == prime_code.DIGITS


def test_a_longer_integer_costs_little():
    """A reply of a megabyte is not read as a number: that would take minutes."""
    assert (
        score_calls("import os\ndef f(): os.write(1, b'[\"value\", ' + b'9' * 10**6 + b']\\n')", [("", "1")])
        == 0
    )
    with pytest.raises(ValueError, match="broken tests of a program"):
        compute_score("apps", "", {"fn_name": "f", "inputs": ["1" * 200_000], "outputs": ["1"]})


# ---- what solutions of APPS and TACO use without an import
@pytest.mark.parametrize("case", golden("programs_without_imports"), ids=lambda case: case["program"])
def test_names_that_need_no_import(case):
    program = case["program"]
    assert score(program, {"inputs": ["1"], "outputs": ["5"]}) == 1
    if "input" not in program and "stdin" not in program:
        assert (
            score_calls(f"{program}\ndef g(): return heappop and math.pi > 3", [("", "true")], name="g") == 1
        )


def test_what_is_given_is_not_the_program_s():
    asserts = "assert gcd(4, 6) == 2", "assert not gcd(4, 6) != 2", "assert list(deque([1])) == [1]"
    assert score_asserts("", *asserts) == 0
    assert score_asserts("import math\ndef f(x): return x", "assert f(math.inf) == f(math.inf)") == 1


def test_no_tests():
    for truth in ('{"inputs": [], "outputs": []}', {"inputs": [], "outputs": [], "assert_case": None}):
        assert compute_score("apps", "print(1)", truth) == {"score": 0, "acc": 0, "timeouts": 0}


LEETCODE = """def check(candidate):
    assert candidate(a = 1, b = 2) == 3
    assert candidate(a = 2, b = 2) == 4
"""
KODCODE = """from solution import add
def test_a():
    assert add(1, 2) == 3
def test_b():
    x = add(2, 2)
    assert x == 4
"""
HELPED = """from __future__ import annotations
from solution import add as plus
from math import sqrt as root
FOUR = 4
def three():
    return root(9)
def test_a():
    "a docstring"
    assert FOUR == 4  # it calls nothing of the program
    assert plus(1, 2) == three()
def test_b():
    assert plus(2, 2) == FOUR
"""
METHOD = "class Solution:\n    def add(self, a, b): return {}"


@pytest.mark.parametrize(
    ("truth", "program"),
    [
        (dict(test=LEETCODE, entry_point="Solution().add"), METHOD),
        (dict(test=LEETCODE, entry_point="add"), "def add(a, b): return {}"),
        (dict(test=KODCODE), "def add(a, b): return {}"),
        (dict(test=HELPED), "def add(a, b): return {}"),
    ],
)
def test_tests_of_leetcode_and_kodcode(truth, program):
    for body, score in (("a + b", 1), ("a * b", 0.5), ("0", 0)):
        assert compute_score("apps", program.format(body), truth)["score"] == score


@pytest.mark.parametrize(
    "test",
    [
        "import pytest\ndef test_a(): assert f(1)",
        "def check(f): assert f(1)",
        "@x\ndef test_a(): assert f(1)",
    ],
)
def test_tests_that_cannot_run_here_are_refused(test):
    with pytest.raises(ValueError, match=r"broken tests of a program: .*the test"):
        check_row("apps", dict(test=test), {})


@pytest.mark.parametrize(
    "fence",
    ["python:a.py", "python3.11", "Python,ignore", "python title=a", "py {.x}", "Python 3", "python # a.py"],
)
def test_fences_of_programs(fence):
    for before in ("", "The program: "):
        assert find_program(f"{before}```{fence}\nx = 1\n```\n```text\ny\n```").strip() == "x = 1"
    assert find_program("```python-repl\nx\n```\n```\ny\n```") == "y\n"
