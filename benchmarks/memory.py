"""Peak memory of the trainers' log-probs, forward and backward, against vocabulary and tokens.

    python benchmarks/memory.py --output benchmarks/results/memory.json

A one-layer model, so that the output layer is what counts. `chunked` is the trainers' TokenLogps, `whole` has
the logits of all tokens at once. Peaks are above what stood before, which includes the gradients.
"""

import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from workload import save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos.grpo import TokenLogps


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
    return TokenLogps(lm)(ids, None, where, target, 1.0)[0]


class Peak:
    """Bytes by which memory rose at most between enter and exit."""

    def __enter__(self):
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
            self.before = self.resident("VmRSS")
        return self

    def __exit__(self, *_):
        after = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self.resident("VmHWM")
        self.bytes = after - self.before

    def resident(self, field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main():
    args, device = tyro.cli(Args), "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    table = Table(
        "vocabulary", "tokens", "chunked, MB", "whole, MB", "ratio", title="peak of forward and backward"
    )
    for vocabulary in args.vocabularies:
        sizes = dict(hidden_size=args.hidden_size, intermediate_size=args.hidden_size, num_hidden_layers=1)
        config = LlamaConfig(vocab_size=vocabulary, num_attention_heads=2, **sizes)
        lm = LlamaForCausalLM(config).to(device)
        for parameter in lm.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for tokens in args.tokens:
            ids = torch.randint(vocabulary, (tokens // 256, 256), device=device)
            where = torch.arange(tokens, device=device)
            peaks = {}
            for function in (chunked, whole):
                function(lm, ids[:1], where[:256], ids[0]).sum().backward()  # warm-up
                with Peak() as peak:
                    function(lm, ids, where, ids.flatten()).sum().backward()
                peaks[function.__name__] = peak.bytes / 2**20
            results.append(dict(vocabulary=vocabulary, tokens=tokens, **peaks))
            row = (
                f"{peaks['chunked']:.0f}",
                f"{peaks['whole']:.0f}",
                f"{peaks['whole'] / peaks['chunked']:.1f}",
            )
            table.add_row(str(vocabulary), str(tokens), *row)
        del lm
    Console().print(table)
    if args.output:
        save(args.output, args, dict(peaks_mb=results))


if __name__ == "__main__":
    main()
