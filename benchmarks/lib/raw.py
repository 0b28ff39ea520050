"""The raw limits of a step, without a trainer: a bare LLM.generate, forward and backward, a large matmul.

throughput.py starts it with the ranks, threads, rows and token budget of the trainer. Every rank does its
share of the rows; a part takes as long as its slowest rank. Medians over --repeats, the parts taking turns.
"""

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data_prep.lib.cache import load_prompts
from system.arguments import command_line
from system.attention import packed_attention
from system.batches import one_row, padded, split_micro_batches
from system.metrics import matmul_speed
from system.ranks import all_reduce, leave, setup_distributed


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
    attn_implementation: str
    """Attention kernel of transformers; sdpa runs texts in one row."""
    compute_dtype: str
    """Precision."""
    max_tokens_per_microbatch: int
    """Tokens of a forward pass, padding included."""
    repeats: int = 3
    """Measurements of each part."""


def build_engine(args, prompts):
    """vLLM with its own defaults, but compiled no more than the trainers' (on a CPU not at all)."""
    os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    import vllm

    cuda, set_num_threads = torch.cuda.is_available(), torch.set_num_threads
    engine = vllm.LLM(
        model=args.model,
        dtype=args.compute_dtype,
        distributed_executor_backend="external_launcher",
        max_model_len=max(map(len, prompts)) + args.response_length,
        kv_cache_memory_bytes=None if cuda else 1 << 30,
        gpu_memory_utilization=0.5,
        enforce_eager=not cuda,
    )
    torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it
    return engine


def generate(engine, prompts, args):
    """Sample group_size responses to each prompt with their log-probs -> rows of (prompt, response)."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    sampling = dict(
        temperature=args.temperature, max_tokens=args.response_length, logprobs=0, detokenize=False
    )
    prompts = [p for p in prompts for _ in range(args.group_size)]
    params = [SamplingParams(seed=i, **sampling) for i in range(len(prompts))]
    outputs = engine.generate([dict(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    return [(p, list(o.outputs[0].token_ids)) for p, o in zip(prompts, outputs, strict=True)]


def sequences(rows, args):
    """Numbers of the rows that a trainer computes as one, and the tokens of each: see `distribute`."""
    prompts, responses = zip(*rows, strict=True)
    fit = (args.max_tokens_per_microbatch - max(map(len, prompts))) // max(map(len, responses))
    fit, size = max(1, fit) if args.attn_implementation != "eager" else 1, args.group_size or 1
    parts = [
        list(range(i, min(i + fit, g + size)))
        for g in range(0, len(rows), size)
        for i in range(g, g + size, fit)
    ]
    return parts, [len(prompts[part[0]]) + sum(len(responses[i]) for i in part) for part in parts]


def losses(model, rows, args, device):
    """Cross-entropy of the responses, a micro-batch at a time, in the trainers' layout."""
    layout = padded if args.attn_implementation == "eager" else one_row
    prompts, responses = zip(*rows, strict=True)
    parts, tokens = sequences(rows, args)
    for part in split_micro_batches(tokens, args.max_tokens_per_microbatch, layout is not padded):
        part = [i for s in part for i in parts[s]]
        target = torch.tensor([token for i in part for token in responses[i]])
        inputs, where = layout([prompts[i] for i in part], [responses[i] for i in part])
        inputs = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
        output = model.base_model(**inputs, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1)[where.to(device)]
        yield nn.functional.cross_entropy(model.get_output_embeddings()(hidden).float(), target.to(device))


def main():
    args = command_line(Args)
    device, _ = setup_distributed()
    rank, world, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, args.compute_dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    examples = load_prompts([args.train_files], tokenizer, 10**9)[0][rank::world]
    prompts, eos = [x["prompt_ids"] for x in examples], tokenizer.eos_token_id
    engine = build_engine(args, prompts) if args.group_size else None
    if engine:
        generate(engine, prompts, args)  # warm-up
    AttentionInterface.register("packed", packed_attention)
    attention = "eager" if args.attn_implementation == "eager" else "packed"
    options = dict(dtype=dtype, attn_implementation=attention)
    model = AutoModelForCausalLM.from_pretrained(args.model, **options).to(device)
    seconds, cpu = ({name: [] for name in ("generate", "forward", "train")} for _ in range(2))

    def timed(name, function):
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        result = function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] += all_reduce([time.perf_counter() - begin], dist.ReduceOp.MAX)
        cpu[name] += all_reduce([time.process_time() - cpu_begin])
        return result

    def forward():
        with torch.no_grad():
            for loss in losses(model, rows, args, device):
                loss.item()

    def train():
        for loss in losses(model, rows, args, device):
            loss.backward()
        model.zero_grad()

    if args.group_size:
        answer = torch.randint(model.config.vocab_size, (args.response_length,)).tolist()
        rows = [(p, answer) for p in prompts for _ in range(args.group_size)]
    else:
        rows = [
            (x["prompt_ids"], tokenizer.encode(x["extra_info"]["answer"], add_special_tokens=False) + [eos])
            for x in examples
        ]
    list(map(torch.Tensor.backward, losses(model, rows[: args.group_size or 2], args, device)))  # warm-up
    for _ in range(args.repeats):
        if engine:
            rows = timed("generate", lambda: generate(engine, prompts, args))
        timed("forward", forward)
        timed("train", train)
    result = {f"{name}_s": statistics.median(values) for name, values in seconds.items() if values}
    result |= {f"{name}_cpu_s": statistics.median(values) for name, values in cpu.items() if values}
    # as perf/mfu/actor: 6 a weight and token, and causal attention's 6 L H T^2 a row
    weights, config = sum(p.numel() for p in model.parameters()), model.config
    lengths = sequences(rows, args)[1]
    flops = sum(6 * n * (weights + config.num_hidden_layers * config.hidden_size * n) for n in lengths)
    result["train_flops"] = all_reduce([flops])[0]
    result["matmul_flops_per_s"] = all_reduce([matmul_speed(args.compute_dtype)])[0]
    if rank == 0:
        args.output.write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
