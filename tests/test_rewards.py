"""Rewards: the golden table, hostile input, dispatch, own reward functions, the manager."""

import copy
import importlib
import json
import math
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from conftest import golden
from hostile_reward import hostile_reward
from hypothesis import given
from hypothesis import strategies as st

from envs.calculator import Calculator
from envs.guess import Guess
from envs.tools import parse_calls
from rewards import SOURCES, _scorer, check_row, check_sources, compute_score, load_reward_fn
from rewards.manager import RewardManager, demote_failures, validation_metrics, validation_summary
from rewards.manager.combined import CombinedReward, load_rewards, score_parts
from rewards.sandbox import SandboxError
from system.files import digest_of_file
from system.metrics import failure_metrics
from system.thoughts import with_opening


def score(text, truth, method):
    return compute_score("openai/gsm8k", text, truth, {"method": method})["score"]


TABLES = "gsm8k kk prime_code math math_verify math_dapo prime_math geo3k".split()
GOLDEN = [case for name in TABLES for case in golden(name) if not case["debatable"]]
# v126, "I get $7$ in the end", is no answer by the rule of math_verify.py; kk.py reads v042, "Piet: knight"
GOLDEN = [case for case in GOLDEN if case["id"] not in ("math_verify-v126", "kk-v042")]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["id"])
def test_golden(case, monkeypatch):
    for limit in ("rewards.programs.checks.TIMEOUT_S", "rewards.mathematics.equivalence.TIMEOUT_S"):
        monkeypatch.setattr(limit, 1)  # of a processor: those that hang take it all
    got = compute_score(case["data_source"], case["solution_str"], case["ground_truth"], case["extra_info"])
    assert got["score"] == pytest.approx(case["expected"], abs=1e-6), case["why"]
    path = case["extra_info"].get("must_not_exist")
    assert not path or not Path(path).exists()


@pytest.mark.parametrize("truth", [["33", "34"], [33, 34], '["33", "34"]', ' ["34"]', "34", 34])
def test_each_of_several_right_answers_is_right(truth):
    said = SAYS | {"shapes": "{}", "hiyouga/geometry3k": r"<think></think>\boxed{{{}}}"}
    for source, text in said.items():
        right, wrong = (compute_score(source, text.format(x), truth) for x in (34, 7))
        assert right["acc"] and right["score"] == 1 and not wrong["acc"] and wrong["score"] < right["score"]


def test_ground_truths_that_are_no_answers():
    """An error of the row, which the manager counts, and not 0 for every response."""
    for truth in ([], {"answer": "34"}, [["34"]], None, " ", ["34", ""]):
        with pytest.raises(ValueError, match="ground truth must be an answer or a list of answers"):
            compute_score("math_dapo", "Answer: 34", truth)
        row = make_row("Answer: 34", data_source="math_dapo", ground_truth=truth)
        [result] = RewardManager().score([row])
        assert "ground truth must be" in result["failure"]


# A part of a value or of an expression, or the first of two numbers, is not the answer
PARTS = r"5π|5\pi|5x|5k|5 million|5 tenths|5 dozen|5 and a half|5 万|5 squared|5 e3"
WITHIN = r"√5|\sqrt{5}|\frac{2}{5}|x > 5|not 5|= - 5|log 5|x5|11 - 5|-(5)|\pi 5|2^5"
FIRST = "5 1/2|5, 6|5 to 6|5 hours 30 minutes|5 = 6|5_2|1 500|1'500|5±6|5→6|5·6|5 ⋅ 6|5—6|5 ½"


def test_gsm8k_a_part_is_not_the_value():
    assert score("#### **5**", "5", "strict") == score("#### $5*", "5", "strict") == 1
    for part in f"{PARTS}|{FIRST}".split("|"):
        assert score(f"#### {part}", part[0], "strict") == 0, part
    for part in f"{PARTS}|{WITHIN}".split("|"):
        assert score(f"So it is {part}", "5", "flexible") == score(f"So it is {part}.", "5", "flexible") == 0
        assert compute_score("numina_olympiads", f"The answer is {part}.", "5")["score"] == 0, part


def test_gsm8k_method():
    with pytest.raises(ValueError, match="loose"):
        score("5", "5", "loose")


