"""Loss and gradient of one step of the reward model on fixed pairs, cut in many ways: MODEL OUT REPLICAS."""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
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


class Capture(torch.optim.SGD):
    """Keeps the gradient of the step."""

    def step(self):
        grads = [p.grad for g in self.param_groups for p in g["params"]]
        self.grads = [(g.full_tensor() if isinstance(g, DTensor) else g).clone() for g in grads]


def naive(lm, trained):
    """Each conversation alone, by the classifier's own forward."""
    loss, score = 0.0, lambda ids: lm(input_ids=torch.tensor([ids])).logits[0, 0]
    for pair in make_pairs():
        chosen, rejected = score(pair["chosen_ids"]), score(pair["rejected_ids"])
        loss = loss - (1 / (1 + (-(chosen - rejected - pair["margin"])).exp())).log() / len(LENGTHS)
        loss = loss + CENTER * (chosen + rejected) ** 2 / len(LENGTHS)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in trained.parameters()]


def adapters(lm, args):
    """LoRA whose second matrices are not 0, as they are at first: the first ones would get no gradient."""
    made, generator = rm.HeadAdapters(lm, args), torch.Generator().manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02, generator=generator)
    return made


def main(model, out, replicas):
    """MODEL is a classifier, whose head is not 0."""
    device, mesh = rm.setup_distributed(int(replicas))
    base = dict(model=model, train_files=(), output_dir="", attn_implementation="sdpa", grad_clip=1e9)
    base |= dict(center_rewards_coef=CENTER, hsdp_replicas=int(replicas))
    results = {}
    for lora_rank in (0, 4):
        args = rm.Args(**base, lora_rank=lora_rank)
        policy, trained = rm.load_scorer(replace(args, lora_rank=0), mesh, device, 0)
        trained = adapters(policy.lm, args) if lora_rank else trained
        for packing in (True, False):
            for budget in (130, 100_000):
                args = replace(args, packing=packing, max_tokens_per_microbatch=budget)
                optimizer = Capture(trained.parameters(), lr=1.0)
                found = rm.update_scorer(policy, optimizer, make_pairs(), args)
                found |= rm.validate(policy, make_pairs(), args)
                results[lora_rank, packing, budget] = found, optimizer.grads
        found = rm.update_scorer(policy, optimizer, make_pairs(), replace(args, grad_clip=1e-3))
        results[lora_rank, "clipped"] = found["train/grad_norm"], optimizer.grads
        if dist.get_world_size() == 1:
            lm = rm.AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
            results[lora_rank, "naive"] = naive(lm, adapters(lm, args) if lora_rank else lm)
    if dist.get_rank() == 0:
        torch.save(results, out)
    rm.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
