"""DAPO (arXiv 2503.14476): maximise E[min(r A, clip(r, 1-low, 1+high) A)] over groups with right and wrong
responses, where A is a response's score relative to the other responses to the same prompt.

Departures from the paper:
1. The keep rate so far sets the size of a generation batch; surplus groups wait for the next step.
2. Dual clip (1912.09729, eq. 5) is there.
3. The sampler's rounding and the age of surplus groups are corrected by importance sampling (`--tis_cap`).

CPU:        python algos/dapo.py --model runs/tiny/hf --train_files data/train.parquet --output_dir runs/dapo
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/dapo.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/dapo.md
"""

import ctypes
import hashlib
import json
import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate, chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from safetensors import SafetensorError
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.benchmark import Timer
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.schema import load_prompts
from rewards import check_sources
from rewards.combined import load_rewards
from rewards.manager import RewardManager, failure_metrics, validation_metrics

# Shapes: B prompts, G responses each, N = B * G, P prompt tokens, T response tokens, V vocabulary. A suffix
# names the axes (logp_nt). T is aligned with the response: column t speaks of response token t.


@dataclass
class Args:
    model: str
    """Hugging Face directory or hub name of the model to train."""
    train_files: tuple[str, ...]
    """Parquet files of training prompts."""
    output_dir: str
    """Directory of the run: arguments, metrics, log, rollouts, checkpoints."""
    val_files: tuple[str, ...] = ()
    """Parquet files of validation prompts; none: no validation."""
    tokenizer: str | None = None
    """Hugging Face directory or hub name of the tokenizer; None: the model's."""
    resume: str = "auto"
    """auto: from output_dir's latest checkpoint, if any; never: refuse a used output_dir; or a checkpoint."""
    seed: int = 1
    """Seed of the data order and, with step, prompt and sample number, of every response."""
    total_epochs: int = 1
    """Passes over the training data."""
    total_steps: int | None = None
    """RL steps in all; None: total_epochs."""
    save_freq: int = 50
    """Steps between checkpoints; 0: only at the end."""
    test_freq: int = 10
    """Steps between validations; 0: only before and after training."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept; 0: all."""
    save_hf: bool = True
    """Also write each checkpoint's weights as a Hugging Face directory (hf/)."""
    wandb_project: str | None = None
    """Weights & Biases project; None: only metrics.jsonl."""
    timeout_s: float = 3600.0
    """Seconds that a rank waits for the others before the run ends."""
    num_examine: int = 1
    """Responses of each data source that are shown in a table at every validation."""
    rollout_dump: bool = False
    """Write every training response to output_dir/rollouts."""

    max_prompt_length: int = 512
    """Limit of the prompt in tokens."""
    max_response_length: int = 1024
    """Limit of the response in tokens."""
    filter_overlong_prompts: bool = True
    """Drop and count prompts over the limit; otherwise they are an error."""

    attn_implementation: str = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    """Attention kernel of transformers; with flash attention rows are packed without padding."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of parameters and optimizer state."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16" if torch.cuda.is_available() else "float32"
    """Precision of forward, backward and sampler."""
    hsdp_replicas: int = 1
    """Copies of the sharded model (HSDP); 1: shard over all ranks."""
    share_prefix: bool = False
    """Compute a prompt once for all responses to it that fit in a micro-batch; pays if they are short."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass."""
    max_tokens_per_microbatch: int = 8192
    """Tokens of a forward pass on one rank, padding included."""
    offload: bool = False
    """Move parameters and optimizer state to host memory while the sampler runs (GPU only)."""

    train_batch_size: int = 64
    """Prompts of a step, over all ranks."""
    ppo_mini_batch_size: int = 64
    """Prompts of an optimizer step, over all ranks."""
    ppo_epochs: int = 1
    """Passes over the responses of a step."""
    group_size: int = 8
    """Responses to each prompt."""
    temperature: float = 1.0
    """Sampling temperature; log-probs of the trainer are taken at the same."""
    top_p: float = 1.0
    """Nucleus sampling; below 1 only without tis_cap."""
    top_k: int = -1
    """Top-k sampling; -1: off, else only without tis_cap."""
    tp_size: int = 1
    """Ranks that share one sampler by tensor parallelism."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU's memory that the awake sampler takes."""
    sync_check_freq: int = 10
    """Steps between checks that sampler and trainer hold the same weights; the first is always checked."""

    lr: float = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, to 0 at the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    grad_clip: float = 1.0
    """Largest gradient norm."""

    max_gen_batches: int = 10
    """Generation batches of a step; without enough groups of right and wrong responses then, stop."""
    allow_partial_batch: bool = False
    """Rather than stop, train on the groups that there are."""
    carry_over: bool = True
    """Train on surplus groups in the next step; off: throw them away, as the published code does."""
    overlong_buffer: int | None = None
    """Tokens below max_response_length that are punished; None: a fifth of it, as in the paper; 0: off."""
    overlong_penalty: float = 1.0
    """Punishment at max_response_length; it grows linearly over the buffer."""
    overlong_filtering: bool = False
    """Mask truncated responses out of the loss."""

    adv_estimator: Literal["grpo", "rloo", "reinforce_plus_plus_baseline"] = "grpo"
    """How a response's score becomes its advantage within its group."""
    norm_adv_by_std: bool = True
    """Divide grpo's advantage by the group's standard deviation; off: Dr. GRPO."""
    clip_ratio_low: float = 0.2
    """Ratios below 1 - this are clipped."""
    clip_ratio_high: float = 0.28
    """Ratios above 1 + this are clipped."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the ratio for negative advantages."""
    loss_agg: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How token losses of an optimizer step are averaged; the last is Dr. GRPO's."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    tis_cap: float = 2.0
    """Cap of the importance weight of trainer against sampler; 0: no correction."""

    reward_manager: Literal["naive", "prime"] = "naive"
    """How rewards are computed; naive: in process, one by one; prime: a pool of processes with a time-out."""
    reward_fn: tuple[str, ...] = ("rewards",)
    """Rewards: FILE.py:NAME for your own; `rewards` is the scorer of each row's data_source."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward_fn; none: all 1."""
    reward_aggregation: Literal["sum", "mean", "min"] = "sum"
    """How several rewards become one; min: the worst case."""
    reward_workers: int = 4
    """Processes of the prime manager on each rank."""
    reward_timeout_s: float = 30.0
    """Seconds that the prime manager gives a sample before it scores 0."""
    val_group_size: int = 1
    """Responses to each validation prompt."""
    val_temperature: float = 0.0
    """Sampling temperature of validation."""
    val_before_train: bool = True
    """Validate before the first step."""


# --------------------------------------------------------------------------------------------------
# The mathematics
# --------------------------------------------------------------------------------------------------
# region token_logps
LOGIT_CHUNK = 1024  # response positions whose logits exist at a time: LOGIT_CHUNK * V, not N * T * V


