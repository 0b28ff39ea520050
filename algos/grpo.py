"""GRPO (DeepSeekMath, arXiv 2402.03300): maximise E[min(r A, clip(r, 1-eps, 1+eps) A)] - beta KL(p || ref),
where A is a response's score relative to the other responses to the same prompt.

Departures from the paper:
1. Clip-higher (DAPO 2503.14476, eq. 10; off by default) and dual clip (1912.09729, eq. 5) are there.
2. The loss is the mean over all tokens of the optimizer step (`--loss_agg token-mean`), not of responses.
3. The sampler's rounding is corrected by truncated importance sampling (`--rollout_is`, Yao et al. 2025).

CPU:        python algos/grpo.py --model runs/tiny/hf --train_files data/train.parquet --output_dir runs/grpo
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/grpo.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/grpo.md
"""

import ctypes
import faulthandler
import io
import json
import math
import os
import pickle
import shutil
import signal
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, chain, count, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Literal
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.arguments import parse

# Shapes: B prompts, G responses each, N = B * G, P prompt tokens, T response tokens, V vocabulary. A suffix
# names the axes (logp_nt). T is aligned with the response: column t speaks of response token t.


@dataclass(kw_only=True)
class Args:
    # ---- run
    output_dir: str  # directory of the run: arguments, metrics, log, rollouts, checkpoints
    resume: str = "auto"  # auto: output_dir's latest checkpoint, if any; never: refuse a used one; or a path
    seed: int = 1  # of data order, adapters and, with step, prompt and sample number, of every response
    total_epochs: int = 1  # passes over the training data
    total_steps: int | None = None  # RL steps in all; None: total_epochs
    save_freq: int = 50  # steps between checkpoints; 0: only at the end
    test_freq: int = 10  # steps between validations; 0: only before and after training
    val_before_train: bool = True  # validate before the first step
    keep_checkpoints: int = 2  # newest checkpoints that are kept; 0: all
    save_hf: bool = True  # also write each checkpoint's weights as a Hugging Face directory (hf/)
    rollout_dump: bool = False  # write every training response to output_dir/rollouts
    num_examine: int = 1  # responses of each data source that every validation shows in a table
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # where metrics go beside metrics.jsonl
    wandb_project: str | None = None  # with --tracker wandb: its project; None: its default
    timeout_s: float = 3600.0  # seconds that a rank waits for the others before the run ends
    # ---- data
    train_files: tuple[str, ...]  # parquet files of training prompts
    val_files: tuple[str, ...] = ()  # parquet files of validation prompts; none: no validation
    max_prompt_length: int = 512  # limit of the prompt in tokens
    filter_overlong_prompts: bool = True  # drop and count prompts over the limit; else they are an error
    # ---- model
    model: str  # Hugging Face directory or hub name of the model to train
    tokenizer: str | None = None  # Hugging Face directory or hub name; None: the model's
    attn_implementation: str | None = None  # None: flash_attention_2, which packs rows, if there, else sdpa
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters and optimizer state
    # of forward, backward and sampler; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    sp_size: int = 1  # ranks that share the tokens of a row; it is packed then
    gradient_checkpointing: bool = True  # recompute activations in the backward pass
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    offload: bool = False  # parameters and optimizer state to host memory during sampling (GPU only)
    lora_rank: int = 0  # rank of the LoRA adapters, which are then all that is trained; 0: the model itself
    lora_alpha: float = 16  # the adapters' output is scaled by lora_alpha / lora_rank
    lora_target_modules: tuple[str, ...] = ("all-linear",)  # names of layers; all-linear: all but the output
    merge_lora: bool = False  # hf/ is the model with the adapters in its weights; else only the adapters
    # ---- rollout
    group_size: int = 8  # responses to each prompt
    max_response_length: int = 1024  # limit of the response in tokens
    temperature: float = 1.0  # of sampling; log-probs of the trainer are taken at the same
    top_p: float = 1.0  # nucleus sampling; below 1 only without rollout_is, rollout_rs
    top_k: int = -1  # top-k sampling; -1: off, else as top_p
    tp_size: int = 1  # ranks that share one sampler by tensor parallelism
    gpu_memory_utilization: float = 0.5  # share of the GPU's memory that the awake sampler takes
    val_group_size: int = 1  # responses to each validation prompt
    val_temperature: float = 0.0  # of sampling in validation
    # ---- optimizer
    train_batch_size: int = 64  # prompts of a step, over all ranks
    ppo_mini_batch_size: int = 64  # prompts of an optimizer step, over all ranks
    ppo_epochs: int = 1  # passes over the responses of a step
    lr: float = 1e-6  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # decay to 0 at the last step
    warmup_steps: int = 0  # steps of linear warm-up
    weight_decay: float = 0.01  # AdamW's decoupled weight decay
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    adv_estimator: Literal["grpo", "rloo", "reinforce_plus_plus_baseline", "maxrl"] = "grpo"  # in its group
    norm_adv_by_std: bool = True  # divide grpo's advantage by the group's deviation; off: Dr. GRPO
    policy_loss: Literal["clip", "gspo", "cispo", "sapo"] = "clip"  # of the ratio of new to old policy
    clip_ratio_low: float | None = None  # ratios below 1 - this are clipped; None: .2, gspo 3e-4, cispo 1
    clip_ratio_high: float | None = None  # ratios above 1 + this are clipped; None: .2, gspo 4e-4, cispo 4
    clip_ratio_c: float = 3.0  # dual clip of clip and gspo: bound of the ratio for negative advantages
    tau_pos: float = 1.0  # of sapo's gate where the advantage is positive; larger: it closes sooner
    tau_neg: float = 1.05  # where it is not
    # average of token losses; None: token-mean, of gspo and sapo seq-mean-token-mean; the last is Dr. GRPO's
    loss_agg: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    use_kl_loss: bool = False  # add the KL divergence from the initial model to the loss
    kl_loss_coef: float = 0.001  # weight of the KL loss
    kl_kind: Literal["k1", "k1+", "abs", "k2", "k3", "k3+"] = "k3"  # its estimator; +: with k2's gradient
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    rollout_is: Literal["token", "sequence"] | None = "token"  # importance of trainer against sampler
    rollout_is_threshold: float = 2.0  # a larger importance is cut to it
    rollout_rs: Literal["token", "sequence", "geometric"] | None = None  # rejection by that ratio
    rollout_rs_threshold: float | None = None  # with rollout_rs: largest ratio of what is not rejected
    rollout_rs_threshold_lower: float | None = None  # smallest; None: 1 / rollout_rs_threshold
    # ---- rewards
    reward_manager: Literal["naive", "prime"] = "naive"  # one by one, or processes with a time-out
    reward_fn: tuple[str, ...] = ("rewards",)  # FILE.py:NAME; `rewards`: the scorer of the data_source
    reward_weights: tuple[float, ...] = ()  # weight of each reward_fn; none: all 1
    reward_aggregation: Literal["sum", "mean", "min"] = "sum"  # of several rewards; min: the worst case
    reward_workers: int = 4  # processes of the prime manager on each rank
    reward_timeout_s: float = 30.0  # seconds that the prime manager gives a sample before it fails

    def __post_init__(self):
        flash = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
        self.attn_implementation = self.attn_implementation or flash
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import is_flash_attn_2_available, logging

