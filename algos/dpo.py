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
    from system.arguments import fail, parse, refuse
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
    total_epochs: int = 1  # passes over the training data
    total_steps: int | None = None  # number of optimizer steps; None: as many as total_epochs takes
    save_freq: int = 50  # steps between checkpoints; 0: only at the end
    test_freq: int = 10  # steps between validations; 0: only before and after training
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # tracker that also gets the metrics
    # ---- data
    train_files: tuple[str, ...]  # parquet files of training pairs; kto: or of responses with a label
    val_files: tuple[str, ...] = ()  # parquet files of validation pairs; none: no validation
    prompt_key: str = "prompt"  # column of the prompt: chat messages, or a string (one user message)
    chosen_key: str = "chosen"  # column of the chosen response: messages, or a string (the assistant's)
    rejected_key: str = "rejected"  # column of the rejected response: messages, or a string
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
    lora_alpha: float = 16  # LoRA scale: the output of the adapters times lora_alpha / lora_rank
    qlora: bool = False  # frozen weights in 4 bits, whole on every rank; needs lora_rank
    # ---- optimizer
    train_batch_size: int = 64  # pairs of a step, over all ranks; kto: responses
    lr: float = 1e-6  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # decay to 0 after the last step
    warmup_steps: int = 10  # steps of linear warm-up
    decay_steps: int = 0  # last steps, which alone decay (warm-up-stable-decay); 0: all after warm-up
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    # loss of a pair; sigmoid: DPO; kto: loss of a response that is desirable or not
    loss: Literal["sigmoid", "ipo", "simpo", "kto"] = "sigmoid"
    beta: float = 0.1  # weight of the implicit reward; ipo: the paper's tau; simpo: its paper has 2 to 10
    label_smoothing: float = 0.0  # share of pairs whose label is taken to be wrong; sigmoid, simpo
    simpo_gamma: float = 0.5  # margin between the rewards of chosen and rejected that simpo wants
    desirable_weight: float = 1.0  # weight of kto's desirable responses
    undesirable_weight: float = 1.0  # weight of kto's other responses
    nll_coef: float = 0.0  # weight of the negative log-likelihood of the chosen responses

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
from tqdm import tqdm
from transformers import AutoConfig
from transformers.utils import logging

from data_prep.lib.cache import BOOLS, IDS, encoded_rows
from data_prep.lib.columns import KTO
from data_prep.lib.images import load_processor
from data_prep.lib.replies import pair_of
from data_prep.lib.templates import given_by, use_template
from data_prep.lib.turns import encode_messages, says_nothing
from system import families
from system.files import model_content, replacing
from system.gpu import compute_device, prepare_layers, send
from system.log_probs import log_probs
from system.metrics import speed_metrics, timed
from system.run import Run, all_reduce, learning_rate, setup_distributed

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
    e, log_sigma = args.label_smoothing, nn.functional.logsigmoid
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


def pair_logps(policy, pairs, args):
    """Sums of the log-probs of trained tokens: logp_n2; of no pairs [0, 2], with a gradient of 0.

    0 for a response that a row lacks.
    """
    texts = responses(pairs)
    [logp_nt] = token_logps(policy, texts, args)
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
    total, size = 0.0, 0
    for rows in steps:
        size += len(rows)
        others = [row["other"] | dict(reference=row["other_reference"]) for row in rows]
        for batch in micro_batches(policy, others, args):
            reference_n2 = torch.tensor(np.array([row["reference"] for row in batch])).view(-1, 2)
            total += (pair_logps(policy, batch, args).cpu() - reference_n2).sum().item()
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
        logp_n2 = pair_logps(policy, batch, args)
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
            logp_n2 = pair_logps(policy, batch, args)
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
    digest = hashlib.sha256(repr(model_content(args.model)).encode())
    for name in ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_trained", "rejected_trained"):
        column = rows.column(name)
        for part in (pc.list_flatten(column), pc.list_value_length(column)):
            digest.update(part.to_numpy().tobytes())
    if isinstance(rows, Mismatched):
        digest.update(rows.others)
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
                logp_n2[[row["number"] for row in batch]] = pair_logps(policy, batch, args).cpu()
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
        other = Mismatched(rows, args.seed)
        columns |= dict(other=other, other_reference=reference_logps(policy, other, order, args))
    return columns


