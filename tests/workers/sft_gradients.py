"""Loss and gradient of one SFT step on fixed rows, for many ways to cut it: MODEL OUT SP_SIZE KIND...

KIND: of attention over the slices of a row, with --sp_size above 1.
"""

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from shared import Capture, fill_adapters, plain_logps, save, trained
from transformers import AttentionInterface, AutoModelForCausalLM

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import sft
from system import sequence
from system.batches import one_row
from tests.conftest import golden

# prompt and response tokens: very unequal; the two rows with prompts of 30 share theirs, as do those of 2
LENGTHS = [(5, 40), (30, 1), (3, 2), (60, 3), (8, 25), (2, 7), (30, 2), (2, 6)]
MODELS = dict(full={}, lora=dict(lora_rank=4), adalora=dict(lora_rank=4, lora_kind="adalora"))


def make_rows():
    """The middle third of a long response is a tool's: not trained."""
    generator = torch.Generator().manual_seed(0)
    rows, prompts = [], {}
    for prompt, response in LENGTHS:
        ids = torch.randint(6, 100, (prompt + response,), generator=generator).tolist()
        prompt_ids = prompts.setdefault(prompt, ids[:prompt])
        trained = [response < 10 or not response <= 3 * i < 2 * response for i in range(response)]
        rows.append(dict(prompt_ids=prompt_ids, response_ids=ids[prompt:], trained=trained))
    return rows


def naive(lm, dft=False):
    """Each row alone, with plain logits; AdaLoRA's penalty written out."""
    loss, tokens = 0.0, sum(sum(row["trained"]) for row in make_rows())
    for row in make_rows():
        logp = plain_logps(lm, row["prompt_ids"], row["response_ids"])
        for t, (token, counts) in enumerate(zip(row["response_ids"], row["trained"], strict=True)):
            weight = counts * logp[t, token].exp().item() if dft else counts
            loss = loss - weight * logp[t, token] / tokens
    gaps = []
    for layer in [layer for layer in lm.modules() if hasattr(layer, "lora_E")]:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        gaps += [((x - torch.eye(6)) ** 2).sum().sqrt() for x in (a @ a.T, b.T @ b)]
    (loss + (0.1 * sum(gaps) / len(gaps) if gaps else 0)).backward()
    return loss.item(), [p.grad.clone() for p in trained(lm)]


@contextmanager
def one_at_a_time():
    """AssertionError if a collective of attention begins before the one before it has been waited for."""
    ops, calls, noted = dist._functional_collectives, [], {}

    def note(name, function, *args):
        calls.append(name)
        return function(*args)

    for name in ("all_to_all_single", "wait_tensor"):
        noted[name] = partial(note, name, getattr(ops, name))
    with patch.multiple(ops, **noted):
        yield
    begun = [i for i, name in enumerate(calls) if name != "wait_tensor"]
    assert begun and {calls[i + 1] for i in begun} == {"wait_tensor"}, calls


# prompt and response tokens of texts in a row; those of one number in the third place share a prompt
TEXTS = [case["texts"] for case in golden("rows_of_texts")]


def make_layout(texts):
    responses = [[9] * n for _, n, _ in texts]
    inputs, _ = one_row([[100 + number] * n for n, _, number in texts], responses)
    return inputs


def dense_mask(inputs):
    """[query, key] bool, True where the layout lets a query see a key."""
    tokens = inputs["input_ids"].shape[1]
    mask, query, kv_index = torch.zeros(tokens, tokens, dtype=torch.bool), 0, inputs["kv_index"]
    for queries, keys in inputs["shapes"]:
        for t in range(queries):
            mask[query + t, kv_index[: keys - queries + t + 1]] = True
        query, kv_index = query + queries, kv_index[keys:]
    return mask


