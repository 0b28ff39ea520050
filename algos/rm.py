"""Reward model (Bradley-Terry; InstructGPT, arXiv 2203.02155): minimise -log sigma(r_chosen - r_rejected).

r is one number for a whole conversation: a linear head on the hidden state of its last token.
Differences from the paper with the default flags:
1. A row is one pair, not all pairs of the K responses to a prompt; the mean is over the pairs of a step.
2. Rows may have a margin (Llama 2, 2307.09288). `--center_rewards_coef` keeps scores around 0 (2312.09244).
3. The head starts at 0: the first loss is log 2, and no score depends on a random draw.
hf/ is a sequence classifier with one label: what `ppo.py --reward_model` loads. LoRA: --lora_rank.

CPU:        python algos/rm.py --model models/tiny --train_files data/pairs.parquet --output_dir runs/rm
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/rm.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/algorithms/rm.md
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

# Shapes: N pairs, L conversations, T tokens, H hidden size. A suffix names the axes (chosen_n).
# A row is a dict of one pair: token ids of both conversations, and its margin.


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
    train_files: tuple[str, ...]  # files of training pairs; a column `margin`, if any, is used
    val_files: tuple[str, ...] = ()  # files of validation pairs; none: no validation
    prompt_key: str = "prompt"  # column of the prompt: chat messages, or a string (one user message)
    chosen_key: str = "chosen"  # column of the chosen response: messages, or a string (the assistant's)
    rejected_key: str = "rejected"  # column of the rejected response: messages, or a string
    max_length: int = 1024  # limit of prompt and response together, in tokens
    # pairs with equal, empty or too long responses, or whose template changes the prompt: stop, or drop
    bad_pairs: Literal["error", "drop"] = "error"
    # ---- model
    model: str  # Hugging Face directory or hub name: a causal LM, or a sequence classifier with one label
    chat_template: str | None = None  # Jinja file in place of the model's chat template; hf/ carries it
    chat_template_kwargs: str = "{}"  # values of its variables, as JSON: {"enable_thinking": false}
    attn_implementation: str = "sdpa"  # attention; sdpa: torch's own, on GPUs flash attention
    # dtype of forward and backward; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    # what a backward pass computes again; selective: all but products and attention; none: fastest
    gradient_checkpointing: Literal["full", "selective", "none"] = "full"
    compile: bool = False  # compile the layers (GPU)
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    lora_rank: int = 0  # rank of LoRA adapters, trained with the head; 0: train the whole model
    # with --lora_rank: scale, the output of the adapters times lora_alpha / lora_rank
    lora_alpha: float = 16
    # ---- optimizer
    train_batch_size: int = 64  # pairs of a step, over all ranks
    lr: float = 1e-5  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # decay to 0 after the last step
    warmup_steps: int = 10  # steps of linear warm-up
    # with --lr_schedule linear or cosine: last steps, which alone decay (WSD); 0: all after warm-up
    decay_steps: int = 0
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    center_rewards_coef: float = 0.0  # weight of (r_chosen + r_rejected)^2, which keeps scores around 0

    def __post_init__(self):  # torch is imported by then: below, after the command line has been read
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig
from transformers.utils import logging

from data_prep.lib.cache import IDS, encoded_rows
from data_prep.lib.conversations import opened, pair_of
from data_prep.lib.images import load_processor
from data_prep.lib.templates import given_by, render, use_template, without_special
from data_prep.lib.turns import check_scored
from system import families
from system.attention import states_apart
from system.batches import balance, on_every_rank, one_row, padded, split_micro_batches
from system.gpu import prepare_layers, send
from system.metrics import speed_metrics, timed
from system.model import add_adapters, parts_of, read_model, read_weights, whole_weights
from system.ranks import all_reduce, setup_distributed
from system.run import Run, learning_rate

PAIR = "chosen_ids", "rejected_ids"  # the conversations of a row


# ---- The mathematics -------------------------------------------------------------------
def pair_loss(chosen_n, rejected_n, margin_n, center):
    """-log sigma(r_c - r_r - m) + center (r_c + r_r)^2 of each pair.

    Scores 2 and 1, margin 1, center 0.1 -> log 2 + 0.9; scores 0 and 0 without a margin -> log 2.
    """
    loss_n = -nn.functional.logsigmoid(chosen_n - rejected_n - margin_n)  # eq: rm.loss
    return loss_n + center * (chosen_n + rejected_n) ** 2  # eq: rm.center


def pair_metrics(chosen_n, rejected_n):
    """What is reported of each pair; a tie has accuracy 0.5. Scores 2 and 1 -> 1, 2, 1, 1."""
    margin_n = chosen_n - rejected_n
    accuracy_n = (1 + torch.sign(margin_n)) / 2
    return dict(accuracy=accuracy_n, chosen=chosen_n, rejected=rejected_n, margins=margin_n)


# ---- The step --------------------------------------------------------------------------
def conversation_ids(prompt, reply, tokenizer, pad_id, tools=None):
    """Ids of a conversation as ppo.py gives it to a reward model; whether its prompt is as if alone."""
    prompt, reply, _ = without_special(pair_of(prompt, reply, reply), tokenizer)
    text = render([*prompt, *reply], tokenizer, tools, prompted=False)
    check_scored([*prompt, *reply], len(prompt), tokenizer, tools)
    alone = render(prompt, tokenizer, tools, prompted=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # CAREFUL: a classifier reads its score at the last token that is not its pad, which may be EOS
    while ids and ids[-1] == pad_id:
        ids.pop()
    return ids, text.startswith(alone)


def pair(prompt, chosen, rejected, margin, tokenizer, pad_id, max_length, tools=None):
    """-> a row of two conversations; ValueError where they are no pair."""
    prompt, chosen, rejected = pair_of(prompt, chosen, rejected)
    chosen, same_chosen = conversation_ids(prompt, chosen, tokenizer, pad_id, tools)
    rejected, same_rejected = conversation_ids(prompt, rejected, tokenizer, pad_id, tools)
    longest = max(len(chosen), len(rejected))
    limit = f"over --max_length {max_length}; raise it"
    problems = {
        "the chat template writes the prompt differently before a reply": not (same_chosen and same_rejected),
        "the chosen and the rejected conversation are the same tokens": chosen == rejected,
        "a conversation has no token but padding": not chosen or not rejected,
        f"the margin {margin} is not a number": not math.isfinite(margin),
        f"a conversation has {longest} tokens, {limit}": longest > max_length,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise NoPair(problem)
    return dict(chosen_ids=chosen, rejected_ids=rejected, margin=float(margin))


def score(policy, conversations):
    """Scores [L] of lists of token ids, none empty, and what the head made them of, [L, H]."""
    layout = one_row if policy.packed else padded
    # a layout says which position predicts a response: here the last of a conversation, with its score
    inputs, where = layout(conversations, [[0]] * len(conversations))
    inputs = {name: send(x) for name, x in inputs.items()}
    return policy(send(where), **inputs)


def score_pairs(policy, pairs):
    """Of pairs: chosen_n, rejected_n, margin_n. Of no pairs they are empty, with a gradient of 0."""
    conversations = [row[name] for name in PAIR for row in pairs]
    score_l, _ = score(policy, conversations or [[0]])  # forward and backward are collectives
    chosen_n, rejected_n = score_l[: len(conversations)].view(2, len(pairs))
    return chosen_n, rejected_n, chosen_n.new_tensor([row["margin"] for row in pairs])


def micro_batches(policy, rows, args):
    """Cut this rank's share of the pairs, which are equal on all ranks -> those of each micro-batch."""
    own = [rows[i] for i in balance(pair_lengths(rows), dist.get_world_size())[dist.get_rank()]]
    sizes = pair_lengths(own)
    if not policy.packed:
        sizes = [2 * max(len(row[name]) for name in PAIR) for row in own]
    batches = split_micro_batches(sizes, args.max_tokens_per_microbatch, policy.packed)
    for batch in on_every_rank(policy, batches):
        yield [own[i] for i in batch]