class LogProbs(torch.autograd.Function):
    """hidden [L, H], weight [V, H], target [L] -> log-prob [L] of the targets and entropy [L], in float32.

    A chunk of logits at a time, in both directions, in two buffers. torch.utils.checkpoint takes fewer lines,
    but glibc's malloc finds no room for a chunk where the one before was: small blocks lie there by then.
    """

    @staticmethod
    def chunks(length):
        return [slice(i, min(i + LOGIT_CHUNK, length)) for i in range(0, length or 1, LOGIT_CHUNK)]

    @staticmethod
    def log_softmax(hidden, weight, temperature, buffers):
        """Put the log-probs of a chunk into the second buffer."""
        logits, logp_lv = buffers
        if weight.dtype is logits.dtype:
            torch.mm(hidden, weight.t(), out=logits)  # no new memory
        else:
            logits.copy_(hidden @ weight.t())
        # CAREFUL: the temperature belongs here too, or the ratio compares two different distributions
        torch.log_softmax(logits.div_(temperature), -1, out=logp_lv)

    @staticmethod
    def forward(ctx, hidden, weight, target, temperature):
        logp, entropy = (torch.empty(len(target), device=target.device) for _ in range(2))
        buffers = torch.empty(2, min(len(target), LOGIT_CHUNK), len(weight), device=target.device)
        for part in LogProbs.chunks(len(target)):
            p_lv, logp_lv = chunk = buffers[:, : part.stop - part.start]
            LogProbs.log_softmax(hidden[part], weight, temperature, chunk)
            logp[part] = logp_lv.gather(-1, target[part, None])[:, 0]
            entropy[part] = -torch.exp(logp_lv, out=p_lv).mul_(logp_lv).sum(-1)
        ctx.save_for_backward(hidden, weight, target, entropy, buffers)
        ctx.temperature = temperature
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logp, d_entropy):
        """With p the softmax: d log p(target) = onehot(target) - p, d entropy = -p (log p + entropy)."""
        hidden, weight, target, entropy, buffers = ctx.saved_tensors
        d_logp, d_entropy = (x[:, None] / ctx.temperature for x in (d_logp, d_entropy))
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for i, part in enumerate(reversed(LogProbs.chunks(len(target)))):
            p_lv, logp_lv = chunk = buffers[:, : part.stop - part.start]
            if i:  # the last chunk is still there
                LogProbs.log_softmax(hidden[part], weight, ctx.temperature, chunk)
            torch.exp(logp_lv, out=p_lv)
            d_lv = logp_lv.add_(entropy[part, None]).mul_(-d_entropy[part]).sub_(d_logp[part]).mul_(p_lv)
            d_lv = d_lv.scatter_add_(-1, target[part, None], d_logp[part]).to(weight.dtype)
            torch.mm(d_lv, weight, out=d_hidden[part])
            if d_weight is not None:
                d_weight.addmm_(d_lv.t(), hidden[part])
        return d_hidden, d_weight, None, None


