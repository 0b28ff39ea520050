"""Runs of sft.py that end in their third step, and the same command again: MODEL DATA OUT NAME...

No step is saved by --save_freq. Prints how each run ended on each rank.
"""

import sys
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import sft
from common import checkpoints, run


def before():
    raise RuntimeError("before the update")


def stops():
    run.fail("all ranks stop")


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
    rate, write, hooks = sft.scheduled_rate, checkpoints.write_hf, []
    sft.leave = lambda _: dist.barrier()  # one process for all runs
    sft.setup_distributed = cache(sft.setup_distributed)
    flags = "--train_batch_size 8 --max_length 64 --save_freq 0 --total_steps 4".split()
    for name in names:
        end = ENDS[name]

        def schedule(args, number, total, end=end, name=name):
            if number == 3 and end:
                checkpoints.write_hf = full if name == "full" else write
                if end is not during:
                    end()
                hooks.append(register_optimizer_step_post_hook(end))
            return rate(args, number, total)

        if end is alone:
            run.timedelta = lambda minutes: timedelta(seconds=1)
        for again in (False, True)[: 1 + (end is not None)]:
            sft.scheduled_rate = rate if again else schedule
            files = f"--model {model} --train_files {data} --output_dir {out}/{name}".split()
            sys.argv = ["sft.py", *files, *flags]
            code = "ended"
            try:
                sft.main(sft.Args(**sft.parse(sft.Args)))
            except SystemExit as stop:
                code = stop.code
            except RuntimeError as error:
                sys.excepthook(type(error), error, None)
                code = str(error)
                if end is alone:
                    raise
            checkpoints.write_hf = write
            while hooks:
                hooks.pop().remove()
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, code)
            if not dist.get_rank():
                print("END", name, found, sep="|", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