@pytest.mark.parametrize(
    ("text", "pred"),
    [("so 007", "7"), ("-$1,234.50", "-1234.5"), (".5", "0.5"), ("-0.00", "0"), ("3/4", ""), ("", "")],
)
def test_gsm8k_votes_by_value(text, pred):
    assert compute_score("arithmetic", text, "7")["pred"] == pred


@given(
    st.text(alphabet="abc xyz\n", max_size=50),
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{:,}", "{}", "{}.00", "{:,}."]),
    st.text(alphabet="abc xyz\n", max_size=50),
)
def test_gsm8k_finds_a_formatted_number(before, number, form, after):
    text = form.format(number)
    assert score(f"{before} {text} {after}", str(number), "flexible") == 1.0
    assert score(f"{before}\n#### {text} {after}", str(number), "strict") == 1.0
    assert score(f"{before}\n#### {text} {after}", str(number + 1), "strict") == 0.0


def test_dispatch_names_what_is_known():
    check_sources(SOURCES.keys() - {"reasoning_gym/*"})  # which may not be installed
    for call in (lambda: check_sources(["arithmetic", "nope"]), lambda: compute_score("nope", "", "")):
        with pytest.raises(ValueError) as error:
            call()
        message = str(error.value)
        assert "'nope'" in message and "--reward_fn FILE.py:NAME" in message and "\n" not in message
        assert all(source in message for source in SOURCES)


def test_programs_need_a_sandbox(monkeypatch, capsys):
    check_sources(["kk"])
    assert capsys.readouterr().out == ""
    check_sources(["taco", "apps"])
    assert capsys.readouterr().out.count("sandbox of the tier") == 1
    message = "no sandbox for untrusted programs"
    monkeypatch.setattr("rewards.sandbox.tier", Mock(side_effect=SandboxError(message)))
    with pytest.raises(ValueError, match=message):
        check_sources(["taco"])


@pytest.mark.parametrize("case", golden("unfit_rewards"), ids=lambda case: case["line"])
def test_what_is_no_reward_is_refused(tmp_path, case):
    """A wrong signature too; a script that calls its own main() would else end the run with code 0."""
    (tmp_path / "mine.py").write_text(case["text"])
    with pytest.raises(ValueError) as error:
        load_rewards([case["spec"].format(folder=tmp_path)], [])
    said = str(error.value)
    assert case["line"].format(folder=tmp_path) in said and "\n" not in said


def make_row(text, **extra):
    row = dict(data_source="arithmetic", solution_str=text, ground_truth="5", extra_info=None)
    return row | extra


class Odd:
    def __str__(self):
        return "odd"


PLAIN = [
    (np.float32(0.5), 0.5), (np.int64(2), 2), (np.bool_(True), True), (np.array(0.5), 0.5),
    (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5), (torch.tensor([[2]]), 2),
    (torch.tensor([True]), True), ([np.float64(1), {"a": np.uint8(2)}], [1.0, {"a": 2}]),
    (np.array([[1, 2]]), [[1, 2]]), (torch.zeros(0, 2), []), ({"x"}, "{'x'}"), (b"x", "b'x'"),
    (1 - 2j, "(1-2j)"), (Odd(), "odd"), ({(1, 2): 3, "x": 4}, {"x": 4}), (None, None),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["naive", "prime"])
def test_results_are_plain(mode):
    """Whatever the extra keys are; a number of numpy or torch is a score and an accuracy too."""
    is_number = [type(plain) in (float, int, bool) for _, plain in PLAIN]

    def reward(solution_str, **_):
        value = PLAIN[int(solution_str)][0]
        number = is_number[int(solution_str)]
        return {"score": value, "acc": value, "extra": value} if number else {"score": 1, "extra": value}

    combined = CombinedReward({"a": reward, "b": reward}, [1.0, 2.0])
    rows = [make_row(str(i)) for i in range(len(PLAIN))]
    alone, both = (RewardManager(mode, function, workers=1).score(rows) for function in (reward, combined))
    for (_, plain), number, one, sum_ in zip(PLAIN, is_number, alone, both, strict=True):
        json.dumps([one, sum_])
        assert one["extra"] == sum_["extra"] == plain
        assert type(one["extra"]) is type(sum_["extra"]) is type(plain)
        if number:
            assert one == {"score": plain, "acc": plain, "extra": plain}
            assert (sum_["score"], sum_["score/a"]) == (3 * plain, plain)


