"""Who learns sooner? GRPO here against TRL's GRPOTrainer with both of its samplers: accuracy over time.

    pip install --no-deps -r requirements-bench.txt
    make demo-smollm2                                              # data and model
    python benchmarks/race.py --size smollm2 --demo runs/demo-smollm2 --prompts 16

Model, questions, reward, group, lengths, batch, schedule and KL weight are the same (FLAGS of demo.py); the
rest are each side's defaults. Its learning rate is the best of --lrs by the validation questions after
--tune_steps, the mean of all --seeds; one rate is not tried, and the trials of an earlier race can stand in
for them (--trials). A trial as long as the race is part of it. Then everybody runs --steps, GRPO here
--longer times as many, with each number of processes, seed by seed. The clock is each trainer's own and
stops while it validates or writes a checkpoint; the checkpoints are answered by generate.py, all alike.
`its time over ours`: the time that a trainer takes, over the time until GRPO here is as right as that is at
its end; of the mean curves, and of each seed. What is in --output_dir already is not run again.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from subprocess import DEVNULL
from typing import Literal

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.demo import FLAGS, TITLES
from benchmarks.lib.stages import ROOT, run
from benchmarks.lib.workload import CORES, launch, read_metrics, save
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt

OURS = "GRPO here"
ROWS = dict(tiny=(16, 512), smollm2=(8, 16))  # group, TRL's rows of a forward pass at most


@dataclass
class Args:
    demo: Path = ROOT / "runs/demo"
    """Directory of the demo, for its data and the model before GRPO."""
    output_dir: Path = ROOT / "runs/race"
    """Directory of the runs."""
    size: Literal["tiny", "smollm2"] = "tiny"
    """Which demo."""
    prompts: int = 32
    """Prompts of a step; the demos have 32 and 16."""
    lrs: tuple[float, ...] = (1e-5, 2e-5, 4e-5)
    """Learning rates that are tried."""
    tune_steps: int = 10
    """Steps of a trial."""
    trials: Path | None = None
    """JSON file of a race whose trials stand in for these; None: try --lrs."""
    steps: int = 40
    """Steps of the race."""
    longer: int = 1
    """GRPO here has so many times the steps of the race, and of a trial: a step takes less time."""
    save_freq: int = 10
    """Steps between the points of a curve."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the race and of the trials."""
    peers: tuple[Literal["TRL", "TRL, vLLM"], ...] = ("TRL", "TRL, vLLM")
    """Against whom: TRL with transformers' sampler, or with vLLM in the same process."""
    ranks: tuple[int, ...] = (2, 1)
    """Numbers of processes, which share all cores; the first is that of the trials."""
    output: Path | None = None
    """JSON file for the results; None: the table and the plot only."""


def start_of(args):
    """The model from which everybody begins."""
    sft = args.demo / "sft/checkpoints/latest/hf"
    return sft if sft.exists() else args.demo / "model"


