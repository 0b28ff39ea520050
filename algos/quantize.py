"""A model with weights of 8 or 4 bits, by llm-compressor: a directory that vLLM loads.

Each weight is rounded to the nearest value, or with --calibration by GPTQ (2210.17323), layer by layer.
One process; it needs no GPU. transformers loads w8a8 and w4a16 too; fp8 is for GPUs.
llm-compressor needs other versions of transformers than vLLM: they lie apart, in .venv/quantize.

Command:    sh install.sh requirements-quantize.txt
            python algos/quantize.py runs/grpo/checkpoints/latest/hf models/mine_w8a8
            python algos/quantize.py models/mine models/mine_w4 --scheme w4a16 --calibration data/sft.parquet
Docs: docs/guides/export-quantize.md
"""

import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")

import tyro


@dataclass
class Args:
    model: tyro.conf.Positional[str]
    """Hugging Face directory, as hf/ of a checkpoint is one."""
    output: tyro.conf.Positional[str]
    """Directory to write; it must not exist."""
    scheme: Literal["w8a8", "w4a16", "fp8"] = "w8a8"
    """Bits of the linear layers: weights and activations in 8, or in fp8; or weights alone in 4."""
    ignore: tuple[str, ...] = ("lm_head",)
    """Linear layers that stay as they are: names, or re:PATTERN."""
    calibration: str | None = None
    """Parquet of conversations for GPTQ; None: round every weight to the nearest value."""
    calibration_rows: int = 128
    """With --calibration: number of rows of the calibration file to use, from the first."""
    held_out: str | None = None
    """Parquet of conversations; prints the loss on the assistant's turns before and after."""
    response_key: str | None = "extra_info.answer"
    """With --calibration or --held_out: answers of files without a column `messages`; None: prompts alone."""
    max_length: int = 2048
    """With --calibration or --held_out: longest row of both files, in tokens; a longer row is an error."""


if __name__ == "__main__":
    flags = parse(Args)  # before the libraries below are loaded: a wrong flag is answered at once
    sys.path.insert(0, str(Path(sys.prefix, "quantize")))  # llm-compressor, and the versions that it needs
    if not find_spec("llmcompressor"):
        sys.exit("error: llm-compressor is not installed: sh install.sh requirements-quantize.txt")

import jinja2
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.utils import match_named_modules
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, GenerationConfig

from data_prep.lib.conversations import answer, says_nothing
from data_prep.lib.images import load_tokenizer
from data_prep.lib.schema import read_rows
from data_prep.lib.source import Source
from data_prep.lib.templates import given_by, render
from data_prep.lib.turns import encode_messages
from system.families import (
    add_older_names,
    auto_class,
    correct_ties,
    save_tokenizer,
    weights_of_files,
    wider_weights,
)
from system.files import replacing

PRESETS = {"w8a8": "W8A8", "w4a16": "W4A16", "fp8": "FP8_DYNAMIC"}


def read_texts(path, tokenizer, args, limit=None):
    """Rows of a parquet that have an answer -> ids [1, L] of each, and where its assistant speaks."""
    texts = []
    empty = 0
    keys = dict(prompt="prompt", completion=args.response_key)
    if "messages" in Source(path).names:
        keys = dict(messages="messages")
    elif not args.response_key:
        keys.pop("completion")
    rows = (row for some in read_rows(path, keys) for row in some)
    for number, row in enumerate(rows):
        if len(texts) == limit:
            break
        messages = row["messages"] if "messages" in row else row["prompt"]
        replies = [row["completion"]] if "completion" in row else []
        try:
            tools = given_by(row, None, tokenizer)
            silent = says_nothing(replies[0] if replies else messages)
            first = len(messages) if replies else 0
            messages = messages + [dict(role="assistant", content=answer(reply)) for reply in replies]
            found = [] if silent else encode_messages(messages, tokenizer, tools, first)
            if not silent and not found:  # prompts alone
                ids = tokenizer.encode(
                    render(messages, tokenizer, tools, prompted=False), add_special_tokens=False
                )
                found = [(ids, [False] * len(ids))]
        except ValueError as error:
            raise ValueError(f"{path}: row {number}: {error}") from None
        empty += not found
        for ids, spoken in found:
            if (length := len(ids)) > args.max_length:
                raise ValueError(
                    f"{path}: row {number} has {length} tokens, over --max_length {args.max_length}"
                )
            texts.append((torch.tensor([ids]), torch.tensor(spoken)))
    if not texts:
        remedy = "--response_key None takes prompts alone"
        raise ValueError(f"{path}: no row has an answer in {[*keys.values()][-1]!r}; {remedy}")
    if empty:
        print(f"{path}: {empty} rows without an answer are left out", file=sys.stderr)
    return texts


@torch.no_grad()
def mean_loss(lm, texts):
    """Negative log-likelihood of what the assistants say, a token."""
    losses = []
    for ids, spoken in tqdm(texts, desc="loss"):
        logits = lm(ids).logits[0, :-1].float()
        loss_t = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        losses.append(loss_t[spoken[1:]])
    return torch.cat(losses).mean().item()


