"""Do sampler and trainer compute the same bits? The parts of a Qwen3 layer, on the same random inputs.

    python benchmarks/exact.py
    python benchmarks/exact.py --model models/tiny --dtype float32

"sampler" is the function that vLLM's layer calls: on a GPU with VLLM_BATCH_INVARIANT=1, which is set here,
on a CPU without a compiler. "trainer" is what transformers or the scripts call. The sampler computes one
token at a time and the trainer all, so a part is also compared with itself on fewer tokens.
Docs: docs/results/exact.md
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.exact_sampler import CPU, DEVICE, EPS, GPU, T, ints
from system.arguments import command_line
from system.attention import packed_attention


@dataclass
class Args:
    model: str = ""
    """Directory of a model whose sizes are taken; empty: those of Qwen3-0.6B."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of weights and activations; a GPU has bfloat16 alone."""
    tokens: int = 4096 if DEVICE == "cuda" else 256
    """Tokens of the largest batch."""


# each part below: c is the configuration, random(*shape, scale=1) makes inputs
def show(part, compared, a, b):
    """A line of the table: two tensors."""
    assert a.shape == b.shape, (part, compared)
    gap = (a.float() - b.float()).abs()
    equal = "no" if gap.any() else "yes"
    differ = (gap > 0).float().mean()
    print(f"| {part} | {compared} | {equal} | {gap.max():.2g} | {differ:.2g} |", flush=True)


def show_fewer(part, who, function, x, *counts):
    """A function of a few tokens, and of all."""
    whole = function(x)
    for n in counts:
        if n < len(x):
            show(part, f"{who}: {n} of the tokens, all", function(x[:n]), whole[:n])


def linear(c, random, sampler):
    x = random(c.tokens, c.hidden_size)
    width = c.num_attention_heads * c.head_dim
    weight = random(width + 2 * c.num_key_value_heads * c.head_dim, c.hidden_size, scale=0.02)
    alone = F.linear(x, weight[:width])  # the trainer has weights apart for Q, K and V
    show("linear", "sampler, trainer", sampler.linear(x, weight)[:, :width], alone)
    show_fewer("linear", "sampler", lambda x: sampler.linear(x, weight), x, 1, 37)
    show_fewer("linear", "trainer", lambda x: F.linear(x, weight), x, 1, 37)


def norms(c, random, sampler):
    x = random(c.tokens, c.hidden_size)
    residual = random(c.tokens, c.hidden_size)
    weight = 1 + random(c.hidden_size, scale=0.1)
    norm = Qwen3RMSNorm(c.hidden_size, EPS).to(DEVICE, x.dtype)
    norm.weight.data = weight
    show("RMSNorm", "sampler, trainer", sampler.norm(x, weight), norm(x))
    show_fewer("RMSNorm", "sampler", lambda x: sampler.norm(x, weight), x, 1)
    normed, total = sampler.add_norm(x, residual, weight)
    show("addition", "sampler, trainer", total, x + residual)
    part = "addition and RMSNorm"
    show(part, "sampler, trainer", normed, norm(x + residual))
    show_fewer(part, "sampler", lambda x: sampler.add_norm(x, residual[: len(x)], weight)[0], x, 1, 300)


def rotary(c, random, sampler):
    query = random(c.tokens, c.num_attention_heads * c.head_dim)
    key = random(c.tokens, c.num_key_value_heads * c.head_dim)
    positions = torch.arange(c.tokens, device=DEVICE)
    cos, sin = Qwen3RotaryEmbedding(c).to(DEVICE)(query, positions[None])  # equal in both halves of a head
    cache = torch.cat([cos[0].chunk(2, -1)[0], sin[0].chunk(2, -1)[0]], -1)

    def ours(x):
        rotated = x.clone()
        keys = key[: len(x)].clone()
        sampler.ops.rotary_embedding(positions[: len(x)], rotated, keys, c.head_dim, cache, True)  # in place
        return rotated

    heads = [x.view(1, c.tokens, -1, c.head_dim).transpose(1, 2) for x in (query, key)]
    theirs, _ = apply_rotary_pos_emb(*heads, cos, sin)
    show("rotary embedding", "sampler, trainer", ours(query), theirs[0].transpose(0, 1).flatten(1))
    show_fewer("rotary embedding", "sampler", ours, query, 1)


def swiglu(c, random, sampler):
    gate_up = random(c.tokens, 2 * c.intermediate_size)
    gate, up = gate_up.chunk(2, -1)
    show("SwiGLU", "sampler, trainer", sampler.silu(gate_up), F.silu(gate) * up)


def output(c, random, sampler):
    x = random(c.tokens // 2, c.hidden_size)
    weight = random(c.vocab_size, c.hidden_size, scale=0.02)
    logits = sampler.logits(x, weight)
    if DEVICE == "cpu":  # on a GPU both make the same call
        show("output layer", "sampler, trainer", logits, x.float() @ weight.float().t())
    show_fewer("output layer", "sampler", lambda x: sampler.logits(x, weight), x, 1, 37, 1024)
    ids = torch.randint(c.vocab_size, (len(x), 1), device=DEVICE)

    def logp(logits):
        return sampler.logp(logits, ids[: len(logits)])

    show("log-probs", "sampler, trainer", logp(logits), logits.log_softmax(-1).gather(1, ids))
    show_fewer("log-probs", "sampler", logp, logits, 1)


def attention(c, random, sampler):
    query = random(T, c.num_attention_heads, c.head_dim)
    key = random(T, c.num_key_value_heads, c.head_dim)
    value = random(T, c.num_key_value_heads, c.head_dim)
    whole = sampler.paged(query, key, value, T)
    show("attention", "sampler, trainer", whole, trainer_attention(query, key, value))
    for n in (1, 128, 129, T):
        alone = sampler.paged(query[n - 1 : n], key, value, n)
        show("attention", f"sampler: query {n} alone, all", alone, whole[n - 1 : n])


def trainer_attention(query, key, value):
    """`packed_attention` of a row with one text."""
    texts = [x.transpose(0, 1)[None] for x in (query, key, value)]  # [1, heads, T, size]
    layout = dict(
        kv_index=torch.arange(T, device=DEVICE),
        shapes=np.array([(T, T)]),
        longest=(T, T),
        cu_seqlens=(ints(0, T), ints(0, T)),
    )
    out, _ = packed_attention(None, *texts, None, query.shape[-1] ** -0.5, **layout)
    return out[0]


def main(args: Args):
    if DEVICE == "cuda" and args.dtype == "float32":
        raise SystemExit("error: --dtype float32 is for a CPU: attention on a GPU takes half precision alone")
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(DEVICE == "cuda"))  # before vLLM is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sampler = GPU() if DEVICE == "cuda" else CPU()
    if args.model:
        config = AutoConfig.from_pretrained(args.model).get_text_config()
    else:
        config = Qwen3Config(
            hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8
        )
    config.tokens = args.tokens
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)

    def random(*shape, scale=1):
        return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)

    print("| Part | Compared | Equal | Largest difference | Share that differs |\n|---|---|---|---|---|")
    for part in (linear, norms, rotary, swiglu, output, attention):
        part(config, random, sampler)


if __name__ == "__main__":
    main(command_line(Args))
