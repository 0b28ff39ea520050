"""What a long row costs, whole on one rank and in slices on several, by each --sp_attention.

    python benchmarks/sequence_parallel.py --model models/tiny --output results.json

Forward and backward of sft.py, of a row that is one sequence, then of one that is packed with 16. Processes
share all cores, so that times are CPU seconds, of all ranks and of the busiest one. Memory is
what a rank takes for the first of these rows beyond what it has before, at most.
"""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from workload import launch, make_model, save

from algos import sft


@dataclass
class Args:
    model: str
    """Hugging Face directory whose tokenizer and architecture the model gets."""
    row_length: tuple[int, ...] = (2048, 8192)
    """Tokens of the row."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """Processes that share it."""
    sp_attention: tuple[str, ...] = ("ulysses", "ring")
    """Kinds of attention over its slices."""
    rounds: int = 3
    """Times over all of these."""
    output: Path | None = None
    """JSON file for the results; None: the table only."""
    figures: Path | None = None
    """Of the processes that this script starts: the file for what they measure."""


def measure(args):
    """On each rank: a row of each kind, forward and backward; rank 0 writes time and memory down."""
    device, mesh = sft.setup_distributed(1)
    [length], [kind], world = args.row_length, args.sp_attention, dist.get_world_size()
    flags = dict(train_files=(), output_dir="", packing=True, attn_implementation="sdpa", sp_size=world)
    flags = sft.Args(model=args.model, sp_attention=kind, max_tokens_per_microbatch=length, **flags)
    policy = sft.load_policy(flags, mesh, device)
    process, found = psutil.Process(), {}

    def step(parts, tokens):
        ids = torch.arange(tokens // parts).remainder(90).add(6).tolist()
        row = dict(prompt_ids=ids[:1], response_ids=ids[1:], trained=[True] * (len(ids) - 1))
        dist.barrier()
        wall, begin = time.perf_counter(), time.process_time()
        for logp_nt, trained_nt in sft.micro_batches(policy, [row] * parts, flags):
            sft.sft_loss(logp_nt, trained_nt, tokens).backward()
        own = time.process_time() - begin
        [total], [most] = sft.all_reduce([own]), sft.all_reduce([own], dist.ReduceOp.MAX)
        return dict(cpu_s=total, busiest_s=most, wall_s=time.perf_counter() - wall)

    step(1, 64)  # gradients and buffers
    before = process.memory_info().rss
    for name, parts in dict(one=1, packed=16).items():
        found[name] = step(parts, length)
        peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
        found[name]["peak_gb"] = sft.all_reduce([(peak - before) / 2**30], dist.ReduceOp.MAX)[0]
    if dist.get_rank() == 0:
        args.figures.write_text(json.dumps(found))
    sft.leave()


def main():
    args = tyro.cli(Args)
    if args.figures:
        return measure(args)
    sizes, measured = [x for x in product(args.row_length, args.ranks, args.sp_attention)], []
    sizes = [x for x in sizes if x[1] > 1 or x[2] == args.sp_attention[0]]  # alone there is one kind
    with tempfile.TemporaryDirectory() as work:
        width = dict(hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=2)
        width |= dict(num_hidden_layers=4, head_dim=32, max_position_embeddings=1 << 16)
        make_model(args.model, model := f"{work}/model", width)
        for _, (length, ranks, kind) in product(range(args.rounds), sizes):
            flags = "--model", model, "--row_length", length, "--sp_attention", kind, "--figures", f"{work}/x"
            launch("benchmarks/sequence_parallel.py", *flags, ranks=ranks)
            found = json.loads(Path(work, "x").read_text())
            measured.append(dict(length=length, ranks=ranks, kind=kind if ranks > 1 else "none") | found)
    columns = (
        "row",
        "ranks",
        "attention",
        "CPU s",
        "busiest rank",
        "peak, GB",
        "packed: CPU s",
        "busiest rank",
    )
    table = Table(*columns)
    for length, ranks, kind in sizes:
        about = dict(length=length, ranks=ranks, kind=kind if ranks > 1 else "none")
        runs = [x for x in measured if x.items() >= about.items()]
        figures = [("one", x) for x in ("cpu_s", "busiest_s", "peak_gb")]
        figures += [("packed", x) for x in ("cpu_s", "busiest_s")]
        middle = [statistics.median(run[row][name] for run in runs) for row, name in figures]
        table.add_row(*map(str, about.values()), *(f"{x:.2f}" for x in middle))
    Console().print(table)
    if args.output:
        save(args.output, args, dict(runs=measured))


if __name__ == "__main__":
    main()
