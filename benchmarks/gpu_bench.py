"""How fast GRPO is on one GPU, part by part, with random weights of 7B's width: ten minutes on an H100.

    python benchmarks/gpu_bench.py
    python benchmarks/gpu_bench.py --minutes 5

Each line is printed when it is measured, and is then in OUTPUT_DIR/gpu_bench.md. A part begins only if the
time that is planned for it is left. On a CPU the same parts run with a tiny model, in about a minute.
Docs: docs/results/gpu.md
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

BEGIN, ROOT = time.time(), Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu_memory import SIZES
from system.arguments import parse


@dataclass(kw_only=True)
class Args:
    minutes: float = 10.5  # budget; a part that does not fit is left out, and what runs at its end is stopped
    output_dir: Path = ROOT / "runs/gpu_bench"  # directory of the table and of the parts' output


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import torch

from benchmarks.lib.workload import machine, make_rows, read_metrics

CUDA = torch.cuda.is_available()
TINY = (64, 128, 2, 2, 1, 512)  # as SIZES
# by whether there is a GPU: sizes of the models; prompts, responses to each, tokens of both
MODELS = {
    True: {"deep": SIZES["7B"], "short": (*SIZES["7B"][:2], 8, *SIZES["7B"][3:])},
    False: {"deep": TINY, "short": TINY},
}
ROWS = {True: (8, 8, 256, 480), False: (4, 4, 16, 12)}
# seconds on an H100, and all of a part's process
PLAN = {"training": 255, "sampling": 150, "GRPO": 75, "GRPO, FP8 rollout": 75, "TRL": 105}
STEPS = 3  # of GRPO
METRICS = {  # of a step, as the table has them
    "timing_s/gen": "sampling {:.2f} s",
    "timing_s/sync": "sync {:.2f} s",
    "timing_s/update_actor": "update {:.2f} s",
    "perf/throughput": "{:.0f} tokens/s",
    "perf/mfu/actor": "MFU {:.3f}",
    "training/rollout_logp_diff_mean": "log-probs {:.4f} apart",
    "perf/max_memory_allocated_gb": "peak {:.1f} GiB",
}


class Budget:
    """Time until `end`, and the table, which gets each line when it is measured."""

    def __init__(self, table, end):
        self.table, self.end = Path(table), float(end)

    def left(self):
        return self.end - time.time()

    def say(self, what, value):
        line = f"| {what} | {value} |"
        print(line, flush=True)
        with self.table.open("a") as file:
            file.write(line + "\n")

    def run(self, what, seconds, part, *inputs):
        """Run a part if the seconds that it takes on an H100 are left; if it fails the next one begins."""
        if self.left() < (seconds if CUDA else 1):
            self.say(what, f"left out: it takes {seconds} s, and {max(self.left(), 0):.0f} s are left")
            return
        try:
            part(*inputs)
        except (RuntimeError, ValueError, TypeError, OSError, LookupError, AttributeError) as error:
            first = (str(error).strip() or repr(error)).splitlines()[0].replace("|", "/")
            self.say(what, f"failed: {type(error).__name__}: {first[:200]}")


def follow(command, log, budget, seconds, read=None):
    """Run a program, on a GPU for so many seconds. RuntimeError with its last line if it fails.

    read: called now and then; says what is new, and returns whether that is enough.
    """
    end = min(budget.end, time.time() + seconds) if CUDA else budget.end
    env = os.environ | dict(HF_HUB_OFFLINE="1", OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
    with log.open("w") as output:
        stdout = output if read else None  # a worker writes lines of the table
        process = subprocess.Popen([*map(str, command)], stdout=stdout, stderr=output, env=env)
        try:
            while (running := process.poll() is None) and time.time() < end and not (read and read()):
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    enough = read and read()
    if running and not enough:
        raise RuntimeError("stopped at the end of its time")
    if process.returncode and not enough:
        raise RuntimeError((log.read_text().strip().splitlines() or ["no output"])[-1])


def worker(name, out, budget):
    """A process of lib/gpu_bench_worker.py, which writes its own lines."""
    end = min(budget.end, time.time() + PLAN[name]) if CUDA else budget.end
    script = ROOT / "benchmarks/lib/gpu_bench_worker.py"
    follow([sys.executable, script, out, budget.table, end, name], out / f"{name}.log", budget, PLAN[name])


def steps(name, script, words, count, describe, out, budget):
    """Run a trainer until it has `count` steps: it saves a checkpoint after its last one. A line for each."""
    run, said = out / name.replace(", ", "_").replace(" ", "_"), []

    def read():
        found = read_metrics(run, 0) if (run / "metrics.jsonl").exists() else []
        for metrics in found[len(said) : count]:
            said.append(metrics)
            budget.say(f"{name}, step {len(said)}", describe(said))
        return len(said) >= count

    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, ROOT / script, "--output_dir", run, "--model", out / "short", *words]
    command += ["--train_files", out / "rows.parquet", "--total_steps", count + 1]
    try:
        follow(command, run.with_suffix(".log"), budget, PLAN[name], read)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def grpo_words():
    prompts, group, prompt_length, length = ROWS[CUDA]
    words = "--train_batch_size", prompts, "--ppo_mini_batch_size", prompts, "--group_size", group
    words += "--max_prompt_length", 2 * prompt_length, "--max_response_length", length
    words += "--gpu_memory_utilization", 0.4, "--save_freq", 0
    return *words, "--reward_fn", f"{ROOT / 'benchmarks/lib/alternating.py'}:parity"


def describe_grpo(said):
    """What the last step has."""
    return ", ".join(form.format(said[-1][key]) for key, form in METRICS.items() if key in said[-1])


def trl_words():
    prompts, group, prompt_length, length = ROWS[CUDA]
    words = "--algo", "grpo", "--vllm", "--group_size", group, "--response_length", length
    words += "--per_device_batch", 2, "--accumulation", prompts * group // 2
    return *words, "--max_length", 2 * prompt_length + length


def describe_trl(said):
    """Tokens/s of the last step, as perf/throughput; the first one warms up."""
    tokens, seconds = [m["num_tokens"] for m in said], [m["seconds"] for m in said]
    if len(said) == 1:
        return f"{tokens[0] / seconds[0]:.0f} tokens/s, the first step"
    return f"{(tokens[-1] - tokens[-2]) / (seconds[-1] - seconds[-2]):.0f} tokens/s"


def main(args):
    out = args.output_dir.resolve()
    out.mkdir(parents=True, exist_ok=True)
    budget, here = Budget(out / "gpu_bench.md", BEGIN + 60 * args.minutes), machine()
    where = ", ".join(here["gpus"]) or f"CPU, {here['cores']} cores, {here['processor']}"
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    head = f"gpu_bench at {here['commit']}: {where}; {versions}\n\n| Part | Measured |\n|---|---|"
    print(head, flush=True)
    budget.table.write_text(head + "\n")
    budget.run("training", 90, worker, "training", out, budget)  # its parts look at the time themselves
    budget.run("sampling", PLAN["sampling"], worker, "sampling", out, budget)
    if (out / "short/config.json").exists():
        prompts, _, prompt_length, length = ROWS[CUDA]
        make_rows(out / "short", out / "rows.parquet", (STEPS + 1) * prompts, prompt_length, length)
    runs = {"GRPO": ("algos/grpo.py", grpo_words(), STEPS, describe_grpo)}
    fp8 = *grpo_words(), "--rollout_quantization", "fp8"
    runs["GRPO, FP8 rollout"] = "algos/grpo.py", fp8, 1, describe_grpo
    runs["TRL"] = "benchmarks/lib/peer_trl.py", trl_words(), 2, describe_trl
    left_out = {} if CUDA else {"GRPO, FP8 rollout": "needs CUDA"}
    left_out |= {} if find_spec("trl") else {"TRL": "is not installed"}
    for name, run in runs.items():
        if name in left_out:
            budget.say(name, left_out[name])
        else:
            budget.run(name, PLAN[name], steps, name, *run, out, budget)
    budget.say("all", f"{time.time() - BEGIN:.0f} s")
    for name in MODELS[CUDA]:  # gigabytes
        shutil.rmtree(out / name, ignore_errors=True)


if __name__ == "__main__":
    main(Args(**flags))
