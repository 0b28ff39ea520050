"""A rollout of several turns as agent.py makes it against one in waves: all turns, then all environments.

Command:    python benchmarks/agent_rollout.py --model models/smollm2
In a wave the environments work at once too, but each trajectory waits for the slowest of them, and they for
the longest turn. Both sides run the same code on one engine, take turns after a warm-up, and have the same
prompts, seeds and delays: exponential ones, drawn once. A ratio is the time in waves over the other.
"""

import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from workload import make_model, make_rows, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos import generate  # its `converse` is agent.py's; its engine needs no trainer
from envs.pool import EnvPool


@dataclass
class Args:
    model: str
    """Hugging Face directory of the model."""
    trajectories: int = 32
    """Conversations at a time, each with an environment at work in a process of its own."""
    turns: int = 3
    """Turns of the model in each."""
    delay_s: float = 0.5
    """Mean seconds that an environment takes for an answer."""
    prompt_length: int = 96
    """Mean tokens of a prompt."""
    turn_length: int = 24
    """One token in so many ends a turn."""
    max_response_length: int = 256
    """Limit of all turns of a conversation, in tokens."""
    rounds: int = 3
    """Runs of each."""
    output: Path | None = None
    """JSON file for the results; None: the table only."""


class Waves:
    """A pool whose answers come all together, when the sampler has nothing more to do."""

    def __init__(self, pool):
        self.step, self.tools, self.clear, self.ask = pool.step, pool.tools, pool.clear, pool.answers

    def answers(self, wait):
        answers = []
        while wait and (more := self.ask(wait=True)):
            answers += more
        return answers


def measure(engine, prompts, delays, pool, tokenizer, options):
    """One rollout, from an empty prefix cache."""
    rows = [row | dict(entropy=(1, i)) for i, row in prompts.items()]
    rows = [row | dict(extra_info=dict(delays=d)) for row, d in zip(rows, delays, strict=True)]
    engine.reset_prefix_cache()
    begin, limits = time.perf_counter(), dict(stop_token_ids=[tokenizer.eos_token_id])
    idle = generate.converse(engine, rows, pool, tokenizer, options, temperature=1.0, **limits)
    seconds, tokens = time.perf_counter() - begin, sum(len(row["response_ids"]) for row in rows)
    turns = statistics.mean(row["turns"] for row in rows)
    return dict(
        seconds=seconds, tokens_per_s=tokens / seconds, idle=idle / seconds, tokens=tokens, turns=turns
    )


def main():
    args, rounds, rng = tyro.cli(Args), [], random.Random(0)
    delays = [
        [rng.expovariate(1 / args.delay_s) for _ in range(args.turns - 1)] for _ in range(args.trajectories)
    ]
    with tempfile.TemporaryDirectory() as work:
        model, data = f"{work}/model", f"{work}/rows.parquet"
        make_model(args.model, model, {}, args.turn_length)
        make_rows(model, data, args.trajectories, args.prompt_length, 1)
        options = dict(max_prompt_length=2 * args.prompt_length, max_response_length=args.max_response_length)
        options = generate.Args(model=model, data=data, output="", max_turns=args.turns, **options)
        tokenizer, engine = AutoTokenizer.from_pretrained(model), generate.build_engine(options)
        prompts, _ = generate.load_prompts(options, tokenizer, None)
        spec = f"{Path(__file__).with_name('talk_env.py')}:Slow"
        pool = EnvPool(spec, args.trajectories, timeout_s=60 + 100 * args.delay_s)
        sides = dict(asynchronous=pool, waves=Waves(pool))
        for number in range(args.rounds + 1):  # the first warms up
            results = {}
            for name in sorted(sides, reverse=number % 2):
                results[name] = measure(engine, prompts, delays, sides[name], tokenizer, options)
            rounds.append(results)
        pool.close()
    del rounds[0]

    table = Table("", "seconds", "tokens/s", "sampler idle", "tokens", "turns")
    for results in rounds:
        for name, r in sorted(results.items()):
            figures = f"{r['seconds']:.2f}", f"{r['tokens_per_s']:.1f}", f"{r['idle']:.2f}"
            table.add_row(name, *figures, str(r["tokens"]), f"{r['turns']:.2f}")
    Console().print(table)
    ratios = [r["asynchronous"]["tokens_per_s"] / r["waves"]["tokens_per_s"] for r in rounds]
    print(f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    if args.output:
        save(args.output, args, dict(ratios=ratios, rounds=rounds))


if __name__ == "__main__":
    main()
