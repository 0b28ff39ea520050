"""DPO (arXiv 2305.18290): minimise -log sigma(beta h) over pairs of responses, of which one was chosen, with
h = log(p(chosen) / ref(chosen)) - log(p(rejected) / ref(rejected)), where ref is the model before training.

Differences from the paper with the default flags:
1. The reference runs once, before training. Its log-probs are kept in output_dir: no second model.
2. The optimizer is AdamW, not RMSprop.
IPO (2310.12036), SimPO (2405.14734, no reference), KTO (2402.01306, single responses with a label): --loss.
An NLL term (2404.19733): --nll_coef.
LoRA (2106.09685): --lora_rank. QLoRA (2305.14314): --qlora.

CPU:        python algos/dpo.py --model models/tiny --train_files data/train.parquet --output_dir runs/dpo
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/dpo.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/algorithms/dpo.md
"""

import hashlib
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, one_line_errors, parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")

# Shapes: n pairs, N = 2 n responses, T response tokens, V vocabulary. A suffix names the axes
# (logp_nt, reward_n2). T is aligned with the response: column t belongs to response token t.
# A row is a dict of one pair: prompt_ids, and ids of both responses and which of them are trained.
# KTO has one response a row: chosen if desirable, else rejected; the ids of the other are empty.


@dataclass(kw_only=True)
class Args:
    # ---- run
    output_dir: str  # directory of the run: arguments, metrics, log, reference's log-probs, checkpoints
    resume: str = "auto"  # auto: output_dir's latest checkpoint; never; or path of another run's
    seed: int = 1  # seed for data order and LoRA init
    total_epochs: int = 1  # without --total_steps: passes over the training data
    total_steps: int | None = None  # number of optimizer steps; None: as many as total_epochs takes
    save_freq: int = 50  # steps between checkpoints; 0: only at the end
    test_freq: int = 10  # with --val_files: steps between validations; 0: only before and after training
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # tracker that also gets the metrics
    # ---- data
    train_files: tuple[str, ...]  # files of training pairs; kto: or of responses with a label
    val_files: tuple[str, ...] = ()  # files of validation pairs; none: no validation
    prompt_key: str = "prompt"  # column of the prompt: chat messages, or a string (one user message)
    # without --loss kto: column of the chosen response: messages, or a string (the assistant's)
    chosen_key: str = "chosen"
    # without --loss kto: column of the rejected response: messages, or a string
    rejected_key: str = "rejected"
    max_length: int = 1024  # limit of prompt and response together, in tokens, EOS included
    # pairs with equal, empty or too long responses, or whose template changes the prompt: stop, or drop
    bad_pairs: Literal["error", "drop"] = "error"
    # ---- model
    model: str  # Hugging Face directory or hub name of the model to train, which is also the reference
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
    lora_rank: int = 0  # rank of LoRA adapters, trained in place of the model; 0: train the model
    # with --lora_rank: scale, the output of the adapters times lora_alpha / lora_rank
    lora_alpha: float = 16
    qlora: bool = False  # with --lora_rank: frozen weights in 4 bits, whole on every rank
    # ---- optimizer
    train_batch_size: int = 64  # pairs of a step, over all ranks; kto: responses
    lr: float = 1e-6  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # decay to 0 after the last step
    warmup_steps: int = 10  # steps of linear warm-up
    # with --lr_schedule linear or cosine: last steps, which alone decay (WSD); 0: all after warm-up
    decay_steps: int = 0
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    # loss of a pair; sigmoid: DPO; kto: loss of a response that is desirable or not
    loss: Literal["sigmoid", "ipo", "simpo", "kto"] = "sigmoid"
    beta: float = 0.1  # weight of the implicit reward; ipo: the paper's tau; simpo: its paper has 2 to 10
    label_smoothing: float = 0.0  # with --loss sigmoid or simpo: share of pairs whose label is wrong
    simpo_gamma: float = 0.5  # with --loss simpo: margin that it wants between the rewards of a pair
    desirable_weight: float = 1.0  # with --loss kto: weight of desirable responses
    undesirable_weight: float = 1.0  # with --loss kto: weight of the other responses
    nll_coef: float = 0.0  # weight of the negative log-likelihood of the chosen responses

    def __post_init__(self):  # torch is imported by then: below, after the command line has been read
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import AutoConfig