def main(args):
    # ---- arguments and data: checked before anything slow
    run = Run(args)
    tokenizer, train_rows, val_rows, summary = load_data(args)
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch

    def order_of(epoch):
        return np.random.default_rng((args.seed, epoch)).permutation(len(train_rows))

    # ---- model
    device, mesh = setup_distributed(args.hsdp_replicas)
    policy = load_policy(args, mesh, device)
    check_layout(policy, train_rows, args)
    # CAREFUL: the weights are the reference's only until a checkpoint is loaded
    reference = before_training(policy, train_rows, order_of(0), args)
    val_reference = before_training(policy, val_rows, range(len(val_rows)), args)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    options = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, **options)
    # hf is the directory that the model has in a checkpoint
    run.load(dict(hf=policy.lm), optimizer, tokenizer, whole_weights)
    run.start(total_steps, summary, policy.lm)

    if val_rows and not run.step:
        run.log(evaluate(policy, val_rows, val_reference, args))

    for step, timing in run.steps():
        epoch, batch = divmod(step - 1, steps_per_epoch)
        numbers = order_of(epoch)[batch * args.train_batch_size :][: args.train_batch_size]
        [rows] = in_steps(train_rows, numbers, args, **reference)
        # ---- update
        schedule = args.warmup_steps, args.lr_schedule, args.decay_steps
        lr = learning_rate(args.lr, step, total_steps, *schedule)
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
    run.close()


# --------------------------------------------------------------------------------------------------
# The system
# --------------------------------------------------------------------------------------------------
# Above: the algorithm, change it freely. Below: regions that other scripts share;
# `make fix-copies FROM=algos/dpo.py` carries a change there to them.


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
        return body(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]

    def forward(self, where, target, args, **inputs):
        """where [L]: flat positions that predict target [L] -> columns of `log_probs`."""
        hidden, weight = self.hidden(where, inputs), self.lm.get_output_embeddings().weight
        options = dict(scale=self.scale, softcap=self.softcap, entropy=False)
        return log_probs(hidden.to(weight.dtype), weight, target, **options)  # float32 in Mamba


def token_logps(policy, rows, args):
    """Columns [N, T] of the response tokens of rows, 0 after a response's end.

    logp_nt: log-probs of the tokens.
    """
    layout = one_row if policy.packed else padded
    texts = [(row["prompt_ids"], row["response_ids"]) for row in rows]
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
    special = families.special_layers(config, one_row=True)
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
    if isinstance(weight, DTensor):  # with --qlora it is whole
        weight = weight.to(compute_device()).full_tensor()
    return weight.float().addmm(b, a, alpha=lora.scaling["default"])  # eq: lora.weights


# endregion
def load_policy(args, mesh, device):
    """The model, as the flags want it."""
    load = load_quantized if args.qlora else load_model
    return load(args, mesh, device, add_adapters, TokenLogps)


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
def own_logps(policy, rows):
    """Log-probs of responses [N, T] by the model's own logits, row by row under eager attention."""
    lm = policy.lm
    kernel = lm.config._attn_implementation
    lm.set_attn_implementation("eager")
    policy.unshard()
    found = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]], device=compute_device())
        logits = lm(input_ids=ids, use_cache=False).logits[0].float()
        logp = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        found.append(logp[len(row["prompt_ids"]) - 1 :])
    policy.reshard()
    lm.set_attn_implementation(kernel)
    return pad(found)


