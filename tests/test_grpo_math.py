"""The mathematics of GRPO against tables computed by hand."""

import dataclasses
import inspect
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from algos import agent, dapo, distill, dpo, grpo, ppo, rm, sft
from algos.variants.cispo import cispo
from algos.variants.dppo import dppo
from algos.variants.gspo import gspo
from algos.variants.sapo import sapo
from tests.conftest import ROOT, each, make_args

DENSE = SimpleNamespace(lm=nn.Linear(1, 1))
# a copy of a region may leave lines out: so each is tried, not grpo.py's alone
SAMPLED = grpo, dapo, ppo, agent, distill  # scripts with a sampler


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_group_advantages():
    """Groups are interleaved; group 2 is alone."""
    score_n, group_n = f64(1, 5, 0, 0, 5, 1, 7), torch.tensor([0, 1, 0, 0, 1, 0, 2])
    centred = np.array([0.5, 0, -0.5, -0.5, 0, 0.5, 7])
    assert grpo.group_advantages(score_n, group_n, norm_by_std=False).tolist() == centred.tolist()
    std = math.sqrt(1 / 3) + 1e-6  # unbiased, of 1 0 0 1
    expected = [*(centred[:6] / std), 7]
    assert grpo.group_advantages(score_n, group_n).tolist() == pytest.approx(expected)


@each(grpo, agent)
def test_rloo_dr_grpo_reinforce_plus_plus_baseline_and_maxrl(script):
    score_n, group_n = f64(1, 0, 0, 1, 3, 0), torch.tensor([0, 0, 0, 1, 1, 1])
    length_n, args = torch.tensor([1, 2, 3, 4, 5, 6]), SimpleNamespace(group_size=3)
    for args.adv_estimator, expected in (
        ("rloo", [1 - 0, 0 - 0.5, 0 - 0.5, 1 - 1.5, 3 - 0.5, 0 - 2]),  # minus the mean of the two others
        ("dr_grpo", [2 / 3, -1 / 3, -1 / 3, -1 / 3, 5 / 3, -4 / 3]),
        ("maxrl", [2, -1, -1, -0.25, 1.25, -1]),  # means 1/3 and 4/3
    ):
        assert script.advantages(args, score_n, group_n, length_n).tolist() == pytest.approx(expected)
    assert script.advantages(args, 0 * score_n, group_n, length_n).tolist() == [0] * 6
    with pytest.raises(SystemExit, match="maxrl is for scores from 0 to 1, and one is -1"):
        script.advantages(args, torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0, 0, 0]), torch.ones(3))
    assert script.advantages(args, f64(2, 0, 5), torch.tensor([0, 0, 1]), None).tolist() == [1, -1, 0]
    args.adv_estimator = "reinforce_plus_plus_baseline"
    tokens = script.advantages(args, score_n, group_n, length_n).repeat_interleave(length_n)
    assert tokens.mean().item() == pytest.approx(0, abs=1e-9)
    assert tokens.var().item() == pytest.approx(1)
    expected = script.group_advantages(score_n, group_n, norm_by_std=False).repeat_interleave(length_n)
    expected = (expected - expected.mean()) / expected.std()
    assert tokens.tolist() == pytest.approx(expected.tolist())
    assert score_n.tolist() == [1, 0, 0, 1, 3, 0]  # no estimator writes to it
    alone = script.advantages(args, f64(3, 1), torch.tensor([0, 1]), torch.ones(2))  # groups of one
    assert alone.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


@each(grpo, agent)
def test_gdpo(script):
    """Two rewards: in the first group both speak, in the second only the one whose weight is 1/2."""
    args, group_n = SimpleNamespace(adv_estimator="gdpo"), torch.tensor([0, 1, 0, 1, 0, 1])
    parts = [(2.0, [1, 0, 0, 0, 0, 0]), (0.5, [0, 10, 30, 20, 60, 30])]
    one, two = np.array([2, -1, -1]) / 3**0.5, np.array([-1, 0, 1])
    sums = np.stack([2 * one + 0.5 * two, 0.5 * two], 1).ravel()  # (1, 0, 0) has the std 1 / sqrt(3)
    expected = sums / sums.std(ddof=1)
    adv_n = script.advantages(args, None, group_n, None, parts)
    assert adv_n.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    same = script.advantages(args, None, group_n, None, [(weight, [0.1] * 6) for weight, _ in parts])
    assert same.tolist() == [0] * 6  # exactly: such rows are not trained
    alone = script.advantages(args, None, torch.tensor([0, 1]), None, [(1.0, [3, -3])])
    assert alone.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])  # as in `group_advantages`


