"""PPO (arXiv 1707.06347, for language models 2203.02155): maximise E[min(r A, clip(r, 1-eps, 1+eps) A)],
where A is the generalised advantage estimate (1506.02438) from a learned critic.

Differences from the papers with the default flags:
1. Actor and critic are two models.
2. There is no KL term (`--kl_coef` adds it).
3. Both losses are means over all tokens of the optimizer step, not means over responses.
4. Truncated importance sampling corrects the sampler's rounding (`--rollout_is`, Yao et al. 2025).
5. Dual clip bounds the loss where the advantage is negative (1912.09729, eq. 5).
What VAPO (2504.05118) adds for long responses is behind flags: docs/algorithms/ppo.md.

CPU:        python algos/ppo.py --model models/tiny --train_files data/train.parquet --output_dir runs/ppo
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/ppo.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/algorithms/ppo.md
"""

import math
import sys
from collections import defaultdict
from contextlib import contextmanager, suppress
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
    critic_model: str | None = None  # causal LM or classifier to start from; None: model
    reward_model: tuple[str, ...] = ()  # classifiers: the score of each is one more reward
    attn_implementation: str = "sdpa"  # attention; sdpa: torch's own, on GPUs flash attention
    # dtype of forward, backward and sampler; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    hsdp_replicas: int = 1  # copies of the sharded model (HSDP); 1: shard over all ranks
    # what a backward pass computes again; selective: all but products and attention; none: fastest
    gradient_checkpointing: Literal["full", "selective", "none"] = "full"
    compile: bool = False  # compile the layers (GPU)
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    offload: Literal["none", "sampling", "always"] = "none"  # when weights and moments are on the host (GPU)
    lora_rank: int = 0  # rank of the actor's LoRA adapters, trained instead of it; 0: train the model
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
    ppo_epochs: int = 1  # passes over the responses of a step
    lr: float = 1e-6  # peak learning rate of the actor
    critic_lr: float = 1e-5  # peak learning rate of the critic
    critic_warmup: int = 0  # first steps: the critic learns with lambda 1, the actor does not
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # decay to 0 after the last step
    warmup_steps: int = 0  # steps of linear warm-up; the actor's begins after critic_warmup
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    gamma: float = 1.0  # discount of later rewards per token
    # without --lam_alpha and --critic_lam: lambda of GAE; 1: returns minus values, 0: one-step differences
    lam: float = 1.0
    critic_lam: float | None = None  # lambda of the critic's returns; None: the value of --lam
    # lambda of advantages: 1 - 1 / (lam_alpha * tokens), at least 0; None: --lam
    lam_alpha: float | None = None
    cliprange_value: float = 0.5  # how far a step may move a value before its gradient ends
    value_quantiles: int = 1  # quantiles of the return to learn; 1: its mean
    # with --value_quantiles above 1: weight of the quantiles' standard deviation in advantages
    uncertainty_bonus: float = 0.0
    policy_loss: str = "clip"  # clip; a name in algos/variants/, such as cispo; or FILE.py:NAME
    clip_ratio_low: float | None = None  # clip below 1 - this; None: default of the loss, of clip 0.2
    clip_ratio_high: float | None = None  # clip above 1 + this; None: default of the loss, of clip 0.2
    kl_coef: float = 0.0  # weight of the KL from the initial model in token rewards; 0: no KL
    kl_target: float | None = None  # with --kl_coef: KL per token that it is adapted to; None: it is fixed
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    positive_nll_coef: float = 0.0  # weight of -log p of correct responses: acc, else score, above 0
    rollout_is: Literal["token", "sequence"] | None = "token"  # importance weights, trainer / sampler
    rollout_is_threshold: float = 2.0  # with --rollout_is: upper bound of the weights
    # reject by this importance ratio; off_policy: negative responses that the policy has left
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None
    # with --rollout_rs: h keeps ratios from 1/h to h; two are smallest and largest; off_policy: its delta
    rollout_rs_threshold: tuple[float, ...] = ()
    # ---- rewards
    reward_manager: Literal["naive", "prime"] = "naive"  # prime: rewards run in processes of their own
    reward_fn: tuple[str, ...] = ("rewards",)  # FILE.py:NAME; rewards: by each row's data_source
    reward_weights: tuple[float, ...] = ()  # weights of reward_fn, then of reward_model; none: all 1
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

