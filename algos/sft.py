"""SFT: minimise -sum(log p(response token | what comes before it)) / (response tokens of the optimizer step).

Differences from other trainers:
1. The denominator counts the tokens of all ranks and micro-batches: no split changes the gradient.
2. All response tokens are trained, EOS too, and nothing else (verl: the last prompt token, no EOS).
3. Rows are balanced over the ranks by tokens, not by their number.
Continued pre-training, in which every token of plain texts is trained: --text_key.
LoRA (arXiv 2106.09685): --lora_rank. AdaLoRA (2303.10512): --lora_kind. QLoRA (2305.14314): --qlora.
Long rows over several ranks (Ulysses, 2309.14509; ring attention, 2310.01889): --sp_size.

CPU:        python algos/sft.py --model models/tiny --train_files data/train.parquet --output_dir runs/sft
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/sft.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/algorithms/sft.md
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, one_line_errors, parse, refuse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")

# Shapes: N rows, T response tokens, V vocabulary. A suffix names the axes (logp_nt). T is aligned with
# the response: column t belongs to response token t.
# A row is a dict of one example: prompt_ids, response_ids, and which response tokens are trained.


@dataclass(kw_only=True)
class Args:
    # ---- run
    output_dir: str  # directory of the run: arguments, metrics, log, checkpoints
    resume: str = "auto"  # auto: output_dir's latest checkpoint; never; or path of another run's
    seed: int = 1  # seed for data order and LoRA init
    total_epochs: int = 1  # without --total_steps: passes over the training data
    total_steps: int | None = None  # number of optimizer steps; None: as many as total_epochs takes
    save_freq: int = 50  # steps between checkpoints; 0: only at the end
    test_freq: int = 10  # with --val_files: steps between validations; 0: only before and after training
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # tracker that also gets the metrics
    # ---- data
    train_files: tuple[str, ...]  # files of training rows
    val_files: tuple[str, ...] = ()  # files of validation rows; none: no validation
    # without --messages_key or --text_key: column of the prompt: chat messages, or a string (one user
    # message)
    prompt_key: str = "prompt"
    # without --messages_key or --text_key: column of the response, a string; dots reach into structs
    response_key: str = "extra_info.answer"
    messages_key: str | None = None  # without --text_key: column of conversations
    text_key: str | None = None  # column of plain texts, instead: every token is trained
    # without --text_key: environment, FILE.py:NAME, whose tools the chat template shows
    env: str | None = None
    max_length: int = 1024  # limit of prompt and response together, in tokens, EOS included
    truncation: Literal["error", "left", "right"] = "error"  # without --text_key: of rows over max_length
    packing: bool = True  # texts share rows without padding, where the model allows it
    # ---- model
    model: str  # Hugging Face directory or hub name of the model to train
    chat_template: str | None = None  # Jinja file in place of the model's chat template; hf/ carries it
    chat_template_kwargs: str = "{}"  # values of its variables, as JSON: {"enable_thinking": false}
    attn_implementation: str = "sdpa"  # attention; sdpa: torch's own, on GPUs flash attention
    # dtype of forward and backward; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    sp_size: int = 1  # ranks that share the tokens of a row
    # with --sp_size above 1: attention between the slices of a row
    sp_attention: Literal["ulysses", "ring"] = "ulysses"
    # what a backward pass computes again; selective: all but products and attention; none: fastest
    gradient_checkpointing: Literal["full", "selective", "none"] = "full"
    compile: bool = False  # compile the layers (GPU)
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    liger: bool = False  # Liger's Triton kernels for norm, rotary embedding and MLP; needs a GPU
    lora_rank: int = 0  # rank of LoRA adapters, trained in place of the model; 0: train the model
    # with --lora_rank: adalora: lora_rank is the mean over the layers
    lora_kind: Literal["lora", "adalora"] = "lora"
    # with --lora_rank: scale, the output of the adapters times lora_alpha / lora_rank
    lora_alpha: float = 16
    qlora: bool = False  # with --lora_rank: frozen weights in 4 bits, whole on every rank
    # ---- optimizer
    train_batch_size: int = 64  # rows of a step, over all ranks
    lr: float = 1e-5  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # decay to 0 after the last step
    warmup_steps: int = 10  # steps of linear warm-up
    # with --lr_schedule linear or cosine: last steps, which alone decay (WSD); 0: all after warm-up
    decay_steps: int = 0
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm
    dft: bool = False  # weigh the loss of a token by its probability (DFT, 2508.05629)

    def __post_init__(self):  # torch is imported by then: below, after the command line has been read
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
        self.sees_images = families.takes_images(self.model, (*self.train_files, *self.val_files))


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import implicit_replication
from transformers import AutoConfig

from data_prep.lib.cache import BOOL, BOOLS, IDS, IMAGES, INT, encoded_rows
from data_prep.lib.conversations import answer, check_prompt, says_nothing
from data_prep.lib.images import encode_prompt, load_processor
from data_prep.lib.templates import given_by, use_template
from data_prep.lib.turns import answer_ids, encode_messages, stops
from envs import load_env
from system import families
from system.attention import states_apart
from system.batches import balance, layout_gap, on_every_rank, pad, split_micro_batches, token_logps
from system.gpu import prepare_layers, send
from system.metrics import speed_metrics, timed
from system.model import (
    TokenLogps,
    add_adapters,
    check_model,
    parts_of,
    read_model,
    read_quantized,
    read_weights,
    whole_weights,
)
from system.ranks import all_reduce, setup_distributed
from system.run import Run, learning_rate
from system.sequence import Slices, ring, sequence_group, ulysses


# ---- The mathematics -------------------------------------------------------------------
def sft_loss(logp_nt, trained_nt, tokens, dft=False):
    """-sum(log p) of the trained tokens over `tokens`, those of the whole optimizer step.

    Log-probs -1 -2 -9 of a row whose last token is a tool's, -3 0 0 (padding), 3 tokens -> 2.
    dft: each token times its probability, which has no gradient (DFT, 2508.05629).
    """
    if dft:
        logp_nt = logp_nt.detach().exp() * logp_nt  # eq: sft.dft
    return -(logp_nt * trained_nt).sum() / tokens  # eq: sft.loss


# ---- The step --------------------------------------------------------------------------
def encode(prompt, response, tokenizer, tools=None, images=()):
    """Ids of a prompt's messages and a response, a string or one message, to its end; which are trained."""
    check_prompt(prompt)
    if not hasattr(tokenizer, "image_processor"):
        reply = dict(role="assistant", content=answer(response))
        [row] = encode_messages([*prompt, reply], tokenizer, tools, first=len(prompt))
        return row
    prompt_ids = encode_prompt(dict(prompt=prompt, images=images), tokenizer, tools)["prompt_ids"]
    response_ids = answer_ids(prompt_ids, answer(response), tokenizer)
    # CAREFUL: the loss goes by position; by value, EOS would be lost where it is also the pad
    return prompt_ids + response_ids, [False] * len(prompt_ids) + [True] * len(response_ids)