def update(policy, optimizer, rows, args):
    """One optimizer step -> metrics. Every rank knows all rows, and so the denominator."""
    sums = 0.0
    for batch in micro_batches(policy, rows, args):
        chosen_n, rejected_n, margin_n = score_pairs(policy, batch)
        loss = pair_loss(chosen_n, rejected_n, margin_n, args.center_rewards_coef).sum()
        # FSDP averages gradients over the ranks, but the number of rows already counts all ranks
        (loss * dist.get_world_size() / len(rows)).backward()
        with torch.no_grad():
            found = [x.sum() for x in pair_metrics(chosen_n, rejected_n).values()]
            sums += torch.stack([loss.detach(), *found])
    norm = nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).full_tensor().item()
    if math.isfinite(norm):  # the norm over all ranks: they step or skip together
        optimizer.step()
    optimizer.zero_grad()
    names = "train/loss train/accuracy rewards/chosen rewards/rejected rewards/margins".split()
    metrics = {name: x / len(rows) for name, x in zip(names, all_reduce(sums.tolist()), strict=True)}
    return metrics | {"train/grad_norm": norm, "train/skipped_updates": not math.isfinite(norm)}


@torch.no_grad()
def evaluate(policy, rows, args):
    """Loss, accuracy and margin over all pairs, each weighing the same."""
    sums = 0.0
    for batch in micro_batches(policy, rows, args):
        chosen_n, rejected_n, margin_n = score_pairs(policy, batch)
        found = pair_metrics(chosen_n, rejected_n)
        loss_n = pair_loss(chosen_n, rejected_n, margin_n, args.center_rewards_coef)
        sums += torch.stack([x.sum() for x in (loss_n, found["accuracy"], found["margins"])])
    names = "val/loss", "val/accuracy", "val/margin"
    return {name: x / len(rows) for name, x in zip(names, all_reduce(sums.tolist()), strict=True)}


