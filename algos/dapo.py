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
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")
from algos.variants import named_loss, unknown, with_defaults

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
    total_epochs: int = 1  # passes over the training data
    total_steps: int | None = None  # number of RL steps; None: as many as total_epochs takes
    save_freq: int = 50  # steps between checkpoints; 0: only at the end
    test_freq: int = 10  # steps between validations; 0: only before and after training
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    rollout_dump: bool = False  # write responses of training and validation to output_dir/rollouts
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # tracker that also gets the metrics
    # ---- data
    train_files: tuple[str, ...]  # parquet files of training prompts
    val_files: tuple[str, ...] = ()  # parquet files of validation prompts; none: no validation
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
    lora_alpha: float = 16  # LoRA scale: the output of the adapters times lora_alpha / lora_rank
    # ---- rollout
    group_size: int = 8  # responses to each prompt
    max_response_length: int = 1024  # limit of the response in tokens
    temperature: float = 1.0  # temperature of sampling, and of the trainer's log-probs
    top_p: float = 1.0  # nucleus sampling; below 1 it needs --rollout_is None and no --rollout_rs
    tp_size: int = 1  # ranks that share one sampler by tensor parallelism
    gpu_memory_utilization: float = 0.5  # share of the GPU's memory for the awake sampler
    rollout_quantization: str | None = None  # of the sampler, by vLLM at each sync: fp8, on a GPU
    val_group_size: int = 1  # responses to each validation prompt
    val_temperature: float = 0.0  # temperature of sampling in validation
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
    policy_loss: str = "clip"  # clip; a name in algos/variants/, such as gspo; or FILE.py:NAME
    clip_ratio_low: float | None = None  # clip below 1 - this; None: default of the loss, of clip 0.2
    clip_ratio_high: float | None = None  # clip above 1 + this; None: default of the loss, of clip 0.28
    # average of token losses; None: default of the loss, of clip token-mean; ...-norm: Dr. GRPO
    loss_agg: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    rollout_is: Literal["token", "sequence"] | None = "token"  # importance weights, trainer / sampler
    rollout_is_threshold: float = 2.0  # upper bound of the importance weights
    # reject by this importance ratio; off_policy: negative responses that the policy has left
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None
    # one value h keeps ratios from 1/h to h; two are smallest and largest; off_policy: the paper's delta
    rollout_rs_threshold: tuple[float, ...] = ()
    # ---- rewards
    reward_manager: Literal["naive", "prime"] = "naive"  # prime: rewards run in processes of their own
    reward_fn: tuple[str, ...] = ("rewards",)  # FILE.py:NAME; rewards: by each row's data_source
    reward_weights: tuple[float, ...] = ()  # weight of each reward_fn; none: all 1
    reward_timeout_s: float = 30.0  # seconds for each response: with prime, or an async reward

    def __post_init__(self):  # torch is imported by then: below, after the command line has been read
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
        self.sees_images = families.takes_images(self.model, (*self.train_files, *self.val_files))
        self.ppo_mini_batch_size = self.ppo_mini_batch_size or self.train_batch_size


if __name__ == "__main__":
    flags = parse(Args, unknown=unknown)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import torch
import torch.distributed as dist
from data_prep.lib.packing import balance, join, one_row, pad, padded, split_micro_batches, states_apart
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoConfig
from transformers.utils import logging

from data_prep.lib import packing
from data_prep.lib.cache import load_prompt_files
from data_prep.lib.images import load_processor, request
from data_prep.lib.templates import use_template
from rewards.manager import RewardManager, check_failures, demote_failures, validation_summary
from rewards.manager.combined import load_rewards
from system import cpu, families
from system.gpu import compute_device, move, prepare_layers, send
from system.log_probs import log_probs
from system.metrics import stats, step_metrics, timed
from system.run import Run, all_reduce, learning_rate, setup_distributed

# ---- The mathematics -------------------------------------------------------------------
DUAL_CLIP = 3.0  # bound of the ratio where the advantage is negative
CLIP_HIGH = 0.28  # --clip_ratio_high of the clipped loss (clip-higher, 3.1)


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


