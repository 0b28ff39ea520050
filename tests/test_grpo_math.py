"""The mathematics of GRPO against tables computed by hand."""

import dataclasses
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algos import agent, dapo, distill, grpo, ppo
from algos.variants import HERE, OF_SCRIPTS, is_zero_without_advantage, known, load_loss
from algos.variants.cispo import cispo
from algos.variants.dppo import dppo
from algos.variants.gspo import gspo
from algos.variants.sapo import sapo
from system.arguments import fail
from tests.conftest import ROOT, each, make_args

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
    few_n = torch.tensor([0, 0, 1, 2])  # a pair, and two alone
    assert script.advantages(args, f64(2, 0, 5, 4), few_n, None).tolist() == [1, -1, 0, 0]
    pair = SimpleNamespace(adv_estimator="rloo", group_size=2)
    assert script.advantages(pair, f64(3, 1), torch.tensor([0, 0]), None).tolist() == [2, -2]
    args.adv_estimator = "reinforce_plus_plus_baseline"
    tokens = script.advantages(args, score_n, group_n, length_n).repeat_interleave(length_n)
    assert tokens.mean().item() == pytest.approx(0, abs=1e-9)
    assert tokens.var().item() == pytest.approx(1)
    expected = script.group_advantages(score_n, group_n, norm_by_std=False).repeat_interleave(length_n)
    expected = (expected - expected.mean()) / expected.std()
    assert tokens.tolist() == pytest.approx(expected.tolist())
    assert score_n.tolist() == [1, 0, 0, 1, 3, 0]  # no estimator writes to it
    # the variance is 10/3, and the 1e-8 is 1
    adv_n = script.advantages(args, 1e-4 * f64(3, 1, 2, -2), few_n, torch.ones(4))
    assert (adv_n * (13 / 3) ** 0.5).tolist() == pytest.approx([1, -1, 2, -2])
    alone = script.advantages(args, f64(3, 1), torch.tensor([0, 1]), torch.ones(2))
    assert alone.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert script.advantages(args, f64(3), torch.tensor([0]), torch.ones(1)).tolist() == [0]


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
    # a pair that 1e-6 holds together, a pair, and two alone; 1e-8 is as much as the weight squared
    near = 0.5 / (0.5**0.5 + 1)
    sums = np.array([-near, near, 0.5**0.5, -(0.5**0.5), 3, -3])
    parts = [(1e-4, [0, 1e-6, 5, 1, 3, -3])]
    adv_n = script.advantages(args, None, torch.tensor([0, 0, 1, 1, 2, 3]), None, parts)
    expected = sums / (sums.var(ddof=1) + 1) ** 0.5
    assert adv_n.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_policy_loss():
    ratio, high, low = [0.5, 1.0, 1.5, 5.0], 0.3, 0.2
    logp, old = torch.tensor([ratio]).log(), torch.zeros(1, 4)
    loss, clipped, lower = grpo.policy_loss(logp, old, torch.ones(1, 4), None, low, high)
    assert loss[0].tolist() == pytest.approx([-0.5, -1.0, -1.3, -1.3])
    assert clipped[0].tolist() == [False, False, True, True] and not lower.any()
    loss, clipped, lower = grpo.policy_loss(logp, old, -2 * torch.ones(1, 4), None, low, high)
    assert loss[0].tolist() == pytest.approx([1.6, 2.0, 3.0, 6.0])
    assert clipped[0].tolist() == [True, False, False, False]
    assert lower[0].tolist() == [False, False, False, True]


