"""On-policy distillation (GKD, arXiv 2306.13649): minimise KL(p || q) of a student p and a frozen teacher
q at every token of responses that the student samples.

Differences from the paper with the default flags:
1. The divergence is the reverse KL (`--gkd_beta` has the paper's others): the sum over the vocabulary
   (`--kl full`), or its policy gradient on the sampled tokens, with A = log q - log p (`--kl sampled`;
   Thinking Machines, 2025).
2. Whether the student or the data answers is drawn for each prompt (`--lam`), not for a batch.
3. The loss is the mean over all tokens of the optimizer step (`--loss_agg token-mean`), not of responses.

CPU:        python algos/distill.py --model runs/sft/checkpoints/latest/hf --output_dir runs/distill \
                --teacher runs/grpo/checkpoints/latest/hf --train_files data/train.parquet
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/distill.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/algorithms/distill.md
"""

import math
import os
import re
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, one_line_errors, parse, refuse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")

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
    teacher: tuple[str, ...]  # Hugging Face directories or hub names, with the same vocabulary
    teacher_sources: tuple[str, ...] = ()  # data_source of each teacher's rows; none: one teacher of all
    # after each step the teacher goes this share of the way to the student; 0: frozen, 1: the student itself
    teacher_update_rate: float = 0.0
    # what the teacher reads as last message: the first of these all of whose fields a row has; {prompt},
    # {answer}: extra_info.answer, {solution}: a correct response of the group, {feedback}: of the reward
    teacher_prompt: tuple[str, ...] = ()
    attn_implementation: str = "sdpa"  # attention; sdpa: torch's own, on GPUs flash attention
    # dtype of forward, backward and sampler; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    # what a backward pass computes again; selective: all but products and attention; none: fastest
    gradient_checkpointing: Literal["full", "selective", "none"] = "full"
    compile: bool = False  # compile the layers (GPU)
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    offload: Literal["none", "sampling", "always"] = "none"  # when weights and moments are on the host (GPU)
    lora_rank: int = 0  # rank of LoRA adapters, trained in place of the model; 0: train the model
    # with --lora_rank: scale, the output of the adapters times lora_alpha / lora_rank
    lora_alpha: float = 16
    # ---- rollout
    group_size: int = 1  # responses to each prompt
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
    lr: float = 1e-6  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # decay to 0 after the last step
    warmup_steps: int = 0  # steps of linear warm-up
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    lam: float = 1.0  # share of the prompts that the student answers; extra_info.answer answers the others
    # full: the KL, summed over the vocabulary; sampled: its policy gradient on the sampled tokens
    kl: Literal["full", "sampled"] = "full"
    # with --kl full: 1: KL(student, teacher); 0: KL(teacher, student); between: generalised Jensen-Shannon
    gkd_beta: float = 1.0
    # average of token losses; seq-mean-token-sum-norm: Dr. GRPO
    loss_agg: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    clip_ratio_low: float = 0.2  # with --kl sampled: clip below 1 - this
    clip_ratio_high: float = 0.2  # with --kl sampled: clip above 1 + this
    # with --kl sampled: importance weights, trainer / sampler
    rollout_is: Literal["token", "sequence"] | None = "token"
    rollout_is_threshold: float = 2.0  # with --kl sampled and --rollout_is: upper bound of the weights
    # with --kl sampled: reject by this importance ratio; off_policy: negative responses that the policy
    # has left
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None
    # with --kl sampled and --rollout_rs: h keeps ratios from 1/h to h; two are smallest and largest;
    # off_policy: its delta
    rollout_rs_threshold: tuple[float, ...] = ()
    # ---- rewards
    reward_manager: Literal["naive", "prime"] = "naive"  # prime: rewards run in processes of their own
    # FILE.py:NAME; rewards: by each row's data_source; none. They only measure
    reward_fn: tuple[str, ...] = ("rewards",)
    reward_weights: tuple[float, ...] = ()  # weight of each reward_fn; none: all 1
    # with --reward_manager prime or --reward_fn FILE.py:NAME: seconds for each response; naive: if async
    reward_timeout_s: float = 30.0

    def __post_init__(self):  # torch is imported by then: below, after the command line has been read
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
        self.ppo_mini_batch_size = self.ppo_mini_batch_size or self.train_batch_size


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from data_prep.lib.cache import load_prompt_files
from data_prep.lib.images import load_processor, load_tokenizer
from data_prep.lib.templates import render, use_template
from data_prep.lib.turns import answer_ids
from rewards.manager import RewardManager, validation_summary
from rewards.manager.combined import load_rewards
from system import cpu, families
from system.attention import states_apart
from system.batches import collate, distribute, micro_batches, run_rows, store_logps, token_logps
from system.gpu import move, prepare_layers
from system.metrics import step_metrics, timed
from system.model import (
    TokenLogps,
    add_adapters,
    check_model,
    freeze,
    kept_on_host,
    parts_of,
    read_model,
    read_weights,
    whole_weights,
)
from system.ranks import setup_distributed, sum_over_ranks
from system.run import Run, learning_rate
from system.sampler import answers, check_sampler, engine_options, score_rows

