"""The functions that vLLM's layers call, on a GPU and on a CPU, for benchmarks/exact.py."""

import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
T = 200  # tokens of the text whose attention is compared


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class GPU:
    """vLLM's functions on a GPU, batch invariant."""

    page = 16

    def __init__(self):
        import vllm._custom_ops as ops
        from vllm.model_executor.determinism import batch_invariant
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        self.ops = ops
        self.flash = flash_attn_varlen_func
        self.invariant = batch_invariant
        self.linear = batch_invariant.linear_batch_invariant
        self.token_logprobs = compute_token_logprobs

    def norm(self, x, weight):
        return self.invariant.rms_norm_batch_invariant(x, weight, EPS)

    def add_norm(self, x, residual, weight):
        x = x.clone()
        residual = residual.clone()
        self.ops.fused_add_rms_norm(x, residual, weight, EPS)
        return x, residual

    def silu(self, gate_up):
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        torch.ops._C.silu_and_mul(out, gate_up)
        return out

    def logits(self, x, weight):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    def logp(self, logits, ids):
        return self.token_logprobs(logits.contiguous(), ids)

    def paged(self, query, key, value, count):
        """Attention of the last queries of a text of `count` tokens; keys and values are in pages."""
        pages = -(-T // self.page)
        table = torch.randperm(4 * pages, device=DEVICE)[:pages]
        caches = []
        for x in (key, value):
            cache = x.new_zeros(4 * pages, self.page, *x.shape[1:])
            x = torch.cat([x, x.new_zeros(pages * self.page - T, *x.shape[1:])])
            cache[table] = x.view(pages, self.page, *x.shape[1:])
            caches.append(cache)
        return self.flash(
            query,
            *caches,
            len(query),
            ints(0, len(query)),
            count,
            seqused_k=ints(count),
            block_table=table.int()[None],
            return_softmax_lse=True,
            softmax_scale=query.shape[-1] ** -0.5,
            causal=True,
            fa_version=3,
            num_splits=1,
        )[0]


class CPU:
    """vLLM's functions on a CPU: norms and SwiGLU are PyTorch's, and attention has pages alone."""

    page = 32  # as in the scripts

    def __init__(self):
        import vllm._custom_ops as ops
        from vllm import ir
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        self.ops = ops
        self.ir = ir.ops
        self.silu = SiluAndMul.forward_native

    def norm(self, x, weight):
        return self.ir.rms_norm(x, weight, EPS)

    def add_norm(self, x, residual, weight):
        return self.ir.fused_add_rms_norm(x, residual, weight, EPS)

    def logp(self, logits, ids):
        return logits.log_softmax(-1, dtype=torch.float32).gather(-1, ids)

    def linear(self, x, weight):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return layer.cpu_linear(x, layer.weight, None)

    def logits(self, x, weight):
        if x.dtype is torch.float32:
            return self.linear(x, weight)
        return F.linear(x.float(), weight.float())

    def paged(self, query, key, value, count):
        """As on a GPU."""
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        pages = -(-T // self.page)
        heads, size = query.shape[1:]
        kv_heads = key.shape[1]
        isa = _get_attn_isa(query.dtype, self.page, size)
        table = torch.randperm(4 * pages)[:pages]
        caches = query.new_zeros(4 * pages, kv_heads, 2 * self.page, size).chunk(2, dim=2)
        at = torch.arange(T)
        slots = table[at // self.page] * self.page + at % self.page
        self.ops.cpu_attn_reshape_and_cache(key, value, *caches, slots, isa)
        starts = ints(0, len(query))
        lengths = ints(count)
        out = torch.empty_like(query)
        plan = self.ops.cpu_attn_get_scheduler_metadata(
            1, heads, kv_heads, size, lengths, query.dtype, starts, True, -1, isa, True
        )
        how = starts, lengths, size**-0.5, True, None, -1, table.int()[None], 0, plan, None
        self.ops.cpu_attention_with_kv_cache(query.contiguous(), *caches, out, *how)
        return out
