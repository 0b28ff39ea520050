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
import ctypes
import faulthandler
import gc
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import parse

# Shapes: B prompts, G responses each, N = B * G, P prompt tokens, T response tokens, V vocabulary. A suffix
# names the axes (logp_nt). T is aligned with the response: column t belongs to response token t.
# A row is a dict of one response: its prompt, ids and reward. What is per token ends in _t (adv_t); a padded
# batch of rows has it as _nt.


@dataclass(kw_only=True)
class Args:
    # ---- run
    output_dir: str  # directory of the run: arguments, metrics, log, rollouts, checkpoints
    resume: str = "auto"  # auto: output_dir's latest checkpoint; never; or path of another run's
    seed: int = 1  # seed for data order, LoRA init and sampling
    total_epochs: int = 1  # passes over the training data
    total_steps: int | None = None  # number of RL steps; None: as many as total_epochs takes
    save_freq: int = 50  # steps between checkpoints; 0: only at the end
    test_freq: int = 10  # steps between validations; 0: only before and after training
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    rollout_dump: bool = False  # write every training response to output_dir/rollouts
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # tracker that also gets the metrics
    # ---- data
    train_files: tuple[str, ...]  # parquet files of training prompts
    val_files: tuple[str, ...] = ()  # parquet files of validation prompts; none: no validation
    max_prompt_length: int = 512  # tokens of a prompt; longer prompts are dropped and counted
    # ---- model
    model: str  # Hugging Face directory or hub name of the model to train
    tokenizer: str | None = None  # Hugging Face directory or hub name; None: the model's
    attn_implementation: str = "sdpa"  # attention; sdpa: torch's own, on GPUs flash attention
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of weights and optimizer state
    # dtype of forward, backward and sampler; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    sp_size: int = 1  # ranks that share the tokens of a row, for long rows; it divides the attention heads
    gradient_checkpointing: bool = True  # recompute activations: slower, with less memory
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    offload: bool = False  # keep parameters and optimizer state in host memory during sampling (GPU)
    lora_rank: int = 0  # rank of LoRA adapters, trained in place of the model; 0: train the model
    lora_alpha: float = 16  # LoRA scale: the output of the adapters times lora_alpha / lora_rank
    # layers that get adapters; all-linear: all linear layers except experts, routers and output layer
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    # ---- rollout
    group_size: int = 8  # responses to each prompt
    max_response_length: int = 1024  # limit of the response in tokens
    temperature: float = 1.0  # temperature of sampling, and of the trainer's log-probs
    top_p: float = 1.0  # nucleus sampling; below 1 it needs --rollout_is None and no --rollout_rs
    tp_size: int = 1  # ranks that share one sampler by tensor parallelism
    gpu_memory_utilization: float = 0.5  # share of the GPU's memory for the awake sampler
    val_group_size: int = 1  # responses to each validation prompt
    val_temperature: float = 0.0  # temperature of sampling in validation
    # ---- optimizer
    train_batch_size: int = 64  # prompts of a step, over all ranks
    ppo_mini_batch_size: int = 64  # prompts of an optimizer step, over all ranks
    ppo_epochs: int = 1  # passes over the responses of a step
    lr: float = 1e-6  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # decay to 0 after the last step
    warmup_steps: int = 0  # steps of linear warm-up
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    max_gen_batches: int = 10  # most generation batches of a step; the run stops if they give too few groups
    max_staleness: int = 4  # age in steps above which surplus and unfinished groups are dropped; 0: paper
    partial_rollout: bool = False  # stop sampling at enough groups; the others continue in the next step
    # tokens below max_response_length with a penalty from 0 to 1; None: a fifth of that length; 0: off
    overlong_buffer: int | None = None
    overlong_filtering: bool = False  # mask truncated responses out of the loss
    policy_loss: Literal["clip", "gspo", "cispo", "sapo", "dppo"] = "clip"  # loss of the policy gradient
    clip_ratio_low: float | None = None  # clip below 1 - this; None: 0.2, gspo 3e-4, cispo 1, dppo 0.15
    clip_ratio_high: float | None = None  # clip above 1 + this; None: 0.28, gspo 4e-4, cispo 4, dppo 0.15
    clip_ratio_c: float = 3.0  # dual clip: bound of the ratio where the advantage is negative
    # average of token losses; None: token-mean, with gspo and sapo seq-mean-token-mean; ...-norm: Dr. GRPO
    loss_agg: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    rollout_is: Literal["token", "sequence"] | None = "token"  # importance weights of trainer over sampler
    rollout_is_threshold: float = 2.0  # upper bound of the importance weights
    # reject by this importance ratio; off_policy: negative responses that the policy has left
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None
    # one value h keeps ratios from 1/h to h; two are smallest and largest; off_policy: the paper's delta
    rollout_rs_threshold: tuple[float, ...] = ()
    # ---- rewards
    reward_manager: Literal["naive", "prime"] = "naive"  # naive: in this process; prime: in processes
    reward_fn: tuple[str, ...] = ("rewards",)  # FILE.py:NAME; rewards: the scorer of each row's data_source
    reward_weights: tuple[float, ...] = ()  # weight of each reward_fn; none: all 1
    reward_timeout_s: float = 30.0  # seconds that the prime manager gives each response

    def __post_init__(self):
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from common.metrics import stats, step_metrics, timed
from common.run import Logger, digests, fail, in_one_line, leave, open_run, ranks_on, refuse
from data_prep.lib.cache import load_prompts
from data_prep.lib.images import auto_class, load_processor, never_sampled, request, show_images, takes_images
from data_prep.lib.towers import copy_processor, decoder, freeze_towers, from_files, hf_overrides, vllm_names
from rewards import check_sources
from rewards.manager import RewardManager, demote_failures, dump_rollouts, validation_metrics
from rewards.manager.combined import load_rewards


# ---- The mathematics -------------------------------------------------------------------
def group_advantages(score_n, group_n, norm_by_std=True):
    """A = (s - mean_g) / (std_g + 1e-6), unbiased std (2402.03300, 4.1.2); else Dr. GRPO (2503.20783).

    score_n, group_n: [N] scores and group numbers, in any order. Scores 1 0 0 1 -> 0.87 -0.87 -0.87 0.87.
    A group of one has mean 0 and std 1; the advantages of a constant group are 0.
    """
    adv_n = score_n.clone()
    for member in [group_n == g for g in group_n.unique()]:
        if member.sum() > 1:
            s = score_n[member] - score_n[member][0]  # so that a constant group has exactly 0
            adv_n[member] = (s - s.mean()) / (s.std() + 1e-6 if norm_by_std else 1.0)  # eq: grpo.advantage
    return adv_n


def keep_groups(acc_n, group_n):
    """Whether the group of each response has correct and wrong responses (eq. 11) -> keep_n, bool.

    Accuracies 1 0 1 1 of groups 7 7 8 8 -> True True False False.
    """
    keep_n = torch.zeros(len(acc_n), dtype=torch.bool)
    for member in [group_n == g for g in group_n.unique()]:
        keep_n[member] = acc_n[member].max() > acc_n[member].min()  # eq: dapo.dynamic_sampling
    return keep_n


def overlong_penalty(length_n, max_length, buffer):
    """0 up to max_length - buffer, then linear to -1 at max_length (eq. 13). No buffer: 0.

    Lengths 6 7 8 9 10, max_length 10, buffer 4 -> 0 -0.25 -0.5 -0.75 -1.
    """
    return ((max_length - buffer - length_n) / max(buffer, 1)).clamp(-1, 0)  # eq: dapo.overlong