from data_prep.lib.cache import BOOLS, IDS, encoded_rows
from data_prep.lib.conversations import KTO, pair_of, says_nothing
from data_prep.lib.images import load_processor
from data_prep.lib.templates import given_by, use_template
from data_prep.lib.turns import encode_messages, stops
from system import families
from system.attention import states_apart
from system.batches import balance, layout_gap, on_every_rank, pad, split_micro_batches, token_logps
from system.files import digests_of_model, replacing
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

RESPONSES = "chosen", "rejected"  # of a pair


# ---- The mathematics -------------------------------------------------------------------
def preference_loss(args, logp_n2, reference_n2, tokens_n2, z=0.0):
    """Log-probs of chosen and rejected responses -> the loss of each pair, rewards of its responses.

    beta 0.1, log-probs -10 -12, reference -11 -11: rewards 0.1 -0.1, sigmoid -log sigma(0.2) = 0.598;
    2 and 4 tokens: ipo (1/2 + 1/4 - 5)^2 = 18.06, simpo rewards -0.5 -0.3, -log sigma(-0.7) = 1.103.
    kto, the first alone (the other has 0 tokens), z 2: 1 - sigma(0.1 - 0.2) = 0.525.
    """
    ratio_n2 = logp_n2 - reference_n2
    reward_n2 = args.beta * ratio_n2  # eq: dpo.reward
    if args.loss == "ipo":
        mean_n2 = ratio_n2 / tokens_n2
        return (mean_n2[:, 0] - mean_n2[:, 1] - 1 / (2 * args.beta)) ** 2, reward_n2  # eq: dpo.ipo
    if args.loss == "simpo":
        reward_n2 = args.beta * logp_n2 / tokens_n2  # eq: dpo.simpo
    if args.loss == "kto":  # z takes the place of the response that a row lacks
        reward_n2 = reward_n2.where(tokens_n2 > 0, args.beta * z)
    h_n = reward_n2[:, 0] - reward_n2[:, 1] - args.simpo_gamma * (args.loss == "simpo")
    if args.loss == "kto":
        weight_n = torch.where(tokens_n2[:, 0] > 0, args.desirable_weight, args.undesirable_weight)
        return weight_n * (1 - h_n.sigmoid()), reward_n2  # eq: dpo.kto
    e = args.label_smoothing
    log_sigma = nn.functional.logsigmoid
    return -(1 - e) * log_sigma(h_n) - e * log_sigma(-h_n), reward_n2  # eq: dpo.sigmoid


# ---- The step --------------------------------------------------------------------------
def responses(pairs):
    """Responses to pairs, as rows: prompt_ids, response_ids, trained, and their place among all [N]."""
    rows = []
    for place, (pair, name) in enumerate(product(pairs, RESPONSES)):
        if pair[f"{name}_ids"]:  # KTO has one of the two
            text = dict(response_ids=pair[f"{name}_ids"], trained=pair[f"{name}_trained"])
            rows.append(text | dict(prompt_ids=pair["prompt_ids"], place=place))
    return rows


def pair_sizes(rows, packed):
    """Tokens of each pair in the layout of the model, padding of its shorter response included."""
    sizes = [[len(row[f"{name}_ids"]) for name in ("prompt", *RESPONSES)] for row in rows]
    return [p + a + b if packed else (bool(a) + bool(b)) * (p + max(a, b)) for p, a, b in sizes]


def micro_batches(policy, rows, args):
    """Cut this rank's share of the pairs, which are equal on all ranks -> those of each micro-batch."""
    sizes = pair_sizes(rows, policy.packed)
    own = balance(sizes, dist.get_world_size())[dist.get_rank()]
    batches = split_micro_batches([sizes[i] for i in own], args.max_tokens_per_microbatch, policy.packed)
    for batch in on_every_rank(policy, batches):
        yield [rows[own[i]] for i in batch]


def pair_logps(policy, pairs):
    """Sums of the log-probs of trained tokens: logp_n2; of no pairs [0, 2], with a gradient of 0.

    0 for a response that a row lacks.
    """
    texts = responses(pairs)
    [logp_nt] = token_logps(policy, texts)
    trained_nt = send(pad([text["trained"] for text in texts] or [[False]]), logp_nt.device)
    place_n = send(torch.tensor([text["place"] for text in texts]).long(), logp_nt.device)
    sums_n = (logp_nt * trained_nt).sum(-1)
    return sums_n.new_zeros(2 * len(pairs)).scatter(0, place_n, sums_n).view(-1, 2)


