"""What do weights of 8 and 4 bits cost, and what do they bring? Each of quantize.py's ways, on one model.

    python benchmarks/experiments/quantize.py --model models/smollm2 --calibration data/gsm8k/train.parquet \
        --held_out data/gsm8k/test.parquet
    python benchmarks/experiments/quantize.py --model runs/sums/grpo/checkpoints/latest/hf \
        --calibration runs/sums/data/train.parquet --held_out runs/sums/data/val.parquet \
        --questions runs/sums/data/test.parquet

Megabytes, loss of the held-out answers, tokens that vLLM samples in a CPU second, for 16 rows at a time and
for one; with --questions the share of right greedy answers, by generate.py and eval.py. What is there in
output_dir is not made again.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.workload import ROOT, save
from system.arguments import command_line

WAYS = {
    "w8a8": "--scheme w8a8",
    "w8a8, GPTQ": "--scheme w8a8 --calibration {}",
    "w4a16": "--scheme w4a16",
    "w4a16, GPTQ": "--scheme w4a16 --calibration {}",
    "w4a16, AWQ": "--scheme w4a16 --calibration {} --method awq",
}


@dataclass
class Args:
    model: Path
    """Hugging Face directory."""
    calibration: Path
    """Parquet of conversations for GPTQ."""
    held_out: Path
    """Parquet of conversations for the loss."""
    questions: Path | None = None
    """Parquet of prompts to answer and to score; None: no answers."""
    calibration_rows: int = 24
    """Rows of --calibration."""
    held_out_rows: int = 32
    """Rows of --held_out."""
    max_response_length: int = 64
    """Tokens of each response, of the speed and of the answers."""
    output_dir: Path = ROOT / "runs/quantize"
    """Directory of the models and of results.json."""


def quantized(args, name, flags):
    """Make a model of fewer bits -> its directory, its size and loss, and those of the model before."""
    out, rows = args.output_dir / name.replace(", ", "_"), args.output_dir / "held_out.parquet"
    if not (out / "told.json").exists():
        pq.write_table(pq.read_table(args.held_out).slice(0, args.held_out_rows), rows)
        command = [sys.executable, ROOT / "algos/quantize.py", args.model, out, "--held_out", rows]
        command += [*flags.split(), "--calibration_rows", args.calibration_rows]
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
        told = [part.split() for part in done.stdout.rstrip().split("; ")[1].split(", ")]
        found = {kind: (float(before), float(after)) for kind, before, _, after in told}
        (out / "told.json").write_text(json.dumps(found))
    return out, json.loads((out / "told.json").read_text())


def speed(args, model):
    """Tokens a CPU second of 16 rows at a time and of one, in generate.py's engine."""
    from algos import generate

    sizes = dict(max_prompt_length=32, max_response_length=args.max_response_length)
    engine = generate.build_engine(generate.Args(model=str(model), data="", output="", **sizes))
    from vllm import SamplingParams

    params, found = SamplingParams(max_tokens=args.max_response_length, ignore_eos=True, detokenize=False), []
    for rows in (16, 16, 1):  # the first is a warm-up
        begin = time.process_time()
        for i in range(rows):
            engine.add_request(str(i), dict(prompt_token_ids=[*range(3 + i, 35 + i)]), params)
        while engine.has_unfinished_requests():
            engine.step()
        found.append(rows * args.max_response_length / (time.process_time() - begin))
    return found[1:]


def right(args, models):
    """Greedy answers of each model, scored, and their table -> what it says of the share of right ones."""
    paths = [args.output_dir / f"answers_{name.replace(', ', '_')}.parquet" for name in models]
    for model, path in zip(models.values(), paths, strict=True):
        if not path.exists():
            flags = "--data", args.questions, "--output", path, "--max_prompt_length", 128
            flags += "--max_response_length", args.max_response_length
            command = sys.executable, ROOT / "algos/generate.py", "--model", model, *flags
            subprocess.run(list(map(str, command)), check=True)
    out = args.output_dir / "eval"
    command = sys.executable, ROOT / "algos/eval.py", "--data", *paths, "--output", out
    subprocess.run(list(map(str, command)), check=True)
    results = json.loads((out / "results.json").read_text())
    found = {name: results[str(path)].popitem()[1] for name, path in zip(models, paths, strict=True)}
    return {name: {k: v for k, v in x.items() if "mean@1" in k} for name, x in found.items()}


def main():
    args = command_line(Args)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # CPU seconds of threads that wait would count, too
    models, rows = {"as it is": args.model}, {}
    for name, flags in WAYS.items():
        models[name], told = quantized(args, name, flags.format(args.calibration))
        rows.setdefault("as it is", dict(loss=told["loss"][0]))
        rows[name] = dict(loss=told["loss"][1])
    table = Table("", "MB", "loss", "tokens a CPU second, 16 rows", "1 row")
    for name, model in models.items():
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            rows[name]["speed"] = fresh.apply(speed, (args, model))
        rows[name]["mb"] = sum(path.stat().st_size for path in model.glob("*.safetensors")) / 1e6
        cells = (
            f"{rows[name]['mb']:.0f}",
            f"{rows[name]['loss']:.3f}",
            *(f"{x:.0f}" for x in rows[name]["speed"]),
        )
        table.add_row(name, *cells)
    answers = right(args, models) if args.questions else None
    Console().print(table)
    save(args.output_dir / "results.json", args, dict(models=rows, answers=answers))


if __name__ == "__main__":
    main()