from data_prep.lib.cache import load_prompt_files, load_prompts
from data_prep.lib.images import load_processor, load_tokenizer
from data_prep.lib.templates import render, use_template, without_special
from rewards.manager import RewardManager, validation_summary
from rewards.manager.combined import load_rewards
from system import cpu, families
from system.attention import states_apart
from system.batches import (
    collate,
    distribute,
    micro_batches,
    on_every_rank,
    pad,
    split_micro_batches,
    store_logps,
    token_logps,
)
from system.gpu import compute_device, move, prepare_layers, send
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
    train_all,
    whole_weights,
    without_adapters,
)
from system.ranks import all_reduce, setup_distributed, sum_over_ranks
from system.run import Run, learning_rate
from system.sampler import answers, check_sampler, engine_options, score_rows

# ---- The mathematics -------------------------------------------------------------------
DUAL_CLIP = 3.0  # bound of the ratio where the advantage is negative


def token_rewards(score_n, kl_nt, mask_nt, kl_coef):
    """Minus kl_coef * KL on every token, plus the response's score on its last.

    Score 1, KL 0.1 0.2 0.3 of which the last is masked, coefficient 1 -> -0.1, 0.8, 0.
    """
    last_n1 = mask_nt.cumsum(-1).argmax(-1, keepdim=True)
    reward_nt = -kl_coef * kl_nt * mask_nt  # eq: ppo.kl_reward
    return reward_nt.scatter_add(-1, last_n1, score_n[:, None].to(reward_nt))


def gae(reward_nt, value_nt, mask_nt, gamma, lam):
    """GAE (1506.02438, eq. 16) -> adv_nt, not whitened, and return_nt = A + V.

    A masked token (tool output, padding) passes the V and A of its successor through; V after the end is 0.
    lam: a number, or one for each response.
    Rewards 0 0 1, values 0.5 0.6 0.7, gamma = lam = 1 -> A 0.5 0.4 0.3, returns 1 1 1.
    """
    adv_nt = torch.zeros_like(value_nt)
    mask_nt = mask_nt.bool()
    next_value_n = next_adv_n = torch.zeros_like(value_nt[:, 0])
    for t in reversed(range(value_nt.shape[1])):
        delta_n = reward_nt[:, t] + gamma * next_value_n - value_nt[:, t]  # eq: ppo.delta
        next_adv_n = torch.where(mask_nt[:, t], delta_n + gamma * lam * next_adv_n, next_adv_n)  # eq: ppo.gae
        next_value_n = torch.where(mask_nt[:, t], value_nt[:, t], next_value_n)
        adv_nt[:, t] = next_adv_n
    return adv_nt, adv_nt + value_nt


def adaptive_lam(mask_nt, alpha):
    """VAPO's lambda for l tokens, 1 - 1 / (alpha l), at least 0: alpha 0.05, l 40 -> 0.5."""
    return (1 - 1 / (alpha * mask_nt.sum(-1))).clamp(min=0)  # eq: ppo.lam_alpha


def masked_whiten(x_nt, mask_nt):
    """Zero mean, unit variance (unbiased) over the mask, all ranks; 0 elsewhere: 1 3 -> -0.71 0.71."""
    total, tokens = all_reduce([(x_nt * mask_nt).sum().item(), mask_nt.sum().item()])
    centred_nt = (x_nt - total / tokens) * mask_nt
    [squares] = all_reduce([(centred_nt**2).sum().item()])
    return centred_nt * (squares / max(tokens - 1, 1) + 1e-8) ** -0.5  # eq: ppo.whiten


