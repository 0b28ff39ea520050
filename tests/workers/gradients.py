"""Gradients of an actor update on fixed rows, for many ways to cut the same work: ALGO MODEL OUT REPLICAS.

Of agent.py's rows, some tokens are the environment's.
"""

import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
grpo = importlib.import_module(f"algos.{sys.argv[1]}")  # or dapo, agent

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# other losses, with other corrections of the sampler and another KL
LOSSES = {
    "gspo": dict(
        policy_loss="gspo", clip_ratio_low=0.05, clip_ratio_high=0.05, loss_agg="seq-mean-token-mean"
    ),
    "cispo": dict(policy_loss="cispo", clip_ratio_low=1.0, clip_ratio_high=0.2, loss_agg="token-mean"),
    "sapo": dict(policy_loss="sapo", loss_agg="seq-mean-token-sum"),
}
LOSSES["gspo"] |= dict(rollout_is="sequence", rollout_rs="geometric", rollout_rs_threshold=1.3)
LOSSES["cispo"] |= dict(rollout_is=None, rollout_rs="token", rollout_rs_threshold=1.25)
LOSSES["sapo"] |= dict(rollout_rs="sequence", rollout_rs_threshold=1.3, rollout_rs_threshold_lower=0.95)
if sys.argv[1] != "dapo":
    LOSSES["sapo"]["kl_kind"] = "k3+"
KINDS = {mode: dict(loss_agg=mode) for mode in MODES} | LOSSES
KERNELS = dict(shared="shared", packed="flash_attention_2", padded="sdpa")  # by which a layout is chosen
EVERY = [(budget, layout) for budget in (70, 200, 100_000) for layout in KERNELS]  # 200: two of three share
WAYS = (70, "padded"), (200, "shared"), (100_000, "packed")  # of LOSSES, not all
MODE_WAYS = EVERY if sys.argv[1] == "grpo" else WAYS  # dapo.py and agent.py cut by the same regions
SLICED = "seq-mean-token-mean", "gspo", "lora"  # what two ranks run slices of the same rows for
SLICES = dict(grpo="gather", dapo="ulysses", agent="ulysses")  # attention over them, with two ranks
# tokens of the prompts and of three responses to each: very unequal
LENGTHS = {5: (40, 1, 2), 60: (3, 25, 7)}


def make_rows():
    """On every rank all rows in whole; each is held, and sent, by one of them."""
    others = slice(2, 5) if sys.argv[1] == "agent" else slice(0)  # what an environment wrote
    generator, rows = torch.Generator().manual_seed(0), []
    for group, (prompt, responses) in enumerate(LENGTHS.items()):
        prompt_ids = torch.randint(6, 100, (prompt,), generator=generator).tolist()
        for n in responses:
            ids = torch.randint(6, 100, (n,), generator=generator).tolist()
            logps = (-4.6 + 0.3 * torch.randn(n, generator=generator)).tolist()
            logps[others] = [float("nan")] * len(logps[others])
            row = dict(prompt_ids=prompt_ids, response_ids=ids, rollout_logps=logps, group=group)
            row["sampled_length"] = n - len(logps[others])
            row |= dict(prompt_length=prompt, length=n, rank=len(rows) % dist.get_world_size())
            rows.append(row | dict(finish_reason="stop", carried_over=False))
    return rows, torch.randn(len(rows), generator=generator, dtype=torch.float64)


def ahead(n, loss):
    """By how much the old policy's log-probs are above the sampler's."""
    return torch.full((n,), 0.05) if loss == "clip" else 0.3 * torch.arange(n).cos()


def make_batch(args, device):
    batch, _ = grpo.make_batch(*make_rows(), args, device)
    theirs = batch["rollout_logp_nt"]
    batch["old_logp_nt"] = [x + ahead(len(x), args.policy_loss) for x in theirs]
    batch["ref_logp_nt"] = [x - 0.1 for x in theirs]
    return batch


def cuts(args, *policies, ways=EVERY):
    """(budget, layout) and arguments that cut the work so; the policies get the attention for it."""
    assert grpo.share_prefixes(args).attn_implementation == "shared"
    for budget, layout in ways:
        for policy in policies:  # packed rows too are computed by SDPA here
            policy.lm.set_attn_implementation("shared" if layout == "shared" else "sdpa")
        how = dict(max_tokens_per_microbatch=budget, attn_implementation=KERNELS[layout])
        yield (budget, layout), dataclasses.replace(args, **how)