def split(ids, trained):
    """A row whose prompt ends where training begins, or None. Nothing predicts ids[0]."""
    if not any(trained[1:]):
        return None
    first = trained.index(True, 1)
    last = len(trained) - trained[::-1].index(True)
    return dict(prompt_ids=ids[:first], response_ids=ids[first:last], trained=trained[first:last])


def micro_batches(policy, rows, args):
    """Cut this rank's share of rows, which are equal on all ranks -> the rows of each micro-batch.

    An empty micro-batch has a row that is not trained: its sum is a zero that still has a gradient.
    """
    dummy = dict(prompt_ids=[0], response_ids=[0], trained=[False])
    rank = dist.get_rank() // args.sp_size
    ranks = dist.get_world_size() // args.sp_size
    tokens = lengths(rows)
    own = balance(tokens, ranks)[rank]
    budget = args.max_tokens_per_microbatch * args.sp_size
    batches = split_micro_batches([tokens[i] for i in own], budget, policy.packed)
    for batch in on_every_rank(policy, batches):
        yield [rows[own[i]] for i in batch] or [dummy]


def update(policy, optimizer, rows, args, step=1, total_steps=1):
    """One optimizer step -> metrics. Every rank knows all rows, and so the denominator."""
    loss = 0.0
    tokens = sum(sum(row["trained"]) for row in rows)
    for batch in micro_batches(policy, rows, args):
        [logp_nt] = token_logps(policy, batch)
        trained_nt = send(pad([row["trained"] for row in batch]), logp_nt.device)
        part = sft_loss(logp_nt, trained_nt, tokens, args.dft)
        # FSDP averages gradients over the ranks, but the tokens already count all ranks
        (part * dist.get_world_size()).backward()
        loss += part.detach()
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
    [loss] = all_reduce([loss.item() / args.sp_size])  # ranks that share a row all have its loss
    return metrics | {"train/loss": loss}


