"""No response holds up a run: scorers and readers of calls take time in proportion to its length."""

import json
import time

import pytest
from conftest import golden
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.calculator import Calculator
from envs.guess import Guess
from envs.tools import harmony, parse_calls
from rewards import compute_score, exact, gsm8k, ifeval, kk, prime_code
from rewards.programs.outputs import same_text

SHORT, TIMES = 5_000, 4
MOST = 10  # times the seconds for TIMES the length: a quadratic reader takes 16
CLOCK_S = 0.2  # what is so fast that the clock is too coarse for a ratio
MARKS = """
    a A. 1 1, 1. 0 - -- 1- * ** [ ] [] ( ) { } < << >> <<1 > $ $1 $$ # #### \\ \\\\ \\boxed{ \\boxed{1} \\frac
    \\text{ ^ _ ` ``` " ' : ; | & / = é ½ ٣ 漢 <think> </think> <answer> <tool_call> </tool_call> <function=
    <parameter= <function=f> [TOOL_CALLS] f[ARGS]{ f(a= [f( [- {[ f{ {"a": . 1+ 1\\, \\begin{
"""
WORDS = [*MARKS.split(), "\n", " ", "\r\n", "\t", "\u2028", "\u0301", "* a", "- a", "#### 1 ", "\\boxed "]
WORDS += ["```\n", "```python\n", "Answer: ", "answer is ", "or ", "and ", "is a knight", "\nA is a knave"]
WORDS += ["User:\n", "Assistant:\n", "P.S. ", "p. ", '{"name": ', "lambda ", "not ", "; "]
WORDS += ["1 ", "a ", "a\n", " is a", "#### " + " " * 50]
ENDS = ("", "x"), ("", ""), (" ", "`\n5")
KNIGHTS = "(1) A is a knight\n(2) B is a knave"


# arguments that most texts leave unanswered
KWARGS = {case["instruction"]: case["kwargs"] for case in golden("long_instructions")}
INSTRUCTIONS = dict(instruction_id_list=[*ifeval.CHECKS], kwargs=[KWARGS.get(x, {}) for x in ifeval.CHECKS])
INSTRUCTIONS = json.dumps(INSTRUCTIONS)
READERS = {
    "exact": lambda text: exact.compute_score("shapes", text, "a circle"),
    "gsm8k, strict": lambda text: gsm8k.compute_score("openai/gsm8k", text, "5"),
    "gsm8k, flexible": lambda text: gsm8k.compute_score("arithmetic", text, "5"),
    "ifeval": lambda text: ifeval.compute_score("ifeval", text, INSTRUCTIONS),
    "kk": lambda text: kk.compute_score("kk", text, KNIGHTS),
    "kk, the answer": lambda text: kk.compute_score("kk", f"<think></think><answer>{text}</answer>", KNIGHTS),
    "math": lambda text: compute_score("lighteval/MATH", text, "5"),
    "math, in a box": lambda text: compute_score("lighteval/MATH", f"\\boxed{{{text}}}", "5"),
    "math_verify": lambda text: compute_score("numina_olympiads", text, "5"),
    "math_dapo": lambda text: compute_score("aime24", f"Answer: {text}", "5"),
    "geo3k": lambda text: compute_score("hiyouga/geometry3k", f"<think>{text}</think>{text}", "5"),
    "prime_code": prime_code.find_program,
    "prime_code, output": lambda text: same_text(text, "1.5\n" * 9),
    "calls, of Hermes": lambda text: parse_calls(f"<tool_call>{text}"),
    "calls, of gpt-oss": lambda text: harmony(f" to=functions.f<|message|>{text}"),
    "calculator": Calculator({}).step,
    "guess": Guess(dict(low=1, high=9, number=5)).step,
}


def seconds(read, text):
    """Of this process; the least of three, as others are at work."""
    spent = []
    for _ in range(3):
        begin = time.process_time()
        read(text)
        spent.append(time.process_time() - begin)
        if not CLOCK_S < spent[-1] < MOST * CLOCK_S:  # one look is enough
            break
    return min(spent)


@pytest.mark.parametrize("name", READERS)
def test_time_grows_as_the_length(name, monkeypatch):
    # a comparison of formulas has a time-out in a process of its own
    monkeypatch.setattr("rewards.mathematics.equivalence.call_in_worker", lambda *_, **__: False)
    slow = []
    for word in WORDS:
        for second, end in ENDS[:1] if name == "ifeval" else ENDS:  # 25 readers in one
            short, long = (word * (n // len(word)) + second * n + end for n in (SHORT, SHORT * TIMES))
            spent = seconds(READERS[name], long)
            if spent > CLOCK_S and spent > MOST * (before := seconds(READERS[name], short)):
                slow.append((word, second, end, before, spent))
    assert not slow


@given(st.lists(st.sampled_from([*WORDS, "\ud800", "\0"]) | st.text(max_size=3), max_size=12).map("".join))
@settings(deadline=None)
def test_no_text_is_an_error(text):
    """Nor is any a wrong kind of result; comparisons of formulas are real ones here."""
    for name, read in READERS.items():
        result = read(text)
        if isinstance(result, dict):
            json.dumps(result)
            assert {"score", "acc", "pred"} <= result.keys() and isinstance(result["pred"], str), name


@pytest.mark.parametrize(
    "word", ["\ud800", "\0", "# coding: latin-1\n", "from __future__ import braces\n", "\ufeff", "\t\f"]
)
def test_no_program_is_an_error(word):
    truth = {"inputs": ["1"], "outputs": ["1"]}
    for text in (word, f"```python\n{word}print(1)\n```", f"```python\nprint({word!r})\n```"):
        for tests in (truth, truth | {"fn_name": "f"}, truth | {"assert_case": ["assert f(1) == 1"]}):
            result = compute_score("apps", text, tests)
            assert result["score"] in (0, 1)
