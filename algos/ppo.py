"""PPO (arXiv 1707.06347, for language models 2203.02155): maximise E[min(r A, clip(r, 1-eps, 1+eps) A)],
where A is the generalised advantage estimate (1506.02438) from a learned critic.

Differences from the papers with the default flags:
1. Actor and critic are two models.
2. There is no KL term (`--kl_coef` adds it).
3. Both losses are means over all tokens of the optimizer step, not means over responses.
4. Truncated importance sampling corrects the sampler's rounding (`--rollout_is`, Yao et al. 2025).
5. Dual clip bounds the loss where the advantage is negative (1912.09729, eq. 5).
What VAPO (2504.05118) adds for long responses is behind flags: docs/algorithms/vapo.md.

CPU:        python algos/ppo.py --model models/tiny --train_files data/train.parquet --output_dir runs/ppo
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/ppo.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/algorithms/ppo.md
"""

import math
import sys
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, parse, refuse
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
    lora_alpha: float = 16  # LoRA scale: the output of the adapters times lora_alpha / lora_rank
    # ---- rollout
    group_size: int = 1  # responses to each prompt
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
    lr: float = 1e-6  # peak learning rate of the actor
    critic_lr: float = 1e-5  # peak learning rate of the critic
    critic_warmup: int = 0  # first steps: the critic learns with lambda 1, the actor does not
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # decay to 0 after the last step
    warmup_steps: int = 0  # steps of linear warm-up; the actor's begins after critic_warmup
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm
    # ---- algorithm
    gamma: float = 1.0  # discount of later rewards per token
    lam: float = 1.0  # lambda of GAE; 1: returns minus values, 0: one-step differences
    critic_lam: float | None = None  # lambda of the critic's returns; None: the value of --lam
    # lambda of advantages: 1 - 1 / (lam_alpha * tokens), at least 0; None: --lam
    lam_alpha: float | None = None
    cliprange_value: float = 0.5  # how far a step may move a value before its gradient ends
    value_quantiles: int = 1  # quantiles of the return to learn; 1: its mean
    uncertainty_bonus: float = 0.0  # weight of the quantiles' standard deviation in advantages
    policy_loss: str = "clip"  # clip; a name in algos/variants/, such as cispo; or FILE.py:NAME
    clip_ratio_low: float | None = None  # clip below 1 - this; None: default of the loss, of clip 0.2
    clip_ratio_high: float | None = None  # clip above 1 + this; None: default of the loss, of clip 0.2
    kl_coef: float = 0.0  # weight of the KL from the initial model in token rewards; 0: no KL
    kl_target: float | None = None  # KL per token that kl_coef is adapted to; None: it is fixed
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    positive_nll_coef: float = 0.0  # weight of -log p of correct responses: acc, else score, above 0
    rollout_is: Literal["token", "sequence"] | None = "token"  # importance weights, trainer / sampler
    rollout_is_threshold: float = 2.0  # upper bound of the importance weights
    # reject by this importance ratio; off_policy: negative responses that the policy has left
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None
    # one value h keeps ratios from 1/h to h; two are smallest and largest; off_policy: the paper's delta
    rollout_rs_threshold: tuple[float, ...] = ()
    # ---- rewards
    reward_manager: Literal["naive", "prime"] = "naive"  # prime: rewards run in processes of their own
    reward_fn: tuple[str, ...] = ("rewards",)  # FILE.py:NAME; rewards: by each row's data_source
    reward_weights: tuple[float, ...] = ()  # weights of reward_fn, then of reward_model; none: all 1
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
from transformers import AutoConfig
from transformers.utils import logging

from data_prep.lib.cache import load_prompt_files, load_prompts
from data_prep.lib.images import load_processor, load_tokenizer, request
from data_prep.lib.special import without_special
from data_prep.lib.templates import render, use_template
from rewards.manager import RewardManager, check_failures, demote_failures, validation_summary
from rewards.manager.combined import load_rewards
from system import cpu, families
from system.gpu import compute_device, move, prepare_layers, send
from system.log_probs import log_probs
from system.metrics import stats, step_metrics, timed
from system.run import Run, all_reduce, learning_rate, setup_distributed

