"""agent.py and generate.py --env from end to end, as a user runs them: five turns of a model that learns."""

import shutil
import time
from subprocess import DEVNULL

import psutil
import pyarrow.parquet as pq
import pytest
from conftest import (
    ROOT,
    changed,
    check_advantages,
    column,
    flags_of,
    healthy,
    hf,
    holder,
    kill,
    load_weights,
    metrics,
    rollouts,
    run,
    same,
    start,
)
from transformers import GenerationConfig

from algos.agent import group_advantages

AGENT, TALK = ROOT / "algos/agent.py", ROOT / "tests/talk_env.py"


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """It ends a turn by any of 31 tokens, so that turns are short."""
    model = shutil.copytree(tiny, tmp_path_factory.mktemp("agent") / "model")
    GenerationConfig(eos_token_id=[1, *range(20, 50)]).save_pretrained(model)
    return model


FLAGS = (
    "--train_batch_size 8 --ppo_mini_batch_size 4 --group_size 4 --total_steps 4 --save_freq 2"
    " --max_prompt_length 16 --max_response_length 96 --max_tokens_per_microbatch 500"
    " --max_observation_length 10 --lr 3e-3 --test_freq 2 --rollout_dump --keep_checkpoints 0"
    " --env_timeout_s 20 --echo_coef 0.05 --warmup_steps 2 --use_kl_loss --kl_loss_coef 0.01"
    " --temperature 0.9"
)


@pytest.fixture(scope="module")
def flags(model, arithmetic):
    def flags(out, *more, env="Talk"):
        reward = () if "--reward_fn" in more else ("--reward_fn", f"{TALK}:score")
        return [*flags_of(model, arithmetic, out, FLAGS), "--env", f"{TALK}:{env}", *reward, *more]

    return flags


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    """Four steps on one rank, undisturbed, and without a warning."""
    out = tmp_path_factory.mktemp("straight")
    assert "UserWarning" not in run(AGENT, *flags(out)).stderr
    return out


def test_it_runs_and_reports(straight, model):
    steps = healthy(straight)
    assert list(steps) == [0, 1, 2, 3, 4]
    assert [steps[step]["actor/lr"] for step in range(1, 5)] == [1.5e-3, 3e-3, 3e-3, 3e-3]  # of the optimizer
    assert steps[1]["num_turns/max"] == 5 and steps[1]["num_turns/mean"] > 4
    assert steps[0]["val/num_turns"] >= 1
    ends = [row["finish_reason"] for row in rollouts(straight, 1)]
    assert steps[1]["env/turn_limit_ratio"] == ends.count("turns") / len(ends)
    assert 0.3 < steps[1]["env/token_ratio"] < 0.8 and steps[1]["env/used_ratio"] > 0.9
    assert changed(model, hf(straight)) == load_weights(model).keys()
    assert max(m.get("training/rollout_logp_diff_mean", 0) for m in steps.values()) < 1e-5
    said = [row["extra_info"]["messages"] for row in rollouts(straight, 1)]
    assert [m["role"] for m in max(said, key=len)] == ["assistant", "user"] * 4 + ["assistant"]


def test_advantages_are_those_of_the_groups(straight):
    def advantages(rows):
        return group_advantages(column(rows, "score"), column(rows, "index"))

    check_advantages(straight, range(1, 5), advantages)


def test_the_reference_stays_where_training_began(straight):
    """The policy goes away from it step by step, also in a run that was resumed: see `same`."""
    kl = [metrics(straight)[step]["actor/kl_loss"] for step in range(1, 5)]
    assert 0 < kl[0] < kl[1] < kl[2] < kl[3]


def test_rows_without_an_advantage_are_trained_where_the_loss_has_more(flags, tmp_path):
    """Here a KL and what the environment says."""
    more = "--reward_fn", f"{TALK}:equal", "--total_steps", 1, "--save_freq", 0, "--test_freq", 0
    run(AGENT, *flags(tmp_path, *more))
    step = metrics(tmp_path)[1]
    assert step["critic/advantages/max"] == 0
    assert step["global_seqlen/balanced_max"] > 0.5 * step["global_seqlen/max"]  # tokens of the update


