"""SFT: minimise -sum(log p(response token | what comes before it)) / (response tokens of the optimizer step).

Differences from other trainers:
1. The denominator counts the tokens of all ranks and micro-batches, so neither split changes the gradient.
2. Every response token is trained, EOS included, and nothing else (verl: the last prompt token, and no EOS).
3. Rows are balanced over the ranks by tokens, not by their number.
Continued pre-training, in which every token of plain texts is trained: --text_key.
LoRA (arXiv 2106.09685): --lora_rank. AdaLoRA (2303.10512): --lora_kind. QLoRA (2305.14314): --qlora.
Long rows over several ranks (Ulysses, 2309.14509; ring attention, 2310.01889): --sp_size.

CPU:        python algos/sft.py --model models/tiny --train_files data/train.parquet --output_dir runs/sft
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/sft.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 algos/sft.py
Docs: docs/algorithms/sft.md
"""

import ctypes
import faulthandler
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import parse

# Shapes: N rows, T response tokens, V vocabulary. A suffix names the axes (logp_nt). T is aligned with the
# response: column t belongs to response token t.
# A row is a dict of one example: prompt_ids, response_ids, and which of the response's tokens are trained.


@dataclass(kw_only=True)
class Args:
    # ---- run
    output_dir: str  # directory of the run: arguments, metrics, log, checkpoints
    resume: str = "auto"  # auto: output_dir's latest checkpoint; never; or path of another run's
    seed: int = 1  # seed for data order and LoRA init
    total_epochs: int = 1  # passes over the training data
    total_steps: int | None = None  # number of optimizer steps; None: as many as total_epochs takes
    save_freq: int = 50  # steps between checkpoints; 0: only at the end
    test_freq: int = 10  # steps between validations; 0: only before and after training
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # tracker that also gets the metrics
    # ---- data
    train_files: tuple[str, ...]  # parquet files of training rows
    val_files: tuple[str, ...] = ()  # parquet files of validation rows; none: no validation
    prompt_key: str = "prompt"  # column of the prompt: chat messages, or a string (one user message)
    response_key: str = "extra_info.answer"  # column of the response, a string; dots reach into structs
    messages_key: str | None = None  # column of conversations, instead of prompt_key and response_key
    text_key: str | None = None  # column of plain texts, instead: every token is trained
    env: str | None = None  # environment whose tools the chat template shows, FILE.py:NAME; None: no tools
    max_length: int = 1024  # limit of prompt and response together, in tokens, EOS included
    truncation: Literal["error", "left", "right"] = "error"  # rows over max_length: stop, or cut this side
    packing: bool = True  # texts in one row without padding, where the model allows it; off: one row each
    # ---- model
    model: str  # Hugging Face directory or hub name of the model to train
    tokenizer: str | None = None  # Hugging Face directory or hub name; None: the model's
    attn_implementation: str = "sdpa"  # attention; sdpa: torch's own, on GPUs flash attention
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of weights and optimizer state
    # dtype of forward and backward; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    sp_size: int = 1  # ranks that share the tokens of a row
    sp_attention: Literal["ulysses", "ring"] = "ulysses"  # attention between the slices of a row
    gradient_checkpointing: bool = True  # recompute activations: slower, with less memory
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    liger: bool = False  # Liger's Triton kernels for norm, rotary embedding and MLP; needs a GPU
    lora_rank: int = 0  # rank of LoRA adapters, trained in place of the model; 0: train the model
    lora_kind: Literal["lora", "adalora"] = "lora"  # adalora: lora_rank is the mean over the layers
    lora_alpha: float = 16  # LoRA scale: the output of the adapters times lora_alpha / lora_rank
    # layers that get adapters; all-linear: all linear layers except experts, routers and output layer
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    qlora: bool = False  # frozen weights in 4 bits (bitsandbytes), whole on every rank; needs lora_rank
    # ---- optimizer
    train_batch_size: int = 64  # rows of a step, over all ranks
    lr: float = 1e-5  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # decay to 0 after the last step
    warmup_steps: int = 10  # steps of linear warm-up
    decay_steps: int = 0  # last steps, which alone decay (warm-up-stable-decay); 0: all after warm-up
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm

    def __post_init__(self):
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import jinja2
import numpy as np
import pyarrow.compute as pc
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from common.metrics import speed_metrics, timed
from common.run import Logger, digests, fail, in_one_line, leave, open_run, ranks_on, refuse
from data_prep.lib.cache import BOOL, BOOLS, IDS, IMAGES, INT, prepare
from data_prep.lib.chats import answer
from data_prep.lib.images import (
    auto_class,
    encode_prompt,
    load_processor,
    never_sampled,
    show_images,
    takes_images,
)
from data_prep.lib.towers import copy_processor, decoder, dequantised, freeze_towers, from_files
from data_prep.lib.turns import says_nothing, turns
from envs import load_env


# ---- The mathematics -------------------------------------------------------------------
def sft_loss(logp_nt, trained_nt, tokens):
    """-sum(log p) of the trained tokens over `tokens`, those of the whole optimizer step.

    Log-probs -1 -2 -9 of a row whose last token is a tool's, and -3 0 0 (padding), of 3 tokens -> 2.
    """
    return -(logp_nt * trained_nt).sum() / tokens  # eq: sft.loss


def scheduled_rate(args, step, total_steps):
    """learning_rate, held at its peak until the last decay_steps.

    Ten steps, two of warm-up, three of linear decay -> 1/2 1 | 1 1 1 1 1 | 1 2/3 1/3 of the peak.
    """
    held = max(0, total_steps - args.warmup_steps - args.decay_steps) if args.decay_steps else 0
    return learning_rate(args, max(min(step, args.warmup_steps + 1), step - held), total_steps - held)


# ---- The step --------------------------------------------------------------------------
def encode(prompt, response, tokenizer, tools=None, images=()):
    """-> ids of a prompt (messages, or a string: the user's) and a response with EOS; which are trained."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    prompt_ids = encode_prompt(dict(prompt=messages, images=images), tokenizer, tools)["prompt_ids"]
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    response_ids = tokenizer.encode(answer(response), add_special_tokens=False) + [tokenizer.eos_token_id]
    # CAREFUL: the loss goes by position; by value, EOS would be lost where it is also the pad
    return prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids)


def encode_messages(messages, tokenizer, tools=None):
    """-> ids of a conversation; which are trained: the assistant's turns, up to the token that ends each."""
    text, found = turns(messages, tokenizer, tools)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = np.array(encoded["input_ids"]), np.array([start for start, _ in encoded["offset_mapping"]])
    trained = np.zeros(len(ids), dtype=bool)
    for i, begin, end in found:
        # a token that begins before the turn is context, even if it ends in it
        turn = np.flatnonzero((begin <= starts) & (starts < end))
        ends = turn[ids[turn] == tokenizer.eos_token_id]
        if not len(ends):
            special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
            ends = turn[np.isin(ids[turn], special)]
        if not len(ends):
            raise ValueError(f"the chat template ends message {i} with no token that a sampler stops at")
        trained[turn] = turn <= ends[-1]
    return ids.tolist(), trained.tolist()


def split(ids, trained):
    """A row; its prompt ends where training begins. None if nothing is trained (nothing predicts ids[0])."""
    if not any(trained[1:]):
        return None
    first, last = trained.index(True, 1), len(trained) - trained[::-1].index(True)
    return dict(prompt_ids=ids[:first], response_ids=ids[first:last], trained=trained[first:last])


