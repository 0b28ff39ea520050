"""DPO (arXiv 2305.18290): minimise -log sigma(beta h) over pairs of responses, of which one was chosen, with
h = log(p(chosen) / ref(chosen)) - log(p(rejected) / ref(rejected)), where ref is the model before training.

Departures from the paper:
1. The reference runs once, before training; its log-probs are kept in output_dir, it is never a second model.
2. IPO (2310.12036) and SimPO (2405.14734, no reference) by --loss; an NLL term (2404.19733) by --nll_coef.
3. AdamW, not RMSprop. LoRA (2106.09685) by --lora_rank, QLoRA (2305.14314) by --qlora.

CPU:        python algos/dpo.py --model runs/sft/hf --train_files data/train.parquet --output_dir runs/dpo
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/dpo.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 algos/dpo.py
Docs: docs/dpo.md
"""

import ctypes
import faulthandler
import hashlib
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
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.arguments import parse

# Shapes: n pairs, N = 2 n responses (chosen, rejected, chosen ...), T response tokens, V vocabulary. A suffix
# names the axes (logp_nt, reward_n2). T is aligned with the response: column t speaks of response token t.


@dataclass(kw_only=True)
class Args:
    # ---- run
    output_dir: str  # directory of the run: arguments, metrics, log, reference's log-probs, checkpoints
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
    train_files: tuple[str, ...]  # parquet files of training pairs
    val_files: tuple[str, ...] = ()  # parquet files of validation pairs; none: no validation
    prompt_key: str = "prompt"  # column of the prompt: chat messages, or a string (one user message)
    chosen_key: str = "chosen"  # column of the chosen response: messages, or a string (the assistant's)
    rejected_key: str = "rejected"  # column of the rejected response, likewise
    max_length: int = 1024  # limit of prompt and response together, in tokens, EOS included
    bad_pairs: Literal["error", "drop"] = "error"  # equal, empty, too long ...: stop, or drop and count
    packing: bool = bool(find_spec("flash_attn"))  # rows in one without padding; sdpa: by a dense mask
    # ---- model
    model: str  # Hugging Face directory or hub name of the model to train, which is also the reference
    tokenizer: str | None = None  # Hugging Face directory or hub name; None: the model's
    attn_implementation: str | None = None  # None: flash_attention_2 where it is installed, else sdpa
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters and optimizer state
    # of forward and backward; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    gradient_checkpointing: bool = True  # recompute activations in the backward pass
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    share_prefix: bool = False  # compute a prompt once for both responses; needs sdpa and no packing
    lora_rank: int = 0  # rank of the LoRA adapters, which are then all that is trained; 0: the model itself
    lora_alpha: float = 16  # the adapters' output is scaled by lora_alpha / lora_rank
    lora_target_modules: tuple[str, ...] = ("all-linear",)  # names of layers; all-linear: all but the output
    qlora: bool = False  # frozen weights in 4 bits (bitsandbytes), whole on every rank; needs lora_rank
    merge_lora: bool = False  # hf/ is the model with the adapters in its weights; else only the adapters
    # ---- optimizer
    train_batch_size: int = 64  # pairs of a step, over all ranks
    lr: float = 1e-6  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # decay to 0 at the last step
    warmup_steps: int = 10  # steps of linear warm-up
    decay_steps: int = 0  # last steps, which alone decay (warm-up-stable-decay); 0: all after warm-up
    weight_decay: float = 0.01  # AdamW's decoupled weight decay
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    loss: Literal["sigmoid", "ipo", "simpo"] = "sigmoid"  # sigmoid: DPO
    beta: float = 0.1  # weight of the implicit reward; ipo: the paper's tau; simpo: its paper has 2 to 10
    label_smoothing: float = 0.0  # share of the pairs taken to be the wrong way round; not of ipo
    simpo_gamma: float = 0.5  # margin by which simpo wants the chosen reward to be the larger one
    nll_coef: float = 0.0  # weight of the negative log-likelihood of the chosen responses

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
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import is_flash_attn_2_available, logging

from data_prep.atomic import replacing
from data_prep.cache import BOOLS, IDS, prepare
from data_prep.images import auto_class, never_sampled
from data_prep.tracking import Logger, check_tracker, leave, matmul_speed, ranks_on
from data_prep.turns import turns


