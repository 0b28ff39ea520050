"""Sample responses to the prompts of a file with vLLM: rows in, the same rows with responses out, as parquet.

1. The output does not depend on the number of ranks: a response's seed is a function of (seed, row, sample),
   and a sampler answers whole batches, cut by row. So rounding is the same too.
2. Every batch is a shard on disk: the same command resumes a killed run and gives the same file.

CPU:        python algos/generate.py --model runs/grpo --data data/test.parquet --output test_out.parquet
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/generate.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/guides/evaluate.md
"""

import json
import os
import shutil
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, one_line_errors, parse, refuse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")


@dataclass
class Args:
    model: str  # directory of a run (its latest checkpoint), of a checkpoint or a model, or a hub name
    data: str  # file of prompts
    output: str  # parquet file to write; it must not exist
    prompt_key: str = "prompt"  # column of the prompt: chat messages, or a string (one user message)
    chat_template: str | None = None  # Jinja file in place of the model's chat template
    chat_template_kwargs: str = "{}"  # values of its variables, as JSON: {"enable_thinking": false}
    seed: int = 1  # with --temperature: seed for sampling
    n_samples: int = 1  # with --temperature or --env: responses to each prompt
    batch_size: int = 128  # rows of a shard, answered by one sampler at once
    max_prompt_length: int = 512  # limit of the prompt in tokens; a longer one gets empty responses
    max_response_length: int = 1024  # limit of the response in tokens
    temperature: float = 0.0  # sampling temperature; 0: the most likely token
    top_p: float = 1.0  # with --temperature: nucleus sampling; 1: off
    top_k: int = -1  # with --temperature: top-k sampling; -1: off
    tp_size: int = 1  # ranks that share one sampler by tensor parallelism
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory that the sampler takes
    env: str | None = None  # FILE.py:NAME of an environment or of tools, as in agent.py; None: one turn
    max_turns: int = 8  # with --env: turns of the model in a response
    max_observation_length: int = 256  # with --env: limit in tokens of a message of the environment
    env_timeout_s: float = 30.0  # with --env: seconds that an environment has to answer a turn
    tool_parser: str | None = None  # with --env: vLLM's parser of calls; None: what reads the template's


if __name__ == "__main__":
    flags = parse(Args)  # before the libraries below are loaded: a wrong flag is answered at once

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig

from data_prep.lib.conversations import RL, check_prompt
from data_prep.lib.images import encode_prompt, image_token_ids, load_processor
from data_prep.lib.schema import read_rows
from data_prep.lib.source import Source
from data_prep.lib.templates import given_by, use_template
from envs.calls import learn_calls
from envs.pool import EnvPool
from rewards.manager import check_environments
from system import cpu
from system.families import hf_overrides, takes_images, vllm_names
from system.files import HELD, digest_of_file, digests_of_model, hold, replacing
from system.thoughts import after_thought, with_opening
from system.turns import ENV_WORKERS, Limits, converse

COLUMNS = ("responses", "response_tokens", "finish_reasons", "episodes")  # the last one with --env
EPISODE = ("turns", "messages", "env_reward", "failure")  # in that column, as JSON


def check_paths(args):
    """Stop on paths that cannot work -> the model's Hugging Face directory or hub name."""
    root, inside = Path(args.model), ("", "hf", "checkpoints/latest/hf")  # of a model, a checkpoint, a run
    found = [root / name for name in inside if any((root / name).glob("*.safetensors"))]
    empty = root.is_dir() and not found
    share = args.gpu_memory_utilization
    on_cpu = share != Args.gpu_memory_utilization and not torch.cuda.is_available()
    refuse(
        (os.path.lexists(args.output), f"--output {args.output} exists: choose another, or remove it"),
        ({*"[*"} & {*str(root)}, f"--model {root}: vLLM finds no files in a path with [ or *: rename it"),
        (on_cpu, f"--gpu_memory_utilization {share} needs a GPU"),
        (empty, f"--model {root}: no *.safetensors in it, in hf/ or in checkpoints/latest/hf/"),
    )
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)  # fails now, not after hours of sampling
    return str(found[0].resolve()) if found else args.model  # resolved: `latest` moves on while a run trains