from data_prep.cache import load_prompts
from data_prep.images import auto_class, load_processor, never_sampled, request, show_images, takes_images
from data_prep.tracking import Logger, check_tracker, leave, ranks_on, stats, step_metrics
from rewards import check_sources
from rewards.combined import load_rewards
from rewards.manager import RewardManager, demote_failures, dump_rollouts, validation_metrics


# ---- The mathematics ---------------------------------------------------------------------------------------
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
    if args.adv_estimator == "maxrl":  # score minus mean over the mean (2602.02710)
        mean_n = score_n - centred_n
        return (centred_n / mean_n).where(mean_n > 0, 0.0)  # eq: grpo.maxrl
    # REINFORCE++ with baseline (2501.03262): zero mean and unit variance over all tokens of the batch
    centred_n = centred_n - (centred_n * length_n).sum() / length_n.sum()
    variance = (centred_n**2 * length_n).sum() / (length_n.sum() - 1).clamp(min=1)
    return centred_n * (variance + 1e-8).rsqrt()  # eq: grpo.whiten


def kl_estimate(logp_nt, ref_logp_nt, kind):
    """Estimators of KL(policy || reference) a sampled token (Schulman 2020); k3 is clamped as in verl."""
    d_nt = logp_nt - ref_logp_nt
    if kind.endswith("+"):  # the value of k1, k3 with the gradient of k2, which is the KL's
        value_nt = kl_estimate(logp_nt, ref_logp_nt, kind[:-1]).detach()
        return value_nt + d_nt**2 / 2 - d_nt.detach() ** 2 / 2  # eq: grpo.kl_gradient
    if kind == "k3":
        d_nt = d_nt.clamp(-20, 20)
        return ((-d_nt).exp() + d_nt - 1).clamp(-10, 10)  # eq: grpo.kl
    return {"k1": d_nt, "abs": d_nt.abs(), "k2": d_nt**2 / 2}[kind]


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


def loss_weights(mask_nt, mode, max_length=None, totals=None):
    """Weights w_nt with sum(w_nt * loss_nt) the aggregated loss; mask_nt: the responses of an optimizer step.

    totals: its (tokens, responses), if mask_nt is a part of it. Lengths 1 and 3, token-mean: weights 1/4;
    seq-mean-token-mean: 1/2 and 1/6. Empty ones do not count.
    """
    mask_nt = mask_nt.float()
    length_n1 = mask_nt.sum(-1, keepdim=True)
    tokens, responses = (max(int(x), 1) for x in totals or (length_n1.sum(), (length_n1 > 0).sum()))
    denominator = {
        "token-mean": tokens,
        "seq-mean-token-sum": responses,
        "seq-mean-token-mean": length_n1.clamp(min=1) * responses,
        "seq-mean-token-sum-norm": responses * (max_length or mask_nt.shape[1]),
    }
    return mask_nt / denominator[mode]  # eq: grpo.aggregation


def actor_loss(args, logp_nt, entropy_nt, part):
    """The whole loss of each token -> loss_nt, and the terms that metrics are sums of.

    part: columns of the batch; without old_logp_nt (a single optimizer step) the policy is its own old one.
    """
    old_nt = part.get("old_logp_nt", logp_nt.detach())
    given, clip = (logp_nt, old_nt, part["adv_nt"]), (args.clip_ratio_low, args.clip_ratio_high)
    if args.policy_loss == "clip":
        pg_nt, clipped_nt, lower_nt = policy_loss(*given, *clip, args.clip_ratio_c)
    else:
        pg_nt, clipped_nt, lower_nt = other_loss(args, *given, part["mask_nt"])
    pg_nt = pg_nt * rollout_weights(args, old_nt, part["rollout_logp_nt"], part["mask_nt"])
    kl_nt = kl_estimate(logp_nt, part.get("ref_logp_nt", logp_nt.detach()), args.kl_kind)
    loss_nt = pg_nt - args.entropy_coeff * entropy_nt
    if args.use_kl_loss:
        loss_nt = loss_nt + args.kl_loss_coef * kl_nt
    terms = dict(pg_loss=pg_nt, kl_loss=kl_nt, entropy=entropy_nt, ppo_kl=old_nt - logp_nt)
    return loss_nt, terms | dict(pg_clipfrac=clipped_nt, pg_clipfrac_lower=lower_nt)


# ---- The step ----------------------------------------------------------------------------------------------
def make_batch(rows, adv_n, args, device):
    """A step's rows, dealt to the ranks by tokens -> this rank's batch, and the tokens of every rank."""
    batch, load = balance_batch(rows, args, device)
    batch["adv_nt"] = adv_n[batch["rows"], None].float().to(device)  # every token of a response shares it
    return batch, load


def update_actor(policy, optimizer, batch, args):
    """One optimizer step a mini-batch -> metrics, means over them, and log-probs if there are no old ones."""
    sums, norms, first = 0.0, [], {}
    for _ in range(args.ppo_epochs):
        for mini_batch, totals in zip(batch["mini_batches"], batch["totals"], strict=True):
            for rows, logp_nt, entropy_nt in micro_batches(policy, batch, mini_batch, args):
                part = columns(batch, rows, logp_nt.device)
                loss_nt, terms = actor_loss(args, logp_nt, entropy_nt, part)
                # totals are of all ranks and micro-batches: no way to cut them changes the gradient
                weight_nt = loss_weights(part["mask_nt"], args.loss_agg, args.max_response_length, totals)
                # FSDP averages gradients over the ranks, but the totals are already of all ranks
                ((weight_nt * loss_nt).sum() * dist.get_world_size()).backward()
                with torch.no_grad():
                    mean_nt = loss_weights(part["mask_nt"], "token-mean", None, totals)
                    kinds = [weight_nt if "loss" in name else mean_nt for name in terms]
                    sums += torch.stack([(w * x).sum() for w, x in zip(kinds, terms.values(), strict=True)])
                    if "old_logp_nt" not in batch:  # then there is one optimizer step
                        first |= zip(rows, logp_nt.detach())
            norms.append(clip_gradients(optimizer, args.grad_clip))
            if math.isfinite(norms[-1]):  # the norm of all ranks: they step or skip together
                optimizer.step()
            optimizer.zero_grad()
    means = [total / len(norms) / args.sp_size for total in all_reduce(sums.tolist())]
    metrics = {f"actor/{name}": mean for name, mean in zip(terms, means, strict=True)}
    metrics |= {"actor/grad_norm": np.mean(norms), "actor/skipped_updates": np.sum(~np.isfinite(norms))}
    return metrics, first