def test_gspo_loss():
    """One ratio a response; each token has the gradient of its own; what is masked has no say."""
    mask_nt = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0]]).bool()
    d_nt = f64([0.1, 7, 0.3], [0.5, 0.3, 0], [-0.3, 0, 0]).requires_grad_()
    old_nt, adv_nt = torch.full((3, 3), -2.0), f64([0.5], [2], [-1])
    loss_nt, clipped_nt, lower_nt = gspo(d_nt - 2, old_nt, adv_nt, mask_nt, 0.2, 0.3)
    # ratios e^.2 = 1.22, e^.4 = 1.49 > 1.3, e^-.3 = .74 < .8
    expected = [0.5 * math.exp(0.2)] * 2 + [2.6, 2.6, -0.8]
    assert loss_nt[mask_nt].tolist() == pytest.approx([-x for x in expected])
    assert clipped_nt[mask_nt].tolist() == [False, False, True, True, True] and not lower_nt.any()
    [grad_nt] = torch.autograd.grad(loss_nt[mask_nt].sum(), [d_nt])
    assert grad_nt[mask_nt].tolist() == pytest.approx([-0.5 * math.exp(0.2)] * 2 + [0] * 3)
    loss_nt, _, lower_nt = gspo(f64([2, 20]), f64([0, 20]), f64([-1]), torch.ones(1, 2), 0.2, 0.3)
    assert loss_nt[0].tolist() == pytest.approx([math.e] * 2) and not lower_nt.any()
    loss_nt, _, lower_nt = gspo(f64([4, 20]), f64([0, 20]), f64([-2]), torch.ones(1, 2), 0.2, 0.3)
    assert loss_nt[0].tolist() == [6, 6] and lower_nt.all()  # the dual clip: e^2 > 3
    loss_nt, *_ = gspo(f64([4, 20]), f64([0, 20]), f64([1]), torch.zeros(1, 2))
    assert loss_nt.isfinite().all()  # of a response without a trained token