def policy_loss(logp_nt, old_logp_nt, adv_nt, clip_low, clip_high, clip_c):
    """-min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at most -c A (dual clip).

    Returns loss_nt, and where the clip and where the dual clip decided (bool).
    A = 1, r = 1.5, high = 0.2 -> -1.2, clipped; A = -1, r = 5, c = 3 -> 3, clipped below.
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

    totals: (tokens, responses) of the whole step, if mask_nt is one micro-batch of it. Empty responses do not
    count. Lengths 1 and 3, token-mean: weights 1/4; seq-mean-token-mean: 1/2 and 1/6.
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


def actor_loss(args, logp_nt, entropy_nt, batch):
    """The whole loss of each token -> loss_nt, and the terms whose means are metrics.

    Without old_logp_nt, which a single optimizer step does not need, the policy is its own old policy.
    """
    mask_nt, old_nt = batch["mask_nt"], batch.get("old_logp_nt", logp_nt.detach())
    token_loss = POLICY_LOSSES[args.policy_loss]
    pg_nt, clipped_nt, lower_nt = token_loss(args, logp_nt, old_nt, batch["adv_nt"], mask_nt)
    weight_nt = rollout_weights(args, logp_nt, old_nt, batch["rollout_logp_nt"], mask_nt, batch["adv_nt"])
    pg_nt = pg_nt * weight_nt
    terms = dict(pg_loss=pg_nt, entropy=entropy_nt, ppo_kl=old_nt - logp_nt)
    terms |= dict(pg_clipfrac=clipped_nt, pg_clipfrac_lower=lower_nt)
    return pg_nt, terms | dict(rollout_rs_masked=weight_nt == 0)


# ---- The step --------------------------------------------------------------------------
def draw(train_rows, seed, start, count):
    """`count` prompts from number `start` on, over all epochs; their order is a function of (seed, epoch)."""
    epochs = range(start // len(train_rows), (start + count) // len(train_rows) + 1)
    orders = [np.random.default_rng((seed, epoch)).permutation(len(train_rows)) for epoch in epochs]
    chosen = np.concatenate(orders)[start % len(train_rows) :][:count]
    # CAREFUL: the seed of a response depends on `index`, because a prompt may come twice in a step
    return [dict(train_rows[i], index=k, group=k) for k, i in enumerate(chosen, start)]


def update_actor(policy, optimizer, mini_batches, args):
    """One optimizer step for each mini-batch -> metrics, averaged over the steps; see `deal`."""
    sums, norms = 0.0, []
    for sequences, totals in mini_batches * args.ppo_epochs:
        for rows, logp_nt, entropy_nt in micro_batches(policy, sequences, args):
            batch = collate(rows, logp_nt.device)
            loss_nt, terms = actor_loss(args, logp_nt, entropy_nt, batch)
            # totals count all ranks and micro-batches, so no split of the work changes the gradient
            weight_nt = loss_weights(batch["mask_nt"], args.loss_agg, args.max_response_length, totals)
            # FSDP averages gradients over the ranks, but the totals already count all ranks
            loss = (weight_nt * loss_nt).sum() * dist.get_world_size()
            loss.backward()
            mean_nt = loss_weights(batch["mask_nt"], "token-mean", None, totals)
            weights = [weight_nt if "loss" in name else mean_nt for name in terms]
            sums += torch.stack([(w * x.detach()).sum() for w, x in zip(weights, terms.values())])
            for row, logp_t in zip(rows, logp_nt.detach()):
                row.setdefault("old_logp_t", logp_t[: row["length"]])
        norm = nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).full_tensor().item()
        norms.append(norm)
        if math.isfinite(norm):  # the norm over all ranks: they step or skip together
            optimizer.step()
        optimizer.zero_grad()
    # with --sp_size several ranks have counted each row
    means = [total / len(norms) / policy.sp_size for total in all_reduce(sums.tolist())]
    metrics = {f"actor/{name}": mean for name, mean in zip(terms, means)}
    return metrics | {
        "actor/grad_norm": np.mean(norms),
        "actor/skipped_updates": np.sum(~np.isfinite(norms)),
    }


def main(args):
    # ---- arguments and data: checked before anything slow
    args = with_defaults(args, clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg="token-mean")
    check_args(args, args.sp_size)
    check_dapo_args(args)
    resume_from = open_run(args)
    tokenizer, manager, val_manager, train_rows, val_rows, summary = load_data(args)
    check_layout(args)
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch
    max_prompts = math.inf if args.total_steps else args.total_epochs * len(train_rows)
    buffer = args.max_response_length // 5 if args.overlong_buffer is None else args.overlong_buffer

    # ---- models: the engine first, while the GPU is empty; then it sleeps
    device, mesh = setup_distributed(args.hsdp_replicas)
    engine = build_engine(args, device)
    wrap = TokenLogps
    if args.sp_size > 1:
        wrap = partial(Slices, group=sequence_group(args.sp_size, device), attention=ulysses)
    policy = load_model(args, mesh, device, wrap)
    trained = dict(hf=policy.lm)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay, fused=True)
    # prompts drawn so far, groups sampled and kept lately, and rows left over for the next step
    state = dict(drawn=0, sampled=0, kept=0, surplus=[], unfinished=[])
    state |= load_checkpoint(resume_from, trained, optimizer)
    done, origin = state.pop("step"), state.pop("origin")
    state |= {name: [from_json(row) for row in state[name]] for name in LEFT_OVER}
    if state["drawn"] >= max_prompts:  # resumed at the end of the data
        total_steps = done
    log = Logger(args, done, total_steps)
    log.say(f"{summary}\nat most {total_steps} steps, {ranks_on(device, policy.lm)}{origin}")
    if args.max_staleness and not args.rollout_is:
        log.say("warning: with --rollout_is None tokens of older weights are not corrected (--max_staleness)")
    sampler = partial(awake, engine, [policy], optimizer, args, stop_token_ids=[tokenizer.eos_token_id])
    stop = []  # SIGTERM makes the step in progress the last
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))

    def validate():
        with sampler({}) as sample:
            rows = sample(val_rows, 0, args.val_group_size, temperature=args.val_temperature)
        metrics = validation_metrics(score_rows(rows, val_manager, tokenizer))
        log.say("\n".join(f"{name} {value:.3f}" for name, value in metrics.items() if "/mean@" in name))
        return metrics

    if val_rows and not done:
        log.log(validate() | {"training/global_step": 0}, 0)

    saving = {}  # seconds of the last checkpoint, reported by the step after it
    for step in range(done + 1, total_steps + 1):
        timing, saving, begin = saving, {}, time.perf_counter()
        faulthandler.dump_traceback_later(0.9 * TIMEOUT_S + dist.get_node_local_rank() / 4)  # stacks, in turn
        # ---- rollout and reward, until there are enough groups; all ranks know all rows
        rows, sampled, gen_batches = state["surplus"], [], 0
        unfinished, places = state["unfinished"], np.zeros(2)  # of the sampler: in use, and in all
        wanted = args.train_batch_size * args.group_size
        with sampler(timing, sample=partial_rollout if args.partial_rollout else None) as sample:
            while len(rows) < wanted and gen_batches < args.max_gen_batches:
                keep_rate = (state["kept"] + 1) / (state["sampled"] + 1)  # 1 in the first batch; never 0
                missing = math.ceil((wanted - len(rows)) / args.group_size / keep_rate)
                number = min(missing, 3 * args.train_batch_size)  # the paper always takes this many
                how = dict(temperature=args.temperature, top_p=args.top_p)
                if args.partial_rollout:
                    more = IN_FLIGHT * max(number, args.train_batch_size) - len(unfinished) // args.group_size
                    prompts = draw(train_rows, args.seed, state["drawn"], max(more, 0))
                    begun = unfinished + empty_rows(prompts, args.group_size)
                    new, unfinished, used = sample(begun, step, number, **how)
                    places += used
                else:
                    prompts = draw(train_rows, args.seed, state["drawn"], number)
                    new = sample(prompts, step, args.group_size, **how)
                with timed(timing, "reward"):
                    new = score_rows(new, manager, tokenizer)
                for row in new:
                    # CAREFUL: the overlong penalty must not make correct responses differ
                    row["acc"] = float(row["reward"].get("acc", row["reward"]["score"]))
                acc_n = torch.tensor([row["acc"] for row in new])
                keep_n = keep_groups(acc_n, torch.tensor([row["group"] for row in new]))
                for row, keep in zip(new, keep_n.tolist()):
                    row["keep"] = keep
                    row.setdefault("step_t", np.full(row["length"], step, np.int32))
                kept = [row for row in new if row["keep"]]
                rows, sampled, gen_batches = rows + kept, sampled + new, gen_batches + 1
                state["drawn"] += len(prompts)
                state["sampled"] += len(new) // args.group_size
                state["kept"] += len(kept) // args.group_size
        dropped = [row for row in sampled if not row["keep"]]
        all_correct = sum(row["acc"] > 0 for row in dropped) / max(len(sampled), 1)
        all_wrong = len(dropped) / max(len(sampled), 1) - all_correct
        if len(rows) < wanted:
            groups = f"{len(rows) // args.group_size} of --train_batch_size {args.train_batch_size} groups"
            rest = f"{all_correct:.0%} of the sampled groups are all correct, {all_wrong:.0%} all wrong"
            fail(f"step {step}: --max_gen_batches {gen_batches} gave {groups} with both kinds; {rest}")
        generated = sum((row["step_t"] == step).sum() for row in sampled + unfinished)
        surplus, stale = split_by_age(rows[wanted:], step, args.max_staleness)
        unfinished, given_up = split_by_age(unfinished, step, args.max_staleness)
        rows, stale = rows[:wanted], stale + given_up
        # the keep rate changes as the policy learns: a step counts half as much as the next
        state |= dict(sampled=state["sampled"] / 2, kept=state["kept"] / 2)
        state |= dict(surplus=surplus, unfinished=unfinished)
        age_t = step - np.concatenate([row["step_t"] for row in rows])
        for row in rows:  # these tokens have log-probs of older weights
            row["carried_over"] = row["step_t"] < step
        # ---- advantage, then balance over the ranks
        with timed(timing, "adv"):
            score_n = torch.tensor([row["reward"]["score"] for row in rows], dtype=torch.float64)
            length_n = torch.tensor([row["length"] for row in rows])
            reward_n = score_n + overlong_penalty(length_n, args.max_response_length, buffer)
            adv_n = group_advantages(reward_n, torch.tensor([row["group"] for row in rows]))
            for row, adv in zip(rows, adv_n.tolist()):  # every token of a response has its advantage
                row["adv_t"] = np.full(row["length"], adv, np.float32)
                if args.overlong_filtering and row["finish_reason"] == "length":
                    row["mask_t"] = np.zeros(row["length"], bool)
            mini_batches, own_rows, load = deal(rows, policy.shares, args, args.sp_size)
        # ---- log-probs: the old ones only if there is a second optimizer step
        if len(mini_batches) * args.ppo_epochs > 1:
            with timed(timing, "old_log_prob"):
                store_logps(policy, mini_batches, "old_logp_t", args)
        # ---- update
        optimizer.param_groups[0]["lr"] = learning_rate(args, step, total_steps)
        with timed(timing, "update_actor"):
            metrics = update_actor(policy, optimizer, mini_batches, args)
        metrics |= check_sampler(policy, own_rows, args, step)
        # ---- validation
        last = step == total_steps or state["drawn"] >= max_prompts
        last = last or all_reduce([bool(stop)], dist.ReduceOp.MAX) == [1]
        if val_rows and (last or (args.test_freq and step % args.test_freq == 0)):
            with timed(timing, "testing"):
                metrics |= validate()
        # ---- metrics
        timing["step"] = time.perf_counter() - begin
        metrics |= step_metrics(rows, load, policy, timing, args, sampled=sampled)
        metrics |= stats("critic/rewards", reward_n) | stats("critic/advantages", adv_n)
        metrics |= {
            "actor/lr": optimizer.param_groups[0]["lr"],
            "dapo/gen_batches": gen_batches,
            "dapo/dropped_all_right": all_correct,
            "dapo/dropped_all_wrong": all_wrong,
            "dapo/carried_over": np.mean([row["carried_over"].any() for row in rows]),
            "dapo/dropped_stale": len(stale),
            "dapo/token_age_0": np.mean(age_t == 0),
            "dapo/token_age_1": np.mean(age_t == 1),
            "dapo/token_age_2_or_more": np.mean(age_t > 1),
            "dapo/overlong": (reward_n < score_n).sum(),
            "dapo/tokens_generated": generated,
            "dapo/tokens_thrown_away": sum(row["length"] for row in dropped + stale),
            "training/global_step": step,
            "training/epoch": (state["drawn"] - 1) // len(train_rows),
        }
        if args.partial_rollout:
            metrics["dapo/idle"] = 1 - places[0] / places[1] if places[1] else 0.0
        log.log(metrics, step, score="critic/score/mean", length="response_length/mean")
        if args.rollout_dump and dist.get_rank() == 0:
            dump_rollouts(rows, log.out / f"rollouts/step_{step:06d}.jsonl")
        # ---- checkpoint, after the metrics: each checkpoint has its metrics
        if last or (args.save_freq and step % args.save_freq == 0):
            with timed(saving, "save_checkpoint"):
                content = state | {name: [as_json(row) for row in state[name]] for name in LEFT_OVER}
                save_checkpoint(args, step, trained, optimizer, tokenizer, **content)
        if last:
            break
    log.close()
    leave()


# --------------------------------------------------------------------------------------------------
# The system
# --------------------------------------------------------------------------------------------------
# region losses
PAPER = {  # defaults by --policy_loss of flags that are None; each script has those of `clip`
    "gspo": dict(clip_ratio_low=3e-4, clip_ratio_high=4e-4, loss_agg="seq-mean-token-mean"),
    "cispo": dict(clip_ratio_low=1.0, clip_ratio_high=4.0, loss_agg="token-mean"),  # ratios from 0 to 5
    "sapo": dict(loss_agg="seq-mean-token-mean"),
    "dppo": dict(clip_ratio_low=0.15, clip_ratio_high=0.15, loss_agg="token-mean"),
}
DPPO_MAX_RATIO = 20.0  # of new to old policy, as a weight
SAPO_TAU = 1.0, 1.05  # gate steepness where the advantage is positive, and where it is not


def with_defaults(args, **clip):
    """The arguments, with the defaults of --policy_loss in place of None."""
    paper = PAPER.get(args.policy_loss, clip)
    return replace(args, **{name: x for name, x in paper.items() if getattr(args, name) is None})


def clip_loss(args, logp_nt, old_nt, adv_nt, mask_nt):
    """policy_loss with the clip of the flags."""
    clip = args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c
    return policy_loss(logp_nt, old_nt, adv_nt, *clip)


def gspo_loss(args, logp_nt, old_nt, adv_nt, mask_nt):
    """policy_loss with one ratio a response: e to the mean of its log-ratios (2507.18071, eq. 14).

    Log-ratios 0.1 and 0.3 of a response: both tokens have the ratio e^0.2, and each its own gradient.
    """
    d_nt = (logp_nt - old_nt).detach() * mask_nt
    mean_n1 = d_nt.sum(-1, keepdim=True) / mask_nt.sum(-1, keepdim=True).clamp(min=1)
    return clip_loss(args, logp_nt, logp_nt.detach() - mean_n1, adv_nt, mask_nt)  # eq: grpo.gspo


def cispo_loss(args, logp_nt, old_nt, adv_nt, mask_nt):
    """-sg(clip(r, 1 - low, 1 + high)) A log p: no token loses its gradient (2506.13585, eq. 4).

    A = 1, log p = -2, r = 6, high = 4 -> 10, clipped.
    """
    ratio_nt = (logp_nt - old_nt).detach().clamp(-20, 20).exp()
    clip_nt = ratio_nt.clamp(1 - args.clip_ratio_low, 1 + args.clip_ratio_high)
    return -clip_nt * adv_nt * logp_nt, clip_nt != ratio_nt, torch.zeros_like(clip_nt)  # eq: grpo.cispo


def sapo_loss(args, logp_nt, old_nt, adv_nt, mask_nt):
    """-A sigma(tau (r - 1)) 4 / tau: the gate closes slowly, where a clip jumps (2511.20347, eq. 5).

    A = 1, tau = 1, r = 1 -> -2, with the slope of r.
    """
    ratio_nt = (logp_nt - old_nt).clamp(-20, 20).exp()
    tau_nt = torch.where(adv_nt > 0, *SAPO_TAU)
    loss_nt = -adv_nt * torch.sigmoid(tau_nt * (ratio_nt - 1)) * 4 / tau_nt  # eq: grpo.sapo
    return loss_nt, torch.zeros_like(loss_nt), torch.zeros_like(loss_nt)


def dppo_loss(args, logp_nt, old_nt, adv_nt, mask_nt):
    """-sg(min(r, 20)) A log p, but no token whose probability has moved too far (2602.04879, binary TV).

    A = 1, p_old = 0.5, high = 0.15: p = 0.6 -> -1.2 log 0.6; p = 0.7 -> 0, clipped.
    """
    ratio_nt = (logp_nt - old_nt).detach().clamp(-20, 20).exp().clamp(max=DPPO_MAX_RATIO)
    moved_nt = logp_nt.detach().exp() - old_nt.exp()
    far_nt = torch.where(adv_nt > 0, moved_nt > args.clip_ratio_high, moved_nt < -args.clip_ratio_low)
    loss_nt = -ratio_nt * adv_nt * logp_nt.where(~far_nt, 0.0)  # eq: grpo.dppo
    return loss_nt, far_nt, torch.zeros_like(loss_nt)


POLICY_LOSSES = dict(clip=clip_loss, gspo=gspo_loss, cispo=cispo_loss, sapo=sapo_loss, dppo=dppo_loss)


# endregion
# region log-probs
LOGIT_CHUNK = 1024  # response positions whose logits exist at the same time


class LogProbs(torch.autograd.Function):
    """hidden [L, H], weight [V, H], target [L] -> log-prob of the targets, entropy [L], in float32.

    Logits exist for one chunk at a time, in two buffers; the backward pass computes them again.
    """

    @staticmethod
    def logits(hidden, weight, temperature, softcap, never, out):
        """Write the logits of a chunk to `out` [chunk, V]: float32, also where the model is bfloat16."""
        if weight.dtype is out.dtype:
            torch.mm(hidden, weight.t(), out=out)
        elif weight.is_cuda:
            torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        else:
            torch.mm(hidden.float(), weight.float().t(), out=out)
        if softcap:  # gemma-2 and gemma-4
            out.div_(softcap).tanh_().mul_(softcap)
        for token in never:
            out[:, token] = -1e4  # finite, because 0 * -inf is NaN
        # CAREFUL: the temperature belongs here too, or the ratio compares two different distributions
        return out if temperature == 1 else out.div_(temperature)

    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, softcap, never, with_entropy):
        ctx.chunks = [slice(i, i + LOGIT_CHUNK) for i in range(0, len(target) or 1, LOGIT_CHUNK)]
        logp, entropy = (torch.zeros(len(target), device=target.device) for _ in range(2))
        buffers = torch.empty(2, min(len(target), LOGIT_CHUNK), len(weight), device=target.device)
        for chunk in ctx.chunks:
            p_lv, logp_lv = buffers[:, : len(target[chunk])]
            logits_lv = LogProbs.logits(hidden[chunk], weight, temperature, softcap, never, p_lv)
            torch.log_softmax(logits_lv, -1, out=logp_lv)
            logp[chunk] = logp_lv.gather(-1, target[chunk, None])[:, 0]
            if with_entropy:
                entropy[chunk] = -torch.exp(logp_lv, out=p_lv).mul_(logp_lv).sum(-1)
        ctx.save_for_backward(hidden, weight, target, entropy, buffers)
        ctx.options, ctx.with_entropy = (temperature, softcap, never), with_entropy
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logp, d_entropy):
        """p the softmax: d log p(target) = onehot(target) - p, d entropy = -p (log p + entropy)."""
        hidden, weight, target, entropy, buffers = ctx.saved_tensors
        temperature, softcap, _ = ctx.options
        d_logp, d_entropy = d_logp[:, None] / temperature, d_entropy[:, None] / temperature
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for number, chunk in enumerate(reversed(ctx.chunks)):
            p_lv, logp_lv = buffers[:, : len(target[chunk])]
            if number:  # the buffers still hold the last chunk
                logits_lv = LogProbs.logits(hidden[chunk], weight, *ctx.options, p_lv)
                torch.log_softmax(logits_lv, -1, out=logp_lv)
            torch.exp(logp_lv, out=p_lv)
            d_lv = -d_logp[chunk]
            if ctx.with_entropy:
                d_lv = logp_lv.add_(entropy[chunk, None]).mul_(-d_entropy[chunk]).add_(d_lv)
            d_lv = torch.mul(p_lv, d_lv, out=logp_lv).scatter_add_(-1, target[chunk, None], d_logp[chunk])
            if softcap:  # d tanh = 1 - tanh^2
                logits_lv = LogProbs.logits(hidden[chunk], weight, *ctx.options, p_lv)
                d_lv = d_lv.addcmul_(d_lv, logits_lv.mul_(temperature / softcap).square_(), value=-1)
            d_lv = d_lv.to(weight.dtype)
            torch.mm(d_lv, weight, out=d_hidden[chunk])
            if d_weight is not None:
                d_weight.addmm_(d_lv.t(), hidden[chunk])
        return d_hidden, d_weight, *[None] * 5


class TokenLogps(nn.Module):
    """A causal LM whose forward returns log-probs of given tokens: one root module, for FSDP.

    shares: whether its rows are laid out by `one_row`; otherwise by `padded`.
    """

    sp_size = 1  # ranks that share a row
    entropy = True  # whether it is computed

    def __init__(self, lm, shares=False):
        super().__init__()
        self.lm, self.shares = lm, shares
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            fail(f"{lm.config.name_or_path}: its output layer has a bias, which the log-probs leave out")
        config = lm.config.get_text_config()
        # granite and minicpm3 divide their logits; cohere and falcon-h1 multiply them
        factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1
        self.scale = factor / (getattr(config, "logits_scaling", None) or 1)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.never = [] if getattr(lm, "towers", ()) else never_sampled(lm.config)

    def hidden(self, where, inputs):
        """What the output layer reads at flat positions, [L, H]."""
        body = self.lm.base_model if "pixel_values" in inputs else decoder(self.lm)
        return body(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]

    def forward(self, where, target, temperature, **inputs):
        """where [L]: flat positions whose logits predict target [L] -> log-prob [L], entropy [L], float32."""
        hidden, weight = self.hidden(where, inputs), self.lm.get_output_embeddings().weight
        options = temperature / self.scale, self.softcap, self.never, self.entropy
        return LogProbs.apply(hidden.to(weight.dtype), weight, target, *options)  # float32 in Mamba


def token_logps(policy, rows, args, temperature):
    """Log-probs of the response tokens of rows, and entropy of the distributions that predict them.

    Returns logp_nt, entropy_nt [N, T], 0 after the end of a response; T is the longest response.
    """
    device = next(policy.parameters()).device
    layout = one_row if policy.shares else padded
    texts = [(row["prompt_ids"], row["response_ids"]) for row in rows]
    if takes_images(args):
        texts = [(*text, row.get("images", ())) for text, row in zip(texts, rows)]
        layout, texts = show_images(layout, texts, load_processor(args.model, args.tokenizer, True))
    texts = texts or [([0], [0])]  # forward and backward are collectives: without a row a dummy runs
    prompts, responses = [text[0] for text in texts], [text[1] for text in texts]
    inputs, where = layout(prompts, responses)
    policy.rows = rows  # for a forward pass that needs more of them than tokens
    inputs = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
    columns = policy(where.to(device), join(responses).to(device), temperature, **inputs)
    lengths = [len(response) for response in responses]
    return [pad(column.split(lengths))[: len(rows)] for column in columns]


# endregion
# region layouts
def rounding_limit(policy, args):
    """Mean |log-prob difference| of rounding alone, and whether it chooses experts that nearly tie."""
    experts = any(type(layer).__name__.endswith("Experts") for layer in policy.lm.modules())
    return {"float32": 1e-4, "bfloat16": 0.3 if experts else 0.1}[args.compute_dtype], experts


def join(parts):
    """Token ids of several lists or arrays as one tensor."""
    return torch.cat([torch.as_tensor(part) for part in parts]).long()


def pad(rows):
    """Rows of numbers as a tensor [rows, longest], with zeros after the shorter ones."""
    return nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)


def response_mask(lengths):
    """[N, T] bool, True on response tokens (EOS included)."""
    return torch.arange(max(lengths, default=1)) < torch.as_tensor(lengths)[:, None]


def padded(prompts, responses):
    """Model inputs with one text a row, padded on the right, and the positions that predict the responses.

    Causal attention never looks at padding on the right. Positions are flat: row * width + column.
    """
    input_ids = pad([join(text) for text in zip(prompts, responses)])
    where = []
    # labels are shifted against logits in a layout and nowhere else: position p - 1 predicts token p
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        first = row * input_ids.shape[1] + len(prompt) - 1
        where.append(torch.arange(first, first + len(response)))
    return dict(input_ids=input_ids), torch.cat(where)


def one_row(prompts, responses):
    """As `padded`, but all in one row without padding; neighbours with the same prompt share it.

    A piece of the row is a whole text, a shared prompt, or one response to it. Pieces of one shape are
    neighbours. Prompt a b, responses c d and e: pieces a b, e, c d at positions 0 1, 2, 2 3; e sees a b e.
    """
    pieces = []  # token ids, how many tokens of another piece they see first, and which piece that is
    texts = []  # for each response: its piece, and the length of its prompt
    for prompt, same in groupby(zip(prompts, responses), key=lambda text: list(text[0])):
        answers, root = [response for _, response in same], len(pieces)
        if len(answers) == 1:
            pieces.append((join([prompt, answers[0]]), 0, root))
        else:
            pieces.append((prompt, 0, root))
            pieces += [(answer, len(prompt), root) for answer in answers]
        texts += [(piece, len(prompt)) for piece in range(len(pieces) - len(answers), len(pieces))]
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i][1], len(pieces[i][0])))
    ids = [pieces[i][0] for i in order]
    spans = dict(zip(order, torch.arange(sum(map(len, ids))).split([len(x) for x in ids])))
    seen, shapes = {}, []
    for i in order:
        part, before, root = pieces[i]
        seen[i] = torch.cat([spans[root][:before], spans[i]])
        shapes.append((len(part), before + len(part)))
    inputs = dict(
        input_ids=join(ids)[None],
        position_ids=torch.cat([torch.arange(s - t, s) for t, s in shapes])[None],
        seen=torch.cat([*seen.values()]),
        shapes=np.array(shapes),  # CAREFUL: FSDP would walk through a list in every layer
        borders=torch.tensor([(0, 0), *shapes]).cumsum(0).int().t().contiguous(),
    )
    return inputs, torch.cat([seen[i][length - 1 : -1] for i, length in texts])


def piece_attention(module, query, key, value, mask, scaling, seen, shapes, borders, **_):
    """Attention as transformers calls it, on a row made by `one_row`: query [1, H, T, D] -> [1, T, H, D].

    seen: positions that each piece sees, one piece after the other. shapes: (queries, keys) of each piece;
    its last query sees its last key. borders: their running sums.
    """
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    key, value = key[seen], value[seen]
    if query.is_cuda and query.dtype != torch.float32:  # flash attention has half precision only
        options = dict(scale=scaling, window_size=(-1, 0), enable_gqa=True)  # causal
        out = varlen_attn(query, key, value, *borders, *shapes.max(0).tolist(), **options)
    else:
        out = attend(query, key, value, shapes, scaling)
    return out[None], None


def attend(query, key, value, shapes, scaling):
    """Causal attention in pieces of a row, by SDPA: query [T, H, D], key, value [S, KV, D] -> [T, H, D]."""
    from torch.nn.attention.bias import causal_lower_right

    dtype, out = query.dtype, []
    if not query.is_cuda:  # a CPU's backward pass is slow in bfloat16
        query, key, value = query.float(), key.float(), value.float()
    runs = [(len(list(same)), *shape) for shape, same in groupby(shapes.tolist())]  # pieces of one shape
    keys = [n * s for n, _, s in runs]
    parts = zip(query.split([n * t for n, t, _ in runs]), key.split(keys), value.split(keys))
    for (n, t, s), part in zip(runs, parts):
        part = [x.unflatten(0, (n, -1)).transpose(1, 2) for x in part]  # [n, H, t or s, D]
        bias = causal_lower_right(t, s)
        some = nn.functional.scaled_dot_product_attention(*part, bias, scale=scaling, enable_gqa=True)
        out.append(some.transpose(1, 2).flatten(0, 1))
    return torch.cat(out).to(dtype)


def special_layers(config):
    """What a model has besides attention to all earlier tokens: then its texts cannot be in one row."""
    model, text = auto_class(config)._model_mapping.get(type(config), None), config.get_text_config()
    special = "sliding_window", "attention_chunk_size", "attn_logit_softcapping", "index_topk"
    special = [name for name in special if getattr(text, name, None)] + ["a state"] * recurrent(text)
    return special + ["attention of its own"] * (not getattr(model, "_supports_attention_backend", False))


def recurrent(config):
    """Whether a layer passes a state along the row, across the borders between texts."""
    text = config.get_text_config()
    model = AutoModelForCausalLM._model_mapping.get(type(text), None)
    kinds = getattr(text, "layer_types", None) or []
    stateful = {"conv", "linear_attention", "hybrid", "hybrid_sliding"}
    return getattr(model, "_is_stateful", False) or not stateful.isdisjoint(kinds)


# endregion
# region ranks
TIMEOUT_S = 3600  # seconds that a rank waits for the others


def setup_distributed(hsdp_replicas):
    """Join the processes of torchrun, or run alone -> the device of this rank and the FSDP mesh."""
    if "RANK" not in os.environ:  # plain `python`: a world of one
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # CAREFUL: torchrun keeps its store over restarts, with the addresses of dead ranks (pytorch issue 135712)
    new_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and not os.environ.get(new_store):
        fail(f"--max-restarts: set {new_store}=1 for torchrun on each node")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif sys.platform == "linux":  # malloc must keep freed memory: to get it again takes 30 % of an update
        ctypes.CDLL("libc.so.6").mallopt(-4, 0)  # M_MMAP_MAX
        ctypes.CDLL("libc.so.6").mallopt(-1, -1)  # M_TRIM_THRESHOLD
    timeout, c10d = timedelta(seconds=TIMEOUT_S), dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout  # for subgroups
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    shape = hsdp_replicas, dist.get_world_size() // hsdp_replicas
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return device, mesh if hsdp_replicas > 1 else mesh["shard"]


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a list of numbers over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op)
    return total.tolist()


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
    """Split rows, longest first, into micro-batches of at most `budget` tokens, padding included.

    Every rank gets the same number of micro-batches, the largest that any needs; the missing ones are empty.
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
    [largest] = all_reduce([len(batches)], dist.ReduceOp.MAX)
    return batches + [[]] * (int(largest) - len(batches))