# ---- The mathematics ---------------------------------------------------------------------------------------
def preference_loss(args, logp_n2, reference_n2, tokens_n2):
    """Of log-probs of chosen and rejected responses -> the loss of each pair, the rewards of its responses.

    beta .1, log-probs -10 -12, the reference's -11 -11 -> rewards .1 -.1, sigmoid: -log sigma(.2) = .598;
    of 2 and 4 tokens -> ipo: (1/2 + 1/4 - 5)^2 = 18.06; simpo: rewards -.5 -.3, -log sigma(-.2 - .5) = 1.103.
    """
    ratio_n2 = logp_n2 - reference_n2
    reward_n2 = args.beta * ratio_n2  # eq: dpo.reward
    if args.loss == "ipo":
        mean_n2 = ratio_n2 / tokens_n2
        return (mean_n2[:, 0] - mean_n2[:, 1] - 1 / (2 * args.beta)) ** 2, reward_n2  # eq: dpo.ipo
    if args.loss == "simpo":
        reward_n2 = args.beta * logp_n2 / tokens_n2  # eq: dpo.simpo
    h_n = reward_n2[:, 0] - reward_n2[:, 1] - args.simpo_gamma * (args.loss == "simpo")
    e, log_sigma = args.label_smoothing, nn.functional.logsigmoid
    return -(1 - e) * log_sigma(h_n) - e * log_sigma(-h_n), reward_n2  # eq: dpo.sigmoid


def scheduled_rate(args, step, total_steps):
    """learning_rate, held at its peak until the last decay_steps.

    Ten steps, two of warm-up, three of linear decay -> 1/2 1 | 1 1 1 1 1 | 1 2/3 1/3 of the peak.
    """
    held = max(0, total_steps - args.warmup_steps - args.decay_steps) if args.decay_steps else 0
    return learning_rate(args, max(min(step, args.warmup_steps + 1), step - held), total_steps - held)


# ---- The step ----------------------------------------------------------------------------------------------
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


def encode_pair(prompt, chosen, rejected, tokenizer, max_length):
    """Messages, or strings -> a pair: ids of the prompt and of both responses, which of these are trained.

    ValueError where there is nothing to prefer. What is trained are the assistant's turns of a response.
    """
    said = lambda role, x: [dict(role=role, content=x)] if isinstance(x, str) else x
    pair, names, prompt = {}, ("chosen", "rejected"), said("user", prompt)
    earlier = any(message["role"] == "assistant" for message in prompt)
    earlier = sum(encode_messages(prompt, tokenizer)[1]) if earlier else 0  # the prompt's own turns
    for name, reply in zip(names, (said("assistant", chosen), said("assistant", rejected))):
        if not "".join(message["content"] for message in reply).strip():
            raise ValueError(f"{name!r} is empty")
        ids, trained = encode_messages(prompt + reply, tokenizer)
        if len(ids) > max_length:
            raise ValueError(
                f"{name!r} has {len(ids)} tokens with its prompt, over --max_length {max_length}"
            )
        for i in np.flatnonzero(trained)[:earlier]:
            trained[i] = False
        if not (row := split(ids, trained)):
            raise ValueError(f"{name!r} has no turn of the assistant")
        if row["prompt_ids"] != pair.setdefault("prompt_ids", row["prompt_ids"]):
            raise ValueError("the prompts of 'chosen' and 'rejected' differ after the chat template")
        pair |= {f"{name}_ids": row["response_ids"], f"{name}_trained": row["trained"]}
    if pair["chosen_ids"] == pair["rejected_ids"]:
        raise ValueError("'chosen' and 'rejected' are equal")
    return pair | dict(tokens=[sum(pair[f"{name}_trained"]) for name in names])


def texts(rows):
    """Prompt, response and which of it is trained, of both responses to each pair, side by side."""
    both = [(row, name) for row in rows for name in ("chosen", "rejected")]
    prompts, responses = ([row[x.format(name)] for row, name in both] for x in ("prompt_ids", "{}_ids"))
    return prompts, responses, [row[f"{name}_trained"] for row, name in both]


