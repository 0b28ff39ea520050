"""GRPO (DeepSeekMath, arXiv 2402.03300): maximise E[min(r A, clip(r, 1-eps, 1+eps) A)] - beta KL(p || ref),
where A is a response's score relative to its group, the responses to the same prompt.

Differences from the paper with the default flags:
1. There is no KL term (`--use_kl_loss` adds it).
2. The loss is the mean over the tokens of an optimizer step (`--loss_agg token-mean`), not of responses.
3. Truncated importance sampling corrects the sampler's rounding (`--rollout_is`, Yao et al. 2025).
4. Dual clip bounds the loss where the advantage is negative (1912.09729, eq. 5).

CPU:        python algos/grpo.py --model models/tiny --train_files data/train.parquet --output_dir runs/grpo
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/grpo.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/algorithms/grpo.md
"""

import math
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, one_line_errors, parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")
from algos.variants import estimated, is_zero_without_advantage, load_loss, unknown

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
    policy_loss: str = "clip"  # clip; a name in algos/variants/, such as cispo; or FILE.py:NAME
    adv_estimator: str = "grpo"  # grpo, dr_grpo (no division by the std), rloo; or as --policy_loss
    clip_ratio_low: float | None = None  # clip below 1 - this; None: default of the loss, of clip 0.2
    clip_ratio_high: float | None = None  # clip above 1 + this; None: default of the loss, of clip 0.2
    # average of token losses; None: default of the loss, of clip token-mean; ...-norm: Dr. GRPO
    loss_agg: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    use_kl_loss: bool = False  # add the KL divergence from the initial model to the loss
    kl_loss_coef: float = 0.001  # with --use_kl_loss: weight of the KL loss
    # with --use_kl_loss: KL estimator; +: with the gradient of the KL
    kl_kind: Literal["k1+", "abs", "k2", "k3", "k3+"] = "k3+"
    entropy_coeff: float = 0.0  # weight of the entropy bonus
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
        self.sees_images = families.takes_images(self.model, (*self.train_files, *self.val_files))
        self.ppo_mini_batch_size = self.ppo_mini_batch_size or self.train_batch_size


if __name__ == "__main__":
    flags = parse(Args, unknown=unknown)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from data_prep.lib.cache import load_prompt_files
from data_prep.lib.images import image_token_ids, load_processor
from data_prep.lib.templates import use_template
from rewards.manager import RewardManager, validation_summary
from rewards.manager.combined import load_rewards, score_parts
from system import cpu, families
from system.attention import states_apart
from system.batches import collate, distribute, micro_batches, store_logps, token_logps
from system.gpu import move, prepare_layers
from system.metrics import stats, step_metrics, timed
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
    without_adapters,
)
from system.ranks import setup_distributed, sum_over_ranks
from system.run import Run, learning_rate
from system.sampler import answers, check_sampler, engine_options, score_rows

# ---- The mathematics -------------------------------------------------------------------
DUAL_CLIP = 3.0  # bound of the ratio where the advantage is negative


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


def advantages(args, score_n, group_n, length_n, parts=()):
    """The advantage of each response, [N], which its tokens share; parts: of `score_parts`."""
    if args.adv_estimator in ("grpo", "dr_grpo"):
        return group_advantages(score_n, group_n, norm_by_std=args.adv_estimator == "grpo")
    if args.adv_estimator == "rloo":  # score minus the mean of the others (2402.14740)
        centred_n = group_advantages(score_n, group_n, norm_by_std=False)
        return centred_n * args.group_size / max(args.group_size - 1, 1)  # eq: grpo.rloo
    return estimated(args.adv_estimator, score_n, group_n, length_n, parts)


