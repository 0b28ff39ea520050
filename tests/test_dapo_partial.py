"""DAPO with --partial_rollout: responses that several weights sampled, in whole runs."""

import pytest
import torch
from conftest import ROOT, changed, healthy, metrics, rollouts, run, same, state
from transformers import AutoModelForCausalLM

from algos import dapo

DAPO = ROOT / "algos/dapo.py"


FLAGS = (
    "--train_batch_size 2 --ppo_mini_batch_size 1 --group_size 2 --max_prompt_length 16"
    " --max_response_length 480 --max_tokens_per_microbatch 800 --partial_rollout --max_staleness 2"
    " --lr 3e-3 --total_steps 8 --save_freq 1 --keep_checkpoints 0 --rollout_dump"
)


def flags(tiny, arithmetic, out, *more):
    files = "--model", tiny, "--train_files", arithmetic / "train.parquet", "--output_dir", out
    reward = "--reward_fn", f"{ROOT}/tests/dapo_reward.py:coin"
    return [*files, *FLAGS.split(), *reward, *more]


def unfinished(out, step):
    return [dapo.from_json(row) for row in state(out, step)["unfinished"]]


@pytest.fixture(scope="module")
def straight(tiny, arithmetic, tmp_path_factory):
    """Eight steps on one rank, undisturbed."""
    out = tmp_path_factory.mktemp("straight")
    run(DAPO, *flags(tiny, arithmetic, out))
    return out


def test_responses_go_on_and_grow_old(straight):
    steps = healthy(straight)
    ages = [[m[f"dapo/token_age_{age}"] for age in ("0", "1", "2_or_more")] for m in steps.values()]
    assert all(sum(shares) == pytest.approx(1) for shares in ages)
    assert ages[0] == [1, 0, 0] and min(max(column) for column in zip(*ages)) > 0
    assert all(0 <= m["dapo/idle"] < 1 for m in steps.values())
    assert sum(m["dapo/dropped_stale"] for m in steps.values()) > 0
    for step, m in steps.items():
        # its sampler is checked against its trainer, on tokens of these weights alone: a step may have none
        assert (m["training/rollout_probs_diff_max"] > 0) == (m["dapo/token_age_0"] > 0)
        assert m["training/rollout_logp_diff_mean"] < 1e-5
        assert len(rollouts(straight, step)) == 2 * 2
        oldest = [row["step_t"][0] for row in unfinished(straight, step) if row["length"]]
        assert min(oldest, default=step) >= step - 1  # at most two steps old in the next one
        assert len({(row["group"], row["sample"]) for row in unfinished(straight, step)}) % 2 == 0


def test_each_token_keeps_the_log_prob_of_its_weights(straight, tiny):
    """Unfinished responses with tokens of two steps, computed again with the weights of each."""
    for last in range(2, 9):
        rows = [row for row in unfinished(straight, last) if {last - 1, last} <= {*row["step_t"].tolist()}]
        if rows:
            break
    for step in (last - 1, last):
        before = straight / f"checkpoints/step_{step - 1:06d}/hf" if step > 1 else tiny
        model = AutoModelForCausalLM.from_pretrained(before)
        for row in rows:
            ids, start = [*row["prompt_ids"], *row["response_ids"].tolist()], len(row["prompt_ids"])
            logp_v = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1).detach()
            logp_t = logp_v.gather(-1, torch.tensor(ids[start:])[:, None])[:, 0]
            gap_t = (logp_t - torch.tensor(row["rollout_logp_t"])).abs()
            own_t = torch.tensor(row["step_t"] == step)
            assert gap_t[own_t].max() < 1e-4 < 1e-3 < gap_t[~own_t].max()


def test_killed_with_unfinished_responses_and_resumed_equals_straight(straight, tiny, arithmetic, tmp_path):
    killed = run(ROOT / "tests/workers/dapo_killed.py", *flags(tiny, arithmetic, tmp_path), check=False)
    assert killed.returncode == -9 and 3 <= max(metrics(tmp_path)) < 8
    assert unfinished(tmp_path, max(metrics(tmp_path)))
    run(DAPO, *flags(tiny, arithmetic, tmp_path))
    same(straight, tmp_path, but=("timing", "perf"))
    for step in metrics(straight):
        assert rollouts(tmp_path, step) == rollouts(straight, step)
        assert state(tmp_path, step) == state(straight, step)
    assert not changed(*(out / "checkpoints/latest/hf" for out in (straight, tmp_path)))


def test_two_ranks_equal_one(straight, tiny, arithmetic, tmp_path):
    """The ranks stop at the same time. Products that are kept change nothing, within FSDP too."""
    more = "--total_steps", 3, "--gradient_checkpointing", "selective"
    run(DAPO, *flags(tiny, arithmetic, tmp_path, *more), ranks=2)
    same(straight, tmp_path, (1, 2, 3), 1e-3)
    assert all(rollouts(tmp_path, step) == rollouts(straight, step) for step in (1, 2, 3))