def test_every_variant_has_numbers_a_gradient_and_a_row():
    """And takes what the others of its flag take: else no flag knows it."""
    variants = {name: flag for flag in OF_SCRIPTS for name in known(flag)}
    assert variants.keys() == {path.stem for path in HERE.glob("*.py")} - {"__init__"}
    missing = []
    for name, flag in variants.items():
        wanted = [("docs/algorithms/grpo.md", f"| `--{flag} {name}` |")]
        if flag == "policy_loss":
            wanted.append(("docs/algorithms/grpo.md", f"| `{name}` |"))  # its defaults
            wanted += [
                ("tests/workers/gradients.py", text) for text in (f'"{name}": dict', f'kind == "{name}"')
            ]
        missing += [f"{file}: no {text}" for file, text in wanted if text not in (ROOT / file).read_text()]
        if not re.search(rf"def test_(\w+_)?{name}(_\w+)?\(", Path(__file__).read_text()):
            missing.append(f"{__file__}: no test whose name has {name}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("name", ("clip", *known("policy_loss")))
def test_a_policy_far_from_the_old_one_has_a_finite_loss_and_gradient(name):
    _, loss = load_loss(make_args(grpo, policy_loss=name), clip=grpo.policy_loss)
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
    logp_nt = (ratio.log() - 2).requires_grad_()
    loss_nt, clipped_nt, lower_nt = sapo(logp_nt, torch.full((1, 3), -2.0), f64([1, 2, -1]), None)
    # sigma(0) = .5, sigma(2) = .8807971, sigma(1.05) = .7407749
    assert loss_nt[0].tolist() == pytest.approx([-2, -8 * 0.8807971, 4 / 1.05 * 0.7407749])
    [grad_nt] = torch.autograd.grad(loss_nt.sum(), [logp_nt])
    slopes = [-1, -8 * 0.8807971 * 0.1192029 * 3, 4 * 0.7407749 * 0.2592251 * 2]  # sigma (1 - sigma) 4 A r
    assert grad_nt[0].tolist() == pytest.approx(slopes) and not (clipped_nt + lower_nt).any()


def test_dppo_loss():
    """Masked by how far a probability has moved the way its advantage pushes: not by the ratio."""
    p, old = f64([0.63, 0.7, 0.3, 0.38, 0.02, 0.7, 0.55]), f64([0.5, 0.5, 0.5, 0.5, 0.0005, 0.5, 0.5])
    logp_nt, adv_nt = p.log().requires_grad_(), f64([1, 1, 1, -1, 1, -1, -1])
    loss_nt, far_nt, lower_nt = dppo(logp_nt, old.log(), adv_nt, None, 0.1, 0.15)
    assert far_nt[0].tolist() == [False, True, False, True, False, False, False] and not lower_nt.any()
    expected = [-1.26 * math.log(0.63), 0, -0.6 * math.log(0.3), 0, -20 * math.log(0.02), 1.4 * math.log(0.7)]
    expected.append(1.1 * math.log(0.55))
    assert loss_nt[0].tolist() == pytest.approx(expected)  # the ratio of 40 counts as 20
    [grad_nt] = torch.autograd.grad(loss_nt.sum(), [logp_nt])
    assert grad_nt[0].tolist() == pytest.approx([-1.26, 0, -0.6, 0, -20, 1.4, 1.1])


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
    args, token_loss = load_loss(args, clip=script.policy_loss)
    loss_nt, *reported = script.actor_loss(args, token_loss, logp_nt, entropy_nt, batch)
    assert loss_nt.requires_grad == has_bonus
    if has_bonus:  # that is 0: the entropy has no backward pass
        args = dataclasses.replace(args, entropy_coeff=0.0)
        assert not script.actor_loss(args, token_loss, logp_nt, entropy_nt, batch)[0].requires_grad
    expected = [-0.5 * 1.5, -1.4 * 1.5, 0.8 * 1.5]
    torch.testing.assert_close(reported[-1]["ppo_kl"], old_nt - logp_nt)
    assert reported[-1]["pg_clipfrac"][0].tolist() == [False, True, True]
    assert not reported[-1]["pg_clipfrac_lower"].any()
    assert reported[0]["pg_loss"][0].tolist() == pytest.approx(expected)
    assert loss_nt[0].tolist() == pytest.approx([x - 0.1 * 2 + more for x in expected], abs=1e-5)


@each(agent, dapo, ppo)
@pytest.mark.parametrize("name", ("cispo", "dppo"))
def test_a_variant_is_the_same_loss_in_every_script(script, name):
    logp_nt = torch.tensor([[-1.0, -0.5, -2], [-0.3, -1, -0.7]])  # some tokens move far, some do not
    old_nt = logp_nt + torch.tensor([[0.4, -0.01, -0.4], [0.01, 0.5, -0.6]])
    batch = dict(mask_nt=torch.ones(2, 3).bool(), adv_nt=torch.tensor([[1.0], [-1]]).expand(2, 3))
    batch |= dict(old_logp_nt=old_nt, rollout_logp_nt=old_nt, nll_weight_nt=torch.ones(2, 3))
    found = []
    for algo in (grpo, script):
        args = make_args(algo, policy_loss=name, clip_ratio_low=0.05)
        args, token_loss = load_loss(args, clip=algo.policy_loss)
        found.append(algo.actor_loss(args, token_loss, logp_nt, logp_nt, batch)[0])
    assert torch.equal(*found) and found[0].any()


@each(grpo, agent, dapo, ppo)
def test_what_is_not_said_is_as_in_the_paper(script, monkeypatch):
    seen, high = [], 0.28 if script is dapo else 0.2
    if script is ppo:
        monkeypatch.setattr(ppo, "check_critic", lambda args: None)
    monkeypatch.setattr(script, "Run", lambda args: seen.append(args) or fail("enough"))

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


@each(grpo, dapo, agent, distill)
@pytest.mark.parametrize(
    ("mode", "alone", "of_step"),  # weights of the tokens of a response of one, and of one of three
    (
        ("token-mean", (1 / 4, 1 / 4), (1 / 10, 1 / 10)),
        ("seq-mean-token-sum", (1 / 2, 1 / 2), (1 / 5, 1 / 5)),
        ("seq-mean-token-mean", (1 / 2, 1 / 6), (1 / 5, 1 / 15)),
        ("seq-mean-token-sum-norm", (1 / 6, 1 / 6), (1 / 35, 1 / 35)),
    ),
)
def test_loss_weights(script, mode, alone, of_step):
    """Alone, and in a step of 10 tokens, 5 responses, at most 7 long. An empty response does not count."""
    mask_nt = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 0, 0]]).bool()
    for limits, (one, three) in (((), alone), ((7, (10, 5)), of_step)):
        weight_nt = script.loss_weights(mask_nt, mode, *limits)
        torch.testing.assert_close(weight_nt, torch.tensor([[0, one, 0], [three] * 3, [0.0] * 3]))
    assert script.loss_weights(mask_nt[:1], mode, 1, (1, 1)).tolist() == [[0, 1, 0]]
    assert script.loss_weights(mask_nt[2:], mode, 7, (0, 0)).tolist() == [[0, 0, 0]]


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
def test_rollout_weights(level, cap, rejection, high, low, expected):
    args = SimpleNamespace(rollout_is=level, rollout_is_threshold=cap, rollout_rs=rejection)
    args.rollout_rs_threshold = (high,) if low is None else (low, high)
    old_nt = (torch.tensor(RATIOS).log() - 3).requires_grad_()
    batch = dict(mask_nt=OF_RESPONSES, rollout_logp_nt=torch.full((3, 2), -3.0), adv_nt=torch.zeros(3, 2))
    weight_nt = grpo.rollout_weights(args, old_nt, batch)
    assert weight_nt.expand(3, 2)[OF_RESPONSES].tolist() == pytest.approx(expected)
    assert not weight_nt.requires_grad
    batch["old_logp_nt"] = old_nt  # not those of the policy
    assert torch.equal(grpo.rollout_weights(args, old_nt + 1, batch), weight_nt)
    for wrong in (-1e4, 1e4):  # of one token
        batch["rollout_logp_nt"][0, 0] = wrong
        weight_nt = grpo.rollout_weights(args, old_nt, batch)
        assert weight_nt.isfinite().all()
        assert weight_nt[1:].expand(2, 2)[OF_RESPONSES[1:]].tolist() == pytest.approx(expected[2:])
    for missing in (math.nan, INF, -INF):  # as if the sampler had had the policy's
        batch["rollout_logp_nt"][0, 0] = missing
        found_nt = grpo.rollout_weights(args, old_nt, batch)
        batch["rollout_logp_nt"][0, 0] = old_nt[0, 0]
        assert torch.equal(found_nt, grpo.rollout_weights(args, old_nt, batch))


