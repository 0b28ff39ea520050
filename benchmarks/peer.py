"""Our trainer against TRL's on the same model, rows, lengths, precision, threads and processes.

    pip install --no-deps -r requirements-bench.txt
    python benchmarks/peer.py --model models/smollm2 --algo grpo --ranks 1 2
    python benchmarks/peer.py --model models/smollm2 --real --group_size 8 --response_length 96
    python benchmarks/peer.py --model models/smollm2 --algo sft --prompts 32
    python benchmarks/peer.py --model models/smollm2 --algo dpo --prompts 16 --max_tokens_per_microbatch 4096
    python benchmarks/peer.py --model models/smollm2 --algo agent --response_length 256 --max_length 1024

A round runs each contestant once, one after the other. All are timed by one stopwatch: the lines of
metrics.jsonl. A ratio is TRL's time per token over ours in the same round, with the same number of processes.
rm.py and dpo.py also show the loss of the first
step, of all pairs, for TRL's must be the same. DPO's reference log-probs are computed before the first step
by both, and not timed. Agents call a calculator after each turn but the last;
the model does not know how, so that a call is read in place of what it says, by each side's own parser. The
template is Qwen2.5's, which TRL parses and which fits the tokens of SmolLM2.
"""

import importlib.util
import itertools
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from os import getloadavg
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.workload import ROOT, durations, launch, make_model, make_rows, read_metrics, save
from system.arguments import command_line


@dataclass
class Args:
    model: str
    """Hugging Face directory of the model."""
    algo: Literal["grpo", "agent", "sft", "rm", "dpo"] = "grpo"
    """Which trainer."""
    config: dict[str, int] = field(default_factory=dict)
    """Sizes that replace those of the model's config.json: random weights."""
    prompts: int = 8
    """Prompts of a step, rows for sft, pairs for rm and dpo."""
    group_size: int = 4
    """Responses to each prompt."""
    prompt_length: int = 96
    """Mean tokens of a prompt."""
    response_length: int = 64
    """Tokens of each response; for sft, rm and dpo their mean, for agents the limit of all turns."""
    turns: int = 3
    """Turns of an agent."""
    turn_length: int = 24
    """One token in so many ends an agent's turn."""
    real: bool = False
    """GRPO: lengths with a mean of about a quarter of the limit, and every second group constant."""
    temperature: float = 1.0
    """Sampling temperature; a low one makes a random model so confident that it does not sample EOS."""
    max_tokens_per_microbatch: int = 2048
    """Our tokens of a forward pass on one rank, padding included."""
    trl_batch: int = 8
    """TRL's rows, or pairs, of a forward pass on one rank."""
    max_length: int = 512
    """TRL's longest sequence, which packing fills."""
    ranks: tuple[int, ...] = (1,)
    """Numbers of processes; they share all cores."""
    rounds: int = 3
    """Rounds over all contestants."""
    steps: int = 2
    """Steps that count; one more, the first, does not."""
    output: Path | None = None
    """JSON file for the results; None: the table only."""


def ours(args, work):
    """Script and flags of our trainer."""
    flags = dict(
        model=work / "model", train_files=work / "rows.parquet", output_dir=work / "run", save_freq=0
    )
    flags |= dict(train_batch_size=args.prompts, total_steps=args.steps + 1)
    flags |= dict(max_tokens_per_microbatch=args.max_tokens_per_microbatch)
    if args.algo in ("grpo", "agent"):
        room = args.max_length - args.response_length if args.algo == "agent" else 2 * args.prompt_length
        flags |= dict(ppo_mini_batch_size=args.prompts, temperature=args.temperature)
        flags |= dict(max_prompt_length=room, max_response_length=args.response_length)
        flags |= dict(group_size=args.group_size)
    if args.real:
        flags |= dict(reward_fn=f"{ROOT}/benchmarks/lib/alternating.py:half_constant")
    if args.algo == "agent":
        flags |= dict(
            env=f"{ROOT}/benchmarks/lib/talk_env.py:Calls", tool_parser="hermes", max_turns=args.turns
        )
    words = [x for k, v in flags.items() for x in (f"--{k}", v)]
    return f"algos/{args.algo}.py", [*words, "--gradient_checkpointing", "none"]


