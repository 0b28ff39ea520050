"""Log-probs of tokens from hidden states, without the logits of all positions at the same time.

It does what a fused cross-entropy kernel does, and on a CPU too. Chunks under torch.utils.checkpoint would be
shorter, and took 5 to 8 times the memory on a CPU.
"""

import torch

CHUNK = 1024  # positions whose logits exist at the same time


def log_probs(hidden, weight, target, scale=1.0, softcap=None, never=(), entropy=True):
    """hidden [L, H], weight [V, H], target [L] -> log-prob of the targets and entropy [L], in float32.

    scale: factor of the logits; softcap: c in c tanh(logits / c), before the scale (gemma-2 and gemma-4).
    never: ids of tokens that have probability 0. entropy: False returns the log-probs alone.
    """
    return LogProbs.apply(hidden, weight, target, scale, softcap, list(never), entropy)


class LogProbs(torch.autograd.Function):
    """Logits are in two buffers [chunk, V]; the backward pass computes them again."""

    @staticmethod
    def logits(hidden, weight, scale, softcap, never, out):
        """Write the logits of a chunk to `out` [chunk, V]: float32, also where the model is bfloat16."""
        if weight.is_cuda and weight.dtype is not torch.float32:
            torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(hidden.float(), weight.float().t(), out=out)
        if softcap:
            out.div_(softcap).tanh_().mul_(softcap)
        if never:
            out[:, never] = -1e4  # finite, because 0 * -inf is NaN
        return out if scale == 1 else out.mul_(scale)

    @staticmethod
    def forward(ctx, hidden, weight, target, scale, softcap, never, with_entropy):
        ctx.chunks = [slice(i, i + CHUNK) for i in range(0, len(target) or 1, CHUNK)]
        ctx.head = scale, softcap, never
        logp = torch.zeros(len(target), device=target.device)
        entropy = torch.zeros_like(logp)
        buffers = torch.empty(2, min(len(target), CHUNK), len(weight), device=target.device)
        for chunk in ctx.chunks:
            p_lv, logp_lv = buffers[:, : len(target[chunk])]
            torch.log_softmax(LogProbs.logits(hidden[chunk], weight, *ctx.head, p_lv), -1, out=logp_lv)
            logp[chunk] = logp_lv.gather(-1, target[chunk, None])[:, 0]
            if with_entropy:
                entropy[chunk] = -torch.exp(logp_lv, out=p_lv).mul_(logp_lv).sum(-1)
        ctx.save_for_backward(hidden, weight, target, buffers)
        ctx.entropy = entropy.clone()  # itself, as an output, it would hold the graph
        ctx.set_materialize_grads(False)
        return (logp, entropy) if with_entropy else (logp,)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logp, d_entropy=None):
        """p the softmax: d log p(target) = onehot(target) - p, d entropy = -p (log p + entropy)."""
        hidden, weight, target, buffers = ctx.saved_tensors
        scale, softcap, _ = ctx.head
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for number, chunk in enumerate(reversed(ctx.chunks)):
            p_lv, logp_lv = buffers[:, : len(target[chunk])]
            if number:  # the buffers still hold the last chunk
                torch.log_softmax(LogProbs.logits(hidden[chunk], weight, *ctx.head, p_lv), -1, out=logp_lv)
            torch.exp(logp_lv, out=p_lv)
            d_target = d_logp[chunk, None] * scale
            d_lv = -d_target
            if d_entropy is not None:  # only where the loss has the entropy
                d_lv = logp_lv.add_(ctx.entropy[chunk, None]).mul_(-scale * d_entropy[chunk, None])
                d_lv = d_lv.sub_(d_target)
            d_lv = torch.mul(p_lv, d_lv, out=logp_lv).scatter_add_(-1, target[chunk, None], d_target)
            if softcap:  # d tanh = 1 - tanh^2
                logits_lv = LogProbs.logits(hidden[chunk], weight, *ctx.head, p_lv)
                d_lv = d_lv.addcmul_(d_lv, logits_lv.div_(scale * softcap).square_(), value=-1)
            d_lv = d_lv.to(weight.dtype)
            torch.mm(d_lv, weight, out=d_hidden[chunk])
            if d_weight is not None:
                d_weight.addmm_(d_lv.t(), hidden[chunk])
        return d_hidden, d_weight, *[None] * 5
