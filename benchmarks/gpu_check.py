"""What could go wrong on a GPU and nowhere else: minutes on one, more with more of them.

    python benchmarks/gpu_check.py                                     # random weights, no network
    python benchmarks/gpu_check.py --model Qwen/Qwen2.5-0.5B-Instruct

Launches the scripts as a user would. A launch that fails is a line that fails, and the next one begins.
On a CPU the same program runs with a tiny model, two processes stand for two GPUs, and what needs a GPU is
left out by name. Writes OUTPUT_DIR/gpu_check.json, and the table as gpu_check.md: paste it into an issue.
Docs: docs/guides/memory.md
"""

import json
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu_memory import SIZES
from system.arguments import parse


@dataclass(kw_only=True)
class Args:
    # Hugging Face directory or hub name; None: random weights of 0.5B's sizes, tiny ones on a CPU
    model: str | None = None
    output_dir: Path = ROOT / "runs/gpu_check"  # directory of the results


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import torch
from huggingface_hub import snapshot_download

from benchmarks.lib import workload
from system.gpu import unused_gpu

STEPS = 5  # of the GRPO run
SAVED = 3  # the step after which it leaves a checkpoint to resume from
# by whether there is a GPU: prompts of a step, responses to each, tokens of a prompt and of a response
WORK = {True: (32, 8, 128, 512), False: (8, 4, 24, 16)}
# of rounding, by whether there is a GPU: a wrong layout, a stale weight or a lost row is more
LIMITS = {True: dict(logp=0.02, norm=0.02, step=0.05), False: dict(logp=1e-4, norm=1e-3, step=1e-3)}


# ---- lines -------------------------------------------------------------------------------------------------
def line(check, value, words, limit, good):
    verdict = "pass" if good else "FAIL"
    return dict(check=check, measured=f"{value:.3g} {words}".strip(), limit=limit, verdict=verdict)


def at_most(check, value, limit, words=""):
    """NaN is not at most the limit."""
    return line(check, value, words, f"at most {limit:g}", value <= limit)


def over(check, value, limit, words=""):
    return line(check, value, words, f"over {limit:g}", value > limit)


def left_out(check, why):
    return dict(check=check, measured=why, limit="", verdict="left out")


def apart(a, b):
    """Relative difference."""
    return abs(a - b) / max(abs(b), 1e-12)


def largest(values):
    """{name: number} -> the largest number, and its name."""
    name = max(values, key=values.get)
    return values[name], name


def same_step(one, other):
    """The largest relative difference of what the same step of two runs measured."""
    names = "actor/grad_norm", "actor/entropy", "response_length/mean"
    return largest({name: apart(other[name], one[name]) for name in names})


def worst_gap(run):
    return max(metrics["training/rollout_logp_diff_mean"] for metrics in run.values())


# ---- checks: what launches have left, whether there is a GPU, processes for several ranks (0: one GPU) -----
def versions(r, cuda, ranks):
    found = r["versions"]
    file = ROOT / ("requirements.txt" if cuda else "requirements-cpu.txt")
    wrong = 0
    for line in file.read_text().splitlines():
        name, _, version = line.partition(";")[0].strip().partition("==")
        if name in found and found[name].partition("+")[0] != version:
            wrong += 1
    words = ", ".join(f"{name} {version}" for name, version in found.items())
    yield at_most("versions that are not the pinned ones", wrong, 0, f"({words})")


def layouts(r, cuda, ranks):
    """The same rows in all layouts, by the trainer and by the sampler."""
    worker = r["worker"]
    limit = LIMITS[cuda]["logp"]
    for pair, gap in worker["gaps"].items():
        yield at_most(f"log-probs, {pair}", gap, limit)
    yield over("control: a sampler that misses an update", worker["stale"], limit)
    norms = {layout: apart(x, worker["norms"]["padded"]) for layout, x in worker["norms"].items()}
    gap, layout = largest(norms)
    yield at_most("gradient norm, all layouts against padded", gap, LIMITS[cuda]["norm"], layout)


