"""Everything but the models: what a step and the start of a run cost the script itself, part by part.

    python benchmarks/driver.py --model models/smollm2 --sizes 512 16 2000 128 16 20000
    python benchmarks/driver.py --model models/smollm2 --sizes --prompts 1000000 --dialogues 200000
    python benchmarks/driver.py --model models/smollm2 --root OTHER_CHECKOUT

The real script runs with random tokens in place of the sampler's and log-probs of 0 (driver_worker.py); the
time of these two is in no figure. The second step counts. Parts are the script's own timing_s/*, and `a to b`
what lies between two of them. Memory is a rank's peak over what it held before the first step, the sampler's
own lists among it (about 200 bytes a token); a start's is over what the imports take.
"""

import json
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from os import getloadavg
from pathlib import Path

import tyro
import workload
from rich.console import Console
from rich.table import Table
from workload import ROOT, launch, make_model, save, write_parquet

WORKER = Path(__file__).resolve().with_name("driver_worker.py")


@dataclass
class Args:
    model: str
    """Hugging Face directory whose tokenizer is used; the model's sizes are cut down."""
    root: Path = ROOT
    """Checkout whose algos/ are measured."""
    algos: tuple[str, ...] = ("dapo",)
    """Scripts whose step is measured; dapo finds every second group without spread."""
    sizes: tuple[tuple[int, int, int], ...] = ((512, 16, 2000),)
    """Prompts, responses to each and limit of a response in tokens, of a step; lengths are a quarter of it."""
    ranks: tuple[int, ...] = (1, 2)
    """Processes; they share all cores."""
    prompts: tuple[int, ...] = (20_000,)
    """Rows of grpo's start."""
    dialogues: tuple[int, ...] = (10_000,)
    """Rows of sft's start, conversations of several turns."""
    work: Path | None = None
    """Directory that keeps the rows for the next time; None: a temporary one."""
    output: Path | None = None
    """JSON file for the results; None: the tables only."""


def problem(rng):
    """A word problem and its solution, about as long as those of GSM8K."""
    question, answer, total = [], [], 0
    for _ in range(rng.randint(2, 4)):
        name, thing = (
            rng.choice(["Natalia", "Weng", "Betty", "Julie"]),
            rng.choice(["clips", "pages", "cakes"]),
        )
        a, b = rng.randint(2, 60), rng.randint(2, 20)
        total += a * b
        question.append(f"{name} has {a} boxes with {b} {thing} in each of them, bought in the last week.")
        answer.append(f"{name} has {a}*{b} = <<{a}*{b}={a * b}>>{a * b} {thing}, so {total} in all.")
    return " ".join([*question, "How many are there altogether?"]), "\n".join([*answer, f"#### {total}"])


def rows(work, kind, count):
    """A parquet file with `count` rows, the same ones every time; one that is there is used again."""
    rng, path = random.Random(0), work / f"{kind}_{count}.parquet"

    def row(index):
        question, answer = problem(rng)
        user, assistant = dict(role="user", content=question), dict(role="assistant", content=answer)
        if kind == "dialogues":
            return dict(messages=[user, assistant] * rng.randint(2, 4))
        truth, about = answer.split("#### ")[1], dict(split="train", index=index)
        about |= dict(question=question, answer=answer)
        reward_model = dict(style="rule", ground_truth=truth)
        return dict(
            data_source="openai/gsm8k",
            prompt=[user],
            ability="math",
            reward_model=reward_model,
            extra_info=about,
        )

    if not path.exists():
        write_parquet(map(row, range(count)), path)
    return path


def run(args, work, algo, kind, ranks, **flags):
    """Run the worker -> for every step the parts of each rank, {name: (wall s, CPU s, MB)}."""
    shutil.rmtree(work / "run", ignore_errors=True)
    (work / "run").mkdir()
    flags |= dict(model=work / "model", output_dir=work / "run/out")
    flags = [x for name, value in flags.items() for x in (f"--{name}", value)]
    launch(WORKER, args.root.resolve(), algo, work / "run", kind, *flags, ranks=ranks)
    reports = [json.loads((work / f"run/rank{rank}.json").read_text()) for rank in range(ranks)]
    return [[add_up(parts) for parts in step] for step in zip(*(report["steps"] for report in reports))]


