"""SFT: minimise -sum(log p(response token | what comes before it)) / (response tokens of the optimizer step).

Where this differs from the trainers that are in use:
1. The denominator counts the tokens of all ranks and micro-batches, so neither split changes the gradient.
2. Every response token is trained, EOS included, and nothing else (verl: the last prompt token, and no EOS).
3. Batches are dealt to the ranks by tokens, not by rows.
LoRA (arXiv 2106.09685) by --lora_rank, QLoRA (2305.14314) by --qlora, long rows over several ranks (Ulysses,
2309.14509) by --sp_size.

CPU:        python algos/sft.py --model models/tiny --train_files data/train.parquet --output_dir runs/sft
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/sft.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 algos/sft.py
Docs: docs/sft.md
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Literal

import jinja2
import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from peft import LoraConfig, get_peft_model, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_gather_single, all_to_all_single
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.benchmark import Timer
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from transformers.utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.schema import load_rows

# Shapes: N rows, T response tokens, V vocabulary. A suffix names the axes (logp_nt). T is always aligned with
# the response: column t speaks of response token t, whatever predicted it.


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

    prompt_key: str = "prompt"
    """Column of the prompt: chat messages, or a string (one user message); dots reach into structs."""
    response_key: str = "extra_info.answer"
    """Column of the response, a string; dots reach into structs."""
    messages_key: str | None = None
    """Column of whole conversations, trained on the assistant's turns; None: prompt and response columns."""
    max_length: int = 1024
    """Limit of prompt and response together, in tokens, EOS included."""
    truncation: Literal["error", "left", "right"] = "error"
    """A row over max_length: stop, or cut it there; a row whose whole response is lost is dropped."""
    packing: bool = is_flash_attn_2_available()
    """Rows of a micro-batch in one sequence without padding; with SDPA it costs a dense mask."""

    attn_implementation: str = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    """Attention kernel of transformers; with flash attention rows are packed without padding."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of parameters and optimizer state."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16" if torch.cuda.is_available() else "float32"
    """Precision of forward, backward and sampler."""
    hsdp_replicas: int = 1
    """Copies of the sharded model (HSDP); 1: shard over all ranks."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass."""
    max_tokens_per_microbatch: int = 8192
    """Tokens of a forward pass on one rank, padding included."""
    sp_size: int = 1
    """Ranks that share the tokens of a sequence (Ulysses); needs packing."""
    liger: bool = False
    """Liger's Triton kernels for norm, rotary embedding and MLP; needs a GPU."""

    lora_rank: int = 0
    """Rank of the LoRA adapters, which are then all that is trained; 0: train the model itself."""
    lora_alpha: float = 16
    """The adapters' output is scaled by lora_alpha / lora_rank."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get an adapter; all-linear: every linear layer but the output layer."""
    qlora: bool = False
    """Keep the frozen weights in 4 bits (bitsandbytes), a whole copy on every rank; needs lora_rank."""
    merge_lora: bool = False
    """hf/ of a checkpoint is the model with the adapters added to its weights; else only the adapters."""

    train_batch_size: int = 64
    """Prompts of a step, over all ranks."""
    lr: float = 1e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Decay after warm-up, to 0 at the last step."""
    warmup_steps: int = 10
    """Steps of linear warm-up."""
    decay_steps: int = 0
    """Last steps, to which the decay is confined (warm-up-stable-decay); 0: all after warm-up."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
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


MAY_CHANGE |= {"packing", "sp_size", "liger", "merge_lora"}