# endregion
# region model
def load_model(args, mesh, device, wrap, scores=False, adapt=None, share=True, **changes):
    """The model in `wrap`, sharded by FSDP2. Rank 0 reads the weights, the others get their shards.

    scores: with a head for a score. adapt: adds LoRA. share: whether texts may be in one row.
    changes: to its configuration.
    """
    config, attention = read_config(args, share, **changes)
    auto, adapt = auto_class(config, scores), adapt or add_adapters
    original_dtype = config.dtype or getattr(torch, args.param_dtype)
    full = None if dist.get_rank() else from_files(auto, args.model, **changes)
    if all_reduce([bool(full and full.untied)]) == [1]:
        config.tie_word_embeddings = False
    with torch.device("meta"):
        lm = auto.from_config(config, dtype=args.param_dtype, attn_implementation=attention)
        lm.towers = set() if takes_images(args) else freeze_towers(lm)  # the sampler does not get them
        adapt(lm, args)
    lm.config.dtype = original_dtype  # the dtype of hf/
    lm.tied = lm.all_tied_weights_keys  # names that are not saved
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = wrap(lm, attention == "pieces")
    precision = MixedPrecisionPolicy(getattr(torch, args.compute_dtype), reduce_dtype=torch.float32)
    for block in [m for m in lm.modules() if type(m).__name__ in lm._no_split_modules][::-1]:  # inner first
        fully_shard(block, mesh=mesh, mp_policy=precision)
    # the root too is resharded after a forward: without a backward nothing else would do it
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy.to_empty(device=device)
    if full:
        adapt(full, args)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(lm, full.state_dict() if full else {}, options=options)
    for name, buffer in lm.named_buffers():  # rotary frequencies and the like are in no state dict
        if full:
            buffer.copy_(full.get_buffer(name))
        dist.broadcast(buffer, 0)
    if full and lm.can_generate():  # saved with the weights: it may name more EOS tokens
        lm.generation_config = full.generation_config
    return policy