def test_policy_loss():
    ratio, high, low = [0.5, 1.0, 1.5, 5.0], 0.3, 0.2
    logp, old = torch.tensor([ratio]).log(), torch.zeros(1, 4)
    loss, clipped, lower = grpo.policy_loss(logp, old, torch.ones(1, 4), None, low, high)
    assert loss[0].tolist() == pytest.approx([-0.5, -1.0, -1.3, -1.3])
    assert clipped[0].tolist() == [False, False, True, True] and not lower.any()
    loss, clipped, lower = grpo.policy_loss(logp, old, -torch.ones(1, 4), None, low, high)
    assert loss[0].tolist() == pytest.approx([0.8, 1.0, 1.5, 3.0])
    assert clipped[0].tolist() == [True, False, False, False]
    assert lower[0].tolist() == [False, False, False, True]


def test_gspo_loss():
    """One ratio a response; each token has the gradient of its own; what is masked has no say."""
    mask_nt = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0]]).bool()
    d_nt = f64([0.1, 7, 0.3], [0.5, 0.3, 0], [-0.3, 0, 0]).requires_grad_()
    old_nt, adv_nt = torch.full((3, 3), -2.0), f64([1], [2], [-1])
    loss_nt, clipped_nt, lower_nt = gspo(d_nt - 2, old_nt, adv_nt, mask_nt, 0.2, 0.3)
    # ratios e^.2 = 1.22, e^.4 = 1.49 > 1.3, e^-.3 = .74 < .8
    expected = [math.exp(0.2), math.exp(0.2), 2.6, 2.6, -0.8]
    assert loss_nt[mask_nt].tolist() == pytest.approx([-x for x in expected])
    assert clipped_nt[mask_nt].tolist() == [False, False, True, True, True] and not lower_nt.any()
    [grad_nt] = torch.autograd.grad(loss_nt[mask_nt].sum(), [d_nt])
    assert grad_nt[mask_nt].tolist() == pytest.approx([-math.exp(0.2)] * 2 + [0] * 3)
    loss_nt, _, lower_nt = gspo(f64([2, 20]), f64([0, 20]), f64([-1]), torch.ones(1, 2), 0.2, 0.3)
    assert loss_nt[0].tolist() == pytest.approx([math.e] * 2) and not lower_nt.any()
    loss_nt, _, lower_nt = gspo(f64([4, 20]), f64([0, 20]), f64([-1]), torch.ones(1, 2), 0.2, 0.3)
    assert loss_nt[0].tolist() == [3, 3] and lower_nt.all()  # the dual clip: e^2 > 3


@pytest.mark.parametrize("loss", (gspo, cispo, sapo, dppo))
def test_a_policy_far_from_the_old_one_has_a_finite_loss_and_gradient(loss):
    logp_nt = torch.zeros(3, 1, requires_grad=True)
    loss_nt, *_ = loss(logp_nt, torch.full((3, 1), -1e4), torch.tensor([[1.0], [0], [-1]]), torch.ones(3, 1))
    [grad_nt] = torch.autograd.grad(loss_nt.sum(), [logp_nt])
    assert loss_nt.isfinite().all() and grad_nt.isfinite().all()


def test_cispo_loss():
    logp_nt = f64([-2, -2, -1]).requires_grad_()
    old_nt = logp_nt.detach() - f64([6, 0.5, 6]).log()
    loss_nt, clipped_nt, lower_nt = cispo(logp_nt, old_nt, f64([1, 1, -1]), None)  # clips 1 and 4
    assert loss_nt[0].tolist() == pytest.approx([10, 1, -5])
    assert clipped_nt[0].tolist() == [True, False, True] and not lower_nt.any()
    [grad_nt] = torch.autograd.grad(loss_nt.sum(), [logp_nt])
    assert grad_nt[0].tolist() == pytest.approx([-5, -0.5, 5])  # the clipped ones too


def test_sapo_loss():
    ratio = f64([1, 3, 2])
    logp_nt = ratio.log().requires_grad_()
    loss_nt, clipped_nt, lower_nt = sapo(logp_nt, torch.zeros(1, 3), f64([1, 2, -1]), None)
    # sigma(0) = .5, sigma(2) = .8807971, sigma(1.05) = .7407749
    assert loss_nt[0].tolist() == pytest.approx([-2, -8 * 0.8807971, 4 / 1.05 * 0.7407749])
    [grad_nt] = torch.autograd.grad(loss_nt.sum(), [logp_nt])
    slopes = [-1, -8 * 0.8807971 * 0.1192029 * 3, 4 * 0.7407749 * 0.2592251 * 2]  # sigma (1 - sigma) 4 A r
    assert grad_nt[0].tolist() == pytest.approx(slopes) and not (clipped_nt + lower_nt).any()


