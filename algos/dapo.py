"""DAPO (arXiv 2503.14476): maximise E[min(r A, clip(r, 1-low, 1+high) A)] over groups with correct and wrong
responses, where A is a response's score relative to the other responses to the same prompt.

Differences from the paper with the default flags:
1. The keep rate so far sets the size of a generation batch; surplus groups wait for the next step.
2. Truncated importance sampling (`--rollout_is`) corrects the sampler's rounding and the age of such groups.
3. Dual clip bounds the loss where the advantage is negative (1912.09729, eq. 5).

CPU:        python algos/dapo.py --model models/tiny --train_files data/train.parquet --output_dir runs/dapo
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/dapo.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/algorithms/dapo.md
"""

import base64
import math
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, one_line_errors, parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")
from algos.variants import load_loss, unknown

# Shapes: B prompts, G responses to each, N = B * G, T response tokens, V vocabulary. A suffix names the
# axes (logp_nt). T is aligned with the response: column t belongs to response token t.
# A row is a dict of one response: its prompt, ids and reward. What is per token ends in _t (adv_t); a
# padded batch of rows has it as _nt.


@dataclass(kw_only=True)
class Args:
    # ---- run
    output_dir: str  # directory of the run: arguments, metrics, log, rollouts, checkpoints
    resume: str = "auto"  # auto: output_dir's latest checkpoint; never; or path of another run's
    seed: int = 1  # seed for data order, LoRA init and sampling
    total_epochs: int = 1  # without --total_steps: passes over the training data
    total_steps: int | None = None  # number of RL steps; None: as many as total_epochs takes
    save_freq: int = 50  # steps between checkpoints; 0: only at the end
    test_freq: int = 10  # with --val_files: steps between validations; 0: only before and after training
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    rollout_dump: bool = False  # write responses of training and validation to output_dir/rollouts
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # tracker that also gets the metrics
    # ---- data
    train_files: tuple[str, ...]  # files of training prompts
    val_files: tuple[str, ...] = ()  # files of validation prompts; none: no validation
    max_prompt_length: int = 512  # tokens of a prompt; longer prompts are dropped and counted
    # ---- model
    model: str  # Hugging Face directory or hub name of the model to train
    chat_template: str | None = None  # Jinja file in place of the model's chat template; hf/ carries it
    chat_template_kwargs: str = "{}"  # values of its variables, as JSON: {"enable_thinking": false}
    attn_implementation: str = "sdpa"  # attention; sdpa: torch's own, on GPUs flash attention
    # dtype of forward, backward and sampler; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    sp_size: int = 1  # ranks that share the tokens of a row, for long rows; it divides the attention heads
    # what a backward pass computes again; selective: all but products and attention; none: fastest
    gradient_checkpointing: Literal["full", "selective", "none"] = "full"
    compile: bool = False  # compile the layers (GPU)
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    offload: Literal["none", "sampling", "always"] = "none"  # when weights and moments are on the host (GPU)
    lora_rank: int = 0  # rank of LoRA adapters, trained in place of the model; 0: train the model
    # with --lora_rank: scale, the output of the adapters times lora_alpha / lora_rank
    lora_alpha: float = 16
    # ---- rollout
    group_size: int = 8  # responses to each prompt
    max_response_length: int = 1024  # limit of the response in tokens
    temperature: float = 1.0  # temperature of sampling, and of the trainer's log-probs
    top_p: float = 1.0  # nucleus sampling; below 1 it needs --rollout_is None and no --rollout_rs
    tp_size: int = 1  # ranks that share one sampler by tensor parallelism
    gpu_memory_utilization: float = 0.5  # share of the GPU's memory for the awake sampler
    rollout_quantization: str | None = None  # of the sampler, by vLLM at each sync: fp8, on a GPU
    # with --val_files and --val_temperature: responses to each validation prompt
    val_group_size: int = 1
    val_temperature: float = 0.0  # with --val_files: temperature of sampling in validation
    # ---- optimizer
    train_batch_size: int = 64  # prompts of a step, over all ranks
    ppo_mini_batch_size: int | None = None  # prompts of an optimizer step; None: all of the step
    ppo_epochs: int = 1  # passes over the responses of a step
    lr: float = 1e-6  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # decay to 0 after the last step
    warmup_steps: int = 0  # steps of linear warm-up
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    max_gen_batches: int = 10  # most generation batches of a step; then it trains on the groups that it has
    max_staleness: int = 4  # age in steps above which surplus and unfinished groups are dropped; 0: paper
    partial_rollout: bool = False  # stop sampling at enough groups; the others continue in the next step
    # tokens below max_response_length with a penalty from 0 to 1; None: a fifth of that length; 0: off
    overlong_buffer: int | None = None
    overlong_filtering: bool = False  # mask truncated responses out of the loss
    policy_loss: str = "clip"  # clip; a name in algos/variants/, such as cispo; or FILE.py:NAME
    clip_ratio_low: float | None = None  # clip below 1 - this; None: default of the loss, of clip 0.2
    clip_ratio_high: float | None = None  # clip above 1 + this; None: default of the loss, of clip 0.28
    # average of token losses; None: default of the loss, of clip token-mean; ...-norm: Dr. GRPO
    loss_agg: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    rollout_is: Literal["token", "sequence"] | None = "token"  # importance weights, trainer / sampler
    rollout_is_threshold: float = 2.0  # with --rollout_is: upper bound of the weights
    # reject by this importance ratio; off_policy: negative responses that the policy has left
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None
    # with --rollout_rs: h keeps ratios from 1/h to h; two are smallest and largest; off_policy: its delta
    rollout_rs_threshold: tuple[float, ...] = ()
    # ---- rewards
    reward_manager: Literal["naive", "prime"] = "naive"  # prime: rewards run in processes of their own
    reward_fn: tuple[str, ...] = ("rewards",)  # FILE.py:NAME; rewards: by each row's data_source
    reward_weights: tuple[float, ...] = ()  # weight of each reward_fn; none: all 1
    # with --reward_manager prime or --reward_fn FILE.py:NAME: seconds for each response; naive: if async
    reward_timeout_s: float = 30.0

    def __post_init__(self):  # torch is imported by then: below, after the command line has been read
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
        self.ppo_mini_batch_size = self.ppo_mini_batch_size or self.train_batch_size