def main(args):
    # ---- arguments and data: nothing slow before they are known to be good
    args = with_defaults(args, clip_ratio_low=0.2, clip_ratio_high=0.2, loss_agg="token-mean")
    check_args(args)
    if args.use_kl_loss and args.kl_kind == "k1":
        fail("--kl_kind k1 has an expected gradient of 0 as a loss: take k1+, k2 or k3+")
    checkpoints = open_run(args)
    tokenizer, manager, val_manager, train_rows, val_rows, about = load_data(args, images=True)
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch

    # ---- models: the engine first, while the GPU is empty; then it sleeps
    device, mesh = setup_distributed(args.hsdp_replicas, args.timeout_s)
    engine = build_engine(args, device)
    args = share_prefixes(share_rows(args, device))
    models = [policy := load_model(args, mesh, device, wrap=Sliced)]
    if args.use_kl_loss and not args.lora_rank:  # which has the model as it was: without adapters
        frozen = replace(args, param_dtype=args.compute_dtype)
        models.append(load_model(frozen, mesh, device, wrap=Sliced).eval().requires_grad_(False))
    actor = Adapters(policy.lm, args) if args.lora_rank else policy.lm
    optimizer = torch.optim.AdamW(actor.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    state = load_checkpoint(checkpoints, actor, optimizer)
    log = Logger(args, state["step"], total_steps)
    log.say(f"{about}\n{total_steps} steps, {ranks_on(device)}{state['origin']}")
    sampler = partial(awake, engine, models, optimizer, args, stop_token_ids=[tokenizer.eos_token_id])
    check_engines(sampler, policy, train_rows, args)
    stop = []  # by SIGTERM: the step in progress is the last
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))

    def validate():
        with sampler({}) as sample:
            rows = sample(val_rows, 0, args.val_group_size, temperature=args.val_temperature)
        metrics = validation_metrics(score_rows(rows, val_manager, tokenizer)[0])
        log.say("\n".join(f"{name} {value:.3f}" for name, value in metrics.items() if "/mean@" in name))
        return metrics

    if val_rows and args.val_before_train and not state["step"]:
        log.log(validate() | {"training/global_step": 0}, 0)

    saving = {}  # seconds of the last checkpoint: reported by the step after it
    for step in range(state["step"] + 1, total_steps + 1):
        timing, saving, begin = saving, {}, time.perf_counter()
        faulthandler.dump_traceback_later(args.timeout_s + dist.get_node_local_rank() / 4)  # stacks, in turn
        epoch, number = divmod(step - 1, steps_per_epoch)
        order = np.random.default_rng((args.seed, epoch)).permutation(len(train_rows))
        chosen = order[number * args.train_batch_size :][: args.train_batch_size]
        prompts = [dict(train_rows[i], group=g) for g, i in enumerate(chosen)]
        # ---- rollout
        sampling = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
        with sampler(timing) as sample:
            rows = sample(prompts, step, args.group_size, **sampling)
        # ---- reward: from here every rank knows the scores and lengths of all rows
        with timed(timing, "reward"):
            rows, rank_tokens = score_rows(rows, manager, tokenizer)
        # ---- advantage, then balance over the ranks
        with timed(timing, "adv"):
            score_n = torch.tensor([row["reward"]["score"] for row in rows], dtype=torch.float64)
            group_n = torch.tensor([row["group"] for row in rows])
            length_n = torch.tensor([row["length"] for row in rows])
            adv_n = advantages(args, score_n, group_n, length_n)
            batch, load = make_batch(rows, adv_n, args, device)
        # ---- log-probs: the old ones only if there will be a second optimizer step
        if len(batch["mini_batches"]) * args.ppo_epochs > 1:
            with timed(timing, "old_log_prob"):
                batch["old_logp_nt"] = all_logps(policy, batch, args)
        if args.use_kl_loss:
            with timed(timing, "ref"), without_adapters(models[-1].lm):
                batch["ref_logp_nt"] = all_logps(models[-1], batch, args)
        # ---- update
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step, total_steps)
        with timed(timing, "update_actor"):
            metrics, first = update_actor(policy, optimizer, batch, args)
        logps = batch.get("old_logp_nt", first)
        metrics |= check_sampler(logps, batch, args, step) | weight_metrics(logps, batch, args)
        # ---- validation
        last = step == total_steps or all_reduce([bool(stop)], dist.ReduceOp.MAX) == [1]
        if val_rows and (last or (args.test_freq and step % args.test_freq == 0)):
            with timed(timing, "testing"):
                metrics |= validate()
        # ---- metrics
        timing["step"] = time.perf_counter() - begin
        metrics |= step_metrics(rows, rank_tokens, load, policy, timing, args)
        metrics |= stats("critic/rewards", score_n) | stats("critic/advantages", adv_n)
        metrics |= {
            "actor/lr": learning_rate(args, step, total_steps),
            "actor/kl_coef": args.kl_loss_coef * args.use_kl_loss,
            "training/global_step": step,
            "training/epoch": epoch,
        }
        log.log(metrics, step, score="critic/score/mean", length="response_length/mean")
        if args.rollout_dump and (whole := gather_rows(rows)):
            dump_rollouts(whole, log.out / f"rollouts/step_{step:06d}.jsonl")
        # ---- checkpoint, after the metrics: a kill in between loses neither
        if last or (args.save_freq and step % args.save_freq == 0):
            with timed(saving, "save_checkpoint"):
                save_checkpoint(args, step, actor, optimizer, tokenizer)
        if last:
            break
    log.close(args)
    leave()


# --------------------------------------------------------------------------------------------------
# The system
# --------------------------------------------------------------------------------------------------
# region losses
PAPER = {  # what a flag that is None stands for, by --policy_loss; the script has the values for `clip`
    "gspo": dict(clip_ratio_low=3e-4, clip_ratio_high=4e-4, loss_agg="seq-mean-token-mean"),
    "cispo": dict(clip_ratio_low=1.0, clip_ratio_high=4.0, loss_agg="token-mean"),  # ratios from 0 to 5
    "sapo": dict(loss_agg="seq-mean-token-mean"),
}


def with_defaults(args, **clip):
    """The arguments, with numbers for what is None."""
    paper = PAPER.get(args.policy_loss, clip)
    return replace(args, **{name: x for name, x in paper.items() if getattr(args, name) is None})


def gspo_loss(logp_nt, old_nt, adv_nt, mask_nt, *clip):
    """policy_loss with one ratio a response: e to the mean of its log-ratios (2507.18071, eq. 14).

    Log-ratios .1 and .3 of a response: both tokens have the ratio e^.2, and each the gradient of its own.
    """
    d_nt = (logp_nt - old_nt).detach() * mask_nt
    mean_n1 = d_nt.sum(-1, keepdim=True) / mask_nt.sum(-1, keepdim=True).clamp(min=1)
    return policy_loss(logp_nt, logp_nt.detach() - mean_n1, adv_nt, *clip)  # eq: grpo.gspo


