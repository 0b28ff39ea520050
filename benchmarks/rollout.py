"""Tokens per second of generate.py's sampling against a bare vLLM loop on the same prompts.

Command:    python benchmarks/rollout.py --model models/smollm2 --data data/gsm8k/test.parquet
The bare loop is one call of `LLM.generate` for all prompts, without seeds, shards or text. The two take turns
on one engine after a warm-up. The ratio within a pair counts, not the figures alone; start-up is not counted.
On a CPU that others use too, compare the tokens per second of processor time.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos import generate
from data_prep.atomic import replacing


@dataclass
class Args:
    model: str
    """A run's directory, a checkpoint, a Hugging Face directory or a hub name."""
    data: str
    """Parquet file of prompts."""
    rows: int = 64
    """Prompts, from the start of the file."""
    n_samples: int = 4
    """Responses to each prompt."""
    batch_size: int = 128
    """Rows of a shard."""
    max_response_length: int = 64
    """Limit of the response in tokens."""
    pairs: int = 3
    """Runs of each."""
    output: str = ""
    """JSON file for the results; empty: the table only."""


def bare(engine, prompts, args, stop_ids):
    """Sample all prompts in one call -> tokens."""
    from vllm import SamplingParams

    limits = dict(max_tokens=args.max_response_length, stop_token_ids=stop_ids, detokenize=False)
    requests = [dict(prompt_token_ids=ids) for ids in prompts.values()]
    outputs = engine.generate(requests, SamplingParams(n=args.n_samples, **limits), use_tqdm=False)
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)


def ours(engine, prompts, args, tokenizer):
    """The same by generate.py, shard for shard -> tokens."""
    rows, tokens = list(prompts), 0
    for first in range(0, len(rows), args.batch_size):
        part = rows[first : first + args.batch_size]
        table = generate.generate(engine, part, prompts, args, tokenizer, None, {row: {} for row in part})
        tokens += sum(map(sum, table["response_tokens"].to_pylist()))
    return tokens


def rate(sample, engine, *arguments):
    """Tokens per second, of the clock and of processor time, from an empty prefix cache."""
    engine.reset_prefix_cache()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    tokens = sample(engine, *arguments)
    return tokens / (time.perf_counter() - begin), tokens / (time.process_time() - cpu_begin)


def main():
    args = tyro.cli(Args)
    own = {name: value for name, value in asdict(args).items() if name not in ("rows", "pairs")}
    options = generate.Args(**own | dict(output=args.output or "unused", temperature=1.0))
    options.model = generate.check_args(options, 1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = dict(list(generate.load_prompts(options, tokenizer, None)[0].items())[: args.rows])
    stop_ids, engine = [tokenizer.eos_token_id], generate.build_engine(options)
    bare(engine, dict(list(prompts.items())[:2]), options, stop_ids)  # warm-up
    pairs = []
    for _ in range(args.pairs):
        one = rate(bare, engine, prompts, options, stop_ids)
        two = rate(ours, engine, prompts, options, tokenizer)
        for clock, x, y in zip(("wall", "cpu"), one, two, strict=True):
            pairs.append(dict(clock=clock, bare=x, generate=y, ratio=y / x))
    ratio = {c: statistics.median(p["ratio"] for p in pairs if p["clock"] == c) for c in ("wall", "cpu")}

    table = Table("clock", "bare tokens/s", "generate.py tokens/s", "ratio")
    for pair in pairs:
        rates = (f"{pair[key]:.1f}" for key in ("bare", "generate"))
        table.add_row(pair["clock"], *rates, f"{pair['ratio']:.3f}")
    Console().print(table)
    print(f"median ratio: wall {ratio['wall']:.3f}, cpu {ratio['cpu']:.3f}")
    if args.output:
        with replacing(args.output) as new:
            new.write_text(json.dumps(asdict(args) | dict(pairs=pairs, ratio=ratio), indent=2) + "\n")


if __name__ == "__main__":
    main()
