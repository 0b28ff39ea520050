"""What could go wrong on a GPU and nowhere else: minutes on one, more with more of them.

    python benchmarks/gpu_check.py                                     # random weights, no network
    python benchmarks/gpu_check.py --model Qwen/Qwen2.5-0.5B-Instruct

Launches the scripts as a user would. A launch that fails fails its lines, and the next one begins. On a CPU
the same program runs with a tiny model, two processes stand for two GPUs, and what needs a GPU is left out by
name. Writes OUTPUT_DIR/gpu_check.json, and the table as gpu_check.md beside it: paste it into an issue.
Docs: docs/guides/memory.md
"""

import json
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu_memory import SIZES, TIED
from benchmarks.lib.workload import durations, launch, machine, make_rows, read_metrics, save
from system.arguments import parse


@dataclass(kw_only=True)
class Args:
    model: str | None = None  # Hugging Face directory or hub name; None: random weights
    # size of the random weights; None: 0.5B on a GPU, tiny on a CPU
    config: Literal["tiny", "0.5B", "1.5B", "3B", "7B", "14B", "32B"] | None = None
    output_dir: Path = ROOT / "runs/gpu_check"  # directory of the results


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging

from data_prep import tiny_model

STEPS, SAVED = 5, 3  # of the GRPO run, and after which of them it leaves a checkpoint to resume from
# by whether there is a GPU: prompts of a step, responses to each, tokens of a prompt and of a response
WORK = {True: (32, 8, 128, 512), False: (8, 4, 24, 16)}
LIMITS = {  # of rounding, by dtype: a wrong layout, a stale weight or a lost row is more
    "float32": dict(logp=1e-4, norm=1e-3, step=1e-3),
    "bfloat16": dict(logp=0.02, norm=0.02, step=0.05),
}
LAYOUTS = "padded", "one row"


# ---- verdicts ----------------------------------------------------------------------------------------------
@dataclass
class Check:
    """A line of the table: a number, or (number, words about it), from the results of launches."""

    name: str
    needs: str  # names of the launches
    value: Callable  # results -> the number
    limit: float
    over: bool = False  # the number must be over the limit, else not
    left_out: str = ""  # why, if the line is left out

    def line(self, results, errors):
        """-> dict of the table's columns."""
        line = dict(check=self.name, limit=f"{'over' if self.over else 'at most'} {self.limit:g}")
        if self.left_out:
            return line | dict(measured=self.left_out, verdict="left out")
        for name in self.needs.split():
            if name not in results:
                words = errors.get(name, "it did not run").strip().splitlines()
                cause = [text for text in words if re.match(r"[\w. ]*[Ee]rror\b", text)] or words
                return line | dict(measured=f"{name} failed: {cause[-1]}", verdict="FAIL")
        try:
            value = self.value(results)
        except (KeyError, IndexError, ValueError) as error:  # a launch left less than it should
            value = math.nan, f"{type(error).__name__} {error}"
        value, words = value if isinstance(value, tuple) else (value, "")
        good = value > self.limit if self.over else value <= self.limit  # NaN is neither
        return line | dict(measured=f"{value:.3g} {words}".strip(), verdict="pass" if good else "FAIL")


def apart(a, b):
    """Relative difference."""
    return abs(a - b) / max(abs(b), 1e-12)


def same_step(one, other, step):
    """The largest relative difference of what a step of two runs measured."""
    names = "actor/grad_norm", "actor/entropy", "response_length/mean"
    return max((apart(other[step][name], one[step][name]), name) for name in names)


def median(run, name):
    """Of the steps after the first, which warms up."""
    return statistics.median(metrics[name] for step, metrics in run.items() if step > 1)


