"""Sample responses to the prompts of a parquet file with vLLM: parquet in, the same rows with responses out.

1. The output does not depend on the number of ranks: a response's seed is a function of (seed, row, sample),
   and a sampler answers whole batches, cut by row, so that rounding is the same too.
2. Every batch is a shard on disk: the same command goes on with a killed run and ends in the same file.

CPU:        python algos/generate.py --model runs/grpo --data data/test.parquet --output test_out.parquet
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/generate.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/generate.md
"""

import json
import os
import shutil
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.arguments import parse


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
    batch_size: int = 128
    """Rows of a shard, which one sampler answers in one go."""
    max_prompt_length: int = 512
    """Limit of the prompt in tokens; a longer one gets empty responses."""
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


if __name__ == "__main__":
    flags = parse(Args)  # before the libraries below are loaded: a wrong flag is answered at once

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoTokenizer

from data_prep.atomic import replacing
from data_prep.schema import load_rows

COLUMNS = ("responses", "response_tokens", "finish_reasons")  # added to a row: lists, one entry a sample


def check_args(args, world):
    """Stop on arguments that cannot work -> the model's Hugging Face directory or hub name."""
    for name in ("n_samples", "batch_size", "max_prompt_length", "max_response_length", "tp_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if not (args.seed >= 0 and args.temperature >= 0 and 0 < args.top_p <= 1 and args.top_k >= -1):
        given = " ".join(
            f"--{name} {getattr(args, name)}" for name in ("seed", "temperature", "top_p", "top_k")
        )
        raise ValueError(f"{given}: it must be seed >= 0, temperature >= 0, 0 < top_p <= 1, top_k >= -1")
    if world % args.tp_size:
        raise ValueError(f"the number of ranks, {world}, is not a multiple of --tp_size {args.tp_size}")
    if os.path.lexists(args.output):
        raise ValueError(f"--output {args.output} is there already: choose another, or remove it")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)  # fails now, not after hours of sampling
    root, inside = Path(args.model), ("", "hf", "checkpoints/latest/hf")  # of a model, a checkpoint, a run
    found = [root / name for name in inside if any((root / name).glob("*.safetensors"))]
    if root.is_dir() and not found:
        raise ValueError(f"--model {root}: no *.safetensors in it, in hf/ or in checkpoints/latest/hf/")
    return str(found[0].resolve()) if found else args.model  # resolved: `latest` moves on while a run trains


def load_prompts(args, tokenizer):
    """The token ids of the prompts within --max_prompt_length, by number of the row, and the whole table."""
    prompts = [row[args.prompt_key] for row in load_rows(args.data, [args.prompt_key])]
    table = pq.read_table(args.data)
    if clash := [name for name in COLUMNS if name in table.column_names]:
        raise ValueError(f"{args.data}: it has a column {clash[0]!r} already; use the file without")
    chats = [p if isinstance(p, list) else [dict(role="user", content=str(p))] for p in prompts]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return {i: x for i, x in enumerate(ids) if len(x) <= args.max_prompt_length}, table


def plan_shards(args, prompts, rows):
    """{file of a shard: its rows}, and what decides on the responses, as JSON: every shard carries it."""
    made_by = asdict(args) | dict(data="", output="", gpu_memory_utilization="")  # these do not
    made_by["digest of the prompts"] = sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    folder, starts = Path(f"{args.output}.shards"), range(0, rows, args.batch_size)
    for path in sorted(folder.glob("*.parquet"))[:1]:
        there = json.loads(pq.read_schema(path).metadata[b"made_by"])
        if changes := [f"{k} {there.get(k)} there, {v} now" for k, v in made_by.items() if there.get(k) != v]:
            raise ValueError(f"{folder} has other arguments ({'; '.join(changes)}): use those, or remove it")
    shards = {folder / f"{i:08d}.parquet": range(i, min(i + args.batch_size, rows)) for i in starts}
    return shards, json.dumps(made_by)