def cispo_loss(logp_nt, old_nt, adv_nt, low, high):
    """-sg(clip(r, 1 - low, 1 + high)) A log p: no token loses its gradient (2506.13585, eq. 4).

    A = 1, log p = -2, r = 6, high = 4 -> 10, clipped.
    """
    ratio_nt = (logp_nt - old_nt).detach().clamp(-20, 20).exp()
    clip_nt = ratio_nt.clamp(1 - low, 1 + high)
    return -clip_nt * adv_nt * logp_nt, clip_nt != ratio_nt, torch.zeros_like(clip_nt)  # eq: grpo.cispo


def sapo_loss(logp_nt, old_nt, adv_nt, tau_pos, tau_neg):
    """-A sigma(tau (r - 1)) 4 / tau: the gate closes slowly, where a clip jumps (2511.20347, eq. 5).

    A = 1, tau = 1, r = 1 -> -2; the slope there is that of r.
    """
    ratio_nt = (logp_nt - old_nt).clamp(-20, 20).exp()
    tau_nt = torch.where(adv_nt > 0, tau_pos, tau_neg)
    loss_nt = -adv_nt * torch.sigmoid(tau_nt * (ratio_nt - 1)) * 4 / tau_nt  # eq: grpo.sapo
    return loss_nt, torch.zeros_like(loss_nt), torch.zeros_like(loss_nt)


def other_loss(args, logp_nt, old_nt, adv_nt, mask_nt):
    """What --policy_loss says, where it is not `clip`; arguments and results as those of policy_loss."""
    given, clip = (logp_nt, old_nt, adv_nt), (args.clip_ratio_low, args.clip_ratio_high)
    if args.policy_loss == "gspo":
        return gspo_loss(*given, mask_nt, *clip, args.clip_ratio_c)
    if args.policy_loss == "cispo":
        return cispo_loss(*given, *clip)
    return sapo_loss(*given, args.tau_pos, args.tau_neg)


