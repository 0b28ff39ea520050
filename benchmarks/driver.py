"""Everything but the models: what a step and the start of a run cost the script itself, part by part.

    python benchmarks/driver.py --model models/smollm2 --sizes 512 16 2000 128 16 20000
    python benchmarks/driver.py --model models/smollm2 --sizes --prompts 1000000 --dialogues 200000
    python benchmarks/driver.py --model models/smollm2 --root OTHER_CHECKOUT

The real script runs with slices of docs/**/*.md in place of the sampler's responses and log-probs of 0
(driver_worker.py), and the time of these two is in no figure. The second step counts. Its parts are the
script's own timing_s/*, and `a to b` is what lies between two of them. `on the device` is arithmetic on
tensors of the model's device, the loss above all: a GPU would do it, and the rest stays with the host.
Memory is a rank's peak over what it held before the first step, the sampler's own lists (200 bytes a token)
among it; at a start, over what it held after the imports.
"""

import json
import os
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from os import getloadavg
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib import workload
from benchmarks.lib.workload import ROOT, launch, make_model, save, write_parquet
from system.arguments import command_line

WORKER = Path(__file__).resolve().with_name("lib") / "driver_worker.py"
TINY = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=16)
TINY |= dict(num_attention_heads=1, num_key_value_heads=1)


@dataclass
class Args:
    model: str
    """Hugging Face directory whose tokenizer is used; the model is cut down."""
    root: Path = ROOT
    """Checkout whose algos/ are measured."""
    algos: tuple[str, ...] = ("dapo",)
    """Scripts whose step is measured; every second group has no spread, and dapo drops it."""
    sizes: tuple[tuple[int, int, int], ...] = ((512, 16, 2000),)
    """Steps: prompts, responses to each, limit of a response in tokens; their mean is a quarter of it."""
    ranks: tuple[int, ...] = (1, 2)
    """Processes; they share all cores."""
    prompts: tuple[int, ...] = (20_000,)
    """Starts of grpo: rows."""
    dialogues: tuple[int, ...] = (10_000,)
    """Starts of sft: rows, conversations of several turns."""
    work: Path | None = None
    """Directory that keeps the rows for the next time; None: a temporary one."""
    output: Path | None = None
    """JSON file for the results; None: the tables only."""


def problem(rng):
    """A word problem and its solution, about as long as those of GSM8K."""
    question, answer, total = [], [], 0
    for _ in range(rng.randint(2, 4)):
        who, what = rng.choice(["Natalia", "Weng", "Betty", "Julie"]), rng.choice(["clips", "pages", "cakes"])
        a, b = rng.randint(2, 60), rng.randint(2, 20)
        total += a * b
        question.append(f"{who} has {a} boxes with {b} {what} in each of them, bought in the last week.")
        answer.append(f"{who} has {a}*{b} = <<{a}*{b}={a * b}>>{a * b} {what}, so {total} in all.")
    return " ".join([*question, "How many are there altogether?"]), "\n".join([*answer, f"#### {total}"])


def make_rows(work, kind, count):
    """A parquet file with `count` rows, always the same ones; one that is there is used again."""
    rng, path = random.Random(0), work / f"{kind}_{count}.parquet"

    def row(index):
        question, answer = problem(rng)
        user, assistant = dict(role="user", content=question), dict(role="assistant", content=answer)
        if kind == "dialogues":
            return dict(messages=[user, assistant] * rng.randint(2, 4))
        row = dict(data_source="openai/gsm8k", prompt=[user], ability="math")
        row |= dict(reward_model=dict(style="rule", ground_truth=answer.split("#### ")[1]))
        return row | dict(extra_info=dict(split="train", index=index, question=question, answer=answer))

    if not path.exists():
        write_parquet(map(row, range(count)), path)
    return path


