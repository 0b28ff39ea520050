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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, parse, refuse
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
    env: str | None = None  # environment, FILE.py:NAME, whose tools the chat template shows
    max_length: int = 1024  # limit of prompt and response together, in tokens, EOS included
    truncation: Literal["error", "left", "right"] = "error"  # of rows over max_length
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
    sp_attention: Literal["ulysses", "ring"] = "ulysses"  # attention between the slices of a row
    # what a backward pass computes again; selective: all but products and attention; none: fastest
    gradient_checkpointing: Literal["full", "selective", "none"] = "full"
    compile: bool = False  # compile the layers (GPU)
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    liger: bool = False  # Liger's Triton kernels for norm, rotary embedding and MLP; needs a GPU
    lora_rank: int = 0  # rank of LoRA adapters, trained in place of the model; 0: train the model
    lora_kind: Literal["lora", "adalora"] = "lora"  # adalora: lora_rank is the mean over the layers
    lora_alpha: float = 16  # LoRA scale: the output of the adapters times lora_alpha / lora_rank
    qlora: bool = False  # frozen weights in 4 bits, whole on every rank; needs lora_rank
    # ---- optimizer
    train_batch_size: int = 64  # rows of a step, over all ranks
    lr: float = 1e-5  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # decay to 0 after the last step
    warmup_steps: int = 10  # steps of linear warm-up
    decay_steps: int = 0  # last steps, which alone decay (warm-up-stable-decay); 0: all after warm-up
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm

    def __post_init__(self):  # torch is imported by then: below, after the command line has been read
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
        self.sees_images = families.takes_images(self.model, (*self.train_files, *self.val_files))


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import pyarrow.compute as pc
import torch
import torch.distributed as dist
import transformers
from data_prep.lib.packing import balance, join, one_row, pad, padded, split_micro_batches, states_apart
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from transformers import AttentionInterface, AutoConfig
from transformers.utils import logging

from data_prep.lib import packing
from data_prep.lib.cache import BOOL, BOOLS, IDS, IMAGES, INT, encoded_rows
from data_prep.lib.images import encode_prompt, image_token_ids, load_processor, show_images
from data_prep.lib.replies import answer, asked
from data_prep.lib.templates import given_by, use_template
from data_prep.lib.turns import answer_ids, encode_messages, says_nothing, stops
from envs import load_env
from system import families
from system.gpu import compute_device, prepare_layers, send
from system.log_probs import log_probs
from system.metrics import speed_metrics, timed
from system.run import Run, all_reduce, learning_rate, setup_distributed


# ---- The mathematics -------------------------------------------------------------------
def sft_loss(logp_nt, trained_nt, tokens):
    """-sum(log p) of the trained tokens over `tokens`, those of the whole optimizer step.

    Log-probs -1 -2 -9 of a row whose last token is a tool's, -3 0 0 (padding), 3 tokens -> 2.
    """
    return -(logp_nt * trained_nt).sum() / tokens  # eq: sft.loss


# ---- The step --------------------------------------------------------------------------
def encode(prompt, response, tokenizer, tools=None, images=()):
    """Ids of a prompt (messages, or a string: the user's) and a response to its end; which are trained."""
    messages = asked(prompt)
    if not hasattr(tokenizer, "image_processor"):
        reply = dict(role="assistant", content=answer(response))
        [row] = encode_messages([*messages, reply], tokenizer, tools, first=len(messages))
        return row
    prompt_ids = encode_prompt(dict(prompt=messages, images=images), tokenizer, tools)["prompt_ids"]
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
    own = [rows[i] for i in balance(lengths(rows), ranks)[rank]]
    batches = split_micro_batches(lengths(own), args.max_tokens_per_microbatch * args.sp_size, policy.packed)
    for batch in on_every_rank(policy, batches):
        yield [own[i] for i in batch] or [dummy]


