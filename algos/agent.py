"""GRPO over several turns: a response calls tools or talks to an environment, and is rewarded at its end.

Maximise E[min(r A, clip(r, 1-eps, 1+eps) A)] as in grpo.py, over the tokens that the model wrote.

1. Each trajectory is a request of its own: while its environment works, the sampler writes others.
2. Token in, token out: sampled tokens are never tokenised again.
3. An environment may hang or crash: this ends its trajectory only, and is counted.

CPU:        python algos/agent.py --model runs/sft/checkpoints/latest/hf --env envs/calculator.py:Calculator
                --train_files data/train.parquet --output_dir runs/agent
One GPU:    the same line.      N GPUs: torchrun --nproc_per_node N algos/agent.py ...
Two nodes:  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 ...
Docs: docs/algorithms/agent.md
"""

import math
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")
from algos.variants import load_variant, named_loss, unknown, with_defaults

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
    # what a backward pass computes again; selective: all but products and attention; none: fastest
    gradient_checkpointing: Literal["full", "selective", "none"] = "full"
    compile: bool = False  # compile the layers (GPU)
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    offload: Literal["none", "sampling", "always"] = "none"  # when weights and moments are on the host (GPU)
    lora_rank: int = 0  # rank of LoRA adapters, trained in place of the model; 0: train the model
    lora_alpha: float = 16  # LoRA scale: the output of the adapters times lora_alpha / lora_rank
    # ---- environment
    env: str  # FILE.py:NAME: a class of environments, or a list of functions that are tools
    max_turns: int = 8  # turns of the model in a response
    max_observation_length: int = 256  # limit in tokens of a message of the environment
    env_timeout_s: float = 30.0  # seconds that an environment has to answer a turn
    tool_parser: str | None = None  # vLLM's parser of calls; None: what reads the template's calls
    # ---- rollout
    group_size: int = 8  # responses to each prompt
    max_response_length: int = 1024  # limit of the response in tokens, with what environments wrote
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
    policy_loss: str = "clip"  # clip; a name in algos/variants/, such as gspo; or FILE.py:NAME
    adv_estimator: str = "grpo"  # grpo, dr_grpo (no division by the std), rloo; or as --policy_loss
    clip_ratio_low: float | None = None  # clip below 1 - this; None: default of the loss, of clip 0.2
    clip_ratio_high: float | None = None  # clip above 1 + this; None: default of the loss, of clip 0.2
    # average of token losses; None: default of the loss, of clip token-mean; ...-norm: Dr. GRPO
    loss_agg: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    use_kl_loss: bool = False  # add the KL divergence from the initial model to the loss
    kl_loss_coef: float = 0.001  # weight of the KL loss
    kl_kind: Literal["k1+", "abs", "k2", "k3", "k3+"] = "k3"  # KL estimator; +: gradient of k2
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    echo_coef: float = 0.0  # weight of the cross-entropy of what environments wrote; ECHO: 0.05
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
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.utils import logging

from data_prep.lib.cache import load_prompt_files
from data_prep.lib.images import load_processor, request
from data_prep.lib.packing import balance, join, one_row, pad, padded, split_micro_batches, states_apart
from data_prep.lib.templates import use_template
from envs.calls import learn_calls, observation
from envs.messages import Unrenderable, shorten
from envs.pool import EnvPool
from rewards.manager import RewardManager, check_failures, demote_failures, validation_summary
from rewards.manager.combined import load_rewards, score_parts
from system import cpu, families
from system.gpu import compute_device, move, prepare_layers, send
from system.log_probs import log_probs
from system.metrics import stats, step_metrics, timed
from system.run import Run, all_reduce, learning_rate, setup_distributed

# ---- The mathematics -------------------------------------------------------------------
DUAL_CLIP = 3.0  # bound of the ratio where the advantage is negative


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


def advantages(args, score_n, group_n, length_n, parts=()):
    """The advantage of each response, [N], which its tokens share; parts: of `score_parts`."""
    if args.adv_estimator in ("grpo", "dr_grpo"):
        return group_advantages(score_n, group_n, norm_by_std=args.adv_estimator == "grpo")
    if args.adv_estimator == "rloo":  # score minus the mean of the others (2402.14740)
        centred_n = group_advantages(score_n, group_n, norm_by_std=False)
        return centred_n * args.group_size / max(args.group_size - 1, 1)  # eq: grpo.rloo
    return load_variant("adv_estimator", args.adv_estimator)(score_n, group_n, length_n, parts)


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
    # difference 3 of the header: the sampler rounds differently from the trainer
    weight_nt = rollout_weights(args, logp_nt, old_nt, batch["rollout_logp_nt"], mask_nt, adv_nt)
    loss_nt = loss_nt * weight_nt
    losses = dict(pg_loss=loss_nt)
    if args.entropy_coeff:  # else the entropy has no backward pass
        loss_nt = loss_nt - args.entropy_coeff * entropy_nt
    if args.use_kl_loss:
        losses["kl_loss"] = kl_estimate(logp_nt, batch["ref_logp_nt"], args.kl_kind)
        loss_nt = loss_nt + args.kl_loss_coef * losses["kl_loss"]
    means = dict(entropy=entropy_nt, ppo_kl=old_nt - logp_nt, rollout_rs_masked=weight_nt == 0)
    means |= dict(pg_clipfrac=clipped_nt, pg_clipfrac_lower=lower_nt)
    return loss_nt, losses, means