def kl_estimate(logp_nt, ref_logp_nt, kind):
    """Estimates of KL(policy || reference) per token (Schulman 2020); k3 is clamped as in verl."""
    d_nt = logp_nt - ref_logp_nt
    if kind.endswith("+"):  # the value of k1, k3 with the gradient of k2, which is the KL's
        value_nt = kl_estimate(logp_nt, ref_logp_nt, kind[:-1]).detach()
        return value_nt + d_nt**2 / 2 - d_nt.detach() ** 2 / 2  # eq: grpo.kl_gradient
    if kind == "k3":
        d_nt = d_nt.clamp(-20, 20)
        return ((-d_nt).exp() + d_nt - 1).clamp(-10, 10)  # eq: grpo.kl
    return {"k1": d_nt, "abs": d_nt.abs(), "k2": d_nt**2 / 2}[kind]


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
    # difference 3 of the header: the sampler rounds differently from the trainer
    weight_nt = rollout_weights(args, logp_nt, batch)
    loss_nt = loss_nt * weight_nt
    losses = dict(pg_loss=loss_nt)
    if args.entropy_coeff:  # else the entropy has no backward pass
        loss_nt = loss_nt - args.entropy_coeff * entropy_nt
    if args.use_kl_loss:
        kl_nt = kl_estimate(logp_nt, batch["ref_logp_nt"], args.kl_kind)
        if args.kl_kind.endswith("+"):  # the old policy gave the samples (DeepSeek-V3.2, 2512.02556, 3.1)
            kl_nt = kl_nt * (logp_nt.detach() - old_nt).clamp(-20, 20).exp()  # eq: grpo.kl_ratio
        losses["kl_loss"] = kl_nt
        loss_nt = loss_nt + args.kl_loss_coef * kl_nt
    means = dict(entropy=entropy_nt, ppo_kl=old_nt - logp_nt, rollout_rs_masked=weight_nt == 0)
    means |= dict(pg_clipfrac=clipped_nt, pg_clipfrac_lower=lower_nt)
    return loss_nt, losses, means


# ---- The step --------------------------------------------------------------------------
def update_actor(policy, optimizer, mini_batches, loss, args):
    """One optimizer step for each mini-batch of `distribute` -> mean metrics. loss: `actor_loss`."""
    loss_sums = defaultdict(float)
    mean_sums = defaultdict(float)
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
                loss_sums[name] += (weight_nt * x_nt.detach()).sum()
            mean_nt = loss_weights(batch["mask_nt"], "token-mean", None, totals)
            for name, x_nt in means.items():
                mean_sums[name] += (mean_nt * x_nt.detach()).sum()
            mean_sums["ran"] += mean_nt.sum()  # rows without a gradient do not run, and are in no mean
            for row, logp_t in zip(rows, logp_nt.detach()):
                row.setdefault("old_logp_t", logp_t[: row["length"]])  # of the first update: the old policy

        norm = nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).full_tensor().item()
        norms.append(norm)
        if math.isfinite(norm):  # the norm over all ranks: they step or skip together
            optimizer.step()
        optimizer.zero_grad()

    loss_sums = sum_over_ranks(loss_sums)
    mean_sums = sum_over_ranks(mean_sums)
    ran = max(mean_sums.pop("ran"), 1e-9)
    metrics = {f"actor/{name}": total / len(norms) for name, total in loss_sums.items()}
    metrics |= {f"actor/{name}": total / ran for name, total in mean_sums.items()}
    metrics["actor/grad_norm"] = np.mean(norms)
    metrics["actor/skipped_updates"] = np.sum(~np.isfinite(norms))
    return metrics