def policy_loss(logp_nt, old_logp_nt, adv_nt, mask_nt, clip_low=0.2, clip_high=0.2, c=DUAL_CLIP):
    """-min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at most -c A (dual clip).

    Returns loss_nt, and where the clip and the dual clip decided. mask_nt: for algos/variants/.
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
    """The loss of each token before weighting -> loss_nt, and two dicts of what is reported.

    losses: parts of the loss, averaged as the loss is. means: averaged over tokens.
    Without old_logp_nt, which a single update does not need, the policy is its own old policy.
    """
    mask_nt, adv_nt = batch["mask_nt"], batch["adv_nt"]
    old_nt = batch.get("old_logp_nt", logp_nt.detach())
    loss_nt, clipped_nt, lower_nt = named_loss(args, policy_loss)(logp_nt, old_nt, adv_nt, mask_nt)
    # difference 2 of the header: the sampler rounds differently, and may have had older weights
    weight_nt = rollout_weights(args, logp_nt, old_nt, batch["rollout_logp_nt"], mask_nt, adv_nt)
    loss_nt = loss_nt * weight_nt
    losses = dict(pg_loss=loss_nt)
    means = dict(entropy=entropy_nt, ppo_kl=old_nt - logp_nt, rollout_rs_masked=weight_nt == 0)
    means |= dict(pg_clipfrac=clipped_nt, pg_clipfrac_lower=lower_nt)
    return loss_nt, losses, means


# ---- The step --------------------------------------------------------------------------
def sample_groups(sample, state, step, args):
    """Dynamic sampling (3.2): generation batches until there are enough groups -> rows, and the batches.

    sample(number): the scored rows of all ranks of that many of the next prompts.
    state: surplus rows of the last step, which come first; groups sampled and kept lately.
    """
    rows, batches = state["surplus"], []
    wanted = args.train_batch_size * args.group_size
    while len(rows) < wanted and len(batches) < args.max_gen_batches:
        keep_rate = (state["kept"] + 1) / (state["sampled"] + 1)  # 1 in the first batch; never 0
        missing = math.ceil((wanted - len(rows)) / args.group_size / keep_rate)
        new = sample(min(missing, 3 * args.train_batch_size))  # the paper always takes this many
        # CAREFUL: the overlong penalty must not make correct responses differ
        acc_n = torch.tensor([float(row["reward"].get("acc", row["reward"]["score"])) for row in new])
        keep_n = keep_groups(acc_n, torch.tensor([row["group"] for row in new]))
        for row, acc, keep in zip(new, acc_n.tolist(), keep_n.tolist()):
            row |= dict(acc=acc, keep=keep)
            row.setdefault("step_t", np.full(row["length"], step, np.int32))
        kept = [row for row in new if row["keep"]]
        rows = rows + kept
        batches.append(new)
        state["sampled"] += len(new) // args.group_size
        state["kept"] += len(kept) // args.group_size
    # the keep rate changes as the policy learns: a step counts half as much as the next
    state |= dict(sampled=state["sampled"] / 2, kept=state["kept"] / 2)
    return rows, batches


def assign_advantages(rows, args):
    """adv_t of each row, and mask_t of truncated ones -> rewards with the overlong penalty, advantages."""
    score_n = torch.tensor([row["reward"]["score"] for row in rows], dtype=torch.float64)
    length_n = torch.tensor([row["length"] for row in rows])
    buffer = args.max_response_length // 5 if args.overlong_buffer is None else args.overlong_buffer
    reward_n = score_n + overlong_penalty(length_n, args.max_response_length, buffer)
    adv_n = group_advantages(reward_n, torch.tensor([row["group"] for row in rows]))
    for row, adv in zip(rows, adv_n.tolist()):  # all tokens of a response have its advantage
        row["adv_t"] = np.full(row["length"], adv, np.float32)
        if args.overlong_filtering and row["finish_reason"] == "length":
            row["mask_t"] = np.zeros(row["length"], bool)
    metrics = {"dapo/overlong": (reward_n < score_n).sum()}
    return metrics | stats("critic/rewards", reward_n) | stats("critic/advantages", adv_n)


def update_actor(policy, optimizer, mini_batches, args):
    """One optimizer step for each mini-batch of `distribute` -> mean metrics."""
    sums, norms = defaultdict(float), []
    for sequences, totals in mini_batches * args.ppo_epochs:
        for rows in micro_batches(policy, sequences, args):
            logp_nt, entropy_nt = token_logps(policy, rows, args)
            batch = collate(rows, logp_nt.device)
            loss_nt, losses, means = actor_loss(args, logp_nt, entropy_nt, batch)
            # totals are of all ranks and micro-batches: no split of the work changes the gradient
            weight_nt = loss_weights(batch["mask_nt"], args.loss_agg, args.max_response_length, totals)
            # FSDP averages gradients over the ranks, but the totals already count all ranks
            loss = (weight_nt * loss_nt).sum() * dist.get_world_size()
            loss.backward()
            mean_nt = loss_weights(batch["mask_nt"], "token-mean", None, totals)
            for average_nt, terms in ((weight_nt, losses), (mean_nt, means)):
                for name, x_nt in terms.items():
                    sums[name] += (average_nt * x_nt.detach()).sum()
            for row, logp_t in zip(rows, logp_nt.detach()):
                if "old_logp_t" not in row:  # of the first update: the old policy
                    row["old_logp_t"] = logp_t[: row["length"]]
        norm = nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).full_tensor().item()
        norms.append(norm)
        if math.isfinite(norm):  # the norm over all ranks: they step or skip together
            optimizer.step()
        optimizer.zero_grad()
    totals = all_reduce(torch.stack([*sums.values()]).tolist())
    totals = [total / args.sp_size for total in totals]  # ranks that share a row have all counted it
    metrics = {f"actor/{name}": total / len(norms) for name, total in zip(sums, totals)}
    return metrics | {
        "actor/grad_norm": np.mean(norms),
        "actor/skipped_updates": np.sum(~np.isfinite(norms)),
    }


def main(args):
    # ---- arguments and data: checked before anything slow
    args = with_defaults(args, clip=partial(policy_loss, clip_high=CLIP_HIGH))
    run = Run(args)
    tokenizer, manager, train_rows, val_rows, summary = load_data(args)
    check_layout(args)
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch
    max_prompts = math.inf if args.total_steps else args.total_epochs * len(train_rows)

    # ---- models: the engine first, while the GPU is empty; then it sleeps
    device, mesh = setup_distributed(args.hsdp_replicas)
    engine = build_engine(args, device)
    policy = load_policy(args, mesh, device)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay, fused=True)
    # prompts drawn so far, groups sampled and kept lately, and rows left over for the next step
    state = dict(drawn=0, sampled=0, kept=0, surplus=[], unfinished=[])
    # hf is the directory that the model has in a checkpoint
    state |= run.load(dict(hf=policy.lm), optimizer, tokenizer, whole_weights)
    state |= {name: [from_json(row) for row in state[name]] for name in LEFT_OVER}
    if state["drawn"] >= max_prompts:  # resumed at the end of the data
        total_steps = run.step
    run.start(total_steps, summary, policy.lm)
    if args.max_staleness and not args.rollout_is:
        run.say("warning: with --rollout_is None tokens of older weights are not corrected")
    sampling = dict(temperature=args.temperature, top_p=args.top_p, stop_token_ids=[tokenizer.eos_token_id])

    def validate():
        with awake(engine, [policy], optimizer, args, timing={}):
            options = sampling | dict(temperature=args.val_temperature, top_p=1.0)
            rows = rollout(engine, args, val_rows, step=0, group_size=args.val_group_size, **options)
        rows = score_rows(rows, manager, tokenizer)
        run.dump(rows, "val")
        metrics, text = validation_summary(rows, run.step)
        run.say(text)
        return metrics

    def sample(number):
        with timed(timing, "gen"):
            rows = next_rollout(engine, args, train_rows, number, state, step, places, **sampling)
        with timed(timing, "reward"):
            return score_rows(rows, manager, tokenizer)

    if val_rows and not run.step:
        run.log(validate())

    for step, timing in run.steps():
        places = np.zeros(2)  # of the sampler: in use, and in all
        # ---- rollout and reward, until there are enough groups; all ranks know all rows
        with awake(engine, [policy], optimizer, args, timing):
            rows, batches = sample_groups(sample, state, step, args)
        wanted = number_of_rows(rows, args)
        if not wanted:
            run.say(solved(batches, step))
            run.step = run.total = step - 1
            break
        surplus, stale = split_by_age(rows[wanted:], step, args.max_staleness)
        unfinished, given_up = split_by_age(state["unfinished"], step, args.max_staleness)
        rows = rows[:wanted]
        for row in rows:  # these tokens have log-probs of older weights
            row["older_t"] = row["step_t"] < step
        sampled = sampling_metrics(rows, batches, state["unfinished"], stale + given_up, step, args)
        state |= dict(surplus=surplus, unfinished=unfinished)
        # ---- advantage, then balance over the ranks
        with timed(timing, "adv"):
            scored = assign_advantages(rows, args)
            mini_batches, own_rows, load = distribute(rows, policy.packed, args)
        # ---- log-probs: those of the first mini-batch are made by its own update
        if len(mini_batches) > 1:
            with timed(timing, "old_log_prob"):
                store_logps(policy, mini_batches[1:], "old_logp_t", args)
        # ---- update
        lr = learning_rate(args.lr, step, total_steps, args.warmup_steps, args.lr_schedule)
        optimizer.param_groups[0]["lr"] = lr
        with timed(timing, "update_actor"):
            metrics = update_actor(policy, optimizer, mini_batches, args)
        if state["drawn"] >= max_prompts:
            run.total = step
        run.updated(**state | {name: [as_json(row) for row in state[name]] for name in LEFT_OVER})
        metrics |= check_sampler(policy, own_rows, args, step)
        # ---- validation
        if val_rows and run.due(args.test_freq):
            with timed(timing, "testing"):
                metrics |= validate()
        # ---- metrics
        timing["step"] = run.elapsed()
        metrics |= step_metrics(rows, load, policy, timing, args.compute_dtype, sampled=[*chain(*batches)])
        metrics |= sampled | scored
        metrics |= {"actor/lr": lr, "training/epoch": (state["drawn"] - 1) // len(train_rows)}
        if args.partial_rollout:
            metrics["dapo/idle"] = 1 - places[0] / places[1] if places[1] else 0.0
        run.log(metrics, score="critic/score/mean", length="response_length/mean")
        run.dump(rows)
        # ---- checkpoint, after the metrics: each checkpoint has its metrics
        if run.due(args.save_freq):
            run.save()
    run.close()


# --------------------------------------------------------------------------------------------------
# The system
# --------------------------------------------------------------------------------------------------
# Above: the algorithm, change it freely. Below: regions that other scripts share;
# `make fix-copies FROM=algos/dapo.py` carries a change there to them.


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
        # CAREFUL: without the temperature the ratio would compare two different distributions
        options = dict(scale=self.scale / args.temperature, softcap=self.softcap)
        return log_probs(hidden.to(weight.dtype), weight, target, **options)  # float32 in Mamba


def token_logps(policy, rows, args):
    """Columns [N, T] of the response tokens of rows, 0 after a response's end.

    logp_nt: log-probs of the tokens.
    entropy_nt: entropy of the distributions that predict them.
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
    if args.offload == "always":
        fsdp["offload_policy"] = CPUOffloadPolicy()
        lm.get_input_embeddings().register_forward_pre_hook(lambda _, x: send(x[0]))  # for Llama 4
        device = torch.device("cpu")  # of the shards
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
        layer, _, end = name.rpartition(".")
        setattr(lm.get_submodule(layer), end, buffer.to(compute_device()))
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
        if linear and ".experts." not in name and not name.endswith(left_out):
            targets.append(name)
    scale = dict(r=args.lora_rank, lora_alpha=args.lora_alpha)
    torch.manual_seed(args.seed)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, **scale), lm)


