"""GRPO (DeepSeekMath, arXiv 2402.03300) in one sitting: algos/grpo.py without its options.

maximise E[min(r A, clip(r, 1-eps, 1+eps) A)], where A is a response's score relative to its group.

Differences from the paper: no KL term; the loss is the mean over the tokens of an optimizer step; importance
sampling corrects the sampler's rounding (Yao et al. 2025); dual clip where A < 0 (1912.09729, eq. 5).

CPU:      python algos/grpo_nano.py --model models/tiny --train_files data/train.parquet --output_dir runs/n
One GPU:  the same line.      N GPUs: torchrun --nproc_per_node N algos/grpo_nano.py ...
Docs: docs/algorithms/grpo.md
"""

import math
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import fail, one_line_errors, parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")

# Shapes: B prompts, G responses to each, N = B * G, T response tokens, V vocabulary. A suffix names the
# axes (logp_nt). T is aligned with the response: column t belongs to response token t.
# A row is a dict of one response: its prompt, ids and reward. What is per token ends in _t (adv_t); a
# padded batch of rows has it as _nt.


@dataclass(kw_only=True)
class Args:
    # ---- run
    output_dir: str  # directory of the run: arguments, metrics, log, checkpoints
    resume: str = "auto"  # auto: output_dir's latest checkpoint; never; or path of another run's
    seed: int = 1  # seed for data order and sampling
    total_steps: int = 100  # number of RL steps
    save_freq: int = 50  # steps between checkpoints; 0: only at the end
    test_freq: int = 10  # with --val_files: steps between validations; 0: only before and after training
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # tracker that also gets the metrics
    # ---- data
    train_files: tuple[str, ...]  # files of training prompts
    val_files: tuple[str, ...] = ()  # files of validation prompts; none: no validation
    max_prompt_length: int = 512  # tokens of a prompt; longer prompts are dropped and counted
    reward_fn: tuple[str, ...] = ("rewards",)  # FILE.py:NAME; rewards: by each row's data_source
    # ---- model
    model: str  # Hugging Face directory or hub name of the model to train
    # dtype of forward, backward and sampler; None: bfloat16 on a GPU, float32 on a CPU
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    gradient_checkpointing: Literal["full", "selective", "none"] = "full"  # what a backward pass repeats
    max_tokens_per_microbatch: int = 8192  # tokens of a forward pass on one rank, padding included
    # ---- rollout
    group_size: int = 8  # responses to each prompt
    max_response_length: int = 1024  # limit of the response in tokens
    gpu_memory_utilization: float = 0.5  # share of the GPU's memory for the awake sampler
    # ---- algorithm
    train_batch_size: int = 64  # prompts of a step, over all ranks
    ppo_mini_batch_size: int | None = None  # prompts of an optimizer step; None: all of the step
    lr: float = 1e-6  # learning rate of AdamW
    weight_decay: float = 0.01  # decoupled weight decay of AdamW
    grad_clip: float = 1.0  # largest gradient norm
    clip_ratio_low: float = 0.2  # clip below 1 - this
    clip_ratio_high: float = 0.2  # clip above 1 + this

    def __post_init__(self):  # torch is imported by then: below, after the command line has been read
        self.compute_dtype = self.compute_dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
        self.ppo_mini_batch_size = self.ppo_mini_batch_size or self.train_batch_size


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoConfig
from transformers.utils import logging

from data_prep.lib.cache import load_prompt_files
from data_prep.lib.images import load_processor, request
from rewards.manager import RewardManager, check_failures, demote_failures, validation_summary
from rewards.manager.combined import load_rewards
from system import cpu, families
from system.attention import packed_attention, states_apart
from system.batches import balance, columns_of, join, one_row, pad, padded, split_micro_batches
from system.gpu import compute_device, prepare_layers, send
from system.log_probs import log_probs
from system.metrics import stats, step_metrics, timed
from system.model import check_model
from system.ranks import all_reduce, setup_distributed, sum_over_ranks
from system.run import Run
from system.sampler import CAUSES, engine_options

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