class Capture(torch.optim.SGD):
    """Keeps the gradient of the step."""

    def step(self):
        self.grads = [
            p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for g in self.param_groups
            for p in g["params"]
        ]
        self.grads = [g.clone() for g in self.grads]


def naive(policy, args):
    """The loss of each row alone, written out with plain logits and no shared code but the loss formulas."""
    rows, adv_n = make_rows()
    lengths = [row["sampled_length"] for row in rows]
    loss = 0.0
    for row, adv, length in zip(rows, adv_n.tolist(), lengths, strict=True):
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        logits = policy.lm(input_ids=ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / args.temperature
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        logp = logp[range(len(logp)), row["response_ids"]]
        own = ~torch.tensor(row["rollout_logps"]).isnan()
        logp, entropy, rollout = logp[own], entropy[own], torch.tensor(row["rollout_logps"])[own]
        gap, ref = ahead(len(own), args.policy_loss)[own], rollout - 0.1
        old = rollout + gap
        ratio = (logp - old).exp()
        kl = (ref - logp).exp() - (ref - logp) - 1
        if args.policy_loss == "clip":
            pg = torch.maximum(-ratio * adv, -ratio.clamp(0.8, 1.3) * adv)
            if adv < 0:
                pg = pg.clamp(max=-3.0 * adv)
            pg = pg * gap.exp().clamp(max=2.0)
        elif args.policy_loss == "gspo":  # as the paper writes it, a loss of the response
            s = (logp - old).mean().exp()
            pg = torch.maximum(-s * adv, -s.clamp(0.95, 1.05) * adv) * gap.sum().exp().clamp(max=2.0)
            pg = (pg * (1 / 1.3 <= gap.mean().exp() <= 1.3)).expand(length)
        elif args.policy_loss == "cispo":
            pg = -ratio.detach().clamp(max=1.2) * adv * logp * (gap.abs() <= math.log(1.25))
        else:
            tau = 1.0 if adv > 0 else 1.05
            pg = -adv * torch.sigmoid(tau * (ratio - 1)) * 4 / tau * gap.exp().clamp(max=2.0)
            pg, kl = pg * (0.95 <= gap.sum().exp() <= 1.3), (logp - ref) ** 2 / 2  # k3+ has k2's gradient
        weight = {
            "token-mean": 1 / sum(lengths),
            "seq-mean-token-sum": 1 / len(rows),
            "seq-mean-token-mean": 1 / len(rows) / length,
            "seq-mean-token-sum-norm": 1 / len(rows) / args.max_response_length,
        }[args.loss_agg]
        pg = pg + args.kl_loss_coef * kl if hasattr(args, "use_kl_loss") else pg
        loss = loss + weight * (pg - args.entropy_coeff * entropy).sum()
    loss.backward()
    grads = [p.grad.clone() for p in policy.parameters() if p.requires_grad]
    policy.zero_grad()
    return grads


def adapters(lm, args):
    """LoRA whose second matrices are not 0, as they are at first: the first ones would get no gradient."""
    made, generator = grpo.Adapters(lm, args), torch.Generator().manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02, generator=generator)
    return made


def check_lora(args, mesh, device, results):
    """Gradients of adapters, their checkpoint, and the model of the start, which is there without them."""
    base = grpo.load_model(args, mesh, device)
    batch = make_batch(args, device)
    start = grpo.all_logps(base, batch, args)

    def same(policy):
        logps = grpo.all_logps(policy, batch, args)
        return all(torch.equal(logps[i], start[i]) for i in start)

    grpo.Adapters(base.lm, args)
    assert same(base)  # as long as they are not trained
    policy = grpo.load_model(args, mesh, device)
    actor = adapters(policy.lm, args)
    assert not same(policy)
    with grpo.without_adapters(policy.lm):
        assert same(policy)
    assert not same(policy)
    for cut, how in cuts(args, policy, ways=MODE_WAYS):
        optimizer = Capture(actor.parameters(), lr=1.0)
        grpo.update_actor(policy, optimizer, make_batch(how, device), how)
        results["lora", *cut] = optimizer.grads

    def train(policy, actor, optimizer, step):
        grpo.update_actor(policy, optimizer, batch, args)
        if step == 1:
            tokenizer = grpo.load_processor(args.model)
            grpo.save_checkpoint(args, step, actor, optimizer, tokenizer)
        return [p.detach().clone() for p in actor.parameters()]

    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2)
    first, second = (train(policy, actor, optimizer, step) for step in (1, 2))
    policy = grpo.load_model(args, mesh, device)
    actor = grpo.Adapters(policy.lm, dataclasses.replace(args, seed=2))
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2)
    path = Path(args.output_dir) / "checkpoints/latest"
    assert grpo.load_checkpoint([path], actor, optimizer)["step"] == 1
    third = train(policy, actor, optimizer, 2)
    assert not any(map(torch.equal, first, second)) and all(map(torch.equal, second, third))