def adapted(kl_coef, kl, target, n, horizon=10_000):
    """Weight of the KL after n responses with this KL: at most 20 % in `horizon` (1909.08593, 2.2)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    # CAREFUL: without the bound a step of over five times the horizon could make the weight negative
    return kl_coef * (1 + error * min(n, horizon) / horizon)  # eq: ppo.adaptive_kl


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


def nll_weights(rows, args):
    """Factors [N] that turn a mean over the tokens of an update into one over correct responses.

    A response is correct if its acc, or without acc its score, is above 0.
    Responses of 1, 5 and 2 tokens, the second wrong -> 8/3 0 8/3.
    """
    correct_n = torch.tensor([float(row["reward"].get("acc", row["reward"]["score"]) > 0) for row in rows])
    length_n = torch.tensor([float(row["length"]) for row in rows])
    responses = args.ppo_mini_batch_size * args.group_size
    weights = []
    for correct, length in zip(correct_n.split(responses), length_n.split(responses)):
        weights.append(correct * length.sum() / (correct * length).sum().clamp(min=1))
    return torch.cat(weights)


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
    """The loss of each token -> loss_nt, and what is reported, averaged over tokens as the loss is.

    Without old_logp_nt, which a single update does not need, the policy is its own old policy.
    """
    old_nt = batch.get("old_logp_nt", logp_nt.detach())
    loss_nt, clipped_nt, lower_nt = token_loss(logp_nt, old_nt, batch["adv_nt"], batch["mask_nt"])
    # difference 4 of the header: the sampler rounds differently from the trainer
    weight_nt = rollout_weights(args, logp_nt, batch)
    loss_nt = loss_nt * weight_nt
    nll_nt = -logp_nt * batch["nll_weight_nt"]
    means = dict(pg_loss=loss_nt, nll_loss=nll_nt)
    if args.entropy_coeff:  # else the entropy has no backward pass
        loss_nt = loss_nt - args.entropy_coeff * entropy_nt
    if args.positive_nll_coef:
        loss_nt = loss_nt + args.positive_nll_coef * nll_nt  # eq: ppo.positive_nll
    means |= dict(entropy=entropy_nt, ppo_kl=old_nt - logp_nt, rollout_rs_masked=weight_nt == 0)
    means |= dict(pg_clipfrac=clipped_nt, pg_clipfrac_lower=lower_nt)
    return loss_nt, means


def value_loss(value_ntq, old_value_ntq, return_nt, clip):
    """max(d(V), d(clip(V, V_old - c, V_old + c))): V gains nothing by going further than c.

    One V is the mean: d = (R - V)^2 / 2. Q of them are quantiles, with tau from 1 / 2Q to 1 - 1 / 2Q:
    d = max(tau (R - V), (tau - 1) (R - V)) (1710.10044, 3.1). Returns loss_nt, and the share of clipped V.
    V = 2, V_old = 1, R = 2, c = 0.5: the clipped value 1.5 decides, loss 0.125, and no gradient.
    """
    quantiles = value_ntq.shape[-1]
    held_ntq = value_ntq.clamp(old_value_ntq - clip, old_value_ntq + clip)
    error = return_nt[..., None] - torch.stack([value_ntq, held_ntq])
    plain_ntq, clip_ntq = error**2 / 2
    if quantiles > 1:
        tau_q = (torch.arange(quantiles, device=error.device) + 0.5) / quantiles
        plain_ntq, clip_ntq = torch.maximum(tau_q * error, (tau_q - 1) * error)  # eq: ppo.quantiles
    loss_nt = torch.maximum(plain_ntq, clip_ntq).mean(-1)  # eq: ppo.value_loss
    return loss_nt, (clip_ntq > plain_ntq).float().mean(-1)


def critic_loss(args, value_ntq, batch):
    """The critic's loss of each token -> loss_nt, and what is reported, averaged over tokens."""
    old_ntq = batch["value_nt"].reshape(value_ntq.shape)  # a rank may have no rows
    loss_nt, clipped_nt = value_loss(value_ntq, old_ntq, batch["return_nt"], args.cliprange_value)
    return loss_nt, dict(vf_loss=loss_nt, vf_clipfrac=clipped_nt, vpred_mean=value_ntq.mean(-1))