@torch.no_grad()
def whole_weights(lm, dtype, skipped=()):
    """Names and weights of the sharded model as its files have them, one whole weight at a time.

    Adapters are added to their layers, tied weights come once. A collective: all ranks consume all.
    """
    to_files = families.to_files(lm)
    for name, x in lm.state_dict(keep_vars=True).items():  # persistent buffers too
        if name in lm.all_tied_weights_keys or name in skipped or ".lora_" in name:
            continue
        layer, base, end = name.partition(".base_layer.")
        if base and end == "weight":
            x = merged_weight(lm.get_submodule(layer), x).to(dtype)
        elif isinstance(x, DTensor):
            x = x.to(compute_device(), dtype).full_tensor()  # a shard is cast before it travels
        yield from to_files({name.replace(".base_layer", ""): x}).items()


def merged_weight(lora, weight):
    """The weight of a layer with its adapters added, W + (alpha / r) B A, in float32."""
    a, b = (x.default.weight.to(compute_device()).full_tensor() for x in (lora.lora_A, lora.lora_B))
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
# region data
def load_data(args):
    """-> tokenizer, reward manager, rows of training and of validation, a line about them."""
    try:
        check_model(AutoConfig.from_pretrained(args.model), args)
        tokenizer = load_processor(args.model, sees=args.sees_images)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        reward_fn = load_rewards(args.reward_fn, args.reward_weights, args.group_size)
        manager = RewardManager(args.reward_manager, reward_fn, timeout_s=args.reward_timeout_s)
        data = args.train_files, args.val_files, args.max_prompt_length
        train_rows, val_rows, summary = load_prompt_files(tokenizer, args.train_batch_size, *data)
        manager.check(train_rows, val_rows)
    except (ValueError, OSError, ImportError) as error:
        fail(" ".join(str(error).split()))
    return tokenizer, manager, train_rows, val_rows, summary