def test_delays_and_ranks_change_nothing(straight, flags, tmp_path, monkeypatch):
    """Environments that take up to .14 s, by chance; trajectories of a group in a row with one prompt."""
    monkeypatch.setenv("TALK_DELAY_S", "0.02")
    run(AGENT, *flags(tmp_path, "--total_steps", 1, "--tp_size", 2, "--hsdp_replicas", 2), ranks=2)
    same(straight, tmp_path, [1], 1e-4)


def test_killed_while_environments_work_and_resumed(straight, flags, tmp_path, monkeypatch):
    with monkeypatch.context() as slow:
        slow.setenv("TALK_DELAY_S", "0.1")
        victim = start(AGENT, *flags(tmp_path), stdout=DEVNULL, stderr=DEVNULL)
    while not (tmp_path / "checkpoints/latest").exists():
        assert victim.poll() is None
        time.sleep(0.02)
    time.sleep(1)  # in the next rollout, most of whose time is the environments'
    workers = psutil.Process(holder(tmp_path)).children(recursive=True)
    kill(victim, tmp_path)
    assert workers and len(metrics(tmp_path)) == 3
    run(AGENT, *flags(tmp_path))
    same(straight, tmp_path)
    assert not changed(hf(straight), hf(tmp_path))
    psutil.wait_procs(workers)  # none outlives its run


def test_trouble_ends_single_trajectories(flags, model, tmp_path):
    """Of seven turns one hangs, one raises, one kills its process and one answers with a megabyte.

    Adapters are trained, and saved in the weights of their layers. Without them the model is the reference.
    """
    more = "--total_steps", 2, "--env_timeout_s", 2, "--lora_rank", 4, "--ppo_mini_batch_size", 8
    run(AGENT, *flags(tmp_path, *more, env="Trouble"), ranks=2)
    linear = {name for name in load_weights(model) if name.endswith("_proj.weight")}
    assert changed(model, hf(tmp_path)) == linear
    steps = metrics(tmp_path)
    assert steps[1]["actor/kl_loss"] == 0 and steps[2]["actor/kl_loss"] > 1e-6
    for name in ("timeouts", "crashes", "errors"):
        assert steps[1][f"env/{name}"] + steps[2][f"env/{name}"] > 0
    assert steps[1]["env/cut_observations"] > 0 and steps[1]["num_turns/max"] > 2
    assert steps[2]["training/rollout_logp_diff_mean"] < 1e-5 and steps[2]["actor/skipped_updates"] == 0
    failures = {row["extra_info"]["failure"] for row in rollouts(tmp_path, 1)}
    assert failures > {"timeout", "crash"} and "error: RuntimeError: no idea" in failures


def test_generate_and_eval(straight, flags, arithmetic, tmp_path):
    """The answers of validation, scored as there, whatever the number of ranks."""
    talk = "--env", f"{TALK}:Talk", "--max_observation_length", 10
    files = "--model", straight, "--data", arithmetic / "val.parquet"
    limits = "--max_prompt_length", 16, "--max_response_length", 96, "--batch_size", 4
    tables = []
    for ranks in (0, 2):
        out = tmp_path / f"{ranks}.parquet"
        run(ROOT / "algos/generate.py", *files, *talk, *limits, "--output", out, ranks=ranks)
        tables.append(pq.read_table(out))
    assert tables[0].equals(tables[1])
    assert {"responses", "response_tokens", "finish_reasons", "episodes"} < set(tables[0].column_names)
    out = "--data", tmp_path / "0.parquet", "--output", tmp_path / "eval"
    done = run(ROOT / "algos/eval.py", *out, "--reward_fn", f"{TALK}:score")
    scores = sum(pq.read_table(tmp_path / "eval/scored_A.parquet")["scores"].to_pylist(), [])
    expected = metrics(straight)[4]["val-core/arithmetic/reward/mean@1"]
    assert sum(scores) / len(scores) == pytest.approx(expected) and "mean@1" in done.stdout
