"""SFT: minimise -sum(log p(response token | what comes before it)) / (response tokens of the optimizer step).

Where this differs from the trainers that are in use:
1. The denominator counts the tokens of all ranks and micro-batches, so neither split changes the gradient.
2. Every response token is trained, EOS included, and nothing else (verl: the last prompt token, and no EOS).
3. Rows are balanced over the ranks by tokens, not by their number.
LoRA (arXiv 2106.09685) by --lora_rank, AdaLoRA (2303.10512) by --lora_kind, QLoRA (2305.14314) by --qlora,
long rows over several ranks (Ulysses, 2309.14509; ring attention, 2310.01889) by --sp_size.

CPU:        python algos/sft.py --model models/tiny --train_files data/train.parquet --output_dir runs/sft
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/sft.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 algos/sft.py
Docs: docs/sft.md
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.arguments import parse

# Shapes: N rows, T response tokens, V vocabulary. A suffix names the axes (logp_nt). T is aligned with the
# response: column t speaks of response token t, whatever predicted it.


@dataclass(kw_only=True)
class Args:
    # ---- run
    output_dir: str  # directory of the run: arguments, metrics, log, checkpoints
    resume: str = "auto"  # auto: output_dir's latest checkpoint, if any; never: refuse a used one; or a path
    seed: int = 1  # of the data order and of the adapters' first weights
    total_epochs: int = 1  # passes over the training data
    total_steps: int | None = None  # optimizer steps in all; None: total_epochs
    save_freq: int = 50  # steps between checkpoints; 0: only at the end
    test_freq: int = 10  # steps between validations; 0: only before and after training
    val_before_train: bool = True  # validate before the first step
    keep_checkpoints: int = 2  # newest checkpoints that are kept; 0: all
    save_hf: bool = True  # also write each checkpoint's weights as a Hugging Face directory (hf/)
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # where metrics go beside metrics.jsonl
    wandb_project: str | None = None  # with --tracker wandb: its project; None: its default
    timeout_s: float = 3600.0  # seconds that a rank waits for the others before the run ends
    # ---- data
    train_files: tuple[str, ...]  # parquet files of training rows
    val_files: tuple[str, ...] = ()  # parquet files of validation rows; none: no validation
    prompt_key: str = "prompt"  # column of the prompt: chat messages, or a string (one user message)
    response_key: str = "extra_info.answer"  # column of the response, a string; dots reach into structs
    messages_key: str | None = None  # column of conversations, whose assistant turns are trained, instead
    env: str | None = None  # environment whose tools the chat template shows, FILE.py:NAME; None: no tools
    max_length: int = 1024  # limit of prompt and response together, in tokens, EOS included
    truncation: Literal["error", "left", "right"] = "error"  # rows over max_length: stop, or cut there
    packing: bool = bool(find_spec("flash_attn"))  # rows in one without padding; sdpa: by a dense mask
    # ---- model
    model: str  # Hugging Face directory or hub name of the model to train
    tokenizer: str | None = None  # Hugging Face directory or hub name; None: the model's
    attn_implementation: str | None = None  # None: flash_attention_2 where it is installed, else sdpa
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters and optimizer state
    # of forward and backward; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    sp_size: int = 1  # ranks that share the tokens of a row; needs packing
    sp_attention: Literal["ulysses", "gather", "ring"] = "ulysses"  # how its slices see one another
    gradient_checkpointing: bool = True  # recompute activations in the backward pass
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    liger: bool = False  # Liger's Triton kernels for norm, rotary embedding and MLP; needs a GPU
    lora_rank: int = 0  # rank of the LoRA adapters, which are then all that is trained; 0: the model itself
    lora_kind: Literal["lora", "adalora"] = "lora"  # adalora: lora_rank is the mean of all layers' ranks
    lora_alpha: float = 16  # the adapters' output is scaled by lora_alpha / lora_rank
    lora_target_modules: tuple[str, ...] = ("all-linear",)  # names of layers; all-linear: all but the output
    qlora: bool = False  # frozen weights in 4 bits (bitsandbytes), whole on every rank; needs lora_rank
    merge_lora: bool = False  # hf/ is the model with the adapters in its weights; else only the adapters
    # ---- optimizer
    train_batch_size: int = 64  # rows of a step, over all ranks
    lr: float = 1e-5  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # decay to 0 at the last step
    warmup_steps: int = 10  # steps of linear warm-up
    decay_steps: int = 0  # last steps, which alone decay (warm-up-stable-decay); 0: all after warm-up
    weight_decay: float = 0.01  # AdamW's decoupled weight decay
    grad_clip: float = 1.0  # largest gradient norm

    def __post_init__(self):
        flash = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
        self.attn_implementation = self.attn_implementation or flash
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import jinja2
import numpy as np
import psutil
import pyarrow.compute as pc
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import is_flash_attn_2_available, logging

from data_prep.cache import BOOL, BOOLS, IDS, IMAGES, prepare
from data_prep.images import (
    auto_class,
    encode_prompt,
    load_processor,
    never_sampled,
    show_images,
    takes_images,
)
from data_prep.tracking import Logger, check_tracker, leave, matmul_speed, ranks_on
from data_prep.turns import turns
from envs import load_env


# ---- The mathematics ---------------------------------------------------------------------------------------
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


# ---- The step ----------------------------------------------------------------------------------------------
def encode(prompt, response, tokenizer, tools=None, images=()):
    """-> ids of a prompt (messages, or a string: the user's) and a response with EOS; which are trained."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    how = dict(tools=tools, add_generation_prompt=True, return_dict=False)
    if hasattr(tokenizer, "image_processor"):
        prompt_ids = encode_prompt(dict(prompt=messages, images=images), tokenizer, tools)["prompt_ids"]
        tokenizer = tokenizer.tokenizer
    else:
        prompt_ids = tokenizer.apply_chat_template(messages, **how)
    response_ids = tokenizer.encode(response, add_special_tokens=False) + [tokenizer.eos_token_id]
    # CAREFUL: the loss goes by position; by value, EOS would be lost where it is also the pad
    return prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids)


def encode_messages(messages, tokenizer, tools=None):
    """-> ids of a conversation; which are trained: the assistant's turns, up to the token that ends each."""
    messages = [{k: v for k, v in m.items() if v is not None} for m in messages]  # parquet fills up with null
    text, found = turns(messages, tokenizer, tools)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = np.array(encoded["input_ids"]), np.array([start for start, _ in encoded["offset_mapping"]])
    special = lambda: [i for i, x in tokenizer.added_tokens_decoder.items() if x.special]
    trained = np.zeros(len(ids), dtype=bool)
    for i, begin, end in found:
        # a token that begins before the turn is context, even if it ends in it
        turn = np.flatnonzero((begin <= starts) & (starts < end))
        ends = turn[ids[turn] == tokenizer.eos_token_id]
        ends = ends if len(ends) else turn[np.isin(ids[turn], special())]
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
    """This rank's share of the rows, which are equal on all ranks -> logp_nt, trained_nt of each micro-batch.

    An empty micro-batch runs a dummy row that is not trained: its sum is a zero that still has a gradient.
    """
    group, groups = dist.get_rank() // args.sp_size, dist.get_world_size() // args.sp_size
    mine = [rows[i] for i in balance(lengths(rows), groups)[group]]
    dummy = dict(prompt_ids=[0], response_ids=[0], trained=[False])
    budget, layout = args.max_tokens_per_microbatch * args.sp_size, packed if args.packing else padded
    split_rows = pack if args.packing else partial(split_micro_batches, one_row=False)
    parts = split_rows(lengths(mine), budget)
    for number, part in enumerate(parts, 1):
        if not args.qlora:  # over the replicas of HSDP
            policy.set_requires_all_reduce(number == len(parts))
        batch = [mine[i] for i in part] or [dummy]
        texts = [(row["prompt_ids"], row["response_ids"], row.get("images", ())) for row in batch]
        if takes_images(policy.lm.config):
            layout, texts = show_images(padded, texts, load_processor(args.model, args.tokenizer))
        prompts, responses, _ = zip(*texts)
        logp_nt, _ = token_logps(policy, prompts, responses, 1.0, layout)
        yield logp_nt[: len(batch)], pad([row["trained"] for row in batch]).to(logp_nt.device)