if __name__ == "__main__":
    flags = parse(Args, unknown=unknown)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig

from data_prep.lib.cache import load_prompt_files
from data_prep.lib.images import load_processor, request
from data_prep.lib.templates import use_template
from rewards.manager import RewardManager, validation_summary
from rewards.manager.combined import load_rewards
from system import cpu, families
from system.attention import states_apart
from system.batches import collate, distribute, micro_batches, store_logps, token_logps
from system.gpu import move, prepare_layers
from system.metrics import stats, step_metrics, timed
from system.model import (
    TokenLogps,
    add_adapters,
    check_model,
    kept_on_host,
    parts_of,
    read_model,
    read_weights,
    whole_weights,
)
from system.ranks import all_reduce, setup_distributed, sum_over_ranks
from system.run import Run, learning_rate
from system.sampler import answers, check_sampler, engine_options, of_all_ranks, params_of, score_rows
from system.sequence import Slices, sequence_group, ulysses

# ---- The mathematics -------------------------------------------------------------------
DUAL_CLIP = 3.0  # bound of the ratio where the advantage is negative
CLIP_HIGH = 0.28  # --clip_ratio_high of the clipped loss (clip-higher, 3.1)


def group_advantages(score_n, group_n, norm_by_std=True):
    """A = (s - mean_g) / (std_g + 1e-6), unbiased std (2402.03300, 4.1.2); else Dr. GRPO (2503.20783).

    score_n, group_n: [N] scores and group numbers, in any order. Scores 1 0 0 1 -> 0.87 -0.87 -0.87 0.87.
    A group of one has mean 0 and std 1; the advantages of a constant group are 0.
    """
    adv_n = score_n.clone()
    sizes = group_n.unique(return_counts=True)[1]
    for member in group_n.argsort(stable=True).split(sizes.tolist()):
        if len(member) == 1:
            continue
        s = score_n[member] - score_n[member[0]]  # a constant group has exactly 0
        scale = s.std() + 1e-6 if norm_by_std else 1.0
        adv_n[member] = (s - s.mean()) / scale  # eq: grpo.advantage
    return adv_n


def keep_groups(acc_n, group_n):
    """Whether the group of each response has correct and wrong responses (eq. 11) -> keep_n, bool.

    Accuracies 1 0 1 1 of groups 7 7 8 8 -> True True False False.
    """
    keep_n = torch.zeros(len(acc_n), dtype=torch.bool)
    sizes = group_n.unique(return_counts=True)[1]
    for member in group_n.argsort(stable=True).split(sizes.tolist()):
        keep_n[member] = acc_n[member].max() > acc_n[member].min()  # eq: dapo.dynamic_sampling
    return keep_n


def overlong_penalty(length_n, max_length, buffer):
    """0 up to max_length - buffer, then linear to -1 at max_length (eq. 13). No buffer: 0.

    Lengths 6 7 8 9 10, max_length 10, buffer 4 -> 0 -0.25 -0.5 -0.75 -1.
    """
    return ((max_length - buffer - length_n) / max(buffer, 1)).clamp(-1, 0)  # eq: dapo.overlong


def policy_loss(logp_nt, old_logp_nt, adv_nt, mask_nt, clip_low=0.2, clip_high=0.2, c=DUAL_CLIP):
    """-min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at most -c A (dual clip).

    Returns loss_nt, and where the clip and the dual clip decided. mask_nt: what losses of responses need.
    A = 1, r = 1.5, high = 0.2 -> -1.2, clipped; A = -1, r = 5, c = 3 -> 3, clipped below.
    """
    ratio_nt = (logp_nt - old_logp_nt).clamp(-20, 20).exp()
    plain_nt = -ratio_nt * adv_nt
    clip_nt = -ratio_nt.clamp(1 - clip_low, 1 + clip_high) * adv_nt
    loss_nt = torch.maximum(plain_nt, clip_nt)  # eq: grpo.loss
    dual_nt = -c * adv_nt
    lower_nt = (adv_nt < 0) & (loss_nt > dual_nt)
    return torch.where(lower_nt, dual_nt, loss_nt), clip_nt > plain_nt, lower_nt  # eq: grpo.dual_clip