class Adapters(nn.Module):
    """LoRA: trained matrices beside the frozen linear layers of lm; in checkpoints they stand for the model.

    They are small: every rank holds all of them, in float32, and `update` sums their gradients. FSDP shards
    the frozen weights and knows nothing of them.
    """

    def __init__(self, lm, args):
        super().__init__()
        targets = "all-linear" if args.lora_target_modules == ("all-linear",) else [*args.lora_target_modules]
        sizes = dict(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=targets)
        self.config = LoraConfig(**sizes, task_type="CAUSAL_LM", base_model_name_or_path=args.model)
        self.args = args
        inject_adapter_in_model(self.config, lm)  # also freezes all other weights
        torch.manual_seed(args.seed)  # the same matrices on every rank
        for name, layer in lm.named_modules():
            if isinstance(layer, LoraLayer):
                # CAREFUL: peft takes FSDP's shards for those of tensor parallelism and makes lora_B as small
                layer.lora_A["default"].float()
                out, device = layer.base_layer.out_features, layer.lora_A["default"].weight.device
                layer.lora_B["default"] = nn.Linear(args.lora_rank, out, bias=False, device=device)
                layer.reset_lora_parameters("default", init_lora_weights=True)
                for part in ("lora_A", "lora_B"):
                    key = f"{name}.{part}.weight".replace(".", "/")  # no dots in the name of a parameter
                    self.register_parameter(key, getattr(layer, part)["default"].weight)

    def save_pretrained(self, directory, state_dict):
        """What save_checkpoint writes to hf/: the adapters as peft loads them, or the merged model."""
        state = {f"base_model.model.{k.replace('/', '.')}": v for k, v in state_dict.items()}
        if self.args.merge_lora:
            dtype = getattr(torch, self.args.param_dtype)
            lm = get_peft_model(
                AutoModelForCausalLM.from_pretrained(self.args.model, dtype=dtype), self.config
            )
            set_peft_model_state_dict(lm, state)
            lm.merge_and_unload().save_pretrained(directory)
        else:
            self.config.save_pretrained(directory)
            save_file(state, directory / "adapter_model.safetensors")


def load_quantized(args, device):
    """QLoRA's base model: in 4 bits (NF4), whole on every rank, as FSDP does not shard that format."""
    dtype = getattr(torch, args.compute_dtype)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    lm = AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype=dtype,
        attn_implementation=args.attn_implementation,
        quantization_config=four_bits,
        device_map={"": device},
    )
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return TokenLogps(lm).train()


class SequenceParallel(nn.Module):
    """Ulysses: each rank of a group runs TokenLogps on its slice of a packed row; attention sees it all."""

    def __init__(self, policy, group):
        super().__init__()
        self.policy, self.lm, self.group = policy, policy.lm, group

    def forward(self, input_ids, position_ids, attention_mask, where, target, temperature):
        """As TokenLogps, but 0 for tokens that another rank of the group predicts."""
        size, rank = self.group.size(), self.group.rank()
        short = -input_ids.shape[1] % size  # padding: tokens at position 0, each a sequence of its own
        input_ids, position_ids = (nn.functional.pad(x, (0, short)) for x in (input_ids, position_ids))
        width = input_ids.shape[1] // size
        # labels were shifted before this cut: a slice's last position predicts the first token of the next
        mine, here = where // width == rank, slice(rank * width, (rank + 1) * width)
        local = where[mine] - rank * width
        logp, entropy = self.policy(
            input_ids[:, here], position_ids[:, here], attention_mask, local, target[mine], temperature
        )
        zero = logp.new_zeros(len(where))
        return zero.masked_scatter(mine, logp), zero.masked_scatter(mine, entropy)


def ulysses_attention(
    module, query, key, value, attention_mask, scaling, position_ids, group, kernel, **unused
):
    """Attention of SequenceParallel: trade a slice of all heads for the whole row of some heads, and back.

    query [1, H, T / sp, D], key and value with fewer heads -> [1, T / sp, H, D]; between: [1, H / sp, T, D].
    """
    size = group.size()
    repeats = size // math.gcd(size, key.shape[1])  # fewer key/value heads than ranks: each rank needs one

    def to_heads(x):  # block i of the heads goes to rank i, whose blocks of tokens then follow each other
        blocks = x[0].unflatten(0, (size, -1)).contiguous()
        return all_to_all_single(blocks, None, None, group).transpose(0, 1).flatten(1, 2)[None]

    query = to_heads(query)
    key, value = (to_heads(x.repeat_interleave(repeats, 1)) for x in (key, value))
    positions = all_gather_single(position_ids[0], 0, group)
    if kernel == "flash_attention_2":
        from flash_attn import flash_attn_varlen_func

        starts = nn.functional.pad((positions == 0).nonzero()[:, 0].int(), (0, 1), value=len(positions))
        longest = starts.diff().max().item()
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        ends = starts, starts, longest, longest
        out = flash_attn_varlen_func(q, k, v, *ends, softmax_scale=scaling, causal=True).transpose(0, 1)
    else:
        sequence = (positions == 0).cumsum(0)
        mask = (sequence[:, None] == sequence).tril()
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)[0]
    # and back: block i of the tokens goes to rank i, whose blocks of heads then follow each other
    blocks = out.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    return all_to_all_single(blocks, None, None, group).flatten(0, 1).transpose(0, 1)[None], None