def test_dppo_loss():
    """Masked by how far a probability has moved the way its advantage pushes: not by the ratio."""
    p, old = f64([0.63, 0.7, 0.3, 0.38, 0.02, 0.7]), f64([0.5, 0.5, 0.5, 0.5, 0.0005, 0.5])
    logp_nt, adv_nt = p.log().requires_grad_(), f64([1, 1, 1, -1, 1, -1])
    loss_nt, far_nt, lower_nt = dppo(logp_nt, old.log(), adv_nt, None, 0.1, 0.15)
    assert far_nt[0].tolist() == [False, True, False, True, False, False] and not lower_nt.any()
    expected = [-1.26 * math.log(0.63), 0, -0.6 * math.log(0.3), 0, -20 * math.log(0.02), 1.4 * math.log(0.7)]
    assert loss_nt[0].tolist() == pytest.approx(expected)  # the ratio of 40 counts as 20
    [grad_nt] = torch.autograd.grad(loss_nt.sum(), [logp_nt])
    assert grad_nt[0].tolist() == pytest.approx([-1.26, 0, -0.6, 0, -20, 1.4])


@pytest.mark.parametrize(
    ("script", "flags", "more"),
    (
        (grpo, dict(use_kl_loss=True, kl_loss_coef=0.1), 0.1 * math.exp(-1)),  # k3 of 1: e^-1 + 1 - 1
        (dapo, {}, 0.1 * 2),  # no bonus
        (ppo, dict(positive_nll_coef=0.5), 0.5 * 3 * 4),
    ),
)
def test_the_whole_loss_of_a_token(script, flags, more):
    """Advantages 1 1 -1, ratios 0.5 2 0.5, clips 0.2 and 0.4, old over sampler 1.5, entropy 2 at 0.1."""
    flags |= dict(clip_ratio_low=0.2, clip_ratio_high=0.4)
    has_bonus = script is not dapo
    flags |= dict(entropy_coeff=0.1) if has_bonus else {}
    args = make_args(script, **flags)
    logp_nt = torch.full((1, 3), -4.0)
    old_nt = logp_nt - torch.tensor([[0.5, 2, 0.5]]).log()
    batch = dict(mask_nt=torch.ones(1, 3).bool(), adv_nt=torch.tensor([[1.0, 1, -1]]), old_logp_nt=old_nt)
    batch |= dict(rollout_logp_nt=old_nt - math.log(1.5), ref_logp_nt=logp_nt - 1)
    batch |= dict(nll_weight_nt=torch.full((1, 3), 3.0))
    entropy_nt = torch.full((1, 3), 2.0, requires_grad=True)
    loss_nt, *reported = script.actor_loss(args, logp_nt, entropy_nt, batch)
    assert loss_nt.requires_grad == has_bonus
    if has_bonus:  # that is 0: the entropy has no backward pass
        args = dataclasses.replace(args, entropy_coeff=0.0)
        assert not script.actor_loss(args, logp_nt, entropy_nt, batch)[0].requires_grad
    expected = [-0.5 * 1.5, -1.4 * 1.5, 0.8 * 1.5]
    torch.testing.assert_close(reported[-1]["ppo_kl"], old_nt - logp_nt)
    assert reported[0]["pg_loss"][0].tolist() == pytest.approx(expected)
    assert loss_nt[0].tolist() == pytest.approx([x - 0.1 * 2 + more for x in expected], abs=1e-5)


@each(agent, dapo, ppo)
@pytest.mark.parametrize("name", ("cispo", "dppo"))
def test_a_variant_is_the_same_loss_in_every_script(script, name):
    logp_nt = torch.tensor([[-1.0, -0.5, -2], [-0.3, -1, -0.7]])  # some tokens move far, some do not
    old_nt = logp_nt + torch.tensor([[0.4, -0.01, -0.4], [0.01, 0.5, -0.6]])
    batch = dict(mask_nt=torch.ones(2, 3).bool(), adv_nt=torch.tensor([[1.0], [-1]]).expand(2, 3))
    batch |= dict(old_logp_nt=old_nt, rollout_logp_nt=old_nt, nll_weight_nt=torch.ones(2, 3))
    loss_nt, theirs_nt = (
        algo.actor_loss(make_args(algo, policy_loss=name, clip_ratio_low=0.05), logp_nt, logp_nt, batch)[0]
        for algo in (grpo, script)
    )
    assert torch.equal(loss_nt, theirs_nt) and loss_nt.any()