def build_engine(args):
    """A vLLM engine in this process, with the model's weights."""
    os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", str(int(not torch.cuda.is_available())))  # C++ compiler
    warnings.filterwarnings("ignore", category=FutureWarning)
    import vllm
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Executor

    # CPU: vLLM names shared memory by what follows the last colon, "env://" in all runs of a machine
    arguments, run = Executor._distributed_args, f"{os.getppid()}-{os.environ.get('MASTER_PORT')}"
    Executor._distributed_args = lambda self: (f"env://:{run}", *arguments(self)[1:])
    cuda, torchrun = torch.cuda.is_available(), "RANK" in os.environ
    if torchrun:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")  # the ranks meet
    return vllm.LLM(
        model=args.model,
        skip_tokenizer_init=True,
        dtype="bfloat16" if cuda else "float32",  # as the trainers' samplers
        tensor_parallel_size=args.tp_size,
        distributed_executor_backend="external_launcher" if torchrun else None,
        max_model_len=args.max_prompt_length + args.max_response_length,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=None if cuda else 1 << 30,  # CPU: else a share of all memory
        enforce_eager=not cuda,
        # CAREFUL: for a prompt in chunks vLLM sets back the generator of its seed, which raises on a CPU
        enable_chunked_prefill=cuda,
        use_tqdm_on_load=False,
        generation_config="vllm",  # not the model's own sampling defaults, but its EOS tokens
        seed=args.seed,  # equal in a tensor-parallel group
    )


def generate(engine, rows, prompts, args, tokenizer):
    """Answer `rows` -> a table of their COLUMNS. Seeds: as in a trainer's validation, step 0."""
    from vllm import SamplingParams

    sampling = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, detokenize=False)
    limits = dict(max_tokens=args.max_response_length, stop_token_ids=[tokenizer.eos_token_id])
    jobs = [(row, sample) for row in rows if row in prompts for sample in range(args.n_samples)]
    seeds = [int(np.random.SeedSequence((args.seed, 0, *job)).generate_state(1)[0]) for job in jobs]
    requests = [dict(prompt_token_ids=prompts[row]) for row, _ in jobs]
    params = [SamplingParams(seed=seed, **sampling, **limits) for seed in seeds]
    engine.reset_prefix_cache()  # CAREFUL: what earlier batches left in it changes the rounding of this one
    answers = {row: [] if row in prompts else [("", 0, "prompt_too_long")] * args.n_samples for row in rows}
    for (row, _), output in zip(jobs, engine.generate(requests, params, use_tqdm=False), strict=True):
        o = output.outputs[0]
        text = tokenizer.decode(o.token_ids, skip_special_tokens=True)
        answers[row].append((text, len(o.token_ids), o.finish_reason))
    return pa.table(
        {name: [[a[i] for a in row] for row in answers.values()] for i, name in enumerate(COLUMNS)}
    )


def main(args):
    # ---- arguments, data, model
    rank, world = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))
    try:
        args.model = check_args(args, world)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        prompts, table = load_prompts(args, tokenizer)
        shards, made_by = plan_shards(args, prompts, table.num_rows)
        todo = [path for path in shards if not path.is_file()]  # before the ranks meet, so equal on all
        engine = build_engine(args)
    except (ValueError, OSError, jinja2.TemplateError) as error:
        raise SystemExit(1 if rank else "error: " + " ".join(str(error).split())) from None

    # ---- sample: every sampler, one rank or a tensor-parallel group, takes every N-th shard
    (sampler, follower), start = divmod(rank, args.tp_size), time.perf_counter()
    bar = tqdm(total=len(shards), initial=len(shards) - len(todo), desc="shards", disable=rank > 0)
    for path in todo[sampler :: world // args.tp_size]:
        answers = generate(engine, shards[path], prompts, args, tokenizer)
        if not follower:
            with replacing(path) as new:
                pq.write_table(answers.replace_schema_metadata(dict(made_by=made_by)), new)
        bar.update(sum(map(Path.is_file, shards)) - bar.n)

    # ---- write: the shards are where the ranks meet again
    if rank == 0:
        while bar.n < len(shards):
            time.sleep(0.5)
            bar.update(sum(map(Path.is_file, shards)) - bar.n)
        bar.close()
        seconds, answers = time.perf_counter() - start, {path: pq.read_table(path) for path in shards}
        tokens = sum(sum(map(sum, answers[path]["response_tokens"].to_pylist())) for path in todo)
        for name in COLUMNS:
            table = table.append_column(name, pa.concat_tables(answers.values())[name])
        with replacing(args.output) as new:
            pq.write_table(table, new)
        shutil.rmtree(f"{args.output}.shards")
        print(f"{args.output}: {len(prompts)} of {table.num_rows} prompts, {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main(Args(**flags))
