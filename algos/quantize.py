"""A model with weights of 8 or 4 bits: a directory of compressed-tensors, which vLLM loads.

Each weight is rounded to the nearest value. With --calibration GPTQ (2210.17323) rounds layer by layer, or
AWQ (2306.00978) scales first. Both hold the model, the states of the calibration rows between two layers, and
the sums of one layer. One process, no GPU. transformers loads w8a8 and w4a16 too; fp8 is for GPUs.

Command:    python algos/quantize.py runs/grpo/checkpoints/latest/hf models/mine_w8a8
            python algos/quantize.py models/mine models/mine_w4 --scheme w4a16 --calibration data/sft.parquet
Docs: docs/guides/export-quantize.md
"""

import os
import re
import sys
from dataclasses import dataclass
from functools import partial
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
    """Parquet of conversations for --method; None: round every weight to the nearest value."""
    method: Literal["gptq", "awq"] = "gptq"
    """How the weights are rounded; awq: for w4a16."""
    calibration_rows: int = 128
    """Number of rows of the calibration file to use, from the first."""
    held_out: str | None = None
    """Parquet of conversations; prints the loss on the assistant's turns before and after."""
    response_key: str | None = "extra_info.answer"
    """Column of the answers to `prompt` in files without a column `messages`; None: prompts alone."""
    max_length: int = 2048
    """Longest row of both files, in tokens; a longer row is an error."""


if __name__ == "__main__":
    flags = parse(Args)  # before the libraries below are loaded: a wrong flag is answered at once

import jinja2
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range
from compressed_tensors.utils import match_named_modules
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from data_prep.lib.conversations import answer, says_nothing
from data_prep.lib.images import load_tokenizer
from data_prep.lib.schema import read_rows
from data_prep.lib.source import Source
from data_prep.lib.templates import given_by, render
from data_prep.lib.turns import encode_messages
from system.families import add_older_names, auto_class, save_tokenizer
from system.files import replacing

BLOCK = 128  # inputs after whose rounding GPTQ corrects all others at once