def check_model(config, args):
    """ValueError if this script cannot train the model as its authors defined it."""
    name = f"{args.model} ({config.model_type})"
    if args.sees_images:
        raise ValueError(f"{name} takes images, which only grpo.py and sft.py do")
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if args.attn_implementation == "sdpa" and softcap:
        raise ValueError(f"{name} caps attention, sdpa cannot: --attn_implementation eager")
    with torch.device("meta"):  # both refuse what they cannot do, before weights are loaded
        lm = families.auto_class(config).from_config(config, attn_implementation=args.attn_implementation)
        add_adapters(lm, args)
        TokenLogps(lm)


# endregion
# region sampler
def build_engine(args, device):
    """A vLLM engine in this process, asleep. Its weights are random until the first sync."""
    cuda = device.type == "cuda"
    config = AutoConfig.from_pretrained(args.model)
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
            kv_cache_memory_bytes=None if cuda else 1 << 30,  # CPU: no share of all memory
            enable_sleep_mode=cuda,  # a CPU's sleep does nothing
            enforce_eager=not cuda,
            enable_chunked_prefill=cuda,  # CPU: seeds fail where a prompt is cut over steps
            enable_prefix_caching=cuda or not families.recurrent(config),  # states need such cuts
            block_size=None if cuda else 32,  # of the prefix cache; many prompts are short
            disable_log_stats=True,
            **families.vllm_options(config, args.sees_images),
        )
        try:
            engine = vllm.LLMEngine.from_engine_args(options, UsageContext.LLM_CLASS)  # limits of vllm.LLM
        except ValueError as error:  # a response that is longer than the model's positions, for one
            fail(" ".join(str(error).split()))
    torch.manual_seed(args.seed)  # vLLM overwrites the global generator
    engine.sleep(level=2)
    return engine


@contextmanager
def awake(engine, models, optimizer, args, timing):
    """While the block lasts, the sampler is awake, with the weights of the first of the models."""
    with timed(timing, "sync"):
        engine.wake_up(tags=["weights"])
        sync_weights(engine, models[0].lm, args)
        if args.offload == "sampling":
            move("cpu", models, optimizer)
        engine.wake_up(tags=["kv_cache"])
    yield
    with timed(timing, "sync"):
        engine.sleep(level=2)
        if args.offload == "sampling":
            move("cuda", models, optimizer)


