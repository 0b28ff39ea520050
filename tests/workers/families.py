"""Sampler against trainer for families of models, after two syncs: DIRECTORY FAMILY[:ATTENTION[:DTYPE]]...

Prints for each what the check before the first step says: "right", or the line that the run stops with.
"""

import dataclasses
import sys
from functools import partial

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
sys.path.insert(0, __file__.rsplit("/workers/", 1)[0])
from families import write

from algos import grpo


def check(directory, family, mesh, device, engines, attention="sdpa", dtype="float32"):
    write(family, f"{directory}/{family}")
    args = grpo.Args(model=f"{directory}/{family}", train_files=(), output_dir="")
    args = dataclasses.replace(args, attn_implementation=attention, max_prompt_length=32)
    args = dataclasses.replace(args, max_response_length=16, compute_dtype=dtype)
    try:
        engines.append(grpo.build_engine(args, device))
        policy = grpo.load_model(args, mesh, device)
        sampler = partial(grpo.awake, engines[-1], [policy], None, args, stop_token_ids=[1])
        rows = [dict(prompt_ids=list(range(8, 12 + i)), index=i) for i in range(2)]
        grpo.check_engines(sampler, policy, rows, args)
        for x in policy.parameters():
            local = x.detach().to_local()
            local.copy_(local.roll(1, 0))
        grpo.check_engines(sampler, policy, rows, args)
    except SystemExit as stop:
        return str(stop.code)
    return "right"


def main(directory, *families):
    device, mesh = grpo.setup_distributed(1)
    engines = []  # the process group ends with the first one
    for family in families:
        name, *options = family.split(":")
        print("FAMILY", family, check(directory, name, mesh, device, engines, *options), sep="|", flush=True)
    grpo.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
