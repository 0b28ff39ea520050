"""Formulas against golden/peers.jsonl: what functions of ten other libraries returned for the same inputs."""

from collections import Counter, defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from algos import dapo, distill, dpo, grpo, ppo, rm
from algos.variants import load_variant
from tests.conftest import ROOT, golden

CASES = golden("peers")
LISTS = "parts", "rsth"  # of the arguments; others are tensors
KINDS = {
    "advantages": "advantages masked_whiten",
    "losses, gradients": "policy_loss loss_with_kl aggregation",
    "importance weights, masks": "corrected_loss rollout_weights off_policy_mask",
    "KL": "kl_estimate kl_gradient kl_with_gradient reverse_kl adaptive_kl",
    "GAE, values": "gae gae_whitened value_loss token_rewards",
    "preferences, rewards": "preference_loss pair_loss overlong_penalty",
}


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def advantages(score, group, length, est, parts=()):
    if est != "rloo":
        return grpo.advantages(SimpleNamespace(adv_estimator=est), score, group, length, parts)
    adv = torch.zeros_like(score)
    for g in group.unique():  # a script has groups of one size
        member = group == g
        args = SimpleNamespace(adv_estimator=est, group_size=int(member.sum()))
        adv[member] = grpo.advantages(args, score[member], group[member], length[member])
    return adv


def token_losses(name, logp, old, adv, mask, low=None, high=None, c=None):
    """The loss of each token, where a clip and where the dual clip decided."""
    loss = grpo.policy_loss if name == "clip" else load_variant("policy_loss", name)
    bounds = dict(clip_low=low, clip_high=high, c=c)
    return loss(logp, old, adv, mask, **{name: x for name, x in bounds.items() if x is not None})


def policy_loss(logp, mask, agg, max_length=None, **of_loss):
    """The loss, its gradient, the shares of tokens that a clip and the dual clip decided."""
    logp.requires_grad_()
    loss, clipped, lower = token_losses(logp=logp, mask=mask, **of_loss)
    total = aggregation(loss, mask, agg, max_length)
    [grad] = torch.autograd.grad(total, [logp])
    return [total, grad, (clipped * mask).sum() / mask.sum(), (lower * mask).sum() / mask.sum()]


def aggregation(mat, mask, mode, max_length=None):
    return (grpo.loss_weights(mask, mode, max_length) * mat).sum()


def loss_with_kl(agg, ref, coef, logp, mask, **of_loss):
    loss, *_ = token_losses(logp=logp, mask=mask, **of_loss)
    return aggregation(loss + coef * grpo.kl_estimate(logp, ref, "k3"), mask, agg)


def rollout_weights(mask, ro, old, rollout_is=None, th=2.0, rs=None, rsth=(), logp=None, adv=None):
    """The weights of the trained tokens by importance sampling and rejection."""
    args = SimpleNamespace(rollout_is=rollout_is, rollout_is_threshold=th)
    args.rollout_rs, args.rollout_rs_threshold = rs, rsth
    batch = dict(mask_nt=mask, rollout_logp_nt=ro, old_logp_nt=old, adv_nt=adv)
    return grpo.rollout_weights(args, old if logp is None else logp, batch) * mask


def off_policy_mask(th, **batch):
    return rollout_weights(rs="off_policy", rsth=(th,), **batch)


def corrected_loss(agg, ro, mask, logp, old, name, adv, low=None, high=None, c=None, **correction):
    loss, *_ = token_losses(name, logp, old, adv, mask, low, high, c)
    return aggregation(rollout_weights(mask, ro, old, **correction) * loss, mask, agg)


def kl_with_gradient(logp, ref, kind):
    kl = grpo.kl_estimate(logp.requires_grad_(), ref, kind)
    return [kl, *torch.autograd.grad(kl.sum(), [logp])]


def kl_gradient(logp, ref, kind, mask):
    total = aggregation(grpo.kl_estimate(logp.requires_grad_(), ref, kind), mask, "token-mean")
    return torch.autograd.grad(total, [logp])[0]


def gae(reward, value, mask, gamma, lam, whiten=False):
    adv, returns = ppo.gae(reward, value, mask, gamma, lam)
    return [ppo.masked_whiten(adv, mask) if whiten else adv * mask, returns * mask]


def value_loss(value, old, ret, mask, clip):
    """The loss, its gradient, the share of clipped values."""
    value.requires_grad_()
    loss, clipped = ppo.value_loss(value[..., None], old[..., None], ret, clip)
    total = aggregation(loss, mask, "token-mean")
    [grad] = torch.autograd.grad(total, [value])
    return [total, grad, (clipped * mask).sum() / mask.sum()]


