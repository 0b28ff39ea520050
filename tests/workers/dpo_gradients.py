"""Loss, metrics and gradient of a DPO step on fixed pairs, for many ways to cut it: MODEL OUT REPLICAS."""

import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from shared import Capture, fill_adapters, trained

from algos import dpo
from common.run import leave

# tokens of prompt, chosen and rejected response: very unequal, and two neighbours with one prompt
LENGTHS = [(5, 40, 10), (30, 1, 20), (3, 2, 2), (60, 3, 8), (8, 25, 30), (8, 7, 25)]
SMOOTH = dict(loss="sigmoid", label_smoothing=0.1, nll_coef=0.2)
KTO = dict(loss="kto", desirable_weight=1.5, undesirable_weight=0.7, nll_coef=0.2)
LOSSES = dict(sigmoid=SMOOTH, ipo=dict(loss="ipo"), simpo=dict(loss="simpo", beta=2.0), kto=KTO)
KERNELS = dict(padded="sdpa", one_row="packed")


def make_rows():
    """The middle third of a long response is a tool's: not trained."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, (prompt, *responses) in enumerate(LENGTHS):
        row = dict(prompt_ids=torch.randint(6, 100, (prompt,), generator=generator).tolist(), tokens=[])
        row["prompt_ids"] = rows[-1]["prompt_ids"] if number == 5 else row["prompt_ids"]
        for name, n in zip(("chosen", "rejected"), responses):
            row[f"{name}_ids"] = torch.randint(6, 100, (n,), generator=generator).tolist()
            row[f"{name}_trained"] = [n < 10 or not n <= 3 * i < 2 * n for i in range(n)]
            row["tokens"].append(sum(row[f"{name}_trained"]))
        noise = torch.randn(2, generator=generator).tolist()
        row["reference"] = [-4.6 * n + 3 * x for n, x in zip(row["tokens"], noise)]
        rows.append(row)
    return rows


def kto_rows():
    """Responses alone, five undesirable, each with a response to another row; z is about 4."""
    rows = [dpo.alone(row, name) for row in make_rows() for name in dpo.RESPONSES][:-1]
    for row in rows:
        row["reference"] = [x * (n > 0) for x, n in zip(row["reference"], row["tokens"])]
    others = dpo.Mismatched(rows, np.random.default_rng(0).permutation(len(rows)))
    lower = [[x - 4 * (x < 0) for x in other["reference"]] for other in others]
    return [row | dict(other=x, other_reference=y) for row, x, y in zip(rows, others, lower)]


def log_prob(lm, row, name):
    """One response alone, with plain logits."""
    ids, response = row["prompt_ids"] + row[f"{name}_ids"], row[f"{name}_ids"]
    logits = lm(input_ids=torch.tensor([ids])).logits[0, len(row["prompt_ids"]) - 1 : -1]
    kept = [t for t, on in enumerate(row[f"{name}_trained"]) if on]
    return sum(logits.log_softmax(-1)[t, response[t]] for t in kept)


def naive(lm, loss, beta=0.1, label_smoothing=0.0, nll_coef=0.0, **weights):
    """The formulas of the papers."""
    rows, values = kto_rows() if loss == "kto" else make_rows(), []
    for row in rows:
        logps = [log_prob(lm, row, name) for name in dpo.RESPONSES]
        ratios = [x - ref for x, ref in zip(logps, row["reference"])]
        means = [x / max(n, 1) for x, n in zip(logps if loss == "simpo" else ratios, row["tokens"])]
        h = beta * (ratios[0] - ratios[1]) if loss == "sigmoid" else beta * (means[0] - means[1]) - 0.5
        e, nll = label_smoothing, -nll_coef * logps[0] / sum(row["tokens"][0] for row in rows)
        if loss == "kto":
            other = sum(log_prob(lm, row["other"], name) for name in dpo.RESPONSES).item()
            values.append((sum(ratios), nll, row["tokens"][0] > 0, other - sum(row["other_reference"])))
        elif loss == "ipo":
            values.append((means[0] - means[1] - 1 / (2 * beta)) ** 2 / len(rows))
        else:
            values.append(nll - ((1 - e) * logsigmoid(h) + e * logsigmoid(-h)) / len(rows))
    if loss == "kto":
        z, good, bad = np.mean([other for *_, other in values]), *weights.values()
        losses = [(good, r - z) if desirable else (bad, z - r) for r, _, desirable, _ in values]
        losses = [w * (1 - torch.sigmoid(beta * x)) / len(rows) for w, x in losses]
        values = [*losses, *(nll for _, nll, *_ in values)]
    sum(values).backward()
    grads = [p.grad.clone() for p in trained(lm)]
    lm.zero_grad()
    return sum(values).item(), grads


class Rows(list):
    """Rows, with the column that `evaluate` reads from disk."""

    def column(self, name):
        return pa.array([row[name] for row in self], dpo.IDS)


def main(model, out, replicas):
    device, mesh = dpo.setup_distributed(int(replicas))
    base = dict(model=model, train_files=(), output_dir="", attn_implementation="sdpa", grad_clip=1e9)
    results = {}
    for lora_rank in (0, 4):
        args = dpo.Args(**base, lora_rank=lora_rank, train_batch_size=4)
        policy = dpo.load_policy(args, mesh, device)
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        assert policy.packed
        fill_adapters(policy.lm)
        dpo.add_adapters(plain, args)
        fill_adapters(plain)
        for name in LOSSES if not lora_rank else ("sigmoid",):
            rows = Rows(kto_rows() if name == "kto" else make_rows())
            for layout, budget in product(KERNELS, (140, 100_000)):
                policy.packed = layout == "one_row"
                policy.lm.set_attn_implementation(KERNELS[layout])
                args_now = replace(args, **LOSSES[name], max_tokens_per_microbatch=budget)
                optimizer = Capture(trained(policy), lr=1.0)
                found = dpo.update(policy, optimizer, rows, args_now)
                val = dpo.evaluate(policy, rows, {}, args_now)
                results[lora_rank, name, layout, budget] = found, val, optimizer.grads
            if dist.get_world_size() == 1:
                results[lora_rank, name, "naive"] = naive(plain, **LOSSES[name])
    if dist.get_rank() == 0:
        torch.save(results, out)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