@torch.no_grad()
def evaluate(policy, rows, args):
    """The loss over all rows, each token weighing the same; of texts also in bits per byte."""
    loss = 0.0
    tokens = 0
    for batch in micro_batches(policy, rows, args):
        [logp_nt] = token_logps(policy, batch)
        trained_nt = send(pad([row["trained"] for row in batch]), logp_nt.device)
        loss += sft_loss(logp_nt, trained_nt, 1).item()
        tokens += trained_nt.sum().item()
    loss, tokens = all_reduce([loss, tokens])
    metrics = {"val/loss": loss / tokens}
    if args.text_key:
        bits = loss / tokens / math.log(2)
        metrics["val/bits_per_byte"] = bits * rows.tokens_per_byte  # eq: sft.bits
    return metrics


def main(args):
    # ---- arguments and data: checked before anything slow
    with Run(args) as run:
        tokenizer, train_rows, val_rows, ends, summary = load_data(args)
        steps_per_epoch = len(train_rows) // args.train_batch_size
        total_steps = args.total_steps or args.total_epochs * steps_per_epoch
        if args.lora_kind == "adalora" and total_steps < 10:  # see choose_ranks
            fail(f"--lora_kind adalora: {total_steps} steps are too few to choose ranks in, it takes 10")
        run.plan(total_steps, summary)

        # ---- model
        device, mesh = setup_distributed(args.hsdp_replicas)
        run.say(f"loading {args.model}")
        policy = load_model(args, mesh, device, tokenizer)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        options = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)
        optimizer = torch.optim.AdamW(parameters, lr=args.lr, **options)
        # hf is the directory that the model has in a checkpoint
        run.load(dict(hf=policy.lm), optimizer, tokenizer, whole_weights, ends)
        check_layout(policy, train_rows, args)
        run.start(policy.lm)

        if val_rows and not run.step:
            run.log(evaluate(policy, val_rows, args))

        for step, timing in run.steps():
            epoch, batch = divmod(step - 1, steps_per_epoch)
            order = np.random.default_rng((args.seed, epoch)).permutation(len(train_rows))
            chosen = order[batch * args.train_batch_size :][: args.train_batch_size]
            rows = [train_rows[i] for i in chosen]
            # ---- update
            schedule = args.warmup_steps, args.lr_schedule, args.decay_steps
            lr = learning_rate(args.lr, step, total_steps, *schedule)
            optimizer.param_groups[0]["lr"] = lr
            with timed(timing, "update_actor"):
                metrics = update(policy, optimizer, rows, args, step, total_steps)
            run.updated()
            # ---- validation
            if val_rows and run.due(args.test_freq):
                with timed(timing, "testing"):
                    metrics |= evaluate(policy, val_rows, args)
                run.say(f"step {step}: validation loss {metrics['val/loss']:.4f}")
            # ---- metrics
            timing["step"] = run.elapsed()
            metrics |= speed_metrics(lengths(rows), policy, timing, args.compute_dtype)
            metrics |= {
                "train/lr": lr,
                "training/epoch": epoch,
            }
            run.log(metrics, loss="train/loss", tok_s="perf/throughput")
            # ---- checkpoint, after the metrics: each checkpoint has its metrics
            if run.due(args.save_freq):
                run.save()