def preference_loss(logp, ref, tokens, loss, beta, eps, gamma=0, dw=1.0, uw=1.0, z=0.0):
    """The mean loss, the rewards of chosen and of rejected responses."""
    args = SimpleNamespace(loss=loss, beta=beta, label_smoothing=eps, simpo_gamma=gamma)
    args.desirable_weight, args.undesirable_weight = dw, uw
    loss, reward = dpo.preference_loss(args, logp, ref, tokens, z)
    return [loss.mean(), reward[:, 0], reward[:, 1]]


def pair_loss(chosen, rejected, margin, center):
    return rm.pair_loss(chosen, rejected, margin, center).mean()


def reverse_kl(student, teacher, temperature):
    """Of logits, as those of a model whose last layer is the identity."""
    layer = torch.eye(student.shape[1]), temperature, None
    target = torch.zeros(len(student), dtype=torch.long)
    return distill.reverse_kl((student.float(), *layer), (teacher.float(), *layer), target)[1]


FORMULAS = dict(
    adaptive_kl=ppo.adapted,
    advantages=advantages,
    aggregation=aggregation,
    corrected_loss=corrected_loss,
    gae=gae,
    gae_whitened=partial(gae, whiten=True),
    kl_estimate=grpo.kl_estimate,
    kl_gradient=kl_gradient,
    kl_with_gradient=kl_with_gradient,
    loss_with_kl=loss_with_kl,
    masked_whiten=ppo.masked_whiten,
    off_policy_mask=off_policy_mask,
    overlong_penalty=dapo.overlong_penalty,
    pair_loss=pair_loss,
    policy_loss=policy_loss,
    preference_loss=preference_loss,
    reverse_kl=reverse_kl,
    rollout_weights=rollout_weights,
    token_rewards=ppo.token_rewards,
    value_loss=value_loss,
)


def largest_difference(case):
    """Between what ours and theirs return, relative to theirs, or to 0.01 of the largest of theirs."""
    args = {}
    for name, x in case["args"].items():
        args[name] = f64(x) if isinstance(x, list) and name not in LISTS else x
    found = FORMULAS[case["formula"]](**args)
    expected = case["expected"]
    if not isinstance(found, list):
        found, expected = [found], [expected]
    differences = []
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is None:  # theirs does not return it
            continue
        ours, theirs = torch.as_tensor(ours, dtype=torch.float64).detach(), f64(theirs)
        assert ours.shape == theirs.shape
        scale = torch.maximum(theirs.abs(), 0.01 * theirs.abs().max()).clamp(min=1e-6)
        differences.append(((ours - theirs).abs() / scale).max().item())
    return max(differences)


@pytest.mark.parametrize("library", dict.fromkeys(case["library"] for case in CASES))
def test_a_formula_gives_what_theirs_gives(library, monkeypatch):
    """To 1e-6, or as near as the case says; where it says why it differs, it must differ by more."""
    monkeypatch.setattr(ppo, "all_reduce", list)
    wrong = []
    for case in CASES:
        if case["library"] == library:
            difference = largest_difference(case)
            agrees = difference <= case.get("within", 1e-6)
            if agrees == ("differs" in case):
                wrong.append(f"{case['formula']}: {case['what']}: {difference:.2g}")
    assert not wrong, "\n".join(wrong)


def test_the_page_has_the_numbers_of_the_table():
    page = (ROOT / "docs/results/agreement.md").read_text()
    kind_of = {formula: kind for kind, formulas in KINDS.items() for formula in formulas.split()}
    table = defaultdict(Counter)
    reasons = Counter()
    for case in CASES:
        for library in (case["library"], "all"):
            table[library][kind_of[case["formula"]]] += 1
            table[library]["all"] += 1
            table[library]["within 1e-6"] += "within" not in case and "differs" not in case
            table[library]["within 1e-5"] += "within" in case
            table[library]["differ"] += "differs" in case
        if "differs" in case:
            reasons[case["differs"], case["library"]] += 1
    columns = *KINDS, "all", "within 1e-6", "within 1e-5", "differ"
    wanted = [f"| Library | {' | '.join(columns)} |"]
    for library, counts in table.items():
        wanted.append(f"| {library} | {' | '.join(str(counts[column] or '') for column in columns)} |")
    wanted += [f"| {library} | {n} | {reason} |" for (reason, library), n in reasons.items()]
    missing = [line for line in wanted if line not in page]
    assert not missing, "\n".join(missing)
