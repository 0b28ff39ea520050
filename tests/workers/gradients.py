"""Gradients of an actor update on fixed rows, for many ways to cut the same work: ALGO MODEL OUT REPLICAS.

Of agent.py's rows, some tokens are the environment's.
"""

import dataclasses
import importlib
import itertools
import math
import sys
from functools import partial

import torch
import torch.distributed as dist
from shared import Capture, clipped_loss, fill_adapters, plain_logps, save, trained
from shared import make_rows as sampled_rows
from transformers import AutoModelForCausalLM

from algos.variants import load_loss
from system import model as model_module
from system.ranks import all_reduce

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])

grpo = importlib.import_module(f"algos.{sys.argv[1]}")  # or dapo, agent

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# other losses, with other corrections of the sampler and another KL
LOSSES = {
    "gspo": dict(
        policy_loss="gspo", clip_ratio_low=0.05, clip_ratio_high=0.05, loss_agg="seq-mean-token-mean"
    ),
    "cispo": dict(policy_loss="cispo", clip_ratio_low=1.0, clip_ratio_high=0.2, loss_agg="token-mean"),
    "sapo": dict(policy_loss="sapo", clip_ratio_high=None, loss_agg="seq-mean-token-sum"),
    "dppo": dict(policy_loss="dppo", clip_ratio_low=2e-4, clip_ratio_high=2e-4, loss_agg="token-mean"),
}
LOSSES["gspo"] |= dict(rollout_is="sequence", rollout_rs="geometric", rollout_rs_threshold=(1.3,))
LOSSES["cispo"] |= dict(rollout_is=None, rollout_rs="token", rollout_rs_threshold=(1.25,))
LOSSES["sapo"] |= dict(rollout_rs="sequence", rollout_rs_threshold=(0.95, 1.3))
LOSSES["dppo"] |= dict(rollout_rs="off_policy", rollout_rs_threshold=(0.02,))
LOSSES["sapo"]["kl_kind"] = "k3"
if sys.argv[1] == "dapo":  # the paper's loss alone, with the corrections of the others
    LOSSES = {name: {k: x for k, x in flags.items() if "rollout" in k} for name, flags in LOSSES.items()}
if sys.argv[1] == "agent":
    LOSSES["cispo"]["echo_coef"] = 0.5
KINDS = {mode: dict(loss_agg=mode) for mode in MODES} | LOSSES
if sys.argv[1] != "grpo":  # formulas of all three scripts are the same text, see test_scripts.py
    for name in ("seq-mean-token-sum", "seq-mean-token-sum-norm", "sapo", "dppo"):
        del KINDS[name]
LAYOUTS = "padded", "one_row"
EVERY = [(budget, layout) for budget in (70, 200, 100_000) for layout in LAYOUTS]  # 200: two of three share
WAYS = (70, "padded"), (200, "one_row")
# dapo.py and agent.py cut by the same regions as grpo.py
EVERY_WAY = ("token-mean", "lora") if sys.argv[1] == "grpo" else ()
REPLICATED = "token-mean", "gspo"  # with replicas of the sharded model
# what two ranks of dapo.py run slices of the same rows for
SLICED = "seq-mean-token-mean", "gspo", "lora"


def make_rows(corrected=False):
    """Those of shared.py; of agent.py an environment wrote some tokens, corrected: some are rejected."""
    others = slice(2, 5) if sys.argv[1] == "agent" else slice(0)
    rows = sampled_rows()
    for row in rows:
        row["mask_t"][others] = False
        row["old_logp_t"] = row["rollout_logp_t"] + ahead(row["length"], corrected)
    if sys.argv[1] == "agent":
        grpo.echo_weights(rows, 1)
    return rows


def ahead(n, corrected):
    """How far the old policy's log-probs are above the sampler's; corrected: so that some are rejected."""
    return torch.full((n,), 0.05) if not corrected else 0.3 * torch.arange(n).cos()


def deal(rows, policy, args, updates=1):
    """What `main` does between advantages and the update."""
    budget = args.max_tokens_per_microbatch
    sharing = getattr(args, "sp_size", 1)
    mini_batches, _, _ = grpo.distribute(rows, updates, budget, policy.packed, sharing)
    return mini_batches


