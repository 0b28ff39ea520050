"""Sample responses to the prompts of a parquet file with vLLM: parquet in, the same rows with responses out.

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
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, parse, refuse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")


@dataclass
class Args:
    model: str  # directory of a run (its latest checkpoint), of a checkpoint or a model, or a hub name
    data: str  # parquet file of prompts
    output: str  # parquet file to write; it must not exist
    prompt_key: str = "prompt"  # column of the prompt: chat messages, or a string, the user's message
    chat_template: str | None = None  # Jinja file in place of the model's chat template
    chat_template_kwargs: str = "{}"  # values of its variables, as JSON: {"enable_thinking": false}
    seed: int = 1  # seed for sampling
    n_samples: int = 1  # responses to each prompt
    batch_size: int = 128  # rows of a shard, answered by one sampler at once
    max_prompt_length: int = 512  # limit of the prompt in tokens; a longer one gets empty responses
    max_response_length: int = 1024  # limit of the response in tokens
    temperature: float = 0.0  # sampling temperature; 0: the most likely token
    top_p: float = 1.0  # nucleus sampling; 1: off
    top_k: int = -1  # top-k sampling; -1: off
    tp_size: int = 1  # ranks that share one sampler by tensor parallelism
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory that the sampler takes
    env: str | None = None  # FILE.py:NAME of an environment or of tools, as in agent.py; None: one turn
    max_turns: int = 8  # with env: turns of the model in a response
    max_observation_length: int = 256  # with env: limit in tokens of a message of the environment
    env_timeout_s: float = 30.0  # with env: seconds that an environment has to answer a turn
    tool_parser: str | None = None  # with env: vLLM's parser of calls; None: what reads the template's


if __name__ == "__main__":
    flags = parse(Args)  # before the libraries below are loaded: a wrong flag is answered at once

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig

from data_prep.lib.images import encode_prompt, image_token_ids, load_processor, request
from data_prep.lib.replies import asked, opens_only
from data_prep.lib.schema import read_rows
from data_prep.lib.source import Source
from data_prep.lib.templates import given_by, use_template
from envs.calls import learn_calls, observation
from envs.messages import Unrenderable, shorten
from envs.pool import EnvPool
from rewards.manager import check_environments
from system import cpu
from system.families import hf_overrides, takes_images, vllm_names
from system.files import HELD, content, hold, model_content, replacing

COLUMNS = ("responses", "response_tokens", "finish_reasons", "episodes")  # the last one with --env
ENV_WORKERS = 8  # environments of a rank that work at the same time
EPISODE = ("turns", "messages", "env_reward", "failure")  # in that column, as JSON


def check_paths(args):
    """Stop on paths that cannot work -> the model's Hugging Face directory or hub name."""
    root, inside = Path(args.model), ("", "hf", "checkpoints/latest/hf")  # of a model, a checkpoint, a run
    found = [root / name for name in inside if any((root / name).glob("*.safetensors"))]
    empty = root.is_dir() and not found
    refuse(
        (os.path.lexists(args.output), f"--output {args.output} exists: choose another, or remove it"),
        ({*"[*"} & {*str(root)}, f"--model {root}: vLLM finds no files in a path with [ or *: rename it"),
        (empty, f"--model {root}: no *.safetensors in it, in hf/ or in checkpoints/latest/hf/"),
    )
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)  # fails now, not after hours of sampling
    return str(found[0].resolve()) if found else args.model  # resolved: `latest` moves on while a run trains


def load_prompts(args, tokenizer, tools):
    """The prompts within --max_prompt_length, by row number; their file; how many rows it has."""
    source, sees, prompts = Source(args.data), takes_images(args.model, (args.data,)), {}
    refuse((sees and args.env, f"--env {args.env}: {args.model} takes images, which turns do not"))
    about = dict(extra_info="extra_info") if args.env and "extra_info" in source.names else {}
    batches = read_rows(args.data, dict(prompt=args.prompt_key) | about)
    for i, row in enumerate(chain.from_iterable(batches)):
        if row["images"] and not sees:
            fail(f"{args.data}: row {i} has images, which {args.model} does not take")
        try:
            asked(row["prompt"])
            prompt = encode_prompt(row, tokenizer, given_by(row, tools, tokenizer))
        except ValueError as error:
            fail(f"{args.data}: row {i}: {args.prompt_key}: {' '.join(str(error).split())}")
        if 0 < len(prompt["prompt_ids"]) <= args.max_prompt_length:
            prompts[i] = prompt | dict(images=row["images"], extra_info=row.get("extra_info", {}))
    if not prompts:
        fail(f"{args.data}: no prompt of 1 to {args.max_prompt_length} tokens (--max_prompt_length)")
    if taken := [name for name in COLUMNS if name in source.schema.names]:
        fail(f"{args.data}: it has columns {' '.join(taken)} already: use the file without")
    return prompts, source, i + 1


