"""The mathematics of GRPO against tables computed by hand."""

import dataclasses
import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from algos import agent, dapo, distill, grpo, ppo
from algos.variants import HERE, OF_SCRIPTS, is_zero_without_advantage, known, load_loss, load_variant
from algos.variants.maxrl import maxrl
from system.arguments import fail
from tests.conftest import ROOT, each, golden, make_args

TABLES = dict(policy_loss="policy_losses", adv_estimator="advantages")
SAMPLED = grpo, dapo, ppo, agent, distill  # scripts with a sampler


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@each(grpo, agent)
@pytest.mark.parametrize("case", golden("advantages"), ids=lambda case: case["why"])
def test_advantages(script, case):
    args = SimpleNamespace(adv_estimator=case["estimator"], group_size=case["group_size"])
    group_n, length_n = torch.tensor(case["group"]), torch.tensor(case["length"])
    score_n = f64(*case.get("score", []))
    adv_n = script.advantages(args, score_n, group_n, length_n, case.get("parts", ()))
    assert adv_n.tolist() == pytest.approx(case["expected"], rel=1e-5)
    assert score_n.tolist() == case.get("score", [])  # no estimator writes to it


def test_scores_below_0_are_not_for_maxrl():
    with pytest.raises(SystemExit, match="maxrl is for scores from 0 to 1, and one is -1"):
        maxrl(f64(1, -1, 1), torch.zeros(3), torch.ones(3), ())


@pytest.mark.parametrize("case", golden("policy_losses"), ids=lambda case: case["why"])
def test_policy_losses_and_their_gradients(case):
    """p, ratio: of the new policy, and to the old one. Columns of loss and masks: the trained tokens."""
    loss = grpo.policy_loss if case["loss"] == "clip" else load_variant("policy_loss", case["loss"])
    ratio_nt = f64(*case["ratio"])
    p_nt, adv_nt, mask_nt = (f64(*case[x]).expand(ratio_nt.shape) for x in ("p", "advantage", "mask"))
    mask_nt = mask_nt.bool()
    logp_nt = p_nt.log().requires_grad_()
    old_nt = logp_nt.detach() - ratio_nt.log()
    loss_nt, clipped_nt, lower_nt = loss(logp_nt, old_nt, adv_nt, mask_nt, **case["arguments"])
    [grad_nt] = torch.autograd.grad(loss_nt[mask_nt].sum(), [logp_nt])
    assert loss_nt[mask_nt].tolist() == pytest.approx(case["expected"]) and loss_nt.isfinite().all()
    assert grad_nt[mask_nt].tolist() == pytest.approx(case["gradient"])
    assert clipped_nt[mask_nt].tolist() == case["clipped"] and lower_nt[mask_nt].tolist() == case["lower"]


UNFIT = {  # what a plug-in returns for an input x, and the line that it is refused with
    "x[:-1]": "must return tensors of shape",
    "torch.cat([x, x])": "must return tensors of shape",
    "x[:, None]": "must return tensors of shape",
    "x.tolist()": "must return tensors of shape",
    "None": "must return tensors of shape",
    "x * float('nan')": "returns a number that is not finite",
    "x / 0": "returns a number that is not finite",
    "x.sub_(x.mean())": "changes an argument in place",
    "x.clamp_(-0.5, 0.9)": "changes an argument in place",
    "x.log()": "returns a number that is not finite",
    "exit(3)": "raises SystemExit: 3",
    "x.missing": "raises AttributeError: 'Tensor' object has no attribute 'missing'",
}