class TokenLogps(nn.Module):
    """A causal LM whose forward returns log-probs of given tokens: one root module, one forward, for FSDP."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            fail(f"{lm.config.name_or_path}: its output layer has a bias, which LogProbs leaves out")

    def forward(self, input_ids, position_ids, attention_mask, where, target, temperature):
        """where [L]: flat positions whose logits predict target [L] -> log-prob [L], entropy [L], float32."""
        layout = dict(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask)
        hidden = self.lm.base_model(**layout, use_cache=False).last_hidden_state.flatten(0, 1)[where]
        return LogProbs.apply(hidden, self.lm.get_output_embeddings().weight, target, temperature)


def padded(prompts, responses):
    """A row each, padded on the right, which causal attention never looks at: a layout for `token_logps`.

    Returns input_ids, position_ids, attention_mask, and for each response the flat positions that predict it.
    """
    pairs = list(zip(prompts, responses, strict=True))
    input_ids = nn.utils.rnn.pad_sequence([torch.tensor(p + r) for p, r in pairs], batch_first=True)
    # labels are shifted against logits in a layout and nowhere else: position p - 1 predicts token p
    before_n = [row * input_ids.shape[1] + len(p) - 1 for row, p in enumerate(prompts)]
    return input_ids, None, None, [torch.arange(n, n + len(r)) for n, r in zip(before_n, responses)]


def packed(prompts, responses):
    """One row without padding, for attention kernels that tell sequences apart by position ids."""
    rows = [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)]
    position_ids = torch.cat([torch.arange(len(row)) for row in rows])[None]
    ends = accumulate(map(len, rows))
    where = [torch.arange(end - len(r) - 1, end - 1) for end, r in zip(ends, responses)]
    return torch.cat(rows)[None], position_ids, None, where


def token_logps(policy, prompts, responses, temperature, layout):
    """Log-probs of the response tokens, and the entropy of the distributions that they come from.

    prompts, responses: N lists of token ids, none empty; layout: how they become rows.
    Returns logp_nt, entropy_nt [N, T], 0 after the end of a response; T is the longest response.
    """
    device = next(policy.parameters()).device
    *inputs, where = layout(prompts, responses)
    target = torch.tensor([token for response in responses for token in response])
    inputs = [x if x is None else x.to(device) for x in (*inputs, torch.cat(where), target)]
    logp, entropy = policy(*inputs, temperature)
    mask_nt = response_mask([len(r) for r in responses]).to(device)
    zero_nt = logp.new_zeros(mask_nt.shape)
    return zero_nt.masked_scatter(mask_nt, logp), zero_nt.masked_scatter(mask_nt, entropy)


def response_mask(lengths):
    """[N, T] bool, True on response tokens (EOS included)."""
    return torch.arange(max(lengths)) < torch.as_tensor(lengths)[:, None]


# endregion


# region share_prefix
def shared(prompts, responses):
    """Neighbours with one prompt share a row, which computes it once: see `padded`.

    Prompt a b, responses c d and e -> row a b c d e at positions 0 1 2 3 2, where e sees a, b and itself.
    """
    pairs = groupby(zip(prompts, responses, strict=True), itemgetter(0))
    trees = [(prompt, [response for _, response in same]) for prompt, same in pairs]
    width, where, columns = max(len(p) + sum(map(len, rs)) for p, rs in trees), [], []
    for number, (prompt, answers) in enumerate(trees):
        ids, position, branch = [*prompt], [*range(len(prompt))], [0] * len(prompt)
        for name, answer in enumerate(answers, 1):
            here = torch.arange(len(answer)) + len(ids) - 1
            here[0] = len(prompt) - 1  # the prompt's last token predicts the first token of every response
            where.append(here + number * width)
            ids += answer
            position += range(len(prompt), len(prompt) + len(answer))
            branch += [name] * len(answer)
        columns.append([torch.tensor(x) for x in (ids, position, branch)])
    input_ids, position_ids, branch = (nn.utils.rnn.pad_sequence(x, batch_first=True) for x in zip(*columns))
    related = (branch[:, None] == 0) | (branch[:, None] == branch[:, :, None])  # [B, query, key]
    return input_ids, position_ids, related.tril()[:, None], where


def bundles_of(rows, args):
    """What is computed as one row: a response, or the responses to a prompt that fit in a micro-batch."""
    size, fit = args.group_size, args.max_tokens_per_microbatch - args.max_prompt_length
    step = max(1, min(size, fit // args.max_response_length)) if args.share_prefix else 1
    groups = range(0, len(rows), size)
    return [list(range(i, min(i + step, g + size))) for g in groups for i in range(g, g + size, step)]


def bundle_tokens(bundle, prompts, responses):
    """Tokens of the row that a bundle becomes."""
    return len(prompts[bundle[0]]) + sum(len(responses[i]) for i in bundle)


# endregion


def keep_groups(acc_n, group_n):
    """Which responses are of a group with spread in accuracy (eq. 11) -> keep_n, bool.

    Accuracies 1 0 1 1 of groups 7 7 8 8 -> True True False False.
    """
    keep_n = torch.zeros(len(acc_n), dtype=torch.bool)
    for member in [group_n == g for g in group_n.unique()]:
        keep_n[member] = acc_n[member].max() > acc_n[member].min()  # eq: dapo.dynamic_sampling
    return keep_n


def overlong_penalty(length_n, max_length, buffer):
    """0 up to max_length - buffer, then linear to -1 at max_length (eq. 13). No buffer: 0.

    Lengths 6 7 8 9 10, max_length 10, buffer 4 -> 0 -.25 -.5 -.75 -1.
    """
    return ((max_length - buffer - length_n) / max(buffer, 1)).clamp(-1, 0)  # eq: dapo.overlong


def group_advantages(score_n, group_n, norm_by_std=True):
    """A = (s - mean_g) / (std_g + 1e-6), unbiased std (2402.03300, 4.1.2); without: Dr. GRPO (2503.20783).

    score_n, group_n: [N] scores and group numbers, in any order. Scores 1 0 0 1 -> .87 -.87 -.87 .87.
    A group of one has mean 0 and std 1; the advantages of a constant group are 0.
    """
    adv_n = score_n.clone()
    for member in [group_n == g for g in group_n.unique()]:
        if member.sum() > 1:
            s = score_n[member]
            adv_n[member] = (s - s.mean()) / (s.std() + 1e-6 if norm_by_std else 1.0)  # eq: grpo.advantage
    return adv_n


def advantages(args, score_n, group_n, length_n):
    """The advantage of each response, [N]; every token of a response shares it."""
    if args.adv_estimator == "grpo":
        return group_advantages(score_n, group_n, args.norm_adv_by_std)
    centred_n = group_advantages(score_n, group_n, norm_by_std=False)
    if args.adv_estimator == "rloo":  # score minus the mean of the others (2402.14740)
        return centred_n * args.group_size / max(args.group_size - 1, 1)  # eq: grpo.rloo
    # REINFORCE++ with baseline (2501.03262): zero mean and unit variance over all tokens of the batch
    centred_n = centred_n - (centred_n * length_n).sum() / length_n.sum()
    variance = (centred_n**2 * length_n).sum() / (length_n.sum() - 1).clamp(min=1)
    return centred_n * (variance + 1e-8).rsqrt()  # eq: grpo.whiten


def policy_loss(logp_nt, old_logp_nt, adv_nt, clip_low, clip_high, clip_c):
    """-min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at most -c A (dual clip).

    Returns loss_nt, and where the clip and where the dual clip decided (bool).
    A = 1, r = 1.5, high = .2 -> -1.2, clipped; A = -1, r = 5, c = 3 -> 3, clipped below.
    """
    ratio_nt = (logp_nt - old_logp_nt).clamp(-20, 20).exp()
    plain_nt = -ratio_nt * adv_nt
    clip_nt = -ratio_nt.clamp(1 - clip_low, 1 + clip_high) * adv_nt
    loss_nt = torch.maximum(plain_nt, clip_nt)  # eq: grpo.loss
    dual_nt = -clip_c * adv_nt
    lower_nt = (adv_nt < 0) & (loss_nt > dual_nt)
    return torch.where(lower_nt, dual_nt, loss_nt), clip_nt > plain_nt, lower_nt  # eq: grpo.dual_clip


def loss_denominator(mask_nt, mode, max_length=None):
    """Weights w_nt with sum(w_nt * loss_nt) the aggregated loss; mask_nt: all responses of an optimizer step.

    Lengths 1 and 3, token-mean: weights 1/4; seq-mean-token-mean: 1/2 and 1/6. Empty ones do not count.
    """
    mask_nt = mask_nt.float()
    length_n1 = mask_nt.sum(-1, keepdim=True).clamp(min=1)
    responses = (mask_nt.sum(-1) > 0).sum().clamp(min=1)
    if mode == "token-mean":
        return mask_nt / mask_nt.sum().clamp(min=1)
    if mode == "seq-mean-token-sum":
        return mask_nt / responses
    if mode == "seq-mean-token-mean":
        return mask_nt / length_n1 / responses
    return mask_nt / (responses * (max_length or mask_nt.shape[1]))  # eq: grpo.aggregation


# --------------------------------------------------------------------------------------------------
# The system
# --------------------------------------------------------------------------------------------------
# region distributed
NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def setup_distributed(hsdp_replicas, timeout_s=3600.0):
    """Join the processes of torchrun, or run alone -> the device of this rank and the FSDP mesh."""
    if "RANK" not in os.environ:  # plain `python`: a rendezvous with itself
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        os.environ |= dict(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    elif sys.platform == "linux":  # keep freed memory: getting it anew is 30 % of an update
        ctypes.CDLL("libc.so.6").mallopt(-4, 0)  # M_MMAP_MAX
        ctypes.CDLL("libc.so.6").mallopt(-1, -1)  # M_TRIM_THRESHOLD
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store, rank, world = next(dist.rendezvous("env://"))
    # CAREFUL: torchrun keeps its store over restarts, with the addresses of dead ranks (pytorch issue 135712)
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    elif os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0" and not os.environ.get(NEW_STORE):  # counted per node
        fail(f"--max-restarts on several nodes: set {NEW_STORE}=1 for torchrun on each of them")
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    enter("start")
    sys.excepthook = report_failure
    shape = (hsdp_replicas, dist.get_world_size() // hsdp_replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return device, mesh if hsdp_replicas > 1 else mesh["shard"]


def enter(phase):
    """Tell the other ranks what this one does."""
    now = f"{time.time():.1f} {phase} since {time.strftime('%H:%M:%S')}"
    dist.distributed_c10d._get_default_store().set(f"phase/{dist.get_rank()}", now)


def report_failure(kind, error, trace):
    """After the traceback: the ranks that answer no more, or else those that failed, the first one first.

    A rank that hangs fails nowhere itself: the others do, --timeout_s later.
    """
    sys.__excepthook__(kind, error, trace)
    store, name = dist.distributed_c10d._get_default_store(), "phase/{}".format
    phase = store.get(name(dist.get_rank())).decode().partition(" ")[2]
    enter(f"failed in {phase}; failed")
    time.sleep(3)  # the time-outs of the others
    ranks = {rank: store.get(name(rank)).decode() for rank in range(dist.get_world_size())}
    silent = {rank: text for rank, text in ranks.items() if "failed in" not in text}
    for rank, text in sorted((silent or ranks).items(), key=lambda item: item[1])[:8]:
        doing = f"does not answer: {text.partition(' ')[2]}" if silent else text.partition(" ")[2]
        print(f"rank {dist.get_rank()}: rank {rank} {doing}", file=sys.stderr, flush=True)


def fail(message):
    """Stop with one line. Every rank calls this at the same place; rank 0 speaks."""
    raise SystemExit(1 if int(os.environ.get("RANK", 0)) else f"error: {message}")


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a list of numbers over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op)
    return total.tolist()


# endregion


# region model
def load_model(args, mesh, device, auto=AutoModelForCausalLM, wrap=TokenLogps, **changes):
    """The model in `wrap`, sharded by FSDP2. Rank 0 reads the weights, the others get their shards."""
    disable_progress_bar()  # of transformers: one bar is enough
    param_dtype = getattr(torch, args.param_dtype)
    config = AutoConfig.from_pretrained(args.model, **changes)
    for name in [name for name in config.to_dict() if "dropout" in name or name.endswith("_pdrop")]:
        setattr(config, name, 0.0)  # CAREFUL: with dropout the ratio is not 1 on the first mini-batch
    with torch.device("meta"):
        lm = auto.from_config(config, dtype=param_dtype, attn_implementation=args.attn_implementation)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = wrap(lm)
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, args.compute_dtype), reduce_dtype=torch.float32
    )
    for block in [m for m in lm.modules() if type(m).__name__ in lm._no_split_modules]:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    # the root too is resharded after a forward: without a backward nothing else would do it
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy.to_empty(device=device)
    rank0 = dist.get_rank() == 0
    full = auto.from_pretrained(args.model, dtype=param_dtype, **changes) if rank0 else None
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


# endregion


# region rollout
def build_engine(args, device):
    """A vLLM engine in this process, asleep. It starts with random weights: only a sync makes it useful."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)
    import vllm
    from vllm import _custom_ops as ops

    cuda, set_num_threads, onednn = device.type == "cuda", torch.set_num_threads, ops._supports_onednn
    # CAREFUL: on a CPU vLLM packs the weights for oneDNN and drops what a sync writes to; sync_weights packs
    ops._supports_onednn = False
    engine = vllm.LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.compute_dtype,
        tensor_parallel_size=args.tp_size,
        distributed_executor_backend="external_launcher",
        max_model_len=args.max_prompt_length + args.max_response_length,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=None if cuda else 1 << 30,  # CPU: else a share of all memory
        enable_sleep_mode=cuda,  # CPU: sleep and wake_up run, and do nothing
        enforce_eager=not cuda,
        enable_chunked_prefill=cuda,  # CPU: seeds fail where a prompt is cut over two steps
        logprobs_mode="processed_logprobs",  # of the distribution sampled from: temperature included
        generation_config="vllm",  # not the model's own sampling defaults
        seed=args.seed,  # equal in a tensor-parallel group
    )
    torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it
    ops._supports_onednn = onednn
    torch.manual_seed(args.seed)  # vLLM overwrites the global generator
    engine.sleep(level=2)
    return engine