def update(policy, optimizer, rows, args, step=1, total_steps=1):
    """One optimizer step -> metrics. Every rank knows all rows, and so the denominator."""
    loss = 0.0
    tokens = sum(sum(row["trained"]) for row in rows)
    for batch in micro_batches(policy, rows, args):
        [logp_nt] = token_logps(policy, batch, args)
        trained_nt = send(pad([row["trained"] for row in batch]), logp_nt.device)
        part = sft_loss(logp_nt, trained_nt, tokens)
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
    loss, tokens = 0.0, 0
    for batch in micro_batches(policy, rows, args):
        [logp_nt] = token_logps(policy, batch, args)
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
    run = Run(args)
    tokenizer, train_rows, val_rows, ends, summary = load_data(args)
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch
    if args.lora_kind == "adalora" and total_steps < 10:  # see choose_ranks
        fail(f"--lora_kind adalora: {total_steps} steps are too few to choose ranks in, it takes 10")

    # ---- model
    device, mesh = setup_distributed(args.hsdp_replicas)
    policy = load_policy(args, mesh, device)
    stops = policy.lm.generation_config  # the tokens that samplers of the saved model stop at
    stops.eos_token_id = sorted({*ends, *np.ravel(stops.eos_token_id).tolist()} - {None})
    parameters = [p for p in policy.parameters() if p.requires_grad]
    options = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, **options)
    # hf is the directory that the model has in a checkpoint
    run.load(dict(hf=policy.lm), optimizer, tokenizer, whole_weights)
    check_layout(policy, train_rows, args)
    run.start(total_steps, summary, policy.lm)

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
    run.close()


# --------------------------------------------------------------------------------------------------
# The system
# --------------------------------------------------------------------------------------------------
# Above: the algorithm, change it freely. Below: regions that other scripts share;
# `make fix-copies FROM=algos/sft.py` carries a change there to them.


# region log-probs
class TokenLogps(nn.Module):
    """A causal LM whose forward returns log-probs of given tokens: one root module, for FSDP.

    packed: whether its texts are laid out by `one_row`; otherwise by `padded`.
    """

    def __init__(self, lm, packed=False):
        super().__init__()
        self.lm, self.packed = lm, packed
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            fail(f"{lm.config.name_or_path}: its output layer has a bias, which log-probs leave out")
        config = lm.config.get_text_config()
        # granite and minicpm3 divide their logits; cohere and falcon-h1 multiply them
        factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1
        self.scale = factor / (getattr(config, "logits_scaling", None) or 1)
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def hidden(self, where, inputs):
        """What the output layer reads at flat positions, [L, H]."""
        body = families.decoder(self.lm)
        if "pixel_values" in inputs:
            body = self.lm.base_model
        return body(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]

    def forward(self, where, target, args, **inputs):
        """where [L]: flat positions that predict target [L] -> columns of `log_probs`."""
        hidden, weight = self.hidden(where, inputs), self.lm.get_output_embeddings().weight
        options = dict(scale=self.scale, softcap=self.softcap, entropy=False)
        if args.sees_images:
            options["never"] = image_token_ids(self.lm.config)
        return log_probs(hidden.to(weight.dtype), weight, target, **options)  # float32 in Mamba


def token_logps(policy, rows, args):
    """Columns [N, T] of the response tokens of rows, 0 after a response's end.

    logp_nt: log-probs of the tokens.
    """
    layout = one_row if policy.packed else padded
    texts = [(row["prompt_ids"], row["response_ids"]) for row in rows]
    if args.sees_images:
        texts = [(*text, row.get("images", ())) for text, row in zip(texts, rows)]
        layout, texts = show_images(layout, texts, load_processor(args.model, sees=True))
    texts = texts or [([0], [0])]  # a dummy: forward and backward are collectives
    prompts, responses = [text[0] for text in texts], [text[1] for text in texts]
    inputs, where = layout(prompts, responses)
    inputs = {name: send(x) for name, x in inputs.items()}
    columns = policy(send(where), send(join(responses)), args, **inputs)
    lengths = [len(response) for response in responses]
    return [pad(column.split(lengths))[: len(rows)] for column in columns]


# endregion
# region ranks
def on_every_rank(model, batches):
    """This rank's micro-batches, and empty ones after them: every rank has as many."""
    # CAREFUL: forward and backward are collectives; a rank that ran fewer would hang the others
    [largest] = all_reduce([max(len(batches), 1)], dist.ReduceOp.MAX)
    for number in range(int(largest)):
        model.set_requires_all_reduce(number == largest - 1)  # over the replicas of HSDP
        yield batches[number] if number < len(batches) else []


