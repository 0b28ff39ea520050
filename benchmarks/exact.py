"""Do sampler and trainer compute the same bits? The parts of a Qwen3 layer, on the same random inputs.

    python benchmarks/exact.py
    python benchmarks/exact.py --model models/tiny --dtype float32

"sampler" is the function that vLLM's layer calls: on a GPU with VLLM_BATCH_INVARIANT=1, which is set here,
on a CPU without a compiler. "trainer" is what transformers or the scripts call.
A whole run: benchmarks/exact_run.py
Docs: docs/results/exact.md
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import AutoConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.exact_sampler import CPU, DEVICE, EPS, GPU, T, ints
from system.arguments import command_line

SHAPES = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8)


@dataclass
class Args:
    model: str = ""
    """Directory of a model whose sizes are taken; empty: those of Qwen3-0.6B."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of weights and activations; a GPU has bfloat16 alone."""
    tokens: int = 4096 if DEVICE == "cuda" else 256
    """Tokens of the largest batch."""
    seed: int = 0
    """Seed of the inputs."""


def lines(sampler, c, tokens, random):
    """(part, what is compared, one tensor, the other)."""

    def batches(part, who, function, x, counts):
        """The function of a few tokens, and of all."""
        for n in (n for n in counts if n < len(x)):
            yield part, f"{who}: {n} of the tokens, all", function(x[:n]), function(x)[:n]

    hidden, size, heads, kv_heads = c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads
    x, residual = random(tokens, hidden), random(tokens, hidden)
    w_qkv, width = random((heads + 2 * kv_heads) * size, hidden, scale=0.02), heads * size
    w_q, dtype = w_qkv[:width].contiguous(), x.dtype
    yield "linear", "sampler, trainer", sampler.linear(x, w_qkv), F.linear(x, w_qkv)
    for who, linear in (("sampler", sampler.linear), ("trainer", F.linear)):
        yield "linear", f"{who}: Q alone, QKV", linear(x, w_q), linear(x, w_qkv)[:, :width]
        yield from batches("linear", who, lambda x: linear(x, w_qkv), x, (1, 37))  # noqa: B023

    norm = Qwen3RMSNorm(hidden, EPS).to(DEVICE, dtype)
    norm.weight.data = weight = 1 + random(hidden, scale=0.1)
    yield "RMSNorm", "sampler, trainer", sampler.norm(x, weight), norm(x)
    yield from batches("RMSNorm", "sampler", lambda x: sampler.norm(x, weight), x, (1,))
    full, total = sampler.add_norm(x, residual, weight)
    yield "addition", "sampler, trainer", total, x + residual
    part, y = "addition and RMSNorm", total.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()
    yield part, "sampler, trainer", full, norm(x + residual)
    yield part, "sampler, formula rounded once", full, y.to(dtype)
    yield part, "sampler: in one, one after the other", full, sampler.norm(x + residual, weight)
    both = lambda x: sampler.add_norm(x, residual[: len(x)], weight)[0]
    yield from batches(part, "sampler", both, x, (1, 300))

    part, query, key = "rotary embedding", random(tokens, width), random(tokens, kv_heads * size)
    positions = torch.arange(tokens, device=DEVICE)
    angles = torch.outer(positions.float(), 1e6 ** -(torch.arange(0, size, 2, device=DEVICE) / size))
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    rope = lambda x: sampler.rope(positions[: len(x)], x, key[: len(x)], size, cache)
    inputs = tuple(x.view(1, tokens, -1, size).transpose(1, 2) for x in (query, key))
    inputs += tuple(x.repeat(1, 2)[None] for x in cache.chunk(2, -1))  # cos and sin of both halves
    rotated = lambda *inputs: apply_rotary_pos_emb(*inputs)[0][0].transpose(0, 1).flatten(1)
    exact = rotated(*(x.float() for x in inputs))
    yield part, "sampler, trainer", rope(query), rotated(*inputs)
    yield part, "sampler, formula rounded once", rope(query), exact.to(dtype)
    if DEVICE == "cpu" and dtype is torch.bfloat16:  # vLLM's kernels, where the CPU has no AVX512_BF16
        cut = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
        yield part, "sampler, formula cut off to 16 bits", rope(query), cut.to(dtype)
    yield from batches(part, "sampler", rope, query, (1,))

    gate, up = random(tokens, 2 * c.intermediate_size).chunk(2, -1)
    yield "SwiGLU", "sampler, trainer", sampler.silu(torch.cat([gate, up], -1)), F.silu(gate) * up

    weight, x = random(c.vocab_size, hidden, scale=0.02), x[: tokens // 2]
    part, full = "output layer", sampler.logits(x, weight)
    if DEVICE == "cpu":  # on a GPU both make the same call
        yield part, "sampler, trainer", full, x.float() @ weight.float().t()
    yield from batches(part, "sampler", lambda x: sampler.logits(x, weight), x, (1, 8, 37, 64, 256, 1024))
    part, ids = "log-probs", torch.randint(c.vocab_size, (len(x), 1), device=DEVICE)
    yield part, "sampler, trainer", sampler.logp(full, ids), full.log_softmax(-1).gather(1, ids)
    logp = lambda logits: sampler.logp(logits.contiguous(), ids[: len(logits)])
    yield from batches(part, "sampler", logp, full, (1,))

    part, (query, key, value) = "attention", (random(T, n, size) for n in (heads, kv_heads, kv_heads))
    whole = sampler.paged(query, key, value, T)
    yield part, "sampler, trainer", whole, trainer_attention(query, key, value)
    ways = [("pages", sampler.paged)]
    if DEVICE == "cuda":
        yield part, "sampler: without pages, with pages", sampler.plain(query, key, value, T), whole
        ways.append(("no pages", sampler.plain))
    for way, attention in ways:
        for n in (1, 64, 128, 129, T):
            one = attention(query[n - 1 : n], key, value, n)
            yield part, f"sampler, {way}: query {n} alone, all", one, whole[n - 1 : n]


def trainer_attention(query, key, value):
    if DEVICE == "cpu":  # as segment_attention
        texts = (x.float()[None].transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(*texts, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).to(query.dtype)
    from torch.nn.attention.varlen import varlen_attn

    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return varlen_attn(query, key, value, ints(0, T), ints(0, T), T, T, window_size=(-1, 0))


def main(args: Args):
    if DEVICE == "cuda" and args.dtype == "float32":
        raise SystemExit("error: --dtype float32 is for a CPU: attention on a GPU takes half precision alone")
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(DEVICE == "cuda"))  # before vLLM is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    random = lambda *shape, scale=1: (torch.randn(*shape, device=DEVICE) * scale).to(dtype)
    config = AutoConfig.from_pretrained(args.model).get_text_config() if args.model else Qwen3Config(**SHAPES)
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    print("| Part | Compared | Equal | Largest difference | Share that differs |\n|---|---|---|---|---|")
    for part, compared, a, b in lines(GPU() if DEVICE == "cuda" else CPU(), config, args.tokens, random):
        assert a.shape == b.shape, (part, compared)
        gap = (a.float() - b.float()).abs()
        found = f"{'no' if gap.any() else 'yes'} | {gap.max():.2g} | {(gap > 0).float().mean():.2g}"
        print(f"| {part} | {compared} | {found} |", flush=True)


if __name__ == "__main__":
    main(command_line(Args))