# ---- The mathematics -------------------------------------------------------------------
DUAL_CLIP = 3.0  # bound of the ratio where the advantage is negative
KL_CHUNK = 256  # positions whose whole distributions exist at the same time


def reverse_kl(student, teacher, target, beta=1.0):
    """target [L] -> log-prob [L] of the targets by the student p, and KL(p || q) [L], in float32.

    beta below 1: beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p; beta 0: KL(q || p).
    student, teacher: hidden [L, H], weight [V, H], temperature and softcap of each; their H may differ.
    p = 1/2 1/4 1/4, q = 1/4 1/4 1/2 -> KL = 1/2 log 2 - 1/4 log 2. Where q is not finite the KL is NaN, and
    has no gradient.
    """
    logp_lv = log_distribution(*student)
    logq_lv = log_distribution(*teacher)
    missing_lv = ~logq_lv.isfinite()
    logq_lv = logq_lv.masked_fill(missing_lv, 0.0)
    if beta == 0:
        kl = kl_of(logq_lv, logp_lv)  # eq: distill.forward
    elif beta < 1:
        logm_lv = torch.logaddexp(logq_lv + math.log(beta), logp_lv + math.log(1 - beta))
        kl = beta * kl_of(logq_lv, logm_lv) + (1 - beta) * kl_of(logp_lv, logm_lv)  # eq: distill.js
    else:
        # d KL = sum dp (log p - log q), as sum p dlog p = 0: so equal models have a gradient of 0
        diff_lv = (logp_lv - logq_lv).detach()  # eq: distill.gradient
        kl = (logp_lv.exp() * diff_lv).sum(-1)  # eq: distill.full
    kl = kl.masked_fill(missing_lv.any(-1), math.nan)
    return logp_lv.detach().gather(-1, target[:, None])[:, 0], kl


def kl_of(logp_lv, logq_lv):
    return (logp_lv.exp() * (logp_lv - logq_lv)).sum(-1)


def log_distribution(hidden, weight, temperature, softcap):
    """The whole distribution at each position, [L, V]."""
    logits = Float32Logits.apply(hidden, weight)
    if softcap:  # gemma-2 and gemma-4
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


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


def advantages(logp_nt, batch):
    """A = log q - log p of the sampled tokens; 0 where the teacher gave no finite number."""
    adv_nt = batch["teacher_logp_nt"] - logp_nt.detach()  # eq: distill.advantage
    return adv_nt.where(batch["teacher_logp_nt"].isfinite(), 0.0)


def actor_loss(args, logp_nt, other_nt, batch):
    """The loss of each token before weighting -> loss_nt, and two dicts of what is reported.

    other_nt: the entropy; with --kl full the KL. losses: its parts, averaged as it is.
    means: averaged over tokens. Without old_logp_nt, which a single update does not need, the policy is
    its own old policy. A token that the teacher gave no finite number is not trained.
    """
    if args.kl == "full":
        missing_nt = ~other_nt.isfinite()
        kl_nt = other_nt.masked_fill(missing_nt, 0.0)
        return kl_nt, dict(kl_loss=kl_nt), dict(teacher_kl=kl_nt, teacher_missing=missing_nt)
    old_nt = batch.get("old_logp_nt", logp_nt.detach())
    # CAREFUL: without the ratio, log p - log q as a loss has an expected gradient of 0
    adv_nt = advantages(logp_nt, batch)
    clip = args.clip_ratio_low, args.clip_ratio_high
    loss_nt, clipped_nt, lower_nt = policy_loss(logp_nt, old_nt, adv_nt, batch["mask_nt"], *clip)
    weight_nt = rollout_weights(args, logp_nt, batch | dict(adv_nt=adv_nt))
    loss_nt = loss_nt * weight_nt
    losses = dict(pg_loss=loss_nt)
    means = dict(entropy=other_nt, ppo_kl=old_nt - logp_nt, rollout_rs_masked=weight_nt == 0)
    means |= dict(pg_clipfrac=clipped_nt, pg_clipfrac_lower=lower_nt, teacher_kl=-adv_nt)
    means["teacher_missing"] = ~batch["teacher_logp_nt"].isfinite()
    return loss_nt, losses, means