def plan_shards(args, prompts, rows):
    """{file of a shard: its rows}, and what decides on the responses, as JSON: every shard carries it."""
    made_by = asdict(args) | dict(model="", data="", output="", gpu_memory_utilization="")  # these do not
    text = json.dumps(prompts, default=lambda image: sha256(image).hexdigest())
    made_by |= {flag: content(vars(args)[flag] or "") for flag in ("chat_template", "env")}
    made_by |= {f"{file} of the model": digest for file, digest in model_content(args.model).items()}
    made_by["digest of the prompts"] = sha256(text.encode()).hexdigest()[:16]
    folder, starts = Path(f"{args.output}.shards"), range(0, rows, args.batch_size)
    for path in sorted(folder.glob("*.parquet"))[:1]:
        old = json.loads(pq.read_schema(path).metadata[b"made_by"])
        if changes := [f"{k} {old.get(k)} there, {v} now" for k, v in made_by.items() if old.get(k) != v]:
            raise ValueError(f"{folder} has other arguments ({'; '.join(changes)}): use those, or remove it")
    shards = {folder / f"{i:08d}.parquet": range(i, min(i + args.batch_size, rows)) for i in starts}
    return shards, json.dumps(made_by)


def build_engine(args):
    """A vLLM engine in this process, with the model's weights."""
    cuda, torchrun = torch.cuda.is_available(), "RANK" in os.environ
    config, sees = AutoConfig.from_pretrained(args.model), takes_images(args.model, (args.data,))
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


# region turns
def converse(engine, rows, pool, tokenizer, args, **sampling):
    """Let the sampler and each row's environment (pool None: none) talk in turns, until all have ended.

    No row waits for another: its environment works while the sampler writes for others.
    rows: dicts with prompt_ids, extra_info and `entropy`, numbers that seed the sampling. This adds
    response_ids, all that follows the prompt; answer_ids, of the last turn without the token that ended it;
    finish_reason: stop, length, turns, or timeout, crash, error of the environment; and more.
    Returns the seconds in which the sampler had nothing to do.
    """
    from vllm.distributed import get_tp_group

    tp_group, waiting, idle = get_tp_group(), set(), 0.0
    for i, row in enumerate(rows):
        row |= dict(response_ids=[], turns=0, messages=[])
        row |= dict(cut_observations=0, env_reward=None, failure=None)
        ask(engine, i, row, args, sampling)
    while engine.has_unfinished_requests() or waiting:
        for done in engine.step() if engine.has_unfinished_requests() else ():
            i = int(done.request_id)
            text = add_turn(rows[i], done.outputs[0], tokenizer)
            if pool and rows[i]["finish_reason"] == "stop":
                waiting.add(i)
                if tp_group.is_first_rank:  # it asks the environments for all of its group
                    pool.step(i, text, rows[i]["extra_info"])
        if not waiting:
            continue
        begin = time.perf_counter()
        nothing_to_sample = not engine.has_unfinished_requests()
        answers = pool.answers(wait=nothing_to_sample) if tp_group.is_first_rank else []
        answers = tp_group.broadcast_object(answers)
        if nothing_to_sample:
            idle += time.perf_counter() - begin
        for answer in answers:
            i = answer["key"]
            waiting.remove(i)
            if add_answer(rows[i], answer, pool.tools, tokenizer, args):
                ask(engine, i, rows[i], args, sampling)
    if pool:
        pool.clear()
    return idle


