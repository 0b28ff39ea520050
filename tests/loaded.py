"""What programs import, without this repository's own modules; and what libraries do at each start."""

import gc
import inspect
from importlib import import_module

import sources
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

MODULES = """
    compressed_tensors.compressors hypothesis pandas peft psutil pyarrow.compute pyarrow.pandas_compat
    pyarrow.parquet tqdm transformers typeguard tyro._backends._tyro_backend
    torch.distributed.checkpoint._fsspec_filesystem torch.distributed.checkpoint.state_dict
    torch.distributed.fsdp torch.distributed.run torch.distributed.tensor.experimental
    torch.nn.attention.varlen torch.utils.serialization.config transformers.models.auto.modeling_auto
    transformers.models.llama.modeling_llama vllm.distributed.elastic_ep.elastic_execute
    vllm.model_executor.layers.quantization.online.base vllm.model_executor.models.llama
    vllm.model_executor.models.transformers vllm.renderers.hf vllm.utils.cpu_triton_utils
    vllm.v1.attention.backends.cpu_attn vllm.v1.core.sched.scheduler vllm.v1.engine.llm_engine
    vllm.v1.pool.flash_maxsim vllm.v1.worker.cpu_worker
"""
for name in MODULES.split():
    import_module(name)

gc.set_threshold(50_000, 50, 50)
inspect.findsource = sources.find_source
# torchrun looks at all modules to name the function that calls its log
rendezvous.get_method_name = lambda *_: ""
# vLLM looks at all modules for kernels
current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = lambda *_: None


def little_memory(self, *args, create=EngineArgs.create_engine_config, **options):
    """The caches of tiny models need no gigabyte, which takes as long to clear as a step."""
    if self.kv_cache_memory_bytes:
        self.kv_cache_memory_bytes = min(self.kv_cache_memory_bytes, 1 << 27)
    return create(self, *args, **options)


EngineArgs.create_engine_config = little_memory
