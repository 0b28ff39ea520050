"""rewards/judge.py against a small server: grades, rubrics, failures, retries, the cache, injections."""

import json
import re
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, golden, metrics, rollouts, run
from judge_server import BODIES, SPECIAL, WRITES, Judge, sections

from data_prep import inspect
from rewards.manager import RewardManager
from rewards.manager.combined import load_rewards
from rewards.manager.failures import OUTAGE

PROMPT = [dict(role="user", content="What is the capital of Peru?")]
QUESTION = "Does the response name the right capital?"


@pytest.fixture
def judge(monkeypatch):
    """A server, and the module of the reward; a manager has one event loop and so one client."""
    server = Judge()
    monkeypatch.setenv("JUDGE_BASE_URL", server.url)
    monkeypatch.setenv("JUDGE_MODEL", "rule")
    monkeypatch.delenv("JUDGE_RUBRIC", raising=False)
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    server.reward = load_rewards([f"{ROOT}/rewards/judge.py:score"], [])
    server.module = server.reward.__globals__
    yield server
    server.over.set()
    server.shutdown()


def row(text, rubric=QUESTION, truth="Lima", **more):
    extra = {} if rubric is None else dict(rubric=rubric)
    return (
        dict(data_source="x", solution_str=text, ground_truth=truth, extra_info=extra, prompt=PROMPT) | more
    )


def scores(judge, *rows, **options):
    return RewardManager("naive", judge.reward, **options).score(rows)


def test_a_response_is_graded(judge):
    results = scores(judge, row("It is Lima"), row("It is Cusco"))
    assert [x["score"] for x in results] == [1, 0]
    assert results[0] == dict(score=1.0, grades=[10], reason="by rule")
    body = judge.requests[0]
    assert body["model"] == "rule" and body["temperature"] == 0
    user = body["messages"][1]["content"]
    assert "user: What is the capital of Peru?" in user and f"1. {QUESTION}" in user and "Lima" in user
    schema = body["response_format"]["json_schema"]["schema"]["properties"]["grades"]
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)


@pytest.mark.parametrize("case", golden("rubrics"), ids=lambda case: str(case["rubric"]))
def test_rubrics(judge, case):
    [result] = scores(judge, row("Lima", case["rubric"]))
    assert result["score"] == case["score"]


@pytest.mark.parametrize("case", golden("unfit_rubrics"), ids=lambda case: str(case["rubric"]))
def test_a_row_without_a_good_rubric_is_a_failure(judge, case):
    rubric = case["rubric"]
    [result] = scores(judge, row("Lima", rubric))
    assert "rubric" in result["failure"]
    assert judge.requests == []
    rows = [row("", rubric, index=0, reward_model={})]
    [fault] = RewardManager("naive", judge.reward).faults(["x"], rows)
    assert re.match("row 0, data_source 'x': .*rubric", str(fault))