# endregion
# region model
def load_model(args, mesh, device, set_trained, root):
    """The model in its root module, sharded by FSDP2. Rank 0 reads the weights for all.

    set_trained: decides what is trained. That is float32; the rest has the dtype of its files.
    """
    config, attention = read_config(args)
    auto = families.auto_class(config)
    original_dtype = config.dtype or torch.float32
    full = None if dist.get_rank() else families.from_files(auto, args.model)
    config.tie_word_embeddings = all_reduce([bool(full and full.config.tie_word_embeddings)]) == [1]
    with torch.device("meta"):
        lm = auto.from_config(config, dtype="float32", attn_implementation=attention)
        for x in families.unused_weights(lm, args.sees_images).values():
            x.requires_grad_(False)
        set_trained(lm, args)
        for p in lm.parameters():
            if not p.requires_grad:
                p.data = p.data.to(original_dtype)
    lm.config.dtype = original_dtype  # the dtype of hf/
    prepare_layers(lm, args.gradient_checkpointing, args.compile, states_apart(lm))
    policy = root(lm, attention == "packed")
    precision = MixedPrecisionPolicy(getattr(torch, args.compute_dtype), reduce_dtype=torch.float32)
    fsdp = dict(mesh=mesh, mp_policy=precision)
    blocks = [m for m in lm.modules() if type(m).__name__ in lm._no_split_modules]
    blocks += [lm.get_input_embeddings()] * (not config.tie_word_embeddings)
    for block in blocks[::-1]:  # inner first
        fully_shard(block, **fsdp)
    # the root too is resharded after a forward: without a backward nothing else would do it
    fully_shard(policy, **fsdp, reshard_after_forward=True)
    policy.to_empty(device=device)
    if full:
        set_trained(full, args)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(lm, full.state_dict() if full else {}, options=options)
    for name, buffer in lm.named_buffers():  # rotary frequencies and the like are in no state dict
        if full:
            buffer.copy_(full.get_buffer(name))
        dist.broadcast(buffer, 0)
    if full:  # saved with the weights: it may name more EOS tokens
        lm.generation_config = full.generation_config
    return policy


def read_config(args):
    """The model's configuration, without dropout, and its attention: "packed" if texts share a row."""
    logging.disable_progress_bar()  # of transformers
    config = AutoConfig.from_pretrained(args.model)
    attention = args.attn_implementation
    for part in filter(None, (config, *(getattr(config, name) for name in config.sub_configs))):
        part.__dict__.pop("quantization_config", None)  # trained and saved weights are whole
        for name in part.to_dict():
            if "dropout" in name or name.endswith("_pdrop"):
                setattr(part, name, 0.0)  # CAREFUL: else the first ratio is not 1
    if not args.packing:
        return config, attention
    special = families.special_layers(config, one_row=True)
    if args.sees_images:
        special.append("images")
    if attention == "sdpa" and not special:
        attention = "packed"
    return config, attention


def add_adapters(lm, args):
    """With --lora_rank: LoRA matrices next to the linear layers (2106.09685), and all else frozen.

    All linear layers except experts, routers and the output layer.
    """
    if not args.lora_rank:
        return
    import peft  # here, because it takes two seconds
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN as renamed

    renamed.clear()  # CAREFUL: peft would give adapters of shared experts to all experts
    body = {*families.decoder(lm).modules()}  # all but the output layer
    left_out = "gate", "router", "mamba.out_proj", "mixer.out_proj"  # Mamba's kernels skip adapters
    targets = []
    for name, layer in lm.named_modules():
        linear = type(layer) is nn.Linear and layer in body
        linear |= type(layer).__name__ == "Linear4bit"  # --qlora, which leaves the output layer whole
        if linear and ".experts." not in name and not name.endswith(left_out):
            targets.append(name)
    scale = dict(r=args.lora_rank, lora_alpha=args.lora_alpha)
    torch.manual_seed(args.seed)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, **scale), lm)


@torch.no_grad()
def whole_weights(lm, dtype):
    """Names and weights of the sharded model as its files have them, one whole weight at a time.

    Adapters are added to their layers, tied weights come once. A collective: all ranks consume all.
    """
    to_files = families.to_files(lm)
    for name, x in lm.state_dict(keep_vars=True).items():  # persistent buffers too
        if name in lm.all_tied_weights_keys or ".lora_" in name:
            continue
        if ".weight." in name:  # scales of QLoRA
            continue
        if hasattr(x, "quant_state"):  # QLoRA: 4 bits, whole on every rank
            from peft.utils.integrations import dequantize_bnb_weight

            x = dequantize_bnb_weight(x).to(dtype)
        layer, base, end = name.partition(".base_layer.")
        if base and end == "weight":
            x = merged_weight(lm.get_submodule(layer), x).to(dtype)
        elif isinstance(x, DTensor):
            x = x.to(compute_device(), dtype).full_tensor()  # a shard is cast before it travels
        yield from to_files({name.replace(".base_layer", ""): x}).items()


