"""Trainers that end at each statement between an update and its checkpoint: MODEL DATA PAIRS OUT NAME...

One run of a trainer ends at the first such statement of its first step, resumes and ends at the second one
of its second step, and so on; another one is undisturbed. Samplers and environments are made up, as in
dapo_loop.py. Prints how often each run was ended. An epoch has each row, in an order of its own.
"""

import os
import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from system import metrics, ranks, run
from tests.workers import dapo_loop

SFT = "--max_length 32 --warmup_steps 0 --lr 1e-2 --weight_decay 0.1"
NANO = "--ppo_mini_batch_size 2 --group_size 4 --max_prompt_length 16 --max_response_length 4 --lr 1e-2"
RL = f"{NANO} --warmup_steps 9 --weight_decay 0.1"
FLAGS = dict(sft=SFT, rm=SFT, grpo=RL, grpo_nano=NANO, dapo=RL, agent=f"{RL} --env none")
FLAGS["dpo"] = f"{SFT} --loss kto"
FLAGS["ppo"] = f"{RL} --critic_warmup 2 --kl_coef 0.1 --kl_target 0.01"
FLAGS["distill"] = f"{RL} --teacher MODEL --kl full --teacher_update_rate 0.1"
STEPS, at = 20, None  # steps: more than there are such statements; at: the one to end at
orders = {}  # {epoch: the numbers of its rows} of the undisturbed run; dapo.py draws its rows


def statement(frame, event, _):
    """At each line of a trainer's main after the update of a step."""
    global at
    if event == "line":
        at -= 1
        if at < 0:
            sys.settrace(None)
            raise SystemExit("error: all stop") if frame.f_lineno % 2 else RuntimeError("error: all stop")
    return statement


def updated(self, update=run.Run.updated, **state):
    update(self, **state)
    step = sys._getframe(1).f_locals
    if at is None and "epoch" in step:
        orders.setdefault(step["epoch"], []).extend(step.get("chosen", step.get("numbers")))
    for name, rate in dict(optimizer="lr", critic_optimizer="critic_lr").items():
        if rate in step:
            [group] = step[name].param_groups
            assert (group["lr"], group["weight_decay"]) == (step[rate], 0.1), name
    if at is not None:
        sys._getframe(1).f_trace = statement
        sys.settrace(lambda *_: None)


def save(self, save=run.Run.save):
    sys.settrace(None)
    return save(self)


def trajectories(talk, args, *rest, **sampling):
    rows = dapo_loop.rollout(None, args, *rest, **sampling)
    return [row | dict(turns=1, messages=[], cut_observations=0) for row in rows], 0.0


def without_sampler(name):
    """A trainer, with what answers its prompts made up."""
    script = import_module(f"algos.{name}")
    script.setup_distributed = ranks.setup_distributed
    if FLAGS[name].startswith(NANO):
        script.build_engine, script.check_sampler = lambda *_: None, lambda *_: {}
        script.awake, script.rollout, script.trajectories = dapo_loop.awake, dapo_loop.rollout, trajectories
        script.EnvPool = lambda *_: SimpleNamespace(tools=[], parser=None, calls_tools=False)
    return script


def alone(model):
    """All runs in one process, with one tokenizer."""
    run.leave = lambda _: None
    mesh = ranks.setup_distributed()
    ranks.setup_distributed = lambda *_: mesh
    metrics.matmul_speed = lambda dtype: 1e12
    dapo_loop.tokenizer = import_module("algos.grpo").load_processor(model)
    # in dapo.py some are left over for the next step
    dapo_loop.groups = [dapo_loop.MIXED] * 3 + [dapo_loop.ALL_WRONG] * 2 + [dapo_loop.MIXED] * 9


def words_of(name, model, data, out):
    words = f"--model {model} --train_files {data} --val_files {data} --train_batch_size 4 --test_freq 1"
    words += f" --total_steps {STEPS} --output_dir {out} {FLAGS[name].replace('MODEL', model)}"
    return words + f" --reward_fn {sys.path[0]}/tests/dapo_reward.py:starts_with_one" * (
        SFT not in FLAGS[name]
    )


def runs(name, model, data, out):
    """Runs of a trainer -> how often the second one was ended."""
    global at
    script = without_sampler(name)
    args = script.Args(**script.parse(script.Args, words_of(name, model, data, out).split()))
    for number in (None, *range(STEPS)):
        at, which = number, "straight" if number is None else "ended"
        try:
            script.main(replace(args, output_dir=f"{out}/{which}", save_freq=int(which == "ended")))
        except (SystemExit, RuntimeError) as error:
            if not error.args:  # of a run that has all its steps
                return number
            assert str(error) == "error: all stop", error
        else:
            if number is not None:  # there is no such statement: this one went on to the end
                return number


def rejected(name, model, data, out):
    """What a run says whose second step its check rejects, and what its second start says."""
    global at
    at = None
    script = without_sampler(name)
    script.check_sampler = reject
    words = words_of(name, model, data, out)
    said = []
    for _ in range(2):
        try:
            script.main(script.Args(**script.parse(script.Args, f"{words} --save_freq 1".split())))
        except SystemExit as stop:
            said.append(stop.code)
    return said


def reject(*arguments):
    step = arguments[-1]
    if step == 2:
        raise SystemExit(f"error: step {step} is rejected")
    return {}


def main(model, data, pairs, out, *names):
    run.Run.updated, run.Run.save = updated, save
    alone(model)
    for name in names:
        orders.clear()
        times = runs(name, model, pairs if name in ("rm", "dpo") else data, f"{out}/{name}")
        assert name == "dapo" or orders[0] != orders[1], name
        assert all(sorted(order) == [*range(len(order))] for order in orders.values()), name
        print("ENDED", name, times, sep="|", flush=True)
        if FLAGS[name].startswith(NANO):
            print(
                "REJECTED", name, rejected(name, model, data, f"{out}/{name}/rejected"), sep="|", flush=True
            )
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