def check_layout(policy, rows, args):
    """Before the first step: in the layout that trains, rows have the model's own log-probs."""
    short = responses((rows[:4] * 4)[:4])  # equal on all ranks
    for row in short:
        row["prompt_ids"] = row["prompt_ids"][-16:]
        row["response_ids"] = row["response_ids"][:16]
    with torch.no_grad():
        [logp_nt] = token_logps(policy, short, args)
    tokens = sum(len(row["response_ids"]) for row in short)
    gap = (logp_nt - own_logps(policy, short)).abs().sum() / tokens
    [gap] = all_reduce([gap / dist.get_world_size()])
    kernel = args.attn_implementation
    layout, cause = "padded", f"{kernel} leaves out a soft cap or sinks: try --attn_implementation eager"
    if kernel == "eager":
        cause = "it does something to its logits that TokenLogps leaves out"
    elif policy.packed:
        layout, cause = "packed", f"responses see one another, or {cause}"
    limit, _ = families.rounding_limit(policy.lm, args.compute_dtype)
    if not gap < limit:  # `not <` also fails for NaN
        unlike = f"log-probs of {layout} rows under {kernel} are not its own, off by {gap:.3g} on average"
        fail(f"{args.model} ({policy.lm.config.model_type}): {unlike}, over {limit:.3g}; likely {cause}")


def check_model(config, args):
    """Stop where the model cannot be trained, by a line, ValueError or ImportError."""
    name = f"{args.model} ({config.model_type})"
    rounded = args.qlora and families.dequantised(config)
    refuse(
        (args.sees_images, f"{name} takes images, which dpo.py does not"),
        (rounded, f"--qlora rounds whole weights, and {name} has rounded ones"),
    )
    with torch.device("meta"):  # which raises for a kernel that the model does not run on
        lm = families.auto_class(config).from_config(config, attn_implementation=args.attn_implementation)
        add_adapters(lm, args)
        TokenLogps(lm)  # refuses a bias of the output layer
    families.check_positions(lm, args.max_length)


def load_data(args):
    """-> tokenizer, pairs of training and of validation, and a line about them."""
    try:
        check_model(AutoConfig.from_pretrained(args.model), args)
        tokenizer = load_processor(args.model)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        train_rows, dropped = load_pairs(args.train_files, args, tokenizer)
        val_rows, val_dropped = load_pairs(args.val_files, args, tokenizer)
    except (ValueError, OSError, ImportError) as error:
        fail(" ".join(str(error).split()))
    kind = "responses" if args.loss == "kto" else "pairs"
    if len(train_rows) < args.train_batch_size:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} training {kind}")
    summary = f"{len(train_rows)} training and {len(val_rows)} validation {kind}"
    return tokenizer, train_rows, val_rows, f"{summary} ({dropped + val_dropped} dropped)"


def encode_pair(prompt, chosen, rejected, tokenizer, max_length, tools=None):
    """Messages, or strings -> a row: ids of the prompt and both responses; which of these are trained.

    None for one of the two: a row of KTO. The assistant's turns of a response are trained.
    ValueError where there is nothing to prefer.
    """
    given = {name: x for name, x in zip(RESPONSES, (chosen, rejected)) if x is not None}
    prompt, *replies = pair_of(prompt, *given.values())
    row = {f"{name}_{what}": [] for name in RESPONSES for what in ("ids", "trained")}
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
    if row["chosen_ids"] == row["rejected_ids"]:
        raise ValueError("'chosen' and 'rejected' are equal")
    return row | dict(tokens=[sum(row[f"{name}_trained"]) for name in RESPONSES])


def split(ids, trained):
    """A row whose prompt ends where training begins. Nothing predicts ids[0]."""
    first = trained.index(True, 1)
    last = len(trained) - trained[::-1].index(True)
    return dict(prompt_ids=ids[:first], response_ids=ids[first:last], trained=trained[first:last])


class Mismatched:
    """KTO: each prompt of the rows with the response of another row, drawn once."""

    def __init__(self, rows, seed):
        order = np.random.default_rng(seed).permutation(len(rows))
        self.rows, self.others = rows, np.empty_like(order)
        self.others[order] = np.roll(order, 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[self.others[i]] | dict(prompt_ids=self.rows[i]["prompt_ids"])

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

    fields = dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids", "tokens"), IDS)
    fields |= dict.fromkeys(("chosen_trained", "rejected_trained"), BOOLS)
    about = args.max_length, args.bad_pairs
    code = load_pairs, encode_pair, split, alone
    rows, dropped = encoded_rows(paths, tokenizer, columns, fields, partial(map, example), about, code)
    if paths and not rows:
        raise ValueError(f"{', '.join(paths)}: --bad_pairs drop leaves no pair")
    return rows, dropped


if __name__ == "__main__":
    main(Args(**flags))
