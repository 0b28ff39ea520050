"""Sample responses to the prompts of a parquet file with vLLM: parquet in, the same rows with responses out.

A response's seed is a function of (seed, row, sample), so the output does not depend on the number of ranks.
A prompt over the limit keeps its row, with empty responses and finish reason `prompt_too_long`.

CPU:        python algos/generate.py --model runs/grpo --data data/test.parquet --output test_out.parquet
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/generate.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/generate.md
"""

import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import tyro
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.atomic import replacing
from data_prep.schema import load_rows

COLUMNS = ("responses", "response_tokens", "finish_reasons")  # added to a row: lists, one entry a sample


@dataclass
class Args:
    model: str
    """A run's directory (its latest checkpoint), a checkpoint, a Hugging Face directory or a hub name."""
    data: str
    """Parquet file of prompts."""
    output: str
    """Parquet file to write; it must not exist."""
    prompt_key: str = "prompt"
    """Column of the prompt: chat messages, or a string, which becomes one user message."""
    seed: int = 1
    """Seed, with row and sample number, of every response."""
    n_samples: int = 1
    """Responses to each prompt."""
    batch_size: int = 1024
    """Prompts of one call of the sampler, over all ranks."""
    max_prompt_length: int = 512
    """Limit of the prompt in tokens."""
    max_response_length: int = 1024
    """Limit of the response in tokens."""
    temperature: float = 0.0
    """Sampling temperature; 0: the most likely token."""
    top_p: float = 1.0
    """Nucleus sampling; 1: off."""
    top_k: int = -1
    """Top-k sampling; -1: off."""
    tp_size: int = 1
    """Ranks that share one sampler by tensor parallelism."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that the sampler takes."""


# region distributed
def setup_distributed(hsdp_replicas):
    """Join the processes of torchrun, or run alone -> the device of this rank and the FSDP mesh."""
    if "RANK" not in os.environ:  # plain `python`: a rendezvous with itself
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        os.environ |= dict(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=60))
    shape = (hsdp_replicas, dist.get_world_size() // hsdp_replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return device, mesh if hsdp_replicas > 1 else mesh["shard"]


def fail(message):
    """Stop with one line. Every rank calls this at the same place; rank 0 speaks."""
    raise SystemExit(1 if int(os.environ.get("RANK", 0)) else f"error: {message}")


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a list of numbers over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op)
    return total.tolist()


# endregion


def stop_token_ids(args, tokenizer):
    """Every token that ends a response: the tokenizer's EOS and those of the model's generation config."""
    try:
        eos = GenerationConfig.from_pretrained(args.model).eos_token_id
    except OSError:  # a model without one
        eos = None
    return sorted({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None})


def check_args(args):
    """Stop on arguments that cannot work -> the model's Hugging Face directory or hub name."""
    for name in ("n_samples", "batch_size", "max_prompt_length", "max_response_length", "tp_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if (world := int(os.environ.get("WORLD_SIZE", 1))) % args.tp_size:
        raise ValueError(f"the number of ranks, {world}, is not a multiple of --tp_size {args.tp_size}")
    if os.path.lexists(args.output):
        raise ValueError(f"--output {args.output} is there already: choose another, or remove it")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)  # fails now, not after hours of sampling
    root, inside = Path(args.model), ("", "hf", "checkpoints/latest/hf")  # of a model, a checkpoint, a run
    found = [str(root / name) for name in inside if any((root / name).glob("*.safetensors"))]
    if root.is_dir() and not found:
        raise ValueError(f"--model {root}: no *.safetensors in it, in hf/ or in checkpoints/latest/hf/")
    return found[0] if found else args.model


def load_prompts(args, tokenizer):
    """The token ids of the prompts within --max_prompt_length, by number of the row, and the whole table."""
    prompts = [row[args.prompt_key] for row in load_rows(args.data, [args.prompt_key])]
    table = pq.read_table(args.data)
    if clash := [name for name in COLUMNS if name in table.column_names]:
        raise ValueError(f"{args.data}: it has a column {clash[0]!r} already; use the file without")
    chats = [p if isinstance(p, list) else [dict(role="user", content=str(p))] for p in prompts]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return {i: x for i, x in enumerate(ids) if len(x) <= args.max_prompt_length}, table