def micro_batches(policy, rows, args):
    """Run this rank's share of rows, which are equal on all ranks -> logp_nt, trained_nt of each micro-batch.

    An empty micro-batch runs a dummy row that is not trained: its sum is a zero that still has a gradient.
    """
    dummy = dict(prompt_ids=[0], response_ids=[0], trained=[False])
    rank, ranks = dist.get_rank() // args.sp_size, dist.get_world_size() // args.sp_size
    own = [rows[i] for i in balance(lengths(rows), ranks)[rank]]
    parts = pack(lengths(own), args.max_tokens_per_microbatch * args.sp_size, policy.shares)
    for number, part in enumerate(parts, 1):
        policy.set_requires_all_reduce(number == len(parts))  # over the replicas of HSDP
        batch = [own[i] for i in part] or [dummy]
        logp_nt, _ = token_logps(policy, batch, args, 1.0)
        yield logp_nt, pad([row["trained"] for row in batch]).to(logp_nt.device)


def update(policy, optimizer, rows, args, step=1, total_steps=1):
    """One optimizer step -> metrics. Every rank knows all rows: the denominator needs no communication."""
    loss, tokens = 0.0, sum(sum(row["trained"]) for row in rows)
    for logp_nt, trained_nt in micro_batches(policy, rows, args):
        part = sft_loss(logp_nt, trained_nt, tokens)
        # FSDP averages gradients over the ranks, but `tokens` already counts all ranks
        (part * dist.get_world_size()).backward()
        loss += part.item()
    adaptive = [layer for layer in policy.lm.modules() if hasattr(layer, "lora_E")]
    if adaptive:  # equal on every rank, and so is the mean over them
        (0.1 * orthogonality(adaptive)).backward()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).full_tensor().item()
    finite = math.isfinite(norm)  # the norm over all ranks: they step or skip together
    if finite:
        optimizer.step()
    metrics = {"train/grad_norm": norm, "train/skipped_updates": not finite}
    if adaptive:
        metrics["train/lora_ranks"] = choose_ranks(adaptive, args, step, total_steps, finite)
    optimizer.zero_grad()
    [loss] = all_reduce([loss / args.sp_size])  # ranks that share a row all have its loss
    return metrics | {"train/loss": loss}


@torch.no_grad()
def evaluate(policy, rows, args):
    """The loss over all rows, each token weighing the same; of texts also in bits per byte -> metrics."""
    loss, tokens = 0.0, 0
    for logp_nt, trained_nt in micro_batches(policy, rows, args):
        loss += sft_loss(logp_nt, trained_nt, 1).item()
        tokens += trained_nt.sum().item()
    loss, tokens = all_reduce([loss, tokens])
    metrics = {"val/loss": loss / tokens}
    if args.text_key:
        metrics["val/bits_per_byte"] = loss / tokens / math.log(2) * rows.tokens_per_byte  # eq: sft.bits
    return metrics


def main(args):
    # ---- arguments and data: checked before anything slow
    check_args(args)
    resume_from = open_run(args)
    tokenizer, train_rows, val_rows, ends, summary = load_data(args)
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch
    if args.lora_kind == "adalora" and total_steps < 10:  # ranks are chosen from the first tenth to the half
        fail(f"--lora_kind adalora: {total_steps} steps are too few to choose ranks in, it takes 10")

    # ---- model
    device, mesh = setup_distributed(args.hsdp_replicas)
    policy = load_policy(args, mesh, device)
    stops = policy.lm.generation_config  # the tokens that samplers of the saved model stop at
    stops.eos_token_id = sorted({*ends, *np.ravel(stops.eos_token_id).tolist()} - {None})
    trained, parameters = dict(hf=policy.lm), [p for p in policy.parameters() if p.requires_grad]
    betas = 0.9, 0.95
    optimizer = torch.optim.AdamW(parameters, args.lr, betas, weight_decay=args.weight_decay, fused=True)
    state = load_checkpoint(resume_from, trained, optimizer)
    check_layout(policy, train_rows, args)
    log = Logger(args, state["step"], total_steps)
    log.say(f"{summary}\n{total_steps} steps, {ranks_on(device, policy.lm)}{state['origin']}")
    stop = []  # SIGTERM makes the step in progress the last
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))

    if val_rows and not state["step"]:
        log.log(evaluate(policy, val_rows, args) | {"training/global_step": 0}, 0)

    saving = {}  # seconds of the last checkpoint, reported by the step after it
    for step in range(state["step"] + 1, total_steps + 1):
        timing, saving, begin = saving, {}, time.perf_counter()
        faulthandler.dump_traceback_later(0.9 * TIMEOUT_S + dist.get_node_local_rank() / 4)  # stacks, in turn
        epoch, number = divmod(step - 1, steps_per_epoch)
        order = np.random.default_rng((args.seed, epoch)).permutation(len(train_rows))
        rows = [train_rows[i] for i in order[number * args.train_batch_size :][: args.train_batch_size]]
        # ---- update
        optimizer.param_groups[0]["lr"] = scheduled_rate(args, step, total_steps)
        with timed(timing, "update_actor"):
            metrics = update(policy, optimizer, rows, args, step, total_steps)
        # ---- validation
        last = step == total_steps or all_reduce([bool(stop)], dist.ReduceOp.MAX) == [1]
        if val_rows and (last or (args.test_freq and step % args.test_freq == 0)):
            with timed(timing, "testing"):
                metrics |= evaluate(policy, val_rows, args)
            log.say(f"step {step}: validation loss {metrics['val/loss']:.4f}")
        # ---- metrics
        timing["step"] = time.perf_counter() - begin
        metrics |= speed_metrics(lengths(rows), policy, timing, args)
        metrics |= {
            "train/lr": optimizer.param_groups[0]["lr"],
            "training/global_step": step,
            "training/epoch": epoch,
        }
        log.log(metrics, step, loss="train/loss", tok_s="perf/throughput")
        # ---- checkpoint, after the metrics: each checkpoint has its metrics
        if last or (args.save_freq and step % args.save_freq == 0):
            with timed(saving, "save_checkpoint"):
                save_checkpoint(args, step, trained, optimizer, tokenizer)
        if last:
            break
    log.close()
    leave()


# --------------------------------------------------------------------------------------------------
# The system
# --------------------------------------------------------------------------------------------------
# region log-probs
LOGIT_CHUNK = 1024  # response positions whose logits exist at the same time


class LogProbs(torch.autograd.Function):
    """hidden [L, H], weight [V, H], target [L] -> log-prob of the targets, entropy [L], in float32.

    Logits exist for one chunk at a time, in two buffers; the backward pass computes them again.
    """

    @staticmethod
    def logits(hidden, weight, temperature, softcap, never, out):
        """Write the logits of a chunk to `out` [chunk, V]: float32, also where the model is bfloat16."""
        if weight.dtype is out.dtype:
            torch.mm(hidden, weight.t(), out=out)
        elif weight.is_cuda:
            torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        else:
            torch.mm(hidden.float(), weight.float().t(), out=out)
        if softcap:  # gemma-2 and gemma-4
            out.div_(softcap).tanh_().mul_(softcap)
        for token in never:
            out[:, token] = -1e4  # finite, because 0 * -inf is NaN
        # CAREFUL: the temperature belongs here too, or the ratio compares two different distributions
        return out if temperature == 1 else out.div_(temperature)

    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, softcap, never, with_entropy):
        ctx.chunks = [slice(i, i + LOGIT_CHUNK) for i in range(0, len(target) or 1, LOGIT_CHUNK)]
        logp, entropy = (torch.zeros(len(target), device=target.device) for _ in range(2))
        buffers = torch.empty(2, min(len(target), LOGIT_CHUNK), len(weight), device=target.device)
        for chunk in ctx.chunks:
            p_lv, logp_lv = buffers[:, : len(target[chunk])]
            logits_lv = LogProbs.logits(hidden[chunk], weight, temperature, softcap, never, p_lv)
            torch.log_softmax(logits_lv, -1, out=logp_lv)
            logp[chunk] = logp_lv.gather(-1, target[chunk, None])[:, 0]
            if with_entropy:
                entropy[chunk] = -torch.exp(logp_lv, out=p_lv).mul_(logp_lv).sum(-1)
        ctx.save_for_backward(hidden, weight, target, entropy, buffers)
        ctx.options, ctx.with_entropy = (temperature, softcap, never), with_entropy
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logp, d_entropy):
        """p the softmax: d log p(target) = onehot(target) - p, d entropy = -p (log p + entropy)."""
        hidden, weight, target, entropy, buffers = ctx.saved_tensors
        temperature, softcap, _ = ctx.options
        d_logp, d_entropy = d_logp[:, None] / temperature, d_entropy[:, None] / temperature
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for number, chunk in enumerate(reversed(ctx.chunks)):
            p_lv, logp_lv = buffers[:, : len(target[chunk])]
            if number:  # the buffers still hold the last chunk
                logits_lv = LogProbs.logits(hidden[chunk], weight, *ctx.options, p_lv)
                torch.log_softmax(logits_lv, -1, out=logp_lv)
            torch.exp(logp_lv, out=p_lv)
            d_lv = -d_logp[chunk]
            if ctx.with_entropy:
                d_lv = logp_lv.add_(entropy[chunk, None]).mul_(-d_entropy[chunk]).add_(d_lv)
            d_lv = torch.mul(p_lv, d_lv, out=logp_lv).scatter_add_(-1, target[chunk, None], d_logp[chunk])
            if softcap:  # d tanh = 1 - tanh^2
                logits_lv = LogProbs.logits(hidden[chunk], weight, *ctx.options, p_lv)
                d_lv = d_lv.addcmul_(d_lv, logits_lv.mul_(temperature / softcap).square_(), value=-1)
            d_lv = d_lv.to(weight.dtype)
            torch.mm(d_lv, weight, out=d_hidden[chunk])
            if d_weight is not None:
                d_weight.addmm_(d_lv.t(), hidden[chunk])
        return d_hidden, d_weight, *[None] * 5