@each(*SAMPLED)
def test_the_off_policy_mask(script):
    """Without what is good, near, or only looks far by what an environment wrote between the tokens."""
    args = SimpleNamespace(rollout_is=None, rollout_rs="off_policy", rollout_rs_threshold=(0.3,))
    sampler_nt = torch.zeros(5, 3)
    logp_nt = -f64([0.1, 0.6, 0], [0.1, 0.6, 0], [0.1, 0.4, 9], [-0.5, -0.5, 0], [1, 1, 0])
    mask_nt, adv_nt = torch.tensor([[True, True, False]] * 5), f64([-1], [1], [-1], [-1], [0]).expand(5, 3)
    logp_nt.requires_grad_()
    old_nt = logp_nt.detach() + 5  # of the last policy: another question
    batch = dict(mask_nt=mask_nt, adv_nt=adv_nt, rollout_logp_nt=sampler_nt, nll_weight_nt=0 * adv_nt)
    weight_nt = script.rollout_weights(args, logp_nt, batch | dict(old_logp_nt=old_nt))
    assert not weight_nt.requires_grad and weight_nt[:, 0].tolist() == [0, 1, 1, 1, 1]
    assert (weight_nt == weight_nt[:, :1]).all()
    args = make_args(script, **vars(args), clip_ratio_low=0.2, clip_ratio_high=0.2)
    batch["teacher_logp_nt"] = logp_nt.detach() + adv_nt
    token_loss = [] if script is distill else [load_loss(args, clip=script.policy_loss)[1]]
    loss_nt, *_, means = script.actor_loss(args, *token_loss, logp_nt, torch.zeros(5, 3), batch)
    [grad_nt] = torch.autograd.grad((loss_nt * mask_nt).sum(), [logp_nt])
    assert means["rollout_rs_masked"].any(-1).tolist() == [True, False, False, False, False]
    assert grad_nt[:, 0].tolist() == [0, -1, 1, 1, 0]