def load_policy(args, mesh, device):
    """-> what `micro_batches` calls, and what is trained and saved: the model itself, or its adapters."""
    if args.sp_size > 1:
        shape = (dist.get_world_size() // args.sp_size, args.sp_size)
        group = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "sp"))["sp"].get_group()
        kernel = partial(ulysses_attention, group=group, kernel=args.attn_implementation)
        AttentionInterface.register("ulysses", kernel)
        args = replace(args, attn_implementation="ulysses")
    if args.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

        # replaces classes of transformers' model file; TokenLogps would never call the fused cross-entropy
        _apply_liger_kernel(
            AutoConfig.from_pretrained(args.model).model_type, fused_linear_cross_entropy=False
        )
    policy = load_quantized(args, device) if args.qlora else load_model(args, mesh, device)
    trained = Adapters(policy.lm, args) if args.lora_rank else policy.lm
    return SequenceParallel(policy, group) if args.sp_size > 1 else policy, trained


# --------------------------------------------------------------------------------------------------
# The algorithm
# --------------------------------------------------------------------------------------------------
def check_args(args):
    """Stop on combinations that cannot work, before anything is loaded."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    for name in ("hsdp_replicas", "sp_size"):
        if world % getattr(args, name):
            fail(f"the number of ranks, {world} is not a multiple of --{name} {getattr(args, name)}")
    if args.sp_size > 1 and not args.packing:
        fail(f"--sp_size {args.sp_size} cuts packed rows: add --packing")
    if args.max_tokens_per_microbatch * args.sp_size < args.max_length:
        fail(
            f"--max_tokens_per_microbatch {args.max_tokens_per_microbatch} times --sp_size {args.sp_size} is"
            f" less than a row of --max_length {args.max_length} tokens"
        )
    for name in ("qlora", "merge_lora"):
        if getattr(args, name) and not args.lora_rank:
            fail(f"--{name} needs --lora_rank above 0")
    if args.qlora and not find_spec("bitsandbytes"):
        fail("--qlora needs bitsandbytes, which is not installed here: pip install bitsandbytes")
    if args.liger and not (torch.cuda.is_available() and find_spec("liger_kernel")):
        fail("--liger needs a GPU and Liger's kernels: pip install liger-kernel")


def check_model(config, args):
    """ValueError where the model does not fit --sp_size, --lora_target_modules or --liger."""
    if args.sp_size > 1:
        if config.num_attention_heads % args.sp_size:
            raise ValueError(
                f"--sp_size {args.sp_size} does not divide the {config.num_attention_heads} attention heads"
                f" of {args.model}"
            )
        for name in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping"):
            if getattr(config, name, None):
                raise ValueError(
                    f"{args.model} has {name}, which --sp_size {args.sp_size} does not implement"
                )
    if args.lora_rank and args.lora_target_modules != ("all-linear",):
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config)
        head = lm.get_output_embeddings()  # without adapters: LogProbs takes its weight alone
        layers = [(name, m) for name, m in lm.named_modules() if m is not head]
        linear = {name.rpartition(".")[2] for name, m in layers if isinstance(m, nn.Linear)}
        if unknown := set(args.lora_target_modules) - linear:
            raise ValueError(
                f"--lora_target_modules {' '.join(unknown)}: the linear layers are {sorted(linear)}"
            )
    if args.liger:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known

        if config.model_type not in known:
            raise ValueError(f"--liger has no kernels for the model type {config.model_type}")


def encode(prompt, response, tokenizer):
    """Token ids of a prompt (chat messages, or a string: one user message) and of its response, EOS added.

    Like encode_messages returns all ids, and for each whether it is trained.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    response_ids = tokenizer.encode(response, add_special_tokens=False) + [tokenizer.eos_token_id]
    # CAREFUL: the loss goes by position; by value, EOS would be lost where it is also the pad
    return prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids)


