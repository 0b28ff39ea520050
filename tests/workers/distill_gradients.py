"""Gradients of a distillation step on fixed rows, for many ways to cut it: distill MODEL OUT REPLICAS."""

import dataclasses
import sys
from functools import partial

import torch
import torch.distributed as dist
from gradients import Capture, adapters, cuts, make_rows
from transformers import AutoConfig, AutoModelForCausalLM

from algos import distill


def naive(student, teacher, args):
    """The loss of each row alone, written out with plain logits."""
    rows, _ = make_rows()
    tokens, loss = sum(row["length"] for row in rows), 0.0
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        logits = [m(input_ids=ids).logits[0, row["prompt_length"] - 1 : -1] for m in (student, teacher)]
        logp, logq = ((x / args.temperature).log_softmax(-1) for x in logits)
        if args.kl == "full":
            loss = loss + (logp.exp() * (logp - logq)).sum()
            continue
        logp, logq = (x[range(row["length"]), row["response_ids"]] for x in (logp, logq))
        rollout, adv = torch.tensor(row["rollout_logps"]), (logq - logp).detach()
        ratio = (logp - rollout - 0.05).exp()
        pg = torch.maximum(-ratio * adv, -ratio.clamp(0.8, 1.3) * adv)
        pg = torch.where(adv < 0, torch.minimum(pg, -3.0 * adv), pg)
        loss = loss + pg.sum() * torch.tensor(0.05).exp()
    (loss / tokens).backward()
    return [p.grad.clone() for p in student.parameters() if p.requires_grad]


def main(_, model, out, hsdp_replicas):
    device, mesh = distill.setup_distributed(int(hsdp_replicas))
    wide, results = f"{out}.teacher", {}
    if dist.get_rank() == 0:  # a teacher of another width
        config = AutoConfig.from_pretrained(model)
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 96, 3, 3
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(wide)
    dist.barrier()
    base = distill.Args(model=model, teacher=wide, train_files=(), output_dir="", clip_ratio_high=0.3)
    base = dataclasses.replace(base, temperature=0.7, grad_clip=1e9, ppo_mini_batch_size=2, group_size=3)
    base = dataclasses.replace(base, attn_implementation="sdpa", max_prompt_length=60, max_response_length=64)

    def load(args):
        frozen = dataclasses.replace(args, model=args.teacher, param_dtype=args.compute_dtype)
        full = args.kl == "full"
        teacher = distill.load_model(frozen, mesh, device, wrap=distill.Teacher if full else distill.Sliced)
        teacher.eval().requires_grad_(False)
        wrap = partial(distill.Student, teacher=teacher) if full else distill.Sliced
        return distill.load_model(args, mesh, device, wrap=wrap), teacher

    def gradient(policy, teacher, args, actor=None):
        batch, _ = distill.balance_batch(make_rows()[0], args, device)
        if args.kl == "sampled":
            batch["old_logp_nt"] = [x + 0.05 for x in batch["rollout_logp_nt"]]
            batch["teacher_logp_nt"] = distill.all_logps(teacher, batch, args)
        optimizer = Capture((actor or policy).parameters(), lr=1.0)
        metrics, _ = distill.update_actor(policy, optimizer, batch, args)
        return optimizer.grads, metrics["actor/teacher_kl"]

    lora = dict(kl="full", lora_rank=4)
    for mode, changes in dict(full=dict(kl="full"), sampled=dict(kl="sampled"), lora=lora).items():
        args = dataclasses.replace(base, **changes)
        policy, teacher = load(args)
        actor = adapters(policy.lm, args) if args.lora_rank else None
        for cut, how in cuts(args, policy, teacher):
            results[mode, *cut] = gradient(policy, teacher, how, actor)
        if dist.get_world_size() == 2:
            args = distill.share_rows(dataclasses.replace(args, sp_size=2), device)
            policy, teacher = load(args)
            actor = adapters(policy.lm, args) if args.lora_rank else None
            results[mode, "sliced"] = gradient(policy, teacher, args, actor)
            distill.share_rows(base, device)
        if dist.get_world_size() == 1:
            plain = [AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32) for x in (model, wide)]
            adapters(plain[0], args) if args.lora_rank else None
            results[mode, "naive"] = naive(*plain, args)

    # taught by itself there is nothing to learn, to the bit
    for dtype in ("float32", "bfloat16"):
        args = dataclasses.replace(base, teacher=model, kl="full", compute_dtype=dtype)
        grads, kl = gradient(*load(args), args)
        assert all((x == 0).all() for x in grads) and kl == 0, dtype
    if dist.get_rank() == 0:
        torch.save(results, out)
    distill.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