def read_config(args, share, **changes):
    """The configuration of the model, without dropout, and its attention: "pieces" if texts share a row."""
    logging.disable_progress_bar()  # of transformers
    config, attention = AutoConfig.from_pretrained(args.model, **changes), args.attn_implementation
    for part in filter(None, (config, *(getattr(config, name) for name in config.sub_configs))):
        part.__dict__.pop("quantization_config", None)  # trained and saved weights are whole
        for name in [name for name in part.to_dict() if "dropout" in name or name.endswith("_pdrop")]:
            setattr(part, name, 0.0)  # CAREFUL: with dropout the ratio is not 1 on the first mini-batch
    special = takes_images(args) or special_layers(config)
    if share and attention == "sdpa" and not special:
        AttentionInterface.register("pieces", piece_attention)
        attention = "pieces"
    return config, attention


def add_adapters(lm, args):
    """With --lora_rank: LoRA matrices next to the linear layers (2106.09685), and all else frozen -> lm."""
    if not args.lora_rank:
        return lm
    import peft  # here, because it takes two seconds
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN as renamed

    renamed.clear()  # CAREFUL: peft would give the adapters of shared experts to all experts, by old names
    layers, body = {}, {*decoder(lm).modules()}  # linear layers; body: all but the output layer
    left_out = "gate", "router", "mamba.out_proj", "mixer.out_proj"  # Mamba's kernels skip adapters
    for name, layer in lm.named_modules():
        linear = type(layer).__name__ in ("Linear", "Linear4bit")  # the latter with --qlora
        if linear and layer in body and ".experts." not in name and not name.endswith(left_out):
            layers[name] = name.rpartition(".")[2]
    known, chosen = {*layers.values()}, {*args.lora_target_modules}
    if wrong := chosen - known - {"all-linear"}:
        problem = f"{' '.join(sorted(wrong))} are not among its linear layers, {' '.join(sorted(known))}"
        raise ValueError(f"{args.model} ({lm.config.model_type}), --lora_target_modules: {problem}")
    config = peft.LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=[name for name, last in layers.items() if chosen & {last, "all-linear"}],
        task_type="SEQ_CLS" if hasattr(lm, "score") else "CAUSAL_LM",
    )
    torch.manual_seed(args.seed)
    peft.inject_adapter_in_model(config, lm)
    return lm