def loss_weights(mask_nt, mode, max_length=None, totals=None):
    """Weights w_nt with sum(w_nt * loss_nt) the aggregated loss; mask_nt: those of an optimizer step.

    totals: (tokens, responses) of the whole step, if mask_nt is one micro-batch of it. Empty responses
    do not count. Lengths 1 and 3, token-mean: weights 1/4; seq-mean-token-mean: 1/2 and 1/6.
    """
    length_n1 = mask_nt.sum(-1, keepdim=True)
    tokens, responses = totals or (length_n1.sum(), (length_n1 > 0).sum())
    tokens = max(int(tokens), 1)
    responses = max(int(responses), 1)
    denominator = {
        "token-mean": tokens,
        "seq-mean-token-sum": responses,
        "seq-mean-token-mean": length_n1.clamp(min=1) * responses,
        "seq-mean-token-sum-norm": responses * (max_length or mask_nt.shape[1]),
    }
    return mask_nt / denominator[mode]  # eq: grpo.aggregation


def rollout_weights(args, logp_nt, batch):
    """Factors of the token losses that correct for the sampler's log-probs; without a gradient.

    --rollout_is: p_old / p_sampler, at most rollout_is_threshold; --rollout_rs: 0 where out of bounds.
    Ratios 1 and 3 of a response, limit 2: token 1 2, sequence 2 2; rejected: token 1 0, sequence 0 0.
    off_policy: 0 where A < 0 and the response's mean of log(p_sampler / p) is above the threshold.
    A log-prob of the sampler that is not finite is missing: its ratio is 1.
    """
    mask_nt = batch["mask_nt"].bool()
    rollout_logp_nt = batch["rollout_logp_nt"]
    old_nt = batch.get("old_logp_nt", logp_nt.detach())
    known_nt = mask_nt & rollout_logp_nt.isfinite()
    d_nt = (old_nt - rollout_logp_nt).where(known_nt, 0.0)
    d_n1 = d_nt.sum(-1, keepdim=True)
    length_n1 = mask_nt.sum(-1, keepdim=True).clamp(min=1)
    logs = dict(token=d_nt, sequence=d_n1, geometric=d_n1 / length_n1)
    ratios = {level: x.clamp(-20, 20).exp() for level, x in logs.items()}
    weight_nt = torch.ones_like(d_nt)
    if args.rollout_is:
        weight_nt *= ratios[args.rollout_is].clamp(max=args.rollout_is_threshold)  # eq: grpo.tis
    if args.rollout_rs == "off_policy":  # of the trained policy (DeepSeek-V3.2, 2512.02556, 3.1)
        behind_nt = (rollout_logp_nt - logp_nt.detach()).where(known_nt, 0.0)
        far_n1 = behind_nt.sum(-1, keepdim=True) / length_n1 > args.rollout_rs_threshold[0]
        weight_nt *= ~(far_n1 & (batch["adv_nt"] < 0))  # eq: grpo.off_policy
    elif args.rollout_rs:
        ratio_nt = ratios[args.rollout_rs]
        high = args.rollout_rs_threshold[-1]
        low = args.rollout_rs_threshold[0] if len(args.rollout_rs_threshold) > 1 else 1 / high
        weight_nt *= (low <= ratio_nt) & (ratio_nt <= high)  # eq: grpo.rejection
    return weight_nt


def actor_loss(args, token_loss, logp_nt, entropy_nt, batch):
    """The loss of each token before weighting -> loss_nt, and two dicts of what is reported.

    losses: parts of the loss, averaged as the loss is. means: averaged over tokens.
    Without old_logp_nt, which a single update does not need, the policy is its own old policy.
    """
    old_nt = batch.get("old_logp_nt", logp_nt.detach())
    loss_nt, clipped_nt, lower_nt = token_loss(logp_nt, old_nt, batch["adv_nt"], batch["mask_nt"])
    # difference 2 of the header: the sampler rounds differently, and may have had older weights
    weight_nt = rollout_weights(args, logp_nt, batch)
    loss_nt = loss_nt * weight_nt
    losses = dict(pg_loss=loss_nt)
    means = dict(entropy=entropy_nt, ppo_kl=old_nt - logp_nt, rollout_rs_masked=weight_nt == 0)
    means |= dict(pg_clipfrac=clipped_nt, pg_clipfrac_lower=lower_nt)
    return loss_nt, losses, means


# ---- The step --------------------------------------------------------------------------
IN_FLIGHT = 2  # groups that --partial_rollout begins or continues, for each one that it waits for