def stop_token_ids(args, tokenizer):
    """Every token that ends a response: the tokenizer's EOS and those of the model's generation config."""
    try:
        eos = GenerationConfig.from_pretrained(args.model).eos_token_id
    except OSError:  # a model without one
        eos = None
    return sorted({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None})


def generate(engine, rows, args, stop_ids, step, **sampling):
    """Answer each row -> rows with response_ids, rollout_logps and finish_reason.

    The seed of a response is a function of (seed, step, prompt, sample): no other row or rank matters.
    """
    from vllm import SamplingParams

    def params(row):
        seed = np.random.SeedSequence((args.seed, step, row["index"], row["sample"])).generate_state(1)[0]
        return SamplingParams(
            seed=int(seed), stop_token_ids=stop_ids, logprobs=0, detokenize=False, **sampling
        )

    prompts = [dict(prompt_token_ids=row["prompt_ids"]) for row in rows]
    outputs, answered = engine.generate(prompts, list(map(params, rows)), use_tqdm=False), []
    for row, output in zip(rows, outputs, strict=True):
        o = output.outputs[0]
        logps = [position[token].logprob for position, token in zip(o.logprobs, o.token_ids, strict=True)]
        new = dict(response_ids=list(o.token_ids), rollout_logps=logps, finish_reason=o.finish_reason)
        answered.append(row | new)
    return answered


