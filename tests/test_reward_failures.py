"""A reward that fails: a rule for each way to be broken, what a run says of it, and when it ends."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import golden

from algos import eval as evaluation
from rewards.manager import RewardManager, check_failures, failures
from rewards.manager.combined import load_rewards
from rewards.manager.failures import Failures
from system import sampler

# body of a reward: what its failure says
BROKEN = {case["body"]: case["failure"] for case in golden("broken_rewards")}
IN_A_PROCESS = {  # in the trainer's own process they would end or stop it
    "import os; os._exit(0)": "WorkerError: the worker process ended with code 0 (mine.py:score)",
    "import os; os.abort()": "WorkerError: the worker process ended with code -6 (mine.py:score)",
    "raise KeyboardInterrupt": "WorkerError: KeyboardInterrupt() (mine.py:score)",
    "while True: pass": "TimeoutError: no result after 2 s (--reward_timeout_s) (mine.py:score)",
}
HEAD = "{}def score(data_source, solution_str, ground_truth, extra_info=None):\n    '''A reward.'''\n    {}\n"
ROW = dict(data_source="x", solution_str="four", ground_truth="4", extra_info={})


def write(folder, body, kind=""):
    (folder / "mine.py").write_text(HEAD.format(kind, body))
    return f"{folder}/mine.py:score"


def outcome(mode, reward, **options):
    [result] = RewardManager(mode, reward, **options).score([ROW])
    return result


@pytest.mark.parametrize("kind", ["", "async "])
def test_each_way_to_be_broken_is_named(tmp_path, kind):
    cases = {body: says for body, says in BROKEN.items() if not (kind and "return score(" in body)}
    modes = [("naive", cases | {"import os; os._exit(0)": "SystemExit: os._exit(0) (mine.py, line 3)"})]
    for mode, table in (*modes, ("prime", cases | IN_A_PROCESS)):
        for i, (body, says) in enumerate(table.items()):
            (folder := tmp_path / f"{mode}{i}").mkdir()
            reward = load_rewards([write(folder, body, kind)], [])
            result = outcome(mode, reward, timeout_s=2 if "while" in body else 60)
            assert set(result) == {"score", "failure"} and result["score"] == 0
            assert result["failure"].startswith(says), body
            with pytest.raises(SystemExit, match="error: the reward failed for all 1 responses, the first"):
                Failures("reward").check([result["failure"]], 1)


def test_ctrl_c_ends_a_run(tmp_path):
    for kind in ("", "async "):
        (tmp_path / "next").mkdir(exist_ok=True)
        reward = load_rewards([write(tmp_path, "raise KeyboardInterrupt", kind)], [])
        with pytest.raises(KeyboardInterrupt):
            outcome("naive", reward)
        reward = load_rewards([write(tmp_path / "next", "return 1", kind)], [])  # nothing of it is left
        assert outcome("naive", reward) == dict(score=1.0)


@pytest.mark.parametrize(
    "value", ["True", "False", "3", "0.5", "{'score': True}", "__import__('numpy').float32(1)"]
)
def test_what_is_no_failure(tmp_path, value):
    body = f"from fractions import Fraction; return {value}"
    assert "failure" not in outcome("naive", load_rewards([write(tmp_path, body)], []))


def rows_of(*results):
    return [dict(group=i, reward=result) for i, result in enumerate(results)]


GOOD, BUG, LOST = (
    {"score": 1.0},
    dict(score=0.0, failure="KeyError: 'a'"),
    dict(score=0.0, failure="TimeoutError: 9 s"),
)
RESULTS = dict(good=GOOD, bug=BUG, lost=LOST, away=dict(score=0.0, failure="APIConnectionError: refused"))


@pytest.mark.parametrize("case", golden("ends_of_runs"), ids=lambda case: case["why"])
def test_when_a_run_ends(case, monkeypatch):
    monkeypatch.setattr(failures, "REWARDS", Failures("reward"))
    for i, names in enumerate(case["steps"]):
        rows = rows_of(*[RESULTS[name] for name in names])
        if i == case["ends"]:
            with pytest.raises(SystemExit, match="the reward failed for all"):
                check_failures(rows)
        else:
            check_failures(rows)


def test_said_once_for_each_kind_and_told_to_the_run(monkeypatch, caplog):
    monkeypatch.setattr(failures, "REWARDS", Failures("reward"))
    check_failures(rows_of(GOOD, BUG))
    assert caplog.text.count("warning: the reward failed for 1 of 2 responses, one with KeyError") == 1
    caplog.clear()
    caplog.set_level("INFO", "rewards")  # as a run has it
    for results in ((GOOD, BUG), (BUG, GOOD, LOST), (GOOD, LOST, BUG)):
        check_failures(rows_of(*results))
    [said] = caplog.records
    assert said.levelname == "WARNING" and "one with TimeoutError: 9 s" in said.getMessage()
    with pytest.raises(SystemExit) as error:
        check_failures(rows_of(BUG, BUG))
    last = caplog.records[-1]
    assert (last.levelname, last.getMessage()) == ("INFO", str(error.value))
    assert "the reward failed for all 2 responses, the first with KeyError: 'a'" in str(error.value)


def test_an_environment_that_always_fails_ends_the_run():
    rows = [row | dict(failure="error: KeyError: 'x'") for row in rows_of(GOOD, GOOD)]
    with pytest.raises(SystemExit, match="the environment failed for all 2 responses"):
        check_failures(rows)


PROMPT = dict(data_source="x", prompt=[dict(role="user", content="?")], extra_info=dict(split="test"))
PROMPT["reward_model"] = dict(style="rule", ground_truth="4")


def test_eval_names_a_broken_reward(tmp_path, monkeypatch, capsys, caplog):
    """In one line, with code 1; where some responses are scored, a warning."""
    rows = [PROMPT | dict(responses=["4", "five"])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "responses.parquet")
    flags = dict(data=(str(tmp_path / "responses.parquet"),), output=str(tmp_path / "eval"))
    monkeypatch.setattr(failures, "REWARDS", Failures("reward"))
    evaluation.main(evaluation.Args(**flags, reward_fn=(write(tmp_path, "return float(solution_str)"),)))
    assert "warning: the reward failed for 1 of 2 responses, one with ValueError" in caplog.text
    with pytest.raises(SystemExit, match=r"all 2 .*the first with KeyError: 'level' \(mine.py, line 3\)"):
        evaluation.main(evaluation.Args(**flags, reward_fn=(write(tmp_path, "return extra_info['level']"),)))


TRAINERS = "agent", "dapo", "distill", "grpo", "ppo"


def test_every_trainer_ends_with_a_broken_reward(tmp_path, monkeypatch):
    """A trainer has rows scored by `score_rows` alone, in training and in validation."""
    manager = RewardManager("naive", load_rewards([write(tmp_path, "return")], []))
    sampled = dict(prompt_ids=[3], response_ids=[1, 2], finish_reason="stop", group=0)
    rows = [PROMPT | sampled | dict(sample=i) for i in range(2)]
    tokenizer = SimpleNamespace(decode=lambda ids: "four")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    for name in TRAINERS:
        monkeypatch.setattr(failures, "REWARDS", Failures("reward"))
        with pytest.raises(SystemExit, match=r"failed for all 2 responses, .* TypeError: the reward"):
            importlib.import_module(f"algos.{name}").score_rows(rows, manager, tokenizer)


def test_no_other_place_calls_a_reward():
    """The scripts with a flag for rewards are those above; each scores rows in `score_rows` alone."""
    scripts = {path.stem: path.read_text() for path in Path(evaluation.__file__).parent.glob("*.py")}
    trainers = {*TRAINERS, "grpo_nano"}
    assert {name for name, text in scripts.items() if "load_rewards(" in text} == trainers | {"eval"}
    for name in trainers:
        assert "manager.score(" not in scripts[name]
        main = scripts[name].partition("def main(args):")[2].partition("# ---- The system")[0]
        assert main.count("score_rows(") == 2  # of validation and of training
    for path in (Path(sampler.__file__), Path(evaluation.__file__).with_name("grpo_nano.py")):
        body = path.read_text().partition("def score_rows(rows, manager, tokenizer):")[2]
        assert "    check_failures(rows)\n    return demote_failures(rows)\n" in body