@torch.no_grad()
def reference_point(policy, steps, args):
    """KTO's z: the mean log-ratio of responses to prompts of other rows, at least 0; else 0.

    A number of all rows of the steps, and so independent of ranks and micro-batches.
    """
    if args.loss != "kto":
        return 0.0
    total = 0.0
    size = 0
    for rows in steps:
        size += len(rows)
        others = [row["other"] | dict(reference=row["other_reference"]) for row in rows]
        for batch in micro_batches(policy, others, args):
            reference_n2 = torch.tensor(np.array([row["reference"] for row in batch])).view(-1, 2)
            total += (pair_logps(policy, batch).cpu() - reference_n2).sum().item()
    [total] = all_reduce([total])
    return max(0.0, total / size)  # eq: dpo.z


def objective(args, rows, logp_n2, tokens_b2, z):
    """What a micro-batch adds to loss and metrics: its part of the means over the step.

    tokens_b2: trained tokens of all responses of the step; 0: a row lacks the response.
    """
    columns = (np.array([row[name] for row in rows]) for name in ("reference", "tokens"))
    reference_n2, tokens_n2 = (send(torch.tensor(x).float().view(-1, 2), logp_n2.device) for x in columns)
    loss_n, reward_n2 = preference_loss(args, logp_n2, reference_n2, tokens_n2, z)
    nll = -logp_n2[:, 0].sum() / max(tokens_b2[:, 0].sum(), 1)  # eq: dpo.nll
    loss = loss_n.sum() / len(tokens_b2) + args.nll_coef * nll  # eq: dpo.loss
    count_2 = torch.tensor((tokens_b2 > 0).sum(0)).clamp(min=1)  # 1: its sum is 0
    sums = (x * (tokens_n2 > 0) / send(count_2, x.device) for x in (reward_n2, logp_n2))
    (chosen, rejected), (logp_chosen, logp_rejected) = (x.sum(0) for x in sums)
    kto = dict(kl=loss.new_tensor(z * len(rows) / len(tokens_b2))) if args.loss == "kto" else {}
    return dict(loss=loss, nll_loss=nll, **kto) | {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (reward_n2[:, 0] > reward_n2[:, 1]).sum() / len(tokens_b2),
        "rewards/margins": chosen - rejected,
        "logps/chosen": logp_chosen,
        "logps/rejected": logp_rejected,
    }


def update(policy, optimizer, rows, args):
    """One optimizer step -> metrics. Every rank knows all rows, and so the denominators."""
    sums = 0.0
    tokens_b2 = np.array([row["tokens"] for row in rows])
    z = reference_point(policy, [rows], args)
    for batch in micro_batches(policy, rows, args):
        logp_n2 = pair_logps(policy, batch)
        terms = objective(args, batch, logp_n2, tokens_b2, z)
        # FSDP averages gradients over the ranks, but the denominators already count all ranks
        (terms["loss"] * dist.get_world_size()).backward()
        sums += torch.stack([*terms.values()]).detach()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).full_tensor().item()
    if math.isfinite(norm):  # the norm over all ranks: they step or skip together
        optimizer.step()
    optimizer.zero_grad()
    metrics = dict(zip(terms, all_reduce(sums.tolist())))
    metrics = {name if "/" in name else f"train/{name}": value for name, value in metrics.items()}
    return metrics | {"train/grad_norm": norm, "train/skipped_updates": not math.isfinite(norm)}


def in_steps(rows, order, args, **columns):
    """The rows in this order, as many at a time as a step has, each with its number and columns."""
    for start in range(0, len(order), args.train_batch_size):
        numbers = order[start : start + args.train_batch_size]
        yield [rows[i] | dict(number=i) | {name: x[i] for name, x in columns.items()} for i in numbers]