def rollout(engine, models, optimizer, args, stop_ids, prompts, step, check, timing, group_size, **sampling):
    """Sync the sampler, let it answer, and give its memory back to the trainer -> this rank's answered rows.

    prompts: the rows of the whole step, equal on every rank. The ranks of a tensor-parallel group answer the
    union of their prompts and keep their own. check: compare both engines' log-probs on a few tokens.
    """
    rank, world, device = dist.get_rank(), dist.get_world_size(), next(models[0].parameters()).device
    own = prompts[rank // args.tp_size :: world // args.tp_size]
    rows = [dict(row, sample=g) for row in own for g in range(group_size)]
    probes = [dict(row, sample=0) for row in own[:2]] if check else []
    with timed(timing, "sync"):
        engine.wake_up(tags=["weights"])
        sync_weights(engine, models[0].lm)
    with timed(timing, "gen"):
        if args.offload:
            move("cpu", models, optimizer)
        engine.wake_up(tags=["kv_cache"])
        rows = generate(engine, rows, args, stop_ids, step, max_tokens=args.max_response_length, **sampling)
        probes = generate(engine, probes, args, stop_ids, step, max_tokens=16, temperature=args.temperature)
        engine.sleep(level=2)
        if args.offload:
            move(device, models, optimizer)
    if check:
        check_sync(models[0], probes, args, step)
    return rows[rank % args.tp_size :: args.tp_size]


def move(device, models, optimizer):
    """Move shards and optimizer state between GPU and host."""
    for model in models:
        model.to(device)
    for state in optimizer.state.values():
        state.update({name: value.to(device) for name, value in state.items() if value.dim()})
    torch.cuda.empty_cache()


# endregion


# region weight_sync
SYNC_LIMIT = {"float32": 1e-3, "bfloat16": 0.1}  # mean |log-prob difference| that rounding alone explains


def sync_weights(engine, lm):
    """Stream the sharded parameters into the sampler, one full tensor at a time; tied weights go once."""

    def stream():  # full_tensor is a collective: every rank iterates in the same order
        for name, parameter in lm.named_parameters():
            yield name, parameter.detach().full_tensor()

    def load(model):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        model.load_weights(stream())
        for layer in model.modules():
            if hasattr(layer, "cpu_linear"):  # on a CPU only: packed copies, twice as fast in sampling
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    engine.apply_model(load)
    engine.reset_prefix_cache()


@torch.no_grad()
def check_sync(policy, rows, args, step):
    """Stop the run unless the trainer gives the sampler's tokens the sampler's log-probs."""
    prompts, responses = [row["prompt_ids"] for row in rows], [row["response_ids"] for row in rows]
    logp_nt, _ = token_logps(policy, prompts or [[0]], responses or [[0]], args.temperature, padded)
    sampled = [torch.tensor(row["rollout_logps"]) for row in rows]
    gaps = [(a - b[: len(a)]).abs() for a, b in zip(sampled, logp_nt.cpu(), strict=False)]
    total, count = all_reduce([sum(gap.sum().item() for gap in gaps), sum(map(len, gaps))])
    limit = SYNC_LIMIT[args.compute_dtype]
    if not total / count < limit:  # so that NaN fails too
        fail(
            f"weight sync failed at step {step}: the sampler does not hold the trainer's weights;"
            f" log-probs of {count:.0f} tokens differ by {total / count:.3g} on average, more than {limit}"
        )


# endregion


# region balance
def deal(lengths, ranks):
    """Deal rows to ranks so that each gets about the same number of tokens -> list of lists of row numbers.

    Longest first to the lightest rank: lengths 5 4 3 3 over two ranks -> [0, 3] and [1, 2].
    """
    hands, load = [[] for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        lightest = load.index(min(load))
        hands[lightest].append(i)
        load[lightest] += lengths[i]
    return hands


def cut(lengths, budget, one_row):
    """Cut rows into micro-batches of at most `budget` tokens (padding counted), longest first.

    one_row: each micro-batch is one packed row, without padding. Every rank gets the same number of
    micro-batches, the largest needed by any: the missing ones are empty.
    """
    batches, tokens = [], 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest, rows = (lengths[batches[-1][0]], len(batches[-1])) if batches else (0, 0)
        cost = tokens + lengths[i] if one_row else longest * (rows + 1)
        if batches and cost <= budget:
            batches[-1].append(i)
            tokens = cost
        else:
            batches.append([i])
            tokens = lengths[i]
    # CAREFUL: forward and backward are collectives; a rank that ran fewer of them would hang the others
    [most] = all_reduce([len(batches)], dist.ReduceOp.MAX)
    return batches + [[]] * (int(most) - len(batches))


# endregion


# region checkpoint
MAY_CHANGE = set(
    "output_dir resume total_epochs total_steps save_freq test_freq keep_checkpoints save_hf wandb_project"
    " timeout_s num_examine rollout_dump offload hsdp_replicas tp_size gpu_memory_utilization sync_check_freq"
    " max_tokens_per_microbatch share_prefix gradient_checkpointing".split()
)


def open_run(args):
    """Check output_dir against the arguments -> the checkpoints to resume from, the newest first."""
    out = Path(args.output_dir)
    if (out / "args.json").is_file():
        if args.resume == "never":
            fail(f"--output_dir {out} already holds a run: choose another, or go on with it by --resume auto")
        there, now = json.loads((out / "args.json").read_text()), json.loads(json.dumps(asdict(args)))
        other = [k for k in now if k not in MAY_CHANGE and there.get(k) != now[k]]
        if other:
            changes = "; ".join(f"--{k} {there.get(k)} there, {now[k]} now" for k in other)
            fail(f"--output_dir {out} holds a run with other arguments ({changes}): choose another")
    if args.resume in ("auto", "never"):
        latest = (out / "checkpoints/latest").resolve()
        older = sorted((path for path in latest.parent.glob("step_*") if path < latest), reverse=True)
        return [path for path in (latest, *older) if path.exists()]
    if not (Path(args.resume) / "trainer_state.json").is_file():
        fail(f"--resume {args.resume}: not a checkpoint, it has no trainer_state.json")
    return [Path(args.resume).resolve()]


def sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_intact(checkpoints):
    """The first one whose files are as they were written, or None without any. Each rank reads its share."""
    damages = [None] * dist.get_world_size()
    for path in checkpoints:
        try:
            written = json.loads((path / "trainer_state.json").read_text())["sha256"]
            mine = sorted(written)[dist.get_rank() :: dist.get_world_size()]
            damaged = [name for name in mine if sha256(path / name) != written[name]]
        except (OSError, ValueError, KeyError) as error:
            damaged = [f"{type(error).__name__}: {error}"]
        dist.all_gather_object(damages, damaged)
        if not (damaged := sum(damages, [])):
            return path
        if dist.get_rank() == 0:
            print(f"{path} is damaged ({', '.join(damaged)}) and left out", file=sys.stderr, flush=True)
    if checkpoints:
        fail("no checkpoint is intact: choose another --output_dir, or remove checkpoints/ to begin again")
    return None


@contextmanager
def writing(path):
    """All ranks come out of the block, or all stop with one line: why path could not be written."""
    problems, by_rank = set(), [None] * dist.get_world_size()
    try:
        yield
    except dcp.CheckpointException as error:  # the same on all ranks
        problems = {f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()}
    except (OSError, SafetensorError) as error:
        problems = {f"rank {dist.get_rank()}: {error}"}
    dist.all_gather_object(by_rank, problems)
    if problems := set().union(*by_rank):
        free = shutil.disk_usage(path.parents[1]).free / 2**30
        print(file=sys.stderr)  # below the progress bar
        fail(f"{path} cannot be written: {'; '.join(sorted(problems))}; {free:.1f} GiB are free")


def save_checkpoint(args, step, lm, optimizer, tokenizer, **state):
    """Write checkpoints/step_N beside and rename it: a kill at any moment leaves the last good one."""
    root, rank0 = Path(args.output_dir) / "checkpoints", dist.get_rank() == 0
    final, new, link = root / f"step_{step:06d}", root / f".step_{step:06d}", root / ".latest"
    with writing(final):
        if rank0:
            for unfinished in root.glob(".step_*"):
                shutil.rmtree(unfinished)
            (new / "hf").mkdir(parents=True)
    model_state, optimizer_state = dcp_state.get_state_dict(lm, optimizer)
    with writing(final):
        dcp.save(dict(model=model_state, optimizer=optimizer_state), checkpoint_id=new / "dcp")
        mine = [f"dcp/__{dist.get_rank()}_*"] + ["dcp/.metadata"] * rank0
        sums = {str(f.relative_to(new)): sha256(f) for pattern in mine for f in new.glob(pattern)}
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, sums)
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dict(state_dict=dcp_state.get_model_state_dict(lm, options=options)) if args.save_hf else {}
    with writing(final):
        if rank0:
            tokenizer.save_pretrained(new / "hf")
            (lm if args.save_hf else lm.config).save_pretrained(new / "hf", **weights)
            sums = {name: digest for part in by_rank for name, digest in part.items()}
            state |= dict(step=step, sha256=sums)
            (new / "trainer_state.json").write_text(json.dumps(state, default=str))
            shutil.rmtree(final, ignore_errors=True)
            new.rename(final)
            link.unlink(missing_ok=True)
            link.symlink_to(final.name)
            link.replace(root / "latest")
            done = sorted(path for path in root.glob("step_*") if path <= final)  # `latest` left later ones
            for old in done[: -args.keep_checkpoints] if args.keep_checkpoints else []:
                shutil.rmtree(old)


def load_checkpoint(path, lm, optimizer):
    """Load model and optimizer, at any world size -> the trainer's state."""
    model_state, optimizer_state = dcp_state.get_state_dict(lm, optimizer)
    state = dict(model=model_state, optimizer=optimizer_state)
    dcp.load(state, checkpoint_id=path / "dcp")
    loaded = dict(model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    dcp_state.set_state_dict(lm, optimizer, **loaded)
    return json.loads((path / "trainer_state.json").read_text())


# endregion


# region logging
@contextmanager
def timed(timing, name):
    """Add the seconds of a block to timing[name]."""
    enter(name)
    start = time.perf_counter()
    yield
    enter(f"what follows {name}")
    timing[name] = timing.get(name, 0.0) + time.perf_counter() - start


class Logger:
    """Terminal, log.txt, metrics.jsonl and W&B of rank 0; the other ranks are silent."""

    def __init__(self, args, step, total_steps):
        self.out, self.rank0, self.wandb = Path(args.output_dir), dist.get_rank() == 0, None
        self.bar = tqdm(total=total_steps, initial=step, desc="step", disable=not self.rank0)
        if not self.rank0:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "args.json").write_text(json.dumps(asdict(args), indent=2))
        self.metrics = self.out / "metrics.jsonl"
        lines = self.metrics.read_text().splitlines(keepends=True) if self.metrics.exists() else []
        # steps after the checkpoint are done again: their old lines go
        self.metrics.write_text("".join(x for x in lines if json.loads(x)["training/global_step"] <= step))
        if args.wandb_project:
            import wandb

            about = dict(project=args.wandb_project, name=self.out.name, config=asdict(args))
            self.wandb = wandb.init(dir=self.out, **about)

    def say(self, message):
        """A line for people, in the terminal and in log.txt."""
        if self.rank0:
            self.bar.write(message)
            with (self.out / "log.txt").open("a") as f:
                f.write(message + "\n")

    def log(self, metrics, step, **postfix):
        """One dict a step; postfix goes to the progress bar."""
        metrics = {name: float(value) for name, value in metrics.items()}
        if self.rank0:
            with self.metrics.open("a") as f:
                f.write(json.dumps(metrics) + "\n")
            self.bar.set_postfix(postfix, refresh=False)
            self.bar.update(step - self.bar.n)
        if self.wandb:
            self.wandb.log(metrics, step=step)

    def dump(self, rows, step):
        """Write the responses of a step to rollouts/, one JSON line each."""
        if self.rank0:
            (self.out / "rollouts").mkdir(exist_ok=True)
            keep = ("index", "sample", "finish_reason", "response_ids")
            lines = [row["sampled"] | row["reward"] | {name: row[name] for name in keep} for row in rows]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.out / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)


