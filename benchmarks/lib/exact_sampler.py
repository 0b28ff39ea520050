"""The functions that vLLM's layers call, on a GPU and on a CPU, for benchmarks/exact.py."""

import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, T = 1e-6, 200  # T: tokens of the text whose attention is compared


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

        self.ops, self.flash = ops, flash_attn_varlen_func
        self.linear = batch_invariant.linear_batch_invariant
        self.norm = lambda x, weight: batch_invariant.rms_norm_batch_invariant(x, weight, EPS)
        self.logits = lambda x, weight: torch.mm(x, weight.t(), out_dtype=torch.float32)
        self.logp = compute_token_logprobs

    def add_norm(self, x, residual, weight):
        x, residual = x.clone(), residual.clone()
        self.ops.fused_add_rms_norm(x, residual, weight, EPS)
        return x, residual

    def rope(self, positions, query, key, head_dim, cache):
        query, key = query.clone(), key.clone()
        self.ops.rotary_embedding(positions, query, key, head_dim, cache, True)
        return query

    def silu(self, gate_up):
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        torch.ops._C.silu_and_mul(out, gate_up)
        return out

    def attend(self, query, key, value, count, **more):
        """The last queries of a text of `count` tokens -> output, log-sum-exp."""
        options = dict(softmax_scale=query.shape[-1] ** -0.5, causal=True, fa_version=3, num_splits=1)
        sizes = len(query), ints(0, len(query)), count
        return self.flash(query, key, value, *sizes, return_softmax_lse=True, **options, **more)[:2]

    def plain(self, query, key, value, count):
        return self.attend(query, key[:count], value[:count], count, cu_seqlens_k=ints(0, count))[0]

    def paged(self, query, key, value, count):
        """The same, with keys and values in pages, as the sampler has them."""
        pages = -(-T // self.page)
        table = torch.randperm(4 * pages, device=DEVICE)[:pages]
        caches = []
        for x in (key, value):
            cache = x.new_zeros(4 * pages, self.page, *x.shape[1:])
            x = torch.cat([x, x.new_zeros(pages * self.page - T, *x.shape[1:])])
            cache[table] = x.view(pages, self.page, *x.shape[1:])
            caches.append(cache)
        return self.attend(query, *caches, count, seqused_k=ints(count), block_table=table.int()[None])[0]


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
        self.norm = lambda x, weight: ir.ops.rms_norm(x, weight, EPS)
        self.add_norm = lambda x, residual, weight: ir.ops.fused_add_rms_norm(x, residual, weight, EPS)
        self.rope = lambda *args: GPU.rope(self, *args)  # the same operator
        self.silu = SiluAndMul.forward_native
        self.logp = lambda logits, ids: logits.log_softmax(-1, dtype=torch.float32).gather(-1, ids)

    def linear(self, x, weight):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return layer.cpu_linear(x, layer.weight, None)

    def logits(self, x, weight):
        return self.linear(x, weight) if x.dtype is torch.float32 else F.linear(x.float(), weight.float())

    def paged(self, query, key, value, count):
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        pages, (heads, size), kv_heads = -(-T // self.page), query.shape[1:], key.shape[1]
        isa = _get_attn_isa(query.dtype, self.page, size)
        table = torch.randperm(4 * pages)[:pages]
        cache = query.new_zeros(4 * pages, kv_heads, 2 * self.page, size).chunk(2, dim=2)
        at = torch.arange(T)
        slots = table[at // self.page] * self.page + at % self.page
        self.ops.cpu_attn_reshape_and_cache(key, value, *cache, slots, isa)
        starts, lengths, out = ints(0, len(query)), ints(count), torch.empty_like(query)
        kind = (1, heads, kv_heads, size, lengths, query.dtype, starts, True, -1, isa, True)
        plan = self.ops.cpu_attn_get_scheduler_metadata(*kind)
        kind = (starts, lengths, size**-0.5, True, None, -1, table.int()[None], 0, plan, None)
        self.ops.cpu_attention_with_kv_cache(query.contiguous(), *cache, out, *kind)
        return out
