"""Our trainer against TRL's on the same model, rows, lengths, precision, threads and processes.

    pip install --no-deps -r requirements-bench.txt
    python benchmarks/peer.py --model models/smollm2 --algo grpo
    python benchmarks/peer.py --model models/smollm2 --algo sft --prompts 32

A round runs each contestant once, one after the other. A ratio is TRL's time per token over ours in the same
round.
"""

import itertools
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib import workload
from benchmarks.lib.workload import markdown, spread
from system.arguments import command_line


@dataclass
class Args:
    model: str
    """Hugging Face directory of the model."""
    algo: Literal["grpo", "sft"] = "grpo"
    """Which trainer."""
    prompts: int = 8
    """Prompts of a step, rows for sft."""
    group_size: int = 4
    """Responses to each prompt."""
    prompt_length: int = 96
    """Mean tokens of a prompt."""
    response_length: int = 64
    """Tokens of each response; for sft their mean."""
    temperature: float = 1.0
    """Sampling temperature; a low one makes a random model so confident that it does not sample EOS."""
    trl_batch: int = 8
    """TRL's rows of a forward pass on one rank."""
    max_length: int = 512
    """TRL's longest sequence, which packing fills."""
    ranks: int = 1
    """Processes; they share all cores."""
    rounds: int = 3
    """Rounds over all contestants."""
    steps: int = 2
    """Steps that count; one more, the first, does not."""
    output: Path | None = None
    """JSON file for the results; None: the table only."""


def trl_flags(args, work, packing):
    """Flags of lib/peer_trl.py; packed, a step has about as many tokens as ours."""
    rows = args.prompts
    if args.algo == "grpo":
        rows *= args.group_size
    batch = args.trl_batch
    if packing:
        rows = rows * (args.prompt_length + args.response_length) // args.max_length
        batch = max(1, min(rows // args.ranks, workload.BUDGET // args.max_length))
    return dict(
        model=work / "model",
        train_files=work / "rows.parquet",
        output_dir=work / "run",
        algo=args.algo,
        total_steps=args.steps + 1,
        per_device_batch=batch,
        accumulation=max(1, rows // batch // args.ranks),
        max_length=args.max_length,
        group_size=args.group_size,
        response_length=args.response_length,
        temperature=args.temperature,
    )


def contestants(args, work):
    """{name: script and flags}."""
    ours = workload.trainer_flags(args, work, args.steps + 1)
    trl = "benchmarks/lib/peer_trl.py"
    flags = trl_flags(args, work, packing=False)
    found = {"ours": (f"algos/{args.algo}.py", ours), "TRL": (trl, flags)}
    if args.algo == "grpo":
        found["TRL, vLLM"] = trl, flags | dict(vllm=True)
    if args.algo == "sft":
        found["TRL, packed"] = trl, trl_flags(args, work, packing=True) | dict(packing=True)
    return found


def measure(script, flags, work, ranks):
    """Run a contestant -> milliseconds per token and more, medians over its steps after the first."""
    shutil.rmtree(work / "run", ignore_errors=True)
    memory = workload.launch(script, workload.words_of(flags), ranks)
    steps = workload.read_metrics(work / "run")
    if "num_tokens" in steps[0]:  # TRL's, which count from the start
        pairs = list(itertools.pairwise(steps))
        tokens = [after["num_tokens"] - before["num_tokens"] for before, after in pairs]
        seconds = [after["seconds"] - before["seconds"] for before, after in pairs]
    else:
        tokens = [m["perf/total_num_tokens"] for m in steps[1:]]
        seconds = [m["timing_s/step"] for m in steps[1:]]
    return dict(
        step_s=statistics.median(seconds),
        ms_per_token=statistics.median(1000 * s / n for s, n in zip(seconds, tokens, strict=True)),
        peak_memory_gb=memory,
    )


def show(rounds):
    """The table, medians -> {contestant: its ratio in each round}."""
    rows = []
    ratios = {}
    for name in rounds[0]:
        own = workload.medians([x[name] for x in rounds])
        ratios[name] = [x[name]["ms_per_token"] / x["ours"]["ms_per_token"] for x in rounds]
        cells = [f"{own[unit]:.2f}" for unit in ("step_s", "ms_per_token", "peak_memory_gb")]
        rows.append([name] + cells + [spread(ratios[name])])
    print(markdown(["", "step, s", "ms per token", "peak GB", "ratio"], rows))
    return ratios


def main():
    args = command_line(Args)
    rounds = []
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        count = args.prompts
        if args.algo == "sft":  # TRL packs over all its rows: enough for every step
            count *= args.steps + 1
        workload.write_work(args, work, count)
        for _ in range(args.rounds):
            results = {}
            for name, (script, flags) in contestants(args, work).items():
                results[name] = measure(script, flags, work, args.ranks)
                print(f"{name}: {results[name]['step_s']:.2f} s a step", flush=True)
            rounds.append(results)
    ratios = show(rounds)
    if args.output:
        workload.save(args.output, args, dict(ratios=ratios, rounds=rounds))


if __name__ == "__main__":
    main()