class TokenLogps(nn.Module):
    """A causal LM whose forward returns log-probs of given tokens: one root module, for FSDP.

    shares: whether its rows are laid out by `one_row`; otherwise by `padded`.
    """

    sp_size = 1  # ranks that share a row
    entropy = True  # whether it is computed

    def __init__(self, lm, shares=False):
        super().__init__()
        self.lm, self.shares = lm, shares
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            fail(f"{lm.config.name_or_path}: its output layer has a bias, which the log-probs leave out")
        config = lm.config.get_text_config()
        # granite and minicpm3 divide their logits; cohere and falcon-h1 multiply them
        factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1
        self.scale = factor / (getattr(config, "logits_scaling", None) or 1)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.never = [] if getattr(lm, "towers", ()) else never_sampled(lm.config)

    def hidden(self, where, inputs):
        """What the output layer reads at flat positions, [L, H]."""
        body = self.lm.base_model if "pixel_values" in inputs else decoder(self.lm)
        return body(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]

    def forward(self, where, target, temperature, **inputs):
        """where [L]: flat positions whose logits predict target [L] -> log-prob [L], entropy [L], float32."""
        hidden, weight = self.hidden(where, inputs), self.lm.get_output_embeddings().weight
        options = temperature / self.scale, self.softcap, self.never, self.entropy
        return LogProbs.apply(hidden.to(weight.dtype), weight, target, *options)  # float32 in Mamba


def token_logps(policy, rows, args, temperature):
    """Log-probs of the response tokens of rows, and entropy of the distributions that predict them.

    Returns logp_nt, entropy_nt [N, T], 0 after the end of a response; T is the longest response.
    """
    device = next(policy.parameters()).device
    layout = one_row if policy.shares else padded
    texts = [(row["prompt_ids"], row["response_ids"]) for row in rows]
    if takes_images(args):
        texts = [(*text, row.get("images", ())) for text, row in zip(texts, rows)]
        layout, texts = show_images(layout, texts, load_processor(args.model, args.tokenizer, True))
    texts = texts or [([0], [0])]  # forward and backward are collectives: without a row a dummy runs
    prompts, responses = [text[0] for text in texts], [text[1] for text in texts]
    inputs, where = layout(prompts, responses)
    policy.rows = rows  # for a forward pass that needs more of them than tokens
    inputs = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
    columns = policy(where.to(device), join(responses).to(device), temperature, **inputs)
    lengths = [len(response) for response in responses]
    return [pad(column.split(lengths))[: len(rows)] for column in columns]


# endregion
# region layouts
def rounding_limit(policy, args):
    """Mean |log-prob difference| of rounding alone, and whether it chooses experts that nearly tie."""
    experts = any(type(layer).__name__.endswith("Experts") for layer in policy.lm.modules())
    return {"float32": 1e-4, "bfloat16": 0.3 if experts else 0.1}[args.compute_dtype], experts


def join(parts):
    """Token ids of several lists or arrays as one tensor."""
    return torch.cat([torch.as_tensor(part) for part in parts]).long()


def pad(rows):
    """Rows of numbers as a tensor [rows, longest], with zeros after the shorter ones."""
    return nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)


def response_mask(lengths):
    """[N, T] bool, True on response tokens (EOS included)."""
    return torch.arange(max(lengths, default=1)) < torch.as_tensor(lengths)[:, None]


def padded(prompts, responses):
    """Model inputs with one text a row, padded on the right, and the positions that predict the responses.

    Causal attention never looks at padding on the right. Positions are flat: row * width + column.
    """
    input_ids = pad([join(text) for text in zip(prompts, responses)])
    where = []
    # labels are shifted against logits in a layout and nowhere else: position p - 1 predicts token p
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        first = row * input_ids.shape[1] + len(prompt) - 1
        where.append(torch.arange(first, first + len(response)))
    return dict(input_ids=input_ids), torch.cat(where)


def one_row(prompts, responses):
    """As `padded`, but all in one row without padding; neighbours with the same prompt share it.

    A piece of the row is a whole text, a shared prompt, or one response to it. Pieces of one shape are
    neighbours. Prompt a b, responses c d and e: pieces a b, e, c d at positions 0 1, 2, 2 3; e sees a b e.
    """
    pieces = []  # token ids, how many tokens of another piece they see first, and which piece that is
    texts = []  # for each response: its piece, and the length of its prompt
    for prompt, same in groupby(zip(prompts, responses), key=lambda text: list(text[0])):
        answers, root = [response for _, response in same], len(pieces)
        if len(answers) == 1:
            pieces.append((join([prompt, answers[0]]), 0, root))
        else:
            pieces.append((prompt, 0, root))
            pieces += [(answer, len(prompt), root) for answer in answers]
        texts += [(piece, len(prompt)) for piece in range(len(pieces) - len(answers), len(pieces))]
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i][1], len(pieces[i][0])))
    ids = [pieces[i][0] for i in order]
    spans = dict(zip(order, torch.arange(sum(map(len, ids))).split([len(x) for x in ids])))
    seen, shapes = {}, []
    for i in order:
        part, before, root = pieces[i]
        seen[i] = torch.cat([spans[root][:before], spans[i]])
        shapes.append((len(part), before + len(part)))
    inputs = dict(
        input_ids=join(ids)[None],
        position_ids=torch.cat([torch.arange(s - t, s) for t, s in shapes])[None],
        seen=torch.cat([*seen.values()]),
        shapes=np.array(shapes),  # CAREFUL: FSDP would walk through a list in every layer
        borders=torch.tensor([(0, 0), *shapes]).cumsum(0).int().t().contiguous(),
    )
    return inputs, torch.cat([seen[i][length - 1 : -1] for i, length in texts])


def piece_attention(module, query, key, value, mask, scaling, seen, shapes, borders, **_):
    """Attention as transformers calls it, on a row made by `one_row`: query [1, H, T, D] -> [1, T, H, D].

    seen: positions that each piece sees, one piece after the other. shapes: (queries, keys) of each piece;
    its last query sees its last key. borders: their running sums.
    """
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    key, value = key[seen], value[seen]
    if query.is_cuda and query.dtype != torch.float32:  # flash attention has half precision only
        options = dict(scale=scaling, window_size=(-1, 0), enable_gqa=True)  # causal
        out = varlen_attn(query, key, value, *borders, *shapes.max(0).tolist(), **options)
    else:
        out = attend(query, key, value, shapes, scaling)
    return out[None], None