# endregion
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
# region sequence
class Sliced(TokenLogps):
    """TokenLogps of a packed row of which each rank of a group runs a slice; without a group, of any row."""

    group, predict = None, TokenLogps.forward  # predict: what the model makes of a row, or a slice of it

    def forward(self, where, target, temperature, **inputs):
        """As TokenLogps, on every rank of the whole row; the gradient is that of this rank's slice."""
        if not self.group:
            return self.predict(where, target, temperature, **inputs)
        borders, size = inputs["cu_seq_lens_q"].tolist(), self.group.size()
        width = -(-borders[-1] // size)
        # padding goes behind the last sequence, which does not see it
        short, borders[-1] = width * size - borders[-1], width * size
        # labels were shifted before this cut: a slice's last position predicts the first token of the next
        start = width * self.group.rank()
        mine, here = where // width == self.group.rank(), slice(start, start + width)
        cut = lambda x: nn.functional.pad(x, (0, short))[:, here]
        slices = {name: cut(inputs[name]) for name in ("input_ids", "position_ids")}
        found = self.predict(where[mine] - start, target[mine], temperature, borders=borders, **slices)
        own = torch.stack([x.new_zeros(len(where)).masked_scatter(mine, x) for x in found])
        dist.all_reduce(whole := own.detach().clone(), group=self.group)
        return own + (whole - own.detach())


def share_rows(args, device, kind=None):
    """Let --sp_size neighbouring ranks share the rows of Sliced -> the arguments to load such models by.

    kind: ulysses, or another function of its arguments; None: ulysses if it divides the heads, else gather.
    """
    Sliced.group = None
    if args.sp_size == 1:
        return args
    from transformers import AttentionInterface

    shape = dist.get_world_size() // args.sp_size, args.sp_size
    Sliced.group = dist.init_device_mesh(device.type, shape, mesh_dim_names=("dp", "sp"))["sp"].get_group()
    how = dict(kind=kind, group=Sliced.group, kernel=args.attn_implementation)
    AttentionInterface.register("sliced", partial(slice_attention, **how))
    return replace(args, attn_implementation="sliced")


def special_layers(config):
    """What layers of a model have beside attention to all tokens before, which can be replaced."""
    special = "sliding_window", "attention_chunk_size", "attn_logit_softcapping"
    special = [name for name in special if getattr(config, name, None)] + ["a state"] * recurrent(config)
    model = auto_class(config)._model_mapping.get(type(config), None)
    return special + ["attention of its own"] * (not getattr(model, "_supports_attention_backend", False))


def check_sharing(config, args):
    """ValueError where --sp_size ranks cannot share the rows of a model."""
    if args.sp_size > 1 and (special := special_layers(config)):
        has = f"has {' and '.join(special)}, which --sp_size {args.sp_size} does not implement"
        raise ValueError(f"{config.name_or_path} ({config.model_type}) {has}")


def slice_attention(module, query, key, value, mask, scaling, borders, kind, group, kernel, **_):
    """Attention as transformers calls it: query [1, H, T / sp, D] -> [1, T / sp, H, D], all of one slice.

    borders: 0, and where the sequences of the whole row end; key and value may have fewer heads.
    """
    kind = kind or (gather if query.shape[1] % group.size() else ulysses)
    out = kind(query[0], key[0], value[0], borders, group, scaling=scaling, kernel=kernel)
    return out.transpose(0, 1)[None], None


def ulysses(query, key, value, borders, group, **how):
    """Trade a slice of all heads for the whole row of some heads, attend, and trade back (2309.14509)."""
    size, ops = group.size(), dist._functional_collectives
    repeats = size // math.gcd(size, len(key))  # fewer key/value heads than ranks: each rank needs one
    key, value = (x.repeat_interleave(repeats, 0) for x in (key, value))
    # CAREFUL: gloo writes into freed memory while several of these are on their way: one after the other
    trade = lambda x: ops.wait_tensor(ops.all_to_all_single(x.contiguous(), None, None, group))
    # block i of the heads goes to rank i, whose blocks of tokens then follow each other
    to_heads = lambda x: trade(x.unflatten(0, (size, -1))).transpose(0, 1).flatten(1, 2)
    out = causal_attention(*map(to_heads, (query, key, value)), borders, **how)
    # and back: block i of the tokens goes to rank i, whose blocks of heads then follow each other
    return trade(out.unflatten(1, (size, -1)).transpose(0, 1)).flatten(0, 1)


def gather(query, key, value, borders, group, **how):
    """Keys and values of the whole row on every rank, of which a slice sees those up to its own end."""
    start, ops = group.rank() * (width := query.shape[1]), dist._functional_collectives
    first, end = first_seen(borders, start), start + width
    whole = lambda x: ops.wait_tensor(ops.all_gather_single(x.contiguous(), 1, group))  # as in ulysses
    key, value = (whole(x)[:, first:end] for x in (key, value))
    ends = [0, *(x - start for x in borders if start < x < end), width]
    return causal_attention(query, key, value, ends, start - first, **how)


def first_seen(borders, position):
    """Where the sequence of a position begins."""
    return max(x for x in borders if x <= position)


def causal_attention(query, key, value, ends, before=0, *, scaling, kernel):
    """Causal attention within sequences: query [H, T, D], key and value [KV, before + T, D] -> [H, T, D].

    ends: 0, and where they end in query; before: keys of the first one that are before its first query.
    """
    borders = ends, [0, *(x + before for x in ends[1:])]
    if kernel == "flash_attention_2":
        from flash_attn import flash_attn_varlen_func

        sizes = [torch.tensor(x, dtype=torch.int32, device=query.device) for x in borders]
        sizes += [max(b - a for a, b in pairwise(x)) for x in borders]
        row = (x.transpose(0, 1) for x in (query, key, value))
        return flash_attn_varlen_func(*row, *sizes, softmax_scale=scaling, causal=True).transpose(0, 1)
    shapes = [(1, b - a, d - c) for (a, b), (c, d) in zip(*map(pairwise, borders), strict=True)]
    return attend(*(x.transpose(0, 1) for x in (query, key, value)), shapes, scaling).transpose(0, 1)


def attend(query, key, value, shapes, scaling):
    """Causal attention in the pieces of a row, by SDPA: query [T, H, D], key, value [S, KV, D] -> [T, H, D].

    shapes: (n, t, s), for n pieces of t queries and s keys each; the last query sees the last key.
    """
    from torch.nn.attention.bias import causal_lower_right

    sdpa, out = partial(nn.functional.scaled_dot_product_attention, scale=scaling, enable_gqa=True), []
    wide = [x if x.is_cuda else x.float() for x in (query, key, value)]  # bfloat16: a CPU's backward is slow
    sizes = [n * t for n, t, _ in shapes], *[[n * s for n, _, s in shapes]] * 2
    for (n, t, s), *parts in zip(shapes, *map(torch.split, wide, sizes), strict=True):
        parts = [x.unflatten(0, (n, -1)).transpose(1, 2) for x in parts]  # [n, H, t or s, D]
        out.append(sdpa(*parts, causal_lower_right(t, s)).transpose(1, 2).flatten(0, 1))
    return torch.cat(out).to(query.dtype)


# endregion
# region sampling
KNOWN = "data_source index group sample rank reward finish_reason prompt_length length".split()  # by all


def check_args(args):
    """Stop on combinations that cannot work, before anything is loaded."""
    world, row = int(os.environ.get("WORLD_SIZE", 1)), args.max_prompt_length + args.max_response_length
    flag = lambda name: f"--{name} {getattr(args, name)}"
    if args.train_batch_size % args.ppo_mini_batch_size:
        fail(f"{flag('train_batch_size')} is not a multiple of {flag('ppo_mini_batch_size')}")
    for name in ("tp_size", "hsdp_replicas", "sp_size"):
        if world % getattr(args, name):
            fail(f"{world} ranks are not a multiple of {flag(name)}")
    if args.max_tokens_per_microbatch * args.sp_size < row:
        fail(f"{flag('max_tokens_per_microbatch')} times {flag('sp_size')} is less than a row, {row} tokens")
    if args.attn_implementation == "flash_attention_2" and args.compute_dtype == "float32":
        fail(f"{flag('attn_implementation')} needs --compute_dtype bfloat16")
    if args.merge_lora and not args.lora_rank:
        fail("--merge_lora needs --lora_rank")
    if args.temperature <= 0:
        fail(f"{flag('temperature')}: training needs samples, so it must be above 0")
    if (args.rollout_is or args.rollout_rs) and (args.top_p < 1 or args.top_k > 0):
        why = "log-probs are not of all tokens then, so pass --rollout_is None and no --rollout_rs"
        fail(f"{flag('top_p')} {flag('top_k')}: {why}")
    low, high = args.rollout_rs_threshold_lower, args.rollout_rs_threshold
    if bool(args.rollout_rs) != bool(high) or (low or 0) < 0 or (low or 0) > (high or 0):
        flags = f"{flag('rollout_rs')} {flag('rollout_rs_threshold')} {flag('rollout_rs_threshold_lower')}"
        fail(f"{flags}: a level and bounds of its ratio, 0 <= lower <= upper, belong together")
    if args.rollout_is_threshold <= 0:
        fail(f"{flag('rollout_is_threshold')} leaves no weight above 0")


def load_data(args, tools=None, images=False):
    """-> tokenizer, reward managers of training and of validation, rows of both, and a line about them."""
    limits = args.max_prompt_length, args.filter_overlong_prompts, tools
    pool = dict(timeout_s=args.reward_timeout_s, workers=args.reward_workers)
    shown = 0 if int(os.environ.get("RANK", 0)) else args.num_examine
    try:
        check_tracker(args)
        config = AutoConfig.from_pretrained(args.model)
        if takes_images(config) and not images:
            raise ValueError(f"{args.model}: {config.model_type} models take more than text: not supported")
        if takes_images(config) and (args.sp_size > 1 or args.lora_rank):
            raise ValueError(f"{args.model} takes images: no --sp_size or --lora_rank")
        check_sharing(config, args)
        if args.attn_implementation == "sdpa" and getattr(config, "attn_logit_softcapping", None):
            raise ValueError(f"{config.model_type} caps attention, sdpa cannot: --attn_implementation eager")
        with torch.device("meta"):  # what these two refuse, before anything is loaded
            lm = auto_class(config).from_config(config, attn_implementation=args.attn_implementation)
            check_adapters(TokenLogps(lm).lm, args)
        tokenizer = load_processor(args.model, args.tokenizer)
        reward_fn = load_rewards(args.reward_fn, args.reward_weights, args.reward_aggregation)
        managers = [RewardManager(args.reward_manager, reward_fn, n, **pool) for n in (0, shown)]
        train_rows, train_dropped = load_prompts(args.train_files, tokenizer, *limits)
        val_rows, val_dropped = load_prompts(args.val_files, tokenizer, *limits)
        if "rewards" in args.reward_fn:
            check_sources(train_rows.unique("data_source") | val_rows.unique("data_source"))
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{args.tokenizer or args.model}: the tokenizer has no EOS token")
    except (ValueError, OSError, ImportError) as error:
        fail(" ".join(str(error).split()))
    if len(train_rows) < args.train_batch_size:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} prompts")
    dropped = f"{train_dropped + val_dropped} dropped: over {args.max_prompt_length} tokens"
    about = f"{len(train_rows)} training and {len(val_rows)} validation prompts ({dropped})"
    return tokenizer, *managers, train_rows, val_rows, about