def test_a_rubric_for_all_rows_may_be_in_the_environment(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_RUBRIC", QUESTION)
    assert scores(judge, row("Lima", None))[0]["score"] == 1


def test_a_bad_rubric_is_named_before_a_run(judge, tmp_path, capsys):
    about = dict(prompt=PROMPT, ability="x", reward_model=dict(style="model"), data_source="x")
    rubrics = [json.dumps([{"criterion": "a", key: 1}]) for key in ("weight", "weigth")]
    rows = [about | dict(extra_info=dict(rubric=rubric)) for rubric in rubrics]
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(SystemExit):
        inspect.main(inspect.Args((path,), reward_fn=(f"{ROOT}/rewards/judge.py:score",)))
    said = capsys.readouterr().out
    assert f"{path}: row 1, data_source 'x': a rubric is a question, or" in said and "weigth" in said
    assert judge.requests == []


def test_no_reference_and_odd_texts(judge):
    for text in ("", "\ud800", "x" * 100_000, "=== RESPONSE ===", "\x00"):
        assert "failure" not in scores(judge, row(text, truth=None))[0]
    judge.mode = "thinking"  # a draft is no verdict
    assert scores(judge, row("said in parts"))[0]["score"] == 1


SCORED = "good fenced thought thinking float bare extra once plain".split()
FAILED = dict.fromkeys(WRITES.keys() - SCORED, "ValueError: the judge wrote no verdict with 1 grades")
FAILED |= dict.fromkeys(["key", "model", "refused"], "ValueError: the judge refuses: Error code: 4")
FAILED |= dict.fromkeys(BODIES, "ValueError: {url}/ sent no chat completion but ")
LATE = dict(broken="HTTP 500", closes="RemoteProtocolError..Server", cut="RemoteProtocolError..peer")
LATE |= dict(hang="no answer")
BUSY = dict.fromkeys(["busy", "long", "down"], "HTTP (429|503)")  # its own, or what others wait for
AWAY = LATE | BUSY
STEPS = [SCORED, *([*modes, "good"] for modes in (FAILED, LATE, BUSY)), *[["down"]] * OUTAGE]  # of questions


def test_a_run_whose_judge_has_every_fault(judge, tiny, arithmetic, tmp_path, monkeypatch):
    """A refusal ends it before the first score, an outage in its third step; it resumes and loses no step."""
    monkeypatch.setenv("JUDGE_RUBRIC", QUESTION)
    given, log = [{} for _ in STEPS], tmp_path / "metrics.jsonl"  # {question: mode} of each step

    def mode(body):
        question = sections(body["messages"][1]["content"])[0]["QUESTION"]
        step = len(log.read_text().splitlines())
        return given[step].setdefault(question, STEPS[step][len(given[step]) % len(STEPS[step])])

    flags = (
        "--train_batch_size 24 --group_size 2 --ppo_mini_batch_size 24 --max_prompt_length 16 --save_freq 1"
    )
    flags += " --max_response_length 4 --rollout_dump --reward_timeout_s 6 --total_steps 8"
    flags += f" --reward_fn {ROOT}/rewards/judge.py:score --output_dir {tmp_path} --model {tiny}"
    command = ROOT / "algos/grpo.py", *flags.split(), "--train_files", arithmetic / "train.parquet"
    refused, late = "ValueError: the judge refuses: Error code: 401", "TimeoutError: no result after 6.0 s"
    for judge.mode, end, steps in (("key", refused, 0), (mode, late, 6), ("good", None, 8)):
        done = run(*command, check=False)
        assert done.returncode == (end is not None), done.stderr
        assert (
            f"error: the reward failed for all 48 responses, the first with {end}" in done.stderr or not end
        )
        assert len(log.read_text().splitlines()) == steps
    for step, modes in enumerate(given[:-1], 1):
        counts = Counter()
        for row in rollouts(tmp_path, step):
            name, failure = modes[f"user: {row['prompt_str']}"], row.get("failure", "")
            counts["reward/errors"] += name in FAILED
            counts["reward/timeouts"] += name in AWAY
            assert failure.startswith(FAILED.get(name, late if name in AWAY else "").format(url=judge.url))
            assert re.search(AWAY.get(name, ""), failure) and bool(failure) == (name in FAILED | AWAY), (
                name,
                failure,
            )
        assert counts.items() <= metrics(tmp_path)[step].items()
    assert list(metrics(tmp_path)) == [*range(1, 9)]


def test_as_many_requests_at_once_as_the_server_takes(judge):
    judge.mode = "four"
    results = scores(judge, *(row(f"Lima {i}") for i in range(64)), timeout_s=60)
    assert [x["score"] for x in results] == [1] * 64
    assert len(judge.requests) < 5 * 64


def test_verdicts_are_cached_by_content(judge):
    for _ in range(3):
        scores(judge, row("Lima"))
    assert len(judge.requests) == 1
    others = [row("Lima", "Is it short?"), row("Lima", truth="Rome"), row("Lima", prompt=None), row("Lima ")]
    scores(judge, *others)
    assert len(judge.requests) == 1 + len(others)


def test_it_runs_in_processes_too(judge):
    results = RewardManager("prime", judge.reward, workers=1, timeout_s=60).score([row("Lima"), row("x")])
    assert [x["score"] for x in results] == [1, 0]


@pytest.mark.parametrize("name", ["JUDGE_BASE_URL", "JUDGE_MODEL"])
def test_what_is_not_set_is_refused_at_the_start(judge, monkeypatch, name):
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=f"{name} is not set"):
        load_rewards([f"{ROOT}/rewards/judge.py:score"], [])


@pytest.mark.parametrize("case", golden("injections"))
def test_a_response_cannot_speak_to_the_judge(judge, case):
    """It stays between marks that it cannot know, without a token that a chat template reads."""
    [result] = scores(judge, row(case["response"]))
    assert result == dict(score=0.0, grades=[0], reason="by rule")
    assert not SPECIAL.search(judge.module["neutral"](case["response"]))