@each(grpo, agent, dapo, ppo)
def test_what_is_not_said_is_as_in_the_paper(script, monkeypatch):
    seen, high = [], 0.28 if script is dapo else 0.2
    if script is ppo:
        monkeypatch.setattr(ppo, "check_models", lambda args: None)
    monkeypatch.setattr(script, "Run", lambda args: seen.append(args) or script.fail("enough"))

    def settings(**said):
        with pytest.raises(SystemExit, match="enough"):
            script.main(make_args(script, **said))
        args = vars(seen[-1])
        return args["clip_ratio_low"], args["clip_ratio_high"], args.get("loss_agg", "token-mean")

    assert settings() == (0.2, high, "token-mean")
    assert settings(clip_ratio_low=0.1) == (0.1, high, "token-mean")
    assert settings(policy_loss="cispo") == (1, 4, "token-mean")
    assert settings(policy_loss="dppo") == (0.15, 0.15, "token-mean")
    if script is ppo:  # which has no --loss_agg
        with pytest.raises(SystemExit, match="gspo averages by seq-mean-token-mean"):
            script.main(make_args(script, policy_loss="gspo"))
        return
    assert settings(policy_loss="gspo") == (3e-4, 4e-4, "seq-mean-token-mean")
    assert settings(policy_loss="gspo", loss_agg="token-mean") == (3e-4, 4e-4, "token-mean")
    assert settings(policy_loss="sapo") == (None, None, "seq-mean-token-mean")


INF = math.inf
RATIOS, OF_RESPONSES = [[1, 3], [0.6, 0.8], [4, 9e9]], torch.tensor([[1, 1], [1, 1], [1, 0]]).bool()


@pytest.mark.parametrize(
    ("level", "cap", "rejection", "high", "low", "expected"),
    (
        (None, 2, None, None, None, [1, 1, 1, 1, 1]),
        ("token", 2, None, None, None, [1, 2, 0.6, 0.8, 2]),
        ("sequence", 2, None, None, None, [2, 2, 0.48, 0.48, 2]),  # products 3, .48, 4
        (None, 2, "token", 2, None, [1, 0, 1, 1, 0]),  # the lower bound is 1/2
        (None, 2, "token", 2, 0.7, [1, 0, 0, 1, 0]),
        (None, 2, "sequence", 3.5, None, [1, 1, 1, 1, 0]),
        (None, 2, "sequence", 3.5, 0.5, [1, 1, 0, 0, 0]),
        (None, 2, "geometric", 2, 0.7, [1, 1, 0, 0, 0]),  # roots 1.73, .69, 4
        ("token", 5, "token", 5, 0.7, [1, 3, 0, 0.8, 4]),  # IcePop
        ("sequence", 3.5, "sequence", 3.5, 0, [3, 3, 0.48, 0.48, 0]),  # masked importance sampling
    ),
)
@each(*SAMPLED)
def test_rollout_weights(level, cap, rejection, high, low, expected, script):
    args = SimpleNamespace(rollout_is=level, rollout_is_threshold=cap, rollout_rs=rejection)
    args.rollout_rs_threshold = (high,) if low is None else (low, high)
    logp_nt, old_nt = torch.full((3, 2), -3.0), torch.tensor(RATIOS).log() - 3
    weight_nt = script.rollout_weights(args, old_nt, old_nt, logp_nt, OF_RESPONSES, torch.zeros(3, 2))
    assert weight_nt.expand(3, 2)[OF_RESPONSES].tolist() == pytest.approx(expected)
    for wrong in (-1e4, 1e4, -INF):  # of one token
        logp_nt[0, 0] = wrong
        weight_nt = script.rollout_weights(args, old_nt, old_nt, logp_nt, OF_RESPONSES, torch.zeros(3, 2))
        assert weight_nt.isfinite().all()
        assert weight_nt[1:].expand(2, 2)[OF_RESPONSES[1:]].tolist() == pytest.approx(expected[2:])