def add_up(parts):
    """Parts of one rank in their order -> those of one name as one: seconds add up, peaks do not."""
    sums = {}
    for name, wall, cpu, mb in parts:
        before = sums.get(name, (0, 0, 0))
        sums[name] = before[0] + wall, before[1] + cpu, max(before[2], mb)
    return sums


def over_ranks(by_rank):
    """-> for each part the longest wall time, the CPU seconds of all ranks, and the largest peak."""
    names = dict.fromkeys(name for parts in by_rank for name in parts)
    columns = {name: list(zip(*(parts[name] for parts in by_rank if name in parts))) for name in names}
    return {name: [max(wall), sum(cpu), max(mb)] for name, (wall, cpu, mb) in columns.items()}


def measure_step(args, work, algo, size, ranks):
    """The parts of the second step, their sum, and the checkpoint behind it."""
    prompts, group, limit = size
    flags = dict(train_files=rows(work, "prompts", 2 * prompts), reward_fn=f"{WORKER}:score", total_steps=2)
    flags |= dict(train_batch_size=prompts, ppo_mini_batch_size=-(-prompts // 4), save_freq=0)
    flags |= dict(max_prompt_length=1024, max_response_length=limit, max_tokens_per_microbatch=32768)
    flags |= {} if algo == "ppo" else dict(group_size=group)
    *_, step, saving = run(args, work, algo, "step", ranks, **flags)
    total = [{"step": (*map(sum, list(zip(*p.values()))[:2]), max(x[2] for x in p.values()))} for p in step]
    parts = over_ranks(step) | over_ranks(total)
    parts["save_checkpoint"] = over_ranks(saving).get("save_checkpoint", (0, 0, 0))
    return dict(algo=algo, size=size, ranks=ranks, parts=parts, load=getloadavg()[0])


def measure_start(args, work, kind, count, ranks):
    """A start with an empty cache, and a second one."""
    algo = dict(prompts="grpo", dialogues="sft")[kind]
    flags = dict(train_files=rows(work, kind, count), train_batch_size=1)
    flags |= dict(max_length=4096, messages_key="messages") if algo == "sft" else {}
    flags |= (
        dict(max_tokens_per_microbatch=4096)
        if algo == "sft"
        else dict(max_prompt_length=1024, ppo_mini_batch_size=1)
    )
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HF_DATASETS_CACHE"] = cache
        cold, warm = (over_ranks(run(args, work, algo, "start", ranks, **flags)[0]) for _ in range(2))
    return dict(algo=algo, kind=kind, count=count, ranks=ranks, cold=cold, warm=warm, load=getloadavg()[0])


def show(steps, starts):
    """A table for each step, and one of all starts."""
    for step in steps:
        prompts, group, limit = step["size"]
        title = f"{step['algo']}.py, {prompts} x {group} up to {limit}, {step['ranks']} ranks"
        table = Table("part", "wall, s", "CPU of all, s", "peak of a rank, MB", title=title)
        for name, (wall, cpu, mb) in step["parts"].items():
            if max(wall, cpu) > 0.005 or name == "step":
                table.add_row(name, f"{wall:.2f}", f"{cpu:.2f}", f"{mb:.0f}")
        Console().print(table)
    table = Table("start", "ranks", "cache", "wall, s", "CPU of all, s", "peak of a rank, MB", "held, MB")
    for start in starts:
        for cache in ("cold", "warm"):
            (wall, cpu, mb), (*_, held) = start[cache].values()
            figures = f"{wall:.1f}", f"{cpu:.1f}", f"{mb:.0f}", f"{held:.0f}"
            table.add_row(
                f"{start['algo']}.py, {start['count']} {start['kind']}", str(start["ranks"]), cache, *figures
            )
    Console().print(table)


def main():
    args = tyro.cli(Args)
    workload.ROOT = args.root.resolve()  # the commit in the results is that of what is measured
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        make_model(
            args.model,
            work / "model",
            sizes | dict(num_attention_heads=1, num_key_value_heads=1, head_dim=16),
        )
        cases = [(algo, size, ranks) for size in args.sizes for algo in args.algos for ranks in args.ranks]
        steps = [measure_step(args, work, *case) for case in cases]
        counts = [("prompts", n) for n in args.prompts] + [("dialogues", n) for n in args.dialogues]
        starts = [measure_start(args, work, *case, n) for case in counts for n in args.ranks]
    show(steps, starts)
    if args.output:
        save(args.output, args, dict(steps=steps, starts=starts))


if __name__ == "__main__":
    main()