def update_actor(policy, optimizer, mini_batches, args):
    args, token_loss = load_loss(args, clip=grpo.policy_loss)
    loss = grpo.batch_loss if hasattr(grpo, "batch_loss") else grpo.actor_loss
    loss = partial(loss, args, token_loss)
    return grpo.update_actor(policy, optimizer, mini_batches, loss, args)


def update(policy, parameters, args, rows=None):
    """-> the gradients of one optimizer step, and its metrics."""
    optimizer = Capture(parameters, lr=1.0)
    mini_batches = deal(rows or make_rows(is_corrected(args)), policy, args)
    metrics = update_actor(policy, optimizer, mini_batches, args)
    return optimizer.grads, {name: float(value) for name, value in metrics.items()}


def is_corrected(args):
    """Whether the flags are one of LOSSES."""
    return any(all(getattr(args, k) == x for k, x in flags.items()) for flags in LOSSES.values())


def correction(args, gap, adv, behind):
    """--rollout_is and --rollout_rs of a response's tokens; behind: mean of log sampler - log policy."""
    factor = 1.0
    if args.rollout_is:
        factor = (gap if args.rollout_is == "token" else gap.sum()).exp().clamp(max=2.0)
    if args.rollout_rs == "off_policy":
        return factor * (adv >= 0 or behind <= args.rollout_rs_threshold[0])
    if args.rollout_rs:
        ratio = dict(token=gap, sequence=gap.sum(), geometric=gap.mean())[args.rollout_rs].exp()
        *low, high = args.rollout_rs_threshold
        factor = factor * ((low or [1 / high])[0] <= ratio) * (ratio <= high)
    return factor


def naive(policy, args):
    """The loss of each row alone, written out with plain logits and no shared code but the loss formulas."""
    corrected = is_corrected(args)
    rows, kind = make_rows(corrected), getattr(args, "policy_loss", "clip")
    adv_n, lengths = [row["adv_t"][0] for row in rows], [int(row["mask_t"].sum()) for row in rows]
    loss = 0.0
    for row, adv, length in zip(rows, adv_n, lengths, strict=True):
        logp = plain_logps(policy.lm, row["prompt_ids"], row["response_ids"], args.temperature)
        entropy = -(logp.exp() * logp).sum(-1)
        logp = logp[range(len(logp)), row["response_ids"]]
        own = torch.as_tensor(row["mask_t"])
        others = sum(row["length"] for row in rows) - sum(lengths)
        loss = loss - getattr(args, "echo_coef", 0) * logp[~own].sum() / max(others, 1)
        logp, entropy, rollout = logp[own], entropy[own], row["rollout_logp_t"][own]
        gap, ref = ahead(len(own), corrected)[own], rollout - 0.1
        old = rollout + gap
        ratio = (logp - old).exp()
        kl = ratio.detach() * (logp - ref) ** 2 / 2  # k3+ has k2's gradient
        if kind == "clip":
            pg = clipped_loss(ratio, adv, 0.8, 1.3)
        elif kind == "gspo":  # as the paper writes it, a loss of the response
            s = (logp - old).mean().exp()
            pg = torch.maximum(-s * adv, -s.clamp(0.95, 1.05) * adv).expand(length)
        elif kind == "cispo":
            pg = -ratio.detach().clamp(max=1.2) * adv * logp
        elif kind == "dppo":
            moved = (logp.exp() - old.exp()).detach()
            kept = moved <= 2e-4 if adv > 0 else moved >= -2e-4
            pg = -ratio.detach().clamp(max=20) * adv * logp * kept
        elif kind == "sapo":
            tau = 1.0 if adv > 0 else 1.05
            pg = -adv * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
            kl = (ref - logp).exp() - (ref - logp) - 1
        pg = pg * correction(args, gap, adv, (rollout - logp.detach()).mean())
        weight = {
            "token-mean": 1 / sum(lengths),
            "seq-mean-token-sum": 1 / len(rows),
            "seq-mean-token-mean": 1 / len(rows) / length,
            "seq-mean-token-sum-norm": 1 / len(rows) / args.max_response_length,
        }[args.loss_agg]
        pg = pg + args.kl_loss_coef * kl if hasattr(args, "use_kl_loss") else pg
        loss = loss + weight * (pg - getattr(args, "entropy_coeff", 0) * entropy).sum()
    loss.backward()
    grads = [p.grad.clone() for p in policy.parameters() if p.requires_grad]
    policy.zero_grad()
    return grads