@each(*SAMPLED)
def test_the_off_policy_mask(script):
    """Without what is good, near, or only looks far by what an environment wrote between the tokens."""
    args = SimpleNamespace(rollout_is=None, rollout_rs="off_policy", rollout_rs_threshold=(0.3,))
    sampler_nt = torch.zeros(5, 3)
    logp_nt = -f64([0.1, 0.6, 0], [0.1, 0.6, 0], [0.1, 0.4, 9], [-0.5, -0.5, 0], [1, 1, 0])
    mask_nt, adv_nt = torch.tensor([[True, True, False]] * 5), f64([-1], [1], [-1], [-1], [0]).expand(5, 3)
    logp_nt.requires_grad_()
    old_nt = logp_nt.detach() + 5  # of the last policy: another question
    weight_nt = script.rollout_weights(args, logp_nt, old_nt, sampler_nt, mask_nt, adv_nt)
    assert not weight_nt.requires_grad and weight_nt[:, 0].tolist() == [0, 1, 1, 1, 1]
    assert (weight_nt == weight_nt[:, :1]).all()
    args = make_args(script, **vars(args), clip_ratio_low=0.2, clip_ratio_high=0.2)
    batch = dict(mask_nt=mask_nt, adv_nt=adv_nt, rollout_logp_nt=sampler_nt, nll_weight_nt=0 * adv_nt)
    batch["teacher_logp_nt"] = logp_nt.detach() + adv_nt
    loss_nt, *_, means = script.actor_loss(args, logp_nt, torch.zeros(5, 3), batch)
    [grad_nt] = torch.autograd.grad((loss_nt * mask_nt).sum(), [logp_nt])
    assert means["rollout_rs_masked"].any(-1).tolist() == [True, False, False, False, False]
    assert grad_nt[:, 0].tolist() == [0, -1, 1, 1, 0]


@each(*SAMPLED)
def test_a_ratio_is_exact_up_to_e_to_the_20th(script):
    """And finite above."""
    logp_nt, adv_nt, zero_nt = torch.tensor([[15.0, -15.0]]), torch.tensor([[-1.0, 1.0]]), torch.zeros(1, 2)
    loss_nt, *_ = script.policy_loss(logp_nt, zero_nt, adv_nt, None, 0.2, 0.2, c=1e9)
    assert loss_nt[0].tolist() == pytest.approx([math.exp(15), -math.exp(-15)])
    args = SimpleNamespace(rollout_is="token", rollout_is_threshold=1e9, rollout_rs=None)
    weight_nt = script.rollout_weights(args, logp_nt, logp_nt, zero_nt, torch.ones(1, 2), adv_nt)
    assert weight_nt[0].tolist() == pytest.approx([math.exp(15), math.exp(-15)])
    loss_nt, *_ = script.policy_loss(zero_nt, zero_nt - 1e4, -adv_nt, None, 0.2, 0.2)
    assert loss_nt.isfinite().all()


@each(grpo, agent)
def test_kl_estimates(script):
    logp, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    expected = {
        "k1": [0.5, -1.0],
        "abs": [0.5, 1.0],
        "k2": [0.125, 0.5],
        "k3": [math.exp(-0.5) - 1 + 0.5, math.exp(1) - 1 - 1],
    }
    for kind, values in expected.items():
        assert script.kl_estimate(logp, ref, kind)[0].tolist() == pytest.approx(values), kind
        if kind in ("k1", "k3"):
            assert script.kl_estimate(logp, ref, f"{kind}+")[0].tolist() == pytest.approx(values), kind
    assert script.kl_estimate(torch.tensor([[-50.0]]), torch.tensor([[0.0]]), "k3").item() == 10


def test_gradients_of_the_kl():
    """Expectations of the KL estimators over a vocabulary of four: the table of docs/algorithms/grpo.md."""
    page, p = (ROOT / "docs/algorithms/grpo.md").read_text(), f64(0.42, 0.28, 0.19, 0.11)
    references = [f64(0.4, 0.3, 0.2, 0.1), f64(0.05, 0.15, 0.3, 0.5)]  # near and far

    def gradient(loss_of, q):
        logp = (logits := p.log().requires_grad_()).log_softmax(-1)
        return torch.autograd.grad(loss_of(logp, q.log()), logits)[0]

    exact = [gradient(lambda logp, logq: (logp.exp() * (logp - logq)).sum(), q) for q in references]
    for kind in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
        expected = lambda logp, logq: (p * grpo.kl_estimate(logp, logq, kind)).sum()  # noqa: B023
        grads = [gradient(expected, q) for q in references]
        errors = [((g - e).norm() / e.norm()).item() for g, e in zip(grads, exact, strict=True)]
        value = grpo.kl_estimate(p.log(), references[1].log(), kind)
        mean = (p * value).sum()
        deviation = (p * (value - mean) ** 2).sum().sqrt()
        figures = [*(f"{x:.0%}" for x in errors), f"{mean:.2f}", f"{deviation:.2f}"]
        assert f"| `{kind}` | {' | '.join(figures)} |" in page
        if kind == "k3":  # that of KL(reference || policy)
            other = [gradient(lambda logp, logq: -(logq.exp() * logp).sum(), q) for q in references]
            torch.testing.assert_close(grads, other)


