"""A random model learns to call the calculator in the formats of published chat templates.

    python benchmarks/experiments/call_formats.py

For each template: a tokenizer with its marks, a model of 1M parameters, sft.py on products of which a third
call the tool `calculate`, then agent.py with the calculator. Writes runs/call_formats: a run directory a
stage, and results.json. A finished stage is not run again.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.conversations import PLAIN, SPECIAL, ends_of
from benchmarks.lib.stages import ROOT, Stages
from benchmarks.lib.workload import read_metrics
from data_prep import arithmetic, tiny_model
from data_prep.lib.schema import write_parquet
from data_prep.lib.templates import render
from envs import load_env
from envs.calls import called
from system.arguments import command_line

PARSERS = dict(deepseekv3="deepseek_v3")  # its template shows no tools
SHOWN = "env/used_ratio", "critic/score/mean"
PAD = "<|padding|>"
ENV = f"{ROOT}/envs/calculator.py:TOOLS"
COMMON = "--gradient_checkpointing none --save_freq 0 --seed 1"
SFT = f"{COMMON} --messages_key messages --max_length 160 --train_batch_size 64 --total_steps 320 --lr 1e-3"
SFT += " --lr_schedule constant --warmup_steps 20"
RL = f"{COMMON} --max_prompt_length 96 --max_response_length 64 --max_turns 4 --train_batch_size 16"
RL += " --group_size 8 --total_steps 30 --test_freq 0 --lr 3e-4 --warmup_steps 2 --weight_decay 0"


@dataclass
class Args:
    names: tuple[str, ...] = ("qwen2_5", "glm4moe", "gptoss", "deepseekv3")
    """Names of templates of tests/fixtures/chat_templates."""
    output_dir: Path = ROOT / "runs/call_formats"
    """Directory of the runs."""
    ranks: int = 1
    """Processes of the trainers, one thread each."""


def conversation(row, with_tool):
    """A product as messages: answered at once, or by a call of the calculator."""
    question, answer = row["extra_info"]["question"], row["reward_model"]["ground_truth"]
    _, turn = called("", [("calculate", dict(expression=question.rstrip("=")))])
    result = dict(role="tool", name="calculate", tool_call_id=turn["tool_calls"][0]["id"], content=answer)
    return row["prompt"] + [turn, result] * with_tool + [dict(role="assistant", content=answer)]


def make_tokenizer(name, template, talks):
    """Learned from conversations as the template writes them: what never changes has few tokens."""
    bos, eos, *_ = ends_of(name)
    marks = sorted({*SPECIAL.findall(template), bos, eos} - {None})
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    split = re.compile("|".join(map(re.escape, [*marks, *PLAIN])))
    texts = [render(talk, tokenizer, load_env(ENV).tools, prompted=False) for talk in talks]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=letters, show_progress=False)
    backend.train_from_iterator([part for text in texts for part in split.split(text)], trainer)
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in PLAIN])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=PAD, chat_template=template
    )


def prepare(name, out):
    """The model of a template, and the conversations for SFT."""
    data = arithmetic.Args(operation="multiply", tool_share=1 / 3)
    rows = {
        split: [arithmetic.make_row(split, i, *x, operation="multiply") for i, x in enumerate(questions)]
        for split, questions in arithmetic.splits(data).items()
    }
    for split, found in rows.items():
        write_parquet(found, out / f"{split}.parquet")
    talks = [conversation(row, i < len(rows["train"]) / 3) for i, row in enumerate(rows["train"])]
    write_parquet([dict(messages=talk) for talk in talks], out / "sft.parquet")
    template = (ROOT / f"tests/fixtures/chat_templates/{name}.jinja").read_text()
    tokenizer = make_tokenizer(name, template, talks[:100] + talks[-100:])
    model = tiny_model.make_model(tiny_model.Args(init_std=0.02), tokenizer)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


def main():
    args = command_line(Args)
    table, results = Table("template", "calls", "score", "seconds", title="first step -> last five"), {}
    stages = Stages(args.output_dir, 2 * len(args.names))
    for name in args.names:
        out, parser = args.output_dir / name, PARSERS.get(name)
        if not (out / "model").exists():
            prepare(name, out)
        shown = () if parser else ("--env", ENV)
        more = "--env", ENV, *(("--tool_parser", parser) if parser else ())
        for script, title, model, data, flags in (
            ("sft", "SFT", out / "model", "sft", (*shown, *SFT.split())),
            ("agent", "agent.py", out / "sft/checkpoints/latest/hf", "train", (*more, *RL.split())),
        ):
            files = "--model", model, "--train_files", out / f"{data}.parquet", "--output_dir", out / script
            title = f"{title}, {name}"
            stages.run(f"{name}_{script}", title, f"algos/{script}.py", *files, *flags, ranks=args.ranks)
        lines = read_metrics(out / "agent", 0)
        seconds = stages.seconds[f"{name}_sft"] + stages.seconds[f"{name}_agent"]
        results[name] = dict(seconds=seconds)
        for key in SHOWN:
            results[name][key] = [np.mean([line[key] for line in part]) for part in (lines[:1], lines[-5:])]
        values = (" -> ".join(f"{value:.1%}" for value in results[name][key]) for key in SHOWN)
        table.add_row(name, *values, f"{seconds:.0f}")
    (args.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