@torch.no_grad()
def whole_weights(lm, dtype, towers=True):
    """Names and weights of the sharded model as its files have them, one whole weight at a time.

    Adapters are added to their layers, and tied weights come once. A collective: every rank consumes all.
    """
    skipped = {*lm.tied} if towers else {*lm.tied, *lm.towers}
    for name, x in lm.state_dict(keep_vars=True).items():  # persistent buffers too
        layer, base, end = name.partition(".base_layer.")
        if name in skipped or ".lora_" in name or ".weight." in name:  # .weight.: scales of QLoRA
            continue
        if hasattr(x, "quant_state"):  # QLoRA: 4 bits, whole on every rank
            from peft.utils.integrations import dequantize_bnb_weight

            x = dequantize_bnb_weight(x).to(dtype)
        if base and end == "weight":
            x = merged_weight(lm.get_submodule(layer), x).to(dtype)
        elif isinstance(x, DTensor):
            x = x.to(dtype).full_tensor()  # a shard is cast before it travels
        yield from revert_weight_conversion(lm, {name.replace(".base_layer", ""): x}).items()


def merged_weight(lora, weight):
    """The weight of a layer with its adapters added, W + (alpha / r) B A, in float32."""
    a, b = (getattr(lora, part)["default"].weight.full_tensor().float() for part in ("lora_A", "lora_B"))
    if hasattr(lora, "lora_E"):  # AdaLoRA
        a = a * lora.lora_E.full_tensor()[:, None]
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return weight.float().addmm(b, a, alpha=lora.scaling["default"])  # eq: lora.weights


def learning_rate(args, step, total_steps):
    """The learning rate of `step` (from 1): a function of the step alone, so resuming needs no state."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    done = (step - 1 - args.warmup_steps) / max(1, total_steps - args.warmup_steps)
    decay = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return args.lr * decay[args.lr_schedule]


# endregion
# region checkpoints
TRAINED = dcp_state.StateDictOptions(ignore_frozen_params=True, strict=False)


def checkpointed(models, optimizers):
    """What dcp/ holds: the optimizers' state and what they train, with LoRA the adapters alone.

    models: {directory in the checkpoint: model}.
    """
    module = nn.ModuleDict(models)
    model, optim = dcp_state.get_state_dict(module, optimizers, options=TRAINED)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}  # tied weights once
    model = {name: x for name, x in model.items() if name in trained or ".lora_" in name}
    return dict(model=model, optimizer=optim)


def load_checkpoint(path, models, optimizers):
    """Load a checkpoint at any world size -> the trainer's state; path None: the state of step 0."""
    if path is None:
        return dict(step=0, origin="")
    content = checkpointed(models, optimizers)
    try:
        state = json.loads((path / "trainer_state.json").read_text())
        dcp.load(content, checkpoint_id=path / "dcp")
    except (dcp.CheckpointException, OSError, ValueError) as error:
        problem = f"is damaged, or of another model ({in_one_line(error)})"
        fail(f"{path} {problem}: point {path.parent / 'latest'} at an earlier step, or remove it")
    states = dict(model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    dcp_state.set_state_dict(nn.ModuleDict(models), optimizers, **states, options=TRAINED)
    return state | dict(origin=f"\nresumed from {path}")


def save_checkpoint(args, step, models, optimizers, tokenizer, **state):
    """Write checkpoints/step_N, then point `latest` at it: a kill at any moment leaves the last good one."""
    root, rank0, problem = Path(args.output_dir) / "checkpoints", dist.get_rank() == 0, [None]
    path, link, content = root / f"step_{step:06d}", root / ".latest", checkpointed(models, optimizers)
    weights = {name: {} for name in models}
    for name, lm in models.items():
        for key, x in whole_weights(lm, lm.config.dtype):
            if rank0:  # it also held the whole model when it was loaded
                weights[name][key] = x.to("cpu", copy=True, memory_format=torch.contiguous_format)
    try:
        if rank0:
            shutil.rmtree(path, ignore_errors=True)  # left by an earlier attempt
        dist.barrier()
        dcp.save(content, checkpoint_id=path / "dcp")  # all ranks fail, or none
        if rank0:
            for name, lm in models.items():
                write_hf(path / name, lm, weights[name])
            tokenizer.save_pretrained(path / "hf")
            copy_processor(models["hf"], args.model, path / "hf")
            state |= dict(step=step, digests=digests(args))
            # the last file: a directory without it is unfinished
            (path / "trainer_state.json").write_text(json.dumps(state, default=str))
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            link.replace(root / "latest")
            done = sorted(old for old in root.glob("step_*") if old <= path)
            for old in done[: -args.keep_checkpoints] if args.keep_checkpoints else ():
                shutil.rmtree(old)
    except (dcp.CheckpointException, OSError, safetensors.SafetensorError) as error:
        problem = [in_one_line(error)]
    dist.broadcast_object_list(problem)
    if problem[0]:
        free = f"{shutil.disk_usage(root.parent).free / 2**30:.1f} GiB are free"
        fail(f"{path} cannot be written: {problem[0]}; {free}")


def write_hf(directory, lm, weights):
    """Whole weights and their configuration as a Hugging Face directory."""
    lm.config.architectures = [type(lm).__name__]  # the config of a new critic names a causal LM
    lm.config.save_pretrained(directory)
    if lm.can_generate():
        lm.generation_config.to_json_file(directory / "generation_config.json")  # as it was read
    save_torch_state_dict(weights, directory)
    for file in directory.glob("*.safetensors"):  # safetensors sets mode 0600
        file.chmod((directory / "config.json").stat().st_mode)


# endregion
# region sequence parallel
class Slices(TokenLogps):
    """TokenLogps of one row, of which each rank of a group computes a slice.

    attention: of transformers, for a slice; it gets the group besides what `piece_attention` gets.
    """

    def __init__(self, lm, shares, group, attention):
        super().__init__(lm, shares)
        self.group, self.sp_size = group, group.size()
        AttentionInterface.register("slices", partial(attention, group=group))
        lm.set_attn_implementation("slices")

    def forward(self, where, target, temperature, **inputs):
        """As TokenLogps, on every rank for the whole row; the gradient is that of this rank's slice."""
        rank, tokens = self.group.rank(), inputs["input_ids"].shape[1]
        width = -(-tokens // self.sp_size)
        for name in ("input_ids", "position_ids"):
            row = nn.functional.pad(inputs[name], (0, width * self.sp_size - tokens))
            inputs[name] = row[:, rank * width :][:, :width]
        # labels were shifted before this cut: a slice's last position predicts the next slice's first token
        mine = where // width == rank
        found = super().forward(where[mine] - rank * width, target[mine], temperature, **inputs)
        own = torch.stack([x.new_zeros(len(where)).masked_scatter(mine, x) for x in found])
        whole = own.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return own + (whole - own.detach())


def sequence_group(sp_size, device):
    """The group of this rank and its neighbours, which share rows."""
    shape = dist.get_world_size() // sp_size, sp_size
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
    return mesh["sequence"].get_group()


def ulysses(module, query, key, value, mask, group, **pieces):
    """Trade a slice of all heads for the whole row of some heads, attend, and trade back (2309.14509)."""
    size, tokens = group.size(), int(pieces["shapes"][:, 0].sum())
    row = []
    for x in (query, key, value):  # [1, H, T / size, D]
        x = x[0].repeat_interleave(size // math.gcd(size, x.shape[1]), 0)  # each rank needs a key/value head
        x = trade(x.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)  # [H / size, T, D]
        row.append(x[None, :, :tokens])
    out, _ = AttentionInterface()["pieces"](module, *row, mask, **pieces)  # [1, T, H / size, D]
    out = nn.functional.pad(out[0], (0, 0, 0, 0, 0, -tokens % size))
    return trade(out.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)[None], None


def trade(x, group):
    """Give block i of the first axis to rank i of the group."""
    ops = dist._functional_collectives
    # CAREFUL: gloo writes into freed memory while several of these are on their way: one after the other
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), None, None, group))


