"""A reward that learns: what does PPO gain if its judge is trained again on each round's responses?

    python benchmarks/experiments/adversarial.py                 # the demo's task, ten minutes on one core
    python benchmarks/experiments/adversarial.py --task sums     # two-digit sums

The judge learns pairs: the reference answer against the policy's own. In one run it is
trained in every round, on the pairs of all rounds so far, in the other one once. The rules only look on.
Writes runs/adversarial: a directory a stage, results.json; what is done is not run again.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.demo import FLAGS
from benchmarks.experiments import sums
from benchmarks.lib.stages import ROOT, Stages
from benchmarks.lib.workload import read_metrics, save
from data_prep.lib.schema import write_parquet
from system.arguments import command_line

ROUNDS, STEPS, PAIRS = 5, 6, 768  # rounds of a run, steps of PPO in a round, new pairs of a round
JUDGE = "--max_length 64 --train_batch_size 64 --total_epochs 2 --lr 3e-4 --warmup_steps 5"
POLICY = "--critic_lr 1e-3 --critic_warmup 2 --reward_weights 0 1 --warmup_steps 2 --save_freq 0"
SUMS = dict(model="data_prep/tiny_model.py", data="data_prep/arithmetic.py --test_size 512")
TASKS = {"demo": (FLAGS["tiny"], 1), "sums": (SUMS | sums.FLAGS, 8)}  # flags, and responses to a prompt


@dataclass
class Args:
    task: Literal["demo", "sums"] = "demo"
    """demo: last digits, of which the SFT model can write the steps; sums: it adds at once, mostly wrong."""
    output_dir: Path = ROOT / "runs/adversarial"
    """Directory of the tasks."""
    seed: int = 1
    """Seed of the trainers."""


def pairs(answers):
    """Rows for rm.py: what the data answers, against a sampled response that differs."""
    rows = []
    for row in pq.read_table(answers).to_pylist():
        answer, own = row["extra_info"]["answer"], row["responses"][0]
        if own and own != answer:
            chosen, rejected = ([dict(role="assistant", content=text)] for text in (answer, own))
            rows.append(dict(prompt=row["prompt"], chosen=chosen, rejected=rejected))
    return rows


def main(args):
    (flags, group), out = TASKS[args.task], args.output_dir / args.task
    flags = {name: words.split() for name, words in flags.items()}
    hf = lambda name: out / name / "checkpoints/latest/hf"
    stages, common = Stages(out, 3 + 3 * ROUNDS + 2 + ROUNDS), ("--seed", args.seed, "--save_freq", 0)
    train, test, taught = (out / f"data/{name}.parquet" for name in ("train", "test", "sft"))
    stages.run("data", "data", *flags["data"], "--local_save_dir", out / "data")
    stages.run("model", "model", *flags["model"], "--local_save_dir", out / "model")
    if not taught.exists():
        pq.write_table(pq.read_table(train).slice(0, 600), taught)
    files = "--model", out / "model", "--train_files", taught, "--output_dir", out / "sft"
    stages.run("sft", "SFT", "algos/sft.py", *files, *common, *flags["sft"])
    curves = {}
    for name in ("again", "once"):
        policy, rows, lines = "sft", [], []
        for number in range(ROUNDS):
            asked, answers, judge = (out / f"{name}_{x}_{number}" for x in ("asked", "answers", "judge"))
            if number == 0 or name == "again":
                pq.write_table(pq.read_table(train).slice(number * PAIRS, PAIRS), asked)
                files = "--model", hf(policy), "--data", asked, "--output", answers
                samples = "--temperature", 1, "--seed", number, *flags["generate"]
                stages.run(answers.name, f"{name} {number}: samples", "algos/generate.py", *files, *samples)
                rows += pairs(answers)
                write_parquet(rows, out / "pairs.parquet")
                files = "--model", hf("sft"), "--train_files", out / "pairs.parquet", "--output_dir", judge
                title = f"{name} {number}: judge"
                stages.run(judge.name, title, "algos/rm.py", *files, *common, *JUDGE.split())
                reward_model = hf(judge.name)
            files = "--train_files", train, "--val_files", test, "--output_dir", out / f"{name}_{number}"
            models = "--model", hf(policy), "--reward_model", reward_model, "--total_steps", STEPS
            more = "--group_size", group, "--test_freq", STEPS, "--seed", args.seed + number
            words = *files, *models, *flags["grpo"], *POLICY.split(), *more
            stages.run(files[-1].name, f"{name} {number}: PPO", "algos/ppo.py", *words)
            policy = f"{name}_{number}"
            lines.append(read_metrics(out / policy, 0))
        key = next(key for key in lines[0][0] if "acc/mean@1" in key)
        right = [[line[key] for line in run if key in line] for run in lines]
        score = [[line["critic/score/mean"] for line in run if "critic/score/mean" in line] for run in lines]
        curves[name] = dict(right=[right[0][0], *(x[-1] for x in right)], score=score)
        print(name, "right after each round:", *(f"{x:.1%}" for x in curves[name]["right"]))
    save(out / "results.json", args, dict(curves=curves, seconds=stages.seconds))


if __name__ == "__main__":
    main(command_line(Args))