# ---- The step --------------------------------------------------------------------------
FIELD = re.compile(r"\{(prompt|answer|solution|feedback)\}")  # not str.format: \boxed{} stays as it is


def show_teacher(args, rows, tokenizer):
    """Give each row the prompt of its teacher (2601.19897, 2601.20802) -> share of the rows that have one.

    A correct and a wrong response, templates "{solution} {prompt}", "{feedback} {prompt}": the wrong one is
    taught with the correct one; the correct one with its feedback, and without any it is not trained.
    """
    for _, group in groupby(rows, key=itemgetter("group")):
        group = list(group)
        correct = [row for row in group if row["reward"].get("acc", row["reward"]["score"]) >= 1]
        for row in group:
            others = [other["sampled"]["solution_str"] for other in correct if other is not row]
            known = dict(
                prompt=row["prompt"][-1]["content"],
                answer=row["extra_info"].get("answer"),
                solution=others[0] if others else None,
                feedback=row["reward"].get("feedback"),
            )
            text = teacher_text(args.teacher_prompt, known)
            row["sampled"]["teacher_prompt_str"] = None
            row["teacher"] = dict(prompt_ids=row["prompt_ids"], prompt_length=len(row["prompt_ids"]))
            if text is not None:
                messages = [*row["prompt"][:-1], row["prompt"][-1] | dict(content=text)]
                text_ids = tokenizer.encode(
                    render(messages, tokenizer, row.get("tools")), add_special_tokens=False
                )
                if len(text_ids) <= args.max_tokens_per_microbatch - args.max_response_length:
                    row["sampled"]["teacher_prompt_str"] = text
                    row["teacher"] = dict(prompt_ids=text_ids, prompt_length=len(text_ids))
            if row["sampled"]["teacher_prompt_str"] is None:
                row["mask_t"] = np.zeros_like(row["mask_t"])
    return np.mean([row["mask_t"].any() for row in rows])


def teacher_text(templates, known):
    """The first of the templates all of whose fields are known, filled in; None: there is none."""
    for template in templates:
        if not any(known[field] in (None, "") for field in FIELD.findall(template)):
            return FIELD.sub(lambda field: str(known[field[1]]), template)
    return None


def ask_teachers(args, teachers, mini_batches):
    """teacher_logp_t of this rank's rows, each by the teacher of its data_source (2606.30406)."""
    rows = [row for sequences, _ in mini_batches for row in chain(*sequences)]
    for source, teacher in zip(args.teacher_sources or [None], teachers):
        own = [row for row in rows if source in (None, row["data_source"])]
        shown = [row | row.get("teacher", {}) for row in own]
        sequences = [[row] for row in shown]
        budget = args.max_tokens_per_microbatch
        store_logps(teacher, [(sequences, None)], "teacher_logp_t", args.temperature, budget)
        for row, copy in zip(own, shown):
            row["teacher_logp_t"] = copy["teacher_logp_t"]


@torch.no_grad()
def follow(teacher, policy, rate):
    """An exponential moving average of the student's weights; rate 1: a copy."""
    for q, p in zip(teacher.parameters(), policy.parameters(), strict=True):
        q.mul_(1 - rate).add_(p, alpha=rate)  # eq: distill.average


def logps_and_kl(policy, teacher, rows, temperature, beta):
    """As `token_logps`, with the KL in place of the entropy; the teacher may read other prompts."""
    with torch.no_grad():
        (hidden, weight), _ = run_rows(teacher, [row | row.get("teacher", {}) for row in rows])
    theirs = hidden, weight, temperature / teacher.scale, teacher.softcap
    return token_logps(policy, rows, temperature, teacher=theirs, beta=beta)