# ---- The step --------------------------------------------------------------------------
def echo_weights(rows, size):
    """echo_t: 1 / n on the n tokens that environments wrote in an optimizer step of `size` rows, else 0."""
    for start in range(0, len(rows), size):
        step_rows = rows[start : start + size]
        tokens = sum((~row["mask_t"]).sum() for row in step_rows)
        for row in step_rows:
            row["echo_t"] = ~row["mask_t"] / max(tokens, 1)


def trajectories(engine, pool, tokenizer, args, prompts, step, group_size, **sampling):
    """Let sampler and environments answer the prompts of all ranks, in turns -> the rows of this rank.

    Ranks that share a sampler (--tp_size) answer the union of their prompts and keep whole groups. A row's
    length counts all after the prompt. Also returns the seconds in which the sampler had nothing to do.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    own = prompts[rank // args.tp_size :: world // args.tp_size]
    rows = [dict(prompt, sample=g, rank=rank) for prompt in own for g in range(group_size)]
    for row in rows:
        row["entropy"] = args.seed, step, row["index"], row["sample"]
    idle = converse(engine, rows, pool, tokenizer, args, logprobs=0, flat_logprobs=True, **sampling)
    for row in rows:
        row["response_ids"] = np.array(row["response_ids"], np.int32)
        row["rollout_logp_t"] = np.array(row["rollout_logp_t"], np.float32)
        row["mask_t"] = np.array(row["mask_t"], bool)  # the tokens that are trained
        row["length"] = len(row["response_ids"])
        row["prompt_length"] = len(row["prompt_ids"])
        episode = {name: row[name] for name in ("turns", "messages", "env_reward", "failure")}
        row["extra_info"] = row["extra_info"] | episode  # for the reward
    return [row for i, row in enumerate(rows) if i // group_size % args.tp_size == rank % args.tp_size], idle


def turn_metrics(rows):
    """How the conversations of a step went."""
    turns = [row["turns"] for row in rows]
    ends = [row["finish_reason"] for row in rows]
    return stats("num_turns", turns) | {
        "env/used_ratio": np.mean([n > 1 for n in turns]),
        "env/turn_limit_ratio": np.mean([end == "turns" for end in ends]),
        "env/token_ratio": np.mean(np.concatenate([~row["mask_t"] for row in rows])),
        "env/cut_observations": sum(row["cut_observations"] for row in rows),
        "env/timeouts": ends.count("timeout"),
        "env/crashes": ends.count("crash"),
        "env/errors": ends.count("error"),
    }


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
            if args.echo_coef:  # predict the environment too (2605.24517)
                echo_loss = -(batch["echo_nt"] * logp_nt).sum()  # eq: agent.echo
                loss = loss + args.echo_coef * echo_loss * dist.get_world_size()
                sums["echo_loss"] += echo_loss.detach()
            loss.backward()
            mean_nt = loss_weights(batch["mask_nt"], "token-mean", None, totals)
            means["ran"] = torch.ones_like(mean_nt)
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
    totals = dict(zip(sums, all_reduce(torch.stack([*sums.values()]).tolist())))
    # rows that were not run are 0 in a mean loss, and in no other mean
    ran = totals.pop("ran")  # share of the tokens, summed over the steps
    count = {name: len(norms) if name.endswith("loss") else ran for name in totals}
    metrics = {f"actor/{name}": total / max(count[name], 1e-9) for name, total in totals.items()}
    return metrics | {
        "actor/grad_norm": np.mean(norms),
        "actor/skipped_updates": np.sum(~np.isfinite(norms)),
    }


def main(args):
    # ---- arguments and data: checked before anything slow
    args = with_defaults(args, clip=policy_loss)
    run = Run(args)
    try:
        pool = EnvPool(args.env, ENV_WORKERS, args.env_timeout_s, args.tool_parser)
        tokenizer, manager, train_rows, val_rows, summary = load_data(args, pool)
    except ValueError as error:
        fail(" ".join(str(error).split()))
    steps_per_epoch = len(train_rows) // args.train_batch_size
    total_steps = args.total_steps or args.total_epochs * steps_per_epoch

    # ---- models: the engine first, while the GPU is empty; then it sleeps
    device, mesh = setup_distributed(args.hsdp_replicas)
    engine = build_engine(args, device)
    policy = load_model(args, mesh, device, add_adapters, TokenLogps)
    models, reference = [policy], policy
    if args.use_kl_loss and not args.lora_rank:  # with LoRA: the policy without its adapters
        reference = load_model(args, mesh, device, freeze, TokenLogps)
        models.append(reference)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay, fused=True)
    # hf is the directory that the model has in a checkpoint
    run.load(dict(hf=policy.lm), optimizer, tokenizer, whole_weights)
    run.start(total_steps, summary, policy.lm)
    sampling = dict(temperature=args.temperature, top_p=args.top_p, stop_token_ids=pool.ends)

    def validate():
        with awake(engine, models, optimizer, args, timing={}):
            options = sampling | dict(temperature=args.val_temperature, top_p=1.0)
            rows, _ = trajectories(engine, pool, tokenizer, args, val_rows, 0, args.val_group_size, **options)
        rows = score_rows(rows, manager, tokenizer)
        run.dump(rows, "val")
        metrics, text = validation_summary(rows, run.step)
        run.say(text)
        return metrics | {"val/num_turns": np.mean([row["turns"] for row in rows])}

    if val_rows and not run.step:
        run.log(validate())

    for step, timing in run.steps():
        epoch, batch = divmod(step - 1, steps_per_epoch)
        order = np.random.default_rng((args.seed, epoch)).permutation(len(train_rows))
        chosen = order[batch * args.train_batch_size :][: args.train_batch_size]
        prompts = [dict(train_rows[i], group=g) for g, i in enumerate(chosen)]
        # ---- rollout: the sampler wakes with the trainer's weights, answers and sleeps again
        with awake(engine, models, optimizer, args, timing), timed(timing, "gen"):
            size = args.group_size
            rows, idle = trajectories(engine, pool, tokenizer, args, prompts, step, size, **sampling)
        timing["env_wait"] = idle
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
            for row, adv in zip(rows, adv_n.tolist()):  # all tokens of a response have its advantage
                row["adv_t"] = np.full(row["length"], adv, np.float32)
                row["no_grad"] = adv == 0 and not (args.use_kl_loss or args.entropy_coeff or args.echo_coef)
            if args.echo_coef:
                echo_weights(rows, args.ppo_mini_batch_size * args.group_size)
            mini_batches, own_rows, load = distribute(rows, policy.packed, args)
        # ---- log-probs: those of the first mini-batch are made by its own update
        if len(mini_batches) > 1:
            with timed(timing, "old_log_prob"):
                store_logps(policy, mini_batches[1:], "old_logp_t", args)
        if args.use_kl_loss:
            with timed(timing, "ref"), without_adapters(reference.lm):
                store_logps(reference, mini_batches, "ref_logp_t", args)
        # ---- update
        lr = learning_rate(args.lr, step, total_steps, args.warmup_steps, args.lr_schedule)
        optimizer.param_groups[0]["lr"] = lr
        with timed(timing, "update_actor"):
            metrics = update_actor(policy, optimizer, mini_batches, args)
        run.updated()
        metrics |= check_sampler(policy, own_rows, args, step)
        # ---- validation
        if val_rows and run.due(args.test_freq):
            with timed(timing, "testing"):
                metrics |= validate()
        # ---- metrics
        timing["step"] = run.elapsed()
        metrics |= step_metrics(rows, load, policy, timing, args.compute_dtype)
        metrics |= stats("critic/rewards", score_n) | stats("critic/advantages", adv_n)
        metrics |= turn_metrics(rows)
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
    run.close()


# --------------------------------------------------------------------------------------------------
# The system
# --------------------------------------------------------------------------------------------------
# Above: the algorithm, change it freely. Below: regions that other scripts share;
# `make fix-copies FROM=algos/agent.py` carries a change there to them.

# region turns
ENV_WORKERS = 8  # environments of a rank that work at the same time


def converse(engine, rows, pool, tokenizer, args, **sampling):
    """Let the sampler and each row's environment (pool None: none) talk in turns, until all have ended.

    No row waits for another: its environment works while the sampler writes for others.
    rows: dicts with prompt_ids, extra_info and `entropy`, numbers that seed the sampling. This adds
    response_ids, all that follows the prompt; answer_ids, of the last turn without the token that ended it;
    finish_reason: stop, length, turns, or timeout, crash, error of the environment; and more.
    mask_t: whether the model wrote a token; rollout_logp_t: 0 where it did not.
    Returns the seconds in which the sampler had nothing to do.
    """
    from vllm.distributed import get_tp_group

    tp_group, waiting, idle = get_tp_group(), set(), 0.0
    for i, row in enumerate(rows):
        row |= dict(response_ids=[], turns=0, messages=[])
        row |= dict(rollout_logp_t=[], mask_t=[])
        row |= dict(cut_observations=0, env_reward=None, failure=None)
        ask(engine, i, row, args, sampling)
    while engine.has_unfinished_requests() or waiting:
        for done in engine.step() if engine.has_unfinished_requests() else ():
            i = int(done.request_id)
            text = add_turn(rows[i], done.outputs[0], tokenizer)
            if pool and rows[i]["finish_reason"] == "stop":
                waiting.add(i)
                if tp_group.is_first_rank:  # it asks the environments for all of its group
                    pool.step(i, text, rows[i]["extra_info"])
        if not waiting:
            continue
        begin = time.perf_counter()
        nothing_to_sample = not engine.has_unfinished_requests()
        answers = pool.answers(wait=nothing_to_sample) if tp_group.is_first_rank else []
        answers = tp_group.broadcast_object(answers)
        if nothing_to_sample:
            idle += time.perf_counter() - begin
        for answer in answers:
            i = answer["key"]
            waiting.remove(i)
            if add_answer(rows[i], answer, pool.tools, tokenizer, args):
                ask(engine, i, rows[i], args, sampling)
    if pool:
        pool.clear()
    return idle


def ask(engine, i, row, args, sampling):
    """Request the next turn of row number i."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    turn = [row["turns"]] if row["turns"] else []  # the first turn is seeded as in grpo.py
    [seed] = np.random.SeedSequence((*row["entropy"], *turn)).generate_state(1)
    room = args.max_response_length - len(row["response_ids"])
    options = dict(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    params = SamplingParams(seed=int(seed), max_tokens=room, **options, **sampling)
    engine.add_request(str(i), request(row, row["response_ids"]), params)


def add_turn(row, output, tokenizer):
    """Add a turn of the model to its row -> the text of the turn."""
    row["response_ids"] += output.token_ids
    row["mask_t"] += [True] * len(output.token_ids)
    row["rollout_logp_t"] += output.logprobs.logprobs
    ended = output.finish_reason == "stop"  # by its last token
    answer_ids = output.token_ids[: len(output.token_ids) - ended]
    row |= dict(answer_ids=answer_ids, finish_reason=output.finish_reason)
    row["turns"] += 1
    text = tokenizer.decode(answer_ids)  # with special tokens: some mark thoughts and calls
    row["messages"].append(dict(role="assistant", content=text))
    return text


def add_answer(row, answer, tools, tokenizer, args):
    """Add what its environment answered to a row -> whether the model has another turn."""
    if answer["failure"]:
        row |= dict(failure=answer["failure"], finish_reason=answer["failure"].partition(":")[0])
        return False
    row["env_reward"] = answer["reward"]
    if not answer["messages"]:
        return False
    try:
        messages, longer = shorten(tokenizer, answer["messages"], args.max_observation_length)
        ids = observation(tokenizer, messages, tools, row["response_ids"][-1])
    except Unrenderable as error:
        row |= dict(failure=f"error: {error}", finish_reason="error")
        return False
    full = len(row["response_ids"]) + len(ids) >= args.max_response_length  # no room for a token
    if full or row["turns"] == args.max_turns:
        row["finish_reason"] = "turns" if row["turns"] == args.max_turns else "length"
        return False
    row["response_ids"] += ids
    row["mask_t"] += [False] * len(ids)
    row["rollout_logp_t"] += [0.0] * len(ids)
    row["messages"] += messages
    row["cut_observations"] += longer
    return True


# endregion
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
def load_data(args, pool):
    """-> tokenizer, reward manager, rows of training and of validation, a line about them."""
    try:
        check_model(AutoConfig.from_pretrained(args.model), args)
        tokenizer = load_processor(args.model, sees=args.sees_images)
        use_template(tokenizer, args.chat_template, args.chat_template_kwargs)
        reward_fn = load_rewards(args.reward_fn, args.reward_weights, args.group_size)
        manager = RewardManager(args.reward_manager, reward_fn, timeout_s=args.reward_timeout_s)
        data = args.train_files, args.val_files, args.max_prompt_length, learn_calls(pool, tokenizer)
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
    Rows without a gradient are left out; the totals count them.
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
        # a group without an advantage has no gradient; one stays for `check_sampler` where all have none
        sequences = [s for s in sequences if not all(row.get("no_grad") for row in s)] or sequences[:1]
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


if __name__ == "__main__":
    main(Args(**flags))