def update(policy, optimizer, rows, args, adaptive=None, step=0):
    """One optimizer step -> metrics. Every rank knows all rows: the denominator needs no communication.

    adaptive: AdaLoRA's adapters, whose ranks are chosen anew after step number `step`.
    """
    loss, tokens = 0.0, sum(sum(row["trained"]) for row in rows)
    for logp_nt, trained_nt in micro_batches(policy, rows, args):
        part = sft_loss(logp_nt, trained_nt, tokens)
        # `tokens` counts those of all ranks, but gradients are averaged over the ranks
        (part * dist.get_world_size()).backward()
        loss += part.item()
    if adaptive:  # the same on every rank, and so is the mean over them
        (0.1 * adaptive.orthogonality()).backward()
    norm = clip_gradients(optimizer, args.grad_clip)
    if finite := math.isfinite(norm):  # the norm of all ranks: they step or skip together
        optimizer.step()
    ranks = {"train/lora_ranks": adaptive.allocate(step, finite)} if adaptive else {}
    optimizer.zero_grad()
    [loss] = all_reduce([loss / args.sp_size])  # ranks that share a row all have its loss
    return ranks | {"train/loss": loss, "train/grad_norm": norm, "train/skipped_updates": not finite}


@torch.no_grad()
def evaluate(policy, rows, args):
    """The loss over all rows, each token weighing the same."""
    loss, tokens = 0.0, 0
    for logp_nt, trained_nt in micro_batches(policy, rows, args):
        loss += sft_loss(logp_nt, trained_nt, 1).item()
        tokens += trained_nt.sum().item()
    loss, tokens = all_reduce([loss, tokens])
    return loss / tokens


def main(args):
    # ---- arguments and data: nothing slow before they are known to be good
    check_args(args)
    checkpoints = open_run(args)
    tokenizer, train_rows, val_rows, ends, about = load_data(args)
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch
    if args.lora_kind == "adalora" and total_steps < 10:  # ranks are chosen from the first tenth to the half
        fail(f"--lora_kind adalora: {total_steps} steps are too few to choose ranks in, it takes 10")

    # ---- model
    device, mesh = setup_distributed(args.hsdp_replicas, args.timeout_s)
    policy, trained = load_policy(args, mesh, device, total_steps)
    adaptive = trained if args.lora_kind == "adalora" else None
    stops = policy.lm.generation_config  # the tokens that samplers of the saved model stop at
    stops.eos_token_id = sorted({*ends, *np.ravel(stops.eos_token_id).tolist()} - {None})
    decay = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=args.lr, fused=True, **decay)
    state = load_checkpoint(checkpoints, trained, optimizer)
    check_layout(policy, train_rows, args)
    log = Logger(args, state["step"], total_steps)
    log.say(f"{about}\n{total_steps} steps, {ranks_on(device)}{state['origin']}")
    stop = []  # by SIGTERM: the step in progress is the last
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))

    if val_rows and args.val_before_train and not state["step"]:
        log.log({"val/loss": evaluate(policy, val_rows, args), "training/global_step": 0}, 0)

    saving = {}  # seconds of the last checkpoint: reported by the step after it
    for step in range(state["step"] + 1, total_steps + 1):
        timing, saving, begin = saving, {}, time.perf_counter()
        faulthandler.dump_traceback_later(args.timeout_s + dist.get_node_local_rank() / 4)  # stacks, in turn
        epoch, number = divmod(step - 1, steps_per_epoch)
        order = np.random.default_rng((args.seed, epoch)).permutation(len(train_rows))
        rows = [train_rows[i] for i in order[number * args.train_batch_size :][: args.train_batch_size]]

        # ---- update
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(args, step, total_steps)
        with timed(timing, "update_actor"):
            metrics = update(policy, optimizer, rows, args, adaptive, step)

        # ---- validation
        last = step == total_steps or all_reduce([bool(stop)], dist.ReduceOp.MAX) == [1]
        if val_rows and (last or (args.test_freq and step % args.test_freq == 0)):
            with timed(timing, "testing"):
                metrics["val/loss"] = evaluate(policy, val_rows, args)
            log.say(f"step {step}: validation loss {metrics['val/loss']:.4f}")

        # ---- metrics
        timing["step"], tokens = time.perf_counter() - begin, sum(lengths(rows))
        # FLOPs of a rank: 6 a weight and token, 4 if frozen, and causal attention's 6 L H T^2 a row
        weights, config = sum(p.numel() for p in policy.parameters()), policy.lm.config.get_text_config()
        width, ranks = config.num_hidden_layers * config.hidden_size, dist.get_world_size()
        flops = sum((4 if args.lora_rank else 6) * n * (weights + width * n) for n in lengths(rows)) / ranks
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        metrics |= {
            "train/lr": scheduled_rate(args, step, total_steps),
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": timing["step"],
            "perf/throughput": tokens / timing["step"] / ranks,
            "perf/mfu/actor": flops / timing["update_actor"] / matmul_speed(args.compute_dtype, device),
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30,
            "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
            "training/global_step": step,
            "training/epoch": epoch,
        }
        log.log(metrics, step, loss="train/loss", tok_s="perf/throughput")

        # ---- checkpoint, after the metrics: a kill in between loses neither
        if last or (args.save_freq and step % args.save_freq == 0):
            with timed(saving, "save_checkpoint"):
                save_checkpoint(args, step, trained, optimizer, tokenizer)
        if last:
            break
    log.close(args)
    leave()


# --------------------------------------------------------------------------------------------------
# The system
# --------------------------------------------------------------------------------------------------
# region system
LOGIT_CHUNK = 1024  # response positions whose logits exist at a time: LOGIT_CHUNK * V, not N * T * V
NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}  # mean |log-prob difference| that rounding alone explains