@pytest.mark.parametrize("returned", UNFIT)
def test_what_a_plug_in_returns_is_looked_at(returned, tmp_path):
    """The same way for estimators and losses; and a loss returns three."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        f"def adv(score_n, group_n, length_n, parts):\n    x = score_n\n    return {returned}\n"
        f"def loss(logp_nt, old_logp_nt, adv_nt, mask_nt):\n    x = adv_nt\n    x = {returned}\n"
        "    return logp_nt * 1, x, x\n"
    )
    given = f64(1, 0, 0, 1), torch.tensor([0, 0, 1, 1]), torch.ones(4)
    for flag, name in (("policy_loss", "loss"), ("adv_estimator", "adv")):
        args = make_args(grpo, **{flag: f"{file}:{name}"})
        line = re.escape(f"--{flag} {file}:{name} {UNFIT[returned]}")
        with pytest.raises(SystemExit, match=line):
            load_loss(args, clip=grpo.policy_loss)
    with pytest.raises(SystemExit, match=line):
        grpo.advantages(args, *given)


@pytest.mark.parametrize("returned", ("(score_n, score_n)", "score_n > 0", "score_n * 1j"))
def test_an_estimator_returns_one_tensor_of_floats(returned, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"def adv(score_n, group_n, length_n, parts):\n    return {returned}\n")
    with pytest.raises(SystemExit, match="must return one tensor of floats"):
        load_loss(make_args(grpo, adv_estimator=f"{file}:adv"), clip=grpo.policy_loss)


def test_a_loss_needs_a_gradient(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def loss(logp_nt, old_logp_nt, adv_nt, mask_nt):\n    return adv_nt, adv_nt, adv_nt\n")
    with pytest.raises(SystemExit, match="first a loss with a gradient"):
        load_loss(make_args(grpo, policy_loss=f"{file}:loss"), clip=grpo.policy_loss)


def test_a_loss_keeps_its_shape_in_each_call(tmp_path):
    """Squeezed, one response would have the losses of all others added to its own."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def loss(logp_nt, old_logp_nt, adv_nt, mask_nt):\n"
        "    loss_nt = -adv_nt * (logp_nt - old_logp_nt).exp()\n"
        "    return loss_nt.squeeze(), 0 * loss_nt, 0 * loss_nt\n"
    )
    _, loss = load_loss(make_args(grpo, policy_loss=f"{file}:loss"), clip=grpo.policy_loss)
    logp_nt = f64([-1, -2], [-3, -1])
    loss(logp_nt, logp_nt, logp_nt, logp_nt < 0)
    one = logp_nt[:, :1]
    with pytest.raises(SystemExit, match=r"must return tensors of shape \[2, 1\]"):
        loss(one, one, one, one < 0)


def test_every_variant_has_numbers_a_gradient_and_a_row():
    """And takes what the others of its flag take: else no flag knows it."""
    variants = {name: flag for flag in OF_SCRIPTS for name in known(flag)}
    assert variants.keys() == {path.stem for path in HERE.glob("*.py")} - {"__init__"}
    missing = []
    for name, flag in variants.items():
        wanted = [("docs/algorithms/grpo.md", f"| `--{flag} {name}` |")]
        if flag == "policy_loss":
            wanted.append(("docs/algorithms/grpo.md", f"| `{name}` |"))  # its defaults
            worker = "tests/workers/gradients.py"
            wanted += [(worker, f'"{name}": dict'), (worker, f'kind == "{name}"')]
        wanted.append((f"tests/golden/{TABLES[flag]}.jsonl", f': "{name}"'))
        missing += [f"{file}: no {text}" for file, text in wanted if text not in (ROOT / file).read_text()]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("name", ("clip", *known("policy_loss")))
def test_a_policy_far_from_the_old_one_has_a_finite_loss_and_gradient(name):
    _, loss = load_loss(make_args(grpo, policy_loss=name), clip=grpo.policy_loss)
    logp_nt = torch.zeros(3, 1, requires_grad=True)
    loss_nt, *_ = loss(logp_nt, torch.full((3, 1), -1e4), torch.tensor([[1.0], [0], [-1]]), torch.ones(3, 1))
    [grad_nt] = torch.autograd.grad(loss_nt.sum(), [logp_nt])
    assert loss_nt.isfinite().all() and grad_nt.isfinite().all()


