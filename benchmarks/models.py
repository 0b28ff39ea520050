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
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from system.arguments import parse

MARK = "<!-- python benchmarks/models.py --page -->"
PAGE = ROOT / "docs/reference/models.md"
RESULTS = ROOT / "benchmarks/results/models.json"


@dataclass(kw_only=True)
class Args:
    families: tuple[str, ...] = ()  # names of families; none: all
    runs: tuple[str, ...] = ()  # SFT, GRPO, bfloat16, LoRA; none: all
    page: bool = False  # write the page and benchmarks/results/models.json
    output_dir: Path = ROOT / "runs/models"  # directory of checkpoints, runs and their output


if __name__ == "__main__":
    flags = parse(Args)

os.environ |= dict(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TQDM_DISABLE="1",
    VLLM_LOGGING_LEVEL="ERROR",  # as build_engine has them
    TORCHDYNAMO_DISABLE="1",
)
from safetensors import safe_open
from transformers import AutoConfig

from algos import grpo, sft
from benchmarks.lib.workload import read_metrics
from data_prep import arithmetic
from system import families as system_families
from tests import families

SUPERVISED = dict(train_batch_size=16, max_length=64, warmup_steps=0, total_steps=8, lr=3e-3)
SAMPLED = dict(
    train_batch_size=4,
    group_size=4,
    max_prompt_length=32,
    max_response_length=16,
    reward_fn=(f"{ROOT}/benchmarks/lib/alternating.py:score",),
    total_steps=2,
    lr=0.02,
)
RUNS = {  # trainer, and its flags
    "SFT": (sft, SUPERVISED),
    "GRPO": (grpo, SAMPLED),
    "bfloat16": (grpo, SAMPLED | dict(compute_dtype="bfloat16")),
    "LoRA": (grpo, SAMPLED | dict(lora_rank=4)),
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
    if not code:
        return ""
    lines = re.findall(r"^stopped: (.+)", log.read_text(), re.MULTILINE)
    return lines[-1] if lines else f"exit code {code}"


def names(directory):
    """Names of the weights of a checkpoint; of quantised ones those of the whole weights."""
    found = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update(PACKED.sub("", name) for name in file.keys())  # noqa: SIM118
    return found


def reload(model, hf):
    """ValueError if a saved model lacks a weight, or has other names than the one it was trained from."""
    _, info = system_families.auto_class(AutoConfig.from_pretrained(hf)).from_pretrained(
        hf, output_loading_info=True
    )
    if any(info.values()) or names(model) != names(hf):
        raise ValueError(f"hf/ lacks or adds weights: {sorted(names(model) ^ names(hf))[:3]}, {info}")


def figures(run, metric):
    """The values of a metric in the steps of a run, which may have none."""
    if not (run / "metrics.jsonl").exists():
        return []
    return [step[metric] for step in read_metrics(run) if metric in step]


def attempt(name, directory, data, **changes):
    """One run of a family -> dict(stopped, gap, loss): why it stopped, or "", and figures."""
    trainer, flags = RUNS[name]
    out = directory / name
    model = directory / "model"
    shutil.rmtree(out, ignore_errors=True)
    files = dict(train_files=(str(data / "train.parquet"),))
    if trainer is sft:
        files["val_files"] = (str(data / "val.parquet"),)
    args = trainer.Args(model=str(model), output_dir=str(out), **files | flags | changes)
    stopped = fork(directory / f"{name}.txt", trainer.main, args)
    loss = figures(out, "val/loss")
    if not stopped:
        stopped = fork(directory / f"{name}_hf.txt", reload, model, out / "checkpoints/latest/hf")
    if not stopped and loss and not loss[-1] < loss[0]:
        stopped = "the validation loss does not fall"
    return dict(
        stopped=stopped.replace(str(model), "MODEL").removeprefix("error: "),
        gap=figures(out, "training/rollout_logp_diff_mean"),
        loss=loss,
    )


def try_family(family, directory, data, runs):
    """The runs of a family -> its row. Attention is eager where SFT passes with it, and not with sdpa."""
    directory.mkdir()
    stopped = fork(directory / "write.txt", families.write, family, directory / "model")
    if stopped:
        raise SystemExit(f"error: {family} cannot be written: {stopped}")
    config = AutoConfig.from_pretrained(directory / "model")
    config.__dict__.pop("quantization_config", None)  # some are refused by all that reads it
    row = dict(special=system_families.special_layers(config, one_row=True), attention="sdpa")
    row["SFT"] = attempt("SFT", directory, data, attn_implementation="sdpa")
    if row["SFT"]["stopped"]:
        eager = attempt("SFT", directory, data, attn_implementation="eager")
        if not eager["stopped"]:
            row |= dict(attention="eager", SFT=eager)
    options = dict(attn_implementation=row["attention"])
    for name in runs:
        if name == "SFT":
            continue
        if name == "LoRA" and passed(row, "bfloat16") and not passed(row, "GRPO"):
            options["compute_dtype"] = "bfloat16"
        row[name] = attempt(name, directory, data, **options)
    return row


def passed(row, name):
    return name in row and not row[name]["stopped"]


# ---- the page ------------------------------------------------------------------------------------
def short(line):
    """A line without what differs between families, and without what libraries add."""
    line = re.sub(r"(?<=MODEL) \(\w+\)| \(model_type='\w+'\)| Incompatible modules: .*| \[type=.*", "", line)
    return re.sub(r"^1 validation error for ModelConfig Value error, | Please check the logs.*", "", line)


def layout_of(row):
    if row["special"]:
        return "padded: " + ", ".join(kind.replace("_", " ") for kind in row["special"])
    if row["attention"] == "eager":
        return "padded: eager attention"
    return "one row"


def cell(stopped, notes):
    """notes: numbers of the lines that stopped runs."""
    if not stopped:
        return "yes"
    return f"no ({notes.setdefault(short(stopped), len(notes) + 1)})"


def grpo_cell(row, notes):
    in_float32 = row["GRPO"]["stopped"]
    in_bfloat16 = row["bfloat16"]["stopped"]
    if in_float32 and not in_bfloat16:
        return "in bfloat16"
    if in_bfloat16 and not in_float32:
        return "in float32"
    return cell(in_bfloat16, notes)


def largest_gap(rows, name):
    gaps = [max(row[name]["gap"]) for row in rows if row[name]["gap"] and not row[name]["stopped"]]
    return f"{max(gaps):.1g}" if gaps else ""


def tables(rows):
    """Markdown: a row for families with the same outcome, and the lines that stopped runs, by number."""
    notes = {}
    alike = {}
    for family, row in rows.items():
        outcome = (
            cell(row["SFT"]["stopped"], notes),
            grpo_cell(row, notes),
            cell(row["LoRA"]["stopped"], notes),
            row["attention"],
            layout_of(row),
        )
        alike.setdefault(outcome, []).append(family)
    lines = ["| Families | SFT | GRPO | LoRA | Attention | Layout | Gap, float32 | Gap, bfloat16 |"]
    lines.append("|---" * 8 + "|")
    for outcome, names in alike.items():
        same = [rows[family] for family in names]
        cells = [", ".join(names), *outcome, largest_gap(same, "GRPO"), largest_gap(same, "bfloat16")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| Note | Line |", "|---|---|"]
    lines += [f"| {number} | `` {note[:200]} `` |" for note, number in notes.items()]
    return "\n".join(lines)


def main(args):
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401  so that no fork has to

    every = families.FAMILIES | families.MORE | families.QUANTISED
    families.FAMILIES |= families.MORE
    names = args.families or [name for name in every if name != "qwen2_window"]
    out = args.output_dir.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sums = arithmetic.Args(local_save_dir=str(out / "data"), train_size=128, val_size=16, test_size=1)
    fork(out / "data.txt", arithmetic.main, sums)
    rows = {}
    for family in names:
        row = try_family(family, out / family, out / "data", args.runs or RUNS)
        print(family, {name: row[name]["stopped"] or "yes" for name in RUNS if name in row}, flush=True)
        rows[family] = row
        (out / "models.json").write_text(json.dumps(rows, indent=1) + "\n")
    if args.page:
        shutil.copy(out / "models.json", RESULTS)
        before, _, rest = PAGE.read_text().partition(f"{MARK}\n")
        after = re.search(r"\n\n[^|].*", rest, re.DOTALL)[0]  # what follows the tables
        PAGE.write_text(f"{before}{MARK}\n{tables(rows)}{after}")


if __name__ == "__main__":
    main(Args(**flags))
