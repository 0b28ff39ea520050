"""PPO from end to end, as a user runs it, with a critic that warms up, a KL in the reward, a reward model."""

import pytest
import torch
from conftest import ROOT, changed, flags_of, healthy, load_weights, metrics, rollouts, run, same
from workers.ppo_reward_model import score, write_reward_model

PPO = ROOT / "algos/ppo.py"
STEPS = list(range(1, 10))


@pytest.fixture(scope="module")
def flags(tiny, arithmetic, tmp_path_factory):
    """The command line of a run in a directory."""
    reward_model = tmp_path_factory.mktemp("reward_model")
    write_reward_model(reward_model)
    words = (
        "--train_batch_size 8 --ppo_mini_batch_size 4 --group_size 8 --max_prompt_length 16"
        " --max_response_length 12 --lr 4e-3 --critic_lr 4e-3 --critic_warmup 3 --warmup_steps 4"
        " --critic_lam 0.9 --lam_alpha 0.5 --positive_nll_coef 0.1"
        " --kl_coef 0.01 --kl_target 0.05 --value_quantiles 4"
        " --save_freq 3 --test_freq 3 --rollout_dump --total_steps 9 --max_tokens_per_microbatch 300"
        f" --keep_checkpoints 0 --reward_fn {ROOT}/tests/digit_reward.py:digits"
        f" --reward_model {reward_model} --reward_weights 1 0.25"
    )
    return lambda out, *more: [*flags_of(tiny, arithmetic, out, words), *more]


def at(out, step, part="hf"):
    return out / f"checkpoints/step_{step:06d}/{part}"


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    """Nine steps on one rank, undisturbed."""
    out = tmp_path_factory.mktemp("straight")
    run(PPO, *flags(out))
    return out


def test_it_learns_and_reports(straight):
    steps = healthy(straight)
    assert list(steps) == [0, *STEPS]
    assert steps[9]["critic/score/mean"] > steps[3]["critic/score/mean"] + 0.035
    assert steps[9]["val-core/arithmetic/reward/mean@1"] > steps[0]["val-core/arithmetic/reward/mean@1"]
    assert steps[9]["critic/vf_loss"] < steps[1]["critic/vf_loss"]
    names = load_weights(at(straight, 3, "critic")).keys()
    assert "score.weight" in names == changed(at(straight, 3, "critic"), at(straight, 9, "critic"))


def test_warm_up_leaves_the_actor_bit_for_bit(straight, tiny):
    assert not changed(tiny, at(straight, 3))
    assert changed(tiny, at(straight, 6)) == load_weights(tiny).keys()
    for step in STEPS:
        assert ("actor/pg_loss" in metrics(straight)[step]) == (step > 3)


def test_warm_up_learns_monte_carlo_returns(straight):
    """Then no response is further from the reference than rounding: each of its tokens returns its score."""
    for step in STEPS:
        scores = [row["score"] for row in rollouts(straight, step) for _ in row["response_ids"]]
        returns, expected = metrics(straight)[step]["critic/returns/mean"], sum(scores) / len(scores)
        assert (returns == pytest.approx(expected, abs=1e-5)) == (step < 4)


def test_the_learning_rate_counts_the_steps_of_its_own_model(straight):
    """The actor's warm-up begins with its first update; the resumed run below has the same rates."""
    steps = metrics(straight)
    expected = [0.001, 0.002, 0.003, 0.004, 0.004, 0.004]
    assert [steps[step]["actor/lr"] for step in STEPS[3:]] == pytest.approx(expected)
    assert [steps[step]["critic/lr"] for step in STEPS] == pytest.approx([*expected[:3], *[0.004] * 6])


def test_scores_are_what_the_flags_say(straight):
    for step in STEPS:
        for row in rollouts(straight, step):
            text = row["solution_str"]
            digits = sum(c.isdigit() for c in text) / max(len(text), 1)
            assert row["score/rules"] == digits
            assert row["score/model"] == pytest.approx(score(text), abs=1e-4)
            assert row["score"] == pytest.approx(digits + 0.25 * score(text), abs=1e-4)
        scores = [row["score"] for row in rollouts(straight, step)]
        assert metrics(straight)[step]["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))


def test_kl_in_the_reward(straight):
    """What is taken off is beta * KL; beta follows the target, once the actor learns."""
    steps = metrics(straight)
    beta = 0.01
    for step in STEPS:
        m = steps[step]
        assert m["actor/reward_kl_penalty_coeff"] == pytest.approx(beta)
        off = m["critic/score/mean"] - m["critic/rewards/mean"]
        assert off == pytest.approx(
            beta * m["actor/reward_kl_penalty"] * m["response_length/mean"], rel=1e-3, abs=1e-6
        )
        if step > 3:
            beta *= 1 + min(max(m["actor/reward_kl_penalty"] / 0.05 - 1, -0.2), 0.2) * 64 / 10_000
    assert steps[1]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)  # the actor is the reference
    assert steps[9]["actor/reward_kl_penalty"] > 0.01


def test_two_ranks_equal_one(straight, flags, tmp_path):
    """Nor does it matter whether a checkpoint is written in the warm-up."""
    run(PPO, *flags(tmp_path, "--total_steps", 4, "--save_freq", 0), ranks=2)
    same(straight, tmp_path, [1, 2, 3, 4], 1e-4)


def test_adapters_of_the_actor(flags, tiny, tmp_path):
    """The actor without its adapters is the reference; hf/ has them in its weights; the critic is whole."""
    one = "--total_steps", 2, "--ppo_mini_batch_size", 8, "--critic_warmup", 0, "--warmup_steps", 0
    one = *one, "--temperature", 0.7
    run(PPO, *flags(tmp_path, *one, "--lora_rank", 4))
    first, second = (healthy(tmp_path)[step]["actor/reward_kl_penalty"] for step in (1, 2))
    assert first == 0 and second > 1e-6
    base, critic = load_weights(tiny), load_weights(at(tmp_path, 2, "critic"))
    assert changed(tiny, at(tmp_path, 2)) == {name for name in base if name.endswith("proj.weight")}
    assert all(not torch.equal(base[name], x) for name, x in critic.items() if name in base)