def main(args):
    # ---- arguments and data: checked before anything slow
    with Run(args) as run:
        tokenizer, pad_id, train_rows, val_rows, summary = load_data(args)
        steps_per_epoch = len(train_rows) // args.train_batch_size
        run.plan(args.total_steps or args.total_epochs * steps_per_epoch, summary)

        # ---- model
        device, mesh = setup_distributed(args.hsdp_replicas)
        run.say(f"loading {args.model}")
        policy = load_model(args, mesh, device, pad_id)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        options = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)
        optimizer = torch.optim.AdamW(parameters, lr=args.lr, **options)
        # hf is the directory that the model has in a checkpoint
        run.load(dict(hf=policy.lm), optimizer, tokenizer, whole_weights)
        check_scores(policy, train_rows, args)
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
            lr = learning_rate(args.lr, step, run.total, *schedule)
            optimizer.param_groups[0]["lr"] = lr
            with timed(timing, "update_actor"):
                metrics = update(policy, optimizer, rows, args)
            run.updated()
            # ---- validation
            if val_rows and run.due(args.test_freq):
                with timed(timing, "testing"):
                    metrics |= evaluate(policy, val_rows, args)
                accuracy = metrics["val/accuracy"]
                loss = metrics["val/loss"]
                run.say(f"step {step}: accuracy {accuracy:.3f}, loss {loss:.4f}")
            # ---- metrics
            timing["step"] = run.elapsed()
            lengths = [len(row[name]) for row in rows for name in PAIR]
            metrics |= speed_metrics(lengths, policy, timing, args.compute_dtype)
            metrics |= {
                "train/lr": lr,
                "training/epoch": epoch,
            }
            run.log(metrics, loss="train/loss", accuracy="train/accuracy", tok_s="perf/throughput")
            # ---- checkpoint, after the metrics: each checkpoint has its metrics
            if run.due(args.save_freq):
                run.save()


# ---- The system: FSDP2 and data; the rest of it is in system/ ------------------------------
class Scorer(nn.Module):
    """A sequence classifier, read at given positions of any layout: one root module, for FSDP."""

    def __init__(self, lm, packed):
        super().__init__()
        self.lm = lm
        self.packed = packed

    def forward(self, where, **inputs):
        """where [L]: flat positions -> scores [L], float32, and the head's input [L, H]."""
        body = families.decoder(self.lm)
        hidden_lh = body(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]
        score_l1 = self.lm.score(hidden_lh.to(self.lm.score.weight.dtype)).float()
        return score_l1.sum(-1), hidden_lh  # of one column: FSDP warns of a view


def load_model(args, mesh, device, pad_id):
    """The model in its root module, sharded by FSDP2. Rank 0 reads the weights for all."""
    logging.set_verbosity_error()  # a causal LM has no head, as it should be

    def adapters_and_head(lm):
        add_adapters(lm, args.lora_rank, args.lora_alpha, args.seed)
        lm.score.requires_grad_(True)

    lm, full, packed = read_model(args.model, args.attn_implementation, adapters_and_head, num_labels=1)
    prepare_layers(lm, args.gradient_checkpointing, args.compile, eager=states_apart(lm))
    policy = Scorer(lm, packed)
    precision = MixedPrecisionPolicy(getattr(torch, args.compute_dtype), reduce_dtype=torch.float32)
    for part in parts_of(lm):
        fully_shard(part, mesh=mesh, mp_policy=precision)
    # the root too is resharded after a forward: without a backward nothing else would do it
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy.to_empty(device=device)
    read_weights(lm, full)
    lm.config.get_text_config().pad_token_id = pad_id
    if not is_classifier(lm.config):
        nn.init.zeros_(lm.score.weight)
    return policy


def is_classifier(config):
    return any("SequenceClassification" in name for name in config.architectures or [])