def load_prompts(args, tokenizer, tools):
    """The prompts within --max_prompt_length, by row number; their file; how many rows it has."""
    source = Source(args.data)
    sees = takes_images(args.model, (args.data,))
    refuse((sees and args.env, f"--env {args.env}: {args.model} takes images, which turns do not"))
    columns = dict(prompt=args.prompt_key)
    if args.env:  # which reads what a reward does
        columns = RL | columns
    prompts = {}
    count = 0
    for row in chain.from_iterable(read_rows(args.data, columns)):
        where = f"{args.data}: row {count}"
        if row["images"] and not sees:
            fail(f"{where} has images, which {args.model} does not take")
        with one_line_errors(f"{where}: {args.prompt_key}: "):
            check_prompt(row["prompt"])
            prompt = encode_prompt(row, tokenizer, given_by(row, tools, tokenizer))
        if 0 < len(prompt["prompt_ids"]) <= args.max_prompt_length:
            prompt["prompt_ids"] = np.array(prompt["prompt_ids"], np.int32)  # a list takes nine times as much
            prompts[count] = prompt | dict(images=row["images"], extra_info=row.get("extra_info", {}))
        count += 1
    if not prompts:
        fail(f"{args.data}: no prompt of 1 to {args.max_prompt_length} tokens (--max_prompt_length)")
    taken = [name for name in COLUMNS if name in source.schema.names]
    if taken:
        fail(f"{args.data}: it has columns {' '.join(taken)} already: use the file without")
    return prompts, source, count


def plan_shards(args, prompts, rows):
    """{file of a shard: its rows}, and what decides on the responses, as JSON: every shard carries it."""
    made_by = asdict(args) | dict(model="", data="", output="", gpu_memory_utilization="")  # these do not
    for flag in ("chat_template", "env"):
        made_by[flag] = digest_of_file(vars(args)[flag] or "")
    for file, digest in digests_of_model(args.model).items():
        made_by[f"{file} of the model"] = digest
    digest = sha256()
    for item in prompts.items():
        text = json.dumps(item, default=lambda data: sha256(data).hexdigest())  # of token ids and images
        digest.update(text.encode())
    made_by["digest of the prompts"] = digest.hexdigest()[:16]
    folder = Path(f"{args.output}.shards")
    for path in sorted(folder.glob("*.parquet"))[:1]:
        old = json.loads(pq.read_schema(path).metadata[b"made_by"])
        changes = [f"{k} {old.get(k)} there, {v} now" for k, v in made_by.items() if old.get(k) != v]
        if changes:
            raise ValueError(f"{folder} has other arguments ({'; '.join(changes)}): use those, or remove it")
    shards = {}
    for i in range(0, rows, args.batch_size):
        shards[folder / f"{i:08d}.parquet"] = range(i, min(i + args.batch_size, rows))
    return shards, json.dumps(made_by)


def build_engine(args):
    """A vLLM engine in this process, with the model's weights."""
    cuda = torch.cuda.is_available()
    torchrun = "RANK" in os.environ
    config = AutoConfig.from_pretrained(args.model)
    sees = takes_images(args.model, (args.data,))
    quantized = hasattr(config, "quantization_config")
    if torchrun:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")  # the ranks meet
    with cpu.own_vllm():
        import vllm
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader as Loader
        from vllm.usage.usage_lib import UsageContext

        cpu.check_format(args.model, config)
        load = Loader.get_all_weights
        Loader.get_all_weights = lambda self, to, lm: vllm_names(load(self, to, lm), config, to.hf_config)
        options = vllm.EngineArgs(
            model=args.model,
            hf_overrides={} if quantized else hf_overrides(config, sees),
            language_model_only=not sees,
            skip_tokenizer_init=not sees,
            mm_hasher_algorithm="sha256",  # of images: the default is a package of its own
            dtype="auto" if quantized else "bfloat16" if cuda else "float32",  # as the trainers' samplers
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
            disable_log_stats=True,
        )
        return vllm.LLMEngine.from_engine_args(options, UsageContext.LLM_CLASS)  # limits of vllm.LLM


