"""What a budget of sampled tokens buys: RFT, RFT in rounds, DPO and GRPO from one SFT model, several seeds.

    python benchmarks/experiments/sums.py  # data and model
    python benchmarks/experiments/preferences.py     # three quarters of an hour on two cores

A seed is that of the whole flow. RFT and DPO learn from the first of the SFT model's samples, in rounds each
model from the samples of the one before; GRPO is one run. Writes runs/preferences: results.json,
preferences.png, a directory a stage; what is there already is not made again.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import matplotlib
import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.experiments.sums import FLAGS
from benchmarks.lib.stages import ROOT, run
from benchmarks.lib.workload import read_metrics, save
from data_prep.lib.schema import load_rows
from system.arguments import command_line

matplotlib.use("agg")
import matplotlib.pyplot as plt

BUDGETS, ROUNDS = (2048, 8192, 32768), 4  # sampled responses; rounds of a share of the last budget
SHARE = BUDGETS[-1] // ROUNDS
N_SAMPLES, A_STEP = 8, 512  # responses to a prompt of RFT and DPO; of a step of GRPO, 32 x 16
STEP = "--max_length 32 --lr_schedule constant --warmup_steps 5 --test_freq 0 --save_freq 0"
STEP += " --gradient_checkpointing none --train_batch_size 64"
SFT = STEP.replace("_steps 5", "_steps 20") + " --total_steps 300 --lr 1e-3"
RFT, DPO = f"{STEP} --total_steps 150 --lr 3e-4", f"{STEP} --total_steps 100 --lr 1e-4"
ONCE = {"RFT": RFT, "DPO with NLL": f"{DPO} --nll_coef 1", "DPO": DPO}
GRPO = f"{FLAGS['grpo']} --save_freq 0 --total_steps {BUDGETS[-1] // A_STEP}"
GRPO = GRPO.replace("linear", "constant").replace("--test_freq 10", "--test_freq 4")
RIGHT = "val-core/arithmetic/acc/mean@1"
GENERATE = f"{FLAGS['generate']} --n_samples {N_SAMPLES} --temperature 1"


@dataclass
class Args:
    demo: Path = ROOT / "runs/sums"
    """Directory of sums.py, for its data and its random model."""
    output_dir: Path = ROOT / "runs/preferences"
    """Directory of the runs."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the whole flow."""
    ranks: int = 1
    """Processes of the trainers, one thread each."""


def costs(out):
    """Lines of a run's metrics; after each: tokens trained, seconds of updates, tokens sampled by itself."""
    lines = read_metrics(out, 0)
    keys = "perf/total_num_tokens", "timing_s/update_actor", "response_length/mean"
    return lines, np.cumsum([[m.get(key, 0) for key in keys] for m in lines], axis=0) * [1, 1, A_STEP]


