"""Procedural tasks: the rows, and the scorer that runs the library's own."""

import ast
import inspect
import textwrap
from importlib.util import find_spec

import pytest

if not find_spec("reasoning_gym"):  # one that is there and does not import is an error
    pytest.skip("pip install --no-deps -r requirements-reasoning-gym.txt", allow_module_level=True)
from reasoning_gym.factory import DATASETS

from data_prep import reasoning_gym
from data_prep.lib.schema import load_rows
from rewards import check_sources, compute_score
from rewards.reasoning_gym import REFUSED, check_task

COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
EVALUATORS = {"eval", "exec", "compile", "parse_expr", "sympify", "parse_latex", "loadtxt", "loads"}


def prepared(task, out, **sizes):
    reasoning_gym.main(reasoning_gym.Args(task, str(out), **sizes))
    return [row for split in ("train", "test") for row in load_rows(out / f"{split}.parquet", COLUMNS)]


def score(row, response):
    source, truth = row["data_source"], row["reward_model"]["ground_truth"]
    return compute_score(source, response, truth, row["extra_info"])


# tuples, numbers as keys and numpy strings in the entries; prints of the library
@pytest.mark.parametrize("task", ["leg_counting", "rearc", "tower_of_hanoi", "knights_knaves", "codeio"])
def test_rows_and_their_scores(tmp_path, task):
    sizes = {"train_size": 3, "test_size": 2, "seed": 5}
    rows = prepared(task, tmp_path / "a", **sizes)
    assert rows == prepared(task, tmp_path / "b", **sizes) and len(rows) == 5
    for name in ("train.parquet", "test.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    check_sources([rows[0]["data_source"]])
    for row in rows:
        answer = row["extra_info"]["answer"]
        assert score(row, f"<think>5 or <answer>6</answer>?</think> So {answer}.")["score"] == 1.0
        for wrong in ("", answer.replace("answer>", "b>"), f"{answer}</think> hm", "<answer>?</answer>"):
            assert score(row, wrong)["acc"] == 0.0
    assert score(rows[0], "7")["pred"] == ""


def test_answers_that_the_library_cannot_read(tmp_path):
    row = prepared("prime_factorization", tmp_path, train_size=1, test_size=1)[0]
    assert score(row, "<answer>two</answer>") == {"score": 0.0, "acc": 0.0, "pred": "two", "unreadable": True}
    assert score(row, row["extra_info"]["answer"])["unreadable"] is False


def test_equal_questions_stand_once(tmp_path, capsys):
    rows = prepared("gcd", tmp_path, train_size=4, test_size=2)
    questions = [row["extra_info"]["question"] for row in rows]
    assert len(set(questions)) == len(questions) == 6
    entry = {"question": "1+1?", "answer": "2"}
    seen = set()
    assert reasoning_gym.make_row(entry, "train", 0, "gcd", seen)["reward_model"]["ground_truth"] == "2"
    with pytest.raises(reasoning_gym.prepare.LeftOut, match=r"the question of an earlier row"):
        reasoning_gym.make_row(entry, "train", 1, "gcd", seen)


def test_refused_tasks(tmp_path):
    for task in REFUSED:
        with pytest.raises(ValueError, match=rf"task {task} is refused: ") as error:
            reasoning_gym.main(reasoning_gym.Args(task, str(tmp_path)))
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
    for task, info, what in (
        ("countdown", {"entry": "{}"}, "is refused: its scorer evaluates the model's text"),
        ("none", {"entry": "{}"}, "reasoning-gym has no task 'none'; it has ab, acre"),
        ("gcd", {}, r"extra_info\['entry'\] is missing"),
        ("gcd", {"entry": "{'question': "}, r"extra_info\['entry'\] is no Python literal"),
    ):
        with pytest.raises(ValueError, match=what):
            compute_score(f"reasoning_gym/{task}", "<answer>__import__('os')</answer>", "1", info)
    with pytest.raises(ValueError, match=r"--test_size is 0"):
        reasoning_gym.main(reasoning_gym.Args("gcd", str(tmp_path), test_size=0))


def test_no_other_scorer_evaluates_text():
    """Read from the installed version; those that only read JSON or numbers are harmless."""
    data_only = {
        *("boxnet", "codeio", "game_of_life", "graph_color", "group_anagrams", "jugs", "knight_swap"),
        *("number_sorting", "palindrome_partitioning", "pool_matrix"),
    }
    found = set()
    for task, (kind, _) in DATASETS.items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.score_answer)))
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if EVALUATORS & {getattr(call, "id", getattr(call, "attr", "")) for call in calls}:
            found.add(task)
    evaluate = {task for task, why in REFUSED.items() if "as Python code" in why}
    assert found - data_only == evaluate and data_only <= found
    for task in data_only:
        check_task(task)