def trl(args, work, ranks, *extra):
    """Script and flags of TRL's trainer; packed, a step has about as many tokens as ours."""
    rows = args.prompts * (args.group_size if args.algo in ("grpo", "agent") else 1)
    batch = args.trl_batch
    if "--packing" in extra:
        rows = rows * (args.prompt_length + args.response_length) // args.max_length
        batch = max(1, min(rows // ranks, args.max_tokens_per_microbatch // args.max_length))
    flags = dict(model=work / "model", train_files=work / "rows.parquet", output_dir=work / "run")
    flags |= dict(algo=args.algo, total_steps=args.steps + 1, max_length=args.max_length)
    flags |= dict(per_device_batch=batch, accumulation=max(1, rows // batch // ranks))
    flags |= dict(group_size=args.group_size, response_length=args.response_length)
    flags |= dict(temperature=args.temperature, turns=args.turns)
    return "benchmarks/lib/peer_trl.py", [*(x for k, v in flags.items() for x in (f"--{k}", v)), *extra]


def measure(command, work, ranks):
    """Run a contestant -> milliseconds and CPU milliseconds per token, medians over its steps."""
    shutil.rmtree(work / "run", ignore_errors=True)
    before, stamps = getloadavg()[0], []
    script, flags = command
    memory = launch(script, *flags, ranks=ranks, watch=(work / "run/metrics.jsonl", stamps))
    metrics = read_metrics(work / "run", 0)
    if "num_tokens" in metrics[0]:  # TRL's, counted from the start
        counts = [b["num_tokens"] - a["num_tokens"] for a, b in itertools.pairwise(metrics)]
    else:
        counts = [m["perf/total_num_tokens"] for m in metrics[1:]]
    wall, cpu = durations(stamps)
    return dict(
        step_s=statistics.median(wall),
        step_cpu_s=statistics.median(cpu),
        ms_per_token=1000 * statistics.median(s / n for s, n in zip(wall, counts, strict=True)),
        cpu_ms_per_token=1000 * statistics.median(s / n for s, n in zip(cpu, counts, strict=True)),
        tokens=statistics.median(counts),
        peak_memory_gb=memory,
        first_loss=metrics[0].get("train/loss", metrics[0].get("loss")),
        load=(before, getloadavg()[0]),
    )


def main():
    args = command_line(Args)
    variants = {"TRL": (), "TRL, vLLM": ("--vllm",)}
    if args.algo == "sft":
        variants = {"TRL, padded": (), "TRL, packed": ("--packing",)}
    if args.real:  # with Hugging Face generation TRL counts only one kind of EOS
        variants = {"TRL, vLLM": ("--vllm",)}
    pairs_of = args.algo in ("rm", "dpo")
    if pairs_of:
        variants = {"TRL": ()}
    rounds, failed = [], {}
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        agent = args.algo == "agent"
        ends = args.response_length // 4 if args.real else args.turn_length if agent else None
        make_model(args.model, work / "model", args.config, ends)
        if agent:
            trl_files = Path(importlib.util.find_spec("trl").origin).parent
            template = trl_files / "chat_templates/qwen2_5.jinja"
            shutil.copy(template, work / "model/chat_template.jinja")
        # TRL packs over all its rows: enough for every step
        rows = args.prompts * (args.steps + 1 if args.algo == "sft" else 1)
        make_rows(
            work / "model", work / "rows.parquet", rows, args.prompt_length, args.response_length, pairs_of
        )
        if args.algo == "rm":  # with a head, so that both sides begin with the same one
            torch.manual_seed(0)
            head = AutoModelForSequenceClassification.from_pretrained(work / "model", num_labels=1)
            head.save_pretrained(work / "model")
        for _ in range(args.rounds):
            results = {}
            for ranks in args.ranks:
                script, flags = ours(args, work)
                commands = {"ours": (script, flags)}
                commands |= {name: trl(args, work, ranks, *extra) for name, extra in variants.items()}
                for name, command in commands.items():
                    key = f"{name}, {ranks} rank{'s' * (ranks > 1)}"
                    if key in failed:
                        continue
                    try:
                        results[key] = measure(command, work, ranks)
                        print(f"{key}: {results[key]['step_s']:.2f} s a step", flush=True)
                    except SystemExit as error:
                        if name.startswith("ours"):
                            raise
                        failed[key] = str(error)[-600:]
            rounds.append(results)
    columns = ["", "step, s", "CPU s", "ms per token", "peak GB", *["first loss"] * pairs_of]
    columns += ["ratio", "ratio, CPU s"]
    table = Table(*columns, title=f"{args.algo}, medians")
    ratios = {}
    for key in rounds[0]:
        ran, ranks = [r for r in rounds if key in r], key.rsplit(", ", 1)[1]
        ratios[key] = [
            [r[key][unit] / r[f"ours, {ranks}"][unit] for r in ran]
            for unit in ("ms_per_token", "cpu_ms_per_token")
        ]
        units = "step_s", "step_cpu_s", "ms_per_token", "peak_memory_gb"
        middle = [statistics.median(r[key][unit] for r in ran) for unit in units]
        first = [f"{ran[0][key]['first_loss']:.5f}"] if pairs_of else []
        spread = [f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios[key]]
        table.add_row(key, *(f"{x:.2f}" for x in middle), *first, *spread)
    Console().print(table)
    for key, error in failed.items():
        print(f"{key} failed: {error}")
    if args.output:
        save(args.output, args, dict(ratios=ratios, failed=sorted(failed), rounds=rounds))


if __name__ == "__main__":
    main()
