"""The raw limits of a step, without a trainer: a bare LLM.generate, forward and backward of transformers.

throughput.py starts it with the threads, rows and token budget of the trainer. Medians of three, the parts
taking turns.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.workload import BUDGET, row_of
from data_prep.lib.cache import load_prompts
from system import cpu
from system.arguments import command_line
from system.batches import distribute, join, one_row, padded, split_micro_batches, token_count
from system.gpu import send
from system.model import packed_if_possible, read_config
from system.ranks import leave, setup_distributed


@dataclass
class Args:
    model: str
    """Hugging Face directory of the model."""
    train_files: str
    """Parquet file of one step's rows."""
    output: Path
    """JSON file for the seconds of each part."""
    group_size: int
    """Responses to each prompt; 0: the rows' own answers (SFT)."""
    response_length: int
    """Tokens of each response."""
    temperature: float
    """Sampling temperature."""


def read_rows(args):
    """The rows of a step; responses that are sampled are random tokens here."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts, _ = load_prompts([args.train_files], tokenizer, 10**9)
    rng = np.random.default_rng(0)
    rows = []
    for group, prompt in enumerate(prompts):
        if args.group_size:
            shape = args.group_size, args.response_length
            responses = rng.integers(len(tokenizer), size=shape).tolist()
        else:
            answer = tokenizer.encode(prompt["extra_info"]["answer"], add_special_tokens=False)
            responses = [answer + [tokenizer.eos_token_id]]
        rows += [row_of(group, prompt["prompt_ids"], response) for response in responses]
    return rows


def build_engine(args, rows, dtype, cuda):
    """vLLM with its own defaults, but compiled no more than the trainers' (on a CPU not at all)."""
    with cpu.own_vllm():
        import vllm

        return vllm.LLM(
            model=args.model,
            dtype=dtype,
            distributed_executor_backend="external_launcher",
            max_model_len=max(row["prompt_length"] for row in rows) + args.response_length,
            kv_cache_memory_bytes=None if cuda else 1 << 30,
            gpu_memory_utilization=0.5,
            enforce_eager=not cuda,
        )


def generate(engine, rows, args):
    """Sample a response to the prompt of each row, with log-probs."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    params = []
    for seed in range(len(rows)):
        options = dict(seed=seed, temperature=args.temperature, max_tokens=args.response_length)
        params.append(SamplingParams(**options, logprobs=0, detokenize=False))
    engine.generate([dict(prompt_token_ids=row["prompt_ids"]) for row in rows], params, use_tqdm=False)


def cross_entropy(lm, rows, layout):
    """Of the responses of rows, by transformers' model alone; layout: `padded` or `one_row`."""
    responses = [row["response_ids"] for row in rows]
    inputs, where = layout([row["prompt_ids"] for row in rows], responses)
    inputs = {name: send(x) for name, x in inputs.items()}
    hidden = lm.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[send(where)]
    logits = lm.get_output_embeddings()(hidden)
    return nn.functional.cross_entropy(logits.float(), send(join(responses)))


def main():
    args = command_line(Args)
    device, _ = setup_distributed()
    cuda = device.type == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    rows = read_rows(args)
    attention = packed_if_possible("sdpa", read_config(args.model))
    packed = attention == "packed"
    layout = one_row if packed else padded
    # in micro-batches as the trainers'
    [(sequences, _)], _, _ = distribute(rows, 1, BUDGET, packed)
    batches = []
    for numbers in split_micro_batches([token_count(x) for x in sequences], BUDGET, packed):
        batches.append([row for i in numbers for row in sequences[i]])

    parts = {}
    if args.group_size:
        engine = build_engine(args, rows, dtype, cuda)
        parts["generate"] = lambda: generate(engine, rows, args)
    lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=attention)
    lm.to(device)

    @torch.no_grad()
    def forward():
        for batch in batches:
            cross_entropy(lm, batch, layout).item()

    def train():
        for batch in batches:
            cross_entropy(lm, batch, layout).backward()
        lm.zero_grad()

    parts |= dict(forward=forward, train=train)
    seconds = {name: [] for name in parts}
    for _ in range(4):
        for name, part in parts.items():
            begin = time.perf_counter()
            part()
            if cuda:
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    # the first is a warm-up
    args.output.write_text(json.dumps({name: statistics.median(x[1:]) for name, x in seconds.items()}))
    leave()


if __name__ == "__main__":
    main()
