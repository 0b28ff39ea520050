"""Loss and gradient of one SFT step on fixed rows, for many ways to cut it: MODEL OUT SP_SIZE KIND...

KIND: of attention over the slices of a row, with --sp_size above 1.
"""

import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import sft

LENGTHS = [(5, 40), (30, 1), (3, 2), (60, 3), (8, 25), (2, 7)]  # prompt and response tokens: very unequal
MODELS = dict(full={}, lora=dict(lora_rank=4), adalora=dict(lora_rank=4, lora_kind="adalora"))


def make_rows():
    """The middle third of a long response is a tool's: not trained."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for prompt, response in LENGTHS:
        ids = torch.randint(6, 100, (prompt + response,), generator=generator).tolist()
        trained = [response < 10 or not response <= 3 * i < 2 * response for i in range(response)]
        rows.append(dict(prompt_ids=ids[:prompt], response_ids=ids[prompt:], trained=trained))
    return rows


class Capture(torch.optim.SGD):
    """Keeps the gradient of the step."""

    def step(self):
        grads = [p.grad for g in self.param_groups for p in g["params"]]
        self.grads = [(g.full_tensor() if isinstance(g, DTensor) else g).clone() for g in grads]


def naive(lm, trained):
    """Each row alone, with plain logits."""
    loss, tokens = 0.0, sum(sum(row["trained"]) for row in make_rows())
    for row in make_rows():
        logits = lm(input_ids=torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits[0]
        logp = logits[len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
        for t, (token, counts) in enumerate(zip(row["response_ids"], row["trained"], strict=True)):
            loss = loss - counts * logp[t, token] / tokens
    penalty = 0.1 * trained.orthogonality() if isinstance(trained, sft.AdaptiveAdapters) else 0
    (loss + penalty).backward()
    return loss.item(), [p.grad.clone() for p in trained.parameters()]


def adapters(lm, args):
    """LoRA whose second matrices are not 0, as they are at first: the first ones would get no gradient."""
    adaptive = args.lora_kind == "adalora"
    made = sft.AdaptiveAdapters(lm, args, total_steps=10) if adaptive else sft.Adapters(lm, args)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in made.named_parameters():
        if adaptive or "lora_B" in name:
            parameter.data.normal_(0, 0.2 if adaptive else 0.02, generator=generator)
    return made


@contextmanager
def one_at_a_time():
    """AssertionError if a collective of attention begins before the one before it has been waited for."""
    ops, calls, noted = dist._functional_collectives, [], {}

    def note(name, function, *args):
        calls.append(name)
        return function(*args)

    for name in ("all_to_all_single", "all_gather_single", "wait_tensor"):
        noted[name] = partial(note, name, getattr(ops, name))
    with patch.multiple(ops, **noted):
        yield
    begun = [i for i, name in enumerate(calls) if name != "wait_tensor"]
    assert begun and {calls[i + 1] for i in begun} == {"wait_tensor"}, calls


def check_attention(heads):
    """Each slice's outputs and gradients are those of plain attention with a mask, for each cut of a row.

    heads: of keys and values.
    """
    group, size, sft.RING_ROWS = sft.Sliced.group, sft.Sliced.group.size(), 5
    generator = torch.Generator().manual_seed(0)  # the same row on all ranks
    attend = AttentionInterface()["sliced"]
    # one sequence; borders within slices, between them, many; a single token a rank
    for width, *inner in ((8,), (8, 3), (8, 8), (8, 2, 3, 6, 7, 9, 15), (1,), (4, 1, 2, 3)):
        borders = [0, *inner, width * size]
        sizes = (6, 4), (heads, 4), (heads, 3)
        row = [torch.randn(1, n, width * size, d, generator=generator) for n, d in sizes]
        d_out = torch.randn(1, width * size, 6, 3, generator=generator)
        here = slice(group.rank() * width, (group.rank() + 1) * width)
        own = [x[:, :, here].clone().requires_grad_() for x in row]
        out, _ = attend(SimpleNamespace(), *own, None, scaling=0.7, borders=borders)
        out.backward(d_out[:, here])
        row = [x.requires_grad_() for x in row]
        query, key, value = (x.repeat_interleave(6 // x.shape[1], 1) for x in row)
        sequence = torch.repeat_interleave(torch.tensor(borders).diff())
        scores = (query @ key.mT * 0.7).masked_fill(~(sequence[:, None] == sequence).tril(), float("-inf"))
        expected = (scores.softmax(-1) @ value).transpose(1, 2)
        expected.backward(d_out)
        torch.testing.assert_close(out, expected[:, here], rtol=1e-5, atol=1e-5)
        for x, y in zip(own, row, strict=True):
            torch.testing.assert_close(x.grad, y.grad[:, :, here], rtol=1e-5, atol=1e-5)


def main(model, out, sp_size, *kinds):
    device, mesh = sft.setup_distributed(1)
    base = dict(model=model, train_files=(), output_dir="", attn_implementation="sdpa", grad_clip=1e9)
    results = {}
    for name, slices in product(MODELS, kinds or ("ulysses",)):
        if name == "adalora" and slices not in (*kinds, "ulysses")[:1]:
            continue
        args = sft.Args(**base, **MODELS[name], sp_size=int(sp_size), sp_attention=slices, packing=True)
        policy, trained = sft.load_policy(sft.replace(args, lora_rank=0), mesh, device)
        if args.sp_size > 1 and name == "full":
            with nullcontext() if slices == "ring" else one_at_a_time():
                check_attention(heads=2)
                check_attention(heads=1)  # nothing is copied on the way, so that nothing else waits
        trained = adapters(policy.lm, args) if args.lora_rank else trained
        adaptive = trained if name == "adalora" else None
        for packing in (True, False) if args.sp_size == 1 else (True,):
            for budget in (70, 100_000):
                args = sft.replace(args, packing=packing, max_tokens_per_microbatch=budget)
                optimizer = Capture(trained.parameters(), lr=1.0)
                found = sft.update(policy, optimizer, make_rows(), args, adaptive)
                loss = sft.evaluate(policy, make_rows(), args)
                results[name, slices, packing, budget] = [found["train/loss"], loss], optimizer.grads
        found = sft.update(policy, optimizer, make_rows(), sft.replace(args, grad_clip=1e-3), adaptive, 3)
        results[name, slices, "clipped"] = found["train/grad_norm"], optimizer.grads
        if adaptive:
            kept = [None] * dist.get_world_size()
            dist.all_gather_object(kept, trained.lora_kept.tolist())
            results["kept"] = kept, found["train/lora_ranks"]
        if dist.get_world_size() == 1:
            lm = sft.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            results[name, "naive"] = naive(lm, adapters(lm, args) if args.lora_rank else lm)
    if dist.get_rank() == 0:
        torch.save(results, out)
    sft.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