def generate(engine, rows, prompts, args, tokenizer, pool):
    """Answer `rows` -> a table of their columns. Seeds: as in a trainer's validation, step 0."""
    sampling = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    sampling["stop_token_ids"] = pool.ends if pool else [tokenizer.eos_token_id]
    if takes_images(args.model, (args.data,)):
        sampling["logit_bias"] = dict.fromkeys(image_token_ids(engine.model_config.hf_config), -100.0)
    talks = []
    for row in rows:
        if row in prompts:
            ids = prompts[row]["prompt_ids"].tolist()
            for sample in range(args.n_samples):
                seed = args.seed, 0, row, sample
                talks.append(dict(prompts[row], prompt_ids=ids, row=row, seed=seed))
    engine.reset_prefix_cache()  # CAREFUL: what earlier batches left in it changes the rounding of this one
    limits = Limits(args.max_response_length, args.max_turns, args.max_observation_length)
    converse(engine, talks, pool, tokenizer, limits, **sampling)
    check_environments(talks)

    too_long = "", 0, "prompt_too_long", "{}"
    answers = {row: [] if row in prompts else [too_long] * args.n_samples for row in rows}
    for talk in talks:
        prompt = tokenizer.decode(talk["prompt_ids"][-20:])
        turns = [m["content"] for m in talk["messages"] if m["role"] == "assistant"]
        reason = talk["finish_reason"]
        if reason == "stop" and any(after_thought(turn, prompt) is None for turn in turns):
            reason = "thought"
        text = with_opening(tokenizer.decode(talk["answer_ids"]), prompt)
        episode = json.dumps({name: talk[name] for name in EPISODE})
        answers[talk["row"]].append((text, len(talk["response_ids"]), reason, episode))
    table = {}
    for i, name in enumerate(COLUMNS if args.env else COLUMNS[:-1]):  # lists, one entry a sample
        table[name] = [[answer[i] for answer in row] for row in answers.values()]
    return pa.table(table)


def with_source(answers, source, about):
    """Answers with metadata and, if their file has no data sources, its name: eval.py pairs files by them."""
    if "data_source" not in source.schema.names:
        answers = answers.append_column("data_source", pa.array([Path(source.path).name] * len(answers)))
    return answers.replace_schema_metadata(about)


def count_done(waiting, bar):
    """Take the shards at the front that any rank has written; ranks write them in about this order."""
    while waiting and waiting[0].is_file():
        waiting.popleft()
        bar.update()


def main(args):
    # ---- arguments, data, model
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    with one_line_errors():
        args.model = check_paths(args)
        tokenizer = load_processor(args.model, sees=takes_images(args.model, (args.data,)))
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        pool = None
        if args.env:
            pool = EnvPool(args.env, ENV_WORKERS, args.env_timeout_s, args.tool_parser)
        tools = learn_calls(pool, tokenizer) if pool else None
        prompts, source, count = load_prompts(args, tokenizer, tools)
        hold(Path(f"{args.output}.shards"), f"--output {args.output}")
        shards, made_by = plan_shards(args, prompts, count)
        todo = [path for path in shards if not path.is_file()]  # before the ranks meet, so equal on all
        if todo and rank == 0:
            print(
                f"{len(prompts)} of {count} prompts, {len(todo)} of {len(shards)} shards to do; starting vLLM"
            )
        engine = build_engine(args)

    # ---- sample: every sampler, one rank or a tensor-parallel group, takes every N-th shard
    sampler, follower = divmod(rank, args.tp_size)
    start = time.perf_counter()
    bar = tqdm(total=len(shards), initial=len(shards) - len(todo), desc="shards", disable=rank > 0)
    waiting = deque(todo)
    for path in todo[sampler :: world // args.tp_size]:
        answers = generate(engine, shards[path], prompts, args, tokenizer, pool)
        if not follower:
            with replacing(path) as new:
                pq.write_table(answers.replace_schema_metadata(dict(made_by=made_by)), new)
        count_done(waiting, bar)

    # ---- write: the shards are where the ranks meet again
    if rank == 0:
        while waiting:
            time.sleep(0.5)
            count_done(waiting, bar)
        bar.close()
        seconds = time.perf_counter() - start
        tokens = 0
        for path in todo:
            for row in pq.read_table(path, columns=["response_tokens"])[0].to_pylist():
                tokens += sum(row)
        with replacing(args.output) as new:
            about = dict(prompt_key=args.prompt_key)  # what a judge is shown by eval.py
            source.write(new, (with_source(pq.read_table(path), source, about) for path in shards))
        HELD.pop(Path(f"{args.output}.shards")).close()  # NFS does not remove a directory with an open file
        shutil.rmtree(f"{args.output}.shards")
        print(f"{args.output}: {len(prompts)} of {count} prompts, {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main(Args(**flags))
