"""Loss and gradient of one step of the reward model on fixed pairs, cut in many ways: MODEL OUT REPLICAS."""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from shared import Capture, fill_adapters, save, trained

from algos import rm

LENGTHS = [(5, 40), (30, 31), (3, 2), (60, 3), (8, 25), (2, 1), (12, 12)]  # of both conversations
CENTER = 0.05


def make_pairs():
    """Every third has a margin."""
    generator, pairs = torch.Generator().manual_seed(0), []
    for i, sizes in enumerate(LENGTHS):
        ids = [torch.randint(6, 100, (n,), generator=generator).tolist() for n in sizes]
        pairs.append(dict(chosen_ids=ids[0], rejected_ids=ids[1], margin=0.5 * (i % 3 == 0)))
    return pairs


def naive(lm):
    """Each conversation alone, by the classifier's own forward."""
    loss, score = 0.0, lambda ids: lm(input_ids=torch.tensor([ids])).logits[0, 0]
    for pair in make_pairs():
        chosen, rejected = score(pair["chosen_ids"]), score(pair["rejected_ids"])
        loss = loss - (1 / (1 + (-(chosen - rejected - pair["margin"])).exp())).log() / len(LENGTHS)
        loss = loss + CENTER * (chosen + rejected) ** 2 / len(LENGTHS)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in trained(lm)]


def main(model, out, replicas):
    """MODEL is a classifier, whose head is not 0."""
    device, mesh = rm.setup_distributed(int(replicas))
    base = dict(model=model, train_files=(), output_dir="", attn_implementation="sdpa", grad_clip=1e9)
    base |= dict(center_rewards_coef=CENTER, hsdp_replicas=int(replicas))
    results = {}
    for lora_rank in (0, 4):
        args = rm.Args(**base, lora_rank=lora_rank)
        policy = rm.load_model(args, mesh, device, 0)
        assert policy.packed
        fill_adapters(policy.lm)
        for packed in (True, False):
            policy.packed = packed
            policy.lm.set_attn_implementation("packed" if packed else "sdpa")
            for budget in (130, 100_000):
                args = replace(args, max_tokens_per_microbatch=budget)
                optimizer = Capture(trained(policy), lr=1.0)
                found = rm.update(policy, optimizer, make_pairs(), args)
                found |= rm.evaluate(policy, make_pairs(), args)
                results[lora_rank, packed, budget] = found, optimizer.grads
        found = rm.update(policy, optimizer, make_pairs(), replace(args, grad_clip=1e-3))
        results[lora_rank, "clipped"] = found["train/grad_norm"], optimizer.grads
        if dist.get_world_size() == 1:
            lm = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
            rm.add_adapters(lm, lora_rank, args.lora_alpha, args.seed)
            lm.score.requires_grad_(True)
            fill_adapters(lm)
            results[lora_rank, "naive"] = naive(lm)
    save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
