"""Runs of sft.py that end in their third step, and the same command again: MODEL DATA OUT NAME...

No step is saved by --save_freq. Prints how each run ended on each rank.
"""

import os
import sys
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import sft
from system import checkpoints, run
from system.arguments import fail


def before():
    raise RuntimeError("before the update")


def stops():
    fail("all ranks stop")


def during(*_):
    """When the weights of step 3 have changed."""
    raise RuntimeError("during the update")


def full(*_):
    raise OSError("No space left on device")


def alone():
    if dist.get_rank():
        raise RuntimeError("one rank alone")


ENDS = dict(straight=None, before=before, stops=stops, during=during, full=stops, alone=alone)


def main(model, data, out, *names):
    rate, write, hooks = sft.learning_rate, checkpoints.write_hf, []
    run.leave = lambda _: dist.barrier()  # one process for all runs
    sft.setup_distributed = cache(sft.setup_distributed)
    flags = "--train_batch_size 8 --max_length 64 --save_freq 0 --total_steps 4".split()
    for name in names:
        end = ENDS[name]

        def schedule(peak, number, *rest, end=end, name=name):
            if number == 3 and end:
                checkpoints.write_hf = full if name == "full" else write
                if end is not during:
                    end()
                hooks.append(register_optimizer_step_post_hook(end))
            return rate(peak, number, *rest)

        if end is alone:
            run.END = timedelta(seconds=1)
        for again in (False, True)[: 1 + (end is not None)]:
            sft.learning_rate = rate if again else schedule
            files = f"--model {model} --train_files {data} --output_dir {out}/{name}".split()
            sys.argv = ["sft.py", *files, *flags]
            code = "ended"
            try:
                sft.main(sft.Args(**sft.parse(sft.Args)))
            except SystemExit as stop:
                code = stop.code
            except RuntimeError as error:
                code = str(error)
                print(error, file=sys.stderr)
            if end is alone and dist.get_rank():
                os._exit(1)
            checkpoints.write_hf = write
            while hooks:
                hooks.pop().remove()
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, code)
            if not dist.get_rank():
                print("END", name, found, sep="|", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