# ---- The mathematics -------------------------------------------------------------------
DUAL_CLIP = 3.0  # bound of the ratio where the advantage is negative


def token_rewards(score_n, kl_nt, mask_nt, kl_coef):
    """Minus kl_coef * KL on every token, plus the response's score on its last.

    Score 1, KL 0.1 0.2 0.3 of which the last is masked, coefficient 1 -> -0.1, 0.8, 0.
    """
    last_n1 = mask_nt.long().cumsum(-1).argmax(-1, keepdim=True)
    reward_nt = -kl_coef * kl_nt * mask_nt  # eq: ppo.kl_reward
    return reward_nt.scatter_add(-1, last_n1, score_n[:, None].to(reward_nt))


def gae(reward_nt, value_nt, mask_nt, gamma, lam):
    """GAE (1506.02438, eq. 16) -> adv_nt, not whitened, and return_nt = A + V.

    A masked token (tool output, padding) passes the V and A of its successor through; V after the end is 0.
    lam: a number, or one for each response.
    Rewards 0 0 1, values 0.5 0.6 0.7, gamma = lam = 1 -> A 0.5 0.4 0.3, returns 1 1 1.
    """
    adv_nt, mask_nt = torch.zeros_like(value_nt), mask_nt.bool()
    next_value_n = next_adv_n = torch.zeros_like(value_nt[:, 0])
    for t in reversed(range(value_nt.shape[1])):
        delta_n = reward_nt[:, t] + gamma * next_value_n - value_nt[:, t]  # eq: ppo.delta
        next_adv_n = torch.where(mask_nt[:, t], delta_n + gamma * lam * next_adv_n, next_adv_n)  # eq: ppo.gae
        next_value_n = torch.where(mask_nt[:, t], value_nt[:, t], next_value_n)
        adv_nt[:, t] = next_adv_n
    return adv_nt, adv_nt + value_nt


def adaptive_lam(mask_nt, alpha):
    """VAPO's lambda for l tokens, 1 - 1 / (alpha l), at least 0: alpha 0.05, l 40 -> 0.5."""
    return (1 - 1 / (alpha * mask_nt.sum(-1).clamp(min=1))).clamp(min=0)  # eq: ppo.lam_alpha


def masked_whiten(x_nt, mask_nt):
    """Zero mean, unit variance (unbiased) over the mask, all ranks; 0 elsewhere: 1 3 -> -0.71 0.71."""
    mask_nt = mask_nt.to(x_nt)
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


def nll_weights(rows, args):
    """Factors [N] that turn a mean over the tokens of an update into one over correct responses.

    A response is correct if its acc, or without acc its score, is above 0.
    Responses of 1, 5 and 2 tokens, the second wrong -> 8/3 0 8/3.
    """
    correct_n = torch.tensor([float(row["reward"].get("acc", row["reward"]["score"]) > 0) for row in rows])
    length_n = torch.tensor([float(row["length"]) for row in rows])
    weights, responses = [], args.ppo_mini_batch_size * args.group_size
    for correct, length in zip(correct_n.split(responses), length_n.split(responses)):
        weights.append(correct * length.sum() / (correct * length).sum().clamp(min=1))
    return torch.cat(weights)