# ---- The step --------------------------------------------------------------------------
def advantages(rows, kl_coef, critic_lam, args):
    """Token rewards, advantages (whitened over all ranks) and returns of this rank's rows, [N, T].

    The rows get adv_t and return_t.
    """
    names = ["mask_t", "value_t"]
    if args.kl_coef:  # without it only some rows have old_logp_t
        names += ["old_logp_t", "ref_logp_t"]
    columns = [{name: row[name] for name in names} for row in rows]
    batch = collate(columns, "cpu")
    mask_nt = batch["mask_nt"].bool()
    value_ntq = batch["value_nt"].reshape(*mask_nt.shape, args.value_quantiles)
    value_nt = value_ntq.mean(-1)
    spread_nt = (value_ntq - value_nt[..., None]).square().mean(-1).sqrt()
    score_n = torch.tensor([row["reward"]["score"] for row in rows])
    kl_nt = torch.zeros(mask_nt.shape)
    if args.kl_coef:
        kl_nt = batch["old_logp_nt"] - batch["ref_logp_nt"]  # k1 (Schulman 2020)
    reward_nt = token_rewards(score_n, kl_nt, mask_nt, kl_coef)
    lam = args.lam
    if args.lam_alpha is not None:
        lam = adaptive_lam(mask_nt, args.lam_alpha)
    raw_adv_nt, _ = gae(reward_nt, value_nt, mask_nt, args.gamma, lam)
    _, return_nt = gae(reward_nt, value_nt, mask_nt, args.gamma, critic_lam)  # eq: ppo.critic_lam
    after_nt = nn.functional.pad(spread_nt, (0, 1))[:, 1:]  # of the state after a token
    raw_adv_nt = raw_adv_nt + args.uncertainty_bonus * after_nt  # eq: ppo.uncertainty
    adv_nt = masked_whiten(raw_adv_nt, mask_nt)
    for row, adv_t, return_t in zip(rows, adv_nt, return_nt):
        row["adv_t"] = adv_t[: row["length"]]
        row["return_t"] = return_t[: row["length"]]
    return dict(
        mask_nt=mask_nt,
        kl_nt=kl_nt,
        reward_nt=reward_nt,
        adv_nt=adv_nt,
        return_nt=return_nt,
        value_nt=value_nt,
        spread_nt=spread_nt,
    )


def update(model, optimizer, mini_batches, loss, name, args):
    """One optimizer step for each mini-batch of `distribute` -> mean metrics.

    model, loss, name: the policy, `actor_loss`, "actor", or the critic, `critic_loss`, "critic".
    """
    sums = defaultdict(float)
    norms = []
    for sequences, (tokens, _) in mini_batches * args.ppo_epochs:
        for rows in micro_batches(model, sequences, args.max_tokens_per_microbatch):
            columns = token_logps(model, rows, args.temperature)  # of the critic: values
            batch = collate(rows, columns[0].device)
            loss_nt, means = loss(*columns, batch)
            # tokens are of all ranks and micro-batches: no split of the work changes the gradient
            weight_nt = batch["mask_nt"] / tokens  # eq: grpo.aggregation
            # FSDP averages gradients over the ranks, but the tokens already count all ranks
            (weight_nt * loss_nt).sum().mul(dist.get_world_size()).backward()

            for term, x_nt in means.items():
                sums[term] += (weight_nt * x_nt.detach()).sum()
            if name == "actor":
                for row, logp_t in zip(rows, columns[0].detach()):
                    # of the first update: the old policy
                    row.setdefault("old_logp_t", logp_t[: row["length"]])

        norm = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip).full_tensor().item()
        norms.append(norm)
        if math.isfinite(norm):  # the norm over all ranks: they step or skip together
            optimizer.step()
        optimizer.zero_grad()

    metrics = {f"{name}/{term}": total / len(norms) for term, total in sum_over_ranks(sums).items()}
    metrics[f"{name}/grad_norm"] = np.mean(norms)
    metrics[f"{name}/skipped_updates"] = np.sum(~np.isfinite(norms))
    return metrics