# AdaLoRA (2303.10512)
def add_adaptive_adapters(lm, rank, alpha, seed):
    """AdaLoRA: B diag(E) A, of one and a half times the rank; the least important ranks get E = 0.

    Buffers hold the importance and the uncertainty of each weight, and which ranks are kept.
    """
    add_adapters(lm, math.ceil(1.5 * rank), alpha, seed)
    for layer in [layer for layer in lm.modules() if hasattr(layer, "lora_A")]:
        a = layer.lora_A["default"]
        b = layer.lora_B["default"]
        nn.init.normal_(a.weight, std=0.02)
        nn.init.normal_(b.weight, std=0.02)
        layer.lora_E = nn.Parameter(a.weight.new_zeros(a.out_features))
        a.register_forward_hook(lambda _, inputs, out, layer=layer: out * layer.lora_E)
        for name, p in adaptive_parts(layer):
            layer.register_buffer(f"{name}_importance", torch.zeros_like(p, dtype=torch.float32))
            layer.register_buffer(f"{name}_uncertainty", torch.zeros_like(p, dtype=torch.float32))
        layer.register_buffer("lora_kept", torch.ones_like(layer.lora_E, dtype=torch.bool))


def adaptive_parts(layer):
    """Names and parameters of the adapter of a layer."""
    a = layer.lora_A["default"].weight
    b = layer.lora_B["default"].weight
    return ("lora_E", layer.lora_E), ("lora_A", a), ("lora_B", b)


def orthogonality(layers):
    """How far the rows of A and the columns of B are from orthonormal, on average."""
    gaps = []
    for layer in layers:
        _, (_, a), (_, b) = adaptive_parts(layer)
        a = a.full_tensor()
        b = b.full_tensor()
        one = torch.eye(len(a), device=a.device)
        gaps += [a @ a.t() - one, b.t() @ b - one]
    return sum(map(torch.linalg.matrix_norm, gaps)) / len(gaps)  # eq: lora.orthogonality


@torch.no_grad()
def choose_ranks(layers, args, step, total_steps, finite):
    """After a step, from the first tenth of all to the half: choose ranks -> how many are kept."""
    for layer in layers if finite else ():
        for name, p in adaptive_parts(layer):
            mean = getattr(layer, f"{name}_importance")
            spread = getattr(layer, f"{name}_uncertainty")
            now = (p * p.grad).abs().full_tensor().float()
            mean.lerp_(now, 0.15)  # eq: lora.importance
            spread.lerp_((now - mean).abs(), 0.15)
    begin = total_steps // 10
    end = total_steps // 2
    budget = args.lora_rank * len(layers)
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
    parts = []
    for name, _ in adaptive_parts(layer):
        parts.append(getattr(layer, f"{name}_importance") * getattr(layer, f"{name}_uncertainty"))
    e, a, b = parts
    return e + a.mean(1) + b.mean(0)  # eq: lora.score


# ---- The system: data and FSDP2; the rest of it is in system/ ------------------------------
def adapters_of(args):
    """What is trained: the model, or adapters with --lora_rank."""
    add = add_adaptive_adapters if args.lora_kind == "adalora" else add_adapters
    return partial(add, rank=args.lora_rank, alpha=args.lora_alpha, seed=args.seed)


def load_model(args, mesh, device, processor):
    """The model in its root module, sharded by FSDP2. Rank 0 reads the weights for all."""
    if args.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel as replace_classes

        # of transformers' model file; TokenLogps would never call the fused cross-entropy
        family = AutoConfig.from_pretrained(args.model).model_type
        replace_classes(family, fused_linear_cross_entropy=False)
    dtype = getattr(torch, args.compute_dtype)
    what = args.model, args.attn_implementation, adapters_of(args)
    if args.qlora:
        lm, packed = read_quantized(*what, dtype, device, args.packing)
    else:
        lm, full, packed = read_model(*what, args.sees_images, args.packing)
    prepare_layers(lm, args.gradient_checkpointing, args.compile, eager=states_apart(lm))
    if args.sp_size > 1:
        attention = ring if args.sp_attention == "ring" else ulysses
        policy = Slices(lm, packed, sequence_group(args.sp_size, device), attention, entropy=False)
    else:
        policy = TokenLogps(lm, packed, processor if args.sees_images else None, entropy=False)
    fsdp = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32))
    if args.qlora:  # frozen weights are whole on every rank
        frozen = {p for p in policy.parameters() if not p.requires_grad}
        fully_shard(policy, **fsdp, reshard_after_forward=True, ignored_params=frozen)
        return policy
    for part in parts_of(lm):
        fully_shard(part, **fsdp)
    # the root too is resharded after a forward: without a backward nothing else would do it
    fully_shard(policy, **fsdp, reshard_after_forward=True)
    policy.to_empty(device=device)
    read_weights(lm, full)
    return policy