def attend(query, key, value, shapes, scaling):
    """Causal attention in pieces of a row, by SDPA: query [T, H, D], key, value [S, KV, D] -> [T, H, D]."""
    from torch.nn.attention.bias import causal_lower_right

    dtype, out = query.dtype, []
    if not query.is_cuda:  # a CPU's backward pass is slow in bfloat16
        query, key, value = query.float(), key.float(), value.float()
    runs = [(len(list(same)), *shape) for shape, same in groupby(shapes.tolist())]  # pieces of one shape
    keys = [n * s for n, _, s in runs]
    parts = zip(query.split([n * t for n, t, _ in runs]), key.split(keys), value.split(keys))
    for (n, t, s), part in zip(runs, parts):
        part = [x.unflatten(0, (n, -1)).transpose(1, 2) for x in part]  # [n, H, t or s, D]
        bias = causal_lower_right(t, s)
        some = nn.functional.scaled_dot_product_attention(*part, bias, scale=scaling, enable_gqa=True)
        out.append(some.transpose(1, 2).flatten(0, 1))
    return torch.cat(out).to(dtype)


def special_layers(config):
    """What a model has besides attention to all earlier tokens: then its texts cannot be in one row."""
    model, text = auto_class(config)._model_mapping.get(type(config), None), config.get_text_config()
    special = "sliding_window", "attention_chunk_size", "attn_logit_softcapping", "index_topk"
    special = [name for name in special if getattr(text, name, None)] + ["a state"] * recurrent(text)
    return special + ["attention of its own"] * (not getattr(model, "_supports_attention_backend", False))


def recurrent(config):
    """Whether a layer passes a state along the row, across the borders between texts."""
    text = config.get_text_config()
    model = AutoModelForCausalLM._model_mapping.get(type(text), None)
    kinds = getattr(text, "layer_types", None) or []
    stateful = {"conv", "linear_attention", "hybrid", "hybrid_sliding"}
    return getattr(model, "_is_stateful", False) or not stateful.isdisjoint(kinds)


# endregion
# region ranks
TIMEOUT_S = 3600  # seconds that a rank waits for the others


def setup_distributed(hsdp_replicas):
    """Join the processes of torchrun, or run alone -> the device of this rank and the FSDP mesh."""
    if "RANK" not in os.environ:  # plain `python`: a world of one
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # CAREFUL: torchrun keeps its store over restarts, with the addresses of dead ranks (pytorch issue 135712)
    new_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and not os.environ.get(new_store):
        fail(f"--max-restarts: set {new_store}=1 for torchrun on each node")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif sys.platform == "linux":  # malloc must keep freed memory: to get it again takes 30 % of an update
        ctypes.CDLL("libc.so.6").mallopt(-4, 0)  # M_MMAP_MAX
        ctypes.CDLL("libc.so.6").mallopt(-1, -1)  # M_TRIM_THRESHOLD
    timeout, c10d = timedelta(seconds=TIMEOUT_S), dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout  # for subgroups
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    shape = hsdp_replicas, dist.get_world_size() // hsdp_replicas
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return device, mesh if hsdp_replicas > 1 else mesh["shard"]


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a list of numbers over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op)
    return total.tolist()


def balance(lengths, ranks):
    """Deal rows to ranks so that each gets about the same number of tokens -> list of lists of row numbers.

    Longest first to the lightest rank: lengths 5 4 3 3 over two ranks -> [0, 3] and [1, 2].
    """
    parts, load = [[] for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        lightest = load.index(min(load))
        parts[lightest].append(i)
        load[lightest] += lengths[i]
    return parts


def split_micro_batches(lengths, budget, one_row):
    """Split rows, longest first, into micro-batches of at most `budget` tokens, padding included.

    Every rank gets the same number of micro-batches, the largest that any needs; the missing ones are empty.
    """
    batches = [[]]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rows = [*batches[-1], i]
        cost = sum(lengths[j] for j in rows) if one_row else lengths[rows[0]] * len(rows)
        if len(rows) > 1 and cost > budget:
            batches.append([i])
        else:
            batches[-1].append(i)
    # CAREFUL: forward and backward are collectives; a rank that ran fewer of them would hang the others
    [largest] = all_reduce([len(batches)], dist.ReduceOp.MAX)
    return batches + [[]] * (int(largest) - len(batches))


# endregion
# region model
def load_model(args, mesh, device, wrap, scores=False, adapt=None, share=True, **changes):
    """The model in `wrap`, sharded by FSDP2. Rank 0 reads the weights, the others get their shards.

    scores: with a head for a score. adapt: adds LoRA. share: whether texts may be in one row.
    changes: to its configuration.
    """
    config, attention = read_config(args, share, **changes)
    auto, adapt = auto_class(config, scores), adapt or add_adapters
    original_dtype = config.dtype or getattr(torch, args.param_dtype)
    full = None if dist.get_rank() else from_files(auto, args.model, **changes)
    if all_reduce([bool(full and full.untied)]) == [1]:
        config.tie_word_embeddings = False
    with torch.device("meta"):
        lm = auto.from_config(config, dtype=args.param_dtype, attn_implementation=attention)
        lm.towers = set() if takes_images(args) else freeze_towers(lm)  # the sampler does not get them
        adapt(lm, args)
    lm.config.dtype = original_dtype  # the dtype of hf/
    lm.tied = lm.all_tied_weights_keys  # names that are not saved
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = wrap(lm, attention == "pieces")
    precision = MixedPrecisionPolicy(getattr(torch, args.compute_dtype), reduce_dtype=torch.float32)
    for block in [m for m in lm.modules() if type(m).__name__ in lm._no_split_modules][::-1]:  # inner first
        fully_shard(block, mesh=mesh, mp_policy=precision)
    # the root too is resharded after a forward: without a backward nothing else would do it
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy.to_empty(device=device)
    if full:
        adapt(full, args)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(lm, full.state_dict() if full else {}, options=options)
    for name, buffer in lm.named_buffers():  # rotary frequencies and the like are in no state dict
        if full:
            buffer.copy_(full.get_buffer(name))
        dist.broadcast(buffer, 0)
    if full and lm.can_generate():  # saved with the weights: it may name more EOS tokens
        lm.generation_config = full.generation_config
    return policy


def read_config(args, share, **changes):
    """The configuration of the model, without dropout, and its attention: "pieces" if texts share a row."""
    logging.disable_progress_bar()  # of transformers
    config, attention = AutoConfig.from_pretrained(args.model, **changes), args.attn_implementation
    for part in filter(None, (config, *(getattr(config, name) for name in config.sub_configs))):
        part.__dict__.pop("quantization_config", None)  # trained and saved weights are whole
        for name in [name for name in part.to_dict() if "dropout" in name or name.endswith("_pdrop")]:
            setattr(part, name, 0.0)  # CAREFUL: with dropout the ratio is not 1 on the first mini-batch
    special = takes_images(args) or special_layers(config)
    if share and attention == "sdpa" and not special:
        AttentionInterface.register("pieces", piece_attention)
        attention = "pieces"
    return config, attention


def add_adapters(lm, args):
    """With --lora_rank: LoRA matrices next to the linear layers (2106.09685), and all else frozen -> lm."""
    if not args.lora_rank:
        return lm
    import peft  # here, because it takes two seconds
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN as renamed

    renamed.clear()  # CAREFUL: peft would give the adapters of shared experts to all experts, by old names
    layers, body = {}, {*decoder(lm).modules()}  # linear layers; body: all but the output layer
    left_out = "gate", "router", "mamba.out_proj", "mixer.out_proj"  # Mamba's kernels skip adapters
    for name, layer in lm.named_modules():
        linear = type(layer).__name__ in ("Linear", "Linear4bit")  # the latter with --qlora
        if linear and layer in body and ".experts." not in name and not name.endswith(left_out):
            layers[name] = name.rpartition(".")[2]
    known, chosen = {*layers.values()}, {*args.lora_target_modules}
    if wrong := chosen - known - {"all-linear"}:
        problem = f"{' '.join(sorted(wrong))} are not among its linear layers, {' '.join(sorted(known))}"
        raise ValueError(f"{args.model} ({lm.config.model_type}), --lora_target_modules: {problem}")
    config = peft.LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=[name for name, last in layers.items() if chosen & {last, "all-linear"}],
        task_type="SEQ_CLS" if hasattr(lm, "score") else "CAUSAL_LM",
    )
    torch.manual_seed(args.seed)
    peft.inject_adapter_in_model(config, lm)
    return lm