def update_actor(policy, teacher, optimizer, mini_batches, args):
    """One optimizer step for each mini-batch of `distribute` -> mean metrics. teacher: with --kl full."""
    sums = defaultdict(float)
    norms = []
    for sequences, totals in mini_batches:
        for rows in micro_batches(policy, sequences, args.max_tokens_per_microbatch):
            if args.kl == "full":
                logp_nt, other_nt = logps_and_kl(policy, teacher, rows, args.temperature, args.gkd_beta)
            else:
                logp_nt, other_nt = token_logps(policy, rows, args.temperature)
            batch = collate(rows, logp_nt.device)
            loss_nt, losses, means = actor_loss(args, logp_nt, other_nt, batch)
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

    metrics = {f"actor/{name}": total / len(norms) for name, total in sum_over_ranks(sums).items()}
    metrics["actor/grad_norm"] = np.mean(norms)
    metrics["actor/skipped_updates"] = np.sum(~np.isfinite(norms))
    return metrics


def main(args):
    # ---- arguments and data: checked before anything slow
    if args.kl == "full":  # its loss has no ratio of sampled tokens to correct
        args = replace(args, rollout_is=None, rollout_rs=None)
    with Run(args) as run:
        tokenizer, manager, train_rows, val_rows, summary = load_data(args)
        check_teacher(args, tokenizer, train_rows)
        steps_per_epoch = len(train_rows) // args.train_batch_size
        run.plan(args.total_steps or args.total_epochs * steps_per_epoch, summary)

        # ---- models: the engine first, while the GPU is empty; then it sleeps
        device, mesh = setup_distributed(args.hsdp_replicas)
        run.say("starting vLLM")
        engine = build_engine(args, device)
        run.say(f"loading {args.model} and {', '.join(args.teacher)}")
        policy, teachers = load_models(args, mesh, device)
        models = [policy, *teachers]
        trained = dict(hf=policy.lm)  # the directories that they have in a checkpoint
        if args.teacher_update_rate:
            trained["teacher"] = teachers[0].lm
        parameters = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay, fused=True)
        run.load(trained, optimizer, tokenizer, whole_weights)
        run.start(policy.lm)
        sampling = dict(top_p=args.top_p, stop_token_ids=[tokenizer.eos_token_id])
        limit = families.rounding_limit(policy.lm, args.compute_dtype, args.rollout_quantization)
        if args.top_p < 1:  # the sampler has another distribution on purpose
            limit = math.inf

        def validate():
            with awake(engine, models, optimizer, args, timing={}):
                options = sampling | dict(temperature=args.val_temperature, top_p=1.0)
                rows = rollout(engine, args, val_rows, step=0, group_size=args.val_group_size, **options)
            rows = score_rows(rows, manager, tokenizer)
            run.dump(rows, "val")
            metrics, text = validation_summary(rows, run.step)
            run.say(text)
            return metrics

        if val_rows and not run.step:
            run.log(validate())

        for step, timing in run.steps():
            epoch, batch = divmod(step - 1, steps_per_epoch)
            order = np.random.default_rng((args.seed, epoch)).permutation(len(train_rows))
            chosen = order[batch * args.train_batch_size :][: args.train_batch_size]
            prompts = [dict(train_rows[i], group=g) for g, i in enumerate(chosen)]
            sampled = np.random.default_rng((args.seed, step)).random(len(chosen)) < args.lam
            # ---- rollout: the student answers its share of the prompts, the data the others
            with awake(engine, models, optimizer, args, timing), timed(timing, "gen"):
                own = [row for row in prompts if sampled[row["group"]]]
                options = sampling | dict(temperature=args.temperature)
                rows = rollout(engine, args, own, step, args.group_size, **options)
            for row in rows:
                row["older_t"] = np.zeros(row["length"], bool)
            rows += data_rows([row for row in prompts if not sampled[row["group"]]], tokenizer, args)
            # ---- reward: from here on every rank has the rows of all ranks
            with timed(timing, "reward"):
                rows = score_rows(rows, manager, tokenizer)
            shown = show_teacher(args, rows, tokenizer) if args.teacher_prompt else 1.0
            # ---- balance over the ranks
            updates = args.train_batch_size // args.ppo_mini_batch_size
            budget = args.max_tokens_per_microbatch
            mini_batches, own_rows, load = distribute(rows, updates, budget, policy.packed)
            # ---- log-probs: those of the first mini-batch are made by its own update
            if len(mini_batches) > 1:
                with timed(timing, "old_log_prob"):
                    store_logps(policy, mini_batches[1:], "old_logp_t", args.temperature, budget)
            if args.kl == "sampled":
                with timed(timing, "ref"):
                    ask_teachers(args, teachers, mini_batches)
            # ---- update
            lr = learning_rate(args.lr, step, run.total, args.warmup_steps, args.lr_schedule)
            optimizer.param_groups[0]["lr"] = lr
            with timed(timing, "update_actor"):
                metrics = update_actor(policy, teachers[0], optimizer, mini_batches, args)
                if args.teacher_update_rate:
                    follow(teachers[0], policy, args.teacher_update_rate)
            metrics |= check_sampler(own_rows, partial(weights_now, args), limit, step)
            run.updated()
            # ---- validation
            if val_rows and run.due(args.test_freq):
                with timed(timing, "testing"):
                    metrics |= validate()
            # ---- metrics
            timing["step"] = run.elapsed()
            metrics |= step_metrics(rows, load, policy, timing, args.compute_dtype)
            metrics |= {
                "actor/lr": lr,
                "training/taught": shown,
                "training/epoch": epoch,
            }
            run.log(metrics, score="critic/score/mean", length="response_length/mean")
            run.dump(rows)
            # ---- checkpoint, after the metrics: each checkpoint has its metrics
            if run.due(args.save_freq):
                run.save()


