"""Reward model (Bradley-Terry; InstructGPT, arXiv 2203.02155): minimise -log sigma(r_chosen - r_rejected).

r is one number for a whole conversation: a linear head on what the model makes of its last token. Departures:
1. A row is one pair, not all pairs of the K responses to a prompt; the mean is over the pairs of a step.
2. There are a margin (Llama 2, 2307.09288) and a term that keeps scores around 0 (2312.09244; off).
3. The head starts at 0: the first loss is log 2, and no score depends on a random draw.
hf/ is a sequence classifier with one label: what `ppo.py --reward_model` loads. LoRA by --lora_rank.

CPU:        python algos/rm.py --model runs/sft/hf --train_files data/pairs.parquet --output_dir runs/rm
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/rm.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 algos/rm.py
Docs: docs/rm.md
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
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.arguments import parse

# Shapes: N pairs, L conversations, T tokens, H hidden size. A suffix names the axes (chosen_n).


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
    train_files: tuple[str, ...]  # parquet files of training pairs; a column `margin`, if any, is used
    val_files: tuple[str, ...] = ()  # parquet files of validation pairs; none: no validation
    prompt_key: str = "prompt"  # column of the prompt: chat messages, or a string (one user message)
    chosen_key: str = "chosen"  # column of the better reply: chat messages, or a string (the assistant's)
    rejected_key: str = "rejected"  # column of the worse reply, likewise
    max_length: int = 1024  # limit of a prompt and a reply together, in tokens
    # pairs over max_length, of two equal replies, or whose template changes the prompt: stop, or leave out
    bad_pairs: Literal["error", "drop"] = "error"
    packing: bool = bool(find_spec("flash_attn"))  # rows in one without padding; sdpa: by a dense mask
    # ---- model
    model: str  # Hugging Face directory or hub name: a causal LM, or a sequence classifier with one label
    tokenizer: str | None = None  # Hugging Face directory or hub name; None: the model's
    attn_implementation: str | None = None  # None: flash_attention_2 where it is installed, else sdpa
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters and optimizer state
    # of forward and backward; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    gradient_checkpointing: bool = True  # recompute activations in the backward pass
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    lora_rank: int = 0  # rank of the LoRA adapters, trained with the head and nothing else; 0: the model
    lora_alpha: float = 16  # the adapters' output is scaled by lora_alpha / lora_rank
    lora_target_modules: tuple[str, ...] = ("all-linear",)  # names of layers; all-linear: all but the head
    merge_lora: bool = False  # hf/ is the model with the adapters in its weights; else adapters and head
    # ---- optimizer
    train_batch_size: int = 64  # pairs of a step, over all ranks
    lr: float = 1e-5  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # decay to 0 at the last step
    warmup_steps: int = 10  # steps of linear warm-up
    decay_steps: int = 0  # last steps, which alone decay (warm-up-stable-decay); 0: all after warm-up
    weight_decay: float = 0.01  # AdamW's decoupled weight decay
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    center_rewards_coef: float = 0.0  # weight of (r_chosen + r_rejected)^2, which keeps scores around 0

    def __post_init__(self):
        flash = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
        self.attn_implementation = self.attn_implementation or flash
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import jinja2
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import is_flash_attn_2_available, logging

from data_prep.cache import IDS, prepare
from data_prep.images import auto_class, never_sampled
from data_prep.schema import open_parquet
from data_prep.tracking import Logger, check_tracker, leave, matmul_speed, ranks_on


# ---- The mathematics ---------------------------------------------------------------------------------------
def pair_loss(chosen_n, rejected_n, margin_n, center):
    """-log sigma(r_c - r_r - m) + center (r_c + r_r)^2 of each pair.

    Scores 2 and 1, margin 1, center .1 -> log 2 + .9; scores 0 and 0 without a margin -> log 2.
    """
    loss_n = -nn.functional.logsigmoid(chosen_n - rejected_n - margin_n)  # eq: rm.loss
    return loss_n + center * (chosen_n + rejected_n) ** 2  # eq: rm.center


def pair_metrics(chosen_n, rejected_n):
    """What validation and log show of each pair; a tie is half right. Scores 2 and 1 -> 1, 2, 1, 1."""
    right_n = (1 + torch.sign(chosen_n - rejected_n)) / 2
    return dict(accuracy=right_n, chosen=chosen_n, rejected=rejected_n, margins=chosen_n - rejected_n)


def scheduled_rate(args, step, total_steps):
    """learning_rate, held at its peak until the last decay_steps.

    Ten steps, two of warm-up, three of linear decay -> 1/2 1 | 1 1 1 1 1 | 1 2/3 1/3 of the peak.
    """
    held = max(0, total_steps - args.warmup_steps - args.decay_steps) if args.decay_steps else 0
    return learning_rate(args, max(min(step, args.warmup_steps + 1), step - held), total_steps - held)


# ---- The step ----------------------------------------------------------------------------------------------
def conversation_ids(prompt, reply, tokenizer, pad_id):
    """-> ids of a conversation as ppo.py gives it to a reward model; whether its prompt is as if alone.

    CAREFUL: a sequence classifier reads its score at the last token that is not its pad. Pads at the end, as
    where EOS is the pad, go: what follows the score has no effect on it.
    """
    prompt = [dict(role="user", content=prompt)] if isinstance(prompt, str) else prompt
    reply = [dict(role="assistant", content=reply)] if isinstance(reply, str) else reply
    present = lambda messages: [{k: v for k, v in m.items() if v is not None} for m in messages]
    text, alone = (
        tokenizer.apply_chat_template(present(messages), tokenize=False)
        for messages in ([*prompt, *reply], prompt)
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    while ids and ids[-1] == pad_id:
        ids.pop()
    return ids, text.startswith(alone)


def pair(prompt, chosen, rejected, margin, tokenizer, pad_id, max_length):
    """-> a row of two conversations, or None; and why it can be no pair, or None."""
    (chosen, same), (rejected, also) = (
        conversation_ids(prompt, reply, tokenizer, pad_id) for reply in (chosen, rejected)
    )
    longest = max(len(chosen), len(rejected))
    if not (same and also):
        return None, "the chat template writes the prompt differently before a reply"
    if chosen == rejected:
        return None, "the chosen and the rejected conversation are the same tokens"
    if not (chosen and rejected):
        return None, "a conversation has no token but padding"
    if not math.isfinite(margin):
        return None, f"the margin {margin} is not a number"
    if longest > max_length:
        return None, f"a conversation has {longest} tokens, over --max_length {max_length}; raise it"
    return dict(chosen_ids=chosen, rejected_ids=rejected, margin=float(margin)), None


def score(policy, conversations, layout):
    """Scores [L] of lists of token ids, none empty, and what the head made them of, [L, H]."""
    device = next(policy.parameters()).device
    # a layout says what comes before a response; one of a single token stands where the score is
    inputs, before = layout([ids[:-1] for ids in conversations], [ids[-1:] for ids in conversations])
    inputs = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
    return policy((torch.cat(before) + 1).to(device), **inputs)


def micro_batches(policy, rows, args):
    """This rank's share of the pairs, which are equal on all ranks -> chosen_n, rejected_n, margin_n, n.

    Both conversations of a pair are in one micro-batch. n: how many pairs; an empty micro-batch runs a dummy
    pair and n is 0: times 0 its loss is a zero that still has a gradient.
    """
    mine = [rows[i] for i in balance(pair_lengths(rows), dist.get_world_size())[dist.get_rank()]]
    widths = [2 * max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in mine]
    dummy, budget = dict(chosen_ids=[0], rejected_ids=[0], margin=0.0), args.max_tokens_per_microbatch
    if args.packing:
        parts, layout = pack(pair_lengths(mine), budget), packed
    else:
        parts, layout = split_micro_batches(widths, budget, one_row=False), padded
    for number, part in enumerate(parts, 1):
        policy.set_requires_all_reduce(number == len(parts))  # over the replicas of HSDP
        batch = [mine[i] for i in part] or [dummy]
        score_l, _ = score(policy, [row[k] for k in ("chosen_ids", "rejected_ids") for row in batch], layout)
        chosen_n, rejected_n = score_l.chunk(2)
        yield chosen_n, rejected_n, chosen_n.new_tensor([row["margin"] for row in batch]), len(part)


def update_scorer(policy, optimizer, rows, args):
    """One optimizer step -> metrics. The denominator, the pairs of the step, is the same on all ranks."""
    sums = 0.0
    for chosen_n, rejected_n, margin_n, n in micro_batches(policy, rows, args):
        part = pair_loss(chosen_n, rejected_n, margin_n, args.center_rewards_coef).sum() * bool(n)
        # the rows are those of all ranks, but gradients are averaged over the ranks
        (part * dist.get_world_size() / len(rows)).backward()
        with torch.no_grad():
            found = [x.sum() * bool(n) for x in pair_metrics(chosen_n, rejected_n).values()]
            sums += torch.stack([part.detach(), *found])
    norm = clip_gradients(optimizer, args.grad_clip)
    if math.isfinite(norm):  # the norm of all ranks: they step or skip together
        optimizer.step()
    optimizer.zero_grad()
    names = "train/loss train/accuracy rewards/chosen rewards/rejected rewards/margins".split()
    metrics = {name: x / len(rows) for name, x in zip(names, all_reduce(sums.tolist()), strict=True)}
    return metrics | {"train/grad_norm": norm, "train/skipped_updates": not math.isfinite(norm)}


@torch.no_grad()
def validate(policy, rows, args):
    """Loss, accuracy and margin over all pairs, each weighing the same."""
    sums = 0.0
    for chosen_n, rejected_n, margin_n, n in micro_batches(policy, rows, args):
        found = pair_metrics(chosen_n, rejected_n)
        loss_n = pair_loss(chosen_n, rejected_n, margin_n, args.center_rewards_coef)
        sums += torch.stack([x.sum() for x in (loss_n, found["accuracy"], found["margins"])]) * bool(n)
    names = "val/loss", "val/accuracy", "val/margin"
    return {name: x / len(rows) for name, x in zip(names, all_reduce(sums.tolist()), strict=True)}


def main(args):
    # ---- arguments and data: nothing slow before they are known to be good
    check_args(args)
    checkpoints = open_run(args)
    tokenizer, pad_id, train_rows, val_rows, about = open_pairs(args)
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch

    # ---- model
    device, mesh = setup_distributed(args.hsdp_replicas, args.timeout_s)
    policy, trained = load_scorer(args, mesh, device, pad_id)
    decay = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=args.lr, fused=True, **decay)
    state = load_checkpoint(checkpoints, trained, optimizer)
    check_scores(policy, train_rows, args)
    log = Logger(args, state["step"], total_steps)
    log.say(f"{about}\n{total_steps} steps, {ranks_on(device)}{state['origin']}")
    stop = []  # by SIGTERM: the step in progress is the last
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))

    if val_rows and args.val_before_train and not state["step"]:
        log.log(validate(policy, val_rows, args) | {"training/global_step": 0}, 0)

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
            metrics = update_scorer(policy, optimizer, rows, args)

        # ---- validation
        last = step == total_steps or all_reduce([bool(stop)], dist.ReduceOp.MAX) == [1]
        if val_rows and (last or (args.test_freq and step % args.test_freq == 0)):
            with timed(timing, "testing"):
                metrics |= validate(policy, val_rows, args)
            log.say(f"step {step}: accuracy {metrics['val/accuracy']:.3f}, loss {metrics['val/loss']:.4f}")

        # ---- metrics
        timing["step"] = time.perf_counter() - begin
        lengths = [len(row[name]) for row in rows for name in ("chosen_ids", "rejected_ids")]
        # FLOPs of a rank: 6 a weight and token, 4 if frozen, and causal attention's 6 L H T^2 a row
        weights, config = sum(p.numel() for p in policy.parameters()), policy.lm.config
        width, ranks = config.num_hidden_layers * config.hidden_size, dist.get_world_size()
        flops = sum((4 if args.lora_rank else 6) * n * (weights + width * n) for n in lengths) / ranks
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        metrics |= {
            "train/lr": scheduled_rate(args, step, total_steps),
            "perf/total_num_tokens": sum(lengths),
            "perf/time_per_step": timing["step"],
            "perf/throughput": sum(lengths) / timing["step"] / ranks,
            "perf/mfu/actor": flops / timing["update_actor"] / matmul_speed(args.compute_dtype, device),
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30,
            "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
            "training/global_step": step,
            "training/epoch": epoch,
        }
        log.log(metrics, step, loss="train/loss", accuracy="train/accuracy", tok_s="perf/throughput")

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


class Scorer(nn.Module):
    """A sequence classifier, read at given positions of any layout: one root module, for FSDP."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, where, **inputs):
        """where [L]: flat positions -> scores [L], float32, and the head's input [L, H]."""
        hidden_lh = self.lm.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]
        return self.lm.score(hidden_lh.to(self.lm.score.weight.dtype)).float().sum(
            -1
        ), hidden_lh  # of one column