def read_texts(path, tokenizer, args, limit=None):
    """Rows of a parquet that have an answer -> ids [1, L] of each, and where its assistant speaks."""
    texts, empty, keys = [], 0, dict(prompt="prompt", completion=args.response_key)
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
    """Negative log-likelihood of what the assistants say, a token -> {"loss": ...}; {} without texts."""
    if not texts:
        return {}
    losses = [
        nn.functional.cross_entropy(lm(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")[spoken[1:]]
        for ids, spoken in tqdm(texts, desc="loss")
    ]
    return dict(loss=torch.cat(losses).mean().item())


def scale_of(weight, args):
    """weight [..., inputs], which share a scale -> scale [...], of the weight's dtype."""
    return calculate_qparams(weight.amin(-1), weight.amax(-1), args)[0]


def nearest(weight, args):
    """Scales [outputs, groups] of a weight, each of whose values is rounded by itself."""
    return scale_of(weight.unflatten(1, (-1, args.group_size or weight.shape[1])), args)


def rounded(weight, scales, args):
    """weight [outputs, inputs], scales [outputs, groups] -> each value at the nearest that can be stored."""
    weight, scales = weight.unflatten(1, (scales.shape[1], -1)), scales[..., None]
    steps = (weight / scales).round().clamp(*calculate_range(args, weight.device))
    return (steps * scales).flatten(1)  # eq: quantize.nearest


def awq(block, inside, sums, states, run, args):
    """Scale inputs of linear layers before they are rounded, and what makes these inputs the other way (3.2).

    The scales are the inputs' root mean squares to the power with the least error. A source stays as it is if
    scales of 1 and 2 in turn change the layer: it has another reader, or is a norm that adds 1 to its weight.
    """
    for source, names in sources(block, inside, states, run):
        hessian, weights = sums[names[0]], [inside[name].weight for name in names]
        before, probe = run(states[:1])[0], 2.0 ** (torch.arange(len(hessian)) % 2)
        rescale(source, weights, probe)  # exact: what is equal has equal bits
        equal = torch.equal(run(states[:1])[0], before)
        rescale(source, weights, 1 / probe)
        if equal:
            size = (hessian.diagonal() / hessian.diagonal().mean()).sqrt().clamp(min=1e-4)
            tried = [size ** (i / 20) for i in range(20)]
            errors = [sum(scaled_error(w, scale, hessian, args) for w in weights) for scale in tried]
            rescale(source, weights, tried[errors.index(min(errors))])


def rescale(source, weights, scale):
    """Divide what a layer makes by `scale` [channels], and multiply the weights of what reads it."""
    for x in source.parameters():
        x.data = (x.data.t() / scale).t().to(x.dtype)
    for weight in weights:
        weight.data = (weight * scale).to(weight.dtype)


def scaled_error(weight, scale, hessian, args):
    """Squared error of a layer's outputs over the calibration if its inputs are scaled (eq. 4)."""
    error = rounded(weight * scale, nearest(weight * scale, args), args) / scale - weight
    return ((error @ hessian) * error).sum().item()  # eq: quantize.awq


def sources(block, inside, states, run):
    """Norms and the `up_proj` of each `down_proj`, with the names of the linear layers that read them."""
    calls = {}
    hooks = [m.register_forward_hook(lambda m, *call: calls.update({m: call})) for m in block.modules()]
    run(states[:1])
    for hook in hooks:
        hook.remove()
    norms = [m for m in calls if getattr(m, "weight", None) is not None and m.weight.dim() == 1]
    inputs = {name: calls[linear][0][0] for name, linear in inside.items()}
    found = [(m, [name for name, x in inputs.items() if x is calls[m][1]]) for m in norms]
    ups = {name.replace("down_proj", "up_proj"): name for name in inside if name.endswith("down_proj")}
    return [x for x in found if x[1]] + [(inside[up], [ups[up]]) for up in ups if up in inside]


def gptq(weight, hessian, args):
    """Inputs one after the other, each rounding's error made good by those that follow (algorithm 1).

    weight [outputs, inputs], hessian [inputs, inputs]: sum of x x^T -> rounded weight, scales as `nearest`.
    """
    dtype, inputs = weight.dtype, len(hessian)
    weight, scales, group = weight.float().clone(), [], args.group_size or inputs
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(inputs)
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        error = torch.zeros(len(weight), stop - start)
        for i in range(start, stop):
            if i % group == 0:
                scales.append(scale_of(weight[:, i : i + group], args).to(dtype).float())
            value = rounded(weight[:, i, None], scales[-1][:, None], args)[:, 0]
            error[:, i - start] = (weight[:, i] - value) / inverse[i, i]
            weight[:, i] = value
            lost = error[:, i - start, None]
            weight[:, i + 1 : stop] -= lost * inverse[i, i + 1 : stop]  # eq: quantize.gptq
        weight[:, stop:] -= error @ inverse[start:stop, stop:]
    return weight.to(dtype), torch.stack(scales, 1).to(dtype)


def seen(lm, blocks, ids):
    """Run a text through the model -> the first layer's input, and {name: what else each layer is given}.

    That is masks and positions: not all layers have the same ones.
    """
    given, hooks = {}, []
    for name, block in blocks.items():
        note = lambda _, inputs, options, name=name: given.update({name: (inputs[0], options)})
        hooks.append(block.register_forward_pre_hook(note, with_kwargs=True))
    lm.base_model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return given[next(iter(blocks))][0], {name: options for name, (_, options) in given.items()}


@torch.no_grad()
def round_layers(lm, linears, texts, args, method="gptq"):
    """Round the weights of these linear layers -> {name: scales}; with texts by GPTQ or AWQ, layer by layer.

    Held besides the model: the states of all texts between two layers, and the sums of one layer.
    """
    if not texts:
        return {name: nearest(m.weight, args) for name, m in tqdm(linears.items(), desc="rounding")}
    blocks = {name: m for name, m in lm.named_modules() if type(m).__name__ in lm._no_split_modules}
    states, given = zip(*(seen(lm, blocks, ids) for ids, _ in tqdm(texts, desc="calibration")))
    scales = {}
    for prefix, block in tqdm(blocks.items(), desc=method.upper()):
        inside = {name: m for name, m in linears.items() if name.startswith(f"{prefix}.")}
        sums = {name: torch.zeros(m.in_features, m.in_features) for name, m in inside.items()}
        hooks = [m.register_forward_pre_hook(partial(add_product, sums[name])) for name, m in inside.items()]

        def run(states, block=block, name=prefix):
            outputs = [block(x, **options[name]) for x, options in zip(states, given)]
            return [x[0] if isinstance(x, tuple) else x for x in outputs]

        run(states)
        if unseen := [name for name, total in sums.items() if not total.any()]:
            raise ValueError(f"{unseen[0]}: no calibration row reaches it as a layer, so --ignore it")
        for hook in hooks:
            hook.remove()
        if method == "awq":
            awq(block, inside, sums, states, run, args)
            sums = {name: torch.eye(len(total)) for name, total in sums.items()}  # then to the nearest
        for name, linear in inside.items():
            linear.weight.data, scales[name] = gptq(linear.weight, sums.pop(name), args)
        states = run(states)  # the next layer sees what the rounded one makes
    return scales | {n: nearest(m.weight, args) for n, m in linears.items() if n not in scales}


def add_product(total, _, inputs):
    """Hook of a linear layer: add x^T x of its input to `total`."""
    x = inputs[0].flatten(0, -2).float()
    total.addmm_(x.t(), x)


def read_back(output):
    """The model of a directory that was just written; ValueError if weights are missing in it or too many."""
    logging.set_verbosity_error()  # of transformers, which would print a table of them
    lm, report = AutoModelForCausalLM.from_pretrained(output, dtype="auto", output_loading_info=True)
    wrong = sorted({str(name) for names in report.values() for name in names})
    if wrong:
        raise ValueError(f"what was written cannot be loaded again: {len(wrong)} weights, such as {wrong[0]}")
    return lm


def quantize(lm, tokenizer, args, output):
    """Round the weights of a model and write it to `output` -> what it cost, in words."""
    preset = {"w8a8": "W8A8", "w4a16": "W4A16", "fp8": "FP8_DYNAMIC"}[args.scheme]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    linears = dict(match_named_modules(lm, ["Linear"], args.ignore))
    for name in args.ignore:
        if name != "lm_head" and not any(match_named_modules(lm, [name])):
            raise ValueError(f"--ignore {name}: no layer of the model has that name, or matches re:PATTERN")
    fused = [name for name, weight in lm.named_parameters() if "experts" in name and weight.dim() == 3]
    if fused:
        raise ValueError(f"{fused[0]} holds several experts in one weight, which is not supported")
    if lm.config.tie_word_embeddings and "lm_head" in linears:
        raise ValueError("lm_head shares its weight with the embedding: leave it out by --ignore lm_head")
    if scheme.weights.group_size:
        fits = [n for n in (128, 64, 32) if not any(m.in_features % n for m in linears.values())]
        if not fits:
            name, odd = next((n, m) for n, m in linears.items() if m.in_features % 32)
            remedy = "take --scheme w8a8, or leave it out by --ignore"
            raise ValueError(f"{name} has {odd.in_features} inputs, no multiple of 128, 64 or 32: {remedy}")
        scheme.weights.group_size = fits[0]
    held_out = read_texts(args.held_out, tokenizer, args) if args.held_out else []
    if held_out and not any(spoken[1:].any() for _, spoken in held_out):
        raise ValueError(f"{args.held_out}: no row has a turn of the assistant, so there is no loss to print")
    texts = read_texts(args.calibration, tokenizer, args, args.calibration_rows) if args.calibration else []
    before = dict(MB=sum(x.nbytes for x in lm.parameters()) / 1e6) | mean_loss(lm, held_out)
    scales = round_layers(lm, linears, texts, scheme.weights, args.method)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=[*args.ignore])
    apply_quantization_config(lm, config)
    for name, linear in linears.items():
        linear.weight_scale.data.copy_(scales[name])
    compressor = ModelCompressor.from_pretrained_model(lm)
    compressor.compress_model(lm)
    sampling, lm.generation_config = lm.generation_config, GenerationConfig()
    lm.save_pretrained(output)  # which refuses some generation configs that it has read
    sampling.to_json_file(output / "generation_config.json")
    compressor.update_config(output)
    add_older_names(output / "config.json")
    for path in output.glob("*.safetensors"):  # safetensors sets mode 0600
        path.chmod((output / "config.json").stat().st_mode)
    after = mean_loss(read_back(output), held_out)  # of what is on disk
    after["MB"] = sum(path.stat().st_size for path in output.glob("*.safetensors")) / 1e6
    change = ", ".join(f"{name} {x:.4g} -> {after[name]:.4g}" for name, x in before.items())
    return f"{len(linears)} linear layers in {args.scheme}; {change}"


def main(args):
    if os.path.lexists(args.output):
        sys.exit(f"error: {args.output} exists: choose another directory, or remove it")
    try:
        if args.scheme == "fp8" and args.calibration:
            raise ValueError("--calibration: fp8 rounds every weight to the nearest, by itself")
        if args.method == "awq" and not (args.calibration and args.scheme == "w4a16"):
            raise ValueError("--method awq needs --scheme w4a16 and --calibration")
        config = AutoConfig.from_pretrained(args.model)
        if config.get_text_config() is not config:
            raise ValueError(
                f"{args.model} ({config.model_type}) has more than a language model: not supported"
            )
        dtype = torch.bfloat16 if args.scheme == "w4a16" else "auto"  # vLLM's kernels take no float32
        lm = auto_class(config).from_pretrained(args.model, dtype=dtype)
        tokenizer = load_tokenizer(args.model)
        with replacing(args.output) as new:
            save_tokenizer(tokenizer, args.model, new)
            done = quantize(lm, tokenizer, args, new)
    except (ValueError, OSError, SafetensorError, jinja2.TemplateError, re.error) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    print(f"{args.output}: {done}")


if __name__ == "__main__":
    main(Args(**flags))