def build_engine(args, device):
    """A vLLM engine in this process, asleep. It starts with random weights: only a sync makes it useful."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", str(int(device.type == "cpu")))  # it needs a C++ compiler
    warnings.filterwarnings("ignore", category=FutureWarning)
    import vllm
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Executor

    # CPU: vLLM names shared memory by what follows the last colon, "env://" in all runs of a machine
    arguments, run = Executor._distributed_args, f"{os.getppid()}-{os.environ['MASTER_PORT']}"
    Executor._distributed_args = lambda self: (f"env://:{run}", *arguments(self)[1:])
    cuda, set_num_threads = device.type == "cuda", torch.set_num_threads
    config, model = AutoConfig.from_pretrained(args.model), dict(model=args.model, load_format="dummy")
    model |= dict(dtype=args.compute_dtype, skip_tokenizer_init=not takes_images(config))
    # CAREFUL: pixels are normalised by the processor: the buffers that do it in the model are in no sync
    model |= dict(tokenizer=args.tokenizer, mm_device_do_normalize=False, mm_hasher_algorithm="sha256")
    group = dict(tensor_parallel_size=args.tp_size, distributed_executor_backend="external_launcher")
    # CPU: sleep does nothing; seeds fail where a prompt is cut over steps, and states are cached at such cuts
    paths = dict(enable_sleep_mode=cuda, enforce_eager=not cuda, enable_chunked_prefill=cuda)
    paths |= dict(block_size=None if cuda else 32)  # of the prefix cache; 128 is longer than many prompts
    paths |= dict(enable_prefix_caching=cuda or not recurrent(config))
    sizes = dict(gpu_memory_utilization=args.gpu_memory_utilization)  # CPU: a fixed size, else a share of all
    sizes |= dict(kv_cache_memory_bytes=None if cuda else 1 << 30)
    sizes |= dict(max_model_len=args.max_prompt_length + args.max_response_length)
    # log-probs of the distribution sampled from; the model's EOS tokens, but not its temperature
    sampling = dict(logprobs_mode="processed_logprobs", generation_config="vllm", seed=args.seed)
    # CAREFUL: on a CPU vLLM packs the weights and drops what a sync writes to; sync_weights packs
    plain = lambda layer, **_: setattr(layer, "cpu_linear", nn.functional.linear)
    with mock.patch("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", plain):
        engine = vllm.LLM(**model, **group, **paths, **sizes, **sampling)
    dist.barrier()  # all have opened each other's shared memory: no name of it stays behind, even by a kill
    for name in Path("/dev/shm").glob(f"{run}-*"):
        name.unlink(missing_ok=True)
    torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it
    torch.manual_seed(args.seed)  # vLLM overwrites the global generator
    engine.sleep(level=2)
    return engine


def rollout(engine, args, timing, prompts, step, group_size, **sampling):
    """Let the sampler answer the prompts of all ranks -> this rank's rows, ids and log-probs as arrays.

    The ranks of a tensor-parallel group answer the union of their prompts and keep their own.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rank, world, core = dist.get_rank(), dist.get_world_size(), engine.llm_engine
    own = prompts[rank // args.tp_size :: world // args.tp_size]
    rows = [dict(row, sample=g, rank=rank) for row in own for g in range(group_size)]
    limits = dict(max_tokens=args.max_response_length, detokenize=False, logprobs=0, flat_logprobs=True)
    limits |= dict(output_kind=RequestOutputKind.FINAL_ONLY) | sampling
    limits |= dict(logit_bias=dict.fromkeys(never_sampled(core.model_config.hf_config), -100.0) or None)
    with timed(timing, "gen"):
        waiting, most = [*enumerate(rows)][::-1], core.vllm_config.scheduler_config.max_num_seqs
        while waiting or core.has_unfinished_requests():
            while waiting and core.get_num_unfinished_requests() < most:  # others have no pictures in memory
                i, row = waiting.pop()
                entropy = args.seed, step, row["index"], row["sample"]
                [seed] = np.random.SeedSequence(entropy).generate_state(1)
                core.add_request(str(i), request(row), SamplingParams(seed=int(seed), **limits))
            for done in core.step():  # at once, so that there are lists only of what is being sampled
                row, [o] = rows[int(done.request_id)], done.outputs
                if done.prompt_token_ids != row["prompt_ids"]:
                    raise ValueError(f"{args.model}: vLLM makes other tokens of an image than its processor")
                logps = np.fromiter(o.logprobs.logprobs, np.float32)
                row |= dict(response_ids=np.fromiter(o.token_ids, np.int32), rollout_logps=logps)
                row |= dict(length=len(logps), prompt_length=len(row["prompt_ids"]))
                row["finish_reason"] = o.finish_reason
    return rows[rank % args.tp_size :: args.tp_size]


@contextmanager
def awake(engine, models, optimizer, args, timing, sample=None, **sampling):
    """The sampler, awake and with the trainer's weights: `sample`, or `rollout`, while the block lasts."""
    with timed(timing, "sync"):
        engine.wake_up(tags=["weights"])
        sync_weights(engine, models[0].lm)
        if args.offload:
            move("cpu", models, optimizer)
        engine.wake_up(tags=["kv_cache"])
    yield partial(sample or rollout, engine, args, timing, **sampling)
    with timed(timing, "sync"):
        engine.sleep(level=2)
        if args.offload:
            move("cuda", models, optimizer)


@contextmanager
def without_adapters(lm):
    """The model as it was before training, while the block lasts; without adapters it stays as it is."""
    lm.apply(lambda m: hasattr(m, "lora_A") and m.enable_adapters(False))
    yield
    lm.apply(lambda m: hasattr(m, "lora_A") and m.enable_adapters(True))


def sync_weights(engine, lm):
    """Stream the sharded model into the sampler; tied weights go once."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dtype = engine.llm_engine.model_config.dtype

    def stream():  # full_tensor is a collective: every rank iterates in the same order
        for name, x in lm.state_dict().items():  # persistent buffers too
            layer, base, end = name.partition(".base_layer.")  # a layer with adapters: W + (alpha / r) B A
            if base and end == "weight":
                lora = lm.get_submodule(layer)
                a, b = (getattr(lora, part)["default"].weight.data for part in ("lora_A", "lora_B"))
                x = x.full_tensor().float().addmm(b, a, alpha=lora.scaling["default"])  # eq: lora.weights
            if name not in lm.tied and ".lora_" not in name:
                # a shard is cast before it travels; in a forward FSDP casts parameters, but no buffers
                x = x.to(dtype).full_tensor() if isinstance(x, DTensor) else x
                yield from revert_weight_conversion(lm, {name.replace(".base_layer", ""): x}).items()

    def load(model):
        model.load_weights(stream())
        for layer in model.modules():  # on a CPU only: packed copies, twice as fast in sampling
            if hasattr(layer, "cpu_linear") and layer.weight.dim() == 2:  # a convolution is packed in place
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
            elif hasattr(layer, "w13_weight") and layer.w13_weight.device.type == "cpu":
                layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    engine.apply_model(load)
    engine.reset_prefix_cache()
    engine.llm_engine.reset_encoder_cache()  # what the vision tower has made of images


def move(device, models, optimizer):
    """Move shards and optimizer state between GPU and pinned host memory; only empty_cache waits for it."""
    for model in models:
        model.to(device, non_blocking=True)
    for state in optimizer.state.values():
        state |= {k: x.to(device, non_blocking=True) for k, x in state.items() if x.dim()}
    torch.cuda.empty_cache()


def check_engines(sampler, policy, rows, args):
    """Before the first step: sampler and trainer, in the layout that trains, agree on short responses."""
    rows = [dict(rows[i % len(rows)]) for i in range(2 * dist.get_world_size())]
    rows = [row if "images" in row else row | dict(prompt_ids=row["prompt_ids"][-32:]) for row in rows]
    with sampler({}) as sample:
        rows = sample(rows, 0, 2, temperature=args.temperature, max_tokens=8)
    group = lambda rank: rank // args.sp_size  # of ranks that run the same rows
    same = [group(rank) == group(dist.get_rank()) for rank in range(dist.get_world_size())]
    rows = [*chain(*exchange([rows if to else [] for to in same]))]
    texts = [(row["prompt_ids"], row["response_ids"], row.get("images", ())) for row in rows]
    with torch.no_grad():
        logp_nt, _ = rows_logps(policy, texts, args)
    theirs = [torch.tensor(row["rollout_logps"]).to(logp_nt) for row in rows]
    check_sampler(logp_nt, dict(rollout_logp_nt=theirs, new=range(len(rows))), args, 0)


def check_sampler(logps, batch, args, step):
    """Sampler against trainer, on what this step sampled -> metrics; stop if more than rounding differs."""
    theirs = [batch["rollout_logp_nt"][i] for i in batch["new"]]
    ours = [logps[i][: len(x)] for i, x in zip(batch["new"], theirs)]
    ours, theirs = (torch.cat(x or [torch.zeros(0)]) for x in (ours, theirs))
    gap = (ours - theirs).abs_().sum()
    diff = ours.exp_().sub_(theirs.exp_()).abs_()  # in place: of millions of tokens
    gap, mean, tokens = all_reduce([gap, diff.sum(), len(diff)])
    gap, mean, limit = gap / max(tokens, 1), mean / max(tokens, 1), ROUNDING[args.compute_dtype]
    [largest] = all_reduce([diff.max().item() if len(diff) else 0.0], dist.ReduceOp.MAX)
    another = step and (args.top_p < 1 or args.top_k > 0)  # then it is another distribution on purpose
    if not gap < (math.inf if another else limit):  # so that NaN always fails
        why = "the sampler does not hold the trainer's weights, or computes otherwise"
        far = f"{tokens:.0f} log-probs differ by {gap:.3g} > {limit}"
        fail(f"weight sync failed at step {step}: {why}; {far}")
    probs = {"training/rollout_probs_diff_mean": mean, "training/rollout_probs_diff_max": largest}
    return probs | {"training/rollout_logp_diff_mean": gap}


def rollout_weights(args, old_nt, rollout_logp_nt, mask_nt):
    """Factors of the token losses, as the sampler is not quite the policy; no gradient goes through them.

    --rollout_is: p_old / p_sampler, at most rollout_is_threshold; --rollout_rs: 0 where it is out of bounds.
    Ratios 1 and 3 of a response, limit 2: token 1 2, sequence 2 2; with rejection token 1 0, sequence 0 0.
    """
    d_nt = (old_nt - rollout_logp_nt).where(mask_nt.bool(), 0.0)
    d_n1, length_n1 = d_nt.sum(-1, keepdim=True), mask_nt.sum(-1, keepdim=True).clamp(min=1)
    logs = dict(token=d_nt, sequence=d_n1, geometric=d_n1 / length_n1)
    ratios = {level: x.clamp(-20, 20).exp() for level, x in logs.items()}
    weight_nt = torch.ones_like(d_nt)
    if args.rollout_is:
        weight_nt = weight_nt * ratios[args.rollout_is].clamp(max=args.rollout_is_threshold)  # eq: grpo.tis
    if args.rollout_rs:
        ratio_nt, high = ratios[args.rollout_rs], args.rollout_rs_threshold
        low = 1 / high if args.rollout_rs_threshold_lower is None else args.rollout_rs_threshold_lower
        weight_nt = weight_nt * ((low <= ratio_nt) & (ratio_nt <= high))  # eq: grpo.rejection
    return weight_nt


def weight_metrics(logps, batch, args):
    """What rollout_weights makes of the tokens of a step, of all ranks; logps: by row, of before the step."""
    rows, sums, largest = range(len(batch["rows"])), torch.zeros(4, dtype=torch.float64), 0.0
    if not args.rollout_is and not args.rollout_rs:
        return {}
    for start in rows[::64]:  # no more than these are padded at a time
        part = columns(batch | dict(old_logp_nt=logps), rows[start : start + 64], "cpu")
        weight_nt = rollout_weights(args, part["old_logp_nt"], part["rollout_logp_nt"], part["mask_nt"])
        w = weight_nt[part["mask_nt"]].double()
        sums += torch.stack([torch.ones_like(w).sum(), w.sum(), (w**2).sum(), (w == 0).sum()])
        largest = max(largest, w.max().item())
    tokens, total, squares, rejected = all_reduce(sums.tolist())
    [largest] = all_reduce([largest], dist.ReduceOp.MAX)
    return {
        "rollout_corr/rollout_is_mean": total / tokens,
        "rollout_corr/rollout_is_max": largest,
        "rollout_corr/rollout_is_eff_sample_size": total**2 / max(tokens * squares, 1e-30),
        "rollout_corr/rollout_rs_masked_fraction": rejected / tokens,
    }


def score_rows(rows, manager, tokenizer, known=KNOWN):
    """Score this rank's rows -> all ranks' by prompt and sample, others' as `known`; tokens by rank."""
    by_rank, rows = [None] * dist.get_world_size(), manager.score_responses(rows, tokenizer)
    dist.all_gather_object(by_rank, [{name: row[name] for name in known} for row in rows])
    by_rank[dist.get_rank()] = rows
    tokens = [sum(row["prompt_length"] + row["length"] for row in part) for part in by_rank]
    return demote_failures(sorted(chain(*by_rank), key=itemgetter("group", "sample"))), tokens


def gather_rows(rows):
    """The rows with ids and texts on rank 0, for a file; on the others none."""
    rank, by_rank = dist.get_rank(), [None] * dist.get_world_size()
    dist.gather_object([row for row in rows if row["rank"] == rank], None if rank else by_rank)
    return [] if rank else sorted(chain(*by_rank), key=itemgetter("group", "sample"))


def exchange(parts):
    """Give parts[r] to rank r -> what each rank gave to this one."""
    stream = io.BytesIO()
    ends = [pickle.dump(part, stream) or stream.tell() for part in parts]
    sent = torch.tensor([0, *ends]).diff()
    dist.all_to_all_single(got := torch.empty_like(sent), sent)
    new, sizes = torch.empty(got.sum(), dtype=torch.uint8), (got.tolist(), sent.tolist())
    dist.all_to_all_single(new, torch.frombuffer(stream.getbuffer(), dtype=torch.uint8), *sizes)
    return [pickle.loads(part.numpy()) for part in new.split(sizes[0])]


def share_prefixes(args, *models):
    """Let responses share their prompt, with SDPA, if args.model and these models can -> such arguments."""
    from transformers import AttentionInterface

    configs = [AutoConfig.from_pretrained(name) for name in (args.model, *models)]
    if args.attn_implementation != "sdpa" or any(takes_images(x) or special_layers(x) for x in configs):
        return args
    AttentionInterface.register("shared", shared_attention)
    return replace(args, attn_implementation="shared")


def shared(prompts, responses):
    """One row, in which neighbours with one prompt share it, and pieces of one shape stand together.

    Prompt a b, responses c d and e -> a b, e, c d at positions 0 1, 2, 2 3; e sees a, b and itself.
    """
    pieces = []  # tokens, how many they see before them, and the number of the piece that these are
    for prompt, same in groupby(zip(prompts, responses, strict=True), lambda pair: [*pair[0]]):
        root = len(pieces)
        pieces += [(prompt, 0, root), *((response, len(prompt), root) for _, response in same)]
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i][1], len(pieces[i][0])))
    lengths, before = [len(pieces[i][0]) for i in order], [pieces[i][1] for i in order]
    spans = dict(zip(order, torch.arange(sum(lengths)).split(lengths)))
    seen = torch.cat([join(spans[pieces[i][2]][:n], spans[i]) for i, n in zip(order, before)])
    shapes = [(len([*same]), t, n + t) for (n, t), same in groupby(zip(before, lengths))]
    # the prompt's last token predicts the first token of every response
    where = [join(spans[root][-1:], spans[i][:-1]) for i, (_, n, root) in enumerate(pieces) if n]
    position_ids = torch.cat([torch.arange(n, n + t) for n, t in zip(before, lengths)])[None]
    inputs = dict(input_ids=join(*(pieces[i][0] for i in order))[None], position_ids=position_ids)
    return inputs | dict(seen=seen, shapes=shapes), where