class HeadAdapters(Adapters):
    """Adapters, and the head, trained in full; hf/ has both."""

    auto, task = AutoModelForSequenceClassification, dict(task_type="SEQ_CLS", modules_to_save=["score"])

    def __init__(self, lm, args):
        head = lm.score.weight.data
        head = head.full_tensor() if isinstance(head, DTensor) else head
        super().__init__(lm, args)
        # a head of its own, whole on every rank as the adapters are: the one that FSDP shards stays frozen
        lm.score = nn.Linear(head.shape[1], 1, bias=False, device=head.device)
        lm.score.weight.data.copy_(head)
        self.register_parameter("score/weight", lm.score.weight)
        self.options = dict(num_labels=1, pad_token_id=lm.config.pad_token_id)


def load_scorer(args, mesh, device, pad_id):
    """-> what `score` calls, and what is trained and saved: the model itself, or its adapters and head."""
    logging.set_verbosity_error()  # that a causal LM has no head is meant
    auto = AutoModelForSequenceClassification
    policy = load_model(args, mesh, device, auto, Scorer, num_labels=1, pad_token_id=pad_id)
    if not is_classifier(policy.lm.config):
        nn.init.zeros_(policy.lm.score.weight)
    return policy, HeadAdapters(policy.lm, args) if args.lora_rank else policy.lm


