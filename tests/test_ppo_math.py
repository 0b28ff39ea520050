"""The mathematics of PPO against tables computed by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import golden
from hypothesis import given
from hypothesis import strategies as st

from algos import ppo
from rewards.manager import RewardManager, demote_failures
from rewards.manager.combined import load_rewards
from system.metrics import failure_metrics

ROW = "data_source", "solution_str", "ground_truth"


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_gae_with_a_masked_gap_and_a_truncated_response():
    # gamma = lam = .5. Row 0: token 1 is a tool's. Row 1 was cut after two tokens, what follows is padding
    reward_nt, value_nt = f64([0.2, 99, 0, 1], [0, 0.5, 99, 99]), f64([1, 7, 2, 3], [1, 4, 9, 9])
    mask_nt = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()
    adv_nt, return_nt = ppo.gae(reward_nt, value_nt, mask_nt, 0.5, 0.5)
    # row 0: 1 + 0 - 3 = -2;  0 + .5*3 - 2 + .25*-2 = -1;  .2 + .5*2 - 1 + .25*-1 = -.05
    # row 1: .5 + 0 - 4 = -3.5;  0 + .5*4 - 1 + .25*-3.5 = .125
    assert adv_nt[mask_nt].tolist() == pytest.approx([-0.05, -1, -2, 0.125, -3.5])
    assert return_nt[mask_nt].tolist() == pytest.approx([0.95, 1, 1, 1.125, 0.5])
    assert adv_nt[~mask_nt].tolist() == [-1, 0, 0]  # what passes through


@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 2, st.booleans()), max_size=8))
def test_a_masked_token_is_as_good_as_none(tokens):
    reward_t, value_t, keep_t = (torch.tensor(x) for x in zip(*tokens, (1.0, 0.5, True)))
    with_gaps = ppo.gae(reward_t[None], value_t[None], keep_t[None], 0.9, 0.8)
    without = ppo.gae(reward_t[None, keep_t], value_t[None, keep_t], torch.ones(1, keep_t.sum()), 0.9, 0.8)
    for with_nt, without_nt in zip(with_gaps, without, strict=True):
        assert torch.allclose(with_nt[:, keep_t], without_nt, atol=1e-5)


def test_lambda_adapts_to_the_length():
    # alpha = .5: 1 - 1/(.5 l) of 4, 2 (the masked token is none of them), 1 and 8 tokens: .5, 0, -1 -> 0, .75
    mask_nt = torch.tensor([[1] * 4 + [0] * 4, [1, 0, 1] + [0] * 5, [1] + [0] * 7, [1] * 8]).bool()
    assert ppo.adaptive_lam(mask_nt, 0.5).tolist() == [0.5, 0, 0, 0.75]
    assert ppo.adaptive_lam(torch.ones(1, 2000), 0.05).item() == pytest.approx(0.99)


def test_the_mean_of_the_quantiles_is_the_value_and_their_spread_a_bonus(monkeypatch):
    """Means .5 .5 and 1, standard deviations 0 .5 and 1, scores 1 and 0: A is .5 .5 and -1.

    A bonus of 2 adds twice the deviation after a token: 1 after the first. ppo_gradients.py has the lambdas.
    """
    monkeypatch.setattr(ppo, "all_reduce", lambda sums, _=None: sums)
    rows = [dict(length=2, value_t=f64([0.5, 0.5], [0.0, 1.0]), reward=dict(score=1.0))]
    rows.append(dict(length=1, value_t=f64([0.0, 2.0]), reward=dict(score=0.0)))
    for row in rows:
        row["mask_t"] = np.ones(row["length"], bool)
    flags = dict(gamma=1.0, lam=1.0, lam_alpha=None, kl_coef=0.0, value_quantiles=2, uncertainty_bonus=2.0)
    step_nt = ppo.advantages(rows, 0.0, 1.0, SimpleNamespace(**flags))
    assert step_nt["value_nt"].tolist() == [[0.5, 0.5], [1, 0]]
    assert step_nt["spread_nt"].tolist() == [[0, 0.5], [1, 0]]
    adv, mask_nt = torch.tensor([1.5, 0.5, -1]), step_nt["mask_nt"]
    assert torch.allclose(step_nt["adv_nt"][mask_nt].float(), (adv - adv.mean()) / adv.std())
    assert step_nt["return_nt"][mask_nt].tolist() == [1, 1, 0]  # the critic learns no bonus
    found = ppo.critic_metrics(rows, step_nt, SimpleNamespace(reward_model=()))
    assert [found[f"critic/values_std/{x}"] for x in ("mean", "max", "min")] == [0.5, 1, 0]
    assert found["critic/vf_explained_var"] == pytest.approx(1 - 1.5 / (2 / 3))


def test_nll_weights():
    """Three optimizer steps of three responses; without acc the score decides which are correct."""
    lengths, scores = (1, 5, 2, 1, 3, 0, 4, 4, 4), (1, 0, 0.1, 3, -1, -1, -1, 0, 1)
    rows = [dict(length=n, reward=dict(score=score)) for n, score in zip(lengths, scores, strict=True)]
    rows[5]["reward"]["acc"], rows[8]["reward"]["acc"] = 1.0, 0.0
    flags = SimpleNamespace(ppo_mini_batch_size=1, group_size=3)
    expected = [8 / 3, 0, 8 / 3, 4, 0, 4, 0, 0, 0]
    assert ppo.nll_weights(rows, flags).tolist() == pytest.approx(expected)


def test_masked_whiten(monkeypatch):
    monkeypatch.setattr(ppo, "all_reduce", lambda sums: sums)
    # 1 3 5: mean 3, unbiased variance 4
    white_nt = ppo.masked_whiten(f64([1, 3, 100], [5, -7, 0]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool())
    assert white_nt.flatten().tolist() == pytest.approx([-1, 0, 0, 1, 0, 0], abs=1e-7)
    alone_nt = ppo.masked_whiten(f64([4, 9]), torch.tensor([[True, False]]))
    assert alone_nt.tolist() == [[0, 0]]
    # 1e-8 is added to the variance of 2e-8
    near_nt = ppo.masked_whiten(f64([0, 2e-4]), torch.ones(1, 2))
    assert near_nt[0].tolist() == pytest.approx([-(3**-0.5), 3**-0.5])


@pytest.mark.parametrize("case", golden("value_losses"), ids=lambda case: case["why"])
def test_value_loss(case):
    """The clip holds a value within 0.5 of the old one."""
    value_ntq = torch.tensor([[case["value"]]], requires_grad=True)
    batch = dict(value_nt=torch.tensor([[case["old"]]]), return_nt=torch.tensor([[case["return"]]]))
    loss_nt, means = ppo.critic_loss(SimpleNamespace(cliprange_value=0.5), value_ntq, batch)
    assert loss_nt.shape == (1, 1) and loss_nt.item() == pytest.approx(case["loss"])
    assert means["vf_clipfrac"].item() == pytest.approx(case["clipped"])
    assert means["vpred_mean"].item() == pytest.approx(np.mean(case["value"]))
    loss_nt.sum().backward()
    assert value_ntq.grad[0, 0].tolist() == pytest.approx(case["gradient"])


def test_token_rewards():
    kl_nt, mask_nt = f64([0.1, 0.2, 0.3], [-0.4, 5, 0.5]), torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    reward_nt = ppo.token_rewards(f64(1, 2), kl_nt, mask_nt, 0.5)
    assert reward_nt.flatten().tolist() == pytest.approx([-0.05, 0.9, 0, 0.2, 0, 1.75])


def test_adaptive_kl():
    weight = 0.1
    for kl, n, expected in ((2.2, 50, 0.105), (10, 50, 0.1155), (0, 100, 0.0924)):  # +10 %, at most +-20 %
        weight = ppo.adapted(weight, kl, 2.0, n, horizon=100)
        assert weight == pytest.approx(expected)
    assert ppo.adapted(0.1, 10, 2.0, 5_000) == pytest.approx(0.11)


def judged(monkeypatch, rows, results, **flags):
    """Rows as `ModelRewards` returns them; results: a list a model."""
    found = iter(results)
    monkeypatch.setattr(ppo, "model_scores", lambda *_: next(found))
    rules = SimpleNamespace(score_responses=lambda rows, _: rows)
    manager = ppo.ModelRewards(rules, results, results, SimpleNamespace(**flags))
    return manager.score_responses(rows, None)


@pytest.mark.parametrize(
    ("rules", "models", "weights", "expected"),
    (
        (1.2, (-2.0,), (), -0.8),
        (1.2, (-2.0,), (9.0, 9.0, 0.5), 0.2),  # the first two are those of the rules, which have them already
        (1.2, (1.0, -2.0, 0.5), (1.0, 0.5, 2.0, 1.0, 4.0), 3.2),
    ),
)
def test_model_scores_are_further_rewards(rules, models, weights, expected, monkeypatch):
    names = ("score/model", "score/model_2", "score/model_3")
    rows = [dict(index=3, reward={"score": score, "pred": "7"}) for score in (0.0, rules)]
    given = [dict(row["reward"]) for row in rows]
    results = [[{"score": 9.0}, {"score": score}] for score in models]
    _, row = judged(monkeypatch, rows, results, reward_fn=("a", "b"), reward_weights=weights)
    scores = {"score": pytest.approx(expected), "score/rules": rules} | dict(zip(names, models))
    assert row == dict(index=3, reward=scores | dict(pred="7"))
    assert [row["reward"] for row in rows] == given  # what was given stays


def test_model_score_without_rules(monkeypatch):
    manager = RewardManager("naive", load_rewards(("none",), ()))
    rows = [dict(reward=manager.score([dict.fromkeys(ROW)])[0])]
    [row] = judged(monkeypatch, rows, [[{"score": 1.5}]], reward_fn=(), reward_weights=(2.0,))
    assert row["reward"] == {"score": 3.0, "score/rules": 0, "score/model": 1.5}


def test_a_failure_of_either_judge_beats_no_wrong_answer_of_its_group(monkeypatch):
    """Rules of +1 and -1; by the model alone the failed ones would be best, or in the middle."""
    rules = [{"score": 1.0}, {"score": -1.0}, {"score": 1.0}, {"score": 0.0, "failure": "TypeError: x"}]
    model = [{"score": 2.0}, {"score": -1.0}, {"score": 0.0, "failure": "ValueError: nan"}, {"score": 4.0}]
    rows = [dict(group=0, reward=result) for result in rules] + [dict(group=1, reward={"score": -9.0})]
    results = [[*model, {"score": 0.0}]]
    rows = judged(monkeypatch, rows, results, reward_fn=("a",), reward_weights=(1.0, 0.5))
    rewards = [row["reward"] for row in demote_failures(rows)]
    assert [result["score"] for result in rewards] == [2.0, -1.5, -1.5, -1.5, -9.0]
    failures = [None, None, "ValueError: nan", "TypeError: x", None]
    assert [result.get("failure") for result in rewards] == failures
    assert failure_metrics(rewards)["reward/errors"] == 2