def check_layout(policy, rows, args):
    """Before the first step: in the layout that trains, rows have the model's own log-probs."""
    short = []
    for row in (rows[i % len(rows)] for i in range(4)):  # equal on all ranks
        ids = [x for x in row["prompt_ids"] + row["response_ids"] if x not in policy.never][:32]
        short.append(dict(prompt_ids=ids[:1], response_ids=ids[1:]))
    gap = layout_gap(policy, short)
    limit = families.rounding_limit(policy.lm, args.compute_dtype)
    if gap < limit:  # which NaN is not
        return
    kernel = args.attn_implementation
    cause = f"{kernel} leaves out a soft cap or sinks: try --attn_implementation eager"
    if kernel == "eager":
        cause = "it does something to its logits that TokenLogps leaves out"
    layout = "padded"
    if args.sp_size > 1:
        layout = "sequence-parallel"
        cause = "slices of a row miss something of one another: try --sp_size 1"
    elif policy.packed:
        layout = "packed"
        cause = f"texts in one row see one another: try --no-packing; or {cause}"
    unlike = f"log-probs of {layout} rows under {kernel} are not its own, off by {gap:.3g} on average"
    fail(f"{args.model} ({policy.lm.config.model_type}): {unlike}, over {limit:.3g}; likely {cause}")


def refuse_model(args):
    """Stop where the flags ask for what the model does not have."""
    config = AutoConfig.from_pretrained(args.model)
    name = f"{args.model} ({config.model_type})"
    sp_size = args.sp_size
    heads = getattr(config.get_text_config(), "num_attention_heads", 0)
    special = " and ".join(families.special_layers(config))
    rounded = args.qlora and families.dequantised(config)
    known = {config.model_type}
    if args.liger:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
    text_only = args.text_key or args.messages_key or args.lora_rank or args.liger
    text_only = text_only or args.truncation == "left" or sp_size > 1
    flags = "--text_key, --messages_key, --lora_rank, --liger, --truncation left and --sp_size"
    undivided = f"{name} has {heads} attention heads, which --sp_size {sp_size} does not divide"
    refuse(
        (rounded, f"--qlora rounds whole weights, and {name} has rounded ones"),
        (text_only and args.sees_images, f"{name} takes images, which {flags} do not"),
        (sp_size > 1 and special, f"{name} has {special}, which --sp_size {sp_size} does not implement"),
        (args.sp_attention == "ulysses" and heads % sp_size, f"{undivided}: take --sp_attention ring"),
        (config.model_type not in known, f"{name} has no kernels for --liger"),
    )


def load_data(args):
    """-> tokenizer, rows of training and validation, the tokens that end responses, a line."""
    with one_line_errors():
        lm = check_model(args.model, args.attn_implementation, adapters_of(args))
        refuse_model(args)
        families.check_positions(lm, args.max_length)
        tokenizer = load_processor(args.model, sees=args.sees_images)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        tools = load_env(args.env).tools if args.env else None
        train_rows, ends, *counts = load_examples(args.train_files, args, tokenizer, tools)
        val_rows, _, *val_counts = load_examples(args.val_files, args, tokenizer, tools)
    if len(train_rows) < args.train_batch_size:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} training rows")
    truncated, dropped = map(sum, zip(counts, val_counts))
    summary = f"{len(train_rows)} training and {len(val_rows)} validation rows ({truncated} truncated"
    if truncated and not args.text_key:
        lost = sum(pc.sum(rows.column("lost")).as_py() or 0 for rows in (train_rows, val_rows))
        summary += f", {lost} turns lost"
    return tokenizer, train_rows, val_rows, ends, f"{summary}, {dropped} dropped: no answer)"