def main(args):
    # ---- arguments and data: checked before anything slow
    args, token_loss = load_loss(args, clip=policy_loss)
    loss = partial(actor_loss, args, token_loss)
    loss_of_critic = partial(critic_loss, args)
    check_flags(args)
    check_critic(args)
    reward_tokenizers = check_reward_models(args)
    with Run(args) as run:
        tokenizer, manager, train_rows, val_rows, summary = load_data(args)
        steps_per_epoch = len(train_rows) // args.train_batch_size
        total_steps = args.total_steps or args.total_epochs * steps_per_epoch
        if args.critic_warmup >= total_steps:
            fail(f"--critic_warmup {args.critic_warmup}: the actor rests in all {total_steps} steps")
        run.plan(total_steps, summary)

        # ---- models: the engine first, while the GPU is empty; then it sleeps
        device, mesh = setup_distributed(args.hsdp_replicas)
        run.say("starting vLLM")
        engine = build_engine(args, device)
        run.say(f"loading {args.model}")
        policy = load_model(args, args.model, mesh, device, adapters_of(args))
        models = [policy]
        reference = policy
        if args.kl_coef and not args.lora_rank:  # with LoRA: the policy without its adapters
            reference = load_model(args, args.model, mesh, device, freeze)
            models.append(reference)
        critic = load_critic(args, mesh, device)
        optimizer = make_optimizer(policy, args.lr, args)
        critic_optimizer = make_optimizer(critic, args.critic_lr, args)
        reward_models = [load_reward_model(args, name, mesh, device) for name in args.reward_model]
        if reward_models:
            manager = ModelRewards(manager, reward_models, reward_tokenizers, args)
        # hf and critic are the directories that they have in a checkpoint
        parts = dict(hf=policy.lm, critic=critic.lm)
        run.load(parts, [optimizer, critic_optimizer], tokenizer, whole_weights)
        kl_coef = run.state.get("kl_coef", args.kl_coef)
        if args.offload == "sampling":  # they are on the GPU only while they are used
            move("cpu", [critic, *reward_models], critic_optimizer)
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
            for row, weight in zip(rows, nll_weights(rows, args)):
                row["nll_weight_t"] = weight.expand(row["length"])
            # ---- balance over the ranks
            updates = args.train_batch_size // args.ppo_mini_batch_size
            budget = args.max_tokens_per_microbatch
            packed = policy.packed and critic.packed
            mini_batches, own_rows, load = distribute(rows, updates, budget, packed)
            # ---- log-probs: those of the first mini-batch are made by its own update
            warming_up = step <= args.critic_warmup
            needed = mini_batches[1:]
            if args.kl_coef or warming_up:
                needed = mini_batches
            if needed:
                with timed(timing, "old_log_prob"):
                    store_logps(policy, needed, "old_logp_t", args.temperature, budget)
            if args.kl_coef:
                with timed(timing, "ref"), without_adapters(reference.lm):
                    store_logps(reference, mini_batches, "ref_logp_t", args.temperature, budget)
            # ---- the critic: values, advantages, and its update
            critic_lam = args.critic_lam
            if critic_lam is None:
                critic_lam = args.lam
            if warming_up:  # with a lower lambda it would learn its own first values
                critic_lam = 1.0
            schedule = args.warmup_steps, args.lr_schedule
            critic_lr = learning_rate(args.critic_lr, step, run.total, *schedule)
            critic_optimizer.param_groups[0]["lr"] = critic_lr
            with at_work(critic, critic_optimizer, args):
                with timed(timing, "values"):
                    store_logps(critic, mini_batches, "value_t", args.temperature, budget)
                with timed(timing, "adv"):
                    step_nt = advantages(own_rows, kl_coef, critic_lam, args)
                with timed(timing, "update_critic"):
                    metrics = update(critic, critic_optimizer, mini_batches, loss_of_critic, "critic", args)
            metrics |= {"critic/lr": critic_lr, "actor/reward_kl_penalty_coeff": kl_coef}
            metrics |= critic_metrics(rows, step_nt, args)
            # ---- the actor
            if not warming_up:
                if step == args.critic_warmup + 1:
                    optimizer.state.clear()  # a checkpoint of the warm-up left zeros that count as a step
                # warm-up and decay count only steps in which the actor learns
                own_step = step - args.critic_warmup
                own_total = run.total - args.critic_warmup
                lr = learning_rate(args.lr, own_step, own_total, *schedule)
                optimizer.param_groups[0]["lr"] = lr
                with timed(timing, "update_actor"):
                    metrics |= update(policy, optimizer, mini_batches, loss, "actor", args)
                metrics["actor/lr"] = lr
                if args.kl_target:
                    kl = metrics["actor/reward_kl_penalty"]
                    kl_coef = adapted(kl_coef, kl, args.kl_target, len(rows))
            metrics |= check_sampler(own_rows, partial(rollout_weights, args), limit, step)
            run.updated(kl_coef=kl_coef)
            # ---- validation
            if val_rows and run.due(args.test_freq):
                with timed(timing, "testing"):
                    metrics |= validate()
            # ---- metrics
            timing["step"] = run.elapsed()
            metrics |= step_metrics(rows, load, policy, timing, args.compute_dtype)
            metrics["training/epoch"] = epoch
            run.log(metrics, score="critic/score/mean", length="response_length/mean")
            run.dump(rows)
            # ---- checkpoint, after the metrics: each checkpoint has its metrics
            if run.due(args.save_freq):
                run.save()