@dataclass
class Progress:
    """How far sampling is: a step hands it on to the next, a checkpoint to the run that resumes."""

    drawn: int = 0  # prompts so far, over all epochs
    sampled: float = 0.0  # groups, of which a step counts half as much as the next
    kept: float = 0.0  # those of them with correct and wrong responses
    surplus: list = field(default_factory=list)  # rows of kept groups, for the next step
    unfinished: list = field(default_factory=list)  # rows of groups that --partial_rollout has begun


def sample_groups(sample, train_rows, progress, args):
    """Dynamic sampling (3.2): generation batches until there are enough groups.

    Returns the rows of these groups, surplus ones of the last step first; the batches; and what their
    samplers did in all. sample(prompts, unfinished, number): a batch, which is the scored rows of that many
    groups, on all ranks; rows of unfinished groups; and what the samplers did, see `partial_rollout`.
    """
    rows = progress.surplus
    batches = []
    places = np.zeros(2)
    wanted = args.train_batch_size * args.group_size
    while len(rows) < wanted and len(batches) < args.max_gen_batches:
        keep_rate = (progress.kept + 1) / (progress.sampled + 1)  # 1 in the first batch; never 0
        missing = math.ceil((wanted - len(rows)) / args.group_size / keep_rate)
        number = min(missing, 3 * args.train_batch_size)  # the paper always takes this many
        new = number
        if args.partial_rollout:
            in_flight = IN_FLIGHT * max(number, args.train_batch_size)
            new = max(in_flight - len(progress.unfinished) // args.group_size, 0)
        prompts = draw(train_rows, args.seed, progress.drawn, new)
        progress.drawn += new
        batch, progress.unfinished, used = sample(prompts, progress.unfinished, number)

        # CAREFUL: the overlong penalty must not make correct responses differ
        acc_n = torch.tensor([float(row["reward"].get("acc", row["reward"]["score"])) for row in batch])
        keep_n = keep_groups(acc_n, torch.tensor([row["group"] for row in batch]))
        for row, acc, keep in zip(batch, acc_n.tolist(), keep_n.tolist()):
            row["acc"] = acc
            row["keep"] = keep
        kept = [row for row in batch if row["keep"]]
        rows = rows + kept
        batches.append(batch)
        places += used
        progress.sampled += len(batch) // args.group_size
        progress.kept += len(kept) // args.group_size
    # the keep rate changes as the policy learns
    progress.sampled /= 2
    progress.kept /= 2
    return rows, batches, places


def number_of_rows(rows, args):
    """How many rows are trained; if they are too few for a step, the same number on each rank."""
    wanted = args.train_batch_size * args.group_size
    if len(rows) >= wanted:
        return wanted
    each = args.group_size * dist.get_world_size() // args.sp_size
    return len(rows) // each * each


def split_by_age(rows, step, max_staleness):
    """Rows of groups that the next step may train on, and rows of groups that are too old for it.

    A group is as old as its oldest token. Step 3, tokens of steps 1 and 3: kept if max_staleness is 3.
    """
    kept = []
    stale = []
    for _, group in groupby(rows, key=itemgetter("group")):
        group = list(group)
        first = min((int(row["step_t"][0]) for row in group if row["length"]), default=step + 1)
        if step + 1 - first > max_staleness:
            stale += group
        else:
            kept += group
    return kept, stale


def assign_advantages(rows, args):
    """adv_t of each row, and mask_t of truncated ones -> metrics of rewards and advantages."""
    score_n = torch.tensor([row["reward"]["score"] for row in rows], dtype=torch.float64)
    group_n = torch.tensor([row["group"] for row in rows])
    length_n = torch.tensor([row["length"] for row in rows])
    buffer = args.overlong_buffer
    if buffer is None:
        buffer = args.max_response_length // 5
    reward_n = score_n + overlong_penalty(length_n, args.max_response_length, buffer)
    adv_n = group_advantages(reward_n, group_n)
    for row, adv in zip(rows, adv_n.tolist()):  # all tokens of a response have its advantage
        row["adv_t"] = np.full(row["length"], adv, np.float32)
        if args.overlong_filtering and row["finish_reason"] == "length":
            row["mask_t"] = np.zeros(row["length"], bool)
    metrics = {"dapo/overlong": (reward_n < score_n).sum()}
    return metrics | stats("critic/rewards", reward_n) | stats("critic/advantages", adv_n)


def update_actor(policy, optimizer, mini_batches, loss, args):
    """One optimizer step for each mini-batch of `distribute` -> mean metrics. loss: `actor_loss`."""
    sums = defaultdict(float)
    norms = []
    for sequences, totals in mini_batches * args.ppo_epochs:
        for rows in micro_batches(policy, sequences, args.max_tokens_per_microbatch):
            logp_nt, entropy_nt = token_logps(policy, rows, args.temperature)
            batch = collate(rows, logp_nt.device)
            loss_nt, losses, means = loss(logp_nt, entropy_nt, batch)
            # totals are of all ranks and micro-batches: no split of the work changes the gradient
            weight_nt = loss_weights(batch["mask_nt"], args.loss_agg, args.max_response_length, totals)
            # FSDP averages gradients over the ranks, but the totals already count all ranks
            (weight_nt * loss_nt).sum().mul(dist.get_world_size()).backward()

            for name, x_nt in losses.items():
                sums[name] += (weight_nt * x_nt.detach()).sum()
            mean_nt = loss_weights(batch["mask_nt"], "token-mean", None, totals)
            for name, x_nt in means.items():
                sums[name] += (mean_nt * x_nt.detach()).sum()
            for row, logp_t in zip(rows, logp_nt.detach()):
                row.setdefault("old_logp_t", logp_t[: row["length"]])  # of the first update: the old policy

        norm = nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).full_tensor().item()
        norms.append(norm)
        if math.isfinite(norm):  # the norm over all ranks: they step or skip together
            optimizer.step()
        optimizer.zero_grad()

    metrics = {}
    for name, total in sum_over_ranks(sums).items():
        # ranks that share a row have all counted it
        metrics[f"actor/{name}"] = total / args.sp_size / len(norms)
    metrics["actor/grad_norm"] = np.mean(norms)
    metrics["actor/skipped_updates"] = np.sum(~np.isfinite(norms))
    return metrics


