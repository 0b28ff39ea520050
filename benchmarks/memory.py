"""Peak memory of the trainers' log-probs, forward and backward, against vocabulary and tokens.

    python benchmarks/memory.py --output benchmarks/results/memory.json

A one-layer model, so that the output layer is what counts. `chunked` is the trainers' TokenLogps, `whole` has
the logits of all tokens at once. Each figure is of a fresh process with the trainers' allocator: the most
that forward and backward take above what stood before, which includes the gradients.
"""

import itertools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from workload import save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos.grpo import TokenLogps, setup_distributed


@dataclass
class Args:
    vocabularies: tuple[int, ...] = (4096, 16384, 65536)
    """Sizes of the vocabulary."""
    tokens: tuple[int, ...] = (2048, 4096, 8192)
    """Tokens of a forward pass, in rows of 256."""
    hidden_size: int = 64
    """Width of the model."""
    output: Path | None = None
    """JSON file for the results; None: the table only."""


def whole(lm, ids, where, target):
    """Log-probs from the logits of all positions."""
    logits = lm(input_ids=ids, use_cache=False).logits.flatten(0, 1)[where].float()
    return logits.log_softmax(-1).gather(-1, target[:, None])


def chunked(lm, ids, where, target):
    """Log-probs as the trainers take them."""
    return TokenLogps(lm)(where, target, 1.0, input_ids=ids)[0]


def resident(field):
    """Bytes of this process's memory: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak(function, vocabulary, tokens, hidden_size):
    """MB by which memory rises at most."""
    device, _ = setup_distributed(1)
    sizes = dict(hidden_size=hidden_size, intermediate_size=hidden_size, num_hidden_layers=1)
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_attention_heads=2, **sizes)).to(device)
    for parameter in lm.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(vocabulary, (tokens // 256, 256), device=device)
    where = torch.arange(tokens, device=device)
    function(lm, ids[:1], where[:1], ids[0, :1]).sum().backward()  # warm-up
    if cuda := device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else resident("VmRSS")
    function(lm, ids, where, ids.flatten()).sum().backward()
    return ((torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")) - before) / 2**20


def main():
    args = tyro.cli(Args)
    results = []
    title = "peak of forward and backward"
    table = Table("vocabulary", "tokens", "chunked, MB", "whole, MB", "ratio", title=title)
    fresh = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    for vocabulary, tokens in itertools.product(args.vocabularies, args.tokens):
        sizes = vocabulary, tokens, args.hidden_size
        ours, whole_mb = fresh.map(peak, (chunked, whole), *([x] * 2 for x in sizes))
        results.append(dict(vocabulary=vocabulary, tokens=tokens, chunked=ours, whole=whole_mb))
        table.add_row(*map(str, sizes[:2]), f"{ours:.0f}", f"{whole_mb:.0f}", f"{whole_mb / ours:.1f}")
    Console().print(table)
    if args.output:
        save(args.output, args, dict(peaks_mb=results))


if __name__ == "__main__":
    main()