def command(args, name, ranks, lr, seed, steps, save_freq, out):
    """Script and flags of one run."""
    group, batch = ROWS[args.size]
    flags = dict(model=start_of(args), output_dir=out, lr=lr, seed=seed)
    flags |= dict(train_files=args.demo / "data/train.parquet", total_steps=steps, save_freq=save_freq)
    if name == OURS:
        script, words = "algos/grpo.py", FLAGS[args.size]["grpo"].split()
        flags |= dict(train_batch_size=args.prompts, ppo_mini_batch_size=args.prompts, keep_checkpoints=0)
    else:
        script, words = "benchmarks/lib/peer_trl.py", FLAGS[args.size]["trl"].split()
        flags |= dict(per_device_batch=(batch := min(batch, args.prompts * group // ranks)))
        flags |= dict(accumulation=args.prompts * group // ranks // batch)
        words += ["--vllm"] if name == "TRL, vLLM" else []
    return script, [*words, *(x for k, v in flags.items() for x in (f"--{k}", v))]


def race(args, name, ranks, lr, seed, steps, save_freq):
    """One run -> its curve: steps, seconds, sampled tokens, accuracy on the validation questions."""
    steps *= args.longer if name == OURS else 1
    out = args.output_dir / f"{name.replace(', ', '_').replace(' ', '_')}_{ranks}_{lr}_{seed}"
    out = out.with_name(f"{out.name}_{args.prompts}_{steps}_{save_freq}")
    curve, trained = out / "curve.json", out / "trained"
    if not curve.exists() and not trained.exists():
        shutil.rmtree(out, ignore_errors=True)
        script, flags = command(args, name, ranks, lr, seed, steps, save_freq, out)
        print(f"$ torchrun --nproc_per_node {ranks}", script, *flags, flush=True)
        launch(script, *flags, ranks=ranks)
        trained.touch()
    if not curve.exists():
        lines, (group, _) = read_metrics(out, 0), ROWS[args.size]
        if name == OURS:
            seconds = [m["timing_s/step"] - m.get("timing_s/testing", 0) for m in lines]
            seconds, lengths = np.cumsum(seconds), [m["response_length/mean"] for m in lines]
        else:
            seconds, lengths = [m["seconds"] for m in lines], [m["completions/mean_length"] for m in lines]
        tokens = args.prompts * group * np.cumsum(lengths)
        at = range(save_freq, steps + 1, save_freq)
        point = "checkpoints/step_{:06d}/hf" if name == OURS else "checkpoint-{}"
        accuracy = validate(args, [out / point.format(step) for step in at], out)
        points = [(step, seconds[step - 1], tokens[step - 1]) for step in at]
        points = [(*map(float, point), right) for point, right in zip(points, accuracy, strict=True)]
        curve.write_text(json.dumps(points))
        for path in (*out.glob("checkpoint*"), out / "hf"):  # gigabytes
            shutil.rmtree(path, ignore_errors=True)
    return json.loads(curve.read_text())


def tune(args, names):
    """Each side's accuracies by learning rate, and everybody's best rate: TRL's two samplers share theirs."""
    trials, best = {}, {}
    if args.trials:
        for side, tried in json.loads(args.trials.read_text())["trials"].items():
            trials[side] = {float(x): accuracy for x, accuracy in tried.items()}
    for name in names:
        side = name.split(",")[0]
        if args.trials and side not in trials:
            raise SystemExit(f"error: --trials {args.trials} has none of {side}: leave it out, to try --lrs")
        if side not in trials and len(args.lrs) == 1:
            trials[side] = {args.lrs[0]: None}
        elif side not in trials:
            trials[side] = {}
            for lr in args.lrs:
                flags = args.tune_steps, args.save_freq
                curves = [race(args, name, args.ranks[0], lr, seed, *flags) for seed in args.seeds]
                trials[side][lr] = float(np.mean([curve[-1][-1] for curve in curves]))
        best[name] = max(trials[side], key=trials[side].get)
    return trials, best


def validate(args, models, out):
    """Greedy accuracy of these models on the validation questions."""
    files = [out / f"val_{i}.parquet" for i in range(len(models))]
    for model, file in zip(models, files, strict=True):
        flags = ["--model", model, "--data", args.demo / "data/val.parquet", "--output", file]
        flags += FLAGS[args.size]["generate"].split()
        if not file.exists():
            run("generate", {}, "algos/generate.py", *flags, ranks=CORES, stdout=DEVNULL)
    run("eval", {}, "algos/eval.py", "--data", *files, "--output", out / "eval", stdout=DEVNULL)
    results = json.loads((out / "eval/results.json").read_text())
    return [file["all"]["mean@1"] for file in results.values()]


def until(curve, accuracy, start):
    """Seconds until a curve, which begins with accuracy `start`, first reaches an accuracy; None: never."""
    for (_, before, _, low), (_, after, _, high) in pairwise([(0, 0.0, 0, start), *curve]):
        if high >= accuracy > start:
            return before + (after - before) * (accuracy - low) / (high - low)


def plot(args, curves, start, path):
    """Accuracy over the minutes, a panel for each number of processes, and over the sampled tokens."""
    figure, axes = plt.subplots(
        1, len(args.ranks) + 1, figsize=(5 * (len(args.ranks) + 1), 4), layout="constrained", sharey=True
    )
    for panel, ranks in zip(axes, (*args.ranks, args.ranks[0]), strict=True):
        tokens = panel is axes[-1]
        for color, name in enumerate((OURS, *args.peers)):
            points = np.array(curves[name, ranks])
            x = points[..., 2] / 1000 if tokens else points[..., 1] / 60
            x, y = np.insert(x.mean(0), 0, 0), np.insert(points[..., 3], 0, start, axis=1)
            panel.plot(x, y.mean(0), "o-", label=name, color=f"C{color}", markersize=4)
            panel.fill_between(x, y.min(0), y.max(0), color=f"C{color}", alpha=0.15, lw=0)
        title = f"{ranks} process" + "es" * (ranks > 1)
        panel.set(title=title, xlabel="thousand sampled tokens" if tokens else "minutes of training")
        panel.grid(alpha=0.3)
    axes[0].set(ylabel="validation accuracy (greedy)")
    axes[0].legend()
    seeds = ", ".join(map(str, args.seeds))
    figure.suptitle(f"{TITLES[args.size]}: mean and range, seeds {seeds}")
    figure.savefig(path, dpi=120)


def check(args):
    """Stop where curves would lack their end, or TRL would sample fewer responses than we."""
    if args.steps % args.save_freq or (not args.trials and args.tune_steps % args.save_freq):
        raise SystemExit("error: --steps and --tune_steps must be multiples of --save_freq")
    group, batch = ROWS[args.size]
    for ranks in args.ranks:
        rows, rest = divmod(args.prompts * group, ranks)
        if rest or rows % min(batch, rows):
            what = f"{args.prompts * group} responses on {ranks} processes"
            raise SystemExit(f"error: {what} do not divide into TRL's passes of {batch}: change --prompts")


def main():
    args = command_line(Args)
    check(args)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    names = (OURS, *args.peers)
    trials, lr = tune(args, names)
    [start] = validate(args, [start_of(args)], args.output_dir)
    print(f"before {start:.1%}, trials {trials}", flush=True)
    curves = {(name, ranks): [] for ranks in args.ranks for name in names}
    for seed in args.seeds:  # all of them with one, then the next: a slow hour is everybody's
        for name, ranks in curves:
            curves[name, ranks] += [race(args, name, ranks, lr[name], seed, args.steps, args.save_freq)]
    more = f", {OURS} {args.longer} times as many" if args.longer > 1 else ""
    columns = "", "processes", "rate", "accuracy", "s a step", "minutes", "its time over ours"
    table = Table(*columns, title=f"{TITLES[args.size]}: {args.steps} steps{more}")
    rows = []
    for (name, ranks), runs in curves.items():
        final, ours = [curve[-1] for curve in runs], curves[OURS, ranks]
        pairs = [(np.mean(runs, 0), np.mean(ours, 0)), *zip(runs, ours, strict=True)]
        reached = [(theirs[-1][1], until(us, theirs[-1][3], start)) for theirs, us in pairs]
        ratios = [seconds / ours if ours else None for seconds, ours in reached]
        seconds, accuracy = (np.array(final)[:, i] for i in (1, 3))
        shown = [f"{x:.2f}" if x else "not reached" for x in ratios]
        table.add_row(
            name,
            str(ranks),
            f"{lr[name]:g}",
            f"{accuracy.mean():.1%} ({accuracy.min():.1%} to {accuracy.max():.1%})",
            f"{seconds.mean() / final[0][0]:.1f}",
            f"{seconds.mean() / 60:.1f}",
            f"{shown[0]} ({', '.join(shown[1:])})" if name != OURS else "",
        )
        rows.append(
            dict(name=name, ranks=ranks, lr=lr[name], ratio=ratios[0], ratios=ratios[1:], curves=runs)
        )
    Console().print(table)
    plot(args, curves, start, args.output_dir / "race.png")
    if args.output:
        save(args.output, args, dict(before=start, trials=trials, rows=rows))


if __name__ == "__main__":
    main()