def merged_weight(lora, weight):
    """The weight of a layer with its adapters added, W + (alpha / r) B A, in float32."""
    a, b = (x.default.weight.to(compute_device()).full_tensor() for x in (lora.lora_A, lora.lora_B))
    if hasattr(lora, "lora_E"):  # AdaLoRA
        a = a * lora.lora_E.full_tensor()[:, None]
    if isinstance(weight, DTensor):  # with --qlora it is whole
        weight = weight.to(compute_device()).full_tensor()
    return weight.float().addmm(b, a, alpha=lora.scaling["default"])  # eq: lora.weights


# endregion
# region sequence parallel
class Slices(TokenLogps):
    """TokenLogps of one row, of which each rank of a group computes a slice.

    attention: of transformers, for a slice; it gets the group besides what `packed_attention` gets.
    """

    def __init__(self, lm, packed, group, attention):
        super().__init__(lm, packed)
        self.group = group
        AttentionInterface.register("slices", partial(attention, group=group))
        lm.set_attn_implementation("slices")

    def forward(self, where, target, args, **inputs):
        """As TokenLogps, on every rank for the whole row; the gradient is that of this rank's slice."""
        rank, size = self.group.rank(), self.group.size()
        tokens = inputs["input_ids"].shape[1]
        width = -(-tokens // size)
        for name in ("input_ids", "position_ids"):
            row = nn.functional.pad(inputs[name], (0, width * size - tokens))
            inputs[name] = row[:, rank * width :][:, :width]
        # labels were shifted before this cut: a slice's last position predicts what the next begins with
        own = where // width == rank
        columns = super().forward(where[own] - rank * width, target[own], args, **inputs)
        part = torch.stack([x.new_zeros(len(where)).masked_scatter(own, x) for x in columns])
        whole = part.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return part + (whole - part.detach())


def sequence_group(sp_size, device):
    """The group of this rank and its neighbours, which share rows."""
    shape = dist.get_world_size() // sp_size, sp_size
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
    return mesh["sequence"].get_group()


def ulysses(module, query, key, value, mask, group, **layout):
    """Trade a slice of all heads for the whole row of a few, attend, and trade back (2309.14509)."""
    size = group.size()
    tokens = int(layout["shapes"][:, 0].sum())
    row = []
    for x in (query, key, value):  # [1, H, T / size, D]
        # each rank needs a key/value head
        x = x[0].repeat_interleave(size // math.gcd(size, x.shape[1]), 0)
        # [H / size, T, D]
        x = trade(x.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)
        row.append(x[None, :, :tokens])
    out, _ = packing.packed_attention(module, *row, mask, **layout)  # [1, T, H / size, D]
    out = nn.functional.pad(out[0], (0, 0, 0, 0, 0, -tokens % size))
    return trade(out.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)[None], None


def trade(x, group):
    """Give block i of the first axis to rank i of the group."""
    ops = dist._functional_collectives
    # CAREFUL: gloo writes into freed memory while several are on their way: one after the other
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), None, None, group))


# endregion
RING_ROWS = 128  # positions whose attention scores the ring holds at the same time


def ring(module, query, key, value, mask, group, scaling, kv_index, shapes, **_):
    """Ring attention (2310.01889): no rank ever holds the keys and values of the whole row."""
    heads = query.shape[1] // key.shape[1]  # of queries to one of keys: rows of one matrix
    rows = query[0].unflatten(0, (-1, heads)).transpose(1, 2).flatten(1, 2)
    spans = visible_spans(kv_index.cpu(), shapes, key.shape[2] * group.size())
    out = Ring.apply(rows, torch.cat([key[0], value[0]], -1), spans, group, scaling)
    out = out.unflatten(1, (-1, heads)).transpose(0, 1).flatten(1, 2)  # [T / size, H, D]
    return out[None], None


def visible_spans(kv_index, shapes, tokens):
    """What each token of a row by `one_row` sees [tokens, 3]: start and end of a span, and more.

    The span is the prompt that its segment follows, or empty. The third number is where its segment
    begins: the token sees all from there up to itself. Prompt a b with responses c d and e, in the row
    a b, e, c d: 0 0 0 for a and b, 0 2 2 for e, 0 2 3 for c and d.
    """
    spans, sizes = [], []
    start = first = 0  # of a segment, and of what it sees
    for queries, keys in shapes.tolist():
        root = kv_index[first].item()
        spans.append((root, root + keys - queries, start))
        sizes.append(queries)
        start += queries
        first += keys
    spans.append((start, start, start))  # padding
    sizes.append(tokens - start)
    return torch.tensor(spans).repeat_interleave(torch.tensor(sizes), 0)