def shared_attention(module, query, key, value, mask, scaling, seen, shapes, **_):
    """Attention as transformers calls it, of a row as `shared` makes it: query [1, H, T, D] -> [1, T, H, D].

    seen: the positions that each piece sees, one piece behind the other; shapes: as in `attend`.
    """
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(query, key[seen], value[seen], shapes, scaling)[None], None


def layout_of(config, args):
    """The layout that this run trains in."""
    if recurrent(config) or takes_images(config):  # one sequence a row
        return padded
    return dict(shared=shared, sliced=packed, flash_attention_2=packed).get(args.attn_implementation, padded)


def balance_batch(rows, args, device):
    """Deal the N rows of a step to the ranks, or groups of --sp_size, each optimizer step's evenly by tokens.

    Returns the batch of this rank - rows: their numbers in the order of their use; prompts, responses,
    rollout_logp_nt, images: of each; new: which this step sampled; mini_batches: for each optimizer step
    (tokens, which) of every sequence; totals: its (tokens, responses) on all ranks - and all groups' tokens.
    """
    rank, world, size = dist.get_rank(), dist.get_world_size(), args.ppo_mini_batch_size * args.group_size
    group, load = rank // args.sp_size, [[] for _ in range(world // args.sp_size)]
    # a sequence is a response, or the responses to a prompt that share it and fit in a micro-batch
    fit = (args.max_tokens_per_microbatch - args.max_prompt_length) // args.max_response_length
    fit, mini_batches, totals, owners = max(1, fit) if args.attn_implementation == "shared" else 1, [], [], {}
    for start in range(0, len(rows), size):
        numbers = range(start, min(start + size, len(rows)))
        totals.append((sum(rows[i]["length"] for i in numbers), len(numbers)))
        groups = [[*same] for _, same in groupby(numbers, lambda i: rows[i]["group"])]
        sequences = [group[i : i + fit] for group in groups for i in range(0, len(group), fit)]
        tokens = [rows[part[0]]["prompt_length"] + sum(rows[i]["length"] for i in part) for part in sequences]
        parts = balance(tokens, len(load))
        load = [before + [tokens[i] for i in part] for before, part in zip(load, parts, strict=True)]
        owners |= {i: owner for owner, part in enumerate(parts) for s in part for i in sequences[s]}
        mini_batches.append([(tokens[i], sequences[i]) for i in parts[group]])
    mine, number = [i for mini in mini_batches for _, sequence in mini for i in sequence], count()
    # ids and log-probs go from the rank that sampled them to those that train on them
    names, parts = ("prompt_ids", "response_ids", "rollout_logps"), [{} for _ in range(world)]
    for i, row in enumerate(rows):
        if row["rank"] == rank:
            for part in parts[owners[i] * args.sp_size :][: args.sp_size]:
                part[i] = [*(row[name] for name in names), row.get("images", ())]
    got, parts[rank] = parts[rank], {}  # what stays is not copied
    got |= {i: texts for part in exchange(parts) for i, texts in part.items()}
    prompts, responses, logps, images = ([got[i][k] for i in mine] for k in range(4))
    batch = dict(rows=mine, prompts=prompts, responses=responses, images=images, totals=totals)
    batch["rollout_logp_nt"] = [torch.as_tensor(logp, device=device) for logp in logps]
    batch["new"] = [place for place, i in enumerate(mine) if not rows[i].get("carried_over")]
    batch["mini_batches"] = [[(n, [next(number) for _ in part]) for n, part in mini] for mini in mini_batches]
    return batch, load