def main(args):
    # ---- arguments and data: checked before anything slow
    args, token_loss = load_loss(args, clip=partial(policy_loss, clip_high=CLIP_HIGH))
    loss = partial(actor_loss, args, token_loss)
    with Run(args) as run:
        tokenizer, manager, train_rows, val_rows, summary = load_data(args)
        progress = read_progress(run.state)
        total_steps = args.total_steps
        max_prompts = math.inf
        if not total_steps:
            total_steps = args.total_epochs * (len(train_rows) // args.train_batch_size)
            max_prompts = args.total_epochs * len(train_rows)
        if progress.drawn >= max_prompts:  # resumed at the end of the data
            total_steps = run.step
        run.plan(total_steps, summary)

        # ---- models: the engine first, while the GPU is empty; then it sleeps
        device, mesh = setup_distributed(args.hsdp_replicas)
        run.say("starting vLLM")
        engine = build_engine(args, device)
        run.say(f"loading {args.model}")
        policy = load_model(args, mesh, device)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay, fused=True)
        # hf is the directory that the model has in a checkpoint
        run.load(dict(hf=policy.lm), optimizer, tokenizer, whole_weights)
        run.start(policy.lm)
        if args.max_staleness and not args.rollout_is:
            run.say("warning: with --rollout_is None tokens of older weights are not corrected")
        sampling = dict(top_p=args.top_p, stop_token_ids=[tokenizer.eos_token_id])
        limit = families.rounding_limit(policy.lm, args.compute_dtype, args.rollout_quantization)
        if args.top_p < 1:  # the sampler has another distribution on purpose
            limit = math.inf

        def validate():
            with awake(engine, policy, optimizer, args, timing={}):
                options = sampling | dict(temperature=args.val_temperature, top_p=1.0)
                rows = rollout(engine, args, val_rows, step=0, group_size=args.val_group_size, **options)
            rows = score_rows(rows, manager, tokenizer)
            run.dump(rows, "val")
            metrics, text = validation_summary(rows, run.step)
            run.say(text)
            return metrics

        def sample(step, timing, prompts, unfinished, number):
            """A generation batch, for `sample_groups`."""
            options = sampling | dict(temperature=args.temperature)
            places = 0
            with timed(timing, "gen"):
                if args.partial_rollout:
                    found = partial_rollout(engine, args, prompts, unfinished, step, number, **options)
                    rows, unfinished, places = found
                else:
                    rows = rollout(engine, args, prompts, step, args.group_size, **options)
            with timed(timing, "reward"):
                rows = score_rows(rows, manager, tokenizer)
            return rows, unfinished, places

        if val_rows and not run.step:
            run.log(validate())

        for step, timing in run.steps():
            # ---- rollout and reward, until there are enough groups; all ranks know all rows
            with awake(engine, policy, optimizer, args, timing):
                of_step = partial(sample, step, timing)
                rows, batches, places = sample_groups(of_step, train_rows, progress, args)
            sampled = list(chain.from_iterable(batches))
            wanted = number_of_rows(rows, args)
            if not wanted:
                run.say(solved(sampled, len(batches), step))
                run.end_after(step - 1)
                break
            begun = progress.unfinished
            progress.surplus, stale = split_by_age(rows[wanted:], step, args.max_staleness)
            progress.unfinished, given_up = split_by_age(begun, step, args.max_staleness)
            rows = rows[:wanted]
            for row in rows:  # these tokens have log-probs of older weights
                row["older_t"] = row["step_t"] < step
            # ---- advantage, then balance over the ranks
            with timed(timing, "adv"):
                of_rewards = assign_advantages(rows, args)
                updates = math.ceil(wanted / (args.ppo_mini_batch_size * args.group_size))
                budget = args.max_tokens_per_microbatch
                dealt = distribute(rows, updates, budget, policy.packed, args.sp_size)
                mini_batches, own_rows, load = dealt
            # ---- log-probs: those of the first mini-batch are made by its own update
            if len(mini_batches) > 1:
                with timed(timing, "old_log_prob"):
                    store_logps(policy, mini_batches[1:], "old_logp_t", args.temperature, budget)
            # ---- update
            lr = learning_rate(args.lr, step, run.total, args.warmup_steps, args.lr_schedule)
            optimizer.param_groups[0]["lr"] = lr
            with timed(timing, "update_actor"):
                metrics = update_actor(policy, optimizer, mini_batches, loss, args)
            if progress.drawn >= max_prompts:
                run.end_after(step)
            metrics |= check_sampler(own_rows, partial(rollout_weights, args), limit, step)
            run.updated(**as_state(progress))
            # ---- validation
            if val_rows and run.due(args.test_freq):
                with timed(timing, "testing"):
                    metrics |= validate()
            # ---- metrics
            timing["step"] = run.elapsed()
            metrics |= step_metrics(rows, load, policy, timing, args.compute_dtype, sampled)
            metrics |= of_rewards | sampling_metrics(rows, sampled, begun, stale + given_up, step)
            metrics |= {
                "dapo/gen_batches": len(batches),
                "dapo/groups": wanted / args.group_size,
                "actor/lr": lr,
                "training/epoch": (progress.drawn - 1) // len(train_rows),
            }
            if args.partial_rollout:
                used, room = places
                metrics["dapo/idle"] = (room - used) / max(room, 1)
            run.log(metrics, score="critic/score/mean", length="response_length/mean")
            run.dump(rows)
            # ---- checkpoint, after the metrics: each checkpoint has its metrics
            if run.due(args.save_freq):
                run.save()