def checks(cuda, ranks, trl):
    """All lines. ranks: processes of the part for several GPUs, 0: there is one GPU."""
    limits, lines = LIMITS["bfloat16" if cuda else "float32"], []
    no_gpu = "" if cuda else "a CPU"
    no_ranks = "" if ranks else "one GPU"

    def add(name, needs, value, limit, over=False, left_out=""):
        lines.append(Check(name, needs, value, limit, over, left_out))

    add("versions that are not the pinned ones", "here", lambda r: r["here"], 0)
    # ---- the same rows in all layouts, by the trainer and by the sampler
    worker = lambda key: lambda r: r["worker"][key]
    for layout in LAYOUTS:
        gap = lambda r, pair=f"{layout} : sampler": r["worker"]["gaps"][pair]
        add(f"log-probs, {layout}, against the sampler", "worker", gap, limits["logp"])
    inside = lambda r: max((gap, pair) for pair, gap in r["worker"]["gaps"].items() if "sampler" not in pair)
    add("log-probs, largest gap of two layouts", "worker", inside, limits["logp"])
    add("control: texts of one row that see one another", "worker", worker("borders"), limits["logp"], True)
    add("control: a sampler that misses an update", "worker", worker("stale"), limits["logp"], True)
    norms = lambda norm: max((apart(x, norm["padded"]), layout) for layout, x in norm.items())
    add(
        "gradient norm, all layouts against padded",
        "worker",
        lambda r: norms(worker("norms")(r)),
        limits["norm"],
    )
    # ---- runs
    gap = lambda name: lambda r: max(m["training/rollout_logp_diff_mean"] for m in r[name].values())
    updated = lambda r: sum(
        m["actor/grad_norm"] > 0 and not m["actor/skipped_updates"] for m in r["grpo"].values()
    )
    add(f"GRPO, updates in {STEPS} steps", "grpo", updated, STEPS - 1, True)
    add("GRPO, log-probs of sampler and trainer, worst step", "grpo", gap("grpo"), limits["logp"])
    again = lambda r: same_step(r["grpo"], r["resume"], SAVED + 1)
    add(f"resumed{' with --offload' * cuda}, step {SAVED + 1} again", "grpo resume", again, limits["step"])
    # ---- memory
    asleep = lambda r: (r["worker"]["asleep"], f"GiB, awake {r['worker']['awake']:.1f}")
    add("what the sleeping sampler keeps", "worker", asleep, 4, False, no_gpu)
    freed = lambda r: (r["worker"]["freed"], f"of {r['worker']['owned']:.1f} GiB")
    add("--offload, share of parameters and Adam's state freed", "worker", freed, 0.9, True, no_gpu)
    offloaded = lambda r: apart(*r["worker"]["offloaded"])
    add("--offload, gradient norm before and after", "worker", offloaded, limits["norm"], False, no_gpu)
    # ---- several ranks
    many, cut = f"{ranks} ranks", f"{ranks} ranks, --tp_size 2 --hsdp_replicas 2"
    norm = lambda copies: lambda r: apart(r["ranks"][copies], r["worker"]["norms"][r["ranks"]["layout"]])
    add(f"{many}, gradient norm against one", "worker ranks", norm("1"), limits["norm"], False, no_ranks)
    add(f"{many}, --hsdp_replicas 2, the same", "worker ranks", norm("2"), limits["norm"], False, no_ranks)
    add(f"{cut}, GRPO, log-probs, worst step", "tp", gap("tp"), limits["logp"], False, no_ranks)
    first = lambda r: same_step(r["grpo"], r["tp"], 1)
    left_out = no_ranks or "bfloat16: it samples other tokens" * cuda
    add(f"{cut}, GRPO, step 1 against one rank", "grpo tp", first, limits["step"], False, left_out)
    # ---- SFT, speed
    learned = lambda r: r["sft"]["after"] / r["sft"]["before"]
    add("SFT, LoRA, loss after over loss before", "sft", learned, 0.999)
    add("GRPO, tokens/s of a rank", "grpo", lambda r: median(r["grpo"], "perf/throughput"), 0, True)
    add("GRPO, MFU of the update", "grpo", lambda r: median(r["grpo"], "perf/mfu/actor"), 1)
    sync, step = "timing_s/sync", "timing_s/step"
    share = lambda r: (
        median(r["grpo"], sync) / median(r["grpo"], step),
        f"({median(r['grpo'], sync):.3f} s)",
    )
    add("GRPO, sync, share of a step", "grpo", share, 0.5)
    peak = lambda r: max(m["perf/max_memory_allocated_gb"] for m in r["grpo"].values())
    share = lambda r: (peak(r) / r["worker"]["total"], f"({peak(r):.1f} GiB)")
    add("GRPO, peak memory, share of the GPU's", "worker grpo", share, 0.95, False, no_gpu)
    ratio = lambda r: (median(r["grpo"], "perf/throughput") / r["trl"], f"(TRL {r['trl']:.0f} tokens/s)")
    add("GRPO, speed over TRL's", "grpo trl", ratio, 1, True, "" if trl else "TRL is not installed")
    return lines


