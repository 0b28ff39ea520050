"""Gradients of a distillation step on fixed rows, for many ways to split it: MODEL OUT REPLICAS."""

import dataclasses
import sys

import torch
import torch.distributed as dist
from shared import Capture, clipped_loss, fill_adapters, make_rows, plain_logps, save, trained
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2MoeConfig

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import distill

distill.KL_CHUNK = 16  # fewer than the positions of most micro-batches
LAYOUTS = dict(padded="eager", one_row="sdpa")
WAYS = dict(padded=(70, 100_000), one_row=(200,))  # budgets; for the two kinds of KL without more all three


def rows_of(args):
    """Of two sources; with --teacher_prompt the teacher reads more, and not the same in a group."""
    rows = make_rows()
    for i, row in enumerate(rows):
        row["data_source"] = "odd" if row["group"] % 2 else "even"
        ids = (
            row["prompt_ids"] if args.teacher_prompt == ("{prompt}",) else [7 + i % 2, *row["prompt_ids"], 9]
        )
        row |= dict(teacher=dict(prompt_ids=ids, prompt_length=len(ids))) if args.teacher_prompt else {}
    return rows


def divergence(logp, logq, beta):
    """Beta of 1 KL(p || q), 0 KL(q || p), between them of both to their mixture."""
    if beta == 0:
        return (logq.exp() * (logq - logp)).sum()
    logm = logq if beta == 1 else ((1 - beta) * logp.exp() + beta * logq.exp()).log()
    to_mixture = (logq.exp() * (logq - logm)).sum(), (logp.exp() * (logp - logm)).sum()
    return to_mixture[1] if beta == 1 else beta * to_mixture[0] + (1 - beta) * to_mixture[1]


def naive(student, teachers, args):
    """The loss of each row alone, written out with plain logits."""
    rows = rows_of(args)
    tokens, loss = sum(row["length"] for row in rows), 0.0
    for row in rows:
        teacher = teachers[args.teacher_sources.index(row["data_source"]) if len(teachers) > 1 else 0]
        shown = row.get("teacher", row)
        logp = plain_logps(student, row["prompt_ids"], row["response_ids"], args.temperature)
        logq = plain_logps(teacher, shown["prompt_ids"], row["response_ids"], args.temperature)
        if args.kl == "full":
            loss = loss + divergence(logp, logq, args.gkd_beta)
            continue
        logp, logq = (x[range(row["length"]), row["response_ids"]] for x in (logp, logq))
        adv = (logq - logp).detach()
        ratio = (logp - row["rollout_logp_t"] - 0.05).exp()
        pg = clipped_loss(ratio, adv, 0.8, 1.3)
        loss = loss + pg.sum() * torch.tensor(0.05).exp()
    (loss / tokens).backward()
    return [p.grad.clone() for p in trained(student)]


def gradient(policy, teachers, args):
    mini_batches, _, _ = distill.distribute(rows_of(args), 1, args.max_tokens_per_microbatch, policy.packed)
    optimizer = Capture(trained(policy), lr=1.0)
    if args.kl == "sampled":
        distill.ask_teachers(args, teachers, mini_batches)
    metrics = distill.update_actor(policy, teachers[0], optimizer, mini_batches, args)
    return optimizer.grads, float(metrics["actor/teacher_kl"])


def write_teachers(model, wide, window):
    """One of another width, and one with windows in its mask alone, whose rows are padded."""
    own = AutoConfig.from_pretrained(model)
    own.hidden_size, own.num_attention_heads, own.num_key_value_heads = 96, 3, 3
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1)
    sizes |= dict(num_hidden_layers=2, vocab_size=own.vocab_size, num_experts=2, num_experts_per_tok=2)
    sizes |= dict(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    for path, config in ((wide, own), (window, Qwen2MoeConfig(**sizes))):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)


def main(model, out, hsdp_replicas):
    device, mesh = distill.setup_distributed(int(hsdp_replicas))
    wide, window, results = f"{out}.wide", f"{out}.window", {}
    if dist.get_rank() == 0:
        write_teachers(model, wide, window)
    dist.barrier()
    base = distill.Args(model=model, teacher=(wide,), train_files=(), output_dir="", clip_ratio_high=0.3)
    base = dataclasses.replace(base, temperature=0.7, grad_clip=1e9, ppo_mini_batch_size=2, group_size=3)
    base = dataclasses.replace(base, attn_implementation="sdpa", max_prompt_length=60, max_response_length=64)
    modes = dict(
        full=dict(), sampled=dict(kl="sampled"), lora=dict(lora_rank=4), window=dict(teacher=(window,))
    )
    modes |= dict(shown=dict(teacher_prompt=("x",)), forward=dict(gkd_beta=0.0), js=dict(gkd_beta=0.3))
    modes["shown sampled"] = modes["shown"] | modes["sampled"]
    modes["sources"] = dict(kl="sampled", teacher=(wide, model), teacher_sources=("odd", "even"))
    if hsdp_replicas != "1":  # replicas change what is summed over the ranks, not what is summed
        modes = {mode: modes[mode] for mode in ("full", "lora")}
    for mode, changes in modes.items():
        for layout, attention in LAYOUTS.items():
            args = dataclasses.replace(base, **changes, attn_implementation=attention)
            policy, teachers = distill.load_models(args, mesh, device)
            assert policy.packed == teachers[0].packed == (layout == "one_row" and mode != "window")
            fill_adapters(policy.lm)
            for budget in (70, 200, 100_000) if mode in ("full", "sampled") else WAYS[layout]:
                args = dataclasses.replace(args, max_tokens_per_microbatch=budget)
                results[mode, budget, layout] = gradient(policy, teachers, args)
        if dist.get_world_size() == 1:
            plain = [
                AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32) for x in (model, *args.teacher)
            ]
            distill.adapters_of(args)(plain[0])
            fill_adapters(plain[0])
            results[mode, "naive"] = naive(plain[0], plain[1:], args)

    # taught by itself there is nothing to learn, to the bit
    for dtype, shown in (("float32", ()), ("float32", ("{prompt}",)), ("bfloat16", ("{prompt}",))):
        args = dataclasses.replace(base, teacher=(model,), compute_dtype=dtype, teacher_prompt=shown)
        grads, kl = gradient(*distill.load_models(args, mesh, device), args)
        assert all((x == 0).all() for x in grads) and kl == 0, dtype

    # a teacher of files in half precision: frozen it stays so, and what follows takes small steps
    if dist.get_rank() == 0:
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(f"{out}.half")
    dist.barrier()
    args = dataclasses.replace(base, model=f"{out}.half", teacher=(f"{out}.half",), compute_dtype="bfloat16")
    _, [teacher] = distill.load_models(args, mesh, device)
    assert {(p.dtype, p.requires_grad) for p in teacher.parameters()} == {(torch.bfloat16, False)}
    args = dataclasses.replace(args, teacher_update_rate=1e-3)
    policy, [teacher] = distill.load_models(args, mesh, device)
    assert {(p.dtype, p.requires_grad) for p in teacher.parameters()} == {(torch.float32, True)}
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1e-2)
    before = [q.full_tensor().clone() for q in teacher.parameters()]
    distill.follow(teacher, policy, args.teacher_update_rate)
    for q, old in zip(teacher.parameters(), before, strict=True):
        torch.testing.assert_close((q.full_tensor() - old).mean(), torch.tensor(1e-5), rtol=0.05, atol=0)
    save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