@each(*SAMPLED, sft, dpo, rm)
def test_learning_rate(script):
    rates = [script.learning_rate(1.0, step, 6, 2, "linear") for step in range(1, 7)]
    assert rates == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert script.learning_rate(1.0, 5, 6, 2, "cosine") == pytest.approx(0.5)
    assert script.learning_rate(1.0, 1, 6, 0, "constant") == 1
    if script is sft:  # decay in the last steps alone
        rates = [sft.learning_rate(1.0, step, 10, 2, "linear", 3) for step in range(1, 11)]
        assert rates == pytest.approx([1 / 2] + [1] * 7 + [2 / 3, 1 / 3])


@each(*SAMPLED, sft, dpo, rm)
def test_every_rank_runs_as_many_micro_batches(script, monkeypatch):
    """Another rank has three: the third is empty here, and the last one reduces over HSDP's replicas."""
    monkeypatch.setattr(script, "all_reduce", lambda values, op: [max(3.0, *values)])
    asked = []
    model = SimpleNamespace(set_requires_all_reduce=asked.append)
    assert list(script.on_every_rank(model, [[0, 3], [1, 2]])) == [[0, 3], [1, 2], []]
    assert asked == [False, False, True]
    monkeypatch.setattr(script, "all_reduce", lambda values, op: values)
    assert list(script.on_every_rank(model, [])) == [[]]  # no rank has any: the step still runs


@each(*SAMPLED)
def test_the_sampler_must_hold_the_trainers_weights(script, monkeypatch):
    """Only what this step sampled and the policy wrote counts; with top_p only NaN and infinity do."""
    monkeypatch.setattr(script, "all_reduce", lambda values, op=None: [*map(float, values)])
    rejects = dict(rollout_rs="token", rollout_rs_threshold=(2,))  # rejected or not: an alarm
    args = make_args(script, compute_dtype="float32", **rejects)
    cut = dataclasses.replace(args, top_p=0.9)

    def rows(logp, older=False):
        row = dict(rollout_logp_t=np.zeros(3, np.float32), mask_t=np.array([True, True, False]))
        row |= dict(older_t=np.full(3, older))
        return [row | dict(old_logp_t=torch.tensor([logp, logp, -9.0]))]

    old = rows(-9.0, older=True)
    if script in (dapo, distill):  # which train on other tokens too
        for more in ([], rows(0.0)):
            found = script.check_sampler(DENSE, more + old, args, 1)
            assert found["training/rollout_logp_diff_mean"] == 0
    for wrong in (0.01, math.nan, -math.inf):
        with pytest.raises(SystemExit, match="weight sync failed at step 1: the sampler does not hold"):
            script.check_sampler(DENSE, rows(wrong), args, 1)
    assert script.check_sampler(DENSE, rows(-0.01), cut, 1)
    for wrong in (math.nan, -math.inf):
        with pytest.raises(SystemExit, match="weight sync failed"):
            script.check_sampler(DENSE, rows(wrong), cut, 1)


class TinyExperts(nn.Module):
    """As transformers names experts; a layer has them all."""


@pytest.mark.parametrize(("dtype", "dense", "limit"), [("float32", 1e-4, 1e-4), ("bfloat16", 0.1, 0.3)])
def test_a_mixture_of_experts_may_differ_more_in_bfloat16(monkeypatch, dtype, dense, limit):
    """A router rounds, too; the line says so. In float32 it has been seen to choose alike."""
    monkeypatch.setattr(grpo, "all_reduce", lambda values, op=None: [*map(float, values)])
    args = make_args(grpo, compute_dtype=dtype)
    mixture = SimpleNamespace(lm=nn.Sequential(nn.Linear(1, 1), nn.Sequential(TinyExperts())))
    for model, allowed, words in ((DENSE, dense, "differently; log"), (mixture, limit, "other experts; log")):
        row = dict(rollout_logp_t=np.zeros(1, np.float32), mask_t=np.ones(1, bool))
        grpo.check_sampler(model, [row | dict(old_logp_t=torch.tensor([0.99 * allowed]))], args, 1)
        with pytest.raises(SystemExit, match=f"{words}-probs differ by .* > {allowed:.3g}"):
            grpo.check_sampler(model, [row | dict(old_logp_t=torch.tensor([1.01 * allowed]))], args, 1)


