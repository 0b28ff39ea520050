"""What the trainers do with each family of models: the tables of docs/reference/models.md.

    python benchmarks/models.py --page               # all, about a quarter of an hour; writes the page
    python benchmarks/models.py --families llama gpt_oss

A family is a tiny random checkpoint, its weights named as on the hub (tests/families.py). A run is `main` of
a trainer, from its flags to its last checkpoint, in a fork of this process, which imports everything once.
"""

import json
import os
import re
import shutil
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from system.arguments import parse

MARK = "<!-- python benchmarks/models.py --page -->"
PAGE, RESULTS = ROOT / "docs/reference/models.md", ROOT / "benchmarks/results/models.json"


@dataclass(kw_only=True)
class Args:
    families: tuple[str, ...] = ()  # names of families; none: all
    runs: tuple[str, ...] = ()  # SFT, GRPO, bfloat16, LoRA; none: all
    page: bool = False  # write the page and benchmarks/results/models.json
    output_dir: Path = ROOT / "runs/models"  # directory of checkpoints, runs and their output


if __name__ == "__main__":
    flags = parse(Args)

os.environ |= dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TQDM_DISABLE="1")
os.environ |= dict(VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1")  # as build_engine has them
from safetensors import safe_open
from transformers import AutoConfig

from algos import grpo, sft
from data_prep import arithmetic
from system import families as system_families
from tests import families

SAMPLE = dict(train_batch_size=4, ppo_mini_batch_size=4, group_size=4, max_prompt_length=32)
SAMPLE |= dict(
    max_response_length=16, reward_fn=(f"{ROOT}/benchmarks/lib/alternating.py:score",), total_steps=2
)
RUNS = {  # trainer, and its flags
    "SFT": (sft, dict(train_batch_size=16, max_length=64, warmup_steps=0, total_steps=8, lr=3e-3)),
    "GRPO": (grpo, SAMPLE | dict(lr=0.02)),
    "bfloat16": (grpo, SAMPLE | dict(lr=0.02, compute_dtype="bfloat16")),
    "LoRA": (grpo, SAMPLE | dict(lr=0.02, lora_rank=4)),
}
PACKED = re.compile(r"_(scale_inv|packed|scale|shape|blocks|scales)$")


# ---- one run -------------------------------------------------------------------------------------
def fork(log, function, *args):
    """Run a function in a fork, whose output goes to a file -> "", or the line that it stopped with."""
    pid = os.fork()
    if not pid:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        stopped = ""
        try:
            function(*args)
        except SystemExit as stop:
            stopped = str(stop.code)
        except BaseException as error:  # whatever it is, the row of the family has it
            traceback.print_exc()
            words = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
            stopped = f"{type(error).__name__}: {words}"
        print(f"\nstopped: {' '.join(stopped.split())}", flush=True)
        os._exit(1 if stopped else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = re.findall(r"^stopped: (.+)", log.read_text(), re.MULTILINE)
    return "" if not code else said[-1] if said else f"exit code {code}"


def names(directory):
    """Names of the weights of a checkpoint; of quantised ones those of the whole weights."""
    found = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {*file.keys()}
    return {PACKED.sub("", name) for name in found}


def reload(model, hf):
    """ValueError if a saved model lacks a weight, or has other names than the one it was trained from."""
    _, info = system_families.auto_class(AutoConfig.from_pretrained(hf)).from_pretrained(
        hf, output_loading_info=True
    )
    if any(info.values()) or names(model) != names(hf):
        raise ValueError(f"hf/ lacks or adds weights: {sorted(names(model) ^ names(hf))[:3]}, {info}")


def attempt(name, directory, data, **changes):
    """One run of a family -> dict(stopped, gap, loss, seconds): why it stopped, or "", and figures."""
    trainer, flags = RUNS[name]
    out, begin = directory / name, time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    files = {"train_files": (str(data / "train.parquet"),)}
    if trainer is sft:
        files["val_files"] = (str(data / "val.parquet"),)
    args = trainer.Args(model=str(directory / "model"), output_dir=str(out), **files, **flags | changes)
    found = dict(stopped=fork(directory / f"{name}.txt", trainer.main, args))
    path = out / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for figure, metric in (("gap", "training/rollout_logp_diff_mean"), ("loss", "val/loss")):
        found[figure] = [step[metric] for step in steps if metric in step]
    if not found["stopped"]:
        hf = out / "checkpoints/latest/hf"
        found["stopped"] = fork(directory / f"{name}_hf.txt", reload, directory / "model", hf)
    if not found["stopped"] and found["loss"] and not found["loss"][-1] < found["loss"][0]:
        found["stopped"] = "the validation loss does not fall"
    found["stopped"] = found["stopped"].replace(str(directory / "model"), "MODEL").removeprefix("error: ")
    return found | dict(seconds=round(time.perf_counter() - begin, 1))


def try_family(family, directory, data, runs):
    """The runs of a family -> its row. Attention is eager where SFT passes with it, and not with sdpa."""
    directory.mkdir()
    if stopped := fork(directory / "write.txt", families.write, family, directory / "model"):
        raise SystemExit(f"error: {family} cannot be written: {stopped}")
    config = AutoConfig.from_pretrained(directory / "model")
    config.__dict__.pop("quantization_config", None)  # some are refused by all that reads it
    special = system_families.special_layers(config, one_row=True)
    row, options = dict(special=special, attention="sdpa"), dict(attn_implementation="sdpa")
    sdpa = attempt("SFT", directory, data, **options)
    if sdpa["stopped"]:
        eager = attempt("SFT", directory, data, attn_implementation="eager")
        if not eager["stopped"]:
            row, options = row | dict(attention="eager"), dict(attn_implementation="eager")
    row["SFT"] = sdpa if row["attention"] == "sdpa" else eager
    for name in [name for name in runs if name != "SFT"]:
        only = {name for name in ("GRPO", "bfloat16") if name in row and not row[name]["stopped"]}
        if name == "LoRA" and only == {"bfloat16"}:
            options["compute_dtype"] = "bfloat16"
        row[name] = attempt(name, directory, data, **options)
    return row


# ---- the page ------------------------------------------------------------------------------------
def short(line):
    """A line without what differs between families, and without what libraries add."""
    line = re.sub(r"(?<=MODEL) \(\w+\)| \(model_type='\w+'\)| Incompatible modules: .*| \[type=.*", "", line)
    return re.sub(r"^1 validation error for ModelConfig Value error, | Please check the logs.*", "", line)


def tables(rows):
    """Markdown: a row for families with the same outcome, and the lines that stopped runs, by number."""
    notes, alike = {}, {}
    for family, row in rows.items():
        cells = []
        for name in ("SFT", "GRPO", "LoRA"):
            stopped = row[name]["stopped"]
            if name == "GRPO" and bool(stopped) != bool(row["bfloat16"]["stopped"]):
                cells.append("in bfloat16" if stopped else "in float32")
                continue
            stopped = short(row["bfloat16"]["stopped"] if name == "GRPO" else stopped)
            cells.append(f"no ({notes.setdefault(stopped, len(notes) + 1)})" if stopped else "yes")
        layout = "one row"
        if row["special"]:
            layout = "padded: " + ", ".join(x.replace("_", " ") for x in row["special"])
        elif row["attention"] == "eager":
            layout = "padded: eager attention"
        alike.setdefault((*cells, row["attention"], layout), []).append(family)
    lines = [
        "| Families | SFT | GRPO | LoRA | Attention | Layout | Gap, float32 | Gap, bfloat16 |",
        "|---" * 8 + "|",
    ]
    for outcome, families_ in alike.items():
        cells = [", ".join(families_), *outcome]
        for name in ("GRPO", "bfloat16"):
            runs = [rows[family][name] for family in families_]
            gaps = [max(run["gap"]) for run in runs if run["gap"] and not run["stopped"]]
            cells.append(f"{max(gaps):.1g}" if gaps else "")
        lines.append(f"| {' | '.join(cells)} |")
    why = [f"| {number} | `` {note[:200]} `` |" for note, number in notes.items()]
    return "\n".join([*lines, "", "| Note | Line |", "|---|---|", *why])


def main(args):
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401  so that no fork has to

    every = families.FAMILIES | families.MORE | families.QUANTISED
    families.FAMILIES |= families.MORE
    out, rows = args.output_dir.resolve(), {}
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sums = arithmetic.Args(local_save_dir=str(out / "data"), train_size=128, val_size=16, test_size=1)
    fork(out / "data.txt", arithmetic.main, sums)
    for family in args.families or [name for name in every if name != "qwen2_window"]:
        rows[family] = row = try_family(family, out / family, out / "data", args.runs or RUNS)
        print(family, {name: row[name]["stopped"] or "yes" for name in RUNS if name in row}, flush=True)
        (out / "models.json").write_text(json.dumps(rows, indent=1))
    if args.page:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        before, _, rest = PAGE.read_text().partition(f"{MARK}\n")
        after = re.search(r"\n\n[^|].*", rest, re.DOTALL)[0]  # what follows the tables
        PAGE.write_text(f"{before}{MARK}\n{tables(rows)}{after}")


if __name__ == "__main__":
    main(Args(**flags))