@torch.no_grad()
def whole_weights(lm, dtype, towers=True):
    """Names and weights of the sharded model as its files have them, one whole weight at a time.

    Adapters are added to their layers, and tied weights come once. A collective: every rank consumes all.
    """
    skipped = {*lm.tied} if towers else {*lm.tied, *lm.towers}
    for name, x in lm.state_dict(keep_vars=True).items():  # persistent buffers too
        layer, base, end = name.partition(".base_layer.")
        if name in skipped or ".lora_" in name or ".weight." in name:  # .weight.: scales of QLoRA
            continue
        if hasattr(x, "quant_state"):  # QLoRA: 4 bits, whole on every rank
            from peft.utils.integrations import dequantize_bnb_weight

            x = dequantize_bnb_weight(x).to(dtype)
        if base and end == "weight":
            x = merged_weight(lm.get_submodule(layer), x).to(dtype)
        elif isinstance(x, DTensor):
            x = x.to(dtype).full_tensor()  # a shard is cast before it travels
        yield from revert_weight_conversion(lm, {name.replace(".base_layer", ""): x}).items()


def merged_weight(lora, weight):
    """The weight of a layer with its adapters added, W + (alpha / r) B A, in float32."""
    a, b = (getattr(lora, part)["default"].weight.full_tensor().float() for part in ("lora_A", "lora_B"))
    if hasattr(lora, "lora_E"):  # AdaLoRA
        a = a * lora.lora_E.full_tensor()[:, None]
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return weight.float().addmm(b, a, alpha=lora.scaling["default"])  # eq: lora.weights


def learning_rate(args, step, total_steps):
    """The learning rate of `step` (from 1): a function of the step alone, so resuming needs no state."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    done = (step - 1 - args.warmup_steps) / max(1, total_steps - args.warmup_steps)
    decay = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return args.lr * decay[args.lr_schedule]


# endregion
# region checkpoints
TRAINED = dcp_state.StateDictOptions(ignore_frozen_params=True, strict=False)


def checkpointed(models, optimizers):
    """What dcp/ holds: the optimizers' state and what they train, with LoRA the adapters alone.

    models: {directory in the checkpoint: model}.
    """
    module = nn.ModuleDict(models)
    model, optim = dcp_state.get_state_dict(module, optimizers, options=TRAINED)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}  # tied weights once
    model = {name: x for name, x in model.items() if name in trained or ".lora_" in name}
    return dict(model=model, optimizer=optim)


def load_checkpoint(path, models, optimizers):
    """Load a checkpoint at any world size -> the trainer's state; path None: the state of step 0."""
    if path is None:
        return dict(step=0, origin="")
    content = checkpointed(models, optimizers)
    try:
        state = json.loads((path / "trainer_state.json").read_text())
        dcp.load(content, checkpoint_id=path / "dcp")
    except (dcp.CheckpointException, OSError, ValueError) as error:
        problem = f"is damaged, or of another model ({in_one_line(error)})"
        fail(f"{path} {problem}: point {path.parent / 'latest'} at an earlier step, or remove it")
    states = dict(model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    dcp_state.set_state_dict(nn.ModuleDict(models), optimizers, **states, options=TRAINED)
    return state | dict(origin=f"\nresumed from {path}")


def save_checkpoint(args, step, models, optimizers, tokenizer, **state):
    """Write checkpoints/step_N, then point `latest` at it: a kill at any moment leaves the last good one."""
    root, rank0, problem = Path(args.output_dir) / "checkpoints", dist.get_rank() == 0, [None]
    path, link, content = root / f"step_{step:06d}", root / ".latest", checkpointed(models, optimizers)
    weights = {name: {} for name in models}
    for name, lm in models.items():
        for key, x in whole_weights(lm, lm.config.dtype):
            if rank0:  # it also held the whole model when it was loaded
                weights[name][key] = x.to("cpu", copy=True, memory_format=torch.contiguous_format)
    try:
        if rank0:
            shutil.rmtree(path, ignore_errors=True)  # left by an earlier attempt
        dist.barrier()
        dcp.save(content, checkpoint_id=path / "dcp")  # all ranks fail, or none
        if rank0:
            for name, lm in models.items():
                write_hf(path / name, lm, weights[name])
            tokenizer.save_pretrained(path / "hf")
            copy_processor(models["hf"], args.model, path / "hf")
            state |= dict(step=step, digests=digests(args))
            # the last file: a directory without it is unfinished
            (path / "trainer_state.json").write_text(json.dumps(state, default=str))
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            link.replace(root / "latest")
            done = sorted(old for old in root.glob("step_*") if old <= path)
            for old in done[: -args.keep_checkpoints] if args.keep_checkpoints else ():
                shutil.rmtree(old)
    except (dcp.CheckpointException, OSError, safetensors.SafetensorError) as error:
        problem = [in_one_line(error)]
    dist.broadcast_object_list(problem)
    if problem[0]:
        free = f"{shutil.disk_usage(root.parent).free / 2**30:.1f} GiB are free"
        fail(f"{path} cannot be written: {problem[0]}; {free}")


def write_hf(directory, lm, weights):
    """Whole weights and their configuration as a Hugging Face directory."""
    lm.config.architectures = [type(lm).__name__]  # the config of a new critic names a causal LM
    lm.config.save_pretrained(directory)
    if lm.can_generate():
        lm.generation_config.to_json_file(directory / "generation_config.json")  # as it was read
    save_torch_state_dict(weights, directory)
    for file in directory.glob("*.safetensors"):  # safetensors sets mode 0600
        file.chmod((directory / "config.json").stat().st_mode)


# endregion
# region sequence parallel
class Slices(TokenLogps):
    """TokenLogps of one row, of which each rank of a group computes a slice.

    attention: of transformers, for a slice; it gets the group besides what `piece_attention` gets.
    """

    def __init__(self, lm, shares, group, attention):
        super().__init__(lm, shares)
        self.group, self.sp_size = group, group.size()
        AttentionInterface.register("slices", partial(attention, group=group))
        lm.set_attn_implementation("slices")

    def forward(self, where, target, temperature, **inputs):
        """As TokenLogps, on every rank for the whole row; the gradient is that of this rank's slice."""
        rank, tokens = self.group.rank(), inputs["input_ids"].shape[1]
        width = -(-tokens // self.sp_size)
        for name in ("input_ids", "position_ids"):
            row = nn.functional.pad(inputs[name], (0, width * self.sp_size - tokens))
            inputs[name] = row[:, rank * width :][:, :width]
        # labels were shifted before this cut: a slice's last position predicts the next slice's first token
        mine = where // width == rank
        found = super().forward(where[mine] - rank * width, target[mine], temperature, **inputs)
        own = torch.stack([x.new_zeros(len(where)).masked_scatter(mine, x) for x in found])
        whole = own.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return own + (whole - own.detach())


def sequence_group(sp_size, device):
    """The group of this rank and its neighbours, which share rows."""
    shape = dist.get_world_size() // sp_size, sp_size
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
    return mesh["sequence"].get_group()


def ulysses(module, query, key, value, mask, group, **pieces):
    """Trade a slice of all heads for the whole row of some heads, attend, and trade back (2309.14509)."""
    size, tokens = group.size(), int(pieces["shapes"][:, 0].sum())
    row = []
    for x in (query, key, value):  # [1, H, T / size, D]
        x = x[0].repeat_interleave(size // math.gcd(size, x.shape[1]), 0)  # each rank needs a key/value head
        x = trade(x.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)  # [H / size, T, D]
        row.append(x[None, :, :tokens])
    out, _ = AttentionInterface()["pieces"](module, *row, mask, **pieces)  # [1, T, H / size, D]
    out = nn.functional.pad(out[0], (0, 0, 0, 0, 0, -tokens % size))
    return trade(out.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)[None], None


def trade(x, group):
    """Give block i of the first axis to rank i of the group."""
    ops = dist._functional_collectives
    # CAREFUL: gloo writes into freed memory while several of these are on their way: one after the other
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), None, None, group))