def grpo(r, cuda, ranks):
    run = r["grpo"]
    updates = 0
    for metrics in run.values():
        if metrics["actor/grad_norm"] > 0 and not metrics["actor/skipped_updates"]:
            updates += 1
    yield over(f"GRPO, updates in {STEPS} steps", updates, STEPS - 1)
    yield at_most("GRPO, log-probs of sampler and trainer, worst step", worst_gap(run), LIMITS[cuda]["logp"])
    sync = run[STEPS]["timing_s/sync"]
    share = sync / run[STEPS]["timing_s/step"]
    yield at_most("GRPO, sync, share of the last step", share, 0.5, f"({sync:.3f} s)")


def resumed(r, cuda, ranks):
    step = SAVED + 1
    gap, name = same_step(r["grpo"][step], r["resume"][step])
    yield at_most(f"resumed, on a GPU with --offload, step {step} again", gap, LIMITS[cuda]["step"], name)


def memory(r, cuda, ranks):
    if not cuda:
        yield left_out("memory: sleeping sampler, --offload, peak", "a CPU")
        return
    worker = r["worker"]
    yield at_most("what the sleeping sampler keeps", worker["asleep"], 4, f"GiB, awake {worker['awake']:.1f}")
    freed = "--offload, share of parameters and Adam's state freed"
    yield over(freed, worker["freed"], 0.9, f"of {worker['owned']:.1f} GiB")
    gap = apart(worker["offloaded"], worker["onloaded"])
    yield at_most("--offload, gradient norm before and after", gap, LIMITS[cuda]["norm"])
    peak = max(metrics["perf/max_memory_allocated_gb"] for metrics in r["grpo"].values())
    share = peak / worker["total"]
    yield at_most("GRPO, peak memory, share of the GPU's", share, 0.95, f"({peak:.1f} GiB)")


def several_ranks(r, cuda, ranks):
    if not ranks:
        yield left_out("several ranks: gradient norm, GRPO", "one GPU")
        return
    norms = r["worker"]["norms"]
    alone = norms.get("one row", norms["padded"])
    limit = LIMITS[cuda]["norm"]
    yield at_most(f"{ranks} ranks, gradient norm against one", apart(r["ranks"]["1"], alone), limit)
    yield at_most(f"{ranks} ranks, --hsdp_replicas 2, the same", apart(r["ranks"]["2"], alone), limit)


def tensor_parallel(r, cuda, ranks):
    if not ranks:
        return
    check = f"{ranks} ranks, --tp_size 2 --hsdp_replicas 2, GRPO, log-probs, worst step"
    yield at_most(check, worst_gap(r["tp"]), LIMITS[cuda]["logp"])


def sft(r, cuda, ranks):
    losses = [metrics["val/loss"] for metrics in r["sft"].values() if "val/loss" in metrics]
    yield at_most("SFT, LoRA, loss after over loss before", losses[-1] / losses[0], 0.999)


CHECKS = versions, layouts, grpo, resumed, memory, several_ranks, tensor_parallel, sft


def table(results, cuda, ranks):
    """All lines. A check whose launches left less than it needs is a line that fails."""
    lines = []
    for check in CHECKS:
        try:
            lines.extend(check(results, cuda, ranks))  # those before an error stay
        except (LookupError, ValueError, ArithmeticError) as error:
            why = f"{type(error).__name__}: {error}".replace("|", "/")
            name = check.__name__.replace("_", " ")
            lines.append(dict(check=name, measured=why, limit="", verdict="FAIL"))
    return lines


