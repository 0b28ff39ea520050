"""How rewards are called: `async def`, groups, and several of each kind with weights."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from rewards.manager import RewardManager, demote_failures
from rewards.manager.combined import load_rewards, score_parts

REWARDS = '''
import asyncio, os, time
from pathlib import Path

client = {}  # a client that a module keeps belongs to one event loop

def plain(data_source, solution_str, ground_truth, extra_info=None):
    correct = float(solution_str == ground_truth)
    return {"score": correct, "acc": correct, "pred": 1}

async def judge(data_source, solution_str, ground_truth, extra_info=None):
    assert client.setdefault("loop", asyncio.get_running_loop()) is asyncio.get_running_loop()
    client["now"] = client.get("now", 0) + 1
    client["most"] = max(client.get("most", 0), client["now"])
    await asyncio.sleep(extra_info.get("wait", 0.01))
    client["now"] -= 1
    if solution_str == "bad":
        raise ValueError("bad")
    return {"score": len(solution_str), "most": client["most"], "acc": 0.5, "pred": "judge"}

async def meet(data_source, solution_str, ground_truth, extra_info=None):
    """Returns when all eight have come."""
    client["met"] = client.get("met", 0) + 1
    while client["met"] < 8:
        await asyncio.sleep(0.001)
    return 1.0

def rank(data_sources, solution_strs, ground_truths, extra_infos):
    """The place by length, from 0 for the longest, and what it saw."""
    order = sorted(solution_strs, key=len, reverse=True)
    return [{"score": order.index(text), "seen": len(solution_strs)} for text in solution_strs]

async def rank_later(data_sources, solution_strs, ground_truths, extra_infos):
    await asyncio.sleep(0.01)
    return rank(data_sources, solution_strs, ground_truths, extra_infos)

def after(solution_strs, results, **_):
    return [result.get("acc", -1) + 10 * ("failure" in result) for result in results]

def some(solution_strs, **_):
    return ["x" if text == "bad" else 1 for text in solution_strs]

def few(solution_strs, **_):
    return [1.0]

def one(solution_strs, **_):
    return 1.0

def array(solution_strs, **_):
    import numpy
    return numpy.arange(len(solution_strs))

def fails(solution_strs, **_):
    if "bad" in solution_strs:
        raise ValueError("bad")
    return [1.0] * len(solution_strs)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    return path


def score(file, names, texts, groups=None, weights=(), mode="naive", extra=None, **options):
    reward = load_rewards([f"{file}:{name}" for name in names.split()], weights)
    rows = [dict(data_source="x", solution_str=t, ground_truth="4", extra_info=extra or {}) for t in texts]
    return RewardManager(mode, reward, **options).score(rows, groups)


def test_all_wait_at_the_same_time_up_to_a_limit(file):
    assert [x["score"] for x in score(file, "meet", "abcdefgh")] == [1] * 8
    for workers, texts in ((1, 40), (4, 200)):
        results = score(file, "judge", ["x"] * texts, workers=workers)
        assert max(result["most"] for result in results) == 16 * workers


@pytest.mark.parametrize("mode", ["naive", "prime"])
def test_a_slow_one_is_a_time_out_and_holds_up_nobody(file, mode):
    row = dict(data_source="x", solution_str="a", ground_truth="4")
    rows = [row | dict(extra_info=dict(wait=seconds)) for seconds in (900, 0)]
    reward = load_rewards([f"{file}:judge"], [])
    results = RewardManager(mode, reward, timeout_s=1).score(rows)
    assert results[0]["failure"] == "TimeoutError: no result after 1 s (--reward_timeout_s) (mine.py:judge)"
    assert results[1]["score"] == 1
    assert (
        RewardManager(mode, reward, timeout_s=60).score(rows[1:])[0]["score"] == 1
    )  # the loop is still good


@pytest.mark.parametrize("mode", ["naive", "prime"])
@pytest.mark.parametrize("name", ["rank", "rank_later"])
def test_a_group_is_scored_at_once_wherever_its_rows_are(file, mode, name):
    texts, groups = ["aaa", "b", "a", "bb", "aa", "c"], [7, 3, 7, 3, 7, 9]
    results = score(file, name, texts, groups, mode=mode)
    assert [x["score"] for x in results] == [0, 1, 2, 0, 1, 0]
    assert [x["seen"] for x in results] == [3, 2, 3, 2, 3, 1]
    assert [x["seen"] for x in score(file, name, texts, mode=mode)] == [1] * 6  # each is its own group


def test_what_a_group_may_return(file):
    texts, groups = ["bad", "b", "c"], [0, 0, 1]
    results = score(file, "some", texts, groups)
    assert "'x' (str)" in results[0]["failure"] and results[1:] == [{"score": 1.0}] * 2
    assert [x["score"] for x in score(file, "array", texts, groups)] == [0, 1, 0]
    for name in ("few", "one"):
        first, second, alone = score(file, name, texts, groups)
        assert first == second and "returns a list of 2 results, not" in first["failure"]
    assert alone["failure"].startswith("TypeError: a reward of a group returns a list of 1 results, not 1.0")
    first, second, other = score(file, "fails", texts, groups)
    assert first == second and first["failure"].startswith("ValueError: bad (mine.py, line")
    assert other == {"score": 1.0}


@pytest.mark.parametrize("mode", ["naive", "prime"])
def test_a_plain_an_async_and_a_group_reward_with_weights(file, mode):
    texts, groups = ["4", "44", "bad", "444"], [0, 0, 0, 1]
    results = score(file, "plain judge rank", texts, groups, (1.0, 0.5, -2.0), mode)
    first, second, failed, other = results
    assert failed == {"score": 0.0, "failure": failed["failure"]}
    for result, part in ((first, (1, 1, 2)), (second, (0, 2, 1)), (other, (0, 3, 0))):
        assert [result[f"score/mine.{name}"] for name in ("plain", "judge", "rank")] == [*part]
        assert result["score"] == part[0] + 0.5 * part[1] - 2 * part[2]
        assert result["acc"] == part[0] and result["pred"] == "1"
    reward = load_rewards([f"{file}:{name}" for name in ("plain", "judge", "rank")], (1.0, 0.5, -2.0))
    rows = demote_failures([dict(group=g, reward=x) for g, x in zip(groups, results, strict=True)])
    assert score_parts(reward, rows)[2] == (-2.0, [2, 1, 2, 0])  # the failure has the parts of the lowest


def test_a_group_reward_may_read_what_came_before(file):
    results = score(file, "plain after", ["4", "5"], [0, 0], (1.0, 100.0))
    assert [x["score"] for x in results] == [101, 0]
    assert [x["score/mine.after"] for x in score(file, "rank after", ["4"])] == [-1]  # no accuracy
    assert "failure" in score(file, "judge after", ["bad"])[0]


@pytest.mark.parametrize(
    ("names", "group_size", "problem"),
    [
        ("plain rank", 1, "rank compares the responses to a prompt: --group_size above 1"),
        ("after plain", 8, "after reads the results of others: give one of them before it"),
        ("after", 8, "after reads the results of others"),
    ],
)
def test_what_is_refused(file, names, group_size, problem):
    with pytest.raises(ValueError, match=problem):
        load_rewards([f"{file}:{name}" for name in names.split()], [], group_size)


def test_a_weighted_sum_is_finite(file, tmp_path):
    (tmp_path / "huge.py").write_text("def f(**_):\n    return 1e308\n")
    reward = load_rewards([f"{tmp_path}/huge.py:f"], [10.0])
    rows = [dict(data_source="x", solution_str="", ground_truth="", extra_info={})]
    assert RewardManager("naive", reward).score(rows)[0]["failure"].startswith("OverflowError")


RANK = """
import os, sys
from rewards.manager import RewardManager
programs = ["x = int(input())\\nfor _ in range(10**5): pass\\nprint(x)", "print(5)", "1 / 0"]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
truth = dict(inputs=["1", "2", "5"], outputs=["1", "2", "5"])
rows = [dict(data_source="taco", solution_str=p, ground_truth=truth, extra_info=None) for p in programs * 2]
print([result["score"] for result in RewardManager(sys.argv[1]).score(rows[rank::ranks])])
"""


@pytest.mark.parametrize("mode", ["naive", "prime"])
def test_programs_have_one_verdict_on_any_number_of_ranks(mode):
    found = {}
    for ranks in (1, 2):
        shared = dict(os.environ, WORLD_SIZE=str(ranks), PYTHONPATH=str(ROOT))
        envs = [dict(shared, RANK=str(i)) for i in range(ranks)]
        command = [sys.executable, "-c", RANK, mode]
        jobs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for env in envs]
        parts = [json.loads(job.communicate()[0].splitlines()[-1]) for job in jobs]
        found[ranks] = [parts[i % ranks][i // ranks] for i in range(6)]
    assert found[1] == found[2] == [1, 1 / 3, 0] * 2