# endregion
RING_ROWS = 128  # positions whose attention scores the ring holds at the same time


def ring(module, query, key, value, mask, group, scaling, seen, shapes, **_):
    """Ring attention (2310.01889): no rank ever holds the keys and values of the whole row."""
    heads = query.shape[1] // key.shape[1]  # of queries to one of keys: they become the rows of one matrix
    rows = query[0].unflatten(0, (-1, heads)).transpose(1, 2).flatten(1, 2)
    spans = seen_spans(seen.cpu(), shapes, key.shape[2] * group.size())
    out = Ring.apply(rows, torch.cat([key[0], value[0]], -1), spans, group, scaling)
    return out.unflatten(1, (-1, heads)).transpose(0, 1).flatten(1, 2)[None], None  # [1, T / size, H, D]


def seen_spans(seen, shapes, tokens):
    """What each token of a row by `one_row` sees [tokens, 3]: start and end of a span, and a third position.

    It sees the span, which is the prompt that its piece follows, or empty; and all from the third position,
    where its piece begins, up to itself. Prompt a b with responses c d and e, in the row a b, e, c d: 0 0 0
    for a and b, 0 2 2 for e, 0 2 3 for c and d.
    """
    pieces, sizes, start, first = [], [], 0, 0
    for queries, keys in shapes.tolist():
        root = seen[first].item()
        pieces.append((root, root + keys - queries, start))
        sizes.append(queries)
        start, first = start + queries, first + keys
    pieces.append((start, start, start))  # padding
    sizes.append(tokens - start)
    return torch.tensor(pieces).repeat_interleave(torch.tensor(sizes), 0)