def columns(batch, rows, device):
    """What the batch has of these rows for each token, [n, T], or once for all, [n, 1]; and mask_nt."""
    lengths = [len(batch["responses"][i]) for i in rows]
    part = {name: column for name, column in batch.items() if name.endswith("_nt")}
    part = {name: pad([x[i][:n] for i, n in zip(rows, lengths)]).to(device) for name, x in part.items()}
    return dict(mask_nt=response_mask(lengths).to(device)) | part  # the batch's own mask, if it has one


def rows_logps(policy, rows, args):
    """token_logps of rows: prompt, response and images of each; if there is none, a dummy runs instead."""
    layout, n = layout_of(policy.lm.config, args), len(rows)
    if takes_images(policy.lm.config):
        layout, rows = show_images(layout, rows, load_processor(args.model, args.tokenizer))
    prompts, responses, _ = zip(*rows or [([0], [0], ())])
    return [x_nt[:n] for x_nt in token_logps(policy, prompts, responses, args.temperature, layout)]


def micro_batches(policy, batch, sequences, args):
    """Run sequences a micro-batch at a time -> its rows, logp_nt, entropy_nt."""
    budget, layout = args.max_tokens_per_microbatch * args.sp_size, layout_of(policy.lm.config, args)
    parts = split_micro_batches([n for n, _ in sequences], budget, layout is not padded)
    for number, part in enumerate(parts, 1):
        policy.set_requires_all_reduce(number == len(parts))  # over the replicas of HSDP
        part = [i for s in part for i in sequences[s][1]]
        rows = [[batch[name][i] for name in ("prompts", "responses", "images")] for i in part]
        yield part, *rows_logps(policy, rows, args)


@torch.no_grad()
def all_logps(policy, batch, args):
    """Log-probs of this rank's responses by row, padded as in their micro-batch; of a critic, values."""
    parts = micro_batches(policy, batch, [*chain(*batch["mini_batches"])], args)
    return {i: logps for rows, logp_nt, _ in parts for i, logps in zip(rows, logp_nt)}


# endregion


if __name__ == "__main__":
    main(Args(**flags))