def weights_now(args, logp_nt, batch):
    """`rollout_weights` of the policy that sampled, for metrics."""
    adv_nt = torch.zeros_like(logp_nt)
    return rollout_weights(args, logp_nt, batch | dict(adv_nt=adv_nt))


class Float32Logits(torch.autograd.Function):
    """hidden [L, H], weight [V, H] -> logits [L, V] in float32, also where both are bfloat16."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        if weight.is_cuda and weight.dtype is not torch.float32:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # without a derivative
        return hidden.float() @ weight.float().t()

    @staticmethod
    def backward(ctx, d_logits):
        hidden, weight = ctx.saved_tensors
        d_logits = d_logits.to(weight.dtype)
        d_weight = d_logits.t() @ hidden if ctx.needs_input_grad[1] else None
        return d_logits @ weight, d_weight


class Teacher(TokenLogps):
    """A causal LM whose forward returns what its output layer reads, and that layer's weight."""

    def forward(self, where, target, temperature, **inputs):
        hidden = self.hidden(where, inputs)
        weight = self.lm.get_output_embeddings().weight
        return hidden.to(weight.dtype), weight.clone()  # FSDP takes it away after the forward


class Student(TokenLogps):
    """The policy with --kl full: its forward returns log-probs and, in place of the entropy, the KL."""

    def forward(self, where, target, temperature, teacher=None, beta=1.0, **inputs):
        """teacher: its hidden states at these positions, weight, temperature and softcap; None: no KL."""
        if teacher is None:
            return super().forward(where, target, temperature, **inputs)
        hidden = self.hidden(where, inputs)
        weight = self.lm.get_output_embeddings().weight
        hidden = hidden.to(weight.dtype)  # float32 in Mamba
        teacher_hidden, *teacher_head = teacher
        chunks = []
        for h, h_q, t in zip(*[x.split(KL_CHUNK) for x in (hidden, teacher_hidden, target)]):
            ours = h, weight, temperature / self.scale, self.softcap
            # logits exist for one chunk at a time; the backward pass computes them again
            theirs = h_q, *teacher_head
            chunks.append(checkpoint(reverse_kl, ours, theirs, t, beta, use_reentrant=False))
        return [torch.cat(column) for column in zip(*chunks)]


def load_models(args, mesh, device):
    """-> student and teachers, with the same layout of rows: one that all can read."""
    # a teacher that follows is float32 and in checkpoints; --lora_rank is refused with it
    set_trained = adapters_of(args) if args.teacher_update_rate else freeze
    full = args.kl == "full"
    teachers = []
    for name in args.teacher:
        teachers.append(load_model(args, name, mesh, device, set_trained, Teacher if full else TokenLogps))
    student = load_model(args, args.model, mesh, device, adapters_of(args), Student if full else TokenLogps)
    return student, teachers