def ask(engine, i, row, args, sampling):
    """Request the next turn of row number i."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    turn = [row["turns"]] if row["turns"] else []  # the first turn is seeded as in grpo.py
    [seed] = np.random.SeedSequence((*row["entropy"], *turn)).generate_state(1)
    room = args.max_response_length - len(row["response_ids"])
    options = dict(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    params = SamplingParams(seed=int(seed), max_tokens=room, **options, **sampling)
    engine.add_request(str(i), request(row, row["response_ids"]), params)


def add_turn(row, output, tokenizer):
    """Add a turn of the model to its row -> the text of the turn."""
    row["response_ids"] += output.token_ids
    ended = output.finish_reason == "stop"  # by its last token
    answer_ids = output.token_ids[: len(output.token_ids) - ended]
    row |= dict(answer_ids=answer_ids, finish_reason=output.finish_reason)
    row["turns"] += 1
    text = tokenizer.decode(answer_ids)  # with special tokens: some mark thoughts and calls
    row["messages"].append(dict(role="assistant", content=text))
    return text


def add_answer(row, answer, tools, tokenizer, args):
    """Add what its environment answered to a row -> whether the model has another turn."""
    if answer["failure"]:
        row |= dict(failure=answer["failure"], finish_reason=answer["failure"].partition(":")[0])
        return False
    row["env_reward"] = answer["reward"]
    if not answer["messages"]:
        return False
    try:
        messages, longer = shorten(tokenizer, answer["messages"], args.max_observation_length)
        ids = observation(tokenizer, messages, tools, row["response_ids"][-1])
    except Unrenderable as error:
        row |= dict(failure=f"error: {error}", finish_reason="error")
        return False
    full = len(row["response_ids"]) + len(ids) >= args.max_response_length  # no room for a token
    if full or row["turns"] == args.max_turns:
        row["finish_reason"] = "turns" if row["turns"] == args.max_turns else "length"
        return False
    row["response_ids"] += ids
    row["messages"] += messages
    row["cut_observations"] += longer
    return True


# endregion


def generate(engine, rows, prompts, args, tokenizer, pool):
    """Answer `rows` -> a table of their columns. Seeds: as in a trainer's validation, step 0."""
    sampling = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    sampling["stop_token_ids"] = pool.ends if pool else [tokenizer.eos_token_id]
    jobs = [(row, sample) for row in rows if row in prompts for sample in range(args.n_samples)]
    if takes_images(args.model, (args.data,)):
        sampling["logit_bias"] = dict.fromkeys(image_token_ids(engine.model_config.hf_config), -100.0)
    talks = [dict(prompts[i], entropy=(args.seed, 0, i, n)) for i, n in jobs]
    engine.reset_prefix_cache()  # CAREFUL: what earlier batches left in it changes the rounding of this one
    converse(engine, talks, pool, tokenizer, args, **sampling)
    check_environments(talks)
    too_long = "", 0, "prompt_too_long", "{}"
    answers = {row: [] if row in prompts else [too_long] * args.n_samples for row in rows}
    for (row, _), talk in zip(jobs, talks, strict=True):
        text, prompt = (tokenizer.decode(ids) for ids in (talk["answer_ids"], talk["prompt_ids"][-20:]))
        turns = [m["content"] for m in talk["messages"] if m["role"] == "assistant"]
        reason = talk["finish_reason"]
        if reason == "stop" and any(opens_only(turn, prompt) for turn in turns):
            reason = "thought"
        episode = json.dumps({name: talk[name] for name in EPISODE})
        answers[row].append((text, len(talk["response_ids"]), reason, episode))
    names = COLUMNS if args.env else COLUMNS[:-1]  # lists, one entry a sample
    return pa.table({name: [[a[i] for a in row] for row in answers.values()] for i, name in enumerate(names)})


def main(args):
    # ---- arguments, data, model
    rank, world = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))
    try:
        args.model = check_paths(args)
        tokenizer = load_processor(args.model, sees=takes_images(args.model, (args.data,)))
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        options = ENV_WORKERS, args.env_timeout_s, args.tool_parser
        pool = EnvPool(args.env, *options) if args.env else None
        prompts, source, count = load_prompts(args, tokenizer, pool and learn_calls(pool, tokenizer))
        hold(Path(f"{args.output}.shards"), f"--output {args.output}")
        shards, made_by = plan_shards(args, prompts, count)
        todo = [path for path in shards if not path.is_file()]  # before the ranks meet, so equal on all
        engine = build_engine(args)
    except (ValueError, OSError) as error:
        raise SystemExit(1 if rank else "error: " + " ".join(str(error).split())) from None

    # ---- sample: every sampler, one rank or a tensor-parallel group, takes every N-th shard
    (sampler, follower), start = divmod(rank, args.tp_size), time.perf_counter()
    bar = tqdm(total=len(shards), initial=len(shards) - len(todo), desc="shards", disable=rank > 0)
    for path in todo[sampler :: world // args.tp_size]:
        answers = generate(engine, shards[path], prompts, args, tokenizer, pool)
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
        seconds = time.perf_counter() - start
        sampled = (pq.read_table(path, columns=["response_tokens"])[0].to_pylist() for path in todo)
        tokens = sum(sum(map(sum, rows)) for rows in sampled)
        with replacing(args.output) as new:
            source.write(new, map(pq.read_table, shards))
        HELD.pop(Path(f"{args.output}.shards")).close()  # NFS does not remove a directory with an open file
        shutil.rmtree(f"{args.output}.shards")
        print(f"{args.output}: {len(prompts)} of {count} prompts, {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main(Args(**flags))