# ---- The step --------------------------------------------------------------------------
def update_actor(policy, optimizer, mini_batches, args):
    """One optimizer step for each mini-batch of `distribute` -> mean metrics."""
    sums = defaultdict(float)
    norms = []
    for sequences, tokens in mini_batches:
        for rows in micro_batches(policy, sequences, args.max_tokens_per_microbatch):
            logp_nt, entropy_nt = token_logps(policy, rows)
            batch = collate(rows, logp_nt.device)
            # without old_logp_nt, which a single update does not need, the policy is its own old policy
            old_nt = batch.get("old_logp_nt", logp_nt.detach())
            clip = args.clip_ratio_low, args.clip_ratio_high
            loss_nt, clipped_nt, _ = policy_loss(logp_nt, old_nt, batch["adv_nt"], batch["mask_nt"], *clip)
            # the sampler rounds differently from the trainer: importance weights, truncated at 2
            d_nt = old_nt - batch["rollout_logp_nt"]
            d_nt = d_nt.where(d_nt.isfinite(), 0.0)  # the sampler's number is missing
            loss_nt = loss_nt * d_nt.clamp(-20, 20).exp().clamp(max=2.0)  # eq: grpo.tis
            # tokens are of all ranks and micro-batches: no split of the work changes the gradient
            weight_nt = batch["mask_nt"].float() / max(tokens, 1)  # eq: grpo.aggregation
            # FSDP averages gradients over the ranks, but the tokens already count all ranks
            (weight_nt * loss_nt).sum().mul(dist.get_world_size()).backward()

            means = dict(pg_loss=loss_nt, pg_clipfrac=clipped_nt, entropy=entropy_nt, ppo_kl=old_nt - logp_nt)
            for name, x_nt in means.items():
                sums[name] += (weight_nt * x_nt.detach()).sum()
            for row, logp_t in zip(rows, logp_nt.detach()):  # for `check_sampler`
                row.setdefault("old_logp_t", logp_t[: row["length"]])

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
    with Run(args) as run:
        tokenizer, manager, train_rows, val_rows, summary = load_data(args)
        steps_per_epoch = len(train_rows) // args.train_batch_size
        run.plan(args.total_steps, summary)

        # ---- models: the engine first, while the GPU is empty; then it sleeps
        device, mesh = setup_distributed()
        run.say("starting vLLM")
        engine = build_engine(args, device)
        run.say(f"loading {args.model}")
        policy = load_model(args, mesh, device)
        options = dict(lr=args.lr, weight_decay=args.weight_decay, fused=True)
        optimizer = torch.optim.AdamW(policy.parameters(), **options)
        # hf is the directory that the model has in a checkpoint
        run.load(dict(hf=policy.lm), optimizer, tokenizer, whole_weights)
        run.start(policy.lm)
        sampling = dict(max_tokens=args.max_response_length, stop_token_ids=[tokenizer.eos_token_id])

        def validate():
            with awake(engine, policy, timing={}):
                rows = rollout(engine, args, val_rows, step=0, group_size=1, temperature=0.0, **sampling)
            metrics, text = validation_summary(score_rows(rows, manager, tokenizer), run.step)
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
            with awake(engine, policy, timing), timed(timing, "gen"):
                rows = rollout(engine, args, prompts, step, args.group_size, temperature=1.0, **sampling)
            # ---- reward: from here on every rank has the rows of all ranks
            with timed(timing, "reward"):
                rows = score_rows(rows, manager, tokenizer)
            # ---- advantage, then balance over the ranks
            score_n = torch.tensor([row["reward"]["score"] for row in rows], dtype=torch.float64)
            adv_n = group_advantages(score_n, torch.tensor([row["group"] for row in rows]))
            for row, adv in zip(rows, adv_n.tolist()):  # all tokens of a response have its advantage
                row["adv_t"] = np.full(row["length"], adv, np.float32)
            updates = args.train_batch_size // args.ppo_mini_batch_size
            budget = args.max_tokens_per_microbatch
            mini_batches, own_rows, load = distribute(rows, updates, budget, policy.packed)
            # ---- log-probs: those of the first mini-batch are made by its own update
            if len(mini_batches) > 1:
                store_logps(policy, mini_batches[1:], "old_logp_t", budget)
            # ---- update
            with timed(timing, "update_actor"):
                metrics = update_actor(policy, optimizer, mini_batches, args)
            metrics |= check_sampler(policy, own_rows, args, step)
            run.updated()
            # ---- validation
            if val_rows and run.due(args.test_freq):
                metrics |= validate()
            # ---- metrics, and a checkpoint after them: each has its metrics
            timing["step"] = run.elapsed()
            metrics |= step_metrics(rows, load, policy, timing, args.compute_dtype)
            metrics |= stats("critic/rewards", score_n) | stats("critic/advantages", adv_n)
            metrics |= {"training/epoch": epoch}
            run.log(metrics, score="critic/score/mean", length="response_length/mean")
            if run.due(args.save_freq):
                run.save()


