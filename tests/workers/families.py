"""Sampler against trainer for families of models: DIRECTORY FAMILY[:ATTENTION[:DTYPE]]...

Twice the sampler loses its weights, and a sync brings them back.
Prints for each what the check of a step says: "right" and the largest mean gap of its log-probs, or the line
that the run stops with.
"""

import dataclasses
import math
import os
import sys
from functools import partial

import torch

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
sys.path.insert(0, __file__.rsplit("/workers/", 1)[0])
from families import write

from algos import grpo
from system.ranks import leave


def sleep(model):
    """A sampler's weights are lost, as a GPU's are: all but registered buffers, which vLLM keeps."""
    kept = {x.untyped_storage().data_ptr() for x in model.buffers()}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False)) | vars(module)
        for x in [x for name, x in own.items() if torch.is_tensor(x) and name != "kv_cache"]:
            if x.is_floating_point() and x.untyped_storage().data_ptr() not in kept:
                x.data.fill_(math.nan)


def check(directory, family, mesh, device, engines, attention="sdpa", dtype="float32"):
    write(family, f"{directory}/{family}")
    args = grpo.Args(model=f"{directory}/{family}", train_files=(), output_dir="")
    args = dataclasses.replace(args, attn_implementation=attention, max_prompt_length=32)
    args, gaps = dataclasses.replace(args, max_response_length=16, compute_dtype=dtype), []
    try:
        engines.append(grpo.build_engine(args, device))
        policy = grpo.load_model(args, mesh, device, None, grpo.adapters_of(args))
        prompts = [dict(prompt_ids=list(range(8, 12 + i)), index=i, group=i) for i in range(2)]
        for step in (1, 2):
            engines[-1].apply_model(sleep)
            with grpo.awake(engines[-1], [policy], None, args, {}):
                sampling = dict(temperature=1.0, max_tokens=8, stop_token_ids=[1])
                rows = grpo.rollout(engines[-1], args, prompts, step, 2, **sampling)
            budget = args.max_tokens_per_microbatch
            mini_batches, own_rows, _ = grpo.distribute(rows, 1, budget, policy.packed)
            grpo.store_logps(policy, mini_batches, "old_logp_t", 1.0, budget)
            weigh = partial(grpo.rollout_weights, args)
            limit = grpo.families.rounding_limit(policy.lm, dtype)
            found = grpo.check_sampler(own_rows, weigh, limit, step)
            gaps.append(found["training/rollout_logp_diff_mean"])
            for x in policy.parameters():
                local = x.detach().to_local()
                local.copy_(local.roll(1, 0))
    except SystemExit as stop:
        return str(stop.code)
    return f"right {max(gaps):.2g}"


def main(directory, *families):
    device, mesh = grpo.setup_distributed(1)
    os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1")
    import vllm

    big = vllm.EngineArgs  # all engines stay: with the cache of a run they would fill the memory of a machine
    vllm.EngineArgs = lambda **options: big(**options | dict(kv_cache_memory_bytes=1 << 25))
    engines = []  # the process group ends with the first one
    for family in families:
        name, *options = family.split(":")
        print("FAMILY", family, check(directory, name, mesh, device, engines, *options), sep="|", flush=True)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