class Ring(torch.autograd.Function):
    """query [KV, rows, D], kv [KV, T / size, 2 D]: keys next to values -> [KV, rows, D].

    Keys and values travel from rank to rank, and each softmax is put together from its parts on the way.
    """

    @staticmethod
    def pass_on(x, group, hops=1):
        """Begin to send x that far around the ring -> what comes from behind, once its works are done."""
        new, ranks, rank = torch.empty_like(x), group.size(), group.rank()
        send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + hops) % ranks)
        receive = dist.P2POp(dist.irecv, new, group=group, group_peer=(rank - hops) % ranks)
        return new, dist.batch_isend_irecv([send, receive])

    @staticmethod
    def arrived(new, works):
        """What comes from behind, now that it is here."""
        for work in works:
            work.wait()
        return new

    @staticmethod
    def rounds(query, kv, spans, group, scaling):
        """Each slice of keys and values that passes by, this rank's first -> it, and the blocks of scores."""
        width, rank = kv.shape[1], group.rank()
        first = [
            part[:, 0].min().item() // width for part in spans.split(width)
        ]  # slice that each has to see
        hops = max(i - other for i, other in enumerate(first))  # as far as any rank has to see
        for back in range(hops + 1):
            following = Ring.pass_on(kv, group) if back < hops else (kv, ())  # while this rank computes
            yield kv, Ring.blocks(query, kv, spans, scaling, rank * width, (rank - back) * width)
            kv = Ring.arrived(*following)

    @staticmethod
    def blocks(query, kv, spans, scaling, start, other):
        """Of queries from position `start` on, keys from `other` on -> rows, columns and scores."""
        width, heads = kv.shape[1], query.shape[1] // kv.shape[1]
        for a in range(start, start + width, RING_ROWS):
            b = min(a + RING_ROWS, start + width)
            c, d = max(spans[a:b, 0].min().item(), other), min(b, other + width)
            if c >= d:
                continue
            span_start, span_end, piece_start = spans[a:b].to(kv.device)[..., None].unbind(1)
            token, key = (torch.arange(*x, device=kv.device) for x in ((a, b), (c, d)))
            visible = (span_start <= key) & (key < span_end)
            visible |= (piece_start <= key) & (key <= token[:, None])
            rows, columns = slice((a - start) * heads, (b - start) * heads), slice(c - other, d - other)
            scores = (query[:, rows] @ kv[:, columns, : query.shape[-1]].mT).float() * scaling
            yield rows, columns, scores.masked_fill(~visible.repeat_interleave(heads, 0), -math.inf)

    @staticmethod
    def forward(ctx, query, kv, *row):
        size = query.shape[-1]
        lse = torch.full(query.shape[:2], -math.inf, device=query.device)  # log of the sum of e^scores so far
        out = torch.zeros(*lse.shape, kv.shape[-1] - size, device=query.device)
        for other, blocks in Ring.rounds(query, kv, *row):
            for rows, columns, scores in blocks:
                new = torch.logaddexp(lse[:, rows], scores.logsumexp(-1))
                weights = (scores - new[..., None]).exp().to(kv.dtype)
                out[:, rows] *= (lse[:, rows] - new).exp()[..., None]
                out[:, rows] += weights @ other[:, columns, size:]  # eq: sequence.ring
                lse[:, rows] = new
        ctx.save_for_backward(query, kv, out, lse)
        ctx.row = row
        return out.to(query.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        """With p the softmax: d score = p (d out . value - d out . out); d_kv travels with kv, then home."""
        (query, kv, out, lse), (_, group, scaling) = ctx.saved_tensors, ctx.row
        size, inner = query.shape[-1], (d_out * out).sum(-1, keepdim=True)
        d_query, d_kv = (torch.zeros_like(x, dtype=torch.float32) for x in (query, kv))
        for hops, (other, blocks) in enumerate(Ring.rounds(query, kv, *ctx.row)):
            if hops:
                d_kv = Ring.arrived(*Ring.pass_on(d_kv, group))
            for rows, columns, scores in blocks:
                key, value = other[:, columns].tensor_split([size], -1)
                weights = (scores - lse[:, rows, None]).exp()
                d_scores = weights * (d_out[:, rows] @ value.mT - inner[:, rows]) * scaling
                weights, d_scores = weights.to(kv.dtype), d_scores.to(kv.dtype)
                d_query[:, rows] += d_scores @ key
                parts = d_scores.mT @ query[:, rows], weights.mT @ d_out[:, rows]
                d_kv[:, columns] += torch.cat(parts, -1)
        if hops:
            d_kv = Ring.arrived(*Ring.pass_on(d_kv, group, -hops))
        return d_query.to(query.dtype), d_kv.to(kv.dtype), None, None, None


def add_adaptive_adapters(lm, args):
    """AdaLoRA: B diag(E) A, of one and a half times the rank; the least important of all layers get E = 0.

    Buffers hold the importance and the uncertainty of each weight, and which ranks are kept.
    """
    add_adapters(lm, replace(args, lora_rank=-(-3 * args.lora_rank // 2)))
    for layer in [layer for layer in lm.modules() if hasattr(layer, "lora_A")]:
        a, b = layer.lora_A["default"], layer.lora_B["default"]
        nn.init.normal_(a.weight, std=0.02)
        nn.init.normal_(b.weight, std=0.02)
        layer.lora_E = nn.Parameter(a.weight.new_zeros(a.out_features))
        a.register_forward_hook(lambda _, inputs, out, layer=layer: out * layer.lora_E)
        for name, p in adaptive_parts(layer):
            layer.register_buffer(f"{name}_importance", torch.zeros_like(p, dtype=torch.float32))
            layer.register_buffer(f"{name}_uncertainty", torch.zeros_like(p, dtype=torch.float32))
        layer.register_buffer("lora_kept", torch.ones_like(layer.lora_E, dtype=torch.bool))
    return lm


def adaptive_parts(layer):
    """Names and parameters of the adapter of a layer."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return ("lora_E", layer.lora_E), ("lora_A", a), ("lora_B", b)


def orthogonality(layers):
    """How far the rows of A and the columns of B are from orthonormal: the mean over all matrices."""
    gaps = []
    for layer in layers:
        _, (_, a), (_, b) = adaptive_parts(layer)
        a, b = a.full_tensor(), b.full_tensor()
        gaps += [
            a @ a.t() - torch.eye(len(a), device=a.device),
            b.t() @ b - torch.eye(len(a), device=a.device),
        ]
    return sum(map(torch.linalg.matrix_norm, gaps)) / len(gaps)  # eq: lora.orthogonality


@torch.no_grad()
def choose_ranks(layers, args, step, total_steps, finite):
    """After an optimizer step, whose gradient may be not `finite`: choose ranks -> how many are kept."""
    for layer in layers if finite else ():
        for name, p in adaptive_parts(layer):
            mean, spread = (getattr(layer, f"{name}_{kind}") for kind in ("importance", "uncertainty"))
            now = (p * p.grad).abs().full_tensor().float()
            mean.lerp_(now, 0.15)  # eq: lora.importance
            spread.lerp_((now - mean).abs(), 0.15)
    begin, end, budget = total_steps // 10, total_steps // 2, args.lora_rank * len(layers)
    if begin < step <= end:
        score = torch.stack([rank_scores(layer) for layer in layers])
        left = (end - step) / (end - begin)
        number = budget + int((score.numel() - budget) * left**3)  # eq: lora.budget
        kept = torch.zeros_like(score.flatten(), dtype=torch.bool)
        kept[score.flatten().topk(number).indices] = True
        for layer, row in zip(layers, kept.view_as(score)):
            layer.lora_kept.copy_(row)
    with implicit_replication():  # lora_kept is whole on every rank
        for layer in layers:
            layer.lora_E.mul_(layer.lora_kept)
    return sum(layer.lora_kept.sum().item() for layer in layers)


def rank_scores(layer):
    """For each rank, importance times uncertainty of E, and the means of those of its A and B."""
    e, a, b = (
        getattr(layer, f"{name}_importance") * getattr(layer, f"{name}_uncertainty")
        for name, _ in adaptive_parts(layer)
    )
    return e + a.mean(1) + b.mean(0)  # eq: lora.score


def load_policy(args, mesh, device):
    """The model that `micro_batches` calls."""
    if args.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel as replace_classes

        # of transformers' model file; TokenLogps would never call the fused cross-entropy
        replace_classes(AutoConfig.from_pretrained(args.model).model_type, fused_linear_cross_entropy=False)
    wrap = TokenLogps
    if args.sp_size > 1:
        attention = dict(ulysses=ulysses, ring=ring)[args.sp_attention]
        wrap = partial(Slices, group=sequence_group(args.sp_size, device), attention=attention)
    load = load_quantized if args.qlora else load_model
    adapt = add_adaptive_adapters if args.lora_kind == "adalora" else add_adapters
    policy = load(args, mesh, device, wrap, adapt=adapt, share=args.packing)
    policy.entropy = False  # nothing needs it
    return policy


def load_quantized(args, mesh, device, wrap, adapt, share):
    """As load_model, but the frozen weights are in 4 bits (NF4), and whole on every rank."""
    config, attention = read_config(args, share)
    dtype, original_dtype = getattr(torch, args.compute_dtype), config.dtype
    with torch.device("meta"):
        towers = freeze_towers(auto_class(config).from_config(config))
    whole = [f"{name.rpartition('.')[0]}$" for name in towers] + ["lm_head"]
    lm = from_files(
        auto_class(config),
        args.model,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        device_map={"": device},
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=whole if towers else None,
        ),
    )
    for p in adapt(lm.train(), args).parameters():  # adapters are equal on all ranks, by the seed
        if p.requires_grad:
            p.data = p.data.to(getattr(torch, args.param_dtype))
    del lm.config.quantization_config  # hf/ has whole weights
    lm.config.dtype = original_dtype or dtype
    lm.tied, lm.towers = lm.all_tied_weights_keys, freeze_towers(lm)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = wrap(lm, attention == "pieces")
    frozen = {p for p in policy.parameters() if not p.requires_grad}
    precision = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True, ignored_params=frozen)
    return policy


@torch.no_grad()
def own_logps(policy, rows):
    """Log-probs of the responses, [N, T], from the model's own logits, row by row under eager attention."""
    lm, found, device = policy.lm, [], next(policy.parameters()).device
    kernel = lm.config._attn_implementation
    lm.set_attn_implementation("eager")
    policy.unshard()
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]], device=device)
        logits = lm(input_ids=ids, use_cache=False).logits[0].float()
        logits[:, policy.never] = -1e4
        logp = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        found.append(logp[len(row["prompt_ids"]) - 1 :])
    policy.reshard()
    lm.set_attn_implementation(kernel)
    return pad(found)


def check_layout(policy, rows, args):
    """Before the first step: in the layout that trains, short rows have the model's own log-probs."""
    ids = [row["prompt_ids"] + row["response_ids"] for row in (rows[i % len(rows)] for i in range(4))]
    ids = [[x for x in row if x not in policy.never][:32] for row in ids]
    short = [dict(prompt_ids=row[:1], response_ids=row[1:]) for row in ids]
    with torch.no_grad():
        logp_nt, _ = token_logps(policy, short, args, 1.0)
    gap = (logp_nt - own_logps(policy, short)).abs().sum() / sum(len(row) - 1 for row in ids)
    gap, kernel = all_reduce([gap / dist.get_world_size()])[0], args.attn_implementation
    layout, cause = "padded", f"{kernel} leaves out a soft cap or sinks: try --attn_implementation eager"
    if kernel == "eager":
        cause = "it does something to its logits that TokenLogps leaves out"
    if args.sp_size > 1:
        layout, cause = "sequence-parallel", "slices of a row miss something of one another: try --sp_size 1"
    elif policy.shares:
        layout, cause = "packed", f"texts in one row see one another: try --no-packing; or {cause}"
    limit, _ = rounding_limit(policy, args)
    if not gap < limit:  # `not <` also fails for NaN
        unlike = f"log-probs of {layout} rows under {kernel} are not its own, off by {gap:.3g} on average"
        fail(f"{args.model} ({policy.lm.config.model_type}): {unlike}, over {limit:.3g}; likely {cause}")


def check_args(args):
    """Stop on combinations of flags that cannot work, before anything is loaded."""
    world, copies, sp_size = int(os.environ.get("WORLD_SIZE", 1)), args.hsdp_replicas, args.sp_size
    kernel, budget = args.attn_implementation, args.max_tokens_per_microbatch
    short = f"--max_tokens_per_microbatch {budget} times --sp_size {sp_size}"
    apart = not args.packing or kernel != "sdpa"
    no_adapters = not args.lora_rank and (args.qlora or args.lora_kind != "lora")
    no_liger = not torch.cuda.is_available() or not find_spec("liger_kernel")
    flash_float = kernel == "flash_attention_2" and args.compute_dtype == "float32"
    problems = {
        f"{world} ranks are not a multiple of --hsdp_replicas {copies}": world % copies,
        f"{world} ranks are not a multiple of --sp_size {sp_size}": world % sp_size,
        f"--sp_size {sp_size} needs --packing, and --attn_implementation sdpa": sp_size > 1 and apart,
        f"{short} is less than --max_length {args.max_length}": budget * sp_size < args.max_length,
        f"--max_length {args.max_length} is less than two tokens": args.max_length < 2,
        "--text_key: pass no --messages_key and no --env": args.text_key and (args.messages_key or args.env),
        "--qlora and --lora_kind adalora need --lora_rank": no_adapters,
        "--qlora needs bitsandbytes: pip install bitsandbytes": args.qlora and not find_spec("bitsandbytes"),
        "--attn_implementation flash_attention_2 needs --compute_dtype bfloat16": flash_float,
        "--liger needs a GPU and Liger's kernels: pip install liger-kernel": args.liger and no_liger,
    }
    refuse(problems)


def check_model(config, args):
    """Stop where the model cannot be trained with these arguments, by a line, a ValueError or ImportError."""
    with torch.device("meta"):  # which raises for a kernel that the model does not run on
        lm = auto_class(config).from_config(config, attn_implementation=args.attn_implementation)
        TokenLogps(add_adapters(lm, args))  # TokenLogps refuses a bias of the output layer
    name, text = f"{args.model} ({config.model_type})", config.get_text_config()
    heads, sp_size = getattr(text, "num_attention_heads", 0), args.sp_size
    special, known = " and ".join(special_layers(config)), {config.model_type}
    if args.liger:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
    text_only = args.text_key or args.messages_key or args.lora_rank or args.liger
    text_only = text_only or args.truncation == "left" or sp_size > 1
    flags = "--text_key, --messages_key, --lora_rank, --liger, --truncation left and --sp_size"
    undivided = f"{name} has {heads} attention heads, which --sp_size {sp_size} does not divide"
    problems = {
        f"--qlora rounds whole weights, and {name} has rounded ones": args.qlora and dequantised(config),
        f"{name} takes images, which {flags} do not": takes_images(args) and text_only,
        f"{name} has {special}, which --sp_size {sp_size} does not implement": sp_size > 1 and special,
        f"{undivided}: take --sp_attention ring": args.sp_attention == "ulysses" and heads % sp_size,
        f"{name} has no kernels for --liger": config.model_type not in known,
    }
    refuse(problems)


def load_data(args):
    """-> tokenizer, rows of training and validation, the tokens that end responses, and a line about them."""
    try:
        check_model(AutoConfig.from_pretrained(args.model), args)
        tokenizer = load_processor(args.model, args.tokenizer, takes_images(args))
        tools = load_env(args.env).tools if args.env else None
        train_rows, ends, *counts = load_examples(args.train_files, args, tokenizer, tools)
        val_rows, _, *val_counts = load_examples(args.val_files, args, tokenizer, tools)
    except (ValueError, OSError, ImportError) as error:
        fail(" ".join(str(error).split()))
    if len(train_rows) < args.train_batch_size:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} training rows")
    truncated, dropped = map(sum, zip(counts, val_counts))
    summary = f"{len(train_rows)} training and {len(val_rows)} validation rows ({truncated} truncated"
    return tokenizer, train_rows, val_rows, ends, f"{summary}, {dropped} dropped: no answer)"