def check_attention(group, heads, attend=None):
    """Each slice's outputs and gradients are those of plain attention with a mask, for many rows.

    heads: of keys and values. attend: None: the model's attention over slices.
    """
    size, rank, sequence.RING_ROWS = group.size(), group.rank(), 5
    generator = torch.Generator().manual_seed(0)  # the same row on all ranks
    attend = attend or AttentionInterface()["slices"]
    for texts in TEXTS:
        inputs = make_layout(texts)
        tokens, mask = inputs["input_ids"].shape[1], dense_mask(inputs)
        width = -(-tokens // size)
        own = slice(rank * width, min((rank + 1) * width, tokens))  # without padding
        sizes = (6, 4), (heads, 4), (heads, 3)
        row = [torch.randn(1, n, width * size, d, generator=generator) for n, d in sizes]
        d_out = torch.randn(1, width * size, 6, 3, generator=generator)
        d_out[:, tokens:] = 0
        slices = [x[:, :, rank * width :][:, :, :width].clone().requires_grad_() for x in row]
        layout = {name: inputs[name] for name in ("kv_index", "shapes", "longest", "cu_seqlens")}
        out, _ = attend(SimpleNamespace(), *slices, None, scaling=0.7, **layout)
        out.backward(d_out[:, rank * width :][:, :width])
        row = [x[:, :, :tokens].clone().requires_grad_() for x in row]
        query, key, value = (x.repeat_interleave(6 // x.shape[1], 1) for x in row)
        scores = (query @ key.mT * 0.7).masked_fill(~mask, float("-inf"))
        expected = (scores.softmax(-1) @ value).transpose(1, 2)
        expected.backward(d_out[:, :tokens])
        count = own.stop - own.start
        torch.testing.assert_close(out[:, :count], expected[:, own], rtol=1e-5, atol=1e-5)
        for x, y in zip(slices, row, strict=True):
            torch.testing.assert_close(x.grad[:, :, :count], y.grad[:, :, own], rtol=1e-5, atol=2e-5)


def check_hops(group):
    """Keys and values travel as far as any rank has to see, and no further: TEXTS of one and three."""
    passed, pass_on = [], sequence.Ring.pass_on
    query = torch.randn(1, 1, 12, 4)
    with patch.object(sequence.Ring, "pass_on", lambda *x: passed.append(x[2:]) or pass_on(*x)):
        for text, hops in ([(1, 12 * group.size() - 1, 0)], group.size() - 1), ([(1, 11, 0)] * 0, 0):
            texts = text or [(1, 11, n) for n in range(group.size())]
            layout = make_layout(texts)
            sequence.ring(None, query, query, query, None, group, 1.0, layout["kv_index"], layout["shapes"])
            assert len(passed) == hops, (texts, passed)
            passed.clear()


def main(model, out, sp_size, *kinds):
    device, mesh = sft.setup_distributed(1)
    base = dict(model=model, train_files=(), output_dir="", attn_implementation="sdpa", grad_clip=1e9)
    results = {}
    for name, slices in product(MODELS, kinds or ("ulysses",)):
        if name == "adalora" and slices not in (*kinds, "ulysses")[:1]:
            continue
        args = sft.Args(**base, **MODELS[name], sp_size=int(sp_size), sp_attention=slices)
        policy = sft.load_model(args, mesh, device, None)
        assert policy.packed
        if args.sp_size > 1 and name == "full":
            with nullcontext() if slices == "ring" else one_at_a_time():
                check_attention(policy.group, heads=2)
                check_attention(policy.group, heads=1)  # nothing is copied on the way, so nothing else waits
            if slices == "ring":
                check_hops(policy.group)
                # of three ranks the second needs both key/value heads, the others one of them
                check_attention(policy.group, heads=2, attend=partial(sequence.ulysses, group=policy.group))
        fill_adapters(policy.lm)
        for packing in (True, False) if args.sp_size == 1 else (True,):
            policy.packed = packing
            if args.sp_size == 1:
                policy.lm.set_attn_implementation("packed" if packing else "sdpa")
            for budget in (70, 100_000):
                args = replace(args, max_tokens_per_microbatch=budget)
                optimizer = Capture(trained(policy), lr=1.0)
                found = sft.update(policy, optimizer, make_rows(), args)
                loss = sft.evaluate(policy, make_rows(), args)["val/loss"]
                results[name, slices, packing, budget] = [found["train/loss"], loss], optimizer.grads
                if name == "full":
                    sft.update(policy, optimizer, make_rows(), replace(args, dft=True))
                    results["dft", slices, packing, budget] = optimizer.grads
        args = replace(args, grad_clip=1e-3)
        found = sft.update(policy, optimizer, make_rows(), args, step=3, total_steps=10)
        results[name, slices, "clipped"] = found["train/grad_norm"], optimizer.grads
        if name == "adalora":
            kept = [None] * dist.get_world_size()
            layers = [layer for layer in policy.lm.modules() if hasattr(layer, "lora_E")]
            dist.all_gather_object(kept, [layer.lora_kept.tolist() for layer in layers])
            zeros = [[x != 0 for x in layer.lora_E.full_tensor().tolist()] for layer in layers]
            assert zeros == kept[0]  # in the model too, not only in the buffer
            results["kept"] = kept, found["train/lora_ranks"]
        if dist.get_world_size() == 1:
            lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            sft.adapters_of(args)(lm)
            fill_adapters(lm)
            results[name, "naive"] = naive(lm)
            if name == "full":
                lm.zero_grad()
                results["dft", "naive"] = naive(lm, dft=True)[1]
    save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