def actor_loss(args, logp_nt, entropy_nt, batch):
    """The loss of each token -> loss_nt, and what is reported, averaged over tokens as the loss is.

    Without old_logp_nt, which a single update does not need, the policy is its own old policy.
    """
    mask_nt, adv_nt = batch["mask_nt"], batch["adv_nt"]
    old_nt = batch.get("old_logp_nt", logp_nt.detach())
    loss_nt, clipped_nt, lower_nt = named_loss(args, policy_loss)(logp_nt, old_nt, adv_nt, mask_nt)
    # difference 4 of the header: the sampler rounds differently from the trainer
    weight_nt = rollout_weights(args, logp_nt, old_nt, batch["rollout_logp_nt"], mask_nt, adv_nt)
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
def advantages(rows, kl_coef, args):
    """Token rewards, advantages (whitened over all ranks) and returns of this rank's rows, [N, T].

    The rows get adv_t and return_t.
    """
    batch = collate(rows, "cpu")
    mask_nt = batch["mask_nt"].bool()
    value_ntq = batch["value_nt"].reshape(*mask_nt.shape, args.value_quantiles)
    value_nt = value_ntq.mean(-1)
    spread_nt = (value_ntq - value_nt[..., None]).square().mean(-1).sqrt()
    score_n = torch.tensor([row["reward"]["score"] for row in rows])
    kl_nt = torch.zeros(mask_nt.shape)
    if args.kl_coef:
        kl_nt = batch["old_logp_nt"] - batch["ref_logp_nt"]  # k1 (Schulman 2020)
    reward_nt = token_rewards(score_n, kl_nt, mask_nt, kl_coef)
    lam = args.lam if args.lam_alpha is None else adaptive_lam(mask_nt, args.lam_alpha)
    critic_lam = args.lam if args.critic_lam is None else args.critic_lam
    raw_adv_nt, _ = gae(reward_nt, value_nt, mask_nt, args.gamma, lam)
    _, return_nt = gae(reward_nt, value_nt, mask_nt, args.gamma, critic_lam)  # eq: ppo.critic_lam
    after_nt = nn.functional.pad(spread_nt, (0, 1))[:, 1:]  # of the state after a token
    raw_adv_nt = raw_adv_nt + args.uncertainty_bonus * after_nt  # eq: ppo.uncertainty
    adv_nt = masked_whiten(raw_adv_nt, mask_nt)
    for row, adv_t, return_t in zip(rows, adv_nt, return_nt):
        row |= dict(adv_t=adv_t[: row["length"]], return_t=return_t[: row["length"]])
    batch |= dict(mask_nt=mask_nt, kl_nt=kl_nt, reward_nt=reward_nt, adv_nt=adv_nt, return_nt=return_nt)
    return batch | dict(value_nt=value_nt, spread_nt=spread_nt)


def update(model, optimizer, mini_batches, token_loss, name, args):
    """One optimizer step for each mini-batch -> metrics, averaged over the steps; see `distribute`.

    model, token_loss, name: the policy, actor_loss, "actor", or the critic, critic_loss, "critic".
    """
    sums, norms = defaultdict(float), []
    for sequences, (tokens, _) in mini_batches * args.ppo_epochs:
        for rows in micro_batches(model, sequences, args):
            columns = token_logps(model, rows, args)  # log-probs and entropies; of the critic: values
            batch = collate(rows, columns[0].device)
            loss_nt, means = token_loss(args, *columns, batch)
            # tokens are of all ranks and micro-batches: no split of the work changes the gradient
            weight_nt = batch["mask_nt"] / tokens  # eq: grpo.aggregation
            # FSDP averages gradients over the ranks, but the tokens already count all ranks
            loss = (weight_nt * loss_nt).sum() * dist.get_world_size()
            loss.backward()
            for term, x_nt in means.items():
                sums[term] += (weight_nt * x_nt.detach()).sum()
            if name == "actor":
                for row, logp_t in zip(rows, columns[0].detach()):
                    if "old_logp_t" not in row:  # of the first update; `check_sampler` reads them
                        row["old_logp_t"] = logp_t[: row["length"]]
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip).full_tensor().item()
        norms.append(norm)
        if math.isfinite(norm):  # the norm over all ranks: they step or skip together
            optimizer.step()
        optimizer.zero_grad()
    totals = all_reduce(torch.stack([*sums.values()]).tolist())
    metrics = {f"{name}/{term}": total / len(norms) for term, total in zip(sums, totals)}
    return metrics | {
        f"{name}/grad_norm": np.mean(norms),
        f"{name}/skipped_updates": np.sum(~np.isfinite(norms)),
    }


