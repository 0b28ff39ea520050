"""How the cost of each part grows with its work: CPU seconds and memory at three sizes, and the exponent.

    python benchmarks/growth.py --model models/tiny

An exponent of 1 is linear in the work, 2 quadratic. Each size is measured in a fork of its own; all of them
take less than two minutes.
Docs: docs/results/growth.md
"""

import json
import math
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rewards
from algos import dapo, eval, generate, grpo, report
from data_prep.lib.images import load_processor
from data_prep.lib.turns import encode_messages
from rewards.manager import RewardManager, validation_summary
from rewards.manager.worker import pickled
from system.arguments import command_line
from system.batches import balance, split_micro_batches
from system.files import digest_of_file
from system.run import clean


@dataclass
class Args:
    model: str
    """Directory of a model, for its tokenizer and chat template."""


# each part below: of a size and a tokenizer -> a function of no arguments, which is measured
def group_advantages(n, _):
    scores, groups = torch.rand(n), torch.arange(n) // 8
    return lambda: grpo.group_advantages(scores, groups)


def keep_groups(n, _):
    right, groups = torch.randint(2, [n]), torch.arange(n) // 8
    return lambda: dapo.keep_groups(right, groups)


def deal_to_512_ranks(n, _):
    lengths = random.choices(range(50, 2000), k=n)
    return lambda: balance(lengths, 512)


def micro_batches(n, _):
    lengths = random.choices(range(50, 2000), k=n)
    return lambda: split_micro_batches(lengths, 8192, True)


def digest_of_texts(n, _):
    pq.write_table(pa.table(dict(prompt=["what is 1 + 1?" * 20] * n)), "texts.parquet")
    return lambda: digest_of_file("texts.parquet")


def digest_of_pictures(n, _):
    with pq.ParquetWriter("pictures.parquet", pa.schema(dict(image=pa.binary()))) as file:
        for _ in range(n // 20):
            file.write_table(pa.table(dict(image=[os.urandom(10**6) for _ in range(20)])))
    return lambda: digest_of_file("pictures.parquet")


def naive_rewards(n, tokenizer):
    ids = np.array(tokenizer("so it is 3 #### 3")["input_ids"], np.int32)
    row = dict(
        data_source="openai/gsm8k", extra_info={}, prompt_ids=ids, response_ids=ids, finish_reason="length"
    )
    row |= dict(prompt=[dict(role="user", content="q")], reward_model=dict(ground_truth="3"))
    rows = [dict(row, group=i // 8) for i in range(n)]
    manager = RewardManager("naive", rewards.compute_score)
    return lambda: manager.score_responses(rows, tokenizer)


def messages_to_a_process(n, _):
    message = rewards.compute_score, [dict(solution_str="x" * 1000)], 30.0, 0
    return lambda: [pickled(message) for _ in range(n)]


def validation_of_100_sources(n, _):
    sample = dict(data_source="a", prompt_str="q", ground_truth="3", solution_str="3")
    rows = [
        dict(data_source=f"task {i % 100}", index=i, sampled=sample, reward=dict(score=1.0)) for i in range(n)
    ]
    return lambda: validation_summary(rows, 1)


def pass_at_each_k(n, _):
    return lambda: [eval.pass_at_k(n, c) for c in range(n)]


def majority_at_all_k(n, _):
    answers = ["3" if random.random() < 0.55 else str(int(random.paretovariate(0.7))) for _ in range(n)]
    right = [float(answer == "3") for answer in answers]
    return lambda: [eval.maj_at_k(answers, right, 2**i) for i in range(n.bit_length())]


def shards_of_generate(n, _):
    shards = [Path(f"shards/{i}") for i in range(n)]
    shards[0].parent.mkdir(exist_ok=True)

    def write_all():
        waiting = deque(shards)
        for shard in shards:
            shard.touch()
            generate.count_done(waiting, tqdm(disable=True))

    return write_all


def report_of_dumps(n, _):
    folder = Path("run/rollouts")
    folder.mkdir(parents=True, exist_ok=True)
    row = dict(data_source="a", prompt_str="q", ground_truth="3", score=1.0, finish_reason="stop")
    for step in range(n):
        lines = [json.dumps(dict(row, index=i // 8, solution_str="x" * 4000)) for i in range(64)]
        (folder / f"step_{step:06d}.jsonl").write_text("\n".join(lines))
    return lambda: report.read_rollouts(SimpleNamespace(path=Path("run"), name="run"), 3_800_000)


def a_resume(n, _):
    Path("metrics.jsonl").write_text(
        "".join(f'{{"training/global_step": {i}, "actor/loss": 0.1}}\n' for i in range(n))
    )
    return lambda: clean(Path(), n // 2, grpo.Args(model="", train_files=(), output_dir=""))


def turns_of_a_conversation(n, tokenizer):
    talk = []
    for i in range(n):
        talk += [dict(role="user", content=f"and {i} + 1?"), dict(role="assistant", content=str(i + 1))]
    return lambda: encode_messages(talk, tokenizer)


PARTS = {
    group_advantages: (4_000, 16_000, 64_000),
    keep_groups: (4_000, 16_000, 64_000),
    deal_to_512_ranks: (10_000, 30_000, 100_000),
    micro_batches: (10_000, 30_000, 100_000),
    digest_of_texts: (10_000, 30_000, 100_000),
    digest_of_pictures: (100, 300, 1_000),
    naive_rewards: (1_000, 3_000, 10_000),
    messages_to_a_process: (1_000, 3_000, 10_000),
    validation_of_100_sources: (10_000, 30_000, 100_000),
    pass_at_each_k: (256, 512, 1_024),
    majority_at_all_k: (256, 512, 1_024),
    shards_of_generate: (400, 1_600, 6_400),
    report_of_dumps: (64, 128, 256),
    a_resume: (1_000, 5_000, 20_000),
    turns_of_a_conversation: (40, 80, 160),
}


def cost(part, size, tokenizer):
    """CPU seconds and MB of memory above those at the start."""
    random.seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        work = part(size, tokenizer)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.process_time()
        work()
        seconds = time.process_time() - begin
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        return seconds, more / 1024


def main(args):
    tokenizer = load_processor(args.model)
    fork = multiprocessing.get_context("fork")
    print("| part | sizes | CPU seconds | MB | exponent |")
    print("|---|---|---|---|---|")
    for part, sizes in PARTS.items():
        found = []
        for size in sizes:
            with fork.Pool(1) as pool:
                found.append(pool.apply(cost, (part, size, tokenizer)))
        seconds = [max(x, 1e-4) for x, _ in found]
        exponent = math.log(seconds[-1] / seconds[-2]) / math.log(sizes[-1] / sizes[-2])
        cells = [
            part.__name__.replace("_", " "),
            " ".join(f"{size:,}" for size in sizes),
            " ".join(f"{x:.2g}" for x in seconds),
            " ".join(f"{x:.0f}" for _, x in found),
            f"{exponent:.2f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(command_line(Args))
