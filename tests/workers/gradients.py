"""Gradients of an actor update on fixed rows, for many ways to cut the same work: ALGO MODEL OUT REPLICAS.

Of agent.py's rows, some tokens are the environment's.
"""

import dataclasses
import importlib
import itertools
import json
import math
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import grpo as grpo_script

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
LOSSES["sapo"]["kl_kind"] = "k3+"
if sys.argv[1] == "dapo":  # the paper's loss alone, with the corrections of the others
    LOSSES = {name: {k: x for k, x in flags.items() if "rollout" in k} for name, flags in LOSSES.items()}
if sys.argv[1] == "agent":
    LOSSES["cispo"]["echo_coef"] = 0.5
KINDS = {mode: dict(loss_agg=mode) for mode in MODES} | LOSSES
LAYOUTS = "padded", "one_row"
EVERY = [(budget, layout) for budget in (70, 200, 100_000) for layout in LAYOUTS]  # 200: two of three share
WAYS = (70, "padded"), (200, "one_row")
# dapo.py and agent.py cut by the same regions as grpo.py
EVERY_WAY = ("token-mean", "lora") if sys.argv[1] == "grpo" else ()
REPLICATED = "token-mean", "gspo"  # with replicas of the sharded model
# what two ranks of dapo.py run slices of the same rows for
SLICED = "seq-mean-token-mean", "gspo", "lora"
# tokens of the prompts and of three responses to each: very unequal
LENGTHS = {5: (40, 1, 2), 60: (3, 25, 7)}


def make_rows(corrected=False):
    """The rows of a step, on every rank all of them, with their advantages and other log-probs."""
    others = slice(2, 5) if sys.argv[1] == "agent" else slice(0)  # what an environment wrote
    generator, rows = torch.Generator().manual_seed(0), []
    for group, (prompt, responses) in enumerate(LENGTHS.items()):
        prompt_ids = torch.randint(6, 100, (prompt,), generator=generator).tolist()
        for n in responses:
            ids = torch.randint(6, 100, (n,), generator=generator).tolist()
            logp_t = -4.6 + 0.3 * torch.randn(n, generator=generator)
            row = dict(prompt_ids=prompt_ids, response_ids=ids, rollout_logp_t=logp_t, group=group)
            row |= dict(
                mask_t=np.ones(n, bool), ref_logp_t=logp_t - 0.1, old_logp_t=logp_t + ahead(n, corrected)
            )
            row["mask_t"][others] = False
            row |= dict(prompt_length=prompt, length=n, rank=len(rows) % dist.get_world_size())
            rows.append(row | dict(finish_reason="stop"))
    if sys.argv[1] == "agent":
        grpo.echo_weights(rows, len(rows))
    for row, adv in zip(rows, torch.randn(len(rows), generator=generator)):
        row["adv_t"] = adv.expand(row["length"])
    return rows


def ahead(n, corrected):
    """How far the old policy's log-probs are above the sampler's; corrected: so that some are rejected."""
    return torch.full((n,), 0.05) if not corrected else 0.3 * torch.arange(n).cos()


def deal(rows, policy, args):
    """What `main` does between advantages and the update."""
    mini_batches, _, _ = grpo.deal(rows, policy.packed, args)
    return mini_batches


def update(policy, parameters, args, rows=None):
    """-> the gradients of one optimizer step, and its metrics."""
    optimizer = Capture(parameters, lr=1.0)
    mini_batches = deal(rows or make_rows(is_corrected(args)), policy, args)
    metrics = grpo.update_actor(policy, optimizer, mini_batches, args)
    return optimizer.grads, {name: float(value) for name, value in metrics.items()}