@torch.no_grad()
def evaluate(policy, rows, reference, args):
    """Loss and metrics over all rows, each pair weighing the same. reference: of `before_training`."""
    sums = 0.0
    tokens_b2 = np.array(rows.column("tokens").to_pylist())
    z = reference_point(policy, in_steps(rows, range(len(rows)), args, **reference), args)
    for step in in_steps(rows, range(len(rows)), args, **reference):
        for batch in micro_batches(policy, step, args):
            logp_n2 = pair_logps(policy, batch)
            terms = objective(args, batch, logp_n2, tokens_b2, z)
            sums += torch.stack([*terms.values()])
    return {f"val/{name}": value for name, value in zip(terms, all_reduce(sums.tolist()))}


@torch.no_grad()
def reference_logps(policy, rows, order, args):
    """Log-probs of both responses to each row, [rows, 2], by the model as it was loaded; kept.

    Before training, in the order and micro-batches of the first epoch, which finds the same bits.
    """
    if args.loss == "simpo" or not rows:
        return np.zeros((len(rows), 2), np.float32)
    model = digests_of_model(args.model), args.compute_dtype, args.attn_implementation, args.qlora
    digest = hashlib.sha256(repr(model).encode())
    for name in ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_trained", "rejected_trained"):
        column = rows.column(name)
        for part in (pc.list_flatten(column), pc.list_value_length(column)):
            digest.update(part.to_numpy().tobytes())
    if isinstance(rows, Mismatched):
        digest.update(rows.others)
        digest.update(str(rows.max_length).encode())
    path = Path(args.output_dir, f"reference/{digest.hexdigest()[:32]}.npy")
    rank = dist.get_rank()
    found = [None]
    with suppress(OSError, ValueError, EOFError):  # the file is missing or damaged
        found = [None if rank else np.load(path)]
    dist.broadcast_object_list(found)
    if found[0] is not None:
        return found[0]
    logp_n2 = torch.zeros(len(rows), 2)
    with tqdm(total=len(rows), desc="reference", disable=rank > 0) as bar:
        for step in in_steps(rows, order, args):
            for batch in micro_batches(policy, step, args):
                logp_n2[[row["number"] for row in batch]] = pair_logps(policy, batch).cpu()
            bar.update(len(step))
    dist.all_reduce(logp_n2)  # each row is one rank's, and 0 on the others
    if rank == 0:
        # where the disk is full: a run that resumes computes it again
        with suppress(OSError), replacing(path) as new, new.open("wb") as file:
            np.save(file, logp_n2.numpy())
    return logp_n2.numpy()


def before_training(policy, rows, order, args):
    """Columns of the rows that only the model as it was loaded can make, by `reference_logps`."""
    columns = dict(reference=reference_logps(policy, rows, order, args))
    if args.loss == "kto" and rows:
        other = Mismatched(rows, args.seed, args.max_length)
        columns |= dict(other=other, other_reference=reference_logps(policy, other, order, args))
    return columns


def main(args):
    # ---- arguments and data: checked before anything slow
    with Run(args) as run:
        tokenizer, train_rows, val_rows, summary = load_data(args)
        steps_per_epoch = len(train_rows) // args.train_batch_size
        run.plan(args.total_steps or args.total_epochs * steps_per_epoch, summary)

        def order_of(epoch):
            return np.random.default_rng((args.seed, epoch)).permutation(len(train_rows))

        # ---- model
        device, mesh = setup_distributed(args.hsdp_replicas)
        run.say(f"loading {args.model}")
        policy = load_model(args, mesh, device)
        check_layout(policy, train_rows, args)
        # CAREFUL: the weights are the reference's only until a checkpoint is loaded
        reference = before_training(policy, train_rows, order_of(0), args)
        val_reference = before_training(policy, val_rows, range(len(val_rows)), args)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        options = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)
        optimizer = torch.optim.AdamW(parameters, lr=args.lr, **options)
        # hf is the directory that the model has in a checkpoint
        ends = pc.list_flatten(train_rows.column("ends")).unique().to_pylist()
        run.load(dict(hf=policy.lm), optimizer, tokenizer, whole_weights, ends)
        run.start(policy.lm)

        if val_rows and not run.step:
            run.log(evaluate(policy, val_rows, val_reference, args))

        for step, timing in run.steps():
            epoch, batch = divmod(step - 1, steps_per_epoch)
            numbers = order_of(epoch)[batch * args.train_batch_size :][: args.train_batch_size]
            [rows] = in_steps(train_rows, numbers, args, **reference)
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
                    metrics |= evaluate(policy, val_rows, val_reference, args)
                accuracy = metrics["val/rewards/accuracies"]
                run.say(f"step {step}: validation loss {metrics['val/loss']:.4f}, accuracy {accuracy:.3f}")
            # ---- metrics
            timing["step"] = run.elapsed()
            lengths = [len(x["prompt_ids"]) + len(x["response_ids"]) for x in responses(rows)]
            metrics |= speed_metrics(lengths, policy, timing, args.compute_dtype)
            metrics |= {
                "train/lr": lr,
                "training/epoch": epoch,
            }
            run.log(metrics, loss="train/loss", acc="rewards/accuracies", tok_s="perf/throughput")
            # ---- checkpoint, after the metrics: each checkpoint has its metrics
            if run.due(args.save_freq):
                run.save()


