"""Loss, metrics and gradient of a DPO step on fixed pairs, for many ways to cut it: MODEL OUT REPLICAS."""

import sys
from dataclasses import replace
from itertools import product

import pyarrow as pa
import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from shared import Capture, fill_adapters, plain_logps, save, trained

from algos import dpo

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
    """Responses alone, five undesirable, each with the response of another row."""
    rows = [dpo.alone(row, name) for row in make_rows() for name in dpo.RESPONSES][:-1]
    others = dpo.Mismatched(rows, seed=0, max_length=1000)
    assert all(x["prompt_ids"] == y["prompt_ids"] and x != y for x, y in zip(rows, others))
    return [row | dict(other=other, other_reference=[-70.0, 0.0]) for row, other in zip(rows, others)]


def log_prob(lm, row, name):
    """One response alone, with plain logits."""
    response = row[f"{name}_ids"]
    logp = plain_logps(lm, row["prompt_ids"], response)
    kept = [t for t, on in enumerate(row[f"{name}_trained"]) if on]
    return sum(logp[t, response[t]] for t in kept)


def naive(lm, loss, beta=0.1, label_smoothing=0.0, nll_coef=0.0, **weights):
    """The formulas of the papers."""
    total, rows, z = 0.0, kto_rows() if loss == "kto" else make_rows(), 70.0
    for row, name in product(rows, dpo.RESPONSES) if loss == "kto" else ():
        z += float(log_prob(lm, row["other"], name)) / len(rows)
    for row in rows:
        logps = [log_prob(lm, row, name) for name in dpo.RESPONSES]
        ratios = [logp - ref for logp, ref in zip(logps, row["reference"])]
        means = [x / max(n, 1) for x, n in zip(logps if loss == "simpo" else ratios, row["tokens"])]
        total = total - nll_coef * logps[0] / sum(row["tokens"][0] for row in rows)
        if loss == "kto":
            sign, weight = [*zip((1, -1), weights.values())][row["tokens"][0] == 0]
            value = torch.sigmoid(sign * beta * (ratios[row["tokens"][0] == 0] - z))
            total = total + weight * (1 - value) / len(rows)
        elif loss == "ipo":
            total = total + (means[0] - means[1] - 1 / (2 * beta)) ** 2 / len(rows)
        else:
            h = beta * (ratios[0] - ratios[1]) if loss == "sigmoid" else beta * (means[0] - means[1]) - 0.5
            value = (1 - label_smoothing) * logsigmoid(h) + label_smoothing * logsigmoid(-h)
            total = total - value / len(rows)
    total.backward()
    grads = [p.grad.clone() for p in trained(lm)]
    lm.zero_grad()
    return total.item(), grads


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
        policy = dpo.load_model(args, mesh, device)
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        assert policy.packed
        fill_adapters(policy.lm)
        dpo.adapters_of(args)(plain)
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
    save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