@pytest.mark.parametrize(
    ("script", "flags", "more"),
    (
        # k3 of 1 is e^-1 + 1 - 1; that of k3+ is times the ratio
        (grpo, dict(use_kl_loss=True, kl_loss_coef=0.1), [0.1 * math.exp(-1) * r for r in (0.5, 2, 0.5)]),
        (grpo, dict(use_kl_loss=True, kl_loss_coef=0.1, kl_kind="k3"), [0.1 * math.exp(-1)] * 3),
        (dapo, {}, [0.1 * 2] * 3),  # no bonus
        (ppo, dict(positive_nll_coef=0.5), [0.5 * 3 * 4] * 3),
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
    assert loss_nt[0].tolist() == pytest.approx([x - 0.1 * 2 + y for x, y in zip(expected, more)], abs=1e-5)


@each(grpo, agent)
def test_the_ratio_of_the_kl_is_that_to_the_old_policy_and_bounded(script):
    args = make_args(script, use_kl_loss=True, kl_loss_coef=1.0)
    logp_nt = torch.full((1, 2), -1.0)
    old_nt = torch.tensor([[-1000.0, -1 - math.log(2)]])
    batch = dict(mask_nt=torch.ones(1, 2).bool(), adv_nt=torch.zeros(1, 2), old_logp_nt=old_nt)
    batch |= dict(rollout_logp_nt=old_nt + 3, ref_logp_nt=logp_nt - 1)
    _, losses, _ = script.actor_loss(args, script.policy_loss, logp_nt, logp_nt, batch)
    expected = [math.exp(-1 + 20), math.exp(-1) * 2]
    assert losses["kl_loss"][0].tolist() == pytest.approx(expected, rel=1e-4)


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


RATIOS, OF_RESPONSES = [[1, 3], [0.6, 0.8], [4, 9e9]], torch.tensor([[1, 1], [1, 1], [1, 0]]).bool()


@pytest.mark.parametrize("case", golden("rollout_weights"), ids=str)
def test_rollout_weights(case):
    args, expected = SimpleNamespace(**case), case["expected"]
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
    for missing in (math.nan, math.inf, -math.inf):  # as if the sampler had had the policy's
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


def test_a_rollout_weight_is_exact_up_to_e_to_the_20th():
    args = SimpleNamespace(rollout_is="token", rollout_is_threshold=1e9, rollout_rs=None)
    batch = dict(mask_nt=torch.ones(1, 2), rollout_logp_nt=torch.zeros(1, 2))
    weight_nt = grpo.rollout_weights(args, torch.tensor([[15.0, -15.0]]), batch)
    assert weight_nt[0].tolist() == pytest.approx([math.exp(15), math.exp(-15)])


@each(grpo, agent)
def test_kl_estimates(script):
    """With +: the value of the estimator, and the gradient of k2, which is that of the KL."""
    logp_nt, ref_nt = f64([-1, -2]).requires_grad_(), f64([-1.5, -1])
    expected = {
        "k1": [0.5, -1.0],
        "abs": [0.5, 1.0],
        "k2": [0.125, 0.5],
        "k3": [math.exp(-0.5) - 1 + 0.5, math.exp(1) - 1 - 1],
    }
    for kind, values in expected.items():
        assert script.kl_estimate(logp_nt, ref_nt, kind)[0].tolist() == pytest.approx(values), kind
    for kind in ("k1", "k3"):
        estimate_nt = script.kl_estimate(logp_nt, ref_nt, f"{kind}+")
        [grad_nt] = torch.autograd.grad(estimate_nt.sum(), [logp_nt])
        assert estimate_nt[0].tolist() == pytest.approx(expected[kind]), kind
        assert grad_nt[0].tolist() == pytest.approx([0.5, -1.0]), kind
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


@each(grpo, agent)
@pytest.mark.parametrize(
    ("kind", "on", "off"),  # how far the gradient is off, for samples of the policy and of another one
    (("k1+", 0, 0), ("k3+", 0, 0), ("k2", 0, 0.75), ("k3", 0.49, 1.83), ("abs", 0.59, 0.72)),
)
def test_the_gradient_of_the_kl_of_samples_of_the_old_policy(script, kind, on, off):
    """Of the whole loss without an advantage, in expectation over what the old policy samples."""
    p, ref = f64(0.42, 0.28, 0.19, 0.11), f64(0.05, 0.15, 0.3, 0.5)
    args = make_args(script, use_kl_loss=True, kl_loss_coef=1.0, kl_kind=kind)
    args, token_loss = load_loss(args, clip=script.policy_loss)
    logits = p.log().requires_grad_()
    logp = logits.log_softmax(-1)
    [exact] = torch.autograd.grad((logp.exp() * (logp - ref.log())).sum(), [logits], retain_graph=True)
    for old, expected in ((p, on), (f64(0.1, 0.2, 0.3, 0.4), off)):
        batch = dict(mask_nt=torch.ones(1, 4), adv_nt=torch.zeros(1, 4), old_logp_nt=old.log())
        batch |= dict(rollout_logp_nt=old.log(), ref_logp_nt=ref.log())
        loss_nt, losses, _ = script.actor_loss(args, token_loss, logp, 0 * logp, batch)
        [found] = torch.autograd.grad((old * loss_nt).sum(), [logits], retain_graph=True)
        assert ((found - exact).norm() / exact.norm()).item() == pytest.approx(expected, abs=0.005)
        if kind.endswith("+"):  # the value too is that of the policy's KL
            assert (old * losses["kl_loss"]).sum().item() == pytest.approx(0.82, abs=0.005)


def test_the_gradient_is_that_of_trl():
    """TRL multiplies k3 by the ratio, and derives both."""
    logp_nt = f64([-1, -2, -0.5]).requires_grad_()
    old_nt, ref_nt = f64([-1.5, -1, -0.5]), f64([-0.5, -2.5, -1])
    k3 = (ref_nt - logp_nt).exp() - (ref_nt - logp_nt) - 1
    [expected] = torch.autograd.grad(((logp_nt - old_nt).exp() * k3).sum(), [logp_nt])
    args = make_args(grpo, use_kl_loss=True, kl_loss_coef=1.0)
    args, token_loss = load_loss(args, clip=grpo.policy_loss)
    batch = dict(mask_nt=torch.ones(1, 3), adv_nt=torch.zeros(1, 3), old_logp_nt=old_nt)
    batch |= dict(rollout_logp_nt=old_nt, ref_logp_nt=ref_nt)
    loss_nt, losses, _ = grpo.actor_loss(args, token_loss, logp_nt, 0 * logp_nt, batch)
    [found] = torch.autograd.grad(loss_nt.sum(), [logp_nt])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(losses["kl_loss"], (logp_nt - old_nt).exp() * k3)


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


TERMS = {  # of log-probs, entropies and the batch, next to the policy's loss
    "a column of its own": lambda logp_nt, _, batch: batch["distance_nt"] * logp_nt,
    "if there is a column": lambda logp_nt, _, batch: logp_nt * ("mine_nt" in batch),
    "by get": lambda logp_nt, _, batch: logp_nt * batch.get("mine_nt", 0),
    "a flag": lambda logp_nt, _, batch: logp_nt * (batch["first_nt"] == 1),
    "not a flag": lambda logp_nt, _, batch: logp_nt * ~batch["older_nt"],
    "a high entropy": lambda logp_nt, entropy_nt, batch: (entropy_nt - 9).relu(),
    "a small probability": lambda logp_nt, _, batch: (-25 - logp_nt).relu(),
    "far from the old policy": lambda logp_nt, _, batch: ((logp_nt - batch["old_logp_nt"]).abs() - 15).relu(),
    "late tokens": lambda logp_nt, _, batch: logp_nt * (torch.arange(logp_nt.shape[1]) > 300),
    "short responses": lambda logp_nt, _, batch: logp_nt * (batch["mask_nt"].sum(-1, keepdim=True) < 3),
    "centred": lambda logp_nt, _, batch: logp_nt * (batch["adv_nt"] - batch["adv_nt"].mean()),
    "what raises": lambda logp_nt, _, batch: logp_nt[batch["index_nt"].long() + 99],
}


@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_a_researcher_is_seen(name):
    """Also one that cannot be tried: its rows are run."""
    args, token_loss = load_loss(make_args(grpo), clip=grpo.policy_loss)

    def loss(logp_nt, entropy_nt, batch):
        loss_nt, losses, means = grpo.actor_loss(args, token_loss, logp_nt, entropy_nt, batch)
        return loss_nt + TERMS[name](logp_nt, entropy_nt, batch), losses, means

    assert not is_zero_without_advantage(loss, 400)


def test_a_loss_with_nothing_to_do_is_no_fault():
    """One that returns early where all advantages are 0."""

    def early(logp_nt, old_logp_nt, adv_nt, mask_nt):
        if not adv_nt.any():
            return 3 * (torch.zeros_like(adv_nt),)
        return grpo.policy_loss(logp_nt, old_logp_nt, adv_nt, mask_nt)

    assert is_zero_without_advantage(partial(grpo.actor_loss, make_args(grpo), early), 64)


def test_the_loss_of_the_page(tmp_path):
    """VESPO: a response's weight is w^k exp(c (1 - w)), however far w is from 1."""
    page = (ROOT / "docs/algorithms/grpo.md").read_text()
    code = page.partition("takes functions of your file:\n\n```python\n")[2].partition("```")[0]
    (tmp_path / "mine.py").write_text(code)
    vespo = load_variant("policy_loss", f"{tmp_path}/mine.py:vespo")
    centred = load_variant("adv_estimator", f"{tmp_path}/mine.py:centred")
    assert centred(torch.tensor([1.0, 3.0]), None, None, ()).tolist() == [-1, 1]
    old_nt = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0], [-500.0, -1.0, -1.0]])
    logp_nt = torch.tensor([[-0.5, -2.1, -1.0], [-1.2, -0.9, -1.5], [-1.0, -1.0, -1.0]], requires_grad=True)
    adv_nt = torch.tensor([[2.0], [-1.0], [1.0]]).expand(3, 3)
    mask_nt = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]], dtype=torch.bool)
    loss_nt, *_ = vespo(logp_nt, old_nt, adv_nt, mask_nt)
    (loss_nt * mask_nt).sum().backward()
    w_n = torch.tensor([0.4, -0.6]).exp()
    weight_n = torch.stack(
        [w_n[0] ** 2 * (3 - 3 * w_n[0]).exp(), w_n[1] ** 3 * (2 - 2 * w_n[1]).exp(), w_n[0] * 0]
    )
    expected = -weight_n[:, None] * adv_nt * mask_nt
    assert torch.allclose(logp_nt.grad, expected)
