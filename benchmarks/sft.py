"""SFT: tokens per second of a whole step of sft.py against the raw forward and backward of its batches.

Command:    python benchmarks/sft.py --model models/smollm2 --train_files data/gsm8k/train.parquet
Raw: transformers' model on the same packed rows, logits of the trained tokens, cross-entropy; no optimizer.
Both alternate, so that other work on the machine slows them alike: the ratio counts, not the figures.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos import sft


@dataclass
class Args:
    model: str
    """Hugging Face directory or hub name of the model."""
    train_files: tuple[str, ...]
    """Parquet files of training prompts."""
    rows: int = 16
    """Rows of a step."""
    max_tokens_per_microbatch: int = 1024
    """Tokens of a packed row."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass, on both sides."""
    repeats: int = 5
    """Steps that are timed, after one that is not."""
    output: str = ""
    """JSON file for the results; empty: only printed."""


def raw_step(lm, rows, parts, tokens, device):
    """Forward and backward of the packed rows."""
    for part in parts:
        prompts, responses = ([rows[i][name] for i in part] for name in ("prompt_ids", "response_ids"))
        ids = torch.cat([torch.tensor(p + r) for p, r in zip(prompts, responses)])
        position_ids = torch.cat([torch.arange(len(p) + len(r)) for p, r in zip(prompts, responses)])
        trained = [[False] * len(p) + [True] * len(r) for p, r in zip(prompts, responses)]
        where = torch.tensor(sum(trained, [])).nonzero()[:, 0]
        ids, position_ids, where = (x.to(device) for x in (ids, position_ids, where))
        output = lm.base_model(input_ids=ids[None], position_ids=position_ids[None], use_cache=False)
        logits = lm.get_output_embeddings()(output.last_hidden_state[0, where - 1])
        (functional.cross_entropy(logits.float(), ids[where], reduction="sum") / tokens).backward()
    lm.zero_grad()


def main(args):
    """Time both in turns, and print tokens per second and their ratio."""
    common = dict(max_tokens_per_microbatch=args.max_tokens_per_microbatch, packing=True)
    common |= dict(
        model=args.model, train_files=args.train_files, gradient_checkpointing=args.gradient_checkpointing
    )
    settings = sft.Args(output_dir="", **common)
    device, mesh = sft.setup_distributed(1)
    policy = sft.load_policy(settings, mesh, device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
    dtype = getattr(torch, settings.compute_dtype)
    lm = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, attn_implementation=settings.attn_implementation
    )
    lm.to(device).train()
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    rows, *_ = sft.load_examples(args.train_files, settings, AutoTokenizer.from_pretrained(args.model))
    rows = rows[: args.rows]
    parts = sft.pack(sft.lengths(rows), args.max_tokens_per_microbatch, one_row=True)
    tokens = sum(sum(row["trained"]) for row in rows)
    seconds = {"sft.py": [], "raw": []}
    for _ in range(1 + args.repeats):
        for name, step in (
            ("sft.py", lambda: sft.update(policy, optimizer, rows, settings)),
            ("raw", lambda: raw_step(lm, rows, parts, tokens, device)),
        ):
            begin = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    total = sum(sft.lengths(rows))
    ratios = [raw / ours for ours, raw in zip(seconds["sft.py"][1:], seconds["raw"][1:])]
    speed = {name: total / statistics.median(values[1:]) for name, values in seconds.items()}
    result = dict(asdict(args), tokens=total, microbatches=len(parts), tokens_per_second=speed)
    result |= dict(ratio=statistics.median(ratios), ratios=ratios)
    print(json.dumps(result, indent=2))
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=2) + "\n")
    sft.leave()


if __name__ == "__main__":
    main(tyro.cli(Args))