def check_teacher(args, tokenizer, rows):
    """Stop before models are loaded if a teacher has other tokens, or rows lack what is asked for."""
    ours = tokenizer.get_vocab()
    size = AutoConfig.from_pretrained(args.model).get_text_config().vocab_size
    for name in args.teacher:
        with one_line_errors(f"--teacher {name}: "):
            check_model(name, args.attn_implementation, freeze)
            their_size = AutoConfig.from_pretrained(name).get_text_config().vocab_size
            theirs = load_tokenizer(name).get_vocab()
        other = sorted({token for token, _ in ours.items() ^ theirs.items()})
        if other:
            number = ours.get(other[0], "none")
            their_number = theirs.get(other[0], "none")
            first = f"{other[0]!r} is number {their_number} there, {number} in --model"
            fail(f"--teacher {name} has another vocabulary: {len(other)} tokens differ, {first}")
        if args.kl == "full" and size != their_size:
            fail(f"--kl full: {size} logits of --model, {their_size} of --teacher: use --kl sampled")
    check_sources(args, rows)
    check_answers(args, rows)


def check_sources(args, rows):
    """Stop if teachers and sources of rows do not fit each other."""
    sources = args.teacher_sources
    several = len(args.teacher) > 1
    odd = sorted(rows.unique("data_source") ^ {*sources}) if sources else []
    uneven = (several or sources) and len(sources) != len(args.teacher)
    paths = {os.path.realpath(name) for name in (args.model, *args.teacher)}
    same = len(paths) == 1 and not (args.lora_rank or several)
    follows = args.teacher_update_rate > 0
    refuse(
        (several and args.kl == "full", "several --teacher need --kl sampled"),
        (uneven, f"{len(args.teacher)} --teacher and {len(sources)} --teacher_sources: give one for each"),
        (odd, f"--teacher_sources: a data_source without a teacher or without rows: {', '.join(odd)}"),
        (follows and not same, "--teacher_update_rate needs the --model as --teacher, no --lora_rank"),
    )


def check_answers(args, rows):
    """Stop if the data's answers, or the fields of --teacher_prompt, are asked for and not there."""
    if args.lam < 1 and not (args.kl == "full" and args.group_size == 1):
        fail(f"--lam {args.lam}: the data's one response to a prompt needs --kl full --group_size 1")
    if args.lam < 1 or any("{answer}" in text for text in args.teacher_prompt):
        missing = []
        for row in rows:
            text = row["extra_info"].get("answer")
            if not (text and isinstance(text, str)):
                missing.append(row["index"])
        if missing:
            fail(f"{len(missing)} rows have no text in extra_info.answer, first {min(missing)}")
    no_rule = args.reward_fn == ("none",)
    filled = []
    for text in args.teacher_prompt:
        no_solution = "{solution}" in text and (no_rule or args.group_size == 1)
        no_feedback = "{feedback}" in text and no_rule
        if not no_solution and not no_feedback:
            filled.append(text)
    if args.teacher_prompt and not filled:
        fail("--teacher_prompt: {solution} needs --group_size above 1, both it and {feedback} a rule")


def data_rows(prompts, tokenizer, args):
    """This rank's prompts with the data's responses -> rows like those of `rollout`."""
    rank = dist.get_rank()
    rows = []
    for row in prompts[rank :: dist.get_world_size()]:
        ids = answer_ids(row["prompt_ids"], row["extra_info"]["answer"], tokenizer)
        ids = np.array(ids[: args.max_response_length], np.int32)
        ended = ids[-1] == tokenizer.eos_token_id
        answer = dict(
            sample=0,
            rank=rank,
            response_ids=ids,
            rollout_logp_t=np.zeros(len(ids), np.float32),
            mask_t=np.ones(len(ids), bool),
            older_t=np.ones(len(ids), bool),  # no sampler of this step made them
            length=len(ids),
            prompt_length=len(row["prompt_ids"]),
            finish_reason="stop" if ended else "length",
        )
        rows.append(row | answer)
    return rows