def is_classifier(config):
    return any("SequenceClassification" in name for name in config.architectures or [])


def check_scores(policy, rows, args):
    """Before the first step: short rows, in the layout that trains, give the head what they give it alone."""
    ids = [row["chosen_ids"][:32] for row in (rows[:4] * 2)[:4]]  # equal on all ranks
    with torch.no_grad():
        _, hidden_lh = score(policy, ids, packed if args.packing else padded)
        kernel = policy.lm.config._attn_implementation
        policy.lm.set_attn_implementation("eager")
        _, own_lh = score(policy, ids, padded)
        policy.lm.set_attn_implementation(kernel)
    gap = ((hidden_lh - own_lh).abs().mean() / own_lh.abs().mean()).item()
    limit = ROUNDING[args.compute_dtype]
    cause = f"{kernel} leaves out a soft cap or sinks: try --attn_implementation eager"
    if args.packing:
        cause = f"packed rows see one another: try --no-packing; or {cause}"
    if not max(all_reduce([gap], dist.ReduceOp.MAX)) < limit:  # so that NaN fails too
        unlike = f"states under {kernel} are not those of eager attention, off by {gap:.3g} of their size"
        fail(f"{args.model} ({policy.lm.config.model_type}): {unlike}, over {limit}; likely {cause}")