def test_a_ratio_is_exact_up_to_e_to_the_20th():
    logp_nt, adv_nt, zero_nt = torch.tensor([[15.0, -15.0]]), torch.tensor([[-1.0, 1.0]]), torch.zeros(1, 2)
    loss_nt, *_ = grpo.policy_loss(logp_nt, zero_nt, adv_nt, None, 0.2, 0.2, c=1e9)
    assert loss_nt[0].tolist() == pytest.approx([math.exp(15), -math.exp(-15)])
    args = SimpleNamespace(rollout_is="token", rollout_is_threshold=1e9, rollout_rs=None)
    batch = dict(mask_nt=torch.ones(1, 2), rollout_logp_nt=zero_nt, adv_nt=adv_nt)
    weight_nt = grpo.rollout_weights(args, logp_nt, batch)
    assert weight_nt[0].tolist() == pytest.approx([math.exp(15), math.exp(-15)])


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
    far = torch.tensor([[-100.0]], requires_grad=True)
    estimate = script.kl_estimate(far, torch.tensor([[0.0]]), "k3")
    estimate.backward()
    assert estimate.item() == 10 and far.grad.item() == 0


@pytest.mark.parametrize(
    ("kind", "near", "far", "mean", "deviation"),
    (
        ("k1", 1, 1, 0.82, 1.28),  # a gradient of 0
        ("abs", 16.29, 0.59, 1.32, 0.75),
        ("k2", 0, 0, 1.15, 0.99),
        ("k3", 0.01, 0.49, 0.82, 0.67),
        ("k1+", 0, 0, 0.82, 1.28),
        ("k3+", 0, 0, 0.82, 0.67),
    ),
)
def test_gradients_of_the_kl(kind, near, far, mean, deviation):
    """Expectations over a vocabulary of four: how far a gradient is off, near the reference and far away."""
    p = f64(0.42, 0.28, 0.19, 0.11)

    def gradient(loss_of, q):
        logits = p.log().requires_grad_()
        loss = loss_of(logits.log_softmax(-1), q.log())
        return torch.autograd.grad(loss, logits)[0]

    for q, off in ((f64(0.4, 0.3, 0.2, 0.1), near), (f64(0.05, 0.15, 0.3, 0.5), far)):
        exact = gradient(lambda logp, logq: (logp.exp() * (logp - logq)).sum(), q)
        found = gradient(lambda logp, logq: (p * grpo.kl_estimate(logp, logq, kind)).sum(), q)
        assert ((found - exact).norm() / exact.norm()).item() == pytest.approx(off, abs=0.005)
        if kind == "k3":  # that of KL(reference || policy)
            torch.testing.assert_close(found, gradient(lambda logp, logq: -(logq.exp() * logp).sum(), q))
    value = grpo.kl_estimate(p.log(), q.log(), kind)
    assert (p * value).sum().item() == pytest.approx(mean, abs=0.005)
    assert (p * value**2).sum().item() - mean**2 == pytest.approx(deviation**2, abs=0.02)


# the baseline of REINFORCE++ subtracts the mean of the batch, too
@pytest.mark.parametrize(
    "estimator",
    sorted({*OF_SCRIPTS["adv_estimator"], *known("adv_estimator")} - {"reinforce_plus_plus_baseline"}),
)
@pytest.mark.parametrize("score", (0.0, 0.1, 0.7, 1 / 3, 1e6 + 0.1))
def test_a_constant_group_has_exactly_no_advantage(estimator, score):
    """The mean of three times 0.1 is not 0.1, and a rest of 1e-17 would be trained."""
    args = SimpleNamespace(adv_estimator=estimator, group_size=3)
    score_n = torch.tensor([score] * 3 + [0.0, 0.5, 0.1], dtype=torch.float64)
    parts = [(1.0, score_n.tolist())]
    adv_n = grpo.advantages(args, score_n, torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6), parts)
    assert not adv_n[:3].any() and adv_n[3:].all()


def own_loss(logp_nt, old_logp_nt, adv_nt, mask_nt):
    """A user's: it pulls towards the old policy, also where the advantage is 0."""
    loss_nt = -adv_nt * logp_nt + 0.1 * (logp_nt - old_logp_nt) ** 2
    return loss_nt, torch.zeros_like(loss_nt), torch.zeros_like(loss_nt)