class LogProbs(torch.autograd.Function):
    """hidden [L, H], weight [V, H], target [L] -> log-prob [L] of the targets and entropy [L], in float32.

    A chunk of logits at a time, in two buffers both ways: malloc's gaps would not fit those of a checkpoint.
    """

    @staticmethod
    def logits(hidden, weight, temperature, softcap, never, out):
        """Put the logits of a chunk into `out`; gemma-2 and -4 bound them by softcap * tanh(x / softcap)."""
        if weight.dtype is out.dtype:
            torch.mm(hidden, weight.t(), out=out)  # no new memory
        elif weight.is_cuda:
            torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        else:
            out.copy_(hidden @ weight.t())
        if softcap:
            out.div_(softcap).tanh_().mul_(softcap)
        for token in never:  # finite: 0 times it is 0
            out[:, token] = -1e4
        # CAREFUL: the temperature belongs here too, or the ratio compares two different distributions
        return out if temperature == 1 else out.div_(temperature)

    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, softcap=None, with_entropy=True, never=()):
        ctx.chunks = [slice(i, i + LOGIT_CHUNK) for i in range(0, len(target) or 1, LOGIT_CHUNK)]
        logp, entropy = (torch.zeros(len(target), device=target.device) for _ in range(2))
        buffers = torch.empty(2, min(len(target), LOGIT_CHUNK), len(weight), device=target.device)
        for part in ctx.chunks:
            p_lv, logp_lv = buffers[:, : len(target[part])]
            logits_lv = LogProbs.logits(hidden[part], weight, temperature, softcap, never, p_lv)
            torch.log_softmax(logits_lv, -1, out=logp_lv)
            logp[part] = logp_lv.gather(-1, target[part, None])[:, 0]
            if with_entropy and ctx.needs_input_grad[0]:  # without a backward nobody looks at it
                entropy[part] = -torch.exp(logp_lv, out=p_lv).mul_(logp_lv).sum(-1)
        ctx.save_for_backward(hidden, weight, target, entropy, buffers)
        ctx.temperature, ctx.softcap, ctx.with_entropy, ctx.never = temperature, softcap, with_entropy, never
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logp, d_entropy):
        """With p the softmax: d log p(target) = onehot(target) - p, d entropy = -p (log p + entropy)."""
        hidden, weight, target, entropy, buffers = ctx.saved_tensors
        d_logp, d_entropy = (x[:, None] / ctx.temperature for x in (d_logp, d_entropy))
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for i, part in enumerate(reversed(ctx.chunks)):
            p_lv, logp_lv = buffers[:, : len(target[part])]
            how = ctx.temperature, ctx.softcap, ctx.never, p_lv
            logits = partial(LogProbs.logits, hidden[part], weight, *how)
            if i:  # the last chunk is still there
                torch.log_softmax(logits(), -1, out=logp_lv)
            torch.exp(logp_lv, out=p_lv)
            d_lv = -d_logp[part]
            if ctx.with_entropy:
                d_lv = logp_lv.add_(entropy[part, None]).mul_(-d_entropy[part]).add_(d_lv)
            d_lv = torch.mul(p_lv, d_lv, out=logp_lv).scatter_add_(-1, target[part, None], d_logp[part])
            if ctx.softcap:  # d tanh = 1 - tanh^2
                tanh_lv = logits().mul_(ctx.temperature / ctx.softcap)
                d_lv = d_lv.addcmul_(d_lv, tanh_lv.square_(), value=-1)
            d_lv = d_lv.to(weight.dtype)
            torch.mm(d_lv, weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight.addmm_(d_lv.t(), hidden[part])
        return d_hidden, d_weight, *[None] * 5


class TokenLogps(nn.Module):
    """A causal LM whose forward returns log-probs of given tokens: one root module, one forward, for FSDP."""

    def __init__(self, lm: nn.Module, entropy=True):
        super().__init__()
        self.lm, self.entropy = lm, entropy  # entropy: whether a loss needs it
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            fail(f"{lm.config.name_or_path}: its output layer has a bias, which LogProbs leaves out")
        # granite and minicpm3 divide their logits, cohere and falcon-h1 multiply them, gemma-2 bounds them
        config, self.never = lm.config.get_text_config(), never_sampled(lm.config)
        known = lambda *names: next((x for x in (getattr(config, name, None) for name in names) if x), 1)
        self.scale = known("logit_scale", "lm_head_multiplier") / known("logits_scaling")
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def forward(self, where, target, temperature, **inputs):
        """where [L]: flat positions whose logits predict target [L] -> log-prob [L], entropy [L], float32."""
        hidden = self.lm.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]
        weight = self.lm.get_output_embeddings().weight
        how = temperature / self.scale, self.softcap, self.entropy, self.never
        return LogProbs.apply(hidden, weight, target, *how)


def recurrent(config):
    """Whether a layer passes a state on along the row, over the borders of what is packed or shared there."""
    model = AutoModelForCausalLM._model_mapping.get(type(config), None)
    stateful, kinds = getattr(model, "_is_stateful", False), getattr(config, "layer_types", None) or []
    return stateful or not {"conv", "linear_attention", "hybrid", "hybrid_sliding"}.isdisjoint(kinds)


def pad(rows):
    """Rows of numbers as a tensor, [rows, longest], with zeros behind the shorter ones."""
    rows = [torch.as_tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 1)


def join(*parts):
    """Ids of several lists or arrays as one tensor."""
    return torch.cat([torch.as_tensor(part) for part in parts]).long()


def padded(prompts, responses):
    """A layout for `token_logps`: a row each, padded on the right, which causal attention never looks at.

    Returns what the model takes, and for each response the flat positions that predict it.
    """
    input_ids = pad(map(join, prompts, responses))
    # labels are shifted against logits in a layout and nowhere else: position p - 1 predicts token p
    before_n = [row * input_ids.shape[1] + len(p) - 1 for row, p in enumerate(prompts)]
    return dict(input_ids=input_ids), [torch.arange(n, n + len(r)) for n, r in zip(before_n, responses)]


def packed(prompts, responses):
    """One row without padding, for attention kernels that tell sequences apart by position ids."""
    rows = [*map(join, prompts, responses)]
    position_ids = torch.cat([torch.arange(len(row)) for row in rows])[None]
    ends, longest = [*accumulate(map(len, rows))], max(map(len, rows))
    where = [torch.arange(end - len(r) - 1, end - 1) for end, r in zip(ends, responses)]
    # flash attention would look for the borders in each layer, and wait for the GPU
    borders = torch.tensor([0, *ends], dtype=torch.int32)
    sizes = dict(cu_seq_lens_q=borders, cu_seq_lens_k=borders, max_length_q=longest, max_length_k=longest)
    return dict(input_ids=torch.cat(rows)[None], position_ids=position_ids, **sizes), where


def token_logps(policy, prompts, responses, temperature, layout):
    """Log-probs of the response tokens, and the entropy of the distributions that they come from.

    prompts, responses: N lists of token ids, none empty; layout: how they become rows.
    Returns logp_nt, entropy_nt [N, T], 0 after the end of a response; T is the longest response.
    """
    device = next(policy.parameters()).device
    inputs, where = layout(prompts, responses)
    inputs = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
    logp, entropy = policy(torch.cat(where).to(device), join(*responses).to(device), temperature, **inputs)
    mask_nt = response_mask([len(r) for r in responses]).to(device)
    zero_nt = logp.new_zeros(mask_nt.shape)
    return zero_nt.masked_scatter(mask_nt, logp), zero_nt.masked_scatter(mask_nt, entropy)


def response_mask(lengths):
    """[N, T] bool, True on response tokens (EOS included)."""
    return torch.arange(max(lengths, default=1)) < torch.as_tensor(lengths)[:, None]


def setup_distributed(hsdp_replicas, timeout_s=3600.0):
    """Join the processes of torchrun, or run alone -> the device of this rank and the FSDP mesh."""
    if "RANK" not in os.environ:  # plain `python`: a world of one
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif sys.platform == "linux":  # keep freed memory: getting it anew is 30 % of an update
        ctypes.CDLL("libc.so.6").mallopt(-4, 0)  # M_MMAP_MAX
        ctypes.CDLL("libc.so.6").mallopt(-1, -1)  # M_TRIM_THRESHOLD
    store, rank, world = next(dist.rendezvous("env://"))
    # CAREFUL: torchrun keeps its store over restarts, with the addresses of dead ranks (pytorch issue 135712)
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    elif os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0" and not os.environ.get(NEW_STORE):  # counted per node
        fail(f"--max-restarts on several nodes: set {NEW_STORE}=1 for torchrun on each of them")
    backends, c10d = "cpu:gloo,cuda:nccl" if cuda else "gloo", dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=timeout_s)  # of subgroups
    dist.init_process_group(backends, None, timedelta(seconds=timeout_s), world, rank, store)
    sys.excepthook = partial(report_failure, store, rank, world)
    shape = hsdp_replicas, world // hsdp_replicas
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return device, mesh if hsdp_replicas > 1 else mesh["shard"]


def report_failure(store, rank, world, *error):
    """After the traceback: the ranks that answer no more (they hang, or are dead), or who failed first."""
    sys.__excepthook__(*error)
    store.set(f"failed/{rank}", f"{time.time()}")
    time.sleep(3)  # the time-outs of the others
    failed = {r: store.get(f"failed/{r}") for r in range(world) if store.check([f"failed/{r}"])}
    silent = ", ".join(f"rank {r}" for r in range(world) if r not in failed)
    what = f"no answer from {silent}" if silent else f"rank {min(failed, key=failed.get)} failed first"
    sys.stderr.write(f"rank {rank}: {what}\n")  # print makes two writes of it, and others come between