def accuracy(hf, file):
    """Of greedy answers to prompts of one length."""
    tokenizer, model = AutoTokenizer.from_pretrained(hf), AutoModelForCausalLM.from_pretrained(hf)
    rows = load_rows(file, ["prompt", "reward_model"])
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompts, max_new_tokens=8, do_sample=False)[:, prompts["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return np.mean([x == row["reward_model"]["ground_truth"] for x, row in zip(texts, rows, strict=True)])


def flow(args, seed):
    """All of a seed -> method, responses and tokens sampled, tokens trained, seconds of updates, accuracy."""
    data, found, where = args.demo / "data", [], lambda name: args.output_dir / f"{name}_{seed}"
    hf = lambda name: where(name) / "checkpoints/latest/hf"

    def once(made, script, *flags, **options):
        if not made.exists():
            run(script, {}, script, *flags, **options)

    def train(name, script, flags, model, file, *more):
        flags = "--model", model, "--train_files", file, "--seed", seed, *flags.split(), *more
        once(hf(name), f"algos/{script}.py", "--output_dir", where(name), *flags, ranks=args.ranks)

    def rows(name, first, responses, budget):
        """Samples of a model to the prompts from the first on -> of the budget: right ones, pairs, tokens."""
        out, chosen = where(f"{name}_samples"), where(f"{name}_{budget}_rows")
        for directory in (out, chosen):
            directory.mkdir(parents=True, exist_ok=True)
        prompts, answers, scored = (out / f"{x}.parquet" for x in ("prompts", "responses", "scored_A"))
        table = pq.read_table(data / "train.parquet")
        pq.write_table(table.slice(first // N_SAMPLES, responses // N_SAMPLES), prompts)
        flags = "--model", hf(name), "--data", prompts, "--output", answers, "--seed", seed
        once(answers, "algos/generate.py", *flags, *GENERATE.split())
        once(scored, "algos/eval.py", "--data", answers, "--output", out, stdout=DEVNULL)
        table = pq.read_table(scored).slice(0, budget // N_SAMPLES)
        pq.write_table(table, chosen / "scored.parquet")
        flags = chosen / "scored.parquet", "--local_save_dir", chosen
        once(chosen / "sft.parquet", "data_prep/rejection.py", *flags)
        tokens = sum(sum(table["response_tokens"].to_pylist(), []))
        return chosen / "sft.parquet", chosen / "pairs.parquet", tokens

    def note(method, responses, tokens, *names):
        """The last of these runs, which has cost what all of them have."""
        trained, seconds, _ = np.sum([costs(where(name))[1][-1] for name in names], axis=0)
        right = accuracy(hf(names[-1]), data / "test.parquet")
        found.append([method, responses, tokens, trained, seconds, right])

    train("sft", "sft", SFT, args.demo / "model", data / "train.parquet")
    found.append(["SFT", 0, 0, 0, 0, accuracy(hf("sft"), data / "test.parquet")])
    # ---- from samples of the SFT model
    for budget in BUDGETS:
        right, pairs, tokens = rows("sft", 0, BUDGETS[-1], budget)
        for method, flags in [*ONCE.items()][: 3 if budget == BUDGETS[-1] else 2]:  # DPO as it is: the last
            name = f"{method.lower().replace(' ', '_')}_{budget}"
            script, file = ("sft", right) if method == "RFT" else ("dpo", pairs)
            train(name, script, flags, hf("sft"), file)
            note(method, budget, tokens, name)
    # ---- in rounds: each model from samples of the one before, the first of which is RFT's on such a share
    names, tokens = [f"rft_{SHARE}"], rows("sft", 0, BUDGETS[-1], SHARE)[-1]
    for number in range(1, ROUNDS):
        right, _, more = rows(names[-1], number * SHARE, SHARE, SHARE)
        names.append(f"round_{number + 1}")
        train(names[-1], "sft", RFT, hf(names[-2]), right)
        tokens += more
        note("RFT in rounds", (number + 1) * SHARE, tokens, *names)
    # ---- GRPO, whose validation is on the held-out rows
    train("grpo", "grpo", GRPO, hf("sft"), data / "train.parquet", "--val_files", data / "test.parquet")
    for line, (trained, seconds, tokens) in zip(*costs(where("grpo")), strict=True):
        if RIGHT in line and (step := int(line["training/global_step"])):
            found.append(["GRPO", A_STEP * step, tokens, trained, seconds, line[RIGHT]])
    return found


def plot(groups, path):
    """Accuracy over sampled tokens: mean and range of the seeds."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for method in (*ONCE, "RFT in rounds", "GRPO"):
        first = [("SFT", 0), ("RFT", SHARE)][: 1 + (method == "RFT in rounds")]
        points = [groups[key] for key in (*first, *(key for key in groups if key[0] == method))]
        x, y = (np.array([[row[i] for row in rows] for rows in points]) for i in (0, -1))
        axes.plot(x.mean(1), y.mean(1), marker="." if method == "GRPO" else "o", label=method)
        axes.fill_between(x.mean(1), y.min(1), y.max(1), alpha=0.15, lw=0)
    axes.set(xlabel="sampled tokens", ylabel="512 held-out sums, greedy", ylim=(0, 1))
    axes.set(title=f"From the same SFT models: mean and range of {y.shape[1]} seeds")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main():
    args, groups = command_line(Args), {}
    for method, responses, *numbers in [row for seed in args.seeds for row in flow(args, seed)]:
        groups.setdefault((method, responses), []).append(numbers)
    plot(groups, args.output_dir / "preferences.png")
    table = Table(
        "", "responses", "their tokens", "tokens trained", "seconds of it", "right", "standard deviation"
    )
    for (method, responses), rows in groups.items():
        if responses in (0, *BUDGETS):
            *means, right = np.mean(rows, axis=0)
            spread = np.std([row[-1] for row in rows], ddof=1)
            numbers = *(f"{x:,.0f}" for x in (responses, *means)), f"{right:.1%}", f"{spread:.1%}"
            table.add_row(method, *numbers)
    Console().print(table)
    results = [dict(method=method, responses=n, seeds=rows) for (method, n), rows in groups.items()]
    save(args.output_dir / "results.json", args, dict(results=results))


if __name__ == "__main__":
    main()