# ---- The system: data, FSDP2 and vLLM; the rest of it is in system/ ------------------------
def load_data(args):
    """-> tokenizer, reward manager, rows of training and of validation, a line about them."""
    with one_line_errors():
        families.refuse_images(args.model, (*args.train_files, *args.val_files))
        check_model(args.model, args.attn_implementation, adapters_of(args))
        if args.sp_size > 1:
            check_slices(args)
        tokenizer = load_processor(args.model)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        reward_fn = load_rewards(args.reward_fn, args.reward_weights, args.group_size)
        manager = RewardManager(args.reward_manager, reward_fn, timeout_s=args.reward_timeout_s)
        data = args.train_files, args.val_files, args.max_prompt_length
        train_rows, val_rows, summary = load_prompt_files(tokenizer, args.train_batch_size, *data)
        manager.check(train_rows, val_rows)
    return tokenizer, manager, train_rows, val_rows, summary


def check_slices(args):
    """Stop where --sp_size ranks cannot share the rows of a model."""
    flag = f"--sp_size {args.sp_size}"
    config = AutoConfig.from_pretrained(args.model)
    name = f"{args.model} ({config.model_type})"
    special = families.special_layers(config)
    heads = config.get_text_config().num_attention_heads
    if args.attn_implementation != "sdpa":
        fail(f"{flag} needs --attn_implementation sdpa")
    if special:
        fail(f"{name} has {' and '.join(special)}, which {flag} does not support")
    if heads % args.sp_size:
        fail(f"{name} has {heads} attention heads, which {flag} does not divide")


def adapters_of(args):
    """What is trained: the model, or adapters with --lora_rank."""
    return partial(add_adapters, rank=args.lora_rank, alpha=args.lora_alpha, seed=args.seed)


def load_model(args, mesh, device):
    """The model in its root module, sharded by FSDP2. Rank 0 reads the weights for all."""
    lm, full, packed = read_model(args.model, args.attn_implementation, adapters_of(args))
    prepare_layers(lm, args.gradient_checkpointing, args.compile, eager=states_apart(lm))
    policy = TokenLogps(lm, packed)
    if args.sp_size > 1:
        policy = Slices(lm, packed, sequence_group(args.sp_size, device), ulysses)
    precision = MixedPrecisionPolicy(getattr(torch, args.compute_dtype), reduce_dtype=torch.float32)
    fsdp = dict(mesh=mesh, mp_policy=precision)
    if args.offload == "always":
        fsdp |= kept_on_host(lm)
    for part in parts_of(lm):
        fully_shard(part, **fsdp)
    # the root too is resharded after a forward: without a backward nothing else would do it
    fully_shard(policy, **fsdp, reshard_after_forward=True)
    policy.to_empty(device="cpu" if args.offload == "always" else device)
    read_weights(lm, full)
    return policy


def build_engine(args, device):
    """A vLLM engine in this process, asleep. Its weights are random until the first sync."""
    cuda = device.type == "cuda"
    with cpu.own_vllm():
        import vllm
        from vllm.usage.usage_lib import UsageContext

        options = vllm.EngineArgs(
            model=args.model,
            load_format="dummy",
            dtype=args.compute_dtype,
            quantization=args.rollout_quantization,
            seed=args.seed,
            max_model_len=args.max_prompt_length + args.max_response_length,
            tensor_parallel_size=args.tp_size,
            distributed_executor_backend="external_launcher",
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled
            generation_config="vllm",  # the model's EOS tokens, but not its temperature
            gpu_memory_utilization=args.gpu_memory_utilization,
            enable_sleep_mode=cuda,  # a CPU's sleep does nothing
            disable_log_stats=True,
            **engine_options(args.model, cuda),
        )
        with one_line_errors():  # a response that is longer than the model's positions, for one
            engine = vllm.LLMEngine.from_engine_args(options, UsageContext.LLM_CLASS)  # limits of vllm.LLM
    torch.manual_seed(args.seed)  # vLLM overwrites the global generator
    engine.sleep(level=2)
    return engine