# ---- launches ----------------------------------------------------------------------------------------------
class Launches(dict):
    """What launches have left, by name; asked for that of one that failed, it says why."""

    def __init__(self, work):
        self.work = work
        self.errors = {}

    def __missing__(self, name):
        words = self.errors.get(name, "it did not run").splitlines()
        cause = [line for line in words if re.match(r"[\w. ]*[Ee]rror\b", line)]
        raise LookupError(f"{name} failed: {(cause or words)[-1]}")

    def run(self, name, script, words, ranks=1):
        print(f"{name}: {script}", *words, flush=True)
        try:
            workload.launch(script, words, ranks)
            self[name] = self.read(name)
        except (SystemExit, OSError, ValueError, LookupError) as error:
            lines = str(error).splitlines()[:-1]  # the last is `launch`'s own
            self.errors[name] = "\n".join(lines[-15:]) or repr(error)
            print(f"{name} failed", flush=True)

    def read(self, name):
        """The file of lib/gpu_check_worker.py, or {step: metrics} of a trainer."""
        file = self.work / f"{name}.json"
        if file.exists():
            return json.loads(file.read_text())
        return {int(m["training/global_step"]): m for m in workload.read_metrics(self.work / name)}

    def train(self, name, script, flags, ranks=1):
        self.run(name, script, workload.words_of(flags | dict(output_dir=self.work / name)), ranks)


def launch_all(model, work, cuda, ranks):
    """Every launch, one after another; one run serves several lines."""
    prompts, group, prompt_length, response_length = WORK[cuda]
    rows = work / "rows.parquet"
    workload.make_rows(model, rows, 2 * prompts, prompt_length, response_length)
    launches = Launches(work)
    common = dict(model=model, train_files=rows, save_freq=SAVED, keep_checkpoints=0)
    flags = common | workload.sampling_flags(prompts, group, prompt_length, response_length)
    flags["lr"] = 1e-4  # a rate at which a sampler that misses an update is off by more than rounding
    script = "benchmarks/lib/gpu_check_worker.py"
    worker = [model, rows, work, prompt_length, response_length]
    launches.run("worker", script, worker)
    launches.train("grpo", "algos/grpo.py", flags | dict(total_steps=STEPS))
    more = dict(total_steps=SAVED + 1, resume=work / f"grpo/checkpoints/step_{SAVED:06d}")
    if cuda:
        more["offload"] = "sampling"
    launches.train("resume", "algos/grpo.py", flags | more)
    shutil.rmtree(work / "grpo/checkpoints", ignore_errors=True)  # gigabytes
    if ranks:
        launches.run("ranks", script, worker, ranks)
        more = dict(total_steps=2, tp_size=2, hsdp_replicas=2)
        launches.train("tp", "algos/grpo.py", flags | more, ranks)
    flags = common | dict(
        val_files=rows,
        train_batch_size=prompts,
        lora_rank=8,
        lr=1e-3,
        warmup_steps=0,
        total_steps=4,
        max_length=2 * (prompt_length + response_length),
    )
    launches.train("sft", "algos/sft.py", flags)
    return launches


def prepare_model(model, out, cuda):
    """-> a directory; what is launched does not ask the hub."""
    if not model:
        workload.random_model(SIZES["0.5B"] if cuda else workload.TINY, out, tied=True)
        return out
    if Path(model).is_dir():
        return Path(model)
    return Path(snapshot_download(model, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))


def main(args):
    if unused_gpu():
        sys.exit(f"error: {unused_gpu()}")
    begin = time.perf_counter()
    cuda = torch.cuda.is_available()
    gpus = torch.cuda.device_count()
    ranks = 2
    if gpus == 1:
        ranks = 0
    elif gpus >= 4:
        ranks = 4
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output_dir) as work:
        work = Path(work)
        launches = launch_all(prepare_model(args.model, work / "model", cuda), work, cuda, ranks)
    here = workload.machine()
    launches["versions"] = here["versions"]
    lines = table(launches, cuda, ranks)
    args.model = args.model or "random weights"
    seconds = time.perf_counter() - begin
    text = f"gpu_check at {workload.where(here)}; {args.model}; {seconds:.0f} s\n\n"
    text += workload.markdown(list(lines[0]), [line.values() for line in lines]) + "\n"
    (args.output_dir / "gpu_check.md").write_text(text)
    about = dict(lines=lines, errors=launches.errors, results=launches)
    workload.save(args.output_dir / "gpu_check.json", args, about)
    for name, error in launches.errors.items():
        print(f"\n---- {name}\n{error}")
    print(f"\n{text}\n{args.output_dir}/gpu_check.json")
    raise SystemExit(any(line["verdict"] == "FAIL" for line in lines))


if __name__ == "__main__":
    main(Args(**flags))