def main(args):
    # ---- arguments and data: checked before anything slow
    args, token_loss = load_loss(args, clip=policy_loss)
    loss = partial(actor_loss, args, token_loss)
    with Run(args) as run:
        tokenizer, manager, train_rows, val_rows, summary = load_data(args)
        steps_per_epoch = len(train_rows) // args.train_batch_size
        run.plan(args.total_steps or args.total_epochs * steps_per_epoch, summary)

        # ---- models: the engine first, while the GPU is empty; then it sleeps
        device, mesh = setup_distributed(args.hsdp_replicas)
        run.say("starting vLLM")
        engine = build_engine(args, device)
        run.say(f"loading {args.model}")
        policy = load_model(args, mesh, device, tokenizer, adapters_of(args))
        models = [policy]
        reference = policy
        if args.use_kl_loss and not args.lora_rank:  # with LoRA: the policy without its adapters
            reference = load_model(args, mesh, device, tokenizer, freeze)
            models.append(reference)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay, fused=True)
        # hf is the directory that the model has in a checkpoint
        run.load(dict(hf=policy.lm), optimizer, tokenizer, whole_weights)
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
            # ---- rollout: the sampler wakes with the trainer's weights, answers and sleeps again
            with awake(engine, models, optimizer, args, timing), timed(timing, "gen"):
                options = sampling | dict(temperature=args.temperature)
                rows = rollout(engine, args, prompts, step, args.group_size, **options)
            # ---- reward: from here on every rank has the rows of all ranks
            with timed(timing, "reward"):
                rows = score_rows(rows, manager, tokenizer)
            # ---- advantage, then balance over the ranks
            with timed(timing, "adv"):
                score_n = torch.tensor([row["reward"]["score"] for row in rows], dtype=torch.float64)
                group_n = torch.tensor([row["group"] for row in rows])
                tokens_n = torch.tensor([row["mask_t"].sum() for row in rows])
                parts = score_parts(manager.compute_score, rows)  # for gdpo: scores of each --reward_fn
                adv_n = advantages(args, score_n, group_n, tokens_n, parts)
                # where the loss has no gradient without an advantage, such rows need not run
                skip = is_zero_without_advantage(loss, args.max_response_length)
                for row, adv in zip(rows, adv_n.tolist()):  # all tokens of a response have its advantage
                    row["adv_t"] = np.full(row["length"], adv, np.float32)
                    row["no_grad"] = adv == 0 and skip
                updates = args.train_batch_size // args.ppo_mini_batch_size
                budget = args.max_tokens_per_microbatch
                mini_batches, own_rows, load = distribute(rows, updates, budget, policy.packed)
            # ---- log-probs: those of the first mini-batch are made by its own update
            if len(mini_batches) > 1:
                with timed(timing, "old_log_prob"):
                    store_logps(policy, mini_batches[1:], "old_logp_t", args.temperature, budget)
            if args.use_kl_loss:
                with timed(timing, "ref"), without_adapters(reference.lm):
                    store_logps(reference, mini_batches, "ref_logp_t", args.temperature, budget)
            # ---- update
            lr = learning_rate(args.lr, step, run.total, args.warmup_steps, args.lr_schedule)
            optimizer.param_groups[0]["lr"] = lr
            with timed(timing, "update_actor"):
                metrics = update_actor(policy, optimizer, mini_batches, loss, args)
            metrics |= check_sampler(own_rows, partial(rollout_weights, args), limit, step)
            run.updated()
            # ---- validation
            if val_rows and run.due(args.test_freq):
                with timed(timing, "testing"):
                    metrics |= validate()
            # ---- metrics
            timing["step"] = run.elapsed()
            metrics |= step_metrics(rows, load, policy, timing, args.compute_dtype)
            metrics |= stats("critic/rewards", score_n) | stats("critic/advantages", adv_n)
            metrics |= {
                "critic/advantages/zero": (adv_n == 0).double().mean().item(),
                "actor/lr": lr,
                "actor/kl_coef": args.kl_loss_coef * args.use_kl_loss,
                "training/epoch": epoch,
            }
            run.log(metrics, score="critic/score/mean", length="response_length/mean")
            run.dump(rows)
            # ---- checkpoint, after the metrics: each checkpoint has its metrics
            if run.due(args.save_freq):
                run.save()


# ---- The system: data, FSDP2 and vLLM; the rest of it is in system/ ------------------------
def load_data(args):
    """-> tokenizer, reward manager, rows of training and of validation, a line about them."""
    with one_line_errors():
        check_model(args.model, args.attn_implementation, adapters_of(args))
        if args.sees_images and args.lora_rank:
            fail(f"{args.model} takes images, which are trained without --lora_rank")
        tokenizer = load_processor(args.model, sees=args.sees_images)
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


def load_model(args, mesh, device, processor, set_trained):
    """The model in its root module, sharded by FSDP2. Rank 0 reads the weights for all."""
    lm, full, packed = read_model(args.model, args.attn_implementation, set_trained, args.sees_images)
    prepare_layers(lm, args.gradient_checkpointing, args.compile, eager=states_apart(lm))
    policy = TokenLogps(lm, packed, processor if args.sees_images else None)
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
            **engine_options(args.model, cuda, args.sees_images),
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
        sync_weights(engine, models[0].lm, args.sees_images)
        if args.offload == "sampling":
            move("cpu", models, optimizer)
        engine.wake_up(tags=["kv_cache"])
    yield
    with timed(timing, "sync"):
        engine.sleep(level=2)
        if args.offload == "sampling":
            move("cuda", models, optimizer)


def sync_weights(engine, lm, sees_images):
    """Stream the sharded model into the sampler, which packs it as it packs what it loads."""
    config = engine.model_config
    weights = whole_weights(lm, config.dtype, families.unused_weights(lm, sees_images))
    weights = families.vllm_names(weights, lm.config, config.hf_config)
    engine.apply_model(cpu.before_reload)
    engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
    engine.apply_model(cpu.after_reload)
    engine.reset_prefix_cache()
    engine.reset_encoder_cache()  # of images


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
    if args.sees_images:
        options["logit_bias"] = dict.fromkeys(image_token_ids(engine.model_config.hf_config), -100.0)
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