# ---- The system: FSDP2 and data; the rest of it is in system/ ------------------------------
def adapters_of(args):
    """What is trained: the model, or adapters with --lora_rank."""
    return partial(add_adapters, rank=args.lora_rank, alpha=args.lora_alpha, seed=args.seed)


def load_model(args, mesh, device):
    """The model in its root module, sharded by FSDP2. Rank 0 reads the weights for all."""
    dtype = getattr(torch, args.compute_dtype)
    what = args.model, args.attn_implementation, adapters_of(args)
    if args.qlora:
        lm, packed = read_quantized(*what, dtype, device)
    else:
        lm, full, packed = read_model(*what)
    prepare_layers(lm, args.gradient_checkpointing, args.compile, eager=states_apart(lm))
    policy = TokenLogps(lm, packed, entropy=False)
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
    short = responses((rows[:4] * 4)[:4])  # equal on all ranks
    for row in short:
        row["prompt_ids"] = row["prompt_ids"][-16:]
        row["response_ids"] = row["response_ids"][:16]
    gap = layout_gap(policy, short)
    limit = families.rounding_limit(policy.lm, args.compute_dtype)
    if gap < limit:  # which NaN is not
        return
    kernel = args.attn_implementation
    cause = f"{kernel} leaves out a soft cap or sinks: try --attn_implementation eager"
    layout = "padded"
    if kernel == "eager":
        cause = "it does something to its logits that TokenLogps leaves out"
    elif policy.packed:
        layout = "packed"
        cause = f"responses see one another, or {cause}"
    unlike = f"log-probs of {layout} rows under {kernel} are not its own, off by {gap:.3g} on average"
    fail(f"{args.model} ({policy.lm.config.model_type}): {unlike}, over {limit:.3g}; likely {cause}")


def load_data(args):
    """-> tokenizer, pairs of training and of validation, and a line about them."""
    with one_line_errors():
        config = AutoConfig.from_pretrained(args.model)
        name = f"{args.model} ({config.model_type})"
        families.refuse_images(args.model, (*args.train_files, *args.val_files))
        if args.qlora and families.dequantised(config):
            fail(f"--qlora rounds whole weights, and {name} has rounded ones")
        lm = check_model(args.model, args.attn_implementation, adapters_of(args))
        families.check_positions(lm, args.max_length)
        tokenizer = load_processor(args.model)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        train_rows, dropped = load_pairs(args.train_files, args, tokenizer)
        val_rows, val_dropped = load_pairs(args.val_files, args, tokenizer)
    kind = "responses" if args.loss == "kto" else "pairs"
    if len(train_rows) < args.train_batch_size:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} training {kind}")
    summary = f"{len(train_rows)} training and {len(val_rows)} validation {kind}"
    return tokenizer, train_rows, val_rows, f"{summary} ({dropped + val_dropped} dropped)"