class Ring(torch.autograd.Function):
    """query [KV, rows, D], kv [KV, T / size, 2 D]: keys next to values -> [KV, rows, D].

    Keys and values travel from rank to rank; each softmax is put together from its parts on the way.
    """

    @staticmethod
    def pass_on(x, group, hops=1):
        """Begin to send x that far around the ring -> what comes from behind when the works are done."""
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
        """Each slice of keys and values that passes by, this rank's first, and its blocks of scores."""
        width, rank = kv.shape[1], group.rank()
        # the first slice that each rank has to see
        first = [part[:, 0].min().item() // width for part in spans.split(width)]
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
            c = max(spans[a:b, 0].min().item(), other)
            d = min(b, other + width)
            if c >= d:
                continue
            span_start, span_end, own_start = spans[a:b].to(kv.device)[..., None].unbind(1)
            token, key = (torch.arange(*x, device=kv.device) for x in ((a, b), (c, d)))
            visible = (span_start <= key) & (key < span_end)
            visible |= (own_start <= key) & (key <= token[:, None])
            rows = slice((a - start) * heads, (b - start) * heads)
            columns = slice(c - other, d - other)
            scores = (query[:, rows] @ kv[:, columns, : query.shape[-1]].mT).float() * scaling
            yield rows, columns, scores.masked_fill(~visible.repeat_interleave(heads, 0), -math.inf)

    @staticmethod
    def forward(ctx, query, kv, *row):
        size = query.shape[-1]
        # log of the sum of e^scores so far
        lse = torch.full(query.shape[:2], -math.inf, device=query.device)
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
        """p the softmax: d score = p (d out . value - d out . out); d_kv travels with kv, then home."""
        query, kv, out, lse = ctx.saved_tensors
        _, group, scaling = ctx.row
        size = query.shape[-1]
        inner = (d_out * out).sum(-1, keepdim=True)
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
    """AdaLoRA: B diag(E) A, of one and a half times the rank; the least important ranks get E = 0.

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


def adaptive_parts(layer):
    """Names and parameters of the adapter of a layer."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return ("lora_E", layer.lora_E), ("lora_A", a), ("lora_B", b)


def orthogonality(layers):
    """How far the rows of A and the columns of B are from orthonormal, on average."""
    gaps = []
    for layer in layers:
        _, (_, a), (_, b) = adaptive_parts(layer)
        a, b = a.full_tensor(), b.full_tensor()
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
    begin, end = total_steps // 10, total_steps // 2
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


def load_policy(args, mesh, device):
    """The model, as the flags want it."""
    if args.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel as replace_classes

        # of transformers' model file; TokenLogps would never call the fused cross-entropy
        family = AutoConfig.from_pretrained(args.model).model_type
        replace_classes(family, fused_linear_cross_entropy=False)
    root = TokenLogps
    if args.sp_size > 1:
        attention = dict(ulysses=ulysses, ring=ring)[args.sp_attention]
        root = partial(Slices, group=sequence_group(args.sp_size, device), attention=attention)
    set_trained = add_adaptive_adapters if args.lora_kind == "adalora" else add_adapters
    load = load_quantized if args.qlora else load_model
    return load(args, mesh, device, set_trained, root)


def load_quantized(args, mesh, device, set_trained, root):
    """As load_model, but the frozen weights are in 4 bits (NF4), and whole on every rank."""
    config, attention = read_config(args)
    auto = families.auto_class(config)
    original_dtype = config.dtype
    dtype = getattr(torch, args.compute_dtype)
    with torch.device("meta"):
        unused = families.unused_weights(auto.from_config(config), args.sees_images)
    whole = [f"{name.rpartition('.')[0]}$" for name in unused] + ["lm_head"]
    lm = families.from_files(
        auto,
        args.model,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        device_map={"": device},
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=whole if unused else None,
        ),
    )
    set_trained(lm.train(), args)
    for p in lm.parameters():  # adapters are equal on all ranks, by the seed
        if p.requires_grad:
            p.data = p.data.float()
    del lm.config.quantization_config  # hf/ has whole weights
    lm.config.dtype = original_dtype or dtype
    prepare_layers(lm, args.gradient_checkpointing, args.compile, states_apart(lm))
    policy = root(lm, attention == "packed")
    frozen = {p for p in policy.parameters() if not p.requires_grad}
    precision = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    options = dict(reshard_after_forward=True, ignored_params=frozen)
    fully_shard(policy, mesh=mesh, mp_policy=precision, **options)
    return policy