def check_args(args):
    """Stop on combinations that cannot work, before anything is loaded."""
    world, flag = int(os.environ.get("WORLD_SIZE", 1)), lambda name: f"--{name} {getattr(args, name)}"
    flash, half = flag("attn_implementation"), args.compute_dtype == "bfloat16"
    short = args.max_tokens_per_microbatch < 2 * args.max_length
    need = f"a pair, twice {flag('max_length')}"
    for wrong, message in (
        (world % args.hsdp_replicas, f"{world} ranks are not a multiple of {flag('hsdp_replicas')}"),
        (short, f"{flag('max_tokens_per_microbatch')} is under {need}"),
        (args.merge_lora and not args.lora_rank, "--merge_lora needs --lora_rank"),
        (flash.endswith("flash_attention_2") and not half, f"{flash} needs --compute_dtype bfloat16"),
    ):
        if wrong:
            fail(message)


def check_classifier(config, args):
    """ValueError or ImportError where no reward model can be made of the model with these arguments."""
    labels = config.num_labels if is_classifier(config) else 1
    config.num_labels = 1
    with torch.device("meta"):  # which raises for a kernel that the model does not run on
        options = dict(attn_implementation=args.attn_implementation)
        lm = AutoModelForSequenceClassification.from_config(config, **options)
    head = getattr(lm, "score", None)
    check_adapters(lm, args)
    for wrong, problem in (
        (labels != 1, f"is a classifier with {labels} labels; a reward model has one score"),
        (config.get_text_config() is not config, "takes more than text: not supported"),
        (getattr(head, "bias", 0) is not None, "as a classifier has no head `score` without a bias"),
        (args.packing and recurrent(config), "passes a state on between packed rows: add --no-packing"),
    ):
        if wrong:
            raise ValueError(f"{args.model} ({config.model_type}) {problem}")