def encode_messages(messages, tokenizer):
    """Token ids of a conversation; the assistant's turns are trained, each up to its EOS.

    A turn lies between what the template writes for the messages before it, with the generation prompt (what
    a sampler is given), and for those up to it. Both must be the beginning of the whole conversation.
    """
    messages = [{k: v for k, v in m.items() if v is not None} for m in messages]  # parquet fills up with null
    template = partial(tokenizer.apply_chat_template, tokenize=False)
    text = template(messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    trained = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, upto = template(messages[:i], add_generation_prompt=True), template(messages[: i + 1])
            if not (upto.startswith(before) and text.startswith(upto)):
                raise ValueError(f"the chat template renders message {i} otherwise when others follow it")
            # a token that begins before the turn is context, even if it ends in it
            turn = [j for j, (start, _) in enumerate(offsets) if len(before) <= start < len(upto)]
            ends = [j for j in turn if ids[j] == tokenizer.eos_token_id] or turn
            for j in turn:
                trained[j] = j <= ends[-1]
    return ids, trained


def split(ids, trained):
    """A row; its prompt ends where training begins. None if nothing is trained (nothing predicts ids[0])."""
    if not any(trained[1:]):
        return None
    first, last = trained.index(True, 1), len(trained) - trained[::-1].index(True)
    return dict(prompt_ids=ids[:first], response_ids=ids[first:last], trained=trained[first:last])


def load_examples(paths, args, tokenizer):
    """Rows as `split` makes them, the number of truncated ones, and of those dropped: nothing is trained."""
    columns = [args.messages_key] if args.messages_key else [args.prompt_key, args.response_key]
    rows, truncated = [], 0
    keep = slice(args.max_length) if args.truncation == "right" else slice(-args.max_length, None)
    for i, record in enumerate(load_rows(paths, columns)):
        where, values = f"{', '.join(paths)}: row {i}", [record[column] for column in columns]
        try:
            ids, trained = (encode_messages if args.messages_key else encode)(*values, tokenizer)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{where}: {', '.join(columns)}: {error!r}") from None
        if len(ids) > args.max_length:
            if args.truncation == "error":
                raise ValueError(
                    f"{where} has {len(ids)} tokens, over --max_length {args.max_length};"
                    " raise it or pass --truncation left or right"
                )
            truncated += 1
        rows.append(split(ids[keep], trained[keep]))
    kept = [row for row in rows if row]
    if rows and not kept:
        raise ValueError(f"{', '.join(paths)}: --max_length {args.max_length} leaves no row a trained token")
    return kept, truncated, len(rows) - len(kept)


def lengths(rows):
    """Tokens of each row."""
    return [len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows]


def trained_tokens(rows):
    return sum(sum(row["trained"]) for row in rows)


def pack(lengths, budget):
    """Bin-packing: the fewest micro-batches, as many on every rank, over which `deal` keeps to the budget.

    Lengths 6 5 5 4 in a budget of 10 -> [0, 3] and [1, 2].
    """
    number = max(1, -(-sum(lengths) // budget))
    while max(sum(lengths[i] for i in hand) for hand in deal(lengths, number)) > budget:
        number += 1
    [number] = all_reduce([number], dist.ReduceOp.MAX)  # see `cut`; more hands are never heavier
    return deal(lengths, int(number))


def micro_batches(policy, rows, args):
    """This rank's share of the rows, which are equal on all ranks -> logp_nt, trained_nt of each micro-batch.

    An empty micro-batch runs a dummy row that is not trained: its sum is a zero that still has a gradient.
    """
    group, groups = dist.get_rank() // args.sp_size, dist.get_world_size() // args.sp_size
    mine = [rows[i] for i in deal(lengths(rows), groups)[group]]
    dummy = dict(prompt_ids=[0], response_ids=[0], trained=[False])
    budget = args.max_tokens_per_microbatch * args.sp_size
    for part in pack(lengths(mine), budget) if args.packing else cut(lengths(mine), budget, one_row=False):
        batch = [mine[i] for i in part] or [dummy]
        prompts, responses, trained = ([row[name] for row in batch] for name in dummy)
        logp_nt, _ = token_logps(policy, prompts, responses, 1.0, packed if args.packing else padded)
        trained_nt = nn.utils.rnn.pad_sequence([torch.tensor(x) for x in trained], batch_first=True)
        yield logp_nt, trained_nt.to(logp_nt.device)


def update(policy, optimizer, rows, args):
    """One optimizer step -> metrics. Every rank knows all rows: the denominator needs no communication."""
    loss, tokens = 0.0, trained_tokens(rows)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # `tokens` counts those of all ranks; FSDP averages gradients over the ranks, those of adapters are summed
    scale = 1 if args.lora_rank else dist.get_world_size()
    for logp_nt, trained_nt in micro_batches(policy, rows, args):
        part = sft_loss(logp_nt, trained_nt, tokens)
        (part * scale).backward()
        loss += part.item()
    for parameter in parameters if args.lora_rank else ():
        dist.all_reduce(parameter.grad)
    norm = nn.utils.clip_grad_norm_(parameters, args.grad_clip)
    norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    if math.isfinite(norm):  # the norm of all ranks: they step or skip together
        optimizer.step()
    optimizer.zero_grad()
    [loss] = all_reduce([loss])
    return {"train/loss": loss, "train/grad_norm": norm, "train/skipped_updates": not math.isfinite(norm)}


@torch.no_grad()
def evaluate(policy, rows, args):
    """The loss over all rows, each token weighing the same."""
    tokens = trained_tokens(rows)
    losses = [sft_loss(*batch, tokens).item() for batch in micro_batches(policy, rows, args)]
    return all_reduce([sum(losses)])[0]


def main():
    # ---- arguments and data: nothing slow before they are known to be good
    args = tyro.cli(Args, console_outputs=os.environ.get("RANK", "0") == "0")
    check_args(args)
    checkpoints = open_run(args)
    try:
        check_model(AutoConfig.from_pretrained(args.model), args)
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{args.tokenizer or args.model}: the tokenizer has no EOS token")
        train_rows, truncated, dropped = load_examples(args.train_files, args, tokenizer)
        val_rows, val_truncated, val_dropped = load_examples(args.val_files, args, tokenizer)
    except (ValueError, OSError) as error:
        fail(" ".join(str(error).split()))
    steps_per_epoch = len(train_rows) // args.train_batch_size
    if not steps_per_epoch:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} training rows")
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch

    # ---- model
    device, mesh = setup_distributed(args.hsdp_replicas, args.timeout_s)
    resume = first_intact(checkpoints)
    policy, trained = load_policy(args, mesh, device)
    optimizer = torch.optim.AdamW(
        trained.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    first = load_checkpoint(resume, trained, optimizer)["step"] + 1 if resume else 1
    peak = matmul_speed(args, device) * dist.get_world_size()
    log = Logger(args, first - 1, total_steps)
    log.say(
        f"{len(train_rows)} training and {len(val_rows)} validation rows ({truncated + val_truncated} cut to"
        f" --max_length, {dropped + val_dropped} without a trained token dropped), {total_steps} steps,"
        f" {dist.get_world_size()} ranks on {device.type}" + (f", resumed from {resume}" if resume else "")
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    if val_rows and args.val_before_train and not resume:
        log.log({"val/loss": evaluate(policy, val_rows, args), "training/global_step": 0}, 0)

    saving = {}  # seconds of the last checkpoint: reported by the step after it
    for step in range(first, total_steps + 1):
        timing, saving, begin = saving, {}, time.perf_counter()
        epoch, batch_number = divmod(step - 1, steps_per_epoch)
        order = np.random.default_rng((args.seed, epoch)).permutation(len(train_rows))
        rows = [train_rows[i] for i in order[batch_number * args.train_batch_size :][: args.train_batch_size]]

        # ---- update
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(args, step, total_steps)
        with timed(timing, "update_actor"):
            metrics = update(policy, optimizer, rows, args)

        # ---- validation
        last = step == total_steps or all_reduce([stop.is_set()], dist.ReduceOp.MAX) == [1]
        if val_rows and (last or (args.test_freq and step % args.test_freq == 0)):
            with timed(timing, "testing"):
                metrics["val/loss"] = evaluate(policy, val_rows, args)
            log.say(f"step {step}: validation loss {metrics['val/loss']:.4f}")

        # ---- metrics
        timing["step"], tokens = time.perf_counter() - begin, sum(lengths(rows))
        # frozen weights are passed through twice, not three times: they get no gradient
        flops = train_flops(policy, lengths(rows)) * (2 / 3 if args.lora_rank else 1)
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        metrics |= {
            "train/lr": scheduled_rate(args, step, total_steps),
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": timing["step"],
            "perf/throughput": tokens / timing["step"] / dist.get_world_size(),
            "perf/mfu/actor": flops / timing["update_actor"] / peak,
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30,
            "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
            "training/global_step": step,
            "training/epoch": epoch,
        }
        log.log(metrics, step, loss=f"{metrics['train/loss']:.3f}", tok_s=f"{tokens / timing['step']:.0f}")

        # ---- checkpoint, after the metrics: a kill in between loses neither
        if last or (args.save_freq and step % args.save_freq == 0):
            with timed(saving, "save_checkpoint"):
                save_checkpoint(args, step, trained, optimizer, tokenizer)
        if last:
            break
    log.bar.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