def scheme_of(lm, args):
    """How the linear layers are stored; ValueError for layers that cannot be."""
    linears = dict(match_named_modules(lm, ["Linear"], args.ignore))
    for name in args.ignore:
        if name != "lm_head" and not any(match_named_modules(lm, [name])):
            raise ValueError(f"--ignore {name}: no layer of the model has that name, or matches re:PATTERN")
    for name, weight in lm.named_parameters():
        if "experts" in name and weight.dim() == 3:
            raise ValueError(f"{name} holds several experts in one weight, which is not supported")
    if lm.config.tie_word_embeddings and "lm_head" in linears:
        raise ValueError("lm_head shares its weight with the embedding: leave it out by --ignore lm_head")
    scheme = preset_name_to_scheme(PRESETS[args.scheme], ["Linear"])
    if not scheme.weights.group_size:
        return scheme
    for size in (128, 64, 32):
        scheme.weights.group_size = size
        odd = {name: m.in_features for name, m in linears.items() if m.in_features % size}
        if not odd:
            return scheme
    name, inputs = next(iter(odd.items()))
    remedy = "take --scheme w8a8, or leave it out by --ignore"
    raise ValueError(f"{name} has {inputs} inputs, no multiple of 128, 64 or 32: {remedy}")


def compress(lm, tokenizer, texts, args, output):
    """Round the weights of a model, by GPTQ if there are texts, and write it to `output`."""
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")  # else it says which device it takes
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    flags = dict(config_groups={"group_0": scheme_of(lm, args)}, ignore=list(args.ignore))
    rows = [dict(input_ids=ids[0].tolist(), attention_mask=[1] * ids.shape[1]) for ids, _ in texts]
    oneshot(
        model=lm,
        processor=tokenizer,
        recipe=GPTQModifier(**flags) if rows else QuantizationModifier(**flags),
        dataset=Dataset.from_list(rows) if rows else None,
        num_calibration_samples=len(rows),
        max_seq_length=args.max_length,
        shuffle_calibration_samples=False,
    )
    sampling = lm.generation_config
    lm.generation_config = GenerationConfig()  # save_pretrained refuses some that it has read
    lm.save_pretrained(output, save_compressed=True)
    sampling.to_json_file(output / "generation_config.json")
    add_older_names(output / "config.json")


def keep_wide(lm, model, own, rounded, output):
    """Write weights again as the model's files have them, where that is a wider dtype than its own.

    rounded: the dtype that they got in between.
    """
    wide = dict(wider_weights(weights_of_files(model, lm), own))
    for path in output.glob("*.safetensors") if wide else ():
        weights = load_file(path)
        for name in wide.keys() & weights.keys():
            if weights[name].dtype == rounded:
                weights[name] = wide[name]
        save_file(weights, path, dict(format="pt"))


def read_back(output):
    """The model of a directory that was just written; ValueError if weights are missing in it or too many."""
    whole = CompressedTensorsConfig(run_compressed=False)  # unpacks each weight once, not at each call
    lm, report = AutoModelForCausalLM.from_pretrained(
        output, dtype="auto", quantization_config=whole, output_loading_info=True
    )
    wrong = sorted({str(name) for names in report.values() for name in names})
    if wrong:
        raise ValueError(f"what was written cannot be loaded again: {len(wrong)} weights, such as {wrong[0]}")
    return lm


def check_reached(norms, lm):
    """ValueError for a layer that is never called: GPTQ makes its weight 0. norms: {name: norm before}."""
    for name, norm in norms.items():
        if lm.get_submodule(name).weight.norm() < 0.5 * norm:
            raise ValueError(f"{name}: no calibration row reaches it as a layer, so --ignore it")


def main(args):
    if os.path.lexists(args.output):
        sys.exit(f"error: {args.output} exists: choose another directory, or remove it")
    try:
        if args.scheme == "fp8" and args.calibration:
            raise ValueError("--calibration: fp8 rounds every weight to the nearest, by itself")
        config = AutoConfig.from_pretrained(args.model)
        if config.get_text_config() is not config:
            raise ValueError(
                f"{args.model} ({config.model_type}) has more than a language model: not supported"
            )
        model_class = auto_class(config)
        tokenizer = load_tokenizer(args.model)
        texts = []
        held_out = []
        if args.calibration:
            texts = read_texts(args.calibration, tokenizer, args, args.calibration_rows)
        if args.held_out:
            held_out = read_texts(args.held_out, tokenizer, args)
        if held_out and not any(spoken[1:].any() for _, spoken in held_out):
            raise ValueError(
                f"{args.held_out}: no row has a turn of the assistant, so there is no loss to print"
            )
        lm = model_class.from_pretrained(args.model, dtype="auto")
        correct_ties(lm)
        own = lm.dtype
        if args.scheme == "w4a16":
            lm = lm.bfloat16()  # vLLM's kernels take no float32
        size = sum(x.nbytes for x in lm.parameters()) / 1e6
        loss = mean_loss(lm, held_out) if held_out else None
        linears = match_named_modules(lm, ["Linear"], args.ignore)
        norms = {name: linear.weight.norm().item() for name, linear in linears}
        with replacing(args.output) as new:
            save_tokenizer(tokenizer, args.model, new)
            compress(lm, tokenizer, texts, args, new)
            keep_wide(lm, args.model, own, lm.dtype, new)
            written = read_back(new)
            check_reached(norms, written)
            new_size = sum(path.stat().st_size for path in new.glob("*.safetensors")) / 1e6
            new_loss = mean_loss(written, held_out) if held_out else None
    except (ValueError, OSError, SafetensorError, jinja2.TemplateError, re.error) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    done = f"{args.output}: {args.scheme}; MB {size:.4g} -> {new_size:.4g}"
    if held_out:
        done += f", loss {loss:.4g} -> {new_loss:.4g}"
    print(done)


if __name__ == "__main__":
    main(Args(**flags))