def sync_weights(engine, lm, args):
    """Stream the sharded model into the sampler, which packs it as it packs what it loads."""
    config = engine.model_config
    weights = whole_weights(lm, config.dtype, families.unused_weights(lm, args.sees_images))
    weights = families.vllm_names(weights, lm.config, config.hf_config)
    engine.apply_model(cpu.before_reload)
    engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
    engine.apply_model(cpu.after_reload)
    engine.reset_prefix_cache()


def rollout(engine, args, prompts, step, group_size, **sampling):
    """Let the sampler answer the prompts of all ranks -> the rows of this rank.

    Ranks that share a sampler (--tp_size) answer the union of their prompts and keep whole groups.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rank, world = dist.get_rank(), dist.get_world_size()
    own = prompts[rank // args.tp_size :: world // args.tp_size]
    rows = [dict(prompt, sample=g, rank=rank) for prompt in own for g in range(group_size)]
    options = dict(max_tokens=args.max_response_length, detokenize=False)
    options |= dict(logprobs=0, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY) | sampling
    waiting = [*enumerate(rows)][::-1]  # a request holds its images
    at_once = engine.vllm_config.scheduler_config.max_num_seqs
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < at_once:
            i, row = waiting.pop()
            seed = np.random.SeedSequence((args.seed, step, row["index"], row["sample"]))
            params = SamplingParams(seed=int(seed.generate_state(1)[0]), **options)
            engine.add_request(str(i), request(row), params)
        for answer in engine.step():  # converted at once: vLLM's lists take 200 bytes a token
            row = rows[int(answer.request_id)]
            [response] = answer.outputs
            row["response_ids"] = np.array(response.token_ids, np.int32)
            row["rollout_logp_t"] = np.array(response.logprobs.logprobs, np.float32)
            row["mask_t"] = np.ones(len(response.token_ids), bool)  # the tokens that are trained
            row["length"] = len(response.token_ids)
            row["prompt_length"] = len(row["prompt_ids"])
            row["finish_reason"] = response.finish_reason
    return [row for i, row in enumerate(rows) if i // group_size % args.tp_size == rank % args.tp_size]


def score_rows(rows, manager, tokenizer):
    """Score this rank's rows -> the rows of all ranks, on each of them, by prompt and sample."""
    scored = manager.score_responses(rows, tokenizer)
    by_rank = [scored]
    if dist.get_world_size() > 1:  # alone, a copy in gloo's thread would slow OpenMP down for good
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, scored)
    rows = sorted(chain(*by_rank), key=itemgetter("group", "sample"))
    check_failures(rows)
    return demote_failures(rows)


# endregion
# region rows
def distribute(rows, packed, args):
    """Distribute the rows of each optimizer step over the ranks, balanced by tokens.

    A sequence is a row, or packed rows that share their prompt, up to a quarter of a micro-batch: longer
    ones would leave them half empty. Returns this rank's sequences for each optimizer step, with the
    (tokens, responses) of all ranks; this rank's rows; and the token counts of every rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rank, ranks = rank // args.sp_size, ranks // args.sp_size  # ranks that share rows count as one
    size = args.ppo_mini_batch_size * args.group_size
    mini_batches, own_rows, load = [], [], [[] for _ in range(ranks)]
    longest = args.max_tokens_per_microbatch // 4 if packed else 0
    for start in range(0, len(rows), size):
        step_rows = rows[start : start + size]
        sequences = []
        for _, group in groupby(step_rows, key=itemgetter("group")):
            sequences.append([])
            for row in group:
                if sequences[-1] and token_count([*sequences[-1], row]) > longest:
                    sequences.append([])
                sequences[-1].append(row)
        lengths = [token_count(sequence) for sequence in sequences]
        parts = balance(lengths, ranks)
        for tokens, part in zip(load, parts):
            tokens += [lengths[i] for i in part]
        own = [sequences[i] for i in parts[rank]]
        own_rows += chain(*own)
        trained = [int(row["mask_t"].sum()) for row in step_rows]
        mini_batches.append((own, (sum(trained), sum(tokens > 0 for tokens in trained))))
    return mini_batches, own_rows, load


def token_count(sequence):
    """Tokens of rows that share their prompt."""
    return sequence[0]["prompt_length"] + sum(row["length"] for row in sequence)


def micro_batches(policy, sequences, args):
    """Cut sequences into micro-batches -> the rows of each."""
    lengths = [token_count(sequence) for sequence in sequences]
    batches = split_micro_batches(lengths, args.max_tokens_per_microbatch * args.sp_size, policy.packed)
    for batch in on_every_rank(policy, batches):
        yield [row for i in batch for row in sequences[i]]


@torch.no_grad()
def store_logps(policy, mini_batches, name, args):
    """Store the log-probs of this rank's rows under `name`."""
    sequences = [sequence for sequences, _ in mini_batches for sequence in sequences]
    for rows in micro_batches(policy, sequences, args):
        for row, logp_t in zip(rows, token_logps(policy, rows, args)[0]):
            row[name] = logp_t[: row["length"]]