def main(args):
    # ---- arguments and data: checked before anything slow
    args = with_defaults(args, clip=policy_loss)
    reward_tokenizers = check_models(args)
    run = Run(args)
    tokenizer, manager, train_rows, val_rows, summary = load_data(rules_alone(args))
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch
    if args.critic_warmup >= total_steps:
        fail(f"--critic_warmup {args.critic_warmup}: the actor rests in all {total_steps} steps")

    # ---- models: the engine first, while the GPU is empty; then it sleeps
    device, mesh = setup_distributed(args.hsdp_replicas)
    engine = build_engine(args, device)
    policy, reference, critic, reward_models = load_all(args, mesh, device)
    models = [policy] if reference is policy else [policy, reference]
    if reward_models:
        manager = ModelRewards(manager, [*zip(reward_models, reward_tokenizers)], args, device)
    optimizers = [make_optimizer(*x, args) for x in ((policy, args.lr), (critic, args.critic_lr))]
    optimizer, critic_optimizer = optimizers
    # hf and critic are the directories that they have in a checkpoint
    state = run.load(dict(hf=policy.lm, critic=critic.lm), optimizers, tokenizer, whole_weights)
    kl_coef = args.kl_target and state.get("kl_coef") or args.kl_coef
    if args.offload == "sampling":  # they are on the GPU only while they are used
        move("cpu", [critic, *reward_models], critic_optimizer)
    run.start(total_steps, summary, policy.lm)
    sampling = dict(temperature=args.temperature, top_p=args.top_p, stop_token_ids=[tokenizer.eos_token_id])

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
            rows = rollout(engine, args, prompts, step, args.group_size, **sampling)
        # ---- reward: from here on every rank has the rows of all ranks
        with timed(timing, "reward"):
            rows = score_rows(rows, manager, tokenizer)
        # ---- balance over the ranks
        mini_batches, own_rows, load = distribute(rows, policy.packed and critic.packed, args)
        # ---- log-probs: if no KL needs them, those of the first mini-batch are made by its own update
        warming_up = step <= args.critic_warmup
        needed = mini_batches if args.kl_coef or warming_up else mini_batches[1:]
        if needed:
            with timed(timing, "old_log_prob"):
                store_logps(policy, needed, "old_logp_t", args)
        if args.kl_coef:
            with timed(timing, "ref"), without_adapters(reference.lm):
                store_logps(reference, mini_batches, "ref_logp_t", args)
        # ---- the critic: values, advantages, and its update
        with at_work(critic, critic_optimizer, args):
            with timed(timing, "values"):
                store_logps(critic, mini_batches, "value_t", args)
            with timed(timing, "adv"):
                # with a lower lambda a critic that warms up would learn its own first values
                lambdas = replace(args, critic_lam=1.0) if warming_up else args
                step_nt = advantages(own_rows, kl_coef, lambdas)
                for row, weight in zip(rows, nll_weights(rows, args)):
                    row["nll_weight_t"] = weight.expand(row["length"])
            schedule = args.warmup_steps, args.lr_schedule
            critic_lr = learning_rate(args.critic_lr, step, total_steps, *schedule)
            critic_optimizer.param_groups[0]["lr"] = critic_lr
            with timed(timing, "update_critic"):
                metrics = update(critic, critic_optimizer, mini_batches, critic_loss, "critic", args)
        # ---- the actor
        if not warming_up:
            if step == args.critic_warmup + 1:
                optimizer.state.clear()  # a checkpoint of the warm-up left zeros that count as a step
            # warm-up and decay count only steps in which the actor learns
            own = step - args.critic_warmup, total_steps - args.critic_warmup
            lr = learning_rate(args.lr, *own, *schedule)
            optimizer.param_groups[0]["lr"] = lr
            with timed(timing, "update_actor"):
                metrics |= update(policy, optimizer, mini_batches, actor_loss, "actor", args)
            metrics["actor/lr"] = lr
        metrics |= {"critic/lr": critic_lr, "actor/reward_kl_penalty_coeff": kl_coef}
        metrics |= critic_metrics(rows, step_nt, args)
        if args.kl_target and not warming_up:
            kl_coef = adapted(kl_coef, metrics["actor/reward_kl_penalty"], args.kl_target, len(rows))
        run.updated(kl_coef=kl_coef)
        metrics |= check_sampler(policy, own_rows, args, step)
        # ---- validation
        if val_rows and run.due(args.test_freq):
            with timed(timing, "testing"):
                metrics |= validate()
        # ---- metrics
        timing["step"] = run.elapsed()
        metrics |= step_metrics(rows, load, policy, timing, args.compute_dtype) | {"training/epoch": epoch}
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
# `make fix-copies FROM=algos/ppo.py` carries a change there to them.


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
def load_model(args, mesh, device, set_trained, root, **changes):
    """The model in its root module, sharded by FSDP2. Rank 0 reads the weights for all.

    set_trained: decides what is trained. That is float32; the rest has the dtype of its files.
    """
    config, attention = read_config(args, **changes)
    auto = families.auto_class(config, scores="num_labels" in changes)  # with a head for scores
    original_dtype = config.dtype or torch.float32
    full = None if dist.get_rank() else families.from_files(auto, args.model, **changes)
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
    if full and lm.can_generate():  # saved with the weights: it may name more EOS tokens
        lm.generation_config = full.generation_config
    return policy