def stats(name, values):
    values = np.asarray(values, dtype=np.float64)
    return {f"{name}/mean": values.mean(), f"{name}/max": values.max(), f"{name}/min": values.min()}


def train_flops(policy, lengths):
    """FLOPs of forward and backward: 6 a weight and token, and causal attention's 6 L H T^2 a row."""
    weights, config = sum(p.numel() for p in policy.parameters()), policy.lm.config
    return sum(6 * weights * n + 6 * config.num_hidden_layers * config.hidden_size * n**2 for n in lengths)


def matmul_speed(args, device):
    """FLOP/s of a large matrix product on this rank, measured now: the yardstick of perf/mfu."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=getattr(torch, args.compute_dtype))
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * n**3 / timer.blocked_autorange().median


# endregion


# --------------------------------------------------------------------------------------------------
# The algorithm
# --------------------------------------------------------------------------------------------------
MAY_CHANGE |= {"max_gen_batches", "allow_partial_batch"}  # to go on after the error about too few groups
LARGEST = 3  # size of a generation batch in train_batch_size; the published run always takes this one


def check_args(args):
    """Stop on combinations that cannot work, before anything is loaded."""
    world, row = int(os.environ.get("WORLD_SIZE", 1)), args.max_prompt_length + args.max_response_length
    if args.train_batch_size % args.ppo_mini_batch_size:
        batch = f"--train_batch_size {args.train_batch_size}"
        fail(f"{batch} is not a multiple of --ppo_mini_batch_size {args.ppo_mini_batch_size}")
    for name in ("tp_size", "hsdp_replicas"):
        if world % getattr(args, name):
            fail(f"{world} ranks are not a multiple of --{name} {getattr(args, name)}")
    if args.max_tokens_per_microbatch < row:
        fail(f"--max_tokens_per_microbatch {args.max_tokens_per_microbatch} is less than a row, {row} tokens")
    if args.share_prefix and args.attn_implementation != "sdpa":
        kernel = f"--attn_implementation {args.attn_implementation}"
        fail(f"--share_prefix needs sdpa, whose mask can be any; {kernel} knows causal attention only")
    if args.temperature <= 0:
        fail(f"--temperature {args.temperature}: training needs samples, so it must be above 0")
    if args.tis_cap and (args.top_p < 1 or args.top_k > 0):
        fail(
            f"--top_p {args.top_p} --top_k {args.top_k} with --tis_cap {args.tis_cap}: a truncated sampler's"
            " log-probs do not compare with the trainer's; sample from all tokens, or pass --tis_cap 0"
        )
    if args.group_size < 2:
        fail(f"--group_size {args.group_size}: one response has no spread, so its group would be dropped")
    if not 0 <= (args.overlong_buffer or 0) <= args.max_response_length:
        longest = f"--max_response_length {args.max_response_length}"
        fail(f"--overlong_buffer {args.overlong_buffer} is not between 0 and {longest}")
    if args.lr_schedule != "constant" and not args.total_steps:
        fail(f"--lr_schedule {args.lr_schedule} needs --total_steps: dropped groups make epochs end sooner")


def draw(train_rows, seed, start, count):
    """`count` prompts from number `start` on, over all epochs; their order is a function of (seed, epoch)."""
    epochs = range(start // len(train_rows), (start + count - 1) // len(train_rows) + 1)
    orders = [np.random.default_rng((seed, epoch)).permutation(len(train_rows)) for epoch in epochs]
    chosen = np.concatenate(orders)[start % len(train_rows) :][:count]
    # CAREFUL: the number is the index, and so in the seed: a prompt may come again in the same step
    return [dict(train_rows[i], index=k, group=k) for k, i in enumerate(chosen, start)]


def score_and_gather(rows, manager, tokenizer):
    """Score this rank's responses -> the rows of all ranks by prompt and sample, and each rank's tokens."""
    samples = [
        dict(
            data_source=row["data_source"],
            prompt_str=row["prompt"][-1]["content"],
            solution_str=tokenizer.decode(row["response_ids"], skip_special_tokens=True),
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row["extra_info"],
        )
        for row in rows
    ]
    results = zip(rows, samples, manager.score(samples), strict=True)
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, [dict(row, sampled=s, reward=reward) for row, s, reward in results])
    tokens = [sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in part) for part in by_rank]
    return sorted(chain(*by_rank), key=lambda row: (row["group"], row["sample"])), tokens


def make_batch(rows, adv_n, args, device):
    """Deal the N rows of a step to the ranks -> this rank's batch and mini-batches, and each rank's tokens.

    Every rank knows all rows: loss denominators, over all ranks and micro-batches, need no communication.
    A mini-batch is one optimizer step: a list of bundles, each the numbers of its rows in the batch.
    """
    prompts, responses = ([row[name] for row in rows] for name in ("prompt_ids", "response_ids"))
    mask_nt, size = response_mask([len(r) for r in responses]), args.ppo_mini_batch_size * args.group_size
    counted_n = torch.tensor(
        [row["finish_reason"] != "length" or not args.overlong_filtering for row in rows]
    )
    counted_nt = mask_nt & counted_n[:, None]
    weight_nt, token_weight_nt = torch.zeros(mask_nt.shape), torch.zeros(mask_nt.shape)
    mini_batches, load = [], [[] for _ in range(dist.get_world_size())]
    for start in range(0, len(rows), size):
        mini = slice(start, start + size)
        weight_nt[mini] = loss_denominator(counted_nt[mini], args.loss_agg, args.max_response_length)
        token_weight_nt[mini] = loss_denominator(mask_nt[mini], "token-mean")
        bundles = [bundle for bundle in bundles_of(rows, args) if start <= bundle[0] < start + size]
        tokens = [bundle_tokens(bundle, prompts, responses) for bundle in bundles]
        hands = deal(tokens, len(load))
        load = [before + [tokens[b] for b in hand] for before, hand in zip(load, hands, strict=True)]
        mini_batches.append([bundles[b] for b in hands[dist.get_rank()]])
    mine = [i for mini in mini_batches for bundle in mini for i in bundle]
    number = {i: n for n, i in enumerate(mine)}
    mini_batches = [[[number[i] for i in bundle] for bundle in mini] for mini in mini_batches]
    logp_nt = torch.zeros(mask_nt.shape)
    logp_nt[mask_nt] = torch.tensor([logp for row in rows for logp in row["rollout_logps"]])
    by_token = dict(
        fresh_nt=mask_nt & torch.tensor([[row["fresh"]] for row in rows]),
        adv_nt=adv_n[:, None].float() * mask_nt,
        rollout_logp_nt=logp_nt,
        weight_nt=weight_nt,
        token_weight_nt=token_weight_nt,
    )
    batch = {name: value[mine].to(device) for name, value in by_token.items()}
    batch |= dict(prompts=[prompts[i] for i in mine], responses=[responses[i] for i in mine])
    return batch, mini_batches, load


# region micro_batches
def micro_batches(policy, batch, bundles, args):
    """Run bundles of the batch, a micro-batch at a time -> numbers of their rows [n], logp_nt, entropy_nt.

    An empty micro-batch runs a dummy row; what its empty row numbers index sums to zero against it.
    """
    layout = shared if args.share_prefix else padded
    layout = packed if args.attn_implementation == "flash_attention_2" else layout
    tokens = [bundle_tokens(bundle, batch["prompts"], batch["responses"]) for bundle in bundles]
    for part in cut(tokens, args.max_tokens_per_microbatch, layout is packed):
        part = [i for b in part for i in bundles[b]]
        prompts, responses = [batch["prompts"][i] for i in part], [batch["responses"][i] for i in part]
        logps = token_logps(policy, prompts or [[0]], responses or [[0]], args.temperature, layout)
        yield torch.tensor(part, dtype=torch.long), *logps


# endregion


@torch.no_grad()
def all_logps(policy, batch, mini_batches, args):
    """Log-probs of this rank's responses, [N, T]."""
    logp_nt = torch.zeros_like(batch["rollout_logp_nt"])
    for rows, got_nt, _ in micro_batches(policy, batch, [*chain(*mini_batches)], args):
        logp_nt[rows, : got_nt.shape[1]] = got_nt
    return logp_nt