# ---- The system: data, FSDP2 and vLLM; the rest of it is in system/ ------------------------
def load_data(args):
    """-> tokenizer, reward manager, rows of training and of validation, a line about them."""
    with one_line_errors():
        check_model(args.model, args.attn_implementation, adapters_of(args))
        families.refuse_images(args.model, (*args.train_files, *args.val_files))
        tokenizer = load_processor(args.model)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        reward_fn = load_rewards(args.reward_fn, args.reward_weights, args.group_size)
        manager = RewardManager(args.reward_manager, reward_fn, timeout_s=args.reward_timeout_s)
        data = args.train_files, args.val_files, args.max_prompt_length
        train_rows, val_rows, summary = load_prompt_files(tokenizer, args.train_batch_size, *data)
        manager.check(train_rows, val_rows)
    return tokenizer, manager, train_rows, val_rows, summary


def adapters_of(args):
    """What is trained: the model, or adapters with --lora_rank."""
    return partial(add_adapters, rank=args.lora_rank, alpha=args.lora_alpha, seed=args.seed)


def load_model(args, path, mesh, device, set_trained, root):
    """A model in its root module, sharded by FSDP2. Rank 0 reads the weights for all."""
    beside = args.model, *args.teacher
    lm, full, packed = read_model(path, args.attn_implementation, set_trained, beside=beside)
    prepare_layers(lm, args.gradient_checkpointing, args.compile, eager=states_apart(lm))
    model = root(lm, packed)
    precision = MixedPrecisionPolicy(getattr(torch, args.compute_dtype), reduce_dtype=torch.float32)
    fsdp = dict(mesh=mesh, mp_policy=precision)
    if args.offload == "always":
        fsdp |= kept_on_host(lm)
    for part in parts_of(lm):
        fully_shard(part, **fsdp)
    # the root too is resharded after a forward: without a backward nothing else would do it
    fully_shard(model, **fsdp, reshard_after_forward=True)
    model.to_empty(device="cpu" if args.offload == "always" else device)
    read_weights(lm, full)
    return model


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
def awake(engine, models, optimizer, args, timing):
    """While the block lasts, the sampler is awake, with the weights of the first of the models."""
    with timed(timing, "sync"):
        engine.wake_up(tags=["weights"])
        sync_weights(engine, models[0].lm)
        if args.offload == "sampling":
            move("cpu", models, optimizer)
        engine.wake_up(tags=["kv_cache"])
    yield
    with timed(timing, "sync"):
        engine.sleep(level=2)
        if args.offload == "sampling":
            move("cuda", models, optimizer)


def sync_weights(engine, lm):
    """Stream the sharded model into the sampler, which packs it as it packs what it loads."""
    config = engine.model_config
    weights = whole_weights(lm, config.dtype, families.unused_weights(lm))
    weights = families.vllm_names(weights, lm.config, config.hf_config)
    engine.apply_model(cpu.before_reload)
    engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
    engine.apply_model(cpu.after_reload)
    engine.reset_prefix_cache()


def rollout(engine, args, prompts, step, group_size, **sampling):
    """Let the sampler answer the prompts of all ranks -> the rows of this rank.

    Ranks that share a sampler (--tp_size) answer the union of their prompts and keep whole groups.
    """
    rank = dist.get_rank()
    own = prompts[rank // args.tp_size :: dist.get_world_size() // args.tp_size]
    rows = []
    for prompt in own:
        for g in range(group_size):
            seed = args.seed, step, prompt["index"], g
            rows.append(dict(prompt, sample=g, rank=rank, seed=seed))
    options = dict(max_tokens=args.max_response_length) | sampling
    for row, output in answers(engine, rows, **options):  # converted at once: lists take 200 bytes a token
        row["response_ids"] = np.array(output.token_ids, np.int32)
        row["rollout_logp_t"] = np.array(output.logprobs.logprobs, np.float32)
        row["mask_t"] = np.ones(len(output.token_ids), bool)  # the tokens that are trained
        row["length"] = len(output.token_ids)
        row["prompt_length"] = len(row["prompt_ids"])
        row["finish_reason"] = output.finish_reason
    groups = [rows[i : i + group_size] for i in range(0, len(rows), group_size)]
    return list(chain.from_iterable(groups[rank % args.tp_size :: args.tp_size]))


if __name__ == "__main__":
    main(Args(**flags))
