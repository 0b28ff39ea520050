"""Functions of the trainer as vLLM computes them for a Qwen3 on a GPU, with gradients."""

import torch

from system.log_probs import CHUNK, LogProbs


class Norm(torch.autograd.Function):
    """The sampler's RMSNorm, and the gradient of its formula."""

    @staticmethod
    def forward(ctx, x, weight, alone):
        import vllm._custom_ops as ops
        from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant

        ctx.save_for_backward(x, weight)
        if alone:
            return rms_norm_batch_invariant(x, weight, 1e-6)
        out, residual = torch.zeros_like(x).contiguous(), x.clone().contiguous()
        ops.fused_add_rms_norm(out, residual, weight, 1e-6)  # 0 + x: the trainer has added
        return out

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x, weight = inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            y = x.float()
            y = (weight.float() * y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
            return *torch.autograd.grad(y, inputs, gradient), None


def rope(query, key, cos, sin, *_, **__):
    """In float32 and rounded once, as vLLM's operator."""

    def rotated(x):
        (a, b), half = x.float().chunk(2, -1), x.shape[-1] // 2
        c, s = (y.float()[:, None, :, :half] for y in (cos, sin))
        return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)

    return rotated(query), rotated(key)


class Attention(torch.autograd.Function):
    """FlashAttention 3 as in vLLM; backwards FlashAttention 2 of torch, from its output and log-sum-exp."""

    @staticmethod
    def forward(ctx, query, key, value, starts_q, starts_k, longest_q, longest_k, scale):
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        options = dict(softmax_scale=scale, causal=True, fa_version=3, num_splits=1, return_softmax_lse=True)
        sizes = longest_q, starts_q, longest_k
        out, lse = flash_attn_varlen_func(query, key, value, *sizes, cu_seqlens_k=starts_k, **options)[:2]
        ctx.save_for_backward(query, key, value, out, lse, starts_q, starts_k)
        ctx.more = longest_q, longest_k, scale
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, *saved = ctx.saved_tensors
        *longest, scale = ctx.more
        inputs = query, *(x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        rng = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        options = *saved, *longest, 0.0, True, *rng  # no dropout, causal
        d_query, *rest = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), *inputs, *options, scale=scale
        )
        return d_query, *(x.unflatten(1, (key.shape[1], -1)).sum(2) for x in rest), *[None] * 5


def log_probs(ctx, hidden, weight, target, scale, softcap, never, with_entropy):
    """LogProbs.forward, with the kernel of vLLM's sampler for the log-probs of the targets."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    ctx.head = scale, softcap, never
    ctx.chunks = [slice(i, i + CHUNK) for i in range(0, len(target) or 1, CHUNK)]
    logp = torch.zeros(len(target), device=target.device)
    entropy = torch.zeros_like(logp)
    buffers = torch.empty(2, min(len(target), CHUNK), len(weight), device=target.device)
    for chunk in ctx.chunks:
        p_lv, logp_lv = buffers[:, : len(target[chunk])]
        logits_lv = LogProbs.logits(hidden[chunk], weight, *ctx.head, p_lv)
        logp[chunk] = compute_token_logprobs(logits_lv, target[chunk, None])[:, 0]
        torch.log_softmax(logits_lv, -1, out=logp_lv)  # of all tokens: for the entropy and the gradient
        entropy[chunk] = -torch.exp(logp_lv, out=p_lv).mul_(logp_lv).sum(-1)
    ctx.save_for_backward(hidden, weight, target, buffers)
    ctx.entropy = entropy.clone()
    ctx.set_materialize_grads(False)
    return (logp, entropy) if with_entropy else (logp,)