# ---- The system ------------------------------------------------------------------------
def load_data(args):
    """-> tokenizer, reward manager, rows of training and of validation, a line about them."""
    with one_line_errors():
        if families.wrapped(AutoConfig.from_pretrained(args.model)):
            fail(f"--model {args.model} has more than a language model: take algos/grpo.py")
    with one_line_errors("take algos/grpo.py: "):
        check_model(args.model, "sdpa", nn.Module.requires_grad_)
    with one_line_errors():
        tokenizer = load_processor(args.model)
        manager = RewardManager("naive", load_rewards(args.reward_fn, (), args.group_size))
        data = args.train_files, args.val_files, args.max_prompt_length
        train_rows, val_rows, summary = load_prompt_files(tokenizer, args.train_batch_size, *data)
        manager.check(train_rows, val_rows)
    return tokenizer, manager, train_rows, val_rows, summary


class TokenLogps(nn.Module):
    """A causal LM whose forward returns log-probs of given tokens: one root module, for FSDP.

    packed: whether its texts are laid out by `one_row`; otherwise by `padded`.
    """

    def __init__(self, lm, packed):
        super().__init__()
        self.lm = lm
        self.packed = packed
        # granite and minicpm3 divide their logits; cohere and falcon-h1 multiply them
        config = lm.config
        factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1
        self.scale = factor / (getattr(config, "logits_scaling", None) or 1)
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def forward(self, where, target, **inputs):
        """where [L]: flat positions that predict target [L] -> columns of `log_probs`."""
        body = families.decoder(self.lm)
        hidden = body(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]
        weight = self.lm.get_output_embeddings().weight
        # float32 in Mamba
        return log_probs(hidden.to(weight.dtype), weight, target, scale=self.scale, softcap=self.softcap)


def load_model(args, mesh, device):
    """The model in float32 in its root module, sharded by FSDP2. Rank 0 reads the weights for all."""
    config, attention = read_config(args.model)
    auto = families.auto_class(config)
    full = None if dist.get_rank() else families.from_files(auto, args.model)
    config.tie_word_embeddings = all_reduce([bool(full and full.config.tie_word_embeddings)]) == [1]
    with torch.device("meta"):
        lm = auto.from_config(config, dtype="float32", attn_implementation=attention)
    prepare_layers(lm, args.gradient_checkpointing, eager=states_apart(lm))
    policy = TokenLogps(lm, attention == "packed")
    precision = MixedPrecisionPolicy(getattr(torch, args.compute_dtype), reduce_dtype=torch.float32)
    fsdp = dict(mesh=mesh, mp_policy=precision)
    parts = [m for m in lm.modules() if type(m).__name__ in lm._no_split_modules]
    if not config.tie_word_embeddings:
        parts.append(lm.get_input_embeddings())
    for part in parts[::-1]:  # inner first
        fully_shard(part, **fsdp)
    # the root too is resharded after a forward: without a backward nothing else would do it
    fully_shard(policy, **fsdp, reshard_after_forward=True)
    policy.to_empty(device=device)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(lm, full.state_dict() if full else {}, options=options)
    for name, buffer in lm.named_buffers():  # rotary frequencies and the like are in no state dict
        if full:
            buffer.copy_(full.get_buffer(name))
        dist.broadcast(buffer, 0)
    if full:  # saved with the weights; the generation config may name more EOS tokens
        lm.config.dtype = full.config.dtype
        lm.file_dtypes = full.file_dtypes
        lm.generation_config = full.generation_config
    return policy