def fail(message):
    """Stop with one line. Every rank calls this at the same place; rank 0 speaks."""
    raise SystemExit(1 if int(os.environ.get("RANK", 0)) else f"error: {message}")


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a list of numbers over all ranks."""
    dist.all_reduce(total := torch.tensor(values, dtype=torch.float64), op)
    return total.tolist()


def load_model(args, mesh, device, auto=None, wrap=TokenLogps, **changes):
    """The model in `wrap`, sharded by FSDP2. Rank 0 reads the weights, the others get their shards."""
    logging.disable_progress_bar()  # of transformers: one bar is enough
    config = AutoConfig.from_pretrained(args.model, **changes)
    auto, dtype = auto or auto_class(config), config.dtype or getattr(torch, args.param_dtype)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name in [name for name in part.to_dict() if "dropout" in name or name.endswith("_pdrop")]:
            setattr(part, name, 0.0)  # CAREFUL: with dropout the ratio is not 1 on the first mini-batch
    with torch.device("meta"):
        lm = auto.from_config(config, dtype=args.param_dtype, attn_implementation=args.attn_implementation)
    # of hf/: the dtype in which the model came, and tied weights once
    lm.config.dtype, lm.tied = dtype, lm.all_tied_weights_keys if config.tie_word_embeddings else ()
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = wrap(lm)
    precision = MixedPrecisionPolicy(getattr(torch, args.compute_dtype), reduce_dtype=torch.float32)
    for block in [m for m in lm.modules() if type(m).__name__ in lm._no_split_modules][::-1]:  # inner first
        fully_shard(block, mesh=mesh, mp_policy=precision)
    # the root too is resharded after a forward: without a backward nothing else would do it
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy.to_empty(device=device)
    full = None if dist.get_rank() else auto.from_pretrained(args.model, dtype="auto", **changes)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(lm, full.state_dict() if full else {}, options=options)
    for name, buffer in lm.named_buffers():  # rotary frequencies and the like are in no state dict
        if full:
            buffer.copy_(full.get_buffer(name))
        dist.broadcast(buffer, 0)
    if full and lm.can_generate():  # saved with the weights: it may name further EOS tokens
        lm.generation_config = full.generation_config
    return policy


def learning_rate(args, step, total_steps):
    """The learning rate of `step` (from 1): a function of the step alone, so resuming needs no state."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    done = (step - 1 - args.warmup_steps) / max(1, total_steps - args.warmup_steps)
    decay = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return args.lr * decay[args.lr_schedule]


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
    """Split rows, longest first, into micro-batches of at most `budget` tokens (padding, if any, counted).

    Every rank gets the same number of micro-batches, the largest needed by any: the missing ones are empty.
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
    [most] = all_reduce([len(batches)], dist.ReduceOp.MAX)
    return batches + [[]] * (int(most) - len(batches))


MUST_AGREE = set(  # for a run to go on: its data, its model and its objective
    "model tokenizer env critic_model reward_model lora_rank lora_alpha lora_target_modules train_files"
    " seed prompt_key response_key messages_key chosen_key rejected_key bad_pairs max_length truncation"
    " max_prompt_length max_response_length train_batch_size group_size adv_estimator loss_agg reward_fn"
    " loss policy_loss center_rewards_coef teacher kl lora_kind".split()
)


def open_run(args):
    """Check output_dir against the arguments -> the checkpoints to go on from, the newest first."""
    out, there, now = Path(args.output_dir), {}, json.loads(json.dumps(asdict(args)))
    if (out / "args.json").exists():
        if args.resume == "never":
            fail(f"--output_dir {out} already holds a run: choose another, or go on with it by --resume auto")
        with suppress(ValueError):  # of a disk that was full
            there = json.loads((out / "args.json").read_text())
    other = [k for k in there if k in MUST_AGREE and k in now and there[k] != now[k]]
    if changes := "; ".join(f"--{k} {there[k]} there, {now[k]} now" for k in other):
        fail(f"--output_dir {out} holds a run with other arguments ({changes}): choose another")
    latest = (out / "checkpoints/latest").resolve()
    own = sorted((path for path in latest.parent.glob("step_*") if path <= latest), reverse=True)
    if args.resume in ("auto", "never"):
        return own
    if not (Path(args.resume) / "trainer_state.json").is_file():
        fail(f"--resume {args.resume}: not a checkpoint, it has no trainer_state.json")
    return [*own, Path(args.resume).resolve()]  # the same command again goes on with its own run


def load_checkpoint(checkpoints, lm, optimizer):
    """Load the first checkpoint that can be, at any world size -> the trainer's state; none: step 0."""
    for path in checkpoints:
        model_state, optim_state = dcp_state.get_state_dict(lm, optimizer)
        try:
            state = json.loads((path / "trainer_state.json").read_text())
            dcp.load(dict(model=model_state, optimizer=optim_state), checkpoint_id=path / "dcp")
        except (dcp.CheckpointException, OSError, ValueError) as error:
            if dist.get_rank() == 0:
                sys.stderr.write(f"{path} is damaged ({causes(error)}) and left out\n")
            continue
        dcp_state.set_state_dict(lm, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
        return state | dict(origin=f"\nresumed from {path}")
    if checkpoints:
        fail("no checkpoint is intact: choose another --output_dir, or remove checkpoints/ to begin again")
    return dict(step=0, origin="")


def causes(error):
    """An error of a checkpoint in one line; dcp's have a cause for each rank."""
    by_rank = getattr(error, "failures", {dist.get_rank(): (error, None)})
    return "; ".join(f"rank {rank}: {' '.join(str(cause).split())}" for rank, (cause, _) in by_rank.items())


def share_of(lm):
    """This rank's share of the weights of hf/, in the dtype in which the model came, and the file of each.

    All ranks gather one weight after the other, and one of them keeps it: nobody holds the whole model.
    """
    share, files, rank, ranks = {}, {}, dist.get_rank(), dist.get_world_size()
    if isinstance(lm, Adapters):  # small, and whole on every rank
        return share, files
    state = [(name, x) for name, x in lm.state_dict().items() if name not in lm.tied]
    for owner, part in enumerate(balance([x.numel() for _, x in state], ranks)):
        file = f"model-{owner + 1:05d}-of-{ranks:05d}.safetensors" if ranks > 1 else "model.safetensors"
        for name, x in (state[i] for i in part):
            x = x.to(lm.config.dtype).full_tensor() if isinstance(x, DTensor) else x
            weights = revert_weight_conversion(lm, {name: x})  # as in the files that it came from
            files |= dict.fromkeys(weights, file)
            if owner == rank:
                share |= {k: torch.empty(w.shape, dtype=w.dtype).copy_(w) for k, w in weights.items()}
    return share, files


def write_share(directory, lm, share, files):
    """A rank's file of a Hugging Face directory; rank 0 writes what else belongs there."""
    directory.mkdir(exist_ok=True)
    if share:
        safetensors.torch.save_file(share, directory / files[next(iter(share))], dict(format="pt"))
    if dist.get_rank() == 0:
        if isinstance(lm, Adapters):
            return lm.save_pretrained(directory)
        lm.config.architectures = [type(lm).__name__]  # a new critic's was a causal LM
        lm.config.save_pretrained(directory)
        if lm.can_generate():
            lm.generation_config.save_pretrained(directory)
        index = json.dumps(dict(metadata={}, weight_map=files), indent=2)
        (directory / "model.safetensors.index.json").write_text(index + "\n")


def save_checkpoint(args, step, lm, optimizer, tokenizer, **state):
    """Write checkpoints/step_N beside and rename it: a kill at any moment leaves the last good one."""
    root, rank0 = Path(args.output_dir) / "checkpoints", dist.get_rank() == 0
    final, new, link = root / f"step_{step:06d}", root / f".step_{step:06d}", root / ".latest"
    text = lambda x: x.tolist() if isinstance(x, np.ndarray) else str(x)  # where JSON knows no such type
    if rank0:
        shutil.rmtree(new, ignore_errors=True)  # a kill left it, perhaps of other ranks
    dist.barrier()
    with on_all_ranks(final):
        model_state, optim_state = dcp_state.get_state_dict(lm, optimizer)
        dcp.save(dict(model=model_state, optimizer=optim_state), checkpoint_id=new / "dcp")
        models = getattr(lm, "models", dict(hf=lm)) if args.save_hf else {}
        shares = [(new / name, model, *share_of(model)) for name, model in models.items()]
        for share in shares:  # after all collectives: a rank alone may have no room left
            write_share(*share)
        if rank0:
            tokenizer.save_pretrained(new / "hf")
            if not args.save_hf:
                lm.config.save_pretrained(new / "hf")
            (new / "trainer_state.json").write_text(json.dumps(state | dict(step=step), default=text))
    with on_all_ranks(final):  # now that the files of all ranks are there
        if rank0:
            shutil.rmtree(final, ignore_errors=True)
            new.rename(final)
            link.unlink(missing_ok=True)
            link.symlink_to(final.name)
            link.replace(root / "latest")
            done = sorted(path for path in root.glob("step_*") if path <= final)  # `latest` left later ones
            for old in done[: -args.keep_checkpoints] if args.keep_checkpoints else []:
                shutil.rmtree(old)


@contextmanager
def on_all_ranks(path):
    """Go on when all ranks are done; where one of them cannot write, all end with a line that says why."""
    problem, problems = None, [None] * dist.get_world_size()
    try:
        yield
    except (dcp.CheckpointException, OSError, safetensors.SafetensorError) as error:
        problem = causes(error)
    dist.all_gather_object(problems, problem)
    if problems := {*problems} - {None}:
        print(file=sys.stderr)  # below the progress bar
        free = f"{shutil.disk_usage(path.parent).free / 2**30:.1f} GiB are free"
        fail(f"{path} cannot be written: {'; '.join(sorted(problems))}; {free}")


@contextmanager
def timed(timing, name):
    """Add the seconds of a block to timing[name]."""
    start = time.perf_counter()
    yield
    timing[name] = timing.get(name, 0.0) + time.perf_counter() - start


# endregion
# region lora
class Adapters(nn.Module):
    """LoRA: trained matrices beside the frozen linear layers of lm; in checkpoints they stand for the model.

    Every rank holds all of them, in float32; FSDP knows only the frozen weights.
    """

    auto, options, task = AutoModelForCausalLM, {}, dict(task_type="CAUSAL_LM")

    def __init__(self, lm, args):
        import peft  # here: it takes two seconds

        super().__init__()
        targets = "all-linear" if args.lora_target_modules == ("all-linear",) else [*args.lora_target_modules]
        sizes = dict(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=targets)
        self.config = peft.LoraConfig(**sizes, **self.task, base_model_name_or_path=args.model)
        self.args, self.generation_config = args, getattr(lm, "generation_config", None)
        peft.inject_adapter_in_model(self.config, lm)  # also freezes all other weights
        torch.manual_seed(args.seed)  # the same matrices on every rank
        for name, layer in lm.named_modules():
            if hasattr(layer, "lora_A"):
                if not isinstance(layer.base_layer, nn.Linear):  # all experts of a layer, say
                    problem = f"{name} is no linear layer: name others by --lora_target_modules"
                    raise ValueError(f"{args.model} ({lm.config.model_type}): {problem}")
                # CAREFUL: peft takes FSDP's shards for those of tensor parallelism and makes lora_B as small
                layer.lora_A["default"].float()
                out, device = layer.base_layer.out_features, layer.lora_A["default"].weight.device
                layer.lora_B["default"] = nn.Linear(args.lora_rank, out, bias=False, device=device)
                layer.reset_lora_parameters("default", init_lora_weights=True)
                for part in ("lora_A", "lora_B"):
                    key = f"{name}.{part}.weight".replace(".", "/")  # no dots in the name of a parameter
                    self.register_parameter(key, getattr(layer, part)["default"].weight)

    def save_pretrained(self, directory, weights=None):
        """What save_checkpoint writes to hf/: the adapters as peft loads them, or the merged model."""
        import peft

        weights = weights or self.state_dict()
        state = {f"base_model.model.{k.replace('/', '.')}": v.cpu() for k, v in weights.items()}
        if self.args.merge_lora:
            lm = self.auto.from_pretrained(self.args.model, dtype="auto", **self.options)
            peft.set_peft_model_state_dict(lm := peft.get_peft_model(lm, self.config), state)
            lm.merge_and_unload().save_pretrained(directory)
        else:
            self.config.save_pretrained(directory)
            safetensors.torch.save_file(state, directory / "adapter_model.safetensors")
        if self.generation_config:  # a classifier has none
            self.generation_config.save_pretrained(directory)


def check_adapters(lm, args):
    """ValueError where lm, but for its head, has no such layers, or they take no adapters. It gets them."""
    linear = [name for name, m in lm.base_model.named_modules() if isinstance(m, nn.Linear)]
    linear = {name.rpartition(".")[2] for name in linear}
    if args.lora_rank and (missing := {*args.lora_target_modules} - linear - {"all-linear"}):
        problem = f"has no {' '.join(missing)} for --lora_target_modules, but {sorted(linear)}"
        raise ValueError(f"{args.model} ({lm.config.model_type}) {problem}")
    if args.lora_rank:
        Adapters(lm, args)


def clip_gradients(optimizer, limit):
    """Clip the gradient of all ranks to a norm of at most `limit` -> its norm before that."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if not isinstance(p, DTensor):  # FSDP averages the gradients of its shards; of adapters it has none
            dist.all_reduce(p.grad.div_(dist.get_world_size()))
    norm = nn.utils.clip_grad_norm_(parameters, limit)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


# endregion
# region sequence
class Sliced(TokenLogps):
    """TokenLogps of a packed row of which each rank of a group runs a slice; without a group, of any row."""

    group, predict = None, TokenLogps.forward  # predict: what the model makes of a row, or a slice of it

    def forward(self, where, target, temperature, **inputs):
        """As TokenLogps, on every rank of the whole row; the gradient is that of this rank's slice."""
        if not self.group:
            return self.predict(where, target, temperature, **inputs)
        borders, size = inputs["cu_seq_lens_q"].tolist(), self.group.size()
        width = -(-borders[-1] // size)
        # padding goes behind the last sequence, which does not see it
        short, borders[-1] = width * size - borders[-1], width * size
        # labels were shifted before this cut: a slice's last position predicts the first token of the next
        start = width * self.group.rank()
        mine, here = where // width == self.group.rank(), slice(start, start + width)
        cut = lambda x: nn.functional.pad(x, (0, short))[:, here]
        slices = {name: cut(inputs[name]) for name in ("input_ids", "position_ids")}
        found = self.predict(where[mine] - start, target[mine], temperature, borders=borders, **slices)
        own = torch.stack([x.new_zeros(len(where)).masked_scatter(mine, x) for x in found])
        dist.all_reduce(whole := own.detach().clone(), group=self.group)
        return own + (whole - own.detach())


def share_rows(args, device, kind=None):
    """Let --sp_size neighbouring ranks share the rows of Sliced -> the arguments to load such models by.

    kind: ulysses, or another function of its arguments; None: ulysses if it divides the heads, else gather.
    """
    Sliced.group = None
    if args.sp_size == 1:
        return args
    from transformers import AttentionInterface

    shape = dist.get_world_size() // args.sp_size, args.sp_size
    Sliced.group = dist.init_device_mesh(device.type, shape, mesh_dim_names=("dp", "sp"))["sp"].get_group()
    how = dict(kind=kind, group=Sliced.group, kernel=args.attn_implementation)
    AttentionInterface.register("sliced", partial(slice_attention, **how))
    return replace(args, attn_implementation="sliced")


def special_layers(config):
    """What layers of a model have beside attention to all tokens before, which can be replaced."""
    special = "sliding_window", "attention_chunk_size", "attn_logit_softcapping"
    special = [name for name in special if getattr(config, name, None)] + ["a state"] * recurrent(config)
    model = auto_class(config)._model_mapping.get(type(config), None)
    return special + ["attention of its own"] * (not getattr(model, "_supports_attention_backend", False))


def check_sharing(config, args):
    """ValueError where --sp_size ranks cannot share the rows of a model."""
    if args.sp_size > 1 and (special := special_layers(config)):
        has = f"has {' and '.join(special)}, which --sp_size {args.sp_size} does not implement"
        raise ValueError(f"{config.name_or_path} ({config.model_type}) {has}")


def slice_attention(module, query, key, value, mask, scaling, borders, kind, group, kernel, **_):
    """Attention as transformers calls it: query [1, H, T / sp, D] -> [1, T / sp, H, D], all of one slice.

    borders: 0, and where the sequences of the whole row end; key and value may have fewer heads.
    """
    kind = kind or (gather if query.shape[1] % group.size() else ulysses)
    out = kind(query[0], key[0], value[0], borders, group, scaling=scaling, kernel=kernel)
    return out.transpose(0, 1)[None], None


def ulysses(query, key, value, borders, group, **how):
    """Trade a slice of all heads for the whole row of some heads, attend, and trade back (2309.14509)."""
    size, ops = group.size(), dist._functional_collectives
    repeats = size // math.gcd(size, len(key))  # fewer key/value heads than ranks: each rank needs one
    key, value = (x.repeat_interleave(repeats, 0) for x in (key, value))
    # CAREFUL: gloo writes into freed memory while several of these are on their way: one after the other
    trade = lambda x: ops.wait_tensor(ops.all_to_all_single(x.contiguous(), None, None, group))
    # block i of the heads goes to rank i, whose blocks of tokens then follow each other
    to_heads = lambda x: trade(x.unflatten(0, (size, -1))).transpose(0, 1).flatten(1, 2)
    out = causal_attention(*map(to_heads, (query, key, value)), borders, **how)
    # and back: block i of the tokens goes to rank i, whose blocks of heads then follow each other
    return trade(out.unflatten(1, (size, -1)).transpose(0, 1)).flatten(0, 1)


def gather(query, key, value, borders, group, **how):
    """Keys and values of the whole row on every rank, of which a slice sees those up to its own end."""
    start, ops = group.rank() * (width := query.shape[1]), dist._functional_collectives
    first, end = first_seen(borders, start), start + width
    whole = lambda x: ops.wait_tensor(ops.all_gather_single(x.contiguous(), 1, group))  # as in ulysses
    key, value = (whole(x)[:, first:end] for x in (key, value))
    ends = [0, *(x - start for x in borders if start < x < end), width]
    return causal_attention(query, key, value, ends, start - first, **how)


def first_seen(borders, position):
    """Where the sequence of a position begins."""
    return max(x for x in borders if x <= position)


def causal_attention(query, key, value, ends, before=0, *, scaling, kernel):
    """Causal attention within sequences: query [H, T, D], key and value [KV, before + T, D] -> [H, T, D].

    ends: 0, and where they end in query; before: keys of the first one that are before its first query.
    """
    borders = ends, [0, *(x + before for x in ends[1:])]
    if kernel == "flash_attention_2":
        from flash_attn import flash_attn_varlen_func

        sizes = [torch.tensor(x, dtype=torch.int32, device=query.device) for x in borders]
        sizes += [max(b - a for a, b in pairwise(x)) for x in borders]
        row = (x.transpose(0, 1) for x in (query, key, value))
        return flash_attn_varlen_func(*row, *sizes, softmax_scale=scaling, causal=True).transpose(0, 1)
    shapes = [(1, b - a, d - c) for (a, b), (c, d) in zip(*map(pairwise, borders), strict=True)]
    return attend(*(x.transpose(0, 1) for x in (query, key, value)), shapes, scaling).transpose(0, 1)


def attend(query, key, value, shapes, scaling):
    """Causal attention in the pieces of a row, by SDPA: query [T, H, D], key, value [S, KV, D] -> [T, H, D].

    shapes: (n, t, s), for n pieces of t queries and s keys each; the last query sees the last key.
    """
    from torch.nn.attention.bias import causal_lower_right

    sdpa, out = partial(nn.functional.scaled_dot_product_attention, scale=scaling, enable_gqa=True), []
    wide = [x if x.is_cuda else x.float() for x in (query, key, value)]  # bfloat16: a CPU's backward is slow
    sizes = [n * t for n, t, _ in shapes], *[[n * s for n, _, s in shapes]] * 2
    for (n, t, s), *parts in zip(shapes, *map(torch.split, wide, sizes), strict=True):
        parts = [x.unflatten(0, (n, -1)).transpose(1, 2) for x in parts]  # [n, H, t or s, D]
        out.append(sdpa(*parts, causal_lower_right(t, s)).transpose(1, 2).flatten(0, 1))
    return torch.cat(out).to(query.dtype)


# endregion
RING_ROWS = 128  # positions whose attention scores the ring holds at a time


def ring(query, key, value, borders, group, scaling, kernel):
    """Ring attention (2310.01889): no rank ever holds the keys and values of the whole row."""
    heads = len(query) // len(key)  # of queries to one of keys; they become the rows of one matrix
    query = query.unflatten(0, (-1, heads)).transpose(1, 2).flatten(1, 2)
    out = Ring.apply(query, torch.cat([key, value], -1), borders, group, scaling)
    return out.unflatten(1, (-1, heads)).transpose(1, 2).flatten(0, 1)


class Ring(torch.autograd.Function):
    """query [KV, rows, D], kv [KV, T / sp, 2 D]: keys beside values -> [KV, rows, D].

    Keys and values travel from rank to rank, and each softmax is put together from its parts on the way.
    """

    @staticmethod
    def pass_on(x, group, hops=1):
        """Begin to send x that far around the ring -> a function that waits for what comes from behind."""
        peers, new = [(group.rank() + n) % group.size() for n in (hops, -hops)], torch.empty_like(x)
        kinds = zip((dist.isend, dist.irecv), (x, new), peers)
        works = dist.batch_isend_irecv([dist.P2POp(f, y, group=group, group_peer=n) for f, y, n in kinds])

        def wait():
            for work in works:
                work.wait()
            return new

        return wait

    @staticmethod
    def rounds(query, kv, borders, group, scaling):
        """Each slice of keys and values that comes by, this rank's first -> it, and the scores' blocks."""
        width = kv.shape[1]
        # as far as any rank has to see; all know the borders
        number = 1 + max(r - first_seen(borders, r * width) // width for r in range(group.size()))
        for back in range(number):
            wait = Ring.pass_on(kv, group) if back + 1 < number else None  # while this rank computes
            start = group.rank() * width
            yield kv, Ring.blocks(query, kv, borders, scaling, start, start - back * width)
            kv = wait and wait()

    @staticmethod
    def blocks(query, kv, borders, scaling, start, other):
        """Of queries from position `start` on, keys from `other` on -> rows, columns and scores."""
        width, heads, device = kv.shape[1], query.shape[1] // kv.shape[1], kv.device
        sequence = torch.repeat_interleave(torch.tensor(borders).diff()).to(device)
        for a in range(start, start + width, RING_ROWS):
            b = min(a + RING_ROWS, start + width)
            c, d = max(first_seen(borders, a), other), min(b, other + width)
            if c < d:
                rows, columns = slice((a - start) * heads, (b - start) * heads), slice(c - other, d - other)
                later = torch.arange(a, b, device=device)[:, None] < torch.arange(c, d, device=device)
                hidden = (later | (sequence[a:b, None] != sequence[c:d])).repeat_interleave(heads, 0)
                scores = (query[:, rows] @ kv[:, columns, : query.shape[-1]].mT).float() * scaling
                yield rows, columns, scores.masked_fill(hidden, -math.inf)

    @staticmethod
    def forward(ctx, query, kv, *how):
        size = query.shape[-1]
        lse = torch.full(query.shape[:2], -math.inf, device=query.device)  # log of the sum of e^scores so far
        out = torch.zeros(*lse.shape, kv.shape[-1] - size, device=query.device)
        for other, blocks in Ring.rounds(query, kv, *how):
            for rows, columns, scores in blocks:
                new = torch.logaddexp(lse[:, rows], scores.logsumexp(-1))
                weights = (scores - new[..., None]).exp().to(kv.dtype)
                out[:, rows] *= (lse[:, rows] - new).exp()[..., None]
                out[:, rows] += weights @ other[:, columns, size:]  # eq: sequence.ring
                lse[:, rows] = new
        ctx.save_for_backward(query, kv, out, lse)
        ctx.how = how
        return out.to(query.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        """With p the softmax: d score = p (d out . value - d out . out); d_kv travels with kv, then home."""
        (query, kv, out, lse), group = ctx.saved_tensors, ctx.how[1]
        size, inner = query.shape[-1], (d_out * out).sum(-1, keepdim=True)
        d_query, d_kv = (torch.zeros_like(x, dtype=torch.float32) for x in (query, kv))
        for hops, (other, blocks) in enumerate(Ring.rounds(query, kv, *ctx.how)):
            d_kv = Ring.pass_on(d_kv, group)() if hops else d_kv
            for rows, columns, scores in blocks:
                key, value = other[:, columns].tensor_split([size], -1)
                weights = (scores - lse[:, rows, None]).exp()
                d_scores = weights * (d_out[:, rows] @ value.mT - inner[:, rows]) * ctx.how[2]
                weights, d_scores = weights.to(kv.dtype), d_scores.to(kv.dtype)
                d_query[:, rows] += d_scores @ key
                parts = d_scores.mT @ query[:, rows], weights.mT @ d_out[:, rows]
                d_kv[:, columns] += torch.cat(parts, -1)
        d_kv = Ring.pass_on(d_kv, group, -hops)() if hops else d_kv
        return d_query.to(query.dtype), d_kv.to(kv.dtype), None, None, None


class AdaptiveAdapters(Adapters):
    """AdaLoRA: B diag(E) A, of one and a half times the rank; the least important of all layers get E = 0.

    In checkpoints are also the importance and the uncertainty of each weight, and which ranks are kept.
    """

    def __init__(self, lm, args, total_steps):
        super().__init__(lm, replace(args, lora_rank=-(-3 * args.lora_rank // 2)))
        self.total_steps = total_steps
        layers = {n.replace(".", "/"): m for n, m in lm.named_modules() if hasattr(m, "lora_A")}
        for name, layer in layers.items():
            a, b = layer.lora_A["default"], layer.lora_B["default"]
            for matrix in (a, b):
                nn.init.normal_(matrix.weight, std=0.02)
            e = nn.Parameter(a.weight.new_zeros(a.out_features))
            self.register_parameter(f"{name}/lora_E", e)
            a.register_forward_hook(lambda _, inputs, out, e=e: out * e)
        for name, p in [*self.named_parameters()]:
            for kind in ("importance", "uncertainty"):
                self.register_buffer(f"{name}/{kind}", torch.zeros_like(p))
        self.names, self.budget = [*layers], args.lora_rank * len(layers)
        self.register_buffer("lora_kept", e.new_ones(len(layers), len(e), dtype=torch.bool))

    def orthogonality(self):
        """How far the rows of A and the columns of B are from orthonormal: the mean over all matrices."""
        parts = [p if "lora_A" in n else p.t() for n, p in self.named_parameters() if "lora_E" not in n]
        gaps = [x @ x.t() - torch.eye(len(x), device=x.device) for x in parts]
        return sum(map(torch.linalg.matrix_norm, gaps)) / len(gaps)  # eq: lora.orthogonality

    @torch.no_grad()
    def allocate(self, step, finite):
        """After an optimizer step, whose gradient may be not `finite`: choose ranks -> how many are kept."""
        for name, p in self.named_parameters() if finite else ():
            mean, spread = self.get_buffer(f"{name}/importance"), self.get_buffer(f"{name}/uncertainty")
            now = (p * p.grad).abs()
            mean.lerp_(now, 0.15)  # eq: lora.importance
            spread.lerp_((now - mean).abs(), 0.15)
        begin, end = self.total_steps // 10, self.total_steps // 2
        if begin < step <= end:
            left = (end - step) / (end - begin)
            few = self.budget + int((self.lora_kept.numel() - self.budget) * left**3)  # eq: lora.budget
            best = self.scores().flatten().topk(few).indices
            self.lora_kept.zero_().view(-1)[best] = True
        for name, kept in zip(self.names, self.lora_kept):
            self.get_parameter(f"{name}/lora_E").mul_(kept)
        return self.lora_kept.sum().item()

    def scores(self):
        """Of each layer's ranks: importance times uncertainty of E, and the means of those of its A and B."""
        of = lambda name: self.get_buffer(f"{name}/importance") * self.get_buffer(f"{name}/uncertainty")
        e, a, b = ([of(f"{n}/{x}") for n in self.names] for x in ("lora_E", "lora_A/weight", "lora_B/weight"))
        return torch.stack([x + y.mean(1) + z.mean(0) for x, y, z in zip(e, a, b)])  # eq: lora.score

    def save_pretrained(self, directory):
        """As LoRA: E goes into B, whose column is 0 where a rank is not kept."""
        state = self.state_dict()
        parts = {name: x for name, x in state.items() if name.endswith("/weight")}
        scale = lambda n, x: x * state[n.replace("lora_B/weight", "lora_E")] if "lora_B" in n else x
        super().save_pretrained(directory, {name: scale(name, x) for name, x in parts.items()})


class Policy(Sliced):
    """Sliced; at temperature None of the model's own logits."""

    def forward(self, where, target, temperature, **inputs):
        """As Sliced."""
        if temperature is None:
            logits = self.lm(**inputs, use_cache=False).logits.flatten(0, 1)[where].float()
            logits[:, self.never] = -1e4
            return (logits.log_softmax(-1).gather(-1, target[:, None])[:, 0],) * 2
        return super().forward(where, target, temperature, **inputs)


def load_policy(args, mesh, device, total_steps=None):
    """-> what `micro_batches` calls, and what is trained and saved: the model itself, or its adapters."""
    args = share_rows(args, device, dict(ulysses=ulysses, gather=gather, ring=ring)[args.sp_attention])
    if args.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel as replace_classes

        # of transformers' model file; TokenLogps would never call the fused cross-entropy
        replace_classes(AutoConfig.from_pretrained(args.model).model_type, fused_linear_cross_entropy=False)
    if args.qlora:  # in 4 bits (NF4), whole on every rank, as FSDP does not shard that format
        dtype = getattr(torch, args.compute_dtype)
        bits = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        options = dict(quantization_config=transformers.BitsAndBytesConfig(**bits), device_map={"": device})
        options |= dict(dtype=dtype, attn_implementation=args.attn_implementation)
        policy = Policy(AutoModelForCausalLM.from_pretrained(args.model, **options), entropy=False).train()
        if args.gradient_checkpointing:
            policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        policy = load_model(args, mesh, device, wrap=partial(Policy, entropy=False))
    adaptive = partial(AdaptiveAdapters, total_steps=total_steps)
    kind = adaptive if args.lora_kind == "adalora" else Adapters
    return policy, kind(policy.lm, args) if args.lora_rank else policy.lm


def check_layout(policy, rows, args):
    """Before the first step: in the layout that trains, short rows have the model's own log-probs."""
    ids = [row["prompt_ids"] + row["response_ids"] for row in (rows[:4] * 2)[:4]]  # equal on all ranks
    ids = [[x for x in row if x not in policy.never][:32] for row in ids]
    texts, lm = ([x[:1] for x in ids], [x[1:] for x in ids]), policy.lm
    with torch.no_grad():
        logp_nt, _ = token_logps(policy, *texts, 1.0, packed if args.packing else padded)
        kernel = lm.config._attn_implementation
        lm.set_attn_implementation("eager")
        own_nt, _ = token_logps(policy, *texts, None, padded)
        lm.set_attn_implementation(kernel)
    [gap] = all_reduce([(logp_nt - own_nt).abs().sum() / dist.get_world_size() / sum(map(len, texts[1]))])
    kernel, limit = args.attn_implementation, ROUNDING[args.compute_dtype]
    layout, cause = "padded", f"{kernel} leaves out a soft cap or sinks: try --attn_implementation eager"
    if kernel == "eager":
        cause = "it does something to its logits that TokenLogps leaves out"
    if args.sp_size > 1:
        layout, cause = "sequence-parallel", "slices of a row miss something of one another: try --sp_size 1"
    elif args.packing:
        layout, cause = "packed", f"rows see one another: try --no-packing; or {cause}"
    if not gap < limit:  # so that NaN fails too
        unlike = f"log-probs of {layout} rows under {kernel} are not its own, off by {gap:.3g} on average"
        fail(f"{args.model} ({lm.config.model_type}): {unlike}, over {limit}; likely {cause}")


def check_args(args):
    """Stop on combinations that cannot work, before anything is loaded."""
    world, flag = int(os.environ.get("WORLD_SIZE", 1)), lambda name: f"--{name} {getattr(args, name)}"
    liger = torch.cuda.is_available() and find_spec("liger_kernel")
    short = args.max_tokens_per_microbatch * args.sp_size < args.max_length
    flash, half = flag("attn_implementation"), args.compute_dtype == "bfloat16"
    extra = args.qlora or args.merge_lora or args.lora_kind != "lora"
    for wrong, message in (
        (world % args.hsdp_replicas, f"{world} ranks are not a multiple of {flag('hsdp_replicas')}"),
        (world % args.sp_size, f"{world} ranks are not a multiple of {flag('sp_size')}"),
        (args.sp_size > 1 and not args.packing, f"{flag('sp_size')} cuts packed rows: add --packing"),
        (short, f"{flag('max_tokens_per_microbatch')} times {flag('sp_size')} is under {flag('max_length')}"),
        (extra and not args.lora_rank, "--qlora, --merge_lora, --lora_kind adalora need --lora_rank"),
        (args.qlora and not find_spec("bitsandbytes"), "--qlora needs bitsandbytes (pip install)"),
        (flash.endswith("flash_attention_2") and not half, f"{flash} needs --compute_dtype bfloat16"),
        (args.liger and not liger, "--liger needs a GPU and Liger's kernels: pip install liger-kernel"),
    ):
        if wrong:
            fail(message)


def check_model(config, args):
    """ValueError or ImportError where the model cannot be trained with these arguments."""
    with torch.device("meta"):  # which raises for a kernel that the model does not run on
        lm = auto_class(config).from_config(config, attn_implementation=args.attn_implementation)
    check_adapters(TokenLogps(lm).lm, args)  # TokenLogps refuses a bias of the output layer
    check_sharing(config, args)
    heads, sp = getattr(config, "num_attention_heads", 0), f"--sp_size {args.sp_size}"
    undivided = f"has {heads} attention heads, which {sp} does not divide: take --sp_attention gather or ring"
    if args.liger:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
    text_only = args.messages_key, args.packing, args.lora_rank, args.liger, args.truncation == "left"
    flags = "--messages_key, --packing, --lora_rank, --liger and --truncation left"
    for wrong, problem in (
        (args.sp_attention == "ulysses" and heads % args.sp_size, undivided),
        (takes_images(config) and any(text_only), f"takes images, which {flags} do not"),
        (args.packing and recurrent(config), "passes a state on between packed rows: add --no-packing"),
        (args.liger and config.model_type not in known, "has no kernels for --liger"),
    ):
        if wrong:
            raise ValueError(f"{args.model} ({config.model_type}) {problem}")


def load_data(args):
    """-> tokenizer, rows of training and validation, the tokens that end responses, and a line about them."""
    try:
        check_tracker(args)
        check_model(AutoConfig.from_pretrained(args.model), args)
        tokenizer = load_processor(args.model, args.tokenizer)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{args.tokenizer or args.model}: the tokenizer has no EOS token")
        tools = load_env(args.env).tools if args.env else None
        train_rows, ends, *counts = load_examples(args.train_files, args, tokenizer, tools)
        val_rows, _, *val_counts = load_examples(args.val_files, args, tokenizer, tools)
    except (ValueError, OSError, ImportError) as error:
        fail(" ".join(str(error).split()))
    if len(train_rows) < args.train_batch_size:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} training rows")
    over, lost = map(sum, zip(counts, val_counts))
    about = f"{len(train_rows)} training, {len(val_rows)} validation rows ({over} truncated, {lost} dropped)"
    return tokenizer, train_rows, val_rows, ends, about


def load_examples(paths, args, tokenizer, tools=None):
    """-> rows as `split` makes them, the tokens that end responses, numbers of cut and of dropped rows."""
    columns = [args.messages_key] if args.messages_key else [args.prompt_key, args.response_key]
    read = encode_messages if args.messages_key else encode
    keep = slice(args.max_length) if args.truncation == "right" else slice(-args.max_length, None)

    def example(record, i):
        where = f"{', '.join(paths)}: row {i}"
        try:
            shown = {} if args.messages_key else dict(images=record["images"])
            ids, trained = read(*(record[column] for column in columns), tokenizer, tools, **shown)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{where}: {', '.join(columns)}: {error!r}") from None
        if (over := len(ids) > args.max_length) and args.truncation == "error":
            problem = f"{where} has {len(ids)} tokens, over --max_length {args.max_length}"
            raise ValueError(f"{problem}; raise it or pass --truncation left or right")
        ends = {x for x, on, more in zip(ids, trained, [*trained[1:], False]) if on and not more}
        row = split(ids[keep], trained[keep])
        return row and dict(row, ends=[*ends], truncated=over, images=record["images"])

    fields = dict(prompt_ids=IDS, response_ids=IDS, trained=BOOLS, ends=IDS, truncated=BOOL)
    fields |= dict(images=IMAGES) if hasattr(tokenizer, "image_processor") else {}
    how, code = (args.max_length, args.truncation, tools), (load_examples, read, split)
    rows, dropped = prepare(paths, tokenizer, columns, (), fields, partial(map, example), how, code)
    if paths and not rows:
        raise ValueError(f"{', '.join(paths)}: --max_length {args.max_length} leaves no row a trained token")
    ends = {*pc.list_flatten(rows.column("ends")).unique().to_pylist()}
    return rows, ends, pc.sum(rows.column("truncated"), min_count=0).as_py(), dropped


def lengths(rows):
    """Tokens of each row; of those on disk without reading them."""
    if isinstance(rows, list):
        return [len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows]
    return pc.add(*(pc.list_value_length(rows.column(x)) for x in ("prompt_ids", "response_ids"))).to_pylist()


def pack(lengths, budget):
    """Bin-packing: the fewest micro-batches, as many on every rank, over which `balance` keeps to the budget.

    Lengths 6 5 5 4 in a budget of 10 -> [0, 3] and [1, 2].
    """
    number = max(1, -(-sum(lengths) // budget))
    while max(sum(lengths[i] for i in part) for part in balance(lengths, number)) > budget:
        number += 1
    [number] = all_reduce([number], dist.ReduceOp.MAX)  # see split_micro_batches; more are never heavier
    return balance(lengths, int(number))


if __name__ == "__main__":
    main(Args(**flags))
