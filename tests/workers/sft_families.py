"""check_layout on tiny models of many families -> JSON {FAMILY: {LAYOUT: "equal", or why not}}.

sft_families.py MODELS OUT FAMILY... : one row each, and with --packing (eager where sdpa is refused), or
under torchrun a row over all ranks, by each kind of attention. "equal, one row" where texts share a row.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import sft
from system.ranks import leave
from tests import families

LAYOUTS = {"sdpa padded": ("sdpa", False), "sdpa packed": ("sdpa", True), "eager packed": ("eager", True)}
SLICES = dict.fromkeys(("ulysses", "ring"), ("sdpa", True))
ROWS = [list(range(6, 6 + length)) for length in (23, 12, 33, 8)]


def main(models, out, *names):
    world = int(os.environ.get("WORLD_SIZE", 1))
    device, mesh = sft.setup_distributed(1)
    rows = [dict(prompt_ids=ids[:3], response_ids=ids[3:]) for ids in ROWS]
    found = {name: {} for name in names}
    for name in names:
        model = str(Path(models) / name)
        if sft.dist.get_rank() == 0:
            families.write(name, model)
        sft.dist.barrier()
        for layout, (kernel, packing) in LAYOUTS.items() if world == 1 else SLICES.items():
            if kernel == "eager" and found[name]["sdpa padded"] == "equal":
                continue
            args = dict(attn_implementation=kernel, packing=packing, sp_size=world)
            args |= dict(sp_attention=layout) if world > 1 else {}
            args = sft.Args(model=model, train_files=(), output_dir="", **args)
            try:
                lm = sft.check_model(model, kernel, sft.adapters_of(args))
                sft.refuse_model(args)
                sft.families.check_positions(lm, args.max_length)
                policy = sft.load_model(args, mesh, device, None)
                sft.check_layout(policy, rows, args)
                found[name][layout] = "equal, one row" if policy.packed else "equal"
            except (SystemExit, ValueError) as refused:
                found[name][layout] = str(refused)
    if sft.dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