def read_config(path):
    """The model's configuration, without dropout, and its attention: "packed" if texts share a row."""
    logging.disable_progress_bar()  # of transformers
    config = AutoConfig.from_pretrained(path)
    for name in config.to_dict():
        if "dropout" in name or name.endswith("_pdrop"):
            setattr(config, name, 0.0)  # CAREFUL: else the first ratio is not 1
    if families.special_layers(config, one_row=True):
        return config, "sdpa"
    AttentionInterface.register("packed", packed_attention)
    return config, "packed"


@torch.no_grad()
def whole_weights(lm, dtype):
    """Names and weights of the sharded model as its files have them, one whole weight at a time."""
    to_files = families.to_files(lm)
    for name, x in lm.state_dict(keep_vars=True).items():  # persistent buffers too
        if name in lm.all_tied_weights_keys:
            continue
        if isinstance(x, DTensor):
            x = x.to(compute_device(), dtype).full_tensor()  # a shard is cast before it travels
        yield from to_files({name: x}).items()


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
            seed=args.seed,
            max_model_len=args.max_prompt_length + args.max_response_length,
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
def awake(engine, policy, timing):
    """While the block lasts, the sampler is awake, with the weights of the policy."""
    with timed(timing, "sync"):
        engine.wake_up(tags=["weights"])
        sync_weights(engine, policy.lm)
        engine.wake_up(tags=["kv_cache"])
    yield
    with timed(timing, "sync"):
        engine.sleep(level=2)


def sync_weights(engine, lm):
    """Stream the sharded model into the sampler, which packs it as it packs what it loads."""
    weights = whole_weights(lm, engine.model_config.dtype)
    weights = families.vllm_names(weights, lm.config, engine.model_config.hf_config)
    engine.apply_model(cpu.before_reload)
    engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
    engine.apply_model(cpu.after_reload)
    engine.reset_prefix_cache()