def collate(rows, device):
    """A batch of rows: adv_t of each row -> adv_nt, padded, and so for all that is per token."""
    if not rows:
        return defaultdict(lambda: torch.zeros(0, 1, device=device))  # all columns are empty
    names = [name for name in rows[0] if name.endswith("_t")]
    return {name[:-1] + "nt": send(pad([row[name] for row in rows]), device) for name in names}


# endregion
# region sampler against trainer
def rollout_weights(args, logp_nt, old_nt, rollout_logp_nt, mask_nt, adv_nt):
    """Factors of the token losses that correct for the sampler's log-probs; without a gradient.

    --rollout_is: p_old / p_sampler, at most rollout_is_threshold; --rollout_rs: 0 where out of bounds.
    Ratios 1 and 3 of a response, limit 2: token 1 2, sequence 2 2; rejected: token 1 0, sequence 0 0.
    off_policy: 0 where A < 0 and the response's mean of log(p_sampler / p) is above the threshold.
    """
    d_nt = (old_nt - rollout_logp_nt).where(mask_nt.bool(), 0.0)
    d_n1, length_n1 = d_nt.sum(-1, keepdim=True), mask_nt.sum(-1, keepdim=True).clamp(min=1)
    logs = dict(token=d_nt, sequence=d_n1, geometric=d_n1 / length_n1)
    ratios = {level: x.clamp(-20, 20).exp() for level, x in logs.items()}
    weight_nt = torch.ones_like(d_nt)
    if args.rollout_is:
        weight_nt = weight_nt * ratios[args.rollout_is].clamp(max=args.rollout_is_threshold)  # eq: grpo.tis
    if args.rollout_rs == "off_policy":  # of the trained policy (DeepSeek-V3.2, 2512.02556, 3.1)
        behind_nt = (rollout_logp_nt - logp_nt.detach()).where(mask_nt.bool(), 0.0)
        far_n1 = behind_nt.sum(-1, keepdim=True) / length_n1 > args.rollout_rs_threshold[0]
        weight_nt = weight_nt * ~(far_n1 & (adv_nt < 0))  # eq: grpo.off_policy
    elif args.rollout_rs:
        ratio_nt = ratios[args.rollout_rs]
        high = args.rollout_rs_threshold[-1]
        low = args.rollout_rs_threshold[0] if len(args.rollout_rs_threshold) > 1 else 1 / high
        weight_nt = weight_nt * ((low <= ratio_nt) & (ratio_nt <= high))  # eq: grpo.rejection
    return weight_nt


def check_sampler(policy, rows, args, step):
    """Compare sampler and trainer on this rank's rows -> metrics; stop if more than rounding differs."""
    logps, weights = [torch.zeros(0, 2)], [torch.zeros(0)]  # a rank may have no rows
    for start in range(0, len(rows), 64):  # no more are padded at a time
        batch = collate(rows[start : start + 64], "cpu")
        ours_nt, theirs_nt, mask_nt = batch["old_logp_nt"], batch["rollout_logp_nt"], batch["mask_nt"]
        weight_nt = rollout_weights(args, ours_nt, ours_nt, theirs_nt, mask_nt, torch.zeros_like(ours_nt))
        weights.append(weight_nt.expand_as(mask_nt)[mask_nt])
        mask_nt = mask_nt & ~batch["older_nt"]  # of this step's sampler
        logps.append(torch.stack([ours_nt, theirs_nt], -1)[mask_nt])
    weight, (ours, theirs) = torch.cat(weights).double(), torch.cat(logps).double().unbind(-1)
    gap, prob_gap = (ours - theirs).abs(), (ours.exp() - theirs.exp()).abs()
    sums = len(gap), gap.sum(), prob_gap.sum(), len(weight), weight.sum(), (weight**2).sum()
    compared, gap, prob_gap_sum, tokens, total, squares = all_reduce(sums)
    gap = gap / max(compared, 1)
    [largest] = all_reduce([prob_gap.max() if len(prob_gap) else 0.0], dist.ReduceOp.MAX)
    limit, experts = families.rounding_limit(policy.lm, args.compute_dtype, args.rollout_quantization)
    limit = math.inf if args.top_p < 1 else limit  # it samples another distribution on purpose
    if not gap < limit:  # `not <` also fails for NaN
        why = "the sampler does not hold the trainer's weights, or computes differently"
        why += ", or rounding sends tokens to other experts" * experts
        fail(f"weight sync failed at step {step}: {why}; log-probs differ by {gap:.3g} > {limit:.3g}")
    return {
        "training/rollout_probs_diff_mean": prob_gap_sum / max(compared, 1),
        "training/rollout_probs_diff_max": largest,
        "training/rollout_logp_diff_mean": gap,
        "rollout_corr/rollout_is_mean": total / max(tokens, 1),
        "rollout_corr/rollout_is_eff_sample_size": total**2 / max(tokens * squares, 1e-30),
    }


