"""What a CPU needs of malloc and of vLLM, each with its reason, and what vLLM's reload of weights lacks."""

import ctypes
import gc
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist


def keep_freed_memory():
    """malloc gives freed memory back to the system, and to get it again takes 30 % of an update."""
    if sys.platform == "linux":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD


@contextmanager
def own_vllm():
    """Start vLLM in this block: it shares nothing with another run, and leaves torch as it was."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Dynamo needs a C++ compiler
    os.environ.setdefault("TORCHDYNAMO_DISABLE", str(int(not torch.cuda.is_available())))
    from vllm import _custom_ops
    from vllm.model_executor.models.transformers.base import Base
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Executor

    # vLLM names shared memory by what follows the last colon of an address: "env://" in all runs of a machine
    run = f"{os.getppid()}-{os.environ.get('MASTER_PORT')}"
    arguments = Executor._distributed_args
    Executor._distributed_args = lambda self: (f"env://:{run}", *arguments(self)[1:])
    # it runs some families by their class in transformers, and would change the trainer's
    Base._decorate_for_torch_compile = lambda self: None
    if not torch.cuda.is_available():
        flatten_rotary(_custom_ops)
    gc.freeze()  # it searches for garbage three times: not in what has been imported
    set_num_threads = torch.set_num_threads  # its CPU worker replaces it
    yield
    torch.set_num_threads = set_num_threads
    if dist.is_initialized():
        dist.barrier()  # all ranks have opened it: without its name a kill leaves none behind
    for name in Path("/dev/shm").glob(f"{run}-*"):
        with suppress(OSError):  # another rank was first, or it is of another user
            name.unlink()


def flatten_rotary(ops):
    """CAREFUL: vLLM's rotary kernel for a CPU reads LFM2's [tokens, heads, size] at wrong positions."""
    kernel = ops.rotary_embedding

    def flat(positions, query, key, *options):
        tokens = positions.numel()
        key = None if key is None else key.view(tokens, -1)
        kernel(positions, query.view(tokens, -1), key, *options)  # in place

    ops.rotary_embedding = flat


def check_format(model, config):
    """Raise ValueError for packed weights that vLLM cannot multiply on this CPU."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # until then torch.ops._C is empty on every processor
    form = (getattr(config, "quantization_config", None) or {}).get("format")
    packed = form == "pack-quantized" and not torch.cuda.is_available()
    if packed and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        raise ValueError(f"{model}: vLLM needs AVX-512 for 4 bits on a CPU: take quantize.py's w8a8")


def before_reload(model):
    """vLLM 0.32 does not pack experts on a CPU again, and loses on all devices what gpt_oss copies itself."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        experts = hasattr(layer, "w13_weight")
        if experts and layer.w13_weight.device.type == "cpu":
            layer.quant_method.moe_kernel = None  # experts are packed only where a new kernel is made
        # a reload would have put empty parameters in their place: these layers are loaded in place
        if hasattr(layer, "sinks") or (experts and model.config.model_type == "gpt_oss"):
            get_layerwise_info(layer).load_numel_total = 0


def after_reload(model):
    """On a CPU two layers hold copies of weights that a reload does not renew."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):  # a tied one, into which nothing is loaded
            layer.quant_method.process_weights_after_loading(layer)
        elif hasattr(layer, "conv_weights") and hasattr(layer.conv1d, "_cpu_unpacked_conv_weight"):
            layer.conv_weights = layer.conv1d._cpu_unpacked_conv_weight  # Mamba 2, packed in bfloat16
