"""How far sampler and trainer differ in a mixture of experts, by rounding and with a weight that is wrong.

    python benchmarks/experiments/mixtures.py

Tiny random models, of which the sampler gets all weights, or all except a few whose rows are rolled by one.
Prints the figures of docs/results/mixtures.md.
"""

import json
import math
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from system.arguments import parse


@dataclass(kw_only=True)
class Args:
    output: Path = ROOT / "benchmarks/results/mixtures.json"  # JSON file of the figures
    layers: tuple[int, ...] = (2, 4, 8, 16)  # depths of the models


if __name__ == "__main__":
    flags = parse(Args)

from algos import grpo
from benchmarks.lib.workload import save
from benchmarks.models import fork
from tests import families

MODELS = {  # family -> its sizes, attention
    "llama": ({}, "sdpa"),
    "qwen3_moe": (dict(num_experts=64, num_experts_per_tok=8), "sdpa"),
    "gpt_oss": (dict(num_local_experts=32, num_experts_per_tok=4), "eager"),
}
FAULTS = {  # what is wrong in the sampler -> names of weights, of one layer in the middle
    "nothing": None,
    "one expert": r"layers\.{}\.mlp\.experts\.0\.",
    "keys": r"layers\.{}\.self_attn\.k_proj",
    "router": r"layers\.{}\.mlp\.(gate|router)\.weight",
    "experts": r"layers\.{}\.mlp\.experts",
    "output layer": r"lm_head",
}


def spoiled(whole_weights, pattern):
    """whole_weights with the rows of some weights rolled by one."""

    def weights(lm, dtype, skipped=()):
        for name, x in whole_weights(lm, dtype, skipped):
            yield name, x.roll(1, 0) if pattern and re.search(pattern, name) else x

    return weights


def measure(family, layers, dtype, work, faults):
    """Write {fault: mean difference of log-probs of 32 responses} to work/found.json."""
    changes, attention = MODELS[family]
    if family == "gpt_oss":
        changes = changes | dict(layer_types=["sliding_attention", "full_attention"] * (layers // 2))
    families.write(family, work / "model", num_hidden_layers=layers, **changes)
    args = grpo.Args(model=str(work / "model"), train_files=(), output_dir="", attn_implementation=attention)
    args.max_prompt_length, args.max_response_length, args.compute_dtype = 32, 64, dtype
    device, mesh = grpo.setup_distributed(1)
    engine = grpo.build_engine(args, device)
    policy = grpo.load_model(args, mesh, device, grpo.add_adapters, grpo.TokenLogps)
    prompts = [dict(prompt_ids=[*range(8, 12 + i)], index=i, group=i) for i in range(8)]
    grpo.families.rounding_limit = lambda *_: (math.inf, False)
    whole_weights, found = grpo.whole_weights, {}
    for fault in faults:
        pattern = FAULTS[fault] and FAULTS[fault].format(layers // 2)
        grpo.whole_weights = spoiled(whole_weights, pattern)
        with grpo.awake(engine, [policy], None, args, {}):
            sampling = dict(temperature=1.0, max_tokens=48, stop_token_ids=[1])
            rows = grpo.rollout(engine, args, prompts, 1, 4, **sampling)
        mini_batches, own_rows, _ = grpo.distribute(rows, policy.packed, args)
        grpo.store_logps(policy, mini_batches, "old_logp_t", args)
        found[fault] = grpo.check_sampler(policy, own_rows, args, 1)["training/rollout_logp_diff_mean"]
    (work / "found.json").write_text(json.dumps(found))


def main(args):
    work, found = ROOT / "runs/mixtures", {}
    for family in MODELS:
        for layers in args.layers:
            for dtype, faults in (("float32", ["nothing"]), ("bfloat16", FAULTS)):
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
                if stopped := fork(work / "log.txt", measure, family, layers, dtype, work, faults):
                    raise SystemExit(f"{family}, {layers} layers: {stopped}")
                row = json.loads((work / "found.json").read_text())
                found[f"{family} {layers} {dtype}"] = row
                figures = " | ".join(f"{x:.2g}" for x in row.values())
                print(f"| {family} | {layers} | {dtype} | {figures} |", flush=True)
    save(args.output, args, found)


if __name__ == "__main__":
    main(Args(**flags))