@torch.no_grad()
def own_logps(policy, rows, args):
    """Log-probs of responses [N, T] by the model's own logits, row by row under eager attention."""
    lm = policy.lm
    kernel = lm.config._attn_implementation
    lm.set_attn_implementation("eager")
    policy.unshard()
    found = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]], device=compute_device())
        logits = lm(input_ids=ids, use_cache=False).logits[0].float()
        if args.sees_images:
            logits[:, image_token_ids(lm.config)] = -1e4
        logp = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        found.append(logp[len(row["prompt_ids"]) - 1 :])
    policy.reshard()
    lm.set_attn_implementation(kernel)
    return pad(found)


def check_layout(policy, rows, args):
    """Before the first step: in the layout that trains, rows have the model's own log-probs."""
    images = image_token_ids(policy.lm.config)
    short = []
    for row in (rows[i % len(rows)] for i in range(4)):  # equal on all ranks
        ids = [x for x in row["prompt_ids"] + row["response_ids"] if x not in images][:32]
        short.append(dict(prompt_ids=ids[:1], response_ids=ids[1:]))
    with torch.no_grad():
        [logp_nt] = token_logps(policy, short, args)
    tokens = sum(len(row["response_ids"]) for row in short)
    gap = (logp_nt - own_logps(policy, short, args)).abs().sum() / tokens
    [gap] = all_reduce([gap / dist.get_world_size()])
    kernel = args.attn_implementation
    layout, cause = "padded", f"{kernel} leaves out a soft cap or sinks: try --attn_implementation eager"
    if kernel == "eager":
        cause = "it does something to its logits that TokenLogps leaves out"
    if args.sp_size > 1:
        layout, cause = "sequence-parallel", "slices of a row miss something of one another: try --sp_size 1"
    elif policy.packed:
        layout, cause = "packed", f"texts in one row see one another: try --no-packing; or {cause}"
    limit, _ = families.rounding_limit(policy.lm, args.compute_dtype)
    if not gap < limit:  # `not <` also fails for NaN
        unlike = f"log-probs of {layout} rows under {kernel} are not its own, off by {gap:.3g} on average"
        fail(f"{args.model} ({policy.lm.config.model_type}): {unlike}, over {limit:.3g}; likely {cause}")


def check_model(config, args):
    """Stop where the model cannot be trained, by a line, ValueError or ImportError."""
    with torch.device("meta"):  # which raises for a kernel that the model does not run on
        lm = families.auto_class(config).from_config(config, attn_implementation=args.attn_implementation)
        add_adapters(lm, args)
        TokenLogps(lm)  # refuses a bias of the output layer
    name, sp_size = f"{args.model} ({config.model_type})", args.sp_size
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
    families.check_positions(lm, args.max_length)


def load_data(args):
    """-> tokenizer, rows of training and validation, the tokens that end responses, a line."""
    try:
        check_model(AutoConfig.from_pretrained(args.model), args)
        tokenizer = load_processor(args.model, sees=args.sees_images)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
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
        for ids, trained in found:
            truncated = len(ids) > args.max_length
            if truncated and args.truncation == "error":
                problem = f"{len(ids)} tokens, over --max_length {args.max_length}"
                raise ValueError(f"{problem}; raise it or pass --truncation left or right")
            about = dict(ends=[*stops(ids, trained, tokenizer)], truncated=truncated, images=record["images"])
            row = split(ids[keep], trained[keep])
            rows += [row | about] if row else []
        return rows

    fields = dict(prompt_ids=IDS, response_ids=IDS, trained=BOOLS, ends=IDS, truncated=BOOL)
    if hasattr(tokenizer, "image_processor"):
        fields["images"] = IMAGES
    about = args.max_length, args.truncation, tools
    code = load_examples, encode, split
    rows, dropped = encoded_rows(paths, tokenizer, columns, fields, partial(map, example), about, code)
    if paths and not rows:
        problem = f"no row has an answer with a token within --max_length {args.max_length}"
        raise ValueError(f"{', '.join(paths)}: {problem}")
    ends = {*pc.list_flatten(rows.column("ends")).unique().to_pylist()}
    return rows, ends, pc.sum(rows.column("truncated"), min_count=0).as_py(), dropped


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
    columns, encode = dict(text=args.text_key), partial(map, example)
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