def update_actor(policy, optimizer, batch, mini_batches, args):
    """One optimizer step a mini-batch -> metrics, means over the steps, and log-probs as first seen, [N, T].

    Without old_logp_nt in the batch the old policy is the current one (a single optimizer step).
    """
    names = ("pg_loss", "entropy", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")
    sums, norms, first_nt = torch.zeros(len(names)), [], torch.zeros_like(batch["rollout_logp_nt"])
    clip = args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c
    for epoch in range(args.ppo_epochs):
        for mini_batch in mini_batches:
            for rows, logp_nt, entropy_nt in micro_batches(policy, batch, mini_batch, args):
                cut_to = rows, slice(logp_nt.shape[1])
                part = {name: x[cut_to] for name, x in batch.items() if name.endswith("_nt")}
                w_nt, t_nt, old_nt = part["weight_nt"], part["token_weight_nt"], part.get("old_logp_nt")
                old_nt = logp_nt.detach() if old_nt is None else old_nt
                pg_nt, clipped_nt, lower_nt = policy_loss(logp_nt, old_nt, part["adv_nt"], *clip)
                if args.tis_cap:
                    correction_nt = (old_nt - part["rollout_logp_nt"]).exp()
                    pg_nt = pg_nt * correction_nt.clamp(max=args.tis_cap)  # eq: grpo.tis
                loss_nt = pg_nt - args.entropy_coeff * entropy_nt
                # FSDP averages gradients over the ranks, but the weights already divide by all ranks' tokens
                ((w_nt * loss_nt).sum() * dist.get_world_size()).backward()
                with torch.no_grad():
                    means = w_nt * pg_nt, t_nt * entropy_nt, t_nt * clipped_nt, t_nt * lower_nt
                    sums += torch.stack([x.sum() for x in (*means, t_nt * (old_nt - logp_nt))]).cpu()
                    if epoch == 0:
                        first_nt[cut_to] = logp_nt
            norms.append(nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).full_tensor().item())
            if math.isfinite(norms[-1]):  # the norm of all ranks: they step or skip together
                optimizer.step()
            optimizer.zero_grad()
    means = [total / len(norms) for total in all_reduce(sums.tolist())]
    metrics = {f"actor/{name}": mean for name, mean in zip(names, means, strict=True)}
    metrics |= {"actor/grad_norm": np.mean(norms), "actor/skipped_updates": np.sum(~np.isfinite(norms))}
    return metrics, first_nt


def rollout_gap(logp_nt, batch):
    """|probability by the trainer - probability by the sampler| of the step's tokens."""
    diff = (logp_nt.exp() - batch["rollout_logp_nt"].exp()).abs()[batch["fresh_nt"]]
    total, count = all_reduce([diff.sum().item(), diff.numel()])
    [largest] = all_reduce([max(diff.tolist(), default=0.0)], dist.ReduceOp.MAX)
    return {
        "training/rollout_probs_diff_mean": total / max(count, 1),
        "training/rollout_probs_diff_max": largest,
    }


def step_metrics(rows, reward_n, adv_n, rank_tokens, load, timing, args):
    """Metrics that need no model: scores, lengths, balance, time."""
    scores = [row["reward"]["score"] for row in rows]
    responses, prompts = [len(row["response_ids"]) for row in rows], [len(row["prompt_ids"]) for row in rows]
    total, load = sum(responses) + sum(prompts), [sum(tokens) for tokens in load]
    metrics = stats("critic/score", scores) | stats("critic/rewards", reward_n)
    metrics |= stats("response_length", responses) | stats("prompt_length", prompts)
    metrics |= stats("critic/advantages", adv_n) | failure_metrics([row["reward"] for row in rows])
    metrics |= {
        "response_length/clip_ratio": np.mean([row["finish_reason"] == "length" for row in rows]),
        "prompt_length/clip_ratio": np.mean([n == args.max_prompt_length for n in prompts]),
        "global_seqlen/min": min(rank_tokens),
        "global_seqlen/max": max(rank_tokens),
        "global_seqlen/minmax_diff": max(rank_tokens) - min(rank_tokens),
        "global_seqlen/balanced_min": min(load),
        "global_seqlen/balanced_max": max(load),
        "global_seqlen/mean": total / len(load),
        "perf/total_num_tokens": total,
        "perf/time_per_step": timing["step"],
        "perf/throughput": total / timing["step"] / len(load),
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }
    for name, seconds in timing.items():
        metrics[f"timing_s/{name}"] = seconds
        if name in ("gen", "old_log_prob", "adv", "update_actor"):
            tokens = sum(responses) if name == "gen" else total
            metrics[f"timing_per_token_ms/{name}"] = 1000 * seconds / tokens
    return metrics