def run(args, work, kind, algo, ranks, **flags):
    """Run the worker -> {part: (longest wall s, CPU s of all ranks, largest peak in MB)} of each step."""
    shutil.rmtree(work / "run", ignore_errors=True)
    (work / "run").mkdir()
    flags |= dict(model=work / "model", output_dir=work / "run/out")
    flags = [x for name, value in flags.items() for x in (f"--{name}", value)]
    launch(WORKER, workload.ROOT, algo, work / "run", kind, *flags, ranks=ranks)
    results = []
    for by_rank in zip(*(json.loads(path.read_text()) for path in (work / "run").glob("rank*.json"))):
        for parts in by_rank if kind == "step" else ():
            device = [figures for name, figures in parts.items() if name.endswith("on the device")]
            for name, figures in (("step", [*parts.values()]), ("of it on the device", device)):
                wall, cpu, mb = zip(*figures) if figures else [[0]] * 3
                parts[name] = sum(wall), sum(cpu), max(mb)
        columns = {name: list(zip(*(parts[name] for parts in by_rank))) for name in by_rank[0]}
        results.append({name: (max(wall), sum(cpu), max(mb)) for name, (wall, cpu, mb) in columns.items()})
    return results


def measure_step(args, work, algo, size, ranks):
    """The parts of the second step, four optimizer steps in it, and the checkpoint behind it."""
    prompts, group, limit = size
    flags = dict(train_files=make_rows(work, "prompts", 2 * prompts), reward_fn=f"{WORKER}:score")
    flags |= dict(train_batch_size=prompts, ppo_mini_batch_size=prompts // 4, total_steps=2, save_freq=0)
    flags |= dict(max_prompt_length=1024, max_response_length=limit, max_tokens_per_microbatch=32768)
    flags |= {} if algo == "ppo" else dict(group_size=group)
    _, step, behind = run(args, work, "step", algo, ranks, **flags)
    step["save_checkpoint"] = behind["save_checkpoint"]
    return dict(algo=algo, size=size, ranks=ranks, parts=step, load=getloadavg()[0])


def measure_start(args, work, kind, count, ranks):
    """A start with an empty cache, and a second one."""
    flags = dict(train_files=make_rows(work, kind, count), train_batch_size=1)
    if kind == "prompts":
        algo, flags = "grpo", flags | dict(max_prompt_length=1024, ppo_mini_batch_size=1)
    else:
        algo, flags = "sft", flags | dict(max_length=8192, messages_key="messages")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HF_DATASETS_CACHE"] = cache
        [cold], [warm] = (run(args, work, "start", algo, ranks, **flags) for _ in range(2))
    return dict(kind=kind, count=count, ranks=ranks, cold=cold, warm=warm, load=getloadavg()[0])


def show(steps, starts):
    """A table for each step, and one of all starts."""
    for step in steps:
        title = "{}.py, {} x {} up to {}, ranks: {}".format(step["algo"], *step["size"], step["ranks"])
        table = Table("part", "wall, s", "CPU, s", "peak, MB", title=title)
        for name, (wall, cpu, mb) in step["parts"].items():
            table.add_row(name, f"{wall:.2f}", f"{cpu:.2f}", f"{mb:.0f}")
        Console().print(table)
    table = Table("start", "ranks", "cache", "wall, s", "CPU, s", "peak, MB", "held, MB")
    for start in starts:
        for cache in ("cold", "warm"):
            (wall, cpu, mb), (*_, held) = start[cache]["peak"], start[cache]["held"]
            figures = f"{wall:.1f}", f"{cpu:.1f}", f"{mb:.0f}", f"{held:.0f}"
            table.add_row(f"{start['count']} {start['kind']}", str(start["ranks"]), cache, *figures)
    Console().print(table)


def main():
    args = command_line(Args)
    workload.ROOT = args.root.resolve()  # the results name the commit of what is measured
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        make_model(args.model, work / "model", TINY)
        cases = [(algo, size, ranks) for size in args.sizes for algo in args.algos for ranks in args.ranks]
        steps = [measure_step(args, work, *case) for case in cases]
        kinds = [("prompts", n) for n in args.prompts] + [("dialogues", n) for n in args.dialogues]
        starts = [measure_start(args, work, *kind, ranks) for kind in kinds for ranks in args.ranks]
    show(steps, starts)
    if args.output:
        save(args.output, args, dict(steps=steps, starts=starts))


if __name__ == "__main__":
    main()