# endregion


def check_layout(args):
    """Stop where --sp_size ranks cannot share the rows of a model."""
    if args.sp_size == 1:
        return
    flag = f"--sp_size {args.sp_size}"
    config = AutoConfig.from_pretrained(args.model)
    name = config.model_type
    special = families.special_layers(config)
    heads = config.get_text_config().num_attention_heads
    if args.attn_implementation != "sdpa":
        fail(f"{flag} needs --attn_implementation sdpa")
    if special:
        fail(f"{args.model} ({name}) has {' and '.join(special)}, which {flag} does not support")
    if heads % args.sp_size:
        fail(f"{args.model} ({name}) has {heads} attention heads, which {flag} does not divide")


def load_policy(args, mesh, device):
    """The model, in slices with --sp_size."""
    if args.sp_size == 1:
        return load_model(args, mesh, device, add_adapters, TokenLogps)
    sp_group = sequence_group(args.sp_size, device)
    root = partial(Slices, group=sp_group, attention=ulysses)
    return load_model(args, mesh, device, add_adapters, root)


IN_FLIGHT = 2  # groups that --partial_rollout begins or continues, for each one that it waits for
LEFT_OVER = "surplus", "unfinished"  # rows for the next step, in trainer_state.json
ARRAYS = dict(response_ids=np.int32, rollout_logp_t=np.float32, mask_t=bool, step_t=np.int32)


def as_json(row):
    """A row for trainer_state.json: the bytes of its arrays as text."""
    return row | {name: base64.b64encode(row[name].tobytes()).decode() for name in ARRAYS}


def from_json(row):
    """A row of trainer_state.json."""
    return row | {k: np.frombuffer(base64.b64decode(row[k]), dtype).copy() for k, dtype in ARRAYS.items()}


def next_rollout(engine, args, train_rows, number, state, step, places, **sampling):
    """Let the sampler answer `number` of the next prompts -> the rows of this rank.

    state: prompts drawn so far, and unfinished rows. places: of `partial_rollout`, to which they are added.
    """
    prompts = draw(train_rows, args.seed, state["drawn"], to_begin(args, number, state["unfinished"]))
    state["drawn"] += len(prompts)
    if not args.partial_rollout:
        return rollout(engine, args, prompts, step, args.group_size, **sampling)
    left = state["unfinished"]
    rows, left, used = partial_rollout(engine, args, prompts, left, step, number, **sampling)
    state["unfinished"] = left
    places += used
    return rows