def check_slices(base, mesh, device, results):
    """Two ranks run slices of the same rows: gradients and metrics, of full weights and of LoRA."""
    base = dataclasses.replace(base, sp_size=2)
    for name in SLICED:
        args = dataclasses.replace(base, **KINDS.get(name, dict(lora_rank=4)))
        args = grpo.share_rows(args, device, getattr(grpo, SLICES[sys.argv[1]]))
        policy = grpo.load_model(args, mesh, device, wrap=grpo.Sliced)
        actor = adapters(policy.lm, args) if args.lora_rank else policy
        for budget in (70, 100_000):
            args = dataclasses.replace(args, max_tokens_per_microbatch=budget)
            batch, optimizer = make_batch(args, device), Capture(actor.parameters(), lr=1.0)
            metrics, _ = grpo.update_actor(policy, optimizer, batch, args)
            results[name, budget, "sliced"] = optimizer.grads
            results["metrics", name, budget, "sliced"] = floats(metrics)


def floats(metrics):
    return {name: float(value) for name, value in metrics.items()}


def main(model, out, hsdp_replicas):
    device, mesh = grpo.setup_distributed(int(hsdp_replicas))
    kl = dict(use_kl_loss=True, kl_loss_coef=0.1) if hasattr(grpo.Args, "use_kl_loss") else {}
    kl |= dict(env="") if sys.argv[1] == "agent" else {}
    base = grpo.Args(
        model=model, train_files=(), output_dir="", entropy_coeff=0.01, clip_ratio_high=0.3, **kl
    )
    base = grpo.with_defaults(base, clip_ratio_low=0.2, loss_agg="token-mean")
    base = dataclasses.replace(base, temperature=0.7, grad_clip=1e9, ppo_mini_batch_size=2, group_size=3)
    base = dataclasses.replace(base, attn_implementation="sdpa", max_prompt_length=60, max_response_length=64)
    policy, results, tokens, reduced = grpo.load_model(base, mesh, device), {}, [], []
    backends = [mesh.get_group(i)._get_backend(torch.device("cpu")) for i in range(mesh.ndim)]
    results["time-outs"] = [backend.options._timeout.total_seconds() for backend in backends]
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda x, *rest, **kw: (reduced.append(x.numel() > 1000), all_reduce(x, *rest, **kw))[1]
    count = lambda _, positional, inputs: tokens.append(inputs["input_ids"].numel())
    policy.register_forward_pre_hook(count, with_kwargs=True)
    for name, flags in KINDS.items():
        ways = WAYS if name in LOSSES else MODE_WAYS
        for cut, args in cuts(dataclasses.replace(base, **flags), policy, ways=ways):
            batch, optimizer = make_batch(args, device), Capture(policy.parameters(), lr=1.0)
            metrics, _ = grpo.update_actor(policy, optimizer, batch, args)
            results[name, *cut], results["metrics", name, *cut] = optimizer.grads, floats(metrics)
            results["tokens", *cut] = sum(tokens)
            results["reduced", *cut] = sum(reduced)  # gradients, over the replicas
            tokens.clear(), reduced.clear()
    # a small limit: the optimizer sees a gradient of that norm, the metric is the norm without it
    args = dataclasses.replace(base, grad_clip=1e-3)
    metrics, _ = grpo.update_actor(policy, optimizer, batch, args)
    norm = torch.stack([g.norm() for g in optimizer.grads]).norm()
    results["clipped"] = norm, float(metrics["actor/grad_norm"])
    # a NaN in one row, on one rank: all ranks skip the first optimizer step of two, and take the second;
    # the rows of each step share their prompt, so that a second rank has none
    rows, adv_n = make_rows()
    adv_n[0] = float("nan")
    args = dataclasses.replace(base, ppo_mini_batch_size=1, attn_implementation="shared")
    policy.lm.set_attn_implementation("shared")
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    before = [p.full_tensor().clone() for p in policy.parameters()]
    batch, _ = grpo.make_batch(rows, adv_n, args, device)
    steps = [name for name in ("mini_batches", "totals", "counted") if name in batch]
    bad, good = (batch | {name: batch[name][i : i + 1] for name in steps} for i in range(2))
    metrics, _ = grpo.update_actor(policy, optimizer, bad, args)
    same = [torch.equal(a, p.full_tensor()) for a, p in zip(before, policy.parameters(), strict=True)]
    assert all(same) and metrics["actor/skipped_updates"] == 1
    metrics, _ = grpo.update_actor(policy, optimizer, good, args)
    same = [torch.equal(a, p.full_tensor()) for a, p in zip(before, policy.parameters(), strict=True)]
    assert not any(same) and metrics["actor/skipped_updates"] == 0
    policy.lm.set_attn_implementation("sdpa")

    # DAPO: a truncated response that is filtered out is as one without advantage, but counts for nothing
    if hasattr(base, "overlong_filtering"):
        found = []
        for filtering in (True, False):
            args = dataclasses.replace(base, entropy_coeff=0.0, overlong_filtering=filtering)
            rows, adv_n = make_rows()
            rows[0]["finish_reason"], adv_n[0] = "length", adv_n[0] if filtering else 0.0
            optimizer = Capture(policy.parameters(), lr=1.0)
            grpo.update_actor(policy, optimizer, grpo.make_batch(rows, adv_n, args, device)[0], args)
            found.append(optimizer.grads)
        lengths = [row["length"] for row in rows]
        share = sum(lengths[1:]) / sum(lengths)
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x * share, y, rtol=1e-4, atol=1e-6)

    if dist.get_world_size() == 2:
        check_slices(base, mesh, device, results)
    lora = dataclasses.replace(base, lora_rank=4, output_dir=f"{out}.lora")
    (Path(lora.output_dir) / "checkpoints").mkdir(parents=True, exist_ok=True)
    check_lora(lora, mesh, device, results)

    # weights in half precision are read as they are, and trained in --param_dtype
    auto, half = grpo.AutoModelForCausalLM, f"{out}.half"
    if dist.get_rank() == 0:
        auto.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(half)
    dist.barrier()
    expected = auto.from_pretrained(half, dtype=torch.float32).state_dict()
    args = dataclasses.replace(base, model=half, output_dir=f"{out}.run")
    policy = grpo.load_model(args, mesh, device)
    for name, x in policy.lm.state_dict().items():
        assert x.dtype == torch.float32 and torch.equal(x.full_tensor(), expected[name]), name
    # hf/ is as the model came: in half precision, and what is tied is there once
    assert policy.lm.config.tie_word_embeddings
    (Path(args.output_dir) / "checkpoints").mkdir(parents=True, exist_ok=True)
    tokenizer, optimizer = grpo.load_processor(model), torch.optim.AdamW(policy.parameters())
    grpo.save_checkpoint(args, 1, policy.lm, optimizer, tokenizer)
    hf = Path(args.output_dir) / "checkpoints/latest/hf"
    shares = [load_file(path) for path in sorted(hf.glob("*.safetensors"))]  # one of each rank
    saved = {name: x for share in shares for name, x in share.items()}
    assert saved.keys() == expected.keys() - {"lm_head.weight"}
    sizes = [sum(x.numel() for x in share.values()) for share in shares]
    assert len(sizes) == dist.get_world_size() and max(sizes) < 0.6 * sum(sizes) or len(sizes) == 1
    loaded = auto.from_pretrained(hf, dtype="auto").state_dict()
    assert all(torch.equal(x.float(), expected[name]) for name, x in loaded.items())
    assert all(x.dtype == torch.bfloat16 and torch.equal(x.float(), expected[k]) for k, x in saved.items())
    assert json.loads((hf / "config.json").read_text())["dtype"] == "bfloat16"

    if dist.get_world_size() == 1:
        plain = grpo.TokenLogps(grpo.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        for name, flags in KINDS.items():
            results[name, "naive"] = naive(plain, dataclasses.replace(base, **flags))
        adapters(plain.lm, lora)
        results["lora", "naive"] = naive(plain, lora)
    if dist.get_rank() == 0:
        torch.save(results, out)
    grpo.leave()


if __name__ == "__main__":
    main(*sys.argv[2:])