# ---- The system: data, FSDP2 and vLLM; the rest of it is in system/ ------------------------
def load_data(args):
    """-> tokenizer, reward manager, rows of training and of validation, a line about them."""
    rules = args.reward_fn
    weights = args.reward_weights
    if args.reward_model:  # whose weights are the last
        rules = rules or ("none",)
        weights = weights[: len(args.reward_fn)]
    with one_line_errors():
        families.refuse_images(args.model, (*args.train_files, *args.val_files))
        check_model(args.model, args.attn_implementation, adapters_of(args))
        tokenizer = load_processor(args.model)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        reward_fn = load_rewards(rules, weights, args.group_size)
        manager = RewardManager(args.reward_manager, reward_fn, timeout_s=args.reward_timeout_s)
        data = args.train_files, args.val_files, args.max_prompt_length
        train_rows, val_rows, summary = load_prompt_files(tokenizer, args.train_batch_size, *data)
        manager.check(train_rows, val_rows)
    return tokenizer, manager, train_rows, val_rows, summary


def check_flags(args):
    """Stop on flags that cannot work together."""
    rules = len(args.reward_fn)
    models = len(args.reward_model)
    weights = len(args.reward_weights)
    if models and weights not in (0, rules + models):
        given = f"{weights} --reward_weights for {rules} --reward_fn and {models} --reward_model"
        fail(f"{given}: give one for each")
    if args.val_files and not rules:
        fail("--val_files without --reward_fn: validation scores by rules, not by reward models")
    length = args.max_response_length
    if args.lam_alpha and 1 / args.lam_alpha >= length:
        zero = f"lambda is 0 up to {1 / args.lam_alpha:g} tokens"
        fail(f"--lam_alpha {args.lam_alpha}: {zero}, a response has {length}")


def check_critic(args):
    """Stop on a --critic_model that cannot judge what --model writes."""
    name = args.critic_model or args.model
    flag = f"--critic_model {name}"
    with one_line_errors():
        config = AutoConfig.from_pretrained(name)
        families.auto_class(config, scores=True)  # stops on weights that cannot be made whole
        known = config.get_text_config().vocab_size
        needed = AutoConfig.from_pretrained(args.model).get_text_config().vocab_size
        if known < needed:
            fail(f"{flag} knows {known} tokens, --model {args.model} {needed}")
        if is_classifier(config) and config.num_labels != args.value_quantiles:
            given = f"{config.num_labels} values"
            fail(f"{flag} gives {given}, --value_quantiles is {args.value_quantiles}")
        ours = load_tokenizer(args.model).get_vocab()
    theirs = {}
    with suppress(ValueError, OSError):  # critic/ of a checkpoint has no tokenizer
        theirs = load_tokenizer(name).get_vocab()
    other = sorted(token for token, number in ours.items() if theirs.get(token, number) != number)
    if other:
        problem = f"{len(other)} tokens have other numbers, such as {other[0]!r}"
        fail(f"{flag} has another vocabulary: {problem}")