def rollout(engine, args, prompts, step, group_size, **sampling):
    """Let the sampler answer this rank's share of the prompts of all ranks -> its rows."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rank = dist.get_rank()
    options = dict(logprobs=0, flat_logprobs=True, detokenize=False) | sampling
    rows = []
    for prompt in prompts[rank :: dist.get_world_size()]:
        for g in range(group_size):
            seed = np.random.SeedSequence((args.seed, step, prompt["index"], g)).generate_state(1)
            params = SamplingParams(seed=int(seed[0]), output_kind=RequestOutputKind.FINAL_ONLY, **options)
            engine.add_request(str(len(rows)), request(prompt), params)
            rows.append(dict(prompt, sample=g, rank=rank))
    while engine.has_unfinished_requests():
        for answer in engine.step():  # converted at once: vLLM's lists take 200 bytes a token
            row = rows[int(answer.request_id)]
            [output] = answer.outputs
            row["response_ids"] = np.array(output.token_ids, np.int32)
            row["rollout_logp_t"] = np.array(output.logprobs.logprobs, np.float32)
            row["mask_t"] = np.ones(len(output.token_ids), bool)  # the tokens that are trained
            row["length"] = len(output.token_ids)
            row["prompt_length"] = len(row["prompt_ids"])
            row["finish_reason"] = output.finish_reason
    return rows


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


def distribute(rows, steps, budget, packed):
    """Deal the rows of each optimizer step to the ranks, balanced by tokens.

    A sequence is a row, or packed rows that share their prompt, up to a quarter of a micro-batch: longer
    ones would leave them half empty. Returns this rank's sequences for each optimizer step, with the
    tokens of all ranks; this rank's rows; and the number of tokens of every rank.
    """
    ranks = dist.get_world_size()
    longest = budget // 4 if packed else 0
    mini_batches = []
    own_rows = []
    load = [0] * ranks
    groups = [list(group) for _, group in groupby(rows, key=itemgetter("group"))]
    steps = min(steps, len(groups))
    for step in range(steps):
        step_groups = groups[len(groups) * step // steps : len(groups) * (step + 1) // steps]
        step_rows = list(chain(*step_groups))
        sequences = []
        for group in step_groups:
            sequence = []
            for row in group:
                if sequence and token_count([*sequence, row]) > longest:
                    sequences.append(sequence)
                    sequence = []
                sequence.append(row)
            sequences.append(sequence)
        lengths = [token_count(sequence) for sequence in sequences]
        parts = balance(lengths, ranks)
        for i, part in enumerate(parts):
            load[i] += sum(lengths[k] for k in part)
        own = [sequences[i] for i in parts[dist.get_rank()]]
        own_rows += chain(*own)
        mini_batches.append((own, sum(int(row["mask_t"].sum()) for row in step_rows)))
    return mini_batches, own_rows, load


def token_count(sequence):
    """Tokens of rows that share their prompt."""
    return sequence[0]["prompt_length"] + sum(row["length"] for row in sequence)


def micro_batches(policy, sequences, budget):
    """Cut sequences into micro-batches of `budget` tokens -> the rows of each, as many on all ranks."""
    lengths = [token_count(sequence) for sequence in sequences]
    batches = split_micro_batches(lengths, budget, policy.packed)
    # CAREFUL: forward and backward are collectives; a rank that ran fewer would hang the others
    [largest] = all_reduce([max(len(batches), 1)], dist.ReduceOp.MAX)
    for number in range(int(largest)):
        batch = batches[number] if number < len(batches) else []
        yield [row for i in batch for row in sequences[i]]


def token_logps(policy, rows):
    """Columns [N, T] of the response tokens of rows, 0 after a response's end.

    logp_nt: log-probs of the tokens.
    entropy_nt: entropy of the distributions that predict them.
    """
    prompts = [row["prompt_ids"] for row in rows] or [[0]]  # a dummy: forward and backward are collectives
    responses = [row["response_ids"] for row in rows] or [[0]]
    layout = one_row if policy.packed else padded
    inputs, where = layout(prompts, responses)
    inputs = {name: send(x) for name, x in inputs.items()}
    columns = policy(send(where), send(join(responses)), **inputs)
    lengths = [len(response) for response in responses]
    return [pad(column.split(lengths))[: len(rows)] for column in columns]


@torch.no_grad()
def store_logps(policy, mini_batches, name, budget):
    """Store the log-probs of this rank's rows under `name`."""
    sequences = [sequence for sequences, _ in mini_batches for sequence in sequences]
    for rows in micro_batches(policy, sequences, budget):
        logp_nt, _ = token_logps(policy, rows)
        for row, logp_t in zip(rows, logp_nt):
            row[name] = logp_t[: row["length"]]


def collate(rows, device):
    """A batch of rows: adv_t of each row -> adv_nt, padded, and so for all that is per token."""
    if not rows:
        return defaultdict(lambda: torch.zeros(0, 1, device=device))  # all columns are empty
    return {name[:-1] + "nt": send(pad([row[name] for row in rows]), device) for name in columns_of(rows)}


def check_sampler(policy, rows, args, step):
    """Compare sampler and trainer on this rank's rows -> metrics; stop if more than rounding differs."""
    sums = torch.zeros(3, dtype=torch.float64)
    for row in rows:
        gap_t = torch.as_tensor(row["old_logp_t"]).cpu() - torch.as_tensor(row["rollout_logp_t"])
        found_t = torch.as_tensor(row["rollout_logp_t"]).isfinite()  # otherwise a number is missing
        sums += torch.tensor([gap_t[found_t].abs().sum(), found_t.sum(), (~found_t).sum()])
    gap, compared, missing = all_reduce(sums.tolist())
    gap = gap / max(compared, 1)
    limit = families.rounding_limit(policy.lm, args.compute_dtype)
    if not gap < limit:  # `not <` also fails for NaN
        gaps = f"their log-probs by {gap:.3g} on average, over {limit:.3g}, the limit of rounding"
        fail(f"step {step}: sampler and trainer differ, {gaps}. Causes: {CAUSES}")
    return {"training/rollout_logp_diff_mean": gap, "training/rollout_logp_missing": missing}


if __name__ == "__main__":
    main(Args(**flags))
