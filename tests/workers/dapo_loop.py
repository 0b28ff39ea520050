"""DAPO's loop with a made-up sampler in place of vLLM, so that each group's outcome is known: MODEL DATA OUT.

Runs one scenario after the other on all ranks. Prints for each how it ended on each rank, how many generation
batches and syncs it took, and the (tokens, responses) of each optimizer step.
"""

import os
import sys
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import torch.distributed as dist

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import dapo
from system import metrics, run

RIGHT, WRONG, LENGTH = 1, 0, 4  # LENGTH: --max_response_length
ALL_RIGHT = [(RIGHT, 2)] * 4
ALL_WRONG = [(WRONG, 2)] * 4
MIXED = [(RIGHT, 2), (WRONG, 2), (WRONG, 2), (RIGHT, 2)]  # the last of two tokens ends a response
LONG_BUT_ALL_RIGHT = [(RIGHT, 2), (RIGHT, LENGTH), (RIGHT, LENGTH), (RIGHT, 2)]  # spread after the penalty
LONG_AND_RIGHT = [(WRONG, 2), (RIGHT, LENGTH), (WRONG, 2), (WRONG, 2)]  # no spread after the penalty
KINDS = [ALL_WRONG, MIXED, LONG_BUT_ALL_RIGHT, ALL_RIGHT, LONG_AND_RIGHT]

SCENARIOS = {  # groups by prompt number, in turn; flags
    "always right": ([ALL_RIGHT], "--max_gen_batches 3"),
    "always wrong": ([ALL_WRONG], "--max_gen_batches 4 --rollout_is None"),
    "solved": ([MIXED] * 3 + [ALL_RIGHT] * 50, "--max_gen_batches 1"),
    "three batches": ([ALL_RIGHT] * 4 + [MIXED] * 12, "--max_gen_batches 2 --total_steps 1"),
    "kinds": (KINDS, "--total_steps 4"),
    "filtered": (KINDS, "--total_steps 2 --overlong_filtering"),
    "surplus": ([MIXED] + [ALL_WRONG] * 9 + [MIXED] * 30, "--total_steps 3"),
    "resumed": ([MIXED] + [ALL_WRONG] * 9 + [MIXED] * 30, "--total_steps 1"),
    "resumed on": ([MIXED] + [ALL_WRONG] * 9 + [MIXED] * 30, "--total_steps 3"),
    "thrown": ([MIXED] + [ALL_WRONG] * 9 + [MIXED] * 30, "--total_steps 3 --max_staleness 0"),
    "epoch": (KINDS, "--total_epochs 1 --lora_rank 4"),
    "epoch again": (KINDS, "--total_epochs 1 --lora_rank 4"),
}
GOES_ON = {
    "always wrong": "always right",
    "resumed on": "resumed",
    "epoch again": "epoch",
}  # in one directory
gen_batches, syncs, groups, totals = 0, 0, [], []
distribute = dapo.distribute


def recorded(*arguments):
    mini_batches, *rest = distribute(*arguments)
    totals.extend(total for _, total in mini_batches)
    return mini_batches, *rest


@contextmanager
def awake(*_, **__):
    global syncs
    syncs += 1
    yield


def rollout(engine, args, prompts, step, group_size, **sampling):
    global gen_batches
    gen_batches += 1
    digits = tokenizer.convert_tokens_to_ids(["0", "1"])
    rows = dapo.empty_rows(prompts[dist.get_rank() :: dist.get_world_size()], group_size)
    for row in rows:
        right, n = groups[row["index"] % len(groups)][row["sample"]]
        logprobs = SimpleNamespace(logprobs=[-4.0] * n)
        reason = "length" if n == LENGTH else "stop"
        ids = [digits[right]] * n
        output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
        dapo.extend(row, output, step)
    return rows


def main(model, data, out):
    global gen_batches, syncs, groups, tokenizer
    run.leave, leave = lambda _: dist.barrier(), run.leave  # one process for all scenarios
    tokenizer = dapo.load_processor(model)
    dapo.setup_distributed = cache(dapo.setup_distributed)
    dapo.build_engine = lambda args, device: None
    metrics.matmul_speed = lambda dtype: 1e12
    dapo.check_sampler = lambda *_: {}  # the sampler's log-probs are made up too
    dapo.awake, dapo.rollout, dapo.distribute = awake, rollout, recorded
    reward = __file__.replace("workers/dapo_loop.py", "dapo_reward.py:starts_with_one")
    sizes = "--train_batch_size 4 --ppo_mini_batch_size 4 --group_size 4 --max_prompt_length 16".split()
    sizes += f"--max_response_length {LENGTH} --overlong_buffer 1 --save_freq 0 --rollout_dump".split()
    for name, (made_up, flags) in SCENARIOS.items():
        gen_batches, syncs, groups = 0, 0, made_up
        totals.clear()
        where = f"{out}/{GOES_ON.get(name, name)}"
        files = "--model", model, "--train_files", data, "--output_dir", where, "--reward_fn", reward
        sys.argv = ["dapo.py", *files, *sizes, *flags.split()]
        code = "ended"
        try:
            dapo.main(dapo.Args(**dapo.parse(dapo.Args)))
        except SystemExit as stop:
            code = stop.code
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, (code, gen_batches, syncs, totals))
        if os.environ["RANK"] == "0":
            print("SCENARIO", name, found, sep="|")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