def is_classifier(config):
    """Whether a model has a head for scores or values."""
    return "SequenceClassification" in str(config.architectures)


def check_reward_models(args):
    """Stop on reward models that cannot work -> their tokenizers."""
    tokenizers = []
    with one_line_errors():
        for name in args.reward_model:
            tokenizer = load_tokenizer(name)
            config = AutoConfig.from_pretrained(name)
            families.auto_class(config, scores=True)  # stops on weights that cannot be made whole
            if config.num_labels != 1:
                fail(f"--reward_model {name} gives {config.num_labels} numbers, not 1 score")
            if tokenizer.chat_template is None:
                fail(f"--reward_model {name}: its tokenizer has no chat template")
            load_prompts(args.train_files, tokenizer, math.inf)  # its chat template must take them too
            tokenizers.append(tokenizer)
    return tokenizers


def adapters_of(args):
    """What is trained: the model, or adapters with --lora_rank."""
    return partial(add_adapters, rank=args.lora_rank, alpha=args.lora_alpha, seed=args.seed)


def load_model(args, path, mesh, device, set_trained, root=TokenLogps, **changes):
    """The model in its root module, sharded by FSDP2. Rank 0 reads the weights for all."""
    lm, full, packed = read_model(path, args.attn_implementation, set_trained, **changes)
    prepare_layers(lm, args.gradient_checkpointing, args.compile, eager=states_apart(lm))
    policy = root(lm, packed)
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


class TokenValues(TokenLogps):
    """A critic, called as TokenLogps: the value of the state in which a target was sampled."""

    def forward(self, where, target, temperature, **inputs):
        """-> values [L, Q], float32, in place of log-probs."""
        return [self.lm.score(self.hidden(where, inputs)).float()]


def load_critic(args, mesh, device):
    """The critic, sharded. A new value head starts at 0: its first advantages are the returns."""
    path = args.critic_model or args.model
    changes = dict(num_labels=args.value_quantiles)
    critic = load_model(args, path, mesh, device, train_all, TokenValues, **changes)
    if not is_classifier(critic.lm.config):
        nn.init.zeros_(critic.lm.score.weight)
    return critic


def unwrapped(lm, packed):
    """In place of `TokenLogps`: the model with its own forward, which finds the last token."""
    return lm


def load_reward_model(args, name, mesh, device):
    """A reward model, sharded. Its rows are padded."""
    model = load_model(args, name, mesh, device, freeze, unwrapped, num_labels=1)
    model.set_attn_implementation(args.attn_implementation)  # not "packed"
    return model.eval()