@each(*SAMPLED)
def test_rows_are_dealt_once_each_in_their_own_mini_batch(script, monkeypatch):
    """Two ranks, two mini-batches of two prompts, three responses to each; 7 tokens share a sequence."""
    args = make_args(script, ppo_mini_batch_size=2, group_size=3, max_tokens_per_microbatch=28)
    lengths = [1, 4, 2, 3, 1, 1, 2, 2, 4, 1, 3, 4]
    rows = [dict(number=i, group=i // 3, prompt_length=2 + i // 3) for i in range(12)]
    for row, length in zip(rows, lengths, strict=True):
        row |= dict(length=length, mask_t=np.arange(length) != 1)  # the second token is an environment's
    rows[5]["mask_t"][:] = False
    monkeypatch.setattr(script.dist, "get_world_size", lambda: 2)
    dealt = []
    for rank in (0, 1):
        monkeypatch.setattr(script.dist, "get_rank", lambda: rank)  # noqa: B023
        dealt.append(script.distribute(rows, True, args))
    for step, (first, second) in enumerate(zip(dealt[0][0], dealt[1][0], strict=True)):
        sequences = first[0] + second[0]
        numbers = sorted([row["number"] - 6 * step for row in sequence] for sequence in sequences)
        assert numbers == ([[0, 1], [2], [3, 4], [5]], [[i] for i in range(6)])[step]
        assert first[0] and second[0]
        assert first[1] == second[1] == [(8, 5), (11, 6)][step]  # tokens and responses that are trained
    for rank, (mini_batches, own_rows, load) in enumerate(dealt):
        sequences = [sequence for own, _ in mini_batches for sequence in own]
        assert own_rows == [row for sequence in sequences for row in sequence]
        assert sorted(load[rank]) == sorted(map(script.token_count, sequences))
    assert dealt[0][2] == dealt[1][2] and script.token_count(rows[3:5]) == 3 + 3 + 1
    if script in (grpo, agent):  # groups without an advantage: one stays where all have none
        monkeypatch.setattr(script.dist, "get_world_size", lambda: 1)
        monkeypatch.setattr(script.dist, "get_rank", lambda: 0)
        for without, left in (((0,), {1, 2, 3}), ((0, 1), {0, 2, 3}), ((0, 1, 2, 3), {0, 2})):
            rows = [row | dict(no_grad=row["group"] in without) for row in rows]
            mini_batches, own_rows, _ = script.distribute(rows, True, args)
            assert {row["group"] for row in own_rows} == left
            assert [totals for _, totals in mini_batches] == [(8, 5), (11, 6)]  # all count
        rows = [row | dict(no_grad=row["number"] == 0) for row in rows]  # one response, at the mean
        assert len(script.distribute(rows, True, args)[1]) == 12


class Sampler:
    """Of vLLM's engine what `rollout` calls: two requests at a time, of which it ends the last one first."""

    def __init__(self):
        self.model_config = SimpleNamespace(hf_config=PreTrainedConfig())
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=2))
        self.running, self.seeds = [], {}
        self.has_unfinished_requests = lambda: bool(self.running)
        self.get_num_unfinished_requests = lambda: len(self.running)

    def add_request(self, name, prompt, params):
        self.running.append((name, prompt["prompt_token_ids"]))
        self.seeds.setdefault(tuple(prompt["prompt_token_ids"]), []).append(params.seed)

    def step(self):
        name, prompt_ids = self.running.pop()
        logprobs = SimpleNamespace(logprobs=[-1.0, -0.5 - int(name)])
        response = SimpleNamespace(token_ids=[prompt_ids[-1], 1], logprobs=logprobs, finish_reason="stop")
        yield SimpleNamespace(request_id=name, prompt_token_ids=prompt_ids, outputs=[response])