def main():
    # ---- arguments and data: nothing slow before they are known to be good
    args = tyro.cli(Args, console_outputs=os.environ.get("RANK", "0") == "0")
    check_args(args)
    checkpoints = open_run(args)
    try:
        AutoConfig.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
        reward_fn = load_rewards(args.reward_fn, args.reward_weights, args.reward_aggregation)
        limits = dict(timeout_s=args.reward_timeout_s, workers=args.reward_workers)
        manager = RewardManager(args.reward_manager, reward_fn, **limits)
        shown = args.num_examine if os.environ.get("RANK", "0") == "0" else 0
        val_manager = RewardManager(args.reward_manager, reward_fn, shown, **limits)
        limit = args.max_prompt_length, args.filter_overlong_prompts
        train_rows, train_dropped = load_prompts(args.train_files, tokenizer, *limit)
        val_rows, val_dropped = load_prompts(args.val_files, tokenizer, *limit)
        if "rewards" in args.reward_fn:
            check_sources({row["data_source"] for row in train_rows + val_rows})
    except (ValueError, OSError) as error:
        fail(" ".join(str(error).split()))
    steps_per_epoch = len(train_rows) // args.train_batch_size
    if not steps_per_epoch:
        fail(
            f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} training prompts"
        )
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch
    most_prompts = math.inf if args.total_steps else args.total_epochs * len(train_rows)

    # ---- models: the engine first, while the GPU is empty; then it sleeps
    device, mesh = setup_distributed(args.hsdp_replicas, args.timeout_s)
    resume = first_intact(checkpoints)
    engine, stop_ids = build_engine(args, device), stop_token_ids(args, tokenizer)
    policy = load_model(args, mesh, device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    # prompts drawn so far, how many were sampled and kept lately, and groups left over for the next step
    state = dict(step=0, drawn=0, sampled=0, kept=0, surplus=[])
    state |= load_checkpoint(resume, policy.lm, optimizer) if resume else {}
    first = state.pop("step") + 1
    if state["drawn"] >= most_prompts:  # resumed at the end of the data
        total_steps = first - 1
    peak = matmul_speed(args, device) * dist.get_world_size()
    log = Logger(args, first - 1, total_steps)
    log.say(
        f"{len(train_rows)} training and {len(val_rows)} validation prompts ({train_dropped + val_dropped}"
        f" dropped: over {args.max_prompt_length} tokens), at most {total_steps} steps,"
        f" {dist.get_world_size()} ranks on {device.type}" + (f", resumed from {resume}" if resume else "")
    )
    if args.offload and device.type == "cpu":
        log.say("--offload does nothing on a CPU")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    sample = partial(rollout, engine, [policy], optimizer, args, stop_ids)

    def validate(check):
        rows = sample(val_rows, 0, check, {}, args.val_group_size, temperature=args.val_temperature)
        metrics = validation_metrics(score_and_gather(rows, val_manager, tokenizer)[0])
        log.say("validation: " + "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
        return metrics

    if val_rows and args.val_before_train and not resume:
        log.log(validate(check=True) | {"training/global_step": 0}, 0)

    saving, check = {}, True  # seconds of the last checkpoint: reported by the step after it
    for step in range(first, total_steps + 1):
        timing, saving, begin = saving, {}, time.perf_counter()

        # ---- rollout and reward until there are enough groups: all ranks know all rows, so they decide alike
        check |= args.sync_check_freq > 0 and step % args.sync_check_freq == 0
        sampling = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
        rows, sampled, gen_batches, rank_tokens = state["surplus"], [], 0, np.zeros(dist.get_world_size())
        wanted = args.train_batch_size * args.group_size
        while len(rows) < wanted and gen_batches < args.max_gen_batches:
            keep_rate = (state["kept"] + 1) / (state["sampled"] + 1)  # 1 at first, and never 0
            count = math.ceil((wanted - len(rows)) / args.group_size / keep_rate)
            count = min(count, LARGEST * args.train_batch_size)
            prompts = draw(train_rows, args.seed, state["drawn"], count)
            new = sample(prompts, step, check, timing, args.group_size, **sampling)
            with timed(timing, "reward"):
                new, tokens = score_and_gather(new, manager, tokenizer)
            # CAREFUL: accuracy has no overlong penalty, which would give a group spread that is all right
            acc = [float(row["reward"].get("acc", row["reward"]["score"])) for row in new]
            keep_n = keep_groups(torch.tensor(acc), torch.tensor([row["group"] for row in new]))
            new = [dict(row, acc=a, keep=k, fresh=True) for row, a, k in zip(new, acc, keep_n.tolist())]
            rows, sampled = rows + [row for row in new if row["keep"]], sampled + new
            state["drawn"] += count
            state["sampled"] += count
            state["kept"] += int(keep_n.sum()) // args.group_size
            gen_batches, rank_tokens, check = gen_batches + 1, rank_tokens + tokens, False
        thrown = [row for row in sampled if not row["keep"]]
        right = sum(row["acc"] > 0 for row in thrown)
        dropped_right, dropped_wrong = (x / max(len(sampled), 1) for x in (right, len(thrown) - right))
        if len(rows) < wanted and not (args.allow_partial_batch and rows):
            groups = f"{len(rows) // args.group_size} of --train_batch_size {args.train_batch_size} groups"
            fail(
                f"step {step}: --max_gen_batches {gen_batches} gave {groups} with right and wrong responses;"
                f" of the sampled groups {dropped_right:.0%} are all right, {dropped_wrong:.0%} all wrong"
            )
        rows, surplus = rows[:wanted], [dict(row, fresh=False) for row in rows[wanted:]]
        if not args.carry_over:
            surplus, thrown = [], thrown + surplus
        # the keep rate changes as the policy learns: a step counts half as much as the next
        state |= dict(surplus=surplus, sampled=state["sampled"] / 2, kept=state["kept"] / 2)

        # ---- advantage, then balance over the ranks
        with timed(timing, "adv"):
            score_n = torch.tensor([row["reward"]["score"] for row in rows], dtype=torch.float64)
            group_n = torch.tensor([row["group"] for row in rows])
            length_n = torch.tensor([len(row["response_ids"]) for row in rows])
            buffer = args.max_response_length // 5 if args.overlong_buffer is None else args.overlong_buffer
            penalty_n = overlong_penalty(length_n, args.max_response_length, buffer)
            reward_n = score_n + args.overlong_penalty * penalty_n
            adv_n = advantages(args, reward_n, group_n, length_n)
            batch, mini_batches, load = make_batch(rows, adv_n, args, device)

        # ---- log-probs: the old ones only if there will be a second optimizer step
        if len(mini_batches) * args.ppo_epochs > 1:
            with timed(timing, "old_log_prob"):
                batch["old_logp_nt"] = all_logps(policy, batch, mini_batches, args)

        # ---- update
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step, total_steps)
        with timed(timing, "update_actor"):
            metrics, first_nt = update_actor(policy, optimizer, batch, mini_batches, args)
        metrics |= rollout_gap(batch.get("old_logp_nt", first_nt), batch)

        # ---- validation
        last = step == total_steps or state["drawn"] >= most_prompts
        last = last or all_reduce([stop.is_set()], dist.ReduceOp.MAX) == [1]
        if val_rows and (last or (args.test_freq and step % args.test_freq == 0)):
            with timed(timing, "testing"):
                metrics |= validate(check=False)

        # ---- metrics
        timing["step"] = time.perf_counter() - begin
        metrics |= step_metrics(rows, reward_n, adv_n, rank_tokens, load, timing, args)
        metrics |= {
            "actor/lr": learning_rate(args, step, total_steps),
            "perf/mfu/actor": train_flops(policy, chain(*load)) / timing["update_actor"] / peak,
            "training/global_step": step,
            "dapo/gen_batches": gen_batches,
            "dapo/dropped_all_right": dropped_right,
            "dapo/dropped_all_wrong": dropped_wrong,
            "dapo/carried_over": sum(not row["fresh"] for row in rows) / len(rows),
            "dapo/overlong": (reward_n < score_n).sum(),
            "dapo/tokens_generated": sum(len(row["response_ids"]) for row in sampled),
            "dapo/tokens_thrown_away": sum(len(row["response_ids"]) for row in thrown),
            "training/epoch": (state["drawn"] - 1) // len(train_rows),
        }
        speed = metrics["perf/total_num_tokens"] / timing["step"]
        score, length = metrics["critic/score/mean"], metrics["response_length/mean"]
        log.log(metrics, step, score=f"{score:.3f}", length=f"{length:.0f}", tok_s=f"{speed:.0f}")
        if args.rollout_dump:
            log.dump(rows, step)

        # ---- checkpoint, after the metrics: a kill in between loses neither
        if last or (args.save_freq and step % args.save_freq == 0):
            with timed(saving, "save_checkpoint"):
                save_checkpoint(args, step, policy.lm, optimizer, tokenizer, **state)
        if last:
            break
    log.bar.close()
    dist.barrier()  # the process group ends with the engine, at exit


if __name__ == "__main__":
    main()
