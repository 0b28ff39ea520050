"""What ppo.py gets from a reward model for the conversations of a file of pairs: MODEL PAIRS OUT."""

import json
import sys
from pathlib import Path

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import ppo
from data_prep.lib.schema import load_rows
from system.ranks import leave


def main(model, pairs, out):
    device, mesh = ppo.setup_distributed(1)
    args = ppo.Args(model=model, train_files=(), output_dir="", attn_implementation="sdpa")
    args.reward_model = (model,)
    [tokenizer] = ppo.check_reward_models(args)
    judge = ppo.load_reward_model(args, model, mesh, device)
    rows = [
        dict(prompt=row["prompt"], sampled=dict(solution_str=row[key][0]["content"]), rank=0)
        for row in load_rows(pairs, ["prompt", "chosen", "rejected"])
        for key in ("chosen", "rejected")
    ]
    results = ppo.model_scores(judge, tokenizer, rows, args)
    Path(out).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