def test_rows_of_the_sampler(monkeypatch):
    """Each has what was sampled for it, EOS is trained, and no two responses have one seed."""
    kinds = SimpleNamespace(FINAL_ONLY=None)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", SimpleNamespace(RequestOutputKind=kinds))
    prompts = [dict(prompt_ids=[7, 20 + i], index=i, group=i) for i in range(3)]

    def sampled(step, rank=0, world=1):
        """-> (prompt, sample) and row of one rank of a sampler over `world` ranks, and all seeds."""
        monkeypatch.setattr(grpo.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(grpo.dist, "get_world_size", lambda: world)
        args, engine = make_args(grpo, tp_size=world), Sampler()
        rows = grpo.rollout(engine, args, prompts, step, 2)
        return {(row["index"], row["sample"]): row for row in rows}, engine.seeds

    rows, seeds = sampled(1)
    assert list(rows) == [(i, g) for i in range(3) for g in range(2)]
    for number, ((index, _), row) in enumerate(rows.items()):
        assert row["response_ids"].tolist() == [20 + index, 1] and row["finish_reason"] == "stop"
        assert row["rollout_logp_t"].tolist() == [-1, -0.5 - number]
        assert row["mask_t"].tolist() == [True, True]
        assert row["length"] == row["prompt_length"] == 2
    both = [seed for found in (seeds, sampled(2)[1]) for some in found.values() for seed in some]
    assert len(both) == len(set(both)) == 12
    (one, seeds_one), (two, seeds_two) = (sampled(1, rank, 2) for rank in (0, 1))  # they share a sampler
    assert seeds_one == seeds_two == seeds
    assert one.keys() | two.keys() == rows.keys()  # a group is on one rank, for a reward that sees it
    assert [{index for index, _ in found} for found in (one, two)] == [{0, 2}, {1}]
    answers = Sampler.step

    def fewer(self):
        [answer] = answers(self)
        answer.prompt_token_ids = answer.prompt_token_ids[1:]
        return [answer]

    monkeypatch.setattr(Sampler, "step", fewer)
    with pytest.raises(ValueError, match="vLLM and processor make other tokens of an image"):
        sampled(1)


def test_rows_are_sorted_by_prompt_and_a_failure_beats_no_wrong_answer(monkeypatch):
    """However rows were spread over the ranks: a mini-batch is a slice of them."""
    monkeypatch.setattr(grpo.dist, "get_world_size", lambda: 1)
    rows = [dict(group=g, sample=s, reward=dict(score=0.0)) for s in (2, 1, 0) for g in (0, 2, 1)]
    rows[3]["reward"], rows[6]["reward"] = dict(score=-1.0), dict(score=0.0, failure="TimeoutError: no")
    manager = SimpleNamespace(score_responses=lambda rows, tokenizer: rows)
    rows = grpo.score_rows(rows, manager, None)
    found = [(row["group"], row["sample"], row["reward"]["score"]) for row in rows]
    scores = {(0, 0): -1, (0, 1): -1}
    assert found == [(g, s, scores.get((g, s), 0)) for g in range(3) for s in range(3)]


@each(*SAMPLED)
def test_a_rank_sees_the_rows_of_the_others(script, monkeypatch):
    """Its own two tokens agree; one of another rank has a log-prob that differs by 0.3."""
    others = {6: [1, 0.3, 0.1, 1, 1, 1], 1: [0.1]}  # by the number of sums
    add = lambda values, op=None: [float(a) + b for a, b in zip(values, others[len(values)], strict=True)]
    monkeypatch.setattr(script, "all_reduce", add)
    args = make_args(script, compute_dtype="float32")
    rows = [dict(rollout_logp_t=np.zeros(2, np.float32), mask_t=np.ones(2, bool), old_logp_t=torch.zeros(2))]
    rows[0]["older_t"] = np.zeros(2, bool)  # dapo.py, distill.py
    found = script.check_sampler(DENSE, rows, dataclasses.replace(args, top_p=0.9), 1)
    assert found["training/rollout_logp_diff_mean"] == pytest.approx(0.1)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.1 / 3)
    with pytest.raises(SystemExit, match=r"log-probs differ by 0\.1 > 0\.0001"):
        script.check_sampler(DENSE, rows, args, 1)


@pytest.mark.parametrize("estimator", ("grpo", "dr_grpo", "rloo", "maxrl", "gdpo"))
@pytest.mark.parametrize("score", (0.0, 0.1, 0.7, 1 / 3, 1e6 + 0.1))
def test_a_constant_group_has_exactly_no_advantage(estimator, score):
    """The mean of three times 0.1 is not 0.1, and a rest of 1e-17 would be trained."""
    args = SimpleNamespace(adv_estimator=estimator, group_size=3)
    score_n = torch.tensor([score] * 3 + [0.0, 0.5, 0.1], dtype=torch.float64)
    parts = [(1.0, score_n.tolist())]
    adv_n = grpo.advantages(args, score_n, torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6), parts)
    assert not adv_n[:3].any() and adv_n[3:].all()


@each(grpo, agent)
def test_a_row_is_constant_only_if_its_whole_loss_is(script):
    """With a KL loss or an entropy bonus a response without an advantage has a gradient all the same."""
    [expression] = re.findall(r'row\["no_grad"\] = (.+)', inspect.getsource(script.main))
    for adv, kl, entropy in ((0.0, False, 0.0), (0.0, True, 0.0), (0.0, False, 0.1), (1e-9, False, 0.0)):
        flags = SimpleNamespace(use_kl_loss=kl, entropy_coeff=entropy, echo_coef=0.0)
        assert bool(eval(expression, dict(adv=adv, args=flags))) == (not (adv or kl or entropy))
    flags = SimpleNamespace(use_kl_loss=False, entropy_coeff=0.0, echo_coef=0.05)
    assert bool(eval(expression, dict(adv=0.0, args=flags))) == (script is grpo)