# endregion
# region data
def check_args(args, sp_size=1):
    """Stop on combinations of flags that cannot work, before anything is loaded."""
    world, row = int(os.environ.get("WORLD_SIZE", 1)), args.max_prompt_length + args.max_response_length
    budget, prompts, size = args.max_tokens_per_microbatch, args.train_batch_size, args.ppo_mini_batch_size
    flash_float = args.attn_implementation == "flash_attention_2" and args.compute_dtype == "float32"
    level, bounds = args.rollout_rs, args.rollout_rs_threshold
    fit = len(bounds) == 1 and bounds[0] >= 1 or len(bounds) == 2 and 0 <= bounds[0] <= bounds[1]
    fit = len(bounds) == 1 and bounds[0] >= 0 if level == "off_policy" else fit
    cut_off, copies = args.top_p < 1 and (args.rollout_is or args.rollout_rs), args.hsdp_replicas
    problems = {
        f"--train_batch_size {prompts} is not a multiple of --ppo_mini_batch_size {size}": prompts % size,
        f"{world} ranks are not a multiple of --tp_size {args.tp_size}": world % args.tp_size,
        f"{world} ranks are not a multiple of --hsdp_replicas {copies}": world % copies,
        f"{world} ranks are not a multiple of --sp_size {sp_size}": world % sp_size,
        f"--max_tokens_per_microbatch {budget} is less than a row, {row} tokens": budget * sp_size < row,
        "--attn_implementation flash_attention_2 needs --compute_dtype bfloat16": flash_float,
        f"--temperature {args.temperature}: vLLM samples at 0.01 or above": args.temperature < 0.01,
        f"--top_p {args.top_p}: pass --rollout_is None and no --rollout_rs": cut_off,
        "--rollout_rs needs --rollout_rs_threshold HIGH, at least 1, or 0 <= LOW <= HIGH; with off_policy"
        " one value, at least 0": level and not fit,
        "--offload needs a GPU": args.offload and not torch.cuda.is_available(),
    }
    refuse(problems)


def load_data(args, tools=None, images=False):
    """-> tokenizer, reward managers of training and validation, rows of both, and a line about them."""
    shown = 0 if int(os.environ.get("RANK", 0)) else 1  # responses that each validation prints
    try:
        check_model(AutoConfig.from_pretrained(args.model), args, images)
        tokenizer = load_processor(args.model, args.tokenizer, takes_images(args))
        reward_fn = load_rewards(args.reward_fn, args.reward_weights)
        manager = RewardManager(args.reward_manager, reward_fn, timeout_s=args.reward_timeout_s)
        val_manager = RewardManager(args.reward_manager, reward_fn, shown, args.reward_timeout_s)
        train_rows, train_dropped = load_prompts(args.train_files, tokenizer, args.max_prompt_length, tools)
        val_rows, val_dropped = load_prompts(args.val_files, tokenizer, args.max_prompt_length, tools)
        if "rewards" in args.reward_fn:
            check_sources(train_rows.unique("data_source") | val_rows.unique("data_source"))
    except (ValueError, OSError, ImportError) as error:
        fail(" ".join(str(error).split()))
    if len(train_rows) < args.train_batch_size:
        fail(f"--train_batch_size {args.train_batch_size} is more than the {len(train_rows)} prompts")
    dropped = f"{train_dropped + val_dropped} dropped: empty or over {args.max_prompt_length} tokens"
    summary = f"{len(train_rows)} training and {len(val_rows)} validation prompts ({dropped})"
    return tokenizer, manager, val_manager, train_rows, val_rows, summary


def check_model(config, args, images):
    """ValueError if this script cannot train the model as its authors defined it."""
    name = f"{args.model} ({config.model_type})"
    if takes_images(args) and (not images or args.lora_rank):
        raise ValueError(f"{name} takes images, which only grpo.py and sft.py do, and without --lora_rank")
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if args.attn_implementation == "sdpa" and softcap:
        raise ValueError(f"{name} caps attention, sdpa cannot: --attn_implementation eager")
    with torch.device("meta"):  # both refuse what they cannot do, before weights are loaded
        lm = auto_class(config).from_config(config, attn_implementation=args.attn_implementation)
        TokenLogps(add_adapters(lm, args))


# endregion
# region sampler
def build_engine(args, device):
    """A vLLM engine in this process, asleep. It starts with random weights: only a sync makes it useful."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", str(int(device.type == "cpu")))  # it needs a C++ compiler
    import vllm
    from vllm.model_executor.models.transformers.base import Base as Transformers
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Executor

    # CPU: vLLM names shared memory by what follows the last colon, "env://" in all runs of a machine
    arguments, run = Executor._distributed_args, f"{os.getppid()}-{os.environ['MASTER_PORT']}"
    Executor._distributed_args = lambda self: (f"env://:{run}", *arguments(self)[1:])
    cuda, set_num_threads = device.type == "cuda", torch.set_num_threads
    config, sees = AutoConfig.from_pretrained(args.model), takes_images(args)
    # CAREFUL: on a CPU vLLM packs weights into copies that no sync reaches: not here, sync_weights does it
    plain = lambda layer, **_: setattr(layer, "cpu_linear", nn.functional.linear)
    # CAREFUL: vLLM runs some families by their class in transformers, and changes the trainer's
    Transformers._decorate_for_torch_compile = lambda self: None
    gc.freeze()  # vLLM searches for garbage three times: not in what has been imported
    with mock.patch("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", plain):
        try:
            options = vllm.EngineArgs(
                model=args.model,
                tokenizer=args.tokenizer,
                hf_overrides=hf_overrides(config, sees),
                language_model_only=not sees,
                skip_tokenizer_init=not sees,
                load_format="dummy",
                dtype=args.compute_dtype,
                seed=args.seed,
                max_model_len=args.max_prompt_length + args.max_response_length,
                tensor_parallel_size=args.tp_size,
                distributed_executor_backend="external_launcher",
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled
                generation_config="vllm",  # the model's EOS tokens, but not its temperature
                gpu_memory_utilization=args.gpu_memory_utilization,
                kv_cache_memory_bytes=None if cuda else 1 << 30,  # CPU: no share of all memory
                enable_sleep_mode=cuda,  # a CPU's sleep does nothing
                enforce_eager=not cuda,
                enable_chunked_prefill=cuda,  # CPU: seeds fail where a prompt is cut over steps
                enable_prefix_caching=cuda or not recurrent(config),  # states need such cuts
                block_size=None if cuda else 32,  # of the prefix cache; many prompts are short
                # CAREFUL: the processor normalises pixels: buffers in the model are in no sync
                mm_device_do_normalize=False,
                mm_hasher_algorithm="sha256",
                disable_log_stats=True,
            )
            engine = vllm.LLMEngine.from_engine_args(options, UsageContext.LLM_CLASS)  # limits of vllm.LLM
        except ValueError as error:  # a response that is longer than the model's positions, for one
            fail(" ".join(str(error).split()))
    dist.barrier()  # all have opened each other's shared memory: without its name a kill leaves none behind
    for name in Path("/dev/shm").glob(f"{run}-*"):
        name.unlink(missing_ok=True)
    torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it
    # CAREFUL: with them vLLM's CPU kernel of Qwen3-Next wants packed convolutions, and a sync brings others
    torch.cpu._is_avx512_bf16_supported = lambda: False
    torch.manual_seed(args.seed)  # vLLM overwrites the global generator
    engine.sleep(level=2)
    return engine


@contextmanager
def awake(engine, models, optimizer, args, timing, sample=None, **sampling):
    """While the block lasts, the sampler has the trainer's weights -> sample(prompts, step, n)."""
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