def draw(train_rows, seed, start, count):
    """`count` prompts from number `start` on, over all epochs; (seed, epoch) sets their order."""
    epochs = range(start // len(train_rows), (start + count) // len(train_rows) + 1)
    orders = [np.random.default_rng((seed, epoch)).permutation(len(train_rows)) for epoch in epochs]
    chosen = np.concatenate(orders)[start % len(train_rows) :][:count]
    # CAREFUL: the seed of a response depends on `index`, because a prompt may come twice in a step
    return [dict(train_rows[i], index=k, group=k) for k, i in enumerate(chosen, start)]


def number_of_rows(rows, args):
    """How many rows are trained; if they are too few for a step, the same number on each rank."""
    wanted = args.train_batch_size * args.group_size
    each = args.group_size * dist.get_world_size() // args.sp_size
    return wanted if len(rows) >= wanted else len(rows) // each * each


def dropped_shares(sampled):
    """The shares of the sampled rows whose groups were dropped as all correct, and as all wrong."""
    dropped = [row for row in sampled if not row["keep"]]
    right = sum(row["acc"] > 0 for row in dropped)
    return right / max(len(sampled), 1), (len(dropped) - right) / max(len(sampled), 1)


def solved(batches, step):
    """A line about a step without a group to train on; the run stops if the tasks are too hard."""
    right, wrong = dropped_shares([*chain(*batches)])
    few = f"step {step}: --max_gen_batches {len(batches)}: less than a group a rank has both kinds"
    kinds = f"{right:.0%} of the sampled groups are all correct, {wrong:.0%} all wrong"
    if right <= wrong:
        fail(f"{few}; {kinds}")
    return f"{few}; {kinds}: solved"


def sampling_metrics(rows, batches, unfinished, stale, step, args):
    """What a step sampled, what it trains on and what it throws away."""
    sampled = [*chain(*batches)]
    right, wrong = dropped_shares(sampled)
    age_t = step - np.concatenate([row["step_t"] for row in rows])
    thrown_away = [row for row in sampled if not row["keep"]] + stale
    return {
        "dapo/gen_batches": len(batches),
        "dapo/groups": len(rows) / args.group_size,
        "dapo/dropped_all_right": right,
        "dapo/dropped_all_wrong": wrong,
        "dapo/carried_over": np.mean([row["older_t"].any() for row in rows]),
        "dapo/dropped_stale": len(stale),
        "dapo/token_age_0": np.mean(age_t == 0),
        "dapo/token_age_1": np.mean(age_t == 1),
        "dapo/token_age_2_or_more": np.mean(age_t > 1),
        "dapo/tokens_generated": sum((row["step_t"] == step).sum() for row in sampled + unfinished),
        "dapo/tokens_thrown_away": sum(row["length"] for row in thrown_away),
    }


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


def to_begin(args, number, unfinished):
    """How many prompts are drawn to get `number` groups; --partial_rollout: IN_FLIGHT times as many."""
    if not args.partial_rollout:
        return number
    groups = IN_FLIGHT * max(number, args.train_batch_size)
    return max(groups - len(unfinished) // args.group_size, 0)


def partial_rollout(engine, args, prompts, unfinished, step, enough, **sampling):
    """Let the sampler answer prompts and continue unfinished rows, until `enough` groups are complete.

    Prompts and rows are of all ranks. Returns complete groups as rows of this rank, the others as rows of
    all ranks, and two sums over the steps of the samplers: places in use, and places. Every rank keeps the
    same books of all responses, by steps of the samplers: no clock decides what is sampled nor, while the
    samplers have all the places, do the ranks.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import FinishReason

    samplers = dist.get_world_size() // args.tp_size
    own_sampler, rank = divmod(dist.get_rank(), args.tp_size)
    rows = unfinished + empty_rows(prompts, args.group_size)
    rows = [dict(row, rank=dist.get_rank(), prompt_length=len(row["prompt_ids"])) for row in rows]
    options = dict(detokenize=False, logprobs=0, flat_logprobs=True)
    options |= dict(output_kind=RequestOutputKind.FINAL_ONLY) | sampling
    waiting = [i for i, row in enumerate(rows) if row["finish_reason"] == "abort"][::-1]
    places = max(enough, args.train_batch_size) * args.group_size
    places = min(places, samplers * engine.vllm_config.scheduler_config.max_num_seqs)
    sampler_n = np.arange(len(rows)) % samplers  # the sampler of each row
    complete_n = np.zeros(len(rows))
    running = set()
    used = room = 0
    while complete_n.sum() < enough * args.group_size:
        load = np.bincount(sampler_n[[*running]].astype(int), minlength=samplers)
        while waiting and len(running) < places:
            i = waiting.pop()
            sampler_n[i] = load.argmin()
            load[sampler_n[i]] += 1
            running.add(i)
            if sampler_n[i] == own_sampler:
                row = rows[i]
                begun = row["response_ids"].tolist()
                seed = np.random.SeedSequence((args.seed, step, row["index"], row["sample"], len(begun)))
                options["seed"] = int(seed.generate_state(1)[0])
                options["max_tokens"] = args.max_response_length - len(begun)
                engine.add_request(str(i), request(row, begun), SamplingParams(**options))
        for _ in range(max(args.max_response_length // 64, 1)):  # steps between looks at the books
            used += engine.get_num_unfinished_requests()
            room += places
            for answer in engine.step() if engine.has_unfinished_requests() else ():
                extend(rows, answer, step)
        finished_n = np.array(all_reduce([row["finish_reason"] != "abort" for row in rows])) > 0
        running -= {*np.flatnonzero(finished_n)}
        complete_n = finished_n.reshape(-1, args.group_size).all(1).repeat(args.group_size)
    states = [*engine.output_processor.request_states.values()]
    for state in states:  # the answer that vLLM itself makes of an aborted request
        extend(rows, state.make_request_output([], None, FinishReason.ABORT, None), step)
    engine.abort_request([state.external_req_id for state in states])
    own = np.flatnonzero(sampler_n == own_sampler)[rank :: args.tp_size]
    [used] = all_reduce([used / args.tp_size])
    rows = of_all_ranks([rows[i] for i in own])  # in the order that they had
    unfinished = [row for row, complete in zip(rows, complete_n) if not complete]
    rows = [row for row, complete in zip(rows, complete_n) if complete]
    groups = np.arange(len(rows)) // args.group_size % dist.get_world_size()  # each whole, for the reward
    return [rows[i] for i in np.flatnonzero(groups == dist.get_rank())], unfinished, np.array([used, room])


def of_all_ranks(rows):
    """The rows of this rank -> those of all ranks, on each of them, by prompt and sample."""
    by_rank = [rows]
    if dist.get_world_size() > 1:  # as in score_rows
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, rows)
    return sorted(chain(*by_rank), key=itemgetter("group", "sample"))


def extend(rows, answer, step):
    """Add the tokens of an answer, which the weights of `step` sampled, to its row."""
    row = rows[int(answer.request_id)]
    [response] = answer.outputs
    n = len(response.token_ids)
    new = dict(response_ids=response.token_ids, rollout_logp_t=response.logprobs.logprobs)
    new |= dict(mask_t=np.ones(n), step_t=np.full(n, step))
    for name, dtype in ARRAYS.items():  # a log-prob stays that of the weights that sampled its token
        row[name] = np.concatenate([row[name], np.array(new[name], dtype)])
    row["length"] = len(row["response_ids"])
    row["finish_reason"] = response.finish_reason


if __name__ == "__main__":
    main(Args(**flags))
