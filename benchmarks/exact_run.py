"""grpo.py with the sampler's own functions in the trainer: are the log-probs of both equal to the bit?

    python benchmarks/exact_run.py FLAGS_OF_GRPO

For a Qwen3 with heads of 128, without LoRA, on a GPU. PARTS in the environment says what is replaced.
Docs: docs/results/exact.md
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.attention import varlen
from transformers.models.qwen3 import modeling_qwen3 as qwen3

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos import grpo
from algos.grpo import Args
from benchmarks.lib import exact_parts
from system.arguments import parse

PARTS = os.environ.get("PARTS", "norm,rope,attention,log_probs,eager").split(",")
own_vllm, check_sampler, init = grpo.cpu.own_vllm, grpo.check_sampler, qwen3.Qwen3Model.__init__


def mark_first(self, config):
    init(self, config)
    self.layers[0].input_layernorm.first = True


def norm(self, x):
    """vLLM has another kernel where nothing is added before: for queries, keys and the first norm."""
    alone = self.weight.shape[0] == 128 or hasattr(self, "first")
    return exact_parts.Norm.apply(x, self.weight, alone)


def attention(query, key, value, starts_q, starts_k, longest_q, longest_k, scale, **_):
    sizes = starts_q, starts_k, int(longest_q), int(longest_k)
    return exact_parts.Attention.apply(query, key, value, *sizes, scale)


@contextmanager
def eager_vllm():
    """vLLM compiles nothing and captures no graphs: what it compiles, it rounds elsewhere."""
    with own_vllm():
        import vllm

        real = vllm.EngineArgs
        vllm.EngineArgs = lambda **options: real(**options | dict(enforce_eager=True))
        yield
        vllm.EngineArgs = real


def check(rows, weigh, limit, step):
    """Print how far the log-probs of sampler and trainer are apart, token by token."""
    names, gaps = ("old_logp_t", "rollout_logp_t", "mask_t"), []
    for row in rows:
        ours, theirs, mask = (torch.as_tensor(row[name]).cpu() for name in names)
        gaps.append((ours.double() - theirs.double()).abs()[mask.bool()])
    gap = torch.cat(gaps)
    words = f"max {gap.max():.3g} mean {gap.mean():.3g} differ {(gap > 0).double().mean():.3f} of {len(gap)}"
    print(f"\nstep {step}: {words}", flush=True)
    return check_sampler(rows, weigh, limit, step)


def main():
    flags = parse(Args)
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # before vLLM is imported
    grpo.check_sampler = check
    if "norm" in PARTS:
        qwen3.Qwen3Model.__init__, qwen3.Qwen3RMSNorm.forward = mark_first, norm
    if "rope" in PARTS:
        qwen3.apply_rotary_pos_emb = exact_parts.rope
    if "attention" in PARTS:
        varlen.varlen_attn = attention
    if "log_probs" in PARTS:
        exact_parts.LogProbs.forward = staticmethod(exact_parts.log_probs)
    if "eager" in PARTS:
        grpo.cpu.own_vllm = eager_vllm
    grpo.main(Args(**flags))


if __name__ == "__main__":
    main()