def pair_sizes(rows, args):
    """Tokens that each pair takes in the layout that trains, the padding of its shorter response included."""
    sizes = [[len(row[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")] for row in rows]
    if args.share_prefix:
        return [sum(size) for size in sizes]
    return [2 * p + (a + b if args.packing else 2 * max(a, b)) for p, a, b in sizes]


def micro_batches(policy, rows, args):
    """This rank's share of the pairs, which are equal on all ranks -> those of each micro-batch, and logp_n2.

    logp_n2: sums over the trained tokens. An empty micro-batch runs a dummy pair and yields [0, 2], whose sum
    is a zero that still has a gradient.
    """
    mine = [rows[i] for i in balance(pair_sizes(rows, args), dist.get_world_size())[dist.get_rank()]]
    dummy = dict(prompt_ids=[0], chosen_ids=[0], rejected_ids=[0])
    dummy |= dict(chosen_trained=[False], rejected_trained=[False])
    split_rows = pack if args.packing else partial(split_micro_batches, one_row=False)
    parts = split_rows(pair_sizes(mine, args), args.max_tokens_per_microbatch)
    for number, part in enumerate(parts, 1):
        if not args.qlora:  # over the replicas of HSDP
            policy.set_requires_all_reduce(number == len(parts))
        batch = [mine[i] for i in part]
        prompts, responses, trained = texts(batch or [dummy])
        logp_nt, _ = token_logps(policy, prompts, responses, 1.0, layout_of(args))
        logp_n2 = (logp_nt * pad(trained).to(logp_nt.device)).sum(-1).view(-1, 2)
        yield batch, logp_n2[: len(batch)]


def objective(args, batch, logp_n2, pairs, tokens):
    """A micro-batch's share of the loss and of what is logged: sums over `pairs`, those of the whole step.

    tokens: of all chosen responses.
    """
    columns = (np.array([row[name] for row in batch]) for name in ("reference", "tokens"))
    reference_n2, tokens_n2 = (torch.as_tensor(x).view(-1, 2).to(logp_n2) for x in columns)
    loss_n, reward_n2 = preference_loss(args, logp_n2, reference_n2, tokens_n2)
    nll = -logp_n2[:, 0].sum() / tokens  # eq: dpo.nll
    loss = loss_n.sum() / pairs + args.nll_coef * nll  # eq: dpo.loss
    chosen_n, rejected_n = reward_n2.unbind(1)
    sums = {
        "rewards/chosen": chosen_n,
        "rewards/rejected": rejected_n,
        "rewards/accuracies": chosen_n > rejected_n,
        "rewards/margins": chosen_n - rejected_n,
        "logps/chosen": logp_n2[:, 0],
        "logps/rejected": logp_n2[:, 1],
    }
    return dict(loss=loss, nll_loss=nll) | {name: x.sum() / pairs for name, x in sums.items()}


def update(policy, optimizer, rows, args):
    """One optimizer step -> metrics. Every rank knows all rows: the denominators need no communication."""
    sums, tokens = 0.0, sum(row["tokens"][0] for row in rows)
    for batch, logp_n2 in micro_batches(policy, rows, args):
        terms = objective(args, batch, logp_n2, len(rows), tokens)
        # the denominators are of all ranks, but gradients are averaged over the ranks
        (terms["loss"] * dist.get_world_size()).backward()
        sums += torch.stack([*terms.values()]).detach()
    norm = clip_gradients(optimizer, args.grad_clip)
    if math.isfinite(norm):  # the norm of all ranks: they step or skip together
        optimizer.step()
    optimizer.zero_grad()
    metrics = dict(zip(terms, all_reduce(sums.tolist())))
    metrics = {name if "/" in name else f"train/{name}": value for name, value in metrics.items()}
    return metrics | {"train/grad_norm": norm, "train/skipped_updates": not math.isfinite(norm)}


def in_steps(rows, order, args, **columns):
    """The rows in this order, as many at a time as a step has, each with its number and value of columns."""
    for numbers in np.array_split(order, range(args.train_batch_size, len(order), args.train_batch_size)):
        yield [rows[i] | dict(number=i) | {name: x[i] for name, x in columns.items()} for i in numbers]


@torch.no_grad()
def evaluate(policy, rows, reference, args):
    """Loss and metrics over all rows, each pair weighing the same."""
    sums, tokens = 0.0, sum(chosen for chosen, _ in rows.column("tokens").to_pylist())
    for step in in_steps(rows, range(len(rows)), args, reference=reference):
        for batch, logp_n2 in micro_batches(policy, step, args):
            terms = objective(args, batch, logp_n2, len(rows), tokens)
            sums += torch.stack([*terms.values()])
    return {f"val/{name}": value for name, value in zip(terms, all_reduce(sums.tolist()))}


@torch.no_grad()
def reference_logps(policy, rows, order, args):
    """Log-probs of both responses to each row, [rows, 2], by the model as it was loaded; kept in output_dir.

    Before training, in the order and micro-batches of the first epoch, which finds the same bits.
    """
    if args.loss == "simpo" or not rows:
        return np.zeros((len(rows), 2), np.float32)
    digest, found = hashlib.sha256(args.model.encode()), [None]
    for name in ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_trained", "rejected_trained"):
        column = rows.column(name)
        for part in (pc.list_flatten(column), pc.list_value_length(column)):
            digest.update(part.to_numpy().tobytes())
    path, rank = Path(args.output_dir, f"reference/{digest.hexdigest()[:32]}.npy"), dist.get_rank()
    with suppress(OSError, ValueError, EOFError):  # not there, or damaged
        found = [None if rank else np.load(path)]
    dist.broadcast_object_list(found)
    if found[0] is not None:
        return found[0]
    sums = torch.zeros(len(rows), 2)
    with tqdm(total=len(rows), desc="reference", disable=rank > 0) as bar:
        for step in in_steps(rows, order, args):
            for batch, logp_n2 in micro_batches(policy, step, args):
                sums[[row["number"] for row in batch]] = logp_n2.cpu()
            bar.update(len(step))
    dist.all_reduce(sums)  # each row is one rank's, and 0 on the others
    keep(path, sums.numpy())
    return sums.numpy()


def main(args):
    # ---- arguments and data: nothing slow before they are known to be good
    check_args(args)
    checkpoints = open_run(args)
    tokenizer, train_rows, val_rows, about = load_data(args)
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch
    order_of = lambda epoch: np.random.default_rng((args.seed, epoch)).permutation(len(train_rows))

    # ---- model
    device, mesh = setup_distributed(args.hsdp_replicas, args.timeout_s)
    policy, trained = load_policy(args, mesh, device)
    check_layout(policy, train_rows, args)
    # CAREFUL: before a checkpoint is loaded, for the weights are the reference's only until then
    reference = reference_logps(policy, train_rows, order_of(0), args)
    val_reference = reference_logps(policy, val_rows, range(len(val_rows)), args)
    decay = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=args.lr, fused=True, **decay)
    state = load_checkpoint(checkpoints, trained, optimizer)
    log = Logger(args, state["step"], total_steps)
    log.say(f"{about}\n{total_steps} steps, {ranks_on(device)}{state['origin']}")
    stop = []  # by SIGTERM: the step in progress is the last
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))

    if val_rows and args.val_before_train and not state["step"]:
        log.log(evaluate(policy, val_rows, val_reference, args) | {"training/global_step": 0}, 0)

    saving = {}  # seconds of the last checkpoint: reported by the step after it
    for step in range(state["step"] + 1, total_steps + 1):
        timing, saving, begin = saving, {}, time.perf_counter()
        faulthandler.dump_traceback_later(args.timeout_s + dist.get_node_local_rank() / 4)  # stacks, in turn
        epoch, number = divmod(step - 1, steps_per_epoch)
        numbers = order_of(epoch)[number * args.train_batch_size :][: args.train_batch_size]
        [rows] = in_steps(train_rows, numbers, args, reference=reference)

        # ---- update
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(args, step, total_steps)
        with timed(timing, "update_actor"):
            metrics = update(policy, optimizer, rows, args)

        # ---- validation
        last = step == total_steps or all_reduce([bool(stop)], dist.ReduceOp.MAX) == [1]
        if val_rows and (last or (args.test_freq and step % args.test_freq == 0)):
            with timed(timing, "testing"):
                metrics |= evaluate(policy, val_rows, val_reference, args)
            accuracy = metrics["val/rewards/accuracies"]
            log.say(f"step {step}: validation loss {metrics['val/loss']:.4f}, accuracy {accuracy:.3f}")

        # ---- metrics
        timing["step"], ranks = time.perf_counter() - begin, dist.get_world_size()
        sequences = [*map(len, map(join, *texts(rows)[:2]))]
        # FLOPs of a rank: 6 a weight and token, 4 if frozen, and causal attention's 6 L H T^2 a sequence
        weights, config = sum(p.numel() for p in policy.parameters()), policy.lm.config
        width = config.num_hidden_layers * config.hidden_size
        flops = sum((4 if args.lora_rank else 6) * n * (weights + width * n) for n in sequences) / ranks
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        metrics |= {
            "train/lr": scheduled_rate(args, step, total_steps),
            "perf/total_num_tokens": sum(sequences),
            "perf/time_per_step": timing["step"],
            "perf/throughput": sum(sequences) / timing["step"] / ranks,
            "perf/mfu/actor": flops / timing["update_actor"] / matmul_speed(args.compute_dtype, device),
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30,
            "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
            "training/global_step": step,
            "training/epoch": epoch,
        }
        log.log(metrics, step, loss="train/loss", acc="rewards/accuracies", tok_s="perf/throughput")

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


class Policy(TokenLogps):
    """TokenLogps; at temperature None of the model's own logits."""

    def forward(self, where, target, temperature, **inputs):
        """As TokenLogps."""
        if temperature is None:
            logits = self.lm(**inputs, use_cache=False).logits.flatten(0, 1)[where].float()
            return (logits.log_softmax(-1).gather(-1, target[:, None])[:, 0],) * 2
        return super().forward(where, target, temperature, **inputs)


def load_policy(args, mesh, device):
    """-> what `micro_batches` calls, and what is trained and saved: the model itself, or its adapters."""
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
    return policy, Adapters(policy.lm, args) if args.lora_rank else policy.lm


def paired(prompts, responses):
    """Two responses to a prompt share a row, which computes it once: see `padded`.

    Prompt a b, responses c d and e -> row a b c d e at positions 0 1 2 3 2, where e sees a, b and itself.
    """
    columns, where = [], []
    for prompt, *answers in zip(prompts[::2], responses[::2], responses[1::2]):
        sizes = [len(prompt), *map(len, answers)]
        branch = torch.arange(3).repeat_interleave(torch.tensor(sizes))
        position = torch.cat([torch.arange(n) + len(prompt) * (i > 0) for i, n in enumerate(sizes)])
        columns.append((join(prompt, *answers), position, branch))
        for start, answer in zip(accumulate(sizes), answers):
            where.append(torch.arange(start - 1, start - 1 + len(answer)))
            where[-1][0] = len(prompt) - 1  # the prompt's last token predicts the first of each response
    input_ids, position_ids, branch = map(pad, zip(*columns))
    where = [before + i // 2 * input_ids.shape[1] for i, before in enumerate(where)]
    related = (branch[:, None] == 0) | (branch[:, None] == branch[:, :, None])  # [n, query, key]
    return dict(input_ids=input_ids, position_ids=position_ids, attention_mask=related.tril()[:, None]), where


def layout_of(args):
    """The layout that this run trains in."""
    return packed if args.packing else paired if args.share_prefix else padded


def check_layout(policy, rows, args):
    """Before the first step: in the layout that trains, short rows have the model's own log-probs."""
    prompts, responses, _ = texts((rows[:4] * 4)[:4])  # equal on all ranks
    short, lm = ([x[-16:] for x in prompts], [x[:16] for x in responses]), policy.lm
    with torch.no_grad():
        logp_nt, _ = token_logps(policy, *short, 1.0, layout_of(args))
        kernel = lm.config._attn_implementation
        lm.set_attn_implementation("eager")
        own_nt, _ = token_logps(policy, *short, None, padded)
        lm.set_attn_implementation(kernel)
    gap = all_reduce([(logp_nt - own_nt).abs().sum().item()])[0] / dist.get_world_size()
    gap, kernel, limit = gap / sum(map(len, short[1])), args.attn_implementation, ROUNDING[args.compute_dtype]
    cause = f"{kernel} leaves out a soft cap or sinks: try --attn_implementation eager"
    if kernel == "eager":
        cause = "it does something to its logits that TokenLogps leaves out"
    if args.packing or args.share_prefix:
        without = "packing" if args.packing else "share_prefix"
        cause = f"responses see one another: try --no-{without}; or {cause}"
    if not gap < limit:  # so that NaN fails too
        unlike = f"log-probs of {layout_of(args).__name__} rows under {kernel} are not its own"
        name = f"{args.model} ({lm.config.model_type})"
        fail(f"{name}: {unlike}, off by {gap:.3g} on average, over {limit}; likely {cause}")


def check_args(args):
    """Stop on combinations that cannot work, before anything is loaded."""
    world, flag = int(os.environ.get("WORLD_SIZE", 1)), lambda name: f"--{name} {getattr(args, name)}"
    flash, half = flag("attn_implementation"), args.compute_dtype == "bfloat16"
    short, smooth = args.max_tokens_per_microbatch < 2 * args.max_length, args.label_smoothing
    pair = f"a pair of responses of {flag('max_length')}, {2 * args.max_length} tokens"
    for wrong, message in (
        (world % args.hsdp_replicas, f"{world} ranks are not a multiple of {flag('hsdp_replicas')}"),
        (short, f"{flag('max_tokens_per_microbatch')} is less than {pair}, which is never cut"),
        ((args.qlora or args.merge_lora) and not args.lora_rank, "--qlora, --merge_lora need --lora_rank"),
        (args.qlora and not find_spec("bitsandbytes"), "--qlora needs bitsandbytes (pip install)"),
        (flash.endswith("flash_attention_2") and not half, f"{flash} needs --compute_dtype bfloat16"),
        (args.share_prefix and args.packing, "--share_prefix needs a row for each pair: add --no-packing"),
        (args.share_prefix and not flash.endswith("sdpa"), f"--share_prefix needs sdpa, not {flash}"),
        (args.beta <= 0, f"{flag('beta')} must be above 0"),
        (not 0 <= smooth < 0.5, f"{flag('label_smoothing')} must be from 0 to below .5"),
        (smooth and args.loss == "ipo", f"--loss ipo has no {flag('label_smoothing')}: pass 0"),
    ):
        if wrong:
            fail(message)


def check_model(config, args):
    """ValueError or ImportError where the model cannot be trained with these arguments."""
    with torch.device("meta"):  # which raises for a kernel that the model does not run on
        lm = AutoModelForCausalLM.from_config(config, attn_implementation=args.attn_implementation)
    check_adapters(TokenLogps(lm).lm, args)  # TokenLogps refuses a bias of the output layer
    special = "sliding_window", "attention_chunk_size"
    special = [name for name in special if getattr(config, name, None)] + ["a state"] * recurrent(config)
    for wrong, problem in (
        (config.get_text_config() is not config, "takes more than text: not supported"),
        (args.packing and recurrent(config), "passes a state on between packed rows: add --no-packing"),
        (args.share_prefix and special, f"has {' and '.join(special)}: --share_prefix needs full attention"),
    ):
        if wrong:
            raise ValueError(f"{args.model} ({config.model_type}) {problem}")


def load_data(args):
    """-> tokenizer, pairs of training and of validation, and a line about them."""
    try:
        check_tracker(args)
        check_model(AutoConfig.from_pretrained(args.model), args)
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{args.tokenizer or args.model}: the tokenizer has no EOS token")
        train_rows, dropped = load_pairs(args.train_files, args, tokenizer)
        val_rows, val_dropped = load_pairs(args.val_files, args, tokenizer)
    except (ValueError, OSError, ImportError) as error:
        fail(" ".join(str(error).split()))
    if len(train_rows) < args.train_batch_size:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} training pairs")
    lost = f"({dropped} and {val_dropped} dropped)"
    return (
        tokenizer,
        train_rows,
        val_rows,
        f"{len(train_rows)} training, {len(val_rows)} validation pairs {lost}",
    )


def load_pairs(paths, args, tokenizer):
    """-> pairs as `encode_pair` makes them, number of those that --bad_pairs dropped."""
    columns = [args.prompt_key, args.chosen_key, args.rejected_key]

    def example(record, i):
        try:
            return encode_pair(*(record[name] for name in columns), tokenizer, args.max_length)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            if args.bad_pairs == "drop":
                return None
            remedy = "mend it, or drop such pairs by --bad_pairs drop"
            raise ValueError(f"{', '.join(paths)}: row {i}: {error}; {remedy}") from None

    ids = ("prompt_ids", "chosen_ids", "rejected_ids", "tokens")
    fields = dict.fromkeys(ids, IDS) | dict.fromkeys(("chosen_trained", "rejected_trained"), BOOLS)
    how, code = (args.max_length, args.bad_pairs), (load_pairs, encode_pair, encode_messages, split)
    rows, dropped = prepare(paths, tokenizer, columns, (), fields, partial(map, example), how, code)
    if paths and not rows:
        raise ValueError(f"{', '.join(paths)}: --bad_pairs drop leaves no pair")
    return rows, dropped


def keep(path, logp_n2):
    """Rank 0 writes the reference's log-probs whole; where it cannot, all ranks stop with one line."""
    problem = [None]
    try:
        if dist.get_rank() == 0:
            np.save(whole := BytesIO(), logp_n2)  # CAREFUL: into a file it says nothing of a lost end
            with replacing(path) as new:
                new.write_bytes(whole.getbuffer())
    except OSError as error:
        free = f"{shutil.disk_usage(path.parents[1]).free / 2**30:.1f} GiB are free"
        problem = [f"{path}: the reference's log-probs cannot be written ({error}); {free}: make room"]
    dist.broadcast_object_list(problem)
    if problem[0]:
        fail(problem[0])


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