def check_scores(policy, rows, args):
    """Before the first step: short rows give the head, in the layout that trains, what they give alone."""
    lm = policy.lm
    packed = policy.packed
    ids = [row["chosen_ids"][:32] for row in (rows[:4] * 2)[:4]]
    with torch.no_grad():
        _, hidden_lh = score(policy, ids)  # equal on all ranks
        kernel = lm.config._attn_implementation
        policy.packed = False
        lm.set_attn_implementation("eager")
        _, own_lh = score(policy, ids)
        lm.set_attn_implementation(kernel)
        policy.packed = packed
    gap = ((hidden_lh - own_lh).abs().mean() / own_lh.abs().mean()).item()
    limit = families.rounding_limit(lm, args.compute_dtype)
    if max(all_reduce([gap], dist.ReduceOp.MAX)) < limit:  # which NaN is not
        return
    kernel = args.attn_implementation
    cause = f"{kernel} leaves out a soft cap or sinks: try --attn_implementation eager"
    if packed:
        cause = f"conversations in one row see one another, or {cause}"
    unlike = f"states under {kernel} are not those of eager attention, off by {gap:.3g} of their size"
    fail(f"{args.model} ({lm.config.model_type}): {unlike}, over {limit:.3g}; likely {cause}")


def check_classifier(config, args):
    """Stop where no reward model can be made of the model, by a line, ValueError or ImportError."""
    name = f"{args.model} ({config.model_type})"
    labels = config.num_labels if is_classifier(config) else 1
    config.num_labels = 1
    auto = families.auto_class(config, scores=True)
    with torch.device("meta"):  # which raises for a kernel that the model does not run on
        lm = auto.from_config(config, attn_implementation=args.attn_implementation)
        add_adapters(lm, args.lora_rank, args.lora_alpha, args.seed)
    headless = getattr(getattr(lm, "score", None), "bias", 0) is not None
    families.refuse_images(args.model, (*args.train_files, *args.val_files))
    refuse(
        (labels != 1, f"{name} is a classifier with {labels} labels; a reward model has one score"),
        (headless, f"{name} as a classifier has no head `score` without a bias"),
    )
    families.check_positions(lm, args.max_length)


def load_data(args):
    """-> tokenizer, the classifier's pad id or None, pairs of training and validation, a line."""
    with one_line_errors():
        config = AutoConfig.from_pretrained(args.model)
        check_classifier(config, args)
        tokenizer = load_processor(args.model)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        if tokenizer.chat_template is None:
            raise ValueError(f"{args.model}: the tokenizer has no chat template")
        text = config.get_text_config()
        pad_id = tokenizer.pad_token_id if text.pad_token_id is None else text.pad_token_id
        if pad_id is not None and pad_id >= text.vocab_size:
            pad_id = None
        train_rows, dropped = read_pairs(args.train_files, args, tokenizer, pad_id)
        val_rows, val_dropped = read_pairs(args.val_files, args, tokenizer, pad_id)
    if len(train_rows) < args.train_batch_size:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} training pairs")
    summary = f"{len(train_rows)} training and {len(val_rows)} validation pairs"
    return tokenizer, pad_id, train_rows, val_rows, f"{summary} ({dropped + val_dropped} dropped)"


class NoPair(ValueError):
    """Two conversations of which none is better."""


def read_pairs(paths, args, tokenizer, pad_id):
    """-> rows as `pair` makes them, and how many were dropped. All files have a margin, or none."""
    columns = dict(prompt=args.prompt_key, chosen=args.chosen_key, rejected=args.rejected_key)
    if any("margin" in opened(path, columns, say=False)[0].names for path in paths):
        columns["margin"] = "margin"

    def example(record, _):
        margin = record.get("margin", 0.0)
        tools = given_by(record, None, tokenizer)
        about = margin, tokenizer, pad_id, args.max_length, tools
        try:
            return [pair(*(record[x] for x in ("prompt", "chosen", "rejected")), *about)]
        except NoPair as problem:
            if args.bad_pairs == "drop":
                return []
            raise ValueError(f"{problem}; or drop such pairs by --bad_pairs drop") from None

    fields = dict(chosen_ids=IDS, rejected_ids=IDS, margin=pa.float64())
    about = args.max_length, args.bad_pairs, pad_id
    code = read_pairs, pair, conversation_ids
    rows, dropped = encoded_rows(paths, tokenizer, columns, fields, partial(map, example), about, code)
    if paths and not rows:
        raise ValueError(f"{', '.join(paths)}: --bad_pairs drop leaves no pair")
    return rows, dropped


def pair_lengths(rows):
    """Tokens of each pair; for pairs on disk without reading them."""
    if isinstance(rows, list):
        return [sum(len(row[name]) for name in PAIR) for row in rows]
    return pc.add(*(pc.list_value_length(rows.column(name)) for name in PAIR)).to_pylist()


if __name__ == "__main__":
    main(Args(**flags))