@pytest.mark.parametrize("case", golden("failures"))
def test_a_failure_is_as_bad_as_the_worst_of_its_group(case):
    """In its score, its parts and its accuracy, by which DAPO goes."""
    rows = []
    for group, result in zip(case["groups"], case["results"], strict=True):
        rows.append(dict(group=group, reward=result))
    before = copy.deepcopy(rows)
    demoted = demote_failures(rows)
    assert [row["reward"] for row in demoted] == case["demoted"]
    assert rows == before
    assert demote_failures(demoted) == demoted


@pytest.mark.parametrize("case", golden("validations"))
def test_a_validation(case):
    """A failure counts 0, and no answer is no vote."""
    n = case["responses"]
    expected = case["metrics"]
    rows = [dict(data_source="x", index=i // n, reward=result) for i, result in enumerate(case["results"])]
    found = validation_metrics(rows)
    assert found | {f"val-core/x/{name}@{n}": value for name, value in expected.items()} == found
    assert {name.split("/")[2] for name in found} == {next(iter(expected)).split("/")[0]}


def test_what_is_kept_of_a_result():
    """An empty `pred` is none; the key `failure` is the manager's own."""
    cases = [(case["more"], case["kept"]) for case in golden("kept_of_results")]
    for more, kept in (*cases, (dict(acc=np.bool_(True)), dict(acc=1.0))):
        reward = Mock(return_value={"score": 1} | more)
        assert RewardManager("naive", reward).score([make_row("5")]) == [{"score": 1.0} | kept]


def test_a_validation_shows_a_response_of_each_source_as_it_is():
    texts = ["[bold]5[/bold] [/nope]", "\x1b[31m 5 \ud800", "x" * 5000 + "5"]
    rows = []
    for source in ("gsm8k", "arithmetic"):
        for i, text in enumerate(texts):
            sampled = dict(data_source=source, prompt_str="2+3=", solution_str=text, ground_truth="5")
            rows.append(dict(data_source=source, index=i, sampled=sampled, reward=dict(score=i, acc=i == 1)))
    shown = [validation_summary(rows, number)[1].splitlines() for number in range(20)]
    assert [len(lines) for lines in shown] == [6] * 20 and len({*map(tuple, shown)}) == 3
    lines = {line for lines in shown for line in lines}
    assert {"arithmetic: 2+3= [5]", f"  {texts[0]} -> {{'score': 0, 'acc': False}}"} < lines
    assert any(line.startswith("  \\x1b[31m 5 \\ud800 -> ") for line in lines)
    assert not any("\x1b" in line or line.count("x") > 500 for line in lines)
    assert any("[...]" in line for line in lines)
    assert shown[0][4:] == [f"val-core/{source}/acc/mean@1 0.333" for source in ("arithmetic", "gsm8k")]


def test_a_copy_elsewhere_finds_what_ships(tmp_path, monkeypatch):
    spec = "rewards/length.py:score"
    here = load_reward_fn(spec)
    digest = digest_of_file(spec)
    monkeypatch.chdir(tmp_path)
    digest_of_file.cache_clear()
    assert load_reward_fn(spec).__code__.co_filename == here.__code__.co_filename
    assert digest_of_file(spec) != spec and digest_of_file("rewards/none.py:score") == "rewards/none.py:score"
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/length.py").write_text("score = print")  # the user's own comes first
    assert load_reward_fn(spec) is print and len(digest) == 32


def test_the_manager_prints_rows_of_each_source(capsys):
    rows = [make_row(text, data_source=source) for text in "567" for source in ("gsm8k", "arithmetic")]
    RewardManager("naive", lambda **_: 0, 2).score(rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in lines[1::2]] == ["  5 ->"] * 2 + ["  6 ->"] * 2
    RewardManager("naive", lambda **_: 0).score([*rows, dict(data_source=["no", "text"])])
    assert capsys.readouterr().out == ""


def test_prime_manager_replaces_what_hangs_or_dies():
    kinds = dict(hang="TimeoutError", crash="WorkerError", **{"raise": "ValueError"})
    texts = ["1", *kinds, *map(str, range(20)), "hang", "hang"]
    manager = RewardManager("prime", hostile_reward, timeout_s=5, workers=2)
    results = manager.score([make_row(text) for text in texts])
    for text, result in zip(texts, results, strict=True):
        if text in kinds:
            assert result["score"] == 0.0 and result["failure"].startswith(kinds[text])
        else:
            assert result == {"score": float(text), "acc": True, "pred": "2.0"}
    assert failure_metrics(results) == {"reward/timeouts": 3, "reward/crashes": 1, "reward/errors": 1}
    assert manager.score([]) == [] and manager.score([{}])[0]["failure"].startswith("KeyError")


KEYS = st.sampled_from(["score", "acc", "pred", "failure"])
NUMBERS = st.integers() | st.floats() | st.just(10**400)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda x: st.lists(x) | st.dictionaries(KEYS | st.text(), x),
)


@given(ANY_JSON | st.lists(st.dictionaries(KEYS, ANY_JSON), max_size=2))
def test_any_reply_is_a_result_or_a_failure(reply):
    with patch("rewards.manager.Worker.call", lambda *_, **__: reply):
        [result] = RewardManager("prime", hostile_reward, workers=1).score([make_row("1")])
    json.dumps(result)
    assert type(result["score"]) is float and math.isfinite(result["score"])
    assert type(result.get("acc", 0.0)) is float and math.isfinite(result.get("acc", 0.0))
    assert result.get("pred") is None or result["pred"].strip()
    assert "failure" not in result or (result["score"] == 0 and type(result["failure"]) is str)


SHAPES_OF_FUNCTIONS = """
from __future__ import annotations
import contextlib, functools, threading
from dataclasses import dataclass

@contextlib.contextmanager
def quiet():
    yield

@quiet()
def of_another_file(data_source, solution_str, ground_truth, extra_info=None):
    return helper(solution_str) + 1

def counted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 1
    return wrapper

def plain_decorator(function):
    return lambda **row: function(**row) + 1

def length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str)

@counted
def decorated(data_source, solution_str, ground_truth, extra_info=None):
    return helper(solution_str)

@plain_decorator
def renamed(data_source, solution_str, ground_truth, extra_info=None):
    return helper(solution_str)

@functools.lru_cache
def helper(text):
    return len(text) - 1

@functools.lru_cache
def cached(data_source, solution_str, ground_truth, extra_info=None):
    return helper(solution_str) + 1

def make(offset):
    def nested(data_source, solution_str, ground_truth, extra_info=None):
        return helper(solution_str) + offset
    return nested

nested = make(1)
partial = functools.partial(length, extra_info=None)

class Judge:
    def __init__(self, offset):
        self.offset = offset
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return helper(solution_str) + self.offset
    def method(self, **row):
        return self(**row)
    @staticmethod
    def static(**row):
        return length(**row)

@dataclass
class Text:
    text: str

def own_class(data_source, solution_str, ground_truth, extra_info=None):
    return len(Text(solution_str).text)

judge = Judge(1)
method, static = judge.method, Judge.static
lambda_ = lambda solution_str, **_: len(solution_str)

def make_locked(lock):
    return lambda solution_str, **_: lock.locked() or len(solution_str)

locked = make_locked(threading.Lock())
"""
SHAPES = "length own_class of_another_file decorated renamed cached nested partial judge method".split()
SHAPES += "static", "lambda_"


@pytest.mark.parametrize("name", SHAPES)
def test_the_prime_manager_runs_what_the_naive_one_runs(tmp_path, name):
    (tmp_path / "shapes.py").write_text(SHAPES_OF_FUNCTIONS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/shapes.py").write_text("def length(**_):\n    return 99.0\n")
    function = load_reward_fn(f"{tmp_path}/shapes.py:{name}")
    other = load_reward_fn(f"{tmp_path}/other/shapes.py:length")  # another file of the same name
    for mode in ("naive", "prime"):
        assert RewardManager(mode, function).score([make_row("four")]) == [{"score": 4.0}]
        assert RewardManager(mode, other).score([make_row("four")]) == [{"score": 99.0}]
        assert RewardManager(mode, CombinedReward({"a": function}, [2.0])).score([make_row("four")])


def test_what_the_prime_manager_cannot_run_is_refused(tmp_path):
    (tmp_path / "shapes.py").write_text(SHAPES_OF_FUNCTIONS)
    function = load_reward_fn(f"{tmp_path}/shapes.py:locked")
    assert RewardManager("naive", function).score([make_row("four")]) == [{"score": 4.0}]
    with pytest.raises(ValueError, match=r"prime cannot send the reward to a process: .*pickle") as error:
        RewardManager("prime", function)
    assert "\n" not in str(error.value)
    (tmp_path / "shapes.py").write_text("import nowhere\n")  # changed since
    length = function.__globals__["length"]
    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        RewardManager("prime", length)


def test_hanging_samples_hold_up_nobody(tmp_path):
    """More hang than there are workers, each until all others are scored: no one runs into its time-out."""

    def reward(data_source, solution_str, ground_truth, extra_info=None):
        while solution_str == "hang" and len(os.listdir(ground_truth)) < 50:
            time.sleep(0.01)
        if solution_str != "hang":
            Path(ground_truth, solution_str).touch()
        return 1.0

    texts = ["hang"] * 5 + list(map(str, range(50)))
    rows = [make_row(text) | {"ground_truth": str(tmp_path)} for text in texts]
    assert RewardManager("prime", reward, timeout_s=60, workers=2).score(rows) == [{"score": 1.0}] * 55


def test_manager_limits():
    for mode, workers, timeout_s in (
        ("prime", 0, 1),
        ("prime", 1, 0),
        ("prime", 1, math.nan),
        ("nope", 1, 1),
    ):
        with pytest.raises(ValueError, match=r"above 0|unknown reward manager"):
            RewardManager(mode, workers=workers, timeout_s=timeout_s)


def test_combined_rewards(tmp_path):
    (tmp_path / "a.py").write_text("def f(**_):\n    return 2\n")
    specs = ["rewards", f"{tmp_path}/a.py:f"]
    reward = load_rewards(specs, [])
    [result] = RewardManager("naive", reward).score([make_row("5")])
    assert (result["score"], result["score/rewards"], result["score/a.f"]) == (3, 1, 2)
    rows = [dict(reward=x) for x in (result, dict(score=0.0, failure="E: x"))]
    assert score_parts(reward, rows) == [(1.0, [1, 0]), (1.0, [2, 0])]
    assert load_rewards(["rewards"], []) is compute_score
    assert score_parts(compute_score, rows) == [(1.0, [3, 0])]
    for mode in ("naive", "prime"):
        assert RewardManager(mode, load_rewards(["none"], [])).score([make_row("5")]) == [{"score": 0.0}]
    for wrong, weights, what in (
        (specs, [1.0], "1 --reward_weights for 2"),
        (specs[:1] * 2, [], "two --reward_fn"),
        ([], [], "at least one"),
        (specs, [1.0, math.nan], "--reward_weights 1.0 nan: give numbers"),
    ):
        with pytest.raises(ValueError, match=what):
            load_rewards(wrong, weights)


def test_dispatch_of_patterns():
    for source, module in (
        ("aime24", "math_dapo"),
        ("math_dapo_reasoning", "math_dapo"),
        ("taco", "prime_code"),
    ):
        assert _scorer(source) == module
    for source in ("AIME24", "x_aime", "math", "", None, "openai/gsm8k/"):
        assert _scorer(source) is None


SAYS = {  # an answer, as the scorer of a data_source wants it
    "openai/gsm8k": "#### {}",
    "lighteval/MATH": r"\boxed{{{}}}",
    "math_dapo": "Answer: {}",
    "numina_olympiads": r"\boxed{{{}}}",
    "hiyouga/geometry3k": r"\boxed{{{}}}",
}
SOLUTIONS = {
    "He has 2 + 3 = <<2+3=5>>5 apples.\n#### 5": "5",
    "#### 5": "5",
    "He sells 1,200 of them.\n#### 1,200": "1200",
    r"We have $x = 2 + 3 = \boxed{5}$.": "5",
    r"First $\boxed{4}$ seems right, but it is $\boxed{5}.$": "5",
    r"$2+3=\boxed{5}$.": "5",
    "\\begin{align*}\nx&=2+3\\\\\n&=\\boxed{5}.\n\\end{align*}": "5",
}


@pytest.mark.parametrize("source", SAYS)
@pytest.mark.parametrize("solution", SOLUTIONS)
def test_a_ground_truth_may_be_a_whole_solution(source, solution):
    """As GSM8K and MATH publish their columns; without its answer each response would score 0."""

    def score(answer):
        return compute_score(source, SAYS[source].format(answer), solution)["acc"]

    assert score(SOLUTIONS[solution]) and not score("6")


@pytest.mark.parametrize("source", [*SAYS, "shapes"])
def test_a_ground_truth_that_no_response_meets_is_refused(source):
    """One that scores as its own response is taken: zero too."""
    for truth in (0, "0", 0.5, ["5", "6"], "#### 5", *SOLUTIONS):
        check_row(source, truth, {})
    for truth in (math.nan, math.inf, "nan", "None", "null", "N/A", "-inf", None, "", [], ["5", None]):
        with pytest.raises(ValueError, match="ground truth"):
            check_row(source, truth, {})


def is_right(source, truth, text):
    return compute_score(source, text, truth)["acc"]


def judged(text):
    with patch.dict(os.environ, JUDGE_BASE_URL="http://127.0.0.1:9/v1", JUDGE_MODEL="none"):
        return importlib.import_module("rewards.judge").verdict_of(text, 1)[1]


MARKS = {  # of thoughts in the templates of models, those of gpt-oss last
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "<reasoning>": "</reasoning>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|><|start|>assistant<|channel|>final<|message|>",
}
NO_COMMA = json.dumps(dict(instruction_id_list=["punctuation:no_comma"], kwargs=[{}]))
CASES = json.dumps(dict(inputs=["1"], outputs=["5"]))
KNIGHT = "(1) Ann is a knight"
CALL = '<tool_call>{{"name": "f", "arguments": {{"a": {}}}}}</tool_call>'
VERDICT = '{{"reason": "", "grades": [{}]}}'
NUMBER = dict(low=1, high=9, number=5)
# who asks what follows a thought: a good text, a bad one, and whether a text is good
USERS = {x: (said.format(5), said.format(6), partial(is_right, x, "5")) for x, said in SAYS.items()}
USERS |= {
    "arithmetic": ("5", "6", partial(is_right, "arithmetic", "5")),
    "aime24": ("Answer: 5", "Answer: 6", partial(is_right, "aime24", "5")),
    "shapes": ("circle", "square", partial(is_right, "shapes", "circle")),
    "ifeval": ("a b", "a, b", partial(is_right, "ifeval", NO_COMMA)),
    "kk": (f"<answer>{KNIGHT}</answer>", "I do not know.", partial(is_right, "kk", KNIGHT)),
    "apps": ("```python\nprint(5)\n```", "```python\nprint(6)\n```", partial(is_right, "apps", CASES)),
    "judge": (VERDICT.format(5), VERDICT.format(0), lambda text: judged(text) == [5]),
    "calls": (CALL.format(5), "I call nothing.", lambda text: parse_calls(text) == [("f", dict(a=5))]),
    "guess": ("5", "6", lambda text: Guess(NUMBER).step(text) is None),
    "calculator": ("<<2+3>>", "<<2+4>>", lambda text: '"5"' in json.dumps(Calculator({}).step(text))),
}


@pytest.mark.parametrize("closing", ["</think>", "</reason>"])
def test_a_verdict_may_speak_of_thoughts(closing):
    assert judged(json.dumps(dict(reason=f"it has {closing} in it", grades=[7]))) == [7]


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("opening", MARKS)
def test_a_thought_gives_nothing(user, opening):
    good, bad, is_good = USERS[user]
    closing = MARKS[opening]

    def found(text):
        with suppress(ValueError):  # no verdict
            return bool(is_good(text))
        return False

    assert found(f"{opening}\n{bad}\n{closing}\n\n{good}")
    assert not found(f"{opening}\n{good}\n{closing}\n\n{bad}")
    assert not found(f"{opening}\n{good}")
    if opening == [*MARKS][-1]:  # whose prompt opens none
        return
    prompt = f"a question\n{opening}\n"
    assert not found(with_opening(good, prompt)) and found(with_opening(f"{bad}{closing}\n{good}", prompt))
    assert found(f"{bad}\n{closing}\n\n{good}") and not found(f"{good}{closing}{bad}")
    assert found(f"{opening}{bad}{closing}<|START_RESPONSE|>{good}<|END_RESPONSE|>")
    if user not in ("kk", "judge"):  # a mark of the reply is no thought's end
        far = "So we begin. " * 9
        assert found(f"{far}\n<reason>{bad}</reason>\n{good}") or user in ("shapes", "ifeval", "guess")
    if user != "kk":  # each tag once
        assert found(f"{opening}\nIt says '{closing}'.\n{bad}{closing}{good}")