def read_config(args, **changes):
    """The model's configuration, without dropout, and its attention: "packed" if texts share a row."""
    logging.disable_progress_bar()  # of transformers
    config = AutoConfig.from_pretrained(args.model, **changes)
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


def freeze(lm, args):
    """Train nothing."""
    lm.requires_grad_(False)


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


@contextmanager
def without_adapters(lm):
    """The model without its adapters, as it was before training, while the block lasts."""
    layers = [layer for layer in lm.modules() if hasattr(layer, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True  # CAREFUL: peft's enable_adapters(False) also freezes them
    yield
    for layer in layers:
        layer._disable_adapters = False


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
    batches = split_micro_batches(lengths, args.max_tokens_per_microbatch, policy.packed)
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


# critic, reward models and their metrics
class TokenValues(TokenLogps):
    """A critic, called as TokenLogps: the value of the state in which a target was sampled."""

    def forward(self, where, target, args, **inputs):
        """-> values [L, Q], float32, in place of log-probs."""
        return [self.lm.score(self.hidden(where, inputs)).float()]


def check_models(args):
    """Stop on models that cannot work -> the reward models' tokenizers."""
    rules, models, weights = len(args.reward_fn), len(args.reward_model), len(args.reward_weights)
    given = f"{weights} --reward_weights for {rules} --reward_fn and {models} --reward_model"
    not_each = models and weights not in (0, rules + models)
    no_rule = args.val_files and not rules
    alpha, length = args.lam_alpha, args.max_response_length
    zero = 1 / alpha if alpha else 0  # tokens with lambda 0
    refuse(
        (zero >= length, f"--lam_alpha {alpha}: lambda is 0 up to {zero:g} tokens, a response has {length}"),
        (not_each, f"{given}: give one for each"),
        (no_rule, "--val_files without --reward_fn: validation scores by rules, not by reward models"),
    )
    try:
        names = args.critic_model or args.model, args.model
        configs = [AutoConfig.from_pretrained(name) for name in names]
        families.auto_class(configs[0], scores=True)  # stops on weights that cannot be made whole
        known, needed = [config.get_text_config().vocab_size for config in configs]
        if known < needed:
            fail(f"--critic_model {args.critic_model} knows {known} tokens, --model {args.model} {needed}")
        values, wanted = configs[0].num_labels, args.value_quantiles
        if "SequenceClassification" in str(configs[0].architectures) and values != wanted:
            fail(f"--critic_model {args.critic_model} gives {values} values, --value_quantiles is {wanted}")
        ours = load_tokenizer(args.model).get_vocab()
        theirs = {}
        with suppress(ValueError, OSError):  # critic/ of a checkpoint has no tokenizer
            theirs = load_tokenizer(args.critic_model or args.model).get_vocab()
        other = sorted(token for token, number in ours.items() if theirs.get(token, number) != number)
        if other:
            problem = f"{len(other)} tokens have other numbers, such as {other[0]!r}"
            fail(f"--critic_model {args.critic_model} has another vocabulary: {problem}")
        tokenizers = [load_tokenizer(name) for name in args.reward_model]
        for name, tokenizer in zip(args.reward_model, tokenizers):
            config = AutoConfig.from_pretrained(name)
            families.auto_class(config, scores=True)  # stops on weights that cannot be made whole
            if config.num_labels != 1:
                fail(f"--reward_model {name} gives {config.num_labels} numbers, not 1 score")
            if tokenizer.chat_template is None:
                fail(f"--reward_model {name}: its tokenizer has no chat template")
            load_prompts(args.train_files, tokenizer, math.inf)  # its chat template must take them too
    except (ValueError, OSError) as error:
        fail(" ".join(str(error).split()))
    return tokenizers


def load_all(args, mesh, device):
    """Policy, reference of the KL (if there is none, the policy), critic and reward models."""
    reference = policy = load_model(args, mesh, device, add_adapters, TokenLogps)
    if args.kl_coef and not args.lora_rank:  # with LoRA: the policy without its adapters
        reference = load_model(args, mesh, device, freeze, TokenLogps)
    critic, reward_models = load_critic(args, mesh, device), load_reward_models(args, mesh, device)
    return policy, reference, critic, reward_models


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


def load_critic(args, mesh, device):
    """The critic, sharded. A new value head starts at 0: its first advantages are the returns."""
    args = replace(args, lora_rank=0, model=args.critic_model or args.model)
    critic = load_model(args, mesh, device, add_adapters, TokenValues, num_labels=args.value_quantiles)
    if "SequenceClassification" not in str(critic.lm.config.architectures):
        nn.init.zeros_(critic.lm.score.weight)
    return critic


def unwrapped(lm, packed):
    """In place of `TokenLogps`: the model with its own forward, which finds the last token."""
    return lm


def load_reward_models(args, mesh, device):
    """The reward models, sharded. Their rows are padded."""
    models = []
    for name in args.reward_model:
        own = replace(args, model=name, lora_rank=0)
        model = load_model(own, mesh, device, freeze, unwrapped, num_labels=1)
        model.set_attn_implementation(args.attn_implementation)  # not "packed"
        models.append(model.eval())
    return models


def rules_alone(args):
    """Arguments without reward models, whose weights are the last."""
    if not args.reward_model:
        return args
    weights = args.reward_weights[: len(args.reward_fn)]
    return replace(args, reward_fn=args.reward_fn or ("none",), reward_weights=weights)


class ModelRewards:
    """A reward manager: adds scores of models, each a (model, tokenizer), to those of rules."""

    def __init__(self, rules, models, args, device):
        self.rules, self.models, self.args, self.device = rules, models, args, device

    def score_responses(self, rows, tokenizer):
        rows = self.rules.score_responses(rows, tokenizer)
        results = [model_scores(*model, rows, self.args, self.device) for model in self.models]
        return add_model_scores(rows, results, self.args)


def response_mask(lengths):
    """[N, T] bool, True on the tokens of padded rows of these lengths."""
    return torch.arange(max(lengths, default=1)) < torch.as_tensor(lengths)[:, None]


@torch.no_grad()
def model_scores(model, tokenizer, rows, args, device):
    """A reward model's result for each of this rank's rows: a score, or 0 and why it failed.

    CAREFUL: it has ids of its own. So the conversation goes through its own chat template.
    """
    texts = []
    for row in rows:
        answer = dict(role="assistant", content=row["sampled"]["solution_str"])
        chat = without_special([*row["prompt"], answer], tokenizer)  # a response must not write a turn
        text = render(chat, tokenizer, row.get("tools"), prompted=False)
        texts.append(tokenizer.encode(text, add_special_tokens=False))
    score_n = [math.nan] * len(rows)
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    limit = min(positions, args.max_tokens_per_microbatch)
    fitting = [i for i, text in enumerate(texts) if len(text) <= limit]
    pad_id = config.pad_token_id  # without one: one row at a time
    budget = 0 if pad_id is None else args.max_tokens_per_microbatch
    if args.offload == "sampling":
        model.to(device)
    parts = split_micro_batches([len(texts[i]) for i in fitting], budget, one_row=False)
    for part in on_every_rank(model, parts):
        numbers = [fitting[i] for i in part]
        batch = [torch.tensor(texts[i]) for i in numbers] or [torch.tensor([0])]  # a dummy row
        input_ids = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=pad_id or 0)
        mask = response_mask([len(text) for text in batch]).long()
        logits_n1 = model(input_ids=input_ids.to(device), attention_mask=mask.to(device)).logits
        for i, score in zip(numbers, logits_n1[:, 0].tolist()):
            score_n[i] = score
    if args.offload == "sampling":
        model.to("cpu")
    results = []
    for text, score in zip(texts, score_n):
        given = f"the reward model gives {score} for a conversation of {len(text)} tokens"
        failed = dict(score=0.0, failure=f"ValueError: {given}; it takes {limit}")
        results.append(dict(score=score) if math.isfinite(score) else failed)
    return results


def score_names(models):
    """rules model, or with several models rules model model_2 model_3."""
    return ["rules", "model", *(f"model_{i}" for i in range(2, models + 1))]


def add_model_scores(rows, results, args):
    """Rows with the models' scores added to those of the rules; results: a list a model."""
    weights = args.reward_weights[len(args.reward_fn) :] or [1.0] * len(results)
    names = score_names(len(results))[1:]
    combined = []
    for row, *of_models in zip(rows, *results):
        reward = row["reward"] | {"score/rules": row["reward"]["score"]}
        for name, weight, result in zip(names, weights, of_models):
            reward[f"score/{name}"] = result["score"]
            reward["score"] += weight * result["score"]
            if "failure" in result:
                reward["failure"] = result["failure"]
        combined.append(row | dict(reward=reward))
    return combined


def moments(x):
    """Mean, variance, largest and smallest of the numbers of all ranks."""
    total, count = all_reduce([x.sum(), len(x)])
    [squares] = all_reduce([((x - total / count) ** 2).sum()])
    ends = [x.max(), -x.min()] if len(x) else [-math.inf, -math.inf]
    top, bottom = all_reduce(ends, dist.ReduceOp.MAX)
    return total / count, squares / count, top, -bottom


def critic_metrics(rows, step_nt, args):
    """What a step's returns are, and how much of them the values explain."""
    metrics = {}
    names = "kl_nt", "adv_nt", "return_nt", "value_nt", "spread_nt"
    kl, adv, returns, values, spread = (step_nt[name][step_nt["mask_nt"]] for name in names)
    columns = dict(rewards=step_nt["reward_nt"].sum(-1), advantages=adv, returns=returns, values=values)
    for name, x in (columns | dict(values_std=spread)).items():
        mean, _, top, bottom = moments(x)
        metrics |= {
            f"critic/{name}/mean": mean,
            f"critic/{name}/max": top,
            f"critic/{name}/min": bottom,
        }
    for name in score_names(len(args.reward_model)) if args.reward_model else ():
        metrics |= stats(f"critic/score_{name}", [row["reward"][f"score/{name}"] for row in rows])
    unexplained = moments(returns - values)[1]
    variance = moments(returns)[1]
    metrics["critic/vf_explained_var"] = 1 - unexplained / (variance + 1e-8)
    return metrics | {"actor/reward_kl_penalty": moments(kl)[0]}


if __name__ == "__main__":
    main(Args(**flags))