def load_examples(paths, args, tokenizer, tools=None):
    """-> rows as `split` makes them, the tokens that end responses, numbers of cut and of dropped rows."""
    if args.text_key:
        return load_texts(paths, args, tokenizer)
    columns = [args.messages_key] if args.messages_key else [args.prompt_key, args.response_key]
    read = encode_messages if args.messages_key else encode
    keep = slice(args.max_length) if args.truncation == "right" else slice(-args.max_length, None)

    def example(record, i):
        where = f"{', '.join(paths)}: row {i}"
        try:
            if says_nothing(record[columns[-1]]):
                return None
            shown = {} if args.messages_key else dict(images=record["images"])
            ids, trained = read(*(record[column] for column in columns), tokenizer, tools, **shown)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{where}: {', '.join(columns)}: {error!r}") from None
        truncated = len(ids) > args.max_length
        if truncated and args.truncation == "error":
            problem = f"{where} has {len(ids)} tokens, over --max_length {args.max_length}"
            raise ValueError(f"{problem}; raise it or pass --truncation left or right")
        ends = {x for x, on, more in zip(ids, trained, [*trained[1:], False]) if on and not more}
        row = split(ids[keep], trained[keep])
        return row and dict(row, ends=[*ends], truncated=truncated, images=record["images"])

    fields = dict(prompt_ids=IDS, response_ids=IDS, trained=BOOLS, ends=IDS, truncated=BOOL)
    if hasattr(tokenizer, "image_processor"):
        fields["images"] = IMAGES
    about, code = (args.max_length, args.truncation, tools), (load_examples, read, split)
    rows, dropped = prepare(paths, tokenizer, columns, (), fields, partial(map, example), about, code)
    if paths and not rows:
        problem = f"no row has an answer with a token within --max_length {args.max_length}"
        raise ValueError(f"{', '.join(paths)}: {problem} (columns {', '.join(columns)})")
    ends = {*pc.list_flatten(rows.column("ends")).unique().to_pylist()}
    return rows, ends, pc.sum(rows.column("truncated"), min_count=0).as_py(), dropped


class Texts:
    """Texts one after the other, cut into rows of `length` tokens, the last shorter; ids stay on disk.

    Two texts of 3 and 4 tokens, EOS included, length 5: rows of 5 and 2 tokens. One alone teaches nothing.
    """

    def __init__(self, rows, length):
        self.ids, self.length = pc.list_flatten(rows.column("ids")), length
        self.lengths = [min(length, len(self.ids) - i) for i in range(0, len(self.ids) - 1, length)]
        self.tokens_per_byte = len(self.ids) / max(1, pc.sum(rows.column("bytes"), min_count=0).as_py())

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        ids = self.ids[i * self.length :][: self.lengths[i]].to_pylist()
        return split(ids, [True] * len(ids))


def load_texts(paths, args, tokenizer):
    """As `load_examples`: Texts, with EOS after each."""

    def example(record, i):
        text = record[args.text_key]
        if not isinstance(text, str):
            raise ValueError(f"{', '.join(paths)}: row {i}: {args.text_key} is no text: {text!r:.60}")
        ids = tokenizer(text, verbose=False)["input_ids"]  # with BOS, if it has one
        ids += [tokenizer.eos_token_id] * (ids[-1:] != [tokenizer.eos_token_id])
        return dict(ids=ids, bytes=len(text.encode())) if text else None

    fields, encode = dict(ids=IDS, bytes=INT), partial(map, example)
    rows, dropped = prepare(paths, tokenizer, [args.text_key], (), fields, encode, (), (load_texts,))
    return Texts(rows, args.max_length), {tokenizer.eos_token_id}, 0, dropped


def lengths(rows):
    """Tokens of each row; for rows on disk without reading them."""
    if isinstance(rows, Texts):
        return rows.lengths
    if isinstance(rows, list):
        return [len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows]
    return pc.add(*(pc.list_value_length(rows.column(x)) for x in ("prompt_ids", "response_ids"))).to_pylist()


def pack(lengths, budget, one_row):
    """Split rows into micro-batches: those in one row by bin-packing, into as few as the budget allows.

    Every rank gets the same number. Lengths 6 5 5 4 in a budget of 10 -> [0, 3] and [1, 2].
    """
    if not one_row:
        return split_micro_batches(lengths, budget, one_row)
    number = max(1, -(-sum(lengths) // budget))
    while max(sum(lengths[i] for i in part) for part in balance(lengths, number)) > budget:
        number += 1
    [number] = all_reduce([number], dist.ReduceOp.MAX)  # see split_micro_batches; more are never heavier
    return balance(lengths, int(number))


if __name__ == "__main__":
    main(Args(**flags))