def sync_weights(engine, lm):
    """Stream the sharded model into the sampler."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    def load(model):
        config = engine.model_config
        weights = whole_weights(lm, config.dtype, towers=False)
        model.load_weights(vllm_names(weights, lm.config, config.hf_config))
        for layer in model.modules():  # CPU only: packed copies make sampling twice as fast
            if hasattr(layer, "cpu_linear") and layer.weight.dim() == 2:  # a convolution is packed in place
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
            elif hasattr(layer, "w13_weight") and layer.w13_weight.device.type == "cpu":
                layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    engine.apply_model(load)
    engine.reset_prefix_cache()
    engine.reset_encoder_cache()  # what the vision tower has made of images


def move(device, models, optimizer):
    """Move shards and optimizer state between GPU and pinned host memory; empty_cache waits for it."""
    for model in models:
        model.to(device, non_blocking=True)
    for state in optimizer.state.values():
        state |= {k: x.to(device, non_blocking=True) for k, x in state.items() if x.dim()}
    torch.cuda.empty_cache()


def rollout(engine, args, timing, prompts, step, group_size, **sampling):
    """Let the sampler answer the prompts of all ranks -> the rows of this rank.

    Ranks that share a sampler (--tp_size) answer the union of their prompts and keep their own.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rank, world = dist.get_rank(), dist.get_world_size()
    own = prompts[rank // args.tp_size :: world // args.tp_size]
    rows = [dict(prompt, sample=g, rank=rank) for prompt in own for g in range(group_size)]
    never = never_sampled(engine.model_config.hf_config) if takes_images(args) else []
    options = dict(max_tokens=args.max_response_length, detokenize=False, logprobs=0, flat_logprobs=True)
    options |= dict(output_kind=RequestOutputKind.FINAL_ONLY) | sampling
    options |= dict(logit_bias=dict.fromkeys(never, -100.0) or None)
    waiting, at_once = [*range(len(rows))][::-1], engine.vllm_config.scheduler_config.max_num_seqs
    with timed(timing, "gen"):
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < at_once:  # few decoded images
                row = rows[waiting[-1]]
                seed = np.random.SeedSequence((args.seed, step, row["index"], row["sample"]))
                params = SamplingParams(seed=int(seed.generate_state(1)[0]), **options)
                engine.add_request(str(waiting.pop()), request(row), params)
            for answer in engine.step():  # converted at once, because vLLM's lists take 200 bytes a token
                row, [response] = rows[int(answer.request_id)], answer.outputs
                if answer.prompt_token_ids != row["prompt_ids"]:
                    raise ValueError(f"{args.model}: vLLM makes other tokens of an image than its processor")
                row["response_ids"] = np.array(response.token_ids, np.int32)
                row["rollout_logp_t"] = np.array(response.logprobs.logprobs, np.float32)
                row["mask_t"] = np.ones(len(response.token_ids), bool)  # the tokens that are trained
                row["length"], row["prompt_length"] = len(response.token_ids), len(row["prompt_ids"])
                row["finish_reason"] = response.finish_reason
    return rows[rank % args.tp_size :: args.tp_size]


def score_rows(rows, manager, tokenizer):
    """Score this rank's rows -> the rows of all ranks, on each of them, by prompt and sample."""
    scored = manager.score_responses(rows, tokenizer)
    by_rank = [scored]
    if dist.get_world_size() > 1:  # alone, a copy in gloo's thread would slow OpenMP down for good
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, scored)
    return demote_failures(sorted(chain(*by_rank), key=itemgetter("group", "sample")))


# endregion
# region rows
def deal(rows, shares, args, sp_size=1):
    """Deal the rows of a step to the ranks; the rows of each optimizer step are balanced by tokens.

    A sequence is a row, or rows that share their prompt and fit into a micro-batch. Returns the sequences of
    this rank for each optimizer step, with the (tokens, responses) of all ranks; the rows of this rank; and
    the token counts of every rank. With sp_size a rank stands for all ranks that share its rows.
    Constant sequences, which only run forward, are balanced apart and count by a third.
    """
    size, ranks = args.ppo_mini_batch_size * args.group_size, dist.get_world_size() // sp_size
    rank, mini_batches, own_rows, load = dist.get_rank() // sp_size, [], [], [[] for _ in range(ranks)]
    together = (args.max_tokens_per_microbatch - args.max_prompt_length) // args.max_response_length
    together = max(together, 1) if shares else 1
    for start in range(0, len(rows), size):
        step_rows, sequences = rows[start : start + size], []
        for _, same in groupby(step_rows, key=itemgetter("group")):
            same = list(same)
            sequences += [same[i : i + together] for i in range(0, len(same), together)]
        own = []
        for share, some in zip((1, 1 / 3), by_gradient(sequences)):
            lengths = [token_count(sequence) for sequence in some]
            parts = balance(lengths, ranks)
            for tokens, part in zip(load, parts):
                tokens += [lengths[i] * share for i in part]
            own += [some[i] for i in parts[rank]]
        own_rows += chain(*own)
        trained = [int(row["mask_t"].sum()) for row in step_rows]
        mini_batches.append((own, (sum(trained), sum(tokens > 0 for tokens in trained))))
    return mini_batches, own_rows, load


def token_count(sequence):
    """Tokens of rows that share their prompt."""
    return sequence[0]["prompt_length"] + sum(row["length"] for row in sequence)


def by_gradient(sequences):
    """The sequences that teach something, and those in which every row is `constant`."""
    constant = [all(row.get("constant") for row in sequence) for sequence in sequences]
    return [[s for s, x in zip(sequences, constant) if x == kind] for kind in (False, True)]


def micro_batches(policy, sequences, args):
    """Run sequences one micro-batch at a time -> its rows, logp_nt, entropy_nt.

    Constant sequences have no gradient: they run last and forward only.
    """
    learning, constant = by_gradient(sequences)
    budget = args.max_tokens_per_microbatch * policy.sp_size
    anywhere = all_reduce([len(constant)]) != [0]
    for some in [learning, constant] if anywhere else [learning]:
        parts = split_micro_batches([token_count(s) for s in some], budget, policy.shares)
        for number, part in enumerate(parts, 1):
            policy.set_requires_all_reduce(number == len(parts))  # over the replicas of HSDP
            rows = [row for i in part for row in some[i]]
            with torch.set_grad_enabled(some is learning and torch.is_grad_enabled()):
                logps = token_logps(policy, rows, args, args.temperature)
            yield rows, *logps


@torch.no_grad()
def store_logps(policy, mini_batches, name, args):
    """Store the log-probs of this rank's rows, or the values of a critic, under `name`."""
    sequences = [sequence for sequences, _ in mini_batches for sequence in sequences]
    for rows, logp_nt, _ in micro_batches(policy, sequences, args):
        for row, logp_t in zip(rows, logp_nt):
            row[name] = logp_t[: row["length"]]


def collate(rows, device):
    """A batch of rows: adv_t of each row -> adv_nt, padded, and so for all that is per token."""
    if not rows:
        return defaultdict(lambda: torch.zeros(0, 1, device=device))  # all columns are empty
    names = [name for name in rows[0] if name.endswith("_t")]
    return {name[:-1] + "nt": pad([row[name] for row in rows]).to(device) for name in names}


# endregion
# region sampler against trainer
def rollout_weights(args, logp_nt, old_nt, rollout_logp_nt, mask_nt, adv_nt=0.0):
    """Factors of the token losses that correct for the log-probs of the sampler; without a gradient.

    --rollout_is: p_old / p_sampler, at most rollout_is_threshold; --rollout_rs: 0 where it is out of bounds.
    Ratios 1 and 3 of a response, limit 2: token 1 2, sequence 2 2; with rejection token 1 0, sequence 0 0.
    off_policy: 0 where A < 0 and the response's mean of log(p_sampler / p) is above the threshold.
    """
    d_nt = (old_nt - rollout_logp_nt).where(mask_nt.bool(), 0.0)
    d_n1, length_n1 = d_nt.sum(-1, keepdim=True), mask_nt.sum(-1, keepdim=True).clamp(min=1)
    logs = dict(token=d_nt, sequence=d_n1, geometric=d_n1 / length_n1)
    ratios = {level: x.clamp(-20, 20).exp() for level, x in logs.items()}
    weight_nt = torch.ones_like(d_nt)
    if args.rollout_is:
        weight_nt = weight_nt * ratios[args.rollout_is].clamp(max=args.rollout_is_threshold)  # eq: grpo.tis
    if args.rollout_rs == "off_policy":  # of the policy that is trained (DeepSeek-V3.2, 2512.02556, 3.1)
        behind_nt = (rollout_logp_nt - logp_nt.detach()).where(mask_nt.bool(), 0.0)
        far_n1 = behind_nt.sum(-1, keepdim=True) / length_n1 > args.rollout_rs_threshold[0]
        weight_nt = weight_nt * ~(far_n1 & (adv_nt < 0))  # eq: grpo.off_policy
    elif args.rollout_rs:
        ratio_nt, high = ratios[args.rollout_rs], args.rollout_rs_threshold[-1]
        low = args.rollout_rs_threshold[0] if len(args.rollout_rs_threshold) > 1 else 1 / high
        weight_nt = weight_nt * ((low <= ratio_nt) & (ratio_nt <= high))  # eq: grpo.rejection
    return weight_nt