@contextmanager
def awake(engine, policy, optimizer, args, timing):
    """While the block lasts, the sampler is awake, with the weights of the policy."""
    with timed(timing, "sync"):
        engine.wake_up(tags=["weights"])
        sync_weights(engine, policy.lm)
        if args.offload == "sampling":
            move("cpu", [policy], optimizer)
        engine.wake_up(tags=["kv_cache"])
    yield
    with timed(timing, "sync"):
        engine.sleep(level=2)
        if args.offload == "sampling":
            move("cuda", [policy], optimizer)


def sync_weights(engine, lm):
    """Stream the sharded model into the sampler, which packs it as it packs what it loads."""
    config = engine.model_config
    weights = whole_weights(lm, config.dtype, families.unused_weights(lm, False))
    weights = families.vllm_names(weights, lm.config, config.hf_config)
    engine.apply_model(cpu.before_reload)
    engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
    engine.apply_model(cpu.after_reload)
    engine.reset_prefix_cache()


def draw(train_rows, seed, start, count):
    """`count` prompts from number `start` on, over all epochs; (seed, epoch) sets their order."""
    prompts = []
    for number in range(start, start + count):
        epoch, place = divmod(number, len(train_rows))
        if not prompts or place == 0:
            order = np.random.default_rng((seed, epoch)).permutation(len(train_rows))
        # CAREFUL: the seed of a response depends on `index`, because a prompt may come twice in a step
        prompts.append(dict(train_rows[order[place]], index=number, group=number))
    return prompts


ARRAYS = dict(response_ids=np.int32, rollout_logp_t=np.float32, mask_t=bool, step_t=np.int32)


def empty_rows(prompts, group_size):
    """Responses without a token; "abort" is vLLM's word for a response that is not complete."""
    rows = []
    for prompt in prompts:
        for g in range(group_size):
            row = dict(prompt, sample=g, length=0, prompt_length=len(prompt["prompt_ids"]))
            for name, dtype in ARRAYS.items():
                row[name] = np.zeros(0, dtype)
            row["rank"] = dist.get_rank()
            row["finish_reason"] = "abort"
            rows.append(row)
    return rows


def extend(row, output, step):
    """Add the tokens of vLLM's output, which the weights of `step` sampled, to a row."""
    n = len(output.token_ids)
    new = dict(
        response_ids=output.token_ids,
        rollout_logp_t=output.logprobs.logprobs,  # of the weights that sampled the token, for good
        mask_t=np.ones(n),  # the tokens that are trained
        step_t=np.full(n, step),
    )
    for name, dtype in ARRAYS.items():  # converted at once: lists take 200 bytes a token
        row[name] = np.concatenate([row[name], np.array(new[name], dtype)])
    row["length"] += n
    row["finish_reason"] = output.finish_reason


