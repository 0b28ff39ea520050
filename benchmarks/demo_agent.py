"""`make demo-agent`: a random model of 1M parameters learns to use a calculator, in minutes on a CPU.

data -> random model -> sft.py, on conversations of which a third ask the calculator -> from there agent.py
with the calculator and, to compare, grpo.py without -> held-out products, before and after. Writes
runs/demo-agent: a run directory a stage and seed, logs/, agent.png, summary.json. A finished stage is not run
again.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.stages import RANKS, ROOT, Stages
from benchmarks.lib.workload import curve
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt

ENV = "--env", ROOT / "envs/calculator.py:Calculator"
SFT = "--messages_key messages --max_length 48 --train_batch_size 64 --total_steps 320 --lr 1e-3"
SFT += " --lr_schedule constant --warmup_steps 20 --gradient_checkpointing none"
LIMITS = "--max_prompt_length 16 --max_response_length 32"
RL = "--train_batch_size 16 --group_size 8 --total_steps 30 --test_freq 5 --lr 3e-4"
RL += " --warmup_steps 2 --weight_decay 0 --gradient_checkpointing none"
# a stage of RL: what its model may use, and its script
STAGES = {"with the calculator": ("agent", ENV), "without": ("grpo", ())}


@dataclass
class Args:
    output_dir: Path = ROOT / "runs/demo-agent"
    """Directory of the demo."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the whole flow but the data."""
    ranks: int = RANKS
    """Processes of the trainers, one thread each; by default one on each GPU, or two."""


def plot(runs, path):
    """Mean and range over the seeds of greedy validation accuracy, and of the share that calls the tool."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, (name, outs) in enumerate(runs.items()):
        lines = [("right, greedy", "val-core/arithmetic/acc/mean@1", "o-")]
        lines += [("asks the calculator, sampled", "env/used_ratio", "--")] * (name != "without")
        for label, key, style in lines:
            curves = [curve(out, key) for out in outs]
            steps, values = curves[0][0], np.array([values for _, values in curves])
            axes.plot(steps, values.mean(0), style, label=f"{name}: {label}", color=f"C{color}", markersize=4)
            axes.fill_between(steps, values.min(0), values.max(0), color=f"C{color}", alpha=0.15, lw=0)
    axes.set(xlabel="GRPO step", ylabel="share of responses", ylim=(0, 1.02))
    axes.set_title(f"Two-digit multiplication, 1M parameters, seeds: {len(outs)}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main():
    args = command_line(Args)
    out, runs, tests = args.output_dir, {name: [] for name in STAGES}, {}
    stages = Stages(out, 2 + 7 * len(args.seeds))
    data = "--local_save_dir", out / "data", "--operation", "multiply", "--tool_share", 0.33
    stages.run("data", "data", "data_prep/arithmetic.py", *data)
    for seed in args.seeds:
        model, sft = out / f"model_{seed}", out / f"sft_{seed}"
        flags = "--local_save_dir", model, "--tool_role", "--seed", seed
        stages.run(model.name, "model", "data_prep/tiny_model.py", *flags)
        common = "--seed", seed, "--save_freq", 0
        flags = "--model", model, "--output_dir", sft, "--train_files", out / "data/sft.parquet", *common
        flags += (*SFT.split(),)
        stages.run(sft.name, "SFT: a third use the tool", "algos/sft.py", *flags, ranks=args.ranks)
        tests["before", seed] = sft, ENV
        for name, (script, env) in STAGES.items():
            runs[name].append(rl := out / f"{script}_{seed}")
            flags = (
                "--model",
                sft / "checkpoints/latest/hf",
                "--output_dir",
                rl,
                *env,
                *LIMITS.split(),
                *RL.split(),
                *common,
            )
            flags += "--train_files", out / "data/train.parquet", "--val_files", out / "data/val.parquet"
            title = f"GRPO {name}".replace("the calculator", "calculator")
            stages.run(rl.name, title, f"algos/{script}.py", *flags, ranks=args.ranks)
            tests[name, seed] = rl, env
    for (name, _), (model, env) in tests.items():
        answers = model / "test.parquet"
        flags = "--model", model, "--data", out / "data/test.parquet", "--output", answers, *env
        title = f"answers {name}".replace("the calculator", "calculator")
        stages.run(f"answers_{model.name}", title, "algos/generate.py", *flags, *LIMITS.split())
    answers = [model / "test.parquet" for model, _ in tests.values()]
    stages.run("eval", "score", "algos/eval.py", "--data", *answers, "--output", out / "eval")
    plot(runs, out / "agent.png")

    # ---- report
    results = json.loads((out / "eval/results.json").read_text()).values()
    summary, table = {}, Table("", "right", "asks", title="512 held-out products, greedy")
    for (name, seed), file, path in zip(tests, results, answers, strict=True):
        columns, right = pq.read_table(path).to_pydict(), file["all"]["mean@1"]
        asked = np.mean([json.loads(x)["turns"] > 1 for row in columns.get("episodes", []) for x in row] or 0)
        summary[f"{name}, seed {seed}"] = dict(right=right, asked=float(asked))
        table.add_row(
            f"{name}, seed {seed}", f"{right:.1%}", f"{asked:.1%}" if "episodes" in columns else "-"
        )
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    Console().print(table)
    print(f"{out}/agent.png  {out}/summary.json")


if __name__ == "__main__":
    main()