def load_examples(paths, args, tokenizer, tools=None):
    """-> rows as `split` makes them, tokens that end responses, numbers of cut and of dropped rows."""
    if args.text_key:
        return load_texts(paths, args, tokenizer)
    columns = dict(prompt=args.prompt_key, completion=args.response_key)
    if args.messages_key:
        columns = dict(messages=args.messages_key)
    keep = slice(args.max_length) if args.truncation == "right" else slice(-args.max_length, None)

    def example(record, _):
        talk = record.get("messages")  # a file may have them without --messages_key
        if says_nothing(talk or record["completion"]):
            return []
        own = given_by(record, tools, tokenizer)
        if talk:
            found = encode_messages(talk, tokenizer, own)
        else:
            found = [encode(record["prompt"], record["completion"], tokenizer, own, record["images"])]
        rows = []
        turns = sum(count_turns(trained) for _, trained in found)
        for ids, trained in found:
            truncated = len(ids) > args.max_length
            if truncated and args.truncation == "error":
                problem = f"{len(ids)} tokens, over --max_length {args.max_length}"
                raise ValueError(f"{problem}; raise it or pass --truncation left or right")
            about = dict(ends=[*stops(ids, trained, tokenizer)], truncated=truncated, images=record["images"])
            row = split(ids[keep], trained[keep])
            rows += [row | about | dict(lost=0)] if row else []
        if rows:
            rows[0]["lost"] = turns - sum(count_turns(row["trained"]) for row in rows)
        return rows

    fields = dict(prompt_ids=IDS, response_ids=IDS, trained=BOOLS, ends=IDS, truncated=BOOL, lost=INT)
    if hasattr(tokenizer, "image_processor"):
        fields["images"] = IMAGES
    about = args.max_length, args.truncation, tools
    code = load_examples, encode, split, count_turns
    rows, dropped = encoded_rows(paths, tokenizer, columns, fields, partial(map, example), about, code)
    if paths and not rows:
        problem = f"no row has an answer with a token within --max_length {args.max_length}"
        raise ValueError(f"{', '.join(paths)}: {problem}")
    ends = {*pc.list_flatten(rows.column("ends")).unique().to_pylist()}
    return rows, ends, pc.sum(rows.column("truncated"), min_count=0).as_py(), dropped


def count_turns(trained):
    """How many turns are trained: others are between them."""
    return sum(on and not before for before, on in zip([False, *trained], trained))


class Texts:
    """Texts one after the other, cut into rows of `length` tokens, the last shorter, on disk.

    Two texts of 3 and 4 tokens, EOS included, length 5: rows of 5 and 2. One token teaches nothing.
    """

    def __init__(self, rows, length):
        self.ids = pc.list_flatten(rows.column("ids"))
        self.length = length
        self.lengths = [min(length, len(self.ids) - i) for i in range(0, len(self.ids) - 1, length)]
        size = pc.sum(rows.column("bytes"), min_count=0).as_py()
        self.tokens_per_byte = len(self.ids) / max(1, size)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        ids = self.ids[i * self.length :][: self.lengths[i]].to_pylist()
        return split(ids, [True] * len(ids))


def load_texts(paths, args, tokenizer):
    """As `load_examples`: Texts, with EOS after each."""

    def example(record, _):
        text = record["text"]
        if not isinstance(text, str):
            raise ValueError(f"{args.text_key} is no text: {text!r:.60}")
        ids = tokenizer(text, verbose=False)["input_ids"]  # with BOS, if it has one
        ids += [tokenizer.eos_token_id] * (ids[-1:] != [tokenizer.eos_token_id])
        return [dict(ids=ids, bytes=len(text.encode()))] if text else []

    fields = dict(ids=IDS, bytes=INT)
    columns = dict(text=args.text_key)
    encode = partial(map, example)
    rows, dropped = encoded_rows(paths, tokenizer, columns, fields, encode, (), (load_texts,))
    return Texts(rows, args.max_length), {tokenizer.eos_token_id}, 0, dropped


def lengths(rows):
    """Tokens of each row; for rows on disk without reading them."""
    if isinstance(rows, Texts):
        return rows.lengths
    if isinstance(rows, list):
        return [len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows]
    parts = [pc.list_value_length(rows.column(name)) for name in ("prompt_ids", "response_ids")]
    return pc.add(*parts).to_pylist()


if __name__ == "__main__":
    main(Args(**flags))