def markdown(lines, about):
    """The table, with the machine above it."""
    columns = "check", "measured", "limit", "verdict"
    rows = [columns, ["---"] * 4, *([line[column] for column in columns] for line in lines)]
    return f"{about}\n\n" + "\n".join(
        f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows
    )


# ---- launches ----------------------------------------------------------------------------------------------
def versions(cuda):
    """How many packages are not those of the requirements, and all versions."""
    there = machine()["versions"]
    pins = (ROOT / f"requirements{'' if cuda else '-cpu'}.txt").read_text().splitlines()
    pinned = dict(line.split(";")[0].strip().split("==") for line in pins if "==" in line)
    wanted = [name for name in there if name in pinned]
    words = ", ".join(
        f"{name} {version}"
        for name, version in (there | ({"CUDA": torch.version.cuda} if cuda else {})).items()
    )
    return sum(there[name].partition("+")[0] != pinned[name] for name in wanted), f"({words})"


def write_model(config, out):
    """Random weights with a tokenizer of characters."""
    if config != "tiny":
        return write_random(SIZES[config], out, tied=config in TIED)
    logging.disable_progress_bar()
    tokenizer = tiny_model.make_tokenizer()
    tiny_model.make_model(tiny_model.Args(), tokenizer).save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_random(sizes, out, tied=False, device="cpu"):
    """A Qwen2 of these sizes, made on a device, with a tokenizer of characters."""
    logging.disable_progress_bar()
    tokenizer = tiny_model.make_tokenizer()
    h, mlp, layers, heads, kv_heads, vocabulary = sizes
    config = dict(hidden_size=h, intermediate_size=mlp, num_hidden_layers=layers, vocab_size=vocabulary)
    config |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads, rope_theta=1e6)
    config |= dict(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    torch.manual_seed(0)
    with torch.device(device):
        config = Qwen2Config(**config, tie_word_embeddings=tied)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


class Launches:
    """Results by name, and the errors of launches that failed."""

    def __init__(self):
        self.results, self.errors, self.seconds = {}, {}, {}

    def run(self, name, read, script, *flags, **options):
        print(f"{name}: {script}", *flags, flush=True)
        begin = time.perf_counter()
        try:
            launch(script, *flags, **options)
            self.results[name] = read()
        except (SystemExit, OSError, ValueError, LookupError, ArithmeticError) as error:
            self.errors[name] = "\n".join(str(error).splitlines()[:-1][-15:]) or repr(error)
            print(f"{name} failed", flush=True)
        self.seconds[name] = time.perf_counter() - begin


def launch_all(model, work, cuda, ranks, trl):
    """Every launch, one after another; one run serves several lines."""
    prompts, group, prompt_length, response_length = WORK[cuda]
    rows, launches = work / "rows.parquet", Launches()
    make_rows(model, rows, 2 * prompts, prompt_length, response_length)
    read = lambda name: {int(m["training/global_step"]): m for m in read_metrics(work / name, 0)}
    load = lambda name: json.loads((work / name).read_text())
    common = "--model", model, "--train_files", rows, "--save_freq", SAVED
    lengths = "--max_prompt_length", 2 * prompt_length, "--max_response_length", response_length
    # a rate at which a sampler that misses an update is off by more than rounding
    grpo = *common, *lengths, "--group_size", group, "--keep_checkpoints", 0, "--lr", 1e-4
    grpo += "--train_batch_size", prompts, "--ppo_mini_batch_size", prompts
    grpo += "--reward_fn", f"{ROOT / 'benchmarks/lib/alternating.py'}:parity"
    flags = lambda name, *more: ("--output_dir", work / name, *grpo, *more)

    worker = "benchmarks/lib/gpu_check_worker.py", model, rows, work, prompt_length, response_length
    launches.run("worker", lambda: load("worker.json"), *worker)
    script = "algos/grpo.py"
    launches.run("grpo", lambda: read("grpo"), script, *flags("grpo", "--total_steps", STEPS))
    more = "--total_steps", SAVED + 1, "--resume", work / f"grpo/checkpoints/step_{SAVED:06d}"
    launches.run(
        "resume", lambda: read("resume"), script, *flags("resume", *more, *["--offload", "sampling"] * cuda)
    )
    shutil.rmtree(work / "grpo/checkpoints", ignore_errors=True)  # gigabytes
    if ranks:
        launches.run("ranks", lambda: load("ranks.json"), *worker, ranks=ranks)
        more = "--total_steps", 2, "--tp_size", 2, "--hsdp_replicas", 2
        launches.run("tp", lambda: read("tp"), script, *flags("tp", *more), ranks=ranks)
    losses = lambda: [m["val/loss"] for m in read_metrics(work / "sft", 0) if "val/loss" in m]
    sft = "--output_dir", work / "sft", *common, "--val_files", rows, "--train_batch_size", prompts
    sft += "--lora_rank", 8, "--lr", 1e-3, "--warmup_steps", 0, "--total_steps", 4
    sft += "--max_length", 2 * (prompt_length + response_length)
    launches.run("sft", lambda: dict(zip(("before", "after"), losses())), "algos/sft.py", *sft)
    if trl:
        stamps, out = [], work / "trl"
        words = "--model", model, "--train_files", rows, "--output_dir", out, "--algo", "grpo", "--vllm"
        words += "--total_steps", 3, "--group_size", group, "--response_length", response_length
        words += "--per_device_batch", 8, "--accumulation", prompts * group // 8
        words += "--max_length", 2 * prompt_length + response_length

        def speed():
            tokens = [m["num_tokens"] for m in read_metrics(out, 0)]
            return (tokens[-1] - tokens[0]) / sum(durations(stamps)[0])

        watch = out / "metrics.jsonl", stamps
        launches.run("trl", speed, "benchmarks/lib/peer_trl.py", *words, watch=watch)
    return launches


def main(args):
    begin, cuda, gpus = time.perf_counter(), torch.cuda.is_available(), torch.cuda.device_count()
    if args.model and args.config:
        raise SystemExit("error: --model has weights already, --config makes random ones: give one of them")
    ranks = {0: 2, 1: 0}.get(gpus, 4 if gpus >= 4 else 2)
    config, trl = args.config or ("0.5B" if cuda else "tiny"), bool(find_spec("trl"))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output_dir) as work:
        model = Path(args.model or Path(work, "model"))
        if not args.model:
            write_model(config, model)
        elif not model.is_dir():  # what is launched does not ask the hub
            model = Path(
                snapshot_download(args.model, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"])
            )
        launches = launch_all(model, Path(work), cuda, ranks, trl)
    launches.results["here"] = versions(cuda)
    lines = checks(cuda, ranks, trl)
    lines = [check.line(launches.results, launches.errors) for check in lines]
    here = machine()
    where = ", ".join(here["gpus"]) or f"CPU, {here['cores']} cores, {here['processor']}"
    about = f"gpu_check at {here['commit']}: {args.model or f'random weights, {config}'}; {where};"
    table = markdown(lines, f"{about} {time.perf_counter() - begin:.0f} s")
    (args.output_dir / "gpu_check.md").write_text(table + "\n")
    args.model = args.model or config
    about = dict(lines=lines, seconds=launches.seconds, errors=launches.errors, results=launches.results)
    save(args.output_dir / "gpu_check.json", args, about)
    for name, error in launches.errors.items():
        print(f"\n---- {name}\n{error}")
    print(f"\n{table}\n\n{args.output_dir}/gpu_check.json")
    raise SystemExit(any(line["verdict"] == "FAIL" for line in lines))


if __name__ == "__main__":
    main(Args(**flags))