def build_engine(args, device):
    """A vLLM engine in this process, with the model's weights."""
    os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    import vllm

    cuda = device.type == "cuda"
    return vllm.LLM(
        model=args.model,
        skip_tokenizer_init=True,
        dtype="bfloat16" if cuda else "float32",  # as the trainers' samplers
        tensor_parallel_size=args.tp_size,
        distributed_executor_backend="external_launcher",
        max_model_len=args.max_prompt_length + args.max_response_length,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=None if cuda else 1 << 30,  # CPU: else a share of all memory
        enforce_eager=not cuda,
        use_tqdm_on_load=False,
        generation_config="vllm",  # not the model's own sampling defaults
        seed=args.seed,  # equal in a tensor-parallel group
    )


def generate(engine, prompts, args, tokenizer, stop_ids):
    """{row: token ids} -> {row: [its samples' COLUMNS]}. Seeds: as in a trainer's validation, step 0."""
    from vllm import SamplingParams

    sampling = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, detokenize=False)
    limits = dict(max_tokens=args.max_response_length, stop_token_ids=stop_ids)
    jobs, answers = [(index, sample) for index in prompts for sample in range(args.n_samples)], {}
    seeds = [int(np.random.SeedSequence((args.seed, 0, *job)).generate_state(1)[0]) for job in jobs]
    requests = [dict(prompt_token_ids=prompts[index]) for index, _ in jobs]
    params = [SamplingParams(seed=seed, **sampling, **limits) for seed in seeds]
    for (index, _), output in zip(jobs, engine.generate(requests, params, use_tqdm=False), strict=True):
        o = output.outputs[0]
        text = tokenizer.decode(o.token_ids, skip_special_tokens=True)
        answers.setdefault(index, []).append((text, len(o.token_ids), o.finish_reason))
    return answers


def main():
    # ---- arguments, data, model
    args = tyro.cli(Args, console_outputs=os.environ.get("RANK", "0") == "0")
    try:
        args.model = check_args(args)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        prompts, table = load_prompts(args, tokenizer)
        stop_ids, (device, _) = stop_token_ids(args, tokenizer), setup_distributed(hsdp_replicas=1)
        engine = build_engine(args, device)
    except (ValueError, OSError, jinja2.TemplateError) as error:
        fail(" ".join(str(error).split()))
    rank, world = dist.get_rank(), dist.get_world_size()

    # ---- sample: the ranks of a tensor-parallel group answer the same prompts
    answers, by_rank, start = {}, [None] * world, time.perf_counter()
    with tqdm(total=len(prompts), desc="prompt", dynamic_ncols=True, disable=rank > 0) as bar:
        for first in range(0, len(prompts), args.batch_size):
            batch = list(prompts.items())[first : first + args.batch_size]
            own = dict(batch[rank // args.tp_size :: world // args.tp_size])
            answers |= generate(engine, own, args, tokenizer, stop_ids)
            bar.update(len(batch))
    dist.gather_object(answers, by_rank if rank == 0 else None)

    # ---- write
    if rank == 0:
        answers = {i: row for part in by_rank for i, row in part.items()}
        too_long = [("", 0, "prompt_too_long")] * args.n_samples
        for column, name in enumerate(COLUMNS):
            values = [[a[column] for a in answers.get(i, too_long)] for i in range(table.num_rows)]
            table = table.append_column(name, pa.array(values))
        with replacing(args.output) as new:
            pq.write_table(table, new)
        tokens, seconds = sum(n for row in answers.values() for _, n, _ in row), time.perf_counter() - start
        print(f"{args.output}: {len(answers)} of {table.num_rows} prompts, {tokens / seconds:.0f} tokens/s")
    dist.barrier()  # the process group ends with the engine, at exit


if __name__ == "__main__":
    main()