def check_sampler(policy, rows, args, step):
    """Compare sampler and trainer on this rank's rows -> metrics; stop if more than rounding differs."""
    columns = [[torch.zeros(0)] for _ in range(4)]  # a rank may have no rows; fresh: of this step's sampler
    for part in (rows[i : i + 64] for i in range(0, len(rows), 64)):  # no more are padded at a time
        batch = collate(part, "cpu")
        ours_nt, theirs_nt, mask_nt = batch["old_logp_nt"], batch["rollout_logp_nt"], batch["mask_nt"]
        weight_nt = rollout_weights(args, ours_nt, ours_nt, theirs_nt, mask_nt)
        older_nt = pad([np.full(len(row["mask_t"]), row.get("carried_over", 0), bool) for row in part])
        for column, x in zip(columns, (ours_nt, theirs_nt, weight_nt, ~older_nt)):
            column.append(x.expand(mask_nt.shape)[mask_nt])
    ours, theirs, weight, fresh = (torch.cat(column).double() for column in columns)
    sums = weight.sum(), (weight**2).sum(), len(weight), fresh.sum()
    total, squares, tokens, count = all_reduce(sums)
    gap, prob_gap = (x[fresh > 0].abs() for x in (ours - theirs, ours.exp() - theirs.exp()))
    gap, mean = (x / max(count, 1) for x in all_reduce([gap.sum(), prob_gap.sum()]))
    [largest] = all_reduce([prob_gap.max() if len(prob_gap) else 0.0], dist.ReduceOp.MAX)
    limit, experts = rounding_limit(policy, args)
    limit = math.inf if args.top_p < 1 else limit  # it samples another distribution on purpose
    if not gap < limit:  # `not <` also fails for NaN
        why = "the sampler does not hold the trainer's weights, or computes differently"
        why += ", or rounding sends tokens to other experts" * experts
        fail(f"weight sync failed at step {step}: {why}; log-probs differ by {gap:.3g} > {limit:.3g}")
    return {
        "training/rollout_probs_diff_mean": mean,
        "training/rollout_probs_diff_max": largest,
        "training/rollout_logp_diff_mean": gap,
        "rollout_corr/rollout_is_mean": total / max(tokens, 1),
        "rollout_corr/rollout_is_eff_sample_size": total**2 / max(tokens * squares, 1e-30),
    }


# endregion


def check_dapo_args(args):
    """As check_args, for DAPO's own arguments."""
    if args.group_size < 2:
        fail(f"--group_size {args.group_size}: one response has no spread, so its group would be dropped")
    if not 0 <= (args.overlong_buffer or 0) <= args.max_response_length:
        fail(f"--overlong_buffer {args.overlong_buffer} is not within --max_response_length")
    if args.partial_rollout and not args.max_staleness:
        fail("--partial_rollout needs --max_staleness of at least 1: an unfinished response is a step old")
    if args.lr_schedule != "constant" and not args.total_steps:
        fail(f"--lr_schedule {args.lr_schedule} needs --total_steps: dropped groups make epochs end sooner")


def check_layout(args):
    """Stop where --sp_size ranks cannot share the rows of a model."""
    if args.sp_size == 1:
        return
    config, flag = AutoConfig.from_pretrained(args.model), f"--sp_size {args.sp_size}"
    name, special = config.model_type, special_layers(config)
    heads = config.get_text_config().num_attention_heads
    if args.attn_implementation != "sdpa":
        fail(f"{flag} needs --attn_implementation sdpa")
    if special:
        fail(f"{args.model} ({name}) has {' and '.join(special)}, which {flag} does not support")
    if heads % args.sp_size:
        fail(f"{args.model} ({name}) has {heads} attention heads, which {flag} does not divide")


IN_FLIGHT = 2  # groups that --partial_rollout begins or continues, for each one that it waits for
LEFT_OVER = "surplus", "unfinished"  # rows for the next step, in trainer_state.json
ARRAYS = dict(response_ids=np.int32, rollout_logp_t=np.float32, mask_t=bool, step_t=np.int32)


def as_json(row):
    """A row for trainer_state.json: the bytes of its arrays as text."""
    return row | {name: base64.b64encode(row[name].tobytes()).decode() for name in ARRAYS}


def from_json(row):
    """A row of trainer_state.json."""
    return row | {k: np.frombuffer(base64.b64decode(row[k]), dtype).copy() for k, dtype in ARRAYS.items()}


def split_by_age(rows, step, max_staleness):
    """Rows of groups that the next step may train on, and rows of groups that are too old for it.

    A group is as old as its oldest token. Step 3, tokens of steps 1 and 3: kept if max_staleness is 3.
    """
    kept, stale = [], []
    for _, same in groupby(rows, key=itemgetter("group")):
        same = list(same)
        first = min((int(row["step_t"][0]) for row in same if row["length"]), default=step + 1)
        (stale if step + 1 - first > max_staleness else kept).extend(same)
    return kept, stale


def empty_rows(prompts, group_size):
    """Responses without a token; "abort" is vLLM's word for a response that is not complete."""
    nothing = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()}
    nothing |= dict(length=0, finish_reason="abort")
    return [dict(prompt, **nothing, sample=g) for prompt in prompts for g in range(group_size)]


def partial_rollout(engine, args, timing, rows, step, enough, **sampling):
    """Let the sampler continue the rows of all ranks, in whole groups, until `enough` groups are complete.

    Returns complete groups as rows of this rank, the others as rows of all ranks, and two sums over the steps
    of the samplers: places in use, and places. Every rank keeps the same books of all responses, by steps of
    the samplers: no clock decides what is sampled nor, while the samplers have all the places, do the ranks.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import FinishReason

    samplers = dist.get_world_size() // args.tp_size
    mine, rank = divmod(dist.get_rank(), args.tp_size)
    rows = [dict(row, rank=dist.get_rank(), prompt_length=len(row["prompt_ids"])) for row in rows]
    never = never_sampled(engine.model_config.hf_config)
    options = dict(detokenize=False, logprobs=0, flat_logprobs=True)
    options |= dict(output_kind=RequestOutputKind.FINAL_ONLY) | sampling
    options |= dict(logit_bias=dict.fromkeys(never, -100.0) or None)
    waiting = [i for i, row in enumerate(rows) if row["finish_reason"] == "abort"][::-1]
    places = max(enough, args.train_batch_size) * args.group_size
    places = min(places, samplers * engine.vllm_config.scheduler_config.max_num_seqs)
    sampler_n, running = np.arange(len(rows)) % samplers, set()  # the sampler of each row
    complete_n, used, room = np.zeros(len(rows)), 0, 0
    with timed(timing, "gen"):
        while complete_n.sum() < enough * args.group_size:
            load = np.bincount(sampler_n[[*running]].astype(int), minlength=samplers)
            while waiting and len(running) < places:
                i = waiting.pop()
                sampler_n[i] = load.argmin()
                load[sampler_n[i]] += 1
                running.add(i)
                if sampler_n[i] == mine:
                    row, done = rows[i], rows[i]["response_ids"].tolist()
                    seed = np.random.SeedSequence((args.seed, step, row["index"], row["sample"], len(done)))
                    options |= dict(seed=int(seed.generate_state(1)[0]))
                    options |= dict(max_tokens=args.max_response_length - len(done))
                    engine.add_request(str(i), request(row, done), SamplingParams(**options))
            for _ in range(max(args.max_response_length // 64, 1)):  # steps between looks at the books
                used, room = used + engine.get_num_unfinished_requests(), room + places
                for answer in engine.step() if engine.has_unfinished_requests() else ():
                    extend(rows, answer, step)
            finished_n = np.array(all_reduce([row["finish_reason"] != "abort" for row in rows])) > 0
            running -= {*np.flatnonzero(finished_n)}
            complete_n = finished_n.reshape(-1, args.group_size).all(1).repeat(args.group_size)
        states = [*engine.output_processor.request_states.values()]
        for state in states:  # the answer that vLLM itself makes of an aborted request
            extend(rows, state.make_request_output([], None, FinishReason.ABORT, None), step)
        engine.abort_request([state.external_req_id for state in states])
    own = np.flatnonzero(sampler_n == mine)[rank :: args.tp_size]
    unfinished = [[rows[i] for i in own if not complete_n[i]]]
    if dist.get_world_size() > 1:  # as in score_rows
        unfinished, [part] = [None] * dist.get_world_size(), unfinished
        dist.all_gather_object(unfinished, part)
    unfinished = sorted(chain(*unfinished), key=itemgetter("group", "sample"))
    [used] = all_reduce([used / args.tp_size])
    return [rows[i] for i in own if complete_n[i]], unfinished, np.array([used, room])


def extend(rows, answer, step):
    """Add the tokens of an answer, which the weights of `step` sampled, to its row."""
    row, [response] = rows[int(answer.request_id)], answer.outputs
    n = len(response.token_ids)
    new = dict(response_ids=response.token_ids, rollout_logp_t=response.logprobs.logprobs)
    new |= dict(mask_t=np.ones(n), step_t=np.full(n, step))
    for name, dtype in ARRAYS.items():  # the log-prob of a token stays that of the weights that sampled it
        row[name] = np.concatenate([row[name], np.array(new[name], dtype)])
    row |= dict(length=len(row["response_ids"]), finish_reason=response.finish_reason)


if __name__ == "__main__":
    main(Args(**flags))