@each(grpo, agent)
@pytest.mark.parametrize(
    ("flags", "zero"),
    (
        ({}, True),
        (dict(rollout_is="sequence", rollout_rs="sequence", rollout_rs_threshold=(1.01,)), True),
        *((dict(policy_loss=name), True) for name in known("policy_loss")),
        (dict(use_kl_loss=True), False),
        (dict(entropy_coeff=0.1), False),
        (dict(policy_loss=f"{__file__}:own_loss"), False),
        # all ratios of the sampler are out of bounds, and still the loss decides
        (dict(policy_loss=f"{__file__}:own_loss", rollout_rs="token", rollout_rs_threshold=(1.0,)), False),
    ),
)
def test_the_loss_decides_which_rows_are_run(script, flags, zero):
    """Those without an advantage, if the loss has no gradient there."""
    args, token_loss = load_loss(make_args(script, **flags), clip=script.policy_loss)
    if script is agent:
        loss = partial(agent.batch_loss, args, token_loss, totals=(1, 1))
    else:
        loss = partial(grpo.actor_loss, args, token_loss)
    assert is_zero_without_advantage(loss, 64) == zero


def test_echo_trains_rows_without_an_advantage():
    args, token_loss = load_loss(make_args(agent, echo_coef=0.05), clip=agent.policy_loss)
    assert not is_zero_without_advantage(partial(agent.batch_loss, args, token_loss, totals=(1, 1)), 64)


def late(logp_nt, batch):
    """A term of tokens far behind the beginning."""
    position_t = torch.arange(logp_nt.shape[1])
    return logp_nt * (position_t > 300)


def centred(logp_nt, batch):
    """Advantages around their mean in the batch: none is 0."""
    adv_nt = batch["adv_nt"]
    return logp_nt * (adv_nt - adv_nt.mean())


TERMS = {  # of log-probs, entropies and the batch, next to the policy's loss
    "a column of its own": lambda logp_nt, entropy_nt, batch: batch["distance_nt"] * logp_nt,
    "if there is a column": lambda logp_nt, entropy_nt, batch: logp_nt * ("mine_nt" in batch),
    "by get": lambda logp_nt, entropy_nt, batch: logp_nt * batch.get("mine_nt", 0),
    "a flag": lambda logp_nt, entropy_nt, batch: logp_nt * (batch["first_nt"] == 1),
    "not a flag": lambda logp_nt, entropy_nt, batch: logp_nt * ~batch["older_nt"],
    "a high entropy": lambda logp_nt, entropy_nt, batch: (entropy_nt - 9).relu(),
    "a small probability": lambda logp_nt, entropy_nt, batch: (-25 - logp_nt).relu(),
    "far from the old": lambda logp_nt, entropy_nt, batch: (
        (logp_nt - batch["old_logp_nt"]).abs() - 15
    ).relu(),
    "late": lambda logp_nt, entropy_nt, batch: late(logp_nt, batch),
    "short": lambda logp_nt, entropy_nt, batch: logp_nt * (batch["mask_nt"].sum(-1, keepdim=True) < 3),
    "centred": lambda logp_nt, entropy_nt, batch: centred(logp_nt, batch),
    "what raises": lambda logp_nt, entropy_nt, batch: logp_nt[batch["index_nt"].long() + 99],
}


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_a_researcher_is_seen(term):
    """Also one that cannot be tried: its rows are run."""
    args, token_loss = load_loss(make_args(grpo), clip=grpo.policy_loss)

    def loss(logp_nt, entropy_nt, batch):
        loss_nt, losses, means = grpo.actor_loss(args, token_loss, logp_nt, entropy_nt, batch)
        return loss_nt + TERMS[term](logp_nt, entropy_nt, batch), losses, means

    assert not is_zero_without_advantage(loss, 400)


def test_a_loss_with_nothing_to_do_is_no_fault():
    """One that returns early where all advantages are 0."""

    def early(logp_nt, old_logp_nt, adv_nt, mask_nt):
        if not adv_nt.any():
            return 3 * (torch.zeros_like(adv_nt),)
        return grpo.policy_loss(logp_nt, old_logp_nt, adv_nt, mask_nt)

    assert is_zero_without_advantage(partial(grpo.actor_loss, make_args(grpo), early), 64)