def encode_pair(prompt, chosen, rejected, tokenizer, max_length, tools=None):
    """Messages -> a row: ids of the prompt and both responses; which of these are trained.

    None for one of the two: a row of KTO. The assistant's turns of a response are trained.
    ValueError where there is nothing to prefer.
    """
    given = {name: x for name, x in zip(RESPONSES, (chosen, rejected)) if x is not None}
    prompt, *replies = pair_of(prompt, *given.values())
    row = {f"{name}_{what}": [] for name in RESPONSES for what in ("ids", "trained")}
    row["ends"] = []
    for field, reply in zip(given, replies):
        name = field if len(given) == 2 else "completion"
        if says_nothing(reply):
            raise ValueError(f"{name!r} is empty, or has an empty turn")
        found = encode_messages(prompt + reply, tokenizer, tools, first=len(prompt))
        if len(found) != 1:
            several = f"the chat template rewrites a turn of {name!r} when another follows"
            raise ValueError(several if found else f"{name!r} has no turn of the assistant that is trained")
        [(ids, trained)] = found
        if len(ids) > max_length:
            size = f"{len(ids)} tokens with its prompt"
            raise ValueError(f"{name!r} has {size}, over --max_length {max_length}")
        text = split(ids, trained)
        if text["prompt_ids"] != row.setdefault("prompt_ids", text["prompt_ids"]):
            raise ValueError("the prompts of 'chosen' and 'rejected' differ after the chat template")
        row[f"{field}_ids"] = text["response_ids"]
        row[f"{field}_trained"] = text["trained"]
        row["ends"] += stops(ids, trained, tokenizer)
    if row["chosen_ids"] == row["rejected_ids"]:
        raise ValueError("'chosen' and 'rejected' are equal")
    return row | dict(tokens=[sum(row[f"{name}_trained"]) for name in RESPONSES])


def split(ids, trained):
    """A row whose prompt ends where training begins. Nothing predicts ids[0]."""
    first = trained.index(True, 1)
    last = len(trained) - trained[::-1].index(True)
    return dict(prompt_ids=ids[:first], response_ids=ids[first:last], trained=trained[first:last])


class Mismatched:
    """KTO: each prompt of the rows with the response of another row, drawn once, cut at max_length."""

    def __init__(self, rows, seed, max_length):
        order = np.random.default_rng(seed).permutation(len(rows))
        self.rows = rows
        self.max_length = max_length
        self.others = np.empty_like(order)
        self.others[order] = np.roll(order, 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        prompt_ids = self.rows[i]["prompt_ids"]
        row = self.rows[self.others[i]] | dict(prompt_ids=prompt_ids)
        for name in RESPONSES:
            for what in ("ids", "trained"):
                row[f"{name}_{what}"] = row[f"{name}_{what}"][: self.max_length - len(prompt_ids)]
        return row | dict(tokens=[sum(row[f"{name}_trained"]) for name in RESPONSES])

    def column(self, name):
        return self.rows.column(name)  # in the order of the rows


def alone(row, name):
    """Of a row this response alone, as KTO takes it."""
    [other] = {*RESPONSES} - {name}
    tokens = [n * (x == name) for x, n in zip(RESPONSES, row["tokens"])]
    return row | {f"{other}_ids": [], f"{other}_trained": [], "tokens": tokens}


def load_pairs(paths, args, tokenizer):
    """-> rows as `encode_pair` makes them, and how many --bad_pairs dropped. KTO reads pairs too."""
    columns = dict(prompt=args.prompt_key, chosen=args.chosen_key, rejected=args.rejected_key)
    if args.loss == "kto":
        columns = KTO | dict(prompt=args.prompt_key)

    def example(record, _):
        try:
            replies = [record.get(name) for name in RESPONSES]
            if "label" in record:
                replies = [record["completion"], None] if record["label"] else [None, record["completion"]]
            tools = given_by(record, None, tokenizer)
            row = encode_pair(record["prompt"], *replies, tokenizer, args.max_length, tools)
            return [alone(row, x) for x in RESPONSES if row[f"{x}_ids"]] if args.loss == "kto" else [row]
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            if args.bad_pairs == "drop":
                return []
            remedy = "fix it, or drop such pairs by --bad_pairs drop"
            raise ValueError(f"{error}; {remedy}") from None

    fields = dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids", "tokens", "ends"), IDS)
    fields |= dict.fromkeys(("chosen_trained", "rejected_trained"), BOOLS)
    about = args.max_length, args.bad_pairs
    code = load_pairs, encode_pair, split, alone
    rows, dropped = encoded_rows(paths, tokenizer, columns, fields, partial(map, example), about, code)
    if paths and not rows:
        raise ValueError(f"{', '.join(paths)}: --bad_pairs drop leaves no pair")
    return rows, dropped


if __name__ == "__main__":
    main(Args(**flags))