def open_pairs(args):
    """-> tokenizer, the classifier's pad id or None, pairs of training and validation, a line about them."""
    try:
        check_tracker(args)
        check_classifier(config := AutoConfig.from_pretrained(args.model), args)
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
        if tokenizer.chat_template is None:
            raise ValueError(f"{args.tokenizer or args.model}: the tokenizer has no chat template")
        pad_id = config.pad_token_id if config.pad_token_id is not None else tokenizer.pad_token_id
        pad_id = pad_id if pad_id is not None and pad_id < config.vocab_size else None
        train_rows, dropped = read_pairs(args.train_files, args, tokenizer, pad_id)
        val_rows, val_dropped = read_pairs(args.val_files, args, tokenizer, pad_id)
    except (ValueError, OSError, ImportError) as error:
        fail(" ".join(str(error).split()))
    if len(train_rows) < args.train_batch_size:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} training pairs")
    about = f"{len(train_rows)} training, {len(val_rows)} validation pairs ({dropped + val_dropped} dropped)"
    return tokenizer, pad_id, train_rows, val_rows, about


def read_pairs(paths, args, tokenizer, pad_id):
    """-> rows as `pair` makes them, number of dropped ones. A margin that one file has, all must have."""
    columns = [args.prompt_key, args.chosen_key, args.rejected_key]
    if any("margin" in open_parquet(path, columns)[0].schema_arrow.names for path in paths):
        columns.append("margin")

    def example(record, i):
        where = f"{', '.join(paths)}: row {i}"
        texts, margin = [record[column] for column in columns[:3]], record.get("margin", 0.0)
        try:
            row, problem = pair(*texts, margin, tokenizer, pad_id, args.max_length)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{where}: {', '.join(columns)}: {error!r}") from None
        if problem and args.bad_pairs == "error":
            raise ValueError(f"{where}: {problem}; or leave such pairs out by --bad_pairs drop")
        return row

    fields = dict(chosen_ids=IDS, rejected_ids=IDS, margin=pa.float64())
    how, code = (args.max_length, args.bad_pairs, pad_id), (read_pairs, pair, conversation_ids)
    rows, dropped = prepare(paths, tokenizer, columns, (), fields, partial(map, example), how, code)
    if paths and not rows:
        raise ValueError(f"{', '.join(paths)}: --bad_pairs drop leaves no pair")
    return rows, dropped


def pair_lengths(rows):
    """Tokens of each pair; of those on disk without reading them."""
    if isinstance(rows, list):
        return [len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows]
    names = "chosen_ids", "rejected_ids"
    return pc.add(*(pc.list_value_length(rows.column(name)) for name in names)).to_pylist()


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