class Capture(torch.optim.SGD):
    """Keeps the gradient of the step."""

    def step(self):
        self.grads = [
            p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for g in self.param_groups
            for p in g["params"]
        ]
        self.grads = [g.clone() for g in self.grads]


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
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        logits = policy.lm(input_ids=ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / args.temperature
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        logp = logp[range(len(logp)), row["response_ids"]]
        own = torch.as_tensor(row["mask_t"])
        loss = loss - getattr(args, "echo_coef", 0) * logp[~own].sum() / sum(
            r["length"] - n for r, n in zip(rows, lengths)
        )
        logp, entropy, rollout = logp[own], entropy[own], row["rollout_logp_t"][own]
        gap, ref = ahead(len(own), corrected)[own], rollout - 0.1
        old = rollout + gap
        ratio = (logp - old).exp()
        kl = (ref - logp).exp() - (ref - logp) - 1
        if kind == "clip":
            pg = torch.maximum(-ratio * adv, -ratio.clamp(0.8, 1.3) * adv)
            if adv < 0:
                pg = pg.clamp(max=-3.0 * adv)
        elif kind == "gspo":  # as the paper writes it, a loss of the response
            s = (logp - old).mean().exp()
            pg = torch.maximum(-s * adv, -s.clamp(0.95, 1.05) * adv).expand(length)
        elif kind == "cispo":
            pg = -ratio.detach().clamp(max=1.2) * adv * logp
        elif kind == "dppo":
            moved = (logp.exp() - old.exp()).detach()
            kept = moved <= 2e-4 if adv > 0 else moved >= -2e-4
            pg = -ratio.detach().clamp(max=20) * adv * logp * kept
        else:
            tau = 1.0 if adv > 0 else 1.05
            pg = -adv * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
            kl = (logp - ref) ** 2 / 2  # k3+ has k2's gradient
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


def trained(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def set_adapters(lm):
    """Second matrices that are not 0, as they are at first: the first ones would get no gradient."""
    generator = torch.Generator().manual_seed(1)
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            values = torch.empty(p.shape).normal_(0, 0.02, generator=generator)
            p.data.copy_(
                distribute_tensor(values, p.device_mesh, p.placements) if isinstance(p, DTensor) else values
            )


def load(args, mesh, device, layout="one_row"):
    attention = "sdpa" if layout == "one_row" else "eager"
    args = dataclasses.replace(args, attn_implementation=attention)
    return grpo.load_model(args, mesh, device, grpo.add_adapters, grpo.TokenLogps)


def check_lora(args, mesh, device, results):
    """Gradients of adapters, their checkpoint, and the model of the start, which is there without them."""

    def logps(policy):
        """Of this rank's rows."""
        rows = make_rows()
        grpo.store_logps(policy, deal(rows, policy, args), "logp_t", args)
        return torch.cat([row["logp_t"] for row in rows if "logp_t" in row])

    for layout in LAYOUTS:
        base = load(dataclasses.replace(args, lora_rank=0), mesh, device, layout)
        start, policy = logps(base), load(args, mesh, device, layout)
        same = lambda policy: torch.equal(logps(policy), start)  # noqa: B023
        assert same(policy)  # as long as they are not trained
        set_adapters(policy.lm)
        assert not same(policy)
        with without_adapters(policy.lm):
            assert same(policy)
        assert not same(policy) and trained(policy)
        for budget, used in EVERY if "lora" in EVERY_WAY else WAYS:
            if used == layout:
                how = dataclasses.replace(args, max_tokens_per_microbatch=budget)
                results["lora", budget, layout], _ = update(policy, trained(policy), how)
    tokenizer = grpo.load_processor(args.model)

    def train(policy, optimizer, step):
        grpo.update_actor(policy, optimizer, deal(make_rows(), policy, args), args)
        if step == 1:
            trained_models = dict(hf=policy.lm)
            grpo.save_checkpoint(True, args, step, trained_models, optimizer, tokenizer, grpo.whole_weights)
        return [p.full_tensor().clone() for p in trained(policy)]

    optimizer = torch.optim.AdamW(trained(policy), lr=1e-2)
    first, second = (train(policy, optimizer, step) for step in (1, 2))
    policy = load(dataclasses.replace(args, seed=2), mesh, device)
    optimizer = torch.optim.AdamW(trained(policy), lr=1e-2)
    path = Path(args.output_dir) / "checkpoints/latest"
    assert grpo.load_checkpoint(path, dict(hf=policy.lm), optimizer)["step"] == 1
    third = train(policy, optimizer, 2)
    assert not any(map(torch.equal, first, second)) and all(map(torch.equal, second, third))
    # hf/ has the adapters in its weights: those of the first step
    merged = AutoModelForCausalLM.from_pretrained(path / "hf").state_dict()
    base = AutoModelForCausalLM.from_pretrained(args.model).state_dict()
    assert {name for name, x in merged.items() if not torch.equal(x, base[name])} == {
        name for name in base if name.endswith("proj.weight")
    }


def check_constant(base, policies):
    """Rows without an advantage are left out: the gradient stays, and means are those of the other rows."""
    means = "entropy", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "rollout_rs_masked"
    tokens = []
    count = lambda _, positional, inputs: tokens.append(inputs["input_ids"].numel())
    for (policy, budget), groups in itertools.product(zip(policies.values(), (70, 100_000)), ([0], [0, 1])):
        args, found, run = dataclasses.replace(base, max_tokens_per_microbatch=budget), [], []
        for constant, kept in ((False, True), (True, True), (False, False)):
            rows = [row for row in make_rows() if kept or row["group"] not in groups]
            for row in rows:
                if row["group"] in groups:
                    row |= dict(adv_t=row["adv_t"] * 0, constant=constant)
            handle = policy.register_forward_pre_hook(count, with_kwargs=True)
            found.append(update(policy, trained(policy), args, rows) if rows else None)
            handle.remove()
            run.append(grpo.all_reduce([sum(tokens)]))
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


@contextmanager
def without_adapters(lm):
    """grpo.py's and agent.py's; dapo.py has no reference."""
    with getattr(grpo, "without_adapters", grpo_script.without_adapters)(lm):
        yield


def check_slices(base, mesh, device, results):
    """Two ranks run slices of the same rows: gradients and metrics, of full weights and of LoRA."""
    base = dataclasses.replace(base, sp_size=2)
    sp_group = grpo.sequence_group(2, device)
    wrap = partial(grpo.Slices, group=sp_group, attention=grpo.ulysses)
    for name in SLICED:
        args = dataclasses.replace(base, **KINDS.get(name, dict(lora_rank=4)))
        policy = grpo.load_model(args, mesh, device, grpo.add_adapters, wrap)
        set_adapters(policy.lm)
        for budget in (70, 100_000):
            args = dataclasses.replace(args, max_tokens_per_microbatch=budget)
            found = update(policy, trained(policy), args)
            results[name, budget, "sliced"], results["metrics", name, budget, "sliced"] = found


def main(model, out, hsdp_replicas):
    device, mesh = grpo.setup_distributed(int(hsdp_replicas))
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
    count = lambda _, positional, inputs: tokens.append(inputs["input_ids"].numel())
    policies = {layout: load(base, mesh, device, layout) for layout in LAYOUTS}
    for layout, policy in policies.items():
        policy.register_forward_pre_hook(count, with_kwargs=True)
        assert policy.packed == (layout == "one_row")
        for name, flags in kinds.items():
            for budget, used in EVERY if once and name in EVERY_WAY else WAYS:
                if used == layout:
                    args = dataclasses.replace(base, **flags, max_tokens_per_microbatch=budget)
                    cut = budget, layout
                    results[name, *cut], results["metrics", name, *cut] = update(
                        policy, trained(policy), args
                    )
                    results["tokens", *cut] = sum(tokens)
                    results["reduced", *cut] = sum(reduced)  # gradients, over the replicas
                    tokens.clear(), reduced.clear()
    if once and hasattr(base, "use_kl_loss"):
        check_constant(dataclasses.replace(base, use_kl_loss=False, entropy_coeff=0.0), policies)
    # FSDP's own path of --offload always; a CPU has no other memory, and cannot pin its own
    grpo.CPUOffloadPolicy = partial(grpo.CPUOffloadPolicy, pin_memory=False)
    hosted = load(dataclasses.replace(base, offload="always"), mesh, device)
    args = dataclasses.replace(base, **KINDS["token-mean"], max_tokens_per_microbatch=200)
    results["hosted"], _ = update(hosted, trained(hosted), args)
    # a small limit: the optimizer sees a gradient of that norm, the metric is the norm without it
    grads, metrics = update(policy, trained(policy), dataclasses.replace(base, grad_clip=1e-3))
    results["clipped"] = torch.stack([g.norm() for g in grads]).norm(), metrics["actor/grad_norm"]
    # a NaN in one row, on one rank: all ranks skip the first optimizer step of two, and take the second;
    # the rows of each step share their prompt, so that a second rank has none
    rows, args = make_rows(), dataclasses.replace(base, ppo_mini_batch_size=1)
    rows[0]["adv_t"] = rows[0]["adv_t"] * math.nan
    policy = policies["one_row"]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    before = [p.full_tensor().clone() for p in policy.parameters()]
    bad, good = deal(rows, policy, args)
    metrics = grpo.update_actor(policy, optimizer, [bad], args)
    same = [torch.equal(a, p.full_tensor()) for a, p in zip(before, policy.parameters(), strict=True)]
    assert all(same) and metrics["actor/skipped_updates"] == 1
    metrics = grpo.update_actor(policy, optimizer, [good], args)
    same = [torch.equal(a, p.full_tensor()) for a, p in zip(before, policy.parameters(), strict=True)]
    assert not any(same) and metrics["actor/skipped_updates"] == 0

    # DAPO: a truncated response that is filtered out is as one without advantage, but counts for nothing
    if hasattr(base, "overlong_filtering"):
        found = []
        for filtering in (True, False):
            args, rows = base, make_rows()
            rows[0]["adv_t"] = rows[0]["adv_t"] * filtering
            rows[0]["mask_t"][:] = not filtering  # as `main` does with what was cut off
            found.append(update(policy, trained(policy), args, rows)[0])
        lengths = [row["length"] for row in rows]
        share = sum(lengths[1:]) / sum(lengths)
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x * share, y, rtol=1e-4, atol=1e-6)

    if dist.get_world_size() == 2 and hasattr(grpo, "Slices"):
        check_slices(base, mesh, device, results)
    lora = dataclasses.replace(base, lora_rank=4, output_dir=f"{out}.lora")
    check_lora(lora, mesh, device, results)

    # weights in half precision are read as they are, and trained in float32
    auto, half = AutoModelForCausalLM, f"{out}.half"
    if dist.get_rank() == 0:
        auto.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(half)
    dist.barrier()
    expected = auto.from_pretrained(half, dtype=torch.float32).state_dict()
    args = dataclasses.replace(base, model=half, output_dir=f"{out}.run")
    policy = load(args, mesh, device)
    for name, x in policy.lm.state_dict().items():
        assert x.dtype == torch.float32 and torch.equal(x.full_tensor(), expected[name]), name
    # hf/ is as the model came: in half precision, and what is tied is there once
    assert policy.lm.config.tie_word_embeddings
    tokenizer, optimizer = grpo.load_processor(model), torch.optim.AdamW(policy.parameters())
    grpo.save_checkpoint(True, args, 1, dict(hf=policy.lm), optimizer, tokenizer, grpo.whole_weights)
    hf = Path(args.output_dir) / "checkpoints/latest/hf"
    saved = load_file(hf / "model.safetensors")
    assert saved.keys() == expected.keys() - {"lm_head.weight"}
    assert (hf / "model.safetensors").stat().st_mode == (hf / "config.json").stat().st_mode
    loaded = auto.from_pretrained(hf, dtype="auto").state_dict()
    assert all(torch.equal(x.float(), expected[name]) for name, x in loaded.items())
    assert all(x.dtype == torch.bfloat16 and torch.equal(x.float(), expected[k]) for k, x in saved.items())
    assert json.loads((hf / "config.json").read_text())["dtype"] == "bfloat16"

    if dist.get_world_size() == 1:
        plain = grpo.TokenLogps(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        for name, flags in KINDS.items():
            results[name, "naive"] = naive(plain, dataclasses.replace(base, **flags))
        grpo.add_adapters(plain.lm, lora)
        set_adapters(plain.lm)
        results["lora", "naive"] = naive(plain, lora)
    if dist.get_rank() == 0:
        torch.save(results, out)
    grpo.leave()


if __name__ == "__main__":
    main(*sys.argv[2:])