def make_optimizer(model, lr, args):
    """AdamW of what is trained of a model."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=args.weight_decay, fused=True)


@contextmanager
def at_work(critic, optimizer, args):
    """With --offload sampling the critic is on the GPU only while the block lasts."""
    if args.offload == "sampling":
        move("cuda", [critic], optimizer)
    yield
    if args.offload == "sampling":
        move("cpu", [critic], optimizer)


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
    weights = whole_weights(lm, config.dtype, families.unused_weights(lm, False))
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


class ModelRewards:
    """A reward manager: adds weighted scores of models to those of rules."""

    def __init__(self, rules, models, tokenizers, args):
        self.rules = rules
        self.models = models
        self.tokenizers = tokenizers
        self.args = args
        # those of the rules come first
        self.weights = args.reward_weights[len(args.reward_fn) :] or [1.0] * len(models)

    def score_responses(self, rows, tokenizer):
        rows = self.rules.score_responses(rows, tokenizer)
        names = score_names(len(self.models))[1:]
        for name, weight, model, own in zip(names, self.weights, self.models, self.tokenizers):
            results = model_scores(model, own, rows, self.args)
            rows = add_scores(rows, results, name, weight)
        return rows


def score_names(models):
    """rules model, or with several models rules model model_2 model_3."""
    return ["rules", "model"] + [f"model_{i}" for i in range(2, models + 1)]


@torch.no_grad()
def model_scores(model, tokenizer, rows, args):
    """A reward model's result for each of this rank's rows: a score, or 0 and why it failed.

    CAREFUL: it has ids of its own. So the conversation goes through its own chat template.
    """
    texts = []
    for row in rows:
        answer = dict(role="assistant", content=row["sampled"]["solution_str"])
        chat = without_special([*row["prompt"], answer], tokenizer)  # a response must not write a turn
        text = render(chat, tokenizer, row.get("tools"), prompted=False)
        texts.append(tokenizer.encode(text, add_special_tokens=False))

    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    limit = min(positions, args.max_tokens_per_microbatch)
    fitting = [i for i, text in enumerate(texts) if len(text) <= limit]
    pad_id = config.pad_token_id  # without one: one row at a time
    budget = 0 if pad_id is None else args.max_tokens_per_microbatch
    parts = split_micro_batches([len(texts[i]) for i in fitting], budget, one_row=False)
    score_n = [math.nan] * len(rows)
    if args.offload == "sampling":
        model.to(compute_device())
    for part in on_every_rank(model, parts):
        numbers = [fitting[i] for i in part]
        batch = [torch.tensor(texts[i]) for i in numbers]
        if not batch:  # a dummy: a forward is a collective
            batch = [torch.tensor([0])]
        input_ids = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=pad_id or 0)
        mask = pad([torch.ones_like(text) for text in batch])
        logits_n1 = model(input_ids=send(input_ids), attention_mask=send(mask)).logits
        for i, score in zip(numbers, logits_n1[:, 0].tolist()):
            score_n[i] = score
    if args.offload == "sampling":
        model.to("cpu")

    results = []
    for text, score in zip(texts, score_n):
        result = dict(score=score)
        if not math.isfinite(score):
            given = f"the reward model gives {score} for a conversation of {len(text)} tokens"
            result = dict(score=0.0, failure=f"ValueError: {given}; it takes {limit}")
        results.append(result)
    return results


def add_scores(rows, results, name, weight):
    """Rows with the results of a reward model, as a part of the score with that name."""
    added = []
    for row, result in zip(rows, results):
        reward = dict(row["reward"])
        reward.setdefault("score/rules", reward["score"])  # before the first model
        reward[f"score/{name}"] = result["score"]
        reward["score"] += weight * result["score"]
        if "failure" in result:
            reward["failure"] = result["failure"]
        added.append(row | dict(reward=reward))
    return added


def moments(x):
    """Mean, variance, largest and smallest of the numbers of all ranks."""
    total, count = all_reduce([x.sum(), len(x)])
    [squares] = all_reduce([((x - total / count) ** 2).sum()])
    ends = [-math.inf, -math.inf]
    if len(x):
        ends = [x.max(), -x.min()]
    top, bottom = all_reduce(ends, dist.ReduceOp.MAX)
    return total / count, squares / count, top, -bottom


def critic_metrics(rows, step_nt, args):
    """What a step's returns are, and how much of them the values explain."""
    mask_nt = step_nt["mask_nt"]
    returns = step_nt["return_nt"][mask_nt]
    values = step_nt["value_nt"][mask_nt]
    columns = dict(
        rewards=step_nt["reward_nt"].sum(-1),
        advantages=step_nt["adv_nt"][mask_nt],
        returns=returns,
        values=values,
        values_std=step_nt["spread_nt"][mask_nt],
    )
    metrics = {}
    for name, x in columns.items():
        mean, _, top, bottom = moments(x)
        metrics[f"critic/{name}/mean"] = mean
        metrics[f"critic/{name}/max"] = top
        metrics[f"critic/{name}/min"] = bottom
    if args.reward_model:
        for name in score_names(len(args.reward_model)):
            metrics |= stats(f"critic/score_{name}", [row["reward"][f"score/{name}"] for row in rows])
    unexplained = moments(returns - values)[1]
    variance = moments(returns)[1]
    metrics["critic/vf_explained_var"] = 1 - unexplained / (variance + 1e-8)
    metrics["actor/reward_kl_penalty"] = moments(step_nt["kl_nt"][mask_nt])[0]
    return metrics


if __name__ == "__main__":
    main(Args(**flags))