def rollout(engine, args, prompts, step, group_size, **sampling):
    """Let the sampler answer the prompts of all ranks -> the rows of this rank.

    Ranks that share a sampler (--tp_size) answer the union of their prompts and keep whole groups.
    """
    rank = dist.get_rank()
    own = prompts[rank // args.tp_size :: dist.get_world_size() // args.tp_size]
    rows = empty_rows(own, group_size)
    for row in rows:
        row["seed"] = args.seed, step, row["index"], row["sample"]
    options = dict(max_tokens=args.max_response_length) | sampling
    for row, output in answers(engine, rows, **options):
        del row["seed"]  # rows may wait in a checkpoint
        extend(row, output, step)
    groups = [rows[i : i + group_size] for i in range(0, len(rows), group_size)]
    return list(chain.from_iterable(groups[rank % args.tp_size :: args.tp_size]))


def partial_rollout(engine, args, prompts, unfinished, step, enough, **sampling):
    """Let the sampler answer prompts and continue unfinished rows, until `enough` groups are complete.

    Prompts and rows are of all ranks. Returns complete groups as rows of this rank, the others as rows of
    all ranks, and two sums over the steps of the samplers: places in use, and places. Every rank keeps the
    same books of all responses, by steps of the samplers: no clock decides what is sampled nor, while the
    samplers have all the places, do the ranks.
    """
    from vllm.v1.engine import FinishReason

    world = dist.get_world_size()
    samplers = world // args.tp_size
    own_sampler, rank = divmod(dist.get_rank(), args.tp_size)
    rows = unfinished + empty_rows(prompts, args.group_size)
    sampler_n = np.arange(len(rows)) % samplers  # the sampler of each row
    waiting = [i for i, row in enumerate(rows) if row["finish_reason"] == "abort"][::-1]
    running = set()
    places = max(enough, args.train_batch_size) * args.group_size
    places = min(places, samplers * engine.vllm_config.scheduler_config.max_num_seqs)
    used = room = complete = 0
    while complete < enough:
        load = np.bincount(sampler_n[list(running)], minlength=samplers)
        while waiting and len(running) < places:
            i = waiting.pop()
            running.add(i)
            sampler_n[i] = load.argmin()
            load[sampler_n[i]] += 1
            if sampler_n[i] == own_sampler:
                row = rows[i]
                begun = row["response_ids"].tolist()
                seed = args.seed, step, row["index"], row["sample"], len(begun)
                left = args.max_response_length - len(begun)
                params = params_of(seed, max_tokens=left, logprobs=0, flat_logprobs=True, **sampling)
                engine.add_request(str(i), request(row, begun), params)
        for _ in range(max(args.max_response_length // 64, 1)):  # steps between looks at the books
            used += engine.get_num_unfinished_requests()
            room += places
            if engine.has_unfinished_requests():
                for answer in engine.step():
                    extend(rows[int(answer.request_id)], answer.outputs[0], step)
        finished_n = np.array(all_reduce([row["finish_reason"] != "abort" for row in rows])) > 0
        running -= set(np.flatnonzero(finished_n))
        complete = finished_n.reshape(-1, args.group_size).all(1).sum()

    for state in list(engine.output_processor.request_states.values()):
        # the answer that vLLM itself makes of an aborted request
        answer = state.make_request_output([], None, FinishReason.ABORT, None)
        extend(rows[int(answer.request_id)], answer.outputs[0], step)
        engine.abort_request([state.external_req_id])
    own = np.flatnonzero(sampler_n == own_sampler)[rank :: args.tp_size]
    rows = of_all_ranks([dict(rows[i], rank=dist.get_rank()) for i in own])  # in the order that they had
    whole = []
    unfinished = []
    for _, group in groupby(rows, key=itemgetter("group")):
        group = list(group)
        if all(row["finish_reason"] != "abort" for row in group):
            whole.append(group)
        else:
            unfinished += group
    [used] = all_reduce([used / args.tp_size])
    rows = list(chain.from_iterable(whole[dist.get_rank() :: world]))  # the reward may see groups
    return rows, unfinished, (used, room)


def as_state(progress):
    """Progress for trainer_state.json."""
    state = dict(vars(progress))
    for name in ("surplus", "unfinished"):
        state[name] = [as_json(row) for row in state[name]]
    return state


def read_progress(state):
    """Progress of a trainer_state.json; {}: of a new run."""
    progress = Progress(**state)
    progress.surplus = [from_json(row) for row in progress.surplus]
    progress.unfinished = [from_json(row) for row in progress.unfinished]
    return progress


def as_json(row):
    """A row with the bytes of its arrays as text."""
    row = dict(row)
    for name in ARRAYS:
        row[name] = base64.b64encode(row[name].tobytes()).decode()
    return row


def from_json(row):
    """A row of `as_json`."""
    row = dict(row)
    for name, dtype in ARRAYS.items():
        row[name] = np.frombuffer(base64.b64decode(row[name]), dtype).copy()
    return row


def dropped_shares(sampled):
    """The shares of the sampled rows whose groups were dropped as all correct, and as all wrong."""
    right = 0
    wrong = 0
    for row in sampled:
        if row["keep"]:
            continue
        if row["acc"] > 0:
            right += 1
        else:
            wrong += 1
    rows = max(len(sampled), 1)
    return right / rows, wrong / rows


def solved(sampled, gen_batches, step):
    """A line about a step without a group to train on; the run stops if the tasks are too hard."""
    right, wrong = dropped_shares(sampled)
    few = f"step {step}: --max_gen_batches {gen_batches}: less than a group a rank has both kinds"
    kinds = f"{right:.0%} of the sampled groups are all correct, {wrong:.0%} all wrong"
    if right <= wrong:
        fail(f"{few}; {kinds}")
    return f"{few}; {kinds}: solved"


def sampling_metrics(rows, sampled, unfinished, stale, step):
    """What a step trains on, what it has sampled and what it throws away."""
    right, wrong = dropped_shares(sampled)
    age_t = step - np.concatenate([row["step_t"] for row in rows])
    dropped = [row for row in sampled if not row["keep"]]
    return {
        "dapo/dropped_all_right": right,
        "dapo/dropped_all_wrong": wrong,
        "dapo/carried_over": np.mean([row["older_t"].any() for row in rows]),
        "dapo/dropped_stale": len(stale),
        "dapo/token_age_0": np.mean(age_t == 0),
        "dapo/token_age_1": np.mean(age_t == 1),
        "dapo/token_age_2_or_more": np.mean(age_t > 1),
        "dapo/tokens_generated": sum((row["step_t"] == step).sum() for row in sampled + unfinished),
        "dapo/tokens_thrown_away": sum(row["length"] for row in dropped + stale),
    }


if __name__ == "__main__":
    main(Args(**flags))
