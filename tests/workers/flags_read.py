"""Trainers under conditions of their flags: MODEL RL SFT PAIRS OUT. Samplers are made up.

A run for each condition, and another one with other values of all flags that have no effect there. Prints a
script, its flags that are not read and should be, those without an effect, whether both runs are the same.
"""

import ast
import inspect
import json
import os
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import get_args

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos.variants import CLIPS
from system.arguments import unread
from tests.workers import statements

VALIDATED = "--val_files DATA --val_temperature 0.7 --val_group_size 2"
ONCE = "--total_steps 1"
RL = (f"{ONCE} --rollout_is None", f"{VALIDATED} --lora_rank 2 --rollout_rs token --rollout_rs_threshold 2")
KL = f"{ONCE} --use_kl_loss --val_files DATA"
CONDITIONS = dict(
    sft=(
        ONCE + " --lr_schedule constant",
        "--val_files DATA --lora_rank 2 --messages_key messages",
        ONCE + " --text_key text --max_length 4",
    ),
    rm=(ONCE + " --lr_schedule constant", "--val_files DATA --lora_rank 2"),
    dpo=(
        ONCE + " --lr_schedule constant",
        "--loss ipo --val_files DATA --lora_rank 2",
        "--loss simpo " + ONCE,
        "--loss kto " + ONCE,
    ),
    grpo=(*RL, KL),
    agent=(*RL, KL),
    dapo=RL,
    grpo_nano=(ONCE, ONCE + " --val_files DATA"),
    ppo=(
        f"{RL[0]} --lam_alpha 0.5 --critic_lam 0.9",
        f"{RL[1]} --kl_coef 0.1 --kl_target 0.1",
        ONCE + " --value_quantiles 4 --uncertainty_bonus 0.5",
    ),
    distill=(ONCE, f"{VALIDATED} --lora_rank 2", f"--kl sampled {RL[0]}", f"--kl sampled {RL[1]}"),
)
BASES = dict(sft=statements.SFT, rm=statements.SFT, dpo=statements.SFT, grpo_nano=statements.NANO)
BASES |= dict(agent=f"{statements.RL} --env none", distill=f"{statements.RL} --teacher MODEL")
# they would do something wrong in place of nothing; and these samples are alike of a true sampler alone
LEFT_OUT = "qlora lora_kind env val_group_size".split()
STAND_INS = "build_engine awake rollout trajectories"
reads = set()


def reading(script):
    """Its Args, which note whose values are read by name."""

    class Args(script.Args):
        def __getattribute__(self, name):
            code = sys._getframe(1).f_code
            if "dataclasses" not in code.co_filename and code.co_name != "__post_init__":
                reads.add(name)
            return super().__getattribute__(name)

    return Args


def another(field, value):
    """Another value of a flag."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return (*value, 3.0)
    return next((x for x in get_args(field.type) if x != value), f"{value}_")


def outcome(script, values, out):
    """What a run has written: its metrics without seconds, and its weights."""
    try:
        script.main(reading(script)(**values | dict(output_dir=str(out))))
    except SystemExit as error:
        if error.code:
            raise
    lines = []
    for line in (out / "metrics.jsonl").read_text().splitlines():
        kept = {k: v for k, v in json.loads(line).items() if not k.startswith(("timing", "perf"))}
        lines.append(kept)
    return lines, [path.read_bytes() for path in sorted(out.glob("checkpoints/latest/hf/*.safetensors"))]


def attributes(script):
    """Flags that the functions read which stand-ins replace."""
    functions = [getattr(script, name) for name in STAND_INS.split() if hasattr(script, name)]
    nodes = [node for f in functions for node in ast.walk(ast.parse(inspect.getsource(f)))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def main(model, rows, texts, pairs, out):
    files = dict(sft=texts, rm=pairs, dpo=pairs)
    replaced = {name: attributes(import_module(f"algos.{name}")) for name in CONDITIONS}
    statements.alone(model)
    reward = f"{sys.path[0]}/tests/dapo_reward.py:starts_with_one"
    for name, conditions in CONDITIONS.items():
        script = statements.without_sampler(name)
        for number, condition in enumerate(conditions):
            data = files.get(name, rows)
            words = f"--model MODEL --train_files DATA --train_batch_size 4 --output_dir {out}"
            words += f" {BASES.get(name, statements.RL)} {condition}"
            if name not in files:
                words += f" --reward_fn {reward}"
            words = words.replace("MODEL", model).replace("DATA", data)
            values = script.parse(script.Args, words.split())
            idle = unread(values, script.Args)
            changed = dict(values)
            for field in fields(script.Args):
                if field.name in idle and field.name not in LEFT_OUT:
                    changed[field.name] = another(field, values[field.name])
            reads.clear()
            found = outcome(script, values, Path(out, f"{name}_{number}"))
            missed = values.keys() - idle.keys() - reads - replaced[name] - CLIPS.keys()
            same = outcome(script, changed, Path(out, f"{name}_{number}_changed")) == found
            print("READ", json.dumps([name, sorted(missed), sorted(idle), same]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