def load(args, mesh, device, layout="one_row"):
    attention = "sdpa" if layout == "one_row" else "eager"
    return load_model(dataclasses.replace(args, attn_implementation=attention), mesh, device)


def load_model(args, mesh, device):
    """dapo.py has one model, grpo.py may see images."""
    more = dict(grpo=[None, grpo.adapters_of(args)], agent=[grpo.adapters_of(args)], dapo=[])[sys.argv[1]]
    return grpo.load_model(args, mesh, device, *more)


def check_constant(base, policies):
    """Rows without an advantage are left out: the gradient stays, and means are those of the other rows."""
    means = "entropy", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "rollout_rs_masked"
    tokens = []

    def count(_, positional, inputs):
        return tokens.append(inputs["input_ids"].numel())

    for (policy, budget), groups in itertools.product(zip(policies.values(), (70, 100_000)), ([0], [0, 1])):
        args, found, run = dataclasses.replace(base, max_tokens_per_microbatch=budget), [], []
        for constant, kept in ((False, True), (True, True), (False, False)):
            rows = [row for row in make_rows() if kept or row["group"] not in groups]
            for row in rows:
                if row["group"] in groups:
                    row |= dict(adv_t=row["adv_t"] * 0, no_grad=constant)
            handle = policy.register_forward_pre_hook(count, with_kwargs=True)
            found.append(update(policy, trained(policy), args, rows) if rows else None)
            handle.remove()
            run.append(all_reduce([sum(tokens)]))
            tokens.clear()
        (grads, metrics), (left_grads, left_metrics), others = found
        for x, y in zip(grads, left_grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
        for name in ("actor/pg_loss", "actor/grad_norm"):
            assert math.isclose(metrics[name], left_metrics[name], rel_tol=1e-5, abs_tol=1e-7), name
        for name in means if others else ():
            assert math.isclose(others[1][f"actor/{name}"], left_metrics[f"actor/{name}"], rel_tol=1e-5), name
        assert any(x.any() for x in left_grads) == (len(groups) == 1)
        assert run[1] < run[0], (groups, budget, run)


def check_slices(base, mesh, device, results):
    """Two ranks run slices of the same rows: gradients and metrics, of full weights and of LoRA."""
    base = dataclasses.replace(base, sp_size=2)
    for name in SLICED:
        args = dataclasses.replace(base, **KINDS.get(name, dict(lora_rank=4)))
        policy = load_model(args, mesh, device)
        fill_adapters(policy.lm)
        for budget in (70, 100_000):
            args = dataclasses.replace(args, max_tokens_per_microbatch=budget)
            found = update(policy, trained(policy), args)
            results[name, budget, "sliced"], results["metrics", name, budget, "sliced"] = found


def check_ranks():
    """The largest over the ranks is not their sum."""
    ranks = dist.get_world_size()
    assert all_reduce([dist.get_rank() + 1.0], dist.ReduceOp.MAX) == [ranks]
    assert all_reduce([1.0, 2.0]) == [ranks, 2 * ranks]


def main(model, out, hsdp_replicas):
    device, mesh = grpo.setup_distributed(int(hsdp_replicas))
    check_ranks()
    once = hsdp_replicas == "1"  # replicas change what is summed over the ranks, not what is summed
    kinds = KINDS if once else {name: KINDS[name] for name in REPLICATED}
    kl = dict(use_kl_loss=True, kl_loss_coef=0.1) if hasattr(grpo.Args, "use_kl_loss") else {}
    kl |= dict(env="") if sys.argv[1] == "agent" else {}
    kl |= dict(entropy_coeff=0.01) if hasattr(grpo.Args, "entropy_coeff") else {}  # dapo.py has no bonus
    base = grpo.Args(model=model, train_files=(), output_dir="", clip_ratio_high=0.3, **kl)
    base = dataclasses.replace(base, loss_agg="token-mean") if hasattr(base, "policy_loss") else base
    base = dataclasses.replace(base, temperature=0.7, grad_clip=1e9, ppo_mini_batch_size=2, group_size=3)
    base = dataclasses.replace(base, attn_implementation="sdpa", max_prompt_length=60, max_response_length=64)
    results, tokens, reduced = {}, [], []
    backends = [mesh.get_group(i)._get_backend(torch.device("cpu")) for i in range(mesh.ndim)]
    results["time-outs"] = [backend.options._timeout.total_seconds() for backend in backends]
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda x, *rest, **kw: (reduced.append(x.numel() > 1000), all_reduce(x, *rest, **kw))[1]

    def count(_, positional, inputs):
        return tokens.append(inputs["input_ids"].numel())

    policies = {layout: load(base, mesh, device, layout) for layout in LAYOUTS}
    for layout, policy in policies.items():
        policy.register_forward_pre_hook(count, with_kwargs=True)
        assert policy.packed == (layout == "one_row")
        for name, flags in kinds.items():
            for budget, used in EVERY if once and name in EVERY_WAY else WAYS:
                if used == layout:
                    args = dataclasses.replace(base, **flags, max_tokens_per_microbatch=budget)
                    cut = budget, layout
                    found = update(policy, trained(policy), args)
                    results[name, *cut], results["metrics", name, *cut] = found
                    results["tokens", *cut] = sum(tokens)
                    results["reduced", *cut] = sum(reduced)  # gradients, over the replicas
                    tokens.clear(), reduced.clear()
    if once and hasattr(base, "use_kl_loss"):
        check_constant(dataclasses.replace(base, use_kl_loss=False, entropy_coeff=0.0), policies)
    # FSDP's own path of --offload always; a CPU has no other memory, and cannot pin its own
    model_module.CPUOffloadPolicy = partial(model_module.CPUOffloadPolicy, pin_memory=False)
    hosted = load(dataclasses.replace(base, offload="always"), mesh, device)
    args = dataclasses.replace(base, **KINDS["token-mean"], max_tokens_per_microbatch=200)
    results["hosted"], _ = update(hosted, trained(hosted), args)

    # a NaN in one row, on one rank: all ranks skip the first optimizer step of two, and take the second;
    # the rows of each step share their prompt, so that a second rank has none
    rows, args = make_rows(), base
    rows[0]["adv_t"] = rows[0]["adv_t"] * math.nan
    policy = policies["one_row"]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    before = [p.full_tensor().clone() for p in policy.parameters()]
    bad, good = deal(rows, policy, args, updates=2)
    metrics = update_actor(policy, optimizer, [bad], args)
    same = [torch.equal(a, p.full_tensor()) for a, p in zip(before, policy.parameters(), strict=True)]
    assert all(same) and metrics["actor/skipped_updates"] == 1
    metrics = update_actor(policy, optimizer, [good], args)
    same = [torch.equal(a, p.full_tensor()) for a, p in zip(before, policy.parameters(), strict=True)]
    assert not any(same) and metrics["actor/skipped_updates"] == 0

    if dist.get_world_size() == 2 and hasattr(grpo, "Slices"):
        check_slices(base, mesh, device, results)
    lora = dataclasses.replace(base, lora_rank=4)
    for layout in LAYOUTS:
        adapted = load(lora, mesh, device, layout)
        fill_adapters(adapted.lm)
        for budget, used in EVERY if once and "lora" in EVERY_WAY else WAYS:
            if used == layout:
                how = dataclasses.replace(lora, max_tokens_per_microbatch=budget)
                results["lora", budget, layout], _ = update(adapted, trained(adapted), how)

    if dist.get_world_size() == 1:
        plain = grpo.TokenLogps(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        for name, flags in KINDS.items():
            results[name, "naive"] = naive(plain, dataclasses.replace(base, **flags))
        grpo.adapters_of(lora)(plain.lm)
        fill_adapters(plain.lm)
        results["lora", "naive"] = naive(plain, lora)
    save(results, out)


if __name__ == "__main__":
    main(*sys.argv[2:])
