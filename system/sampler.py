"""The sampler, vLLM in this process: its options, its answers, their scores, and the check of its weights."""

from itertools import chain
from operator import itemgetter

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig

from data_prep.lib.images import request
from rewards.manager import check_failures, demote_failures
from system import families
from system.arguments import fail
from system.batches import collate
from system.ranks import all_reduce


def engine_options(path, cuda, sees_images=False):
    """Options of vLLM's engine that a model or a CPU needs."""
    config = AutoConfig.from_pretrained(path)
    options = families.vllm_options(config, sees_images)
    if not cuda:
        options["kv_cache_memory_bytes"] = 1 << 30  # not a share of all memory
        options["enforce_eager"] = True
        options["enable_chunked_prefill"] = False  # seeds fail where a prompt is cut over steps
        options["enable_prefix_caching"] = not families.recurrent(config)  # states need such cuts
        options["block_size"] = 32  # of the prefix cache; many prompts are short
    return options


def params_of(seed, **options):
    """vLLM's parameters of a request; seed: numbers."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    [number] = np.random.SeedSequence(seed).generate_state(1)
    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(seed=int(number), detokenize=False, output_kind=kind, **options)


def answers(engine, rows, **options):
    """Let the sampler answer rows, each by its `seed` -> each row with vLLM's output, as soon as it is there.

    No more are requested than the sampler works on: a request holds its images.
    """
    waiting = list(enumerate(rows))[::-1]
    at_once = engine.vllm_config.scheduler_config.max_num_seqs
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < at_once:
            i, row = waiting.pop()
            params = params_of(row["seed"], logprobs=0, flat_logprobs=True, **options)
            engine.add_request(str(i), request(row), params)
        for answer in engine.step():
            row = rows[int(answer.request_id)]
            if answer.prompt_token_ids != row["prompt_ids"]:
                name = engine.model_config.model
                raise ValueError(f"{name}: vLLM and processor make other tokens of an image")
            [output] = answer.outputs
            yield row, output


def score_rows(rows, manager, tokenizer):
    """Score this rank's rows -> the rows of all ranks, on each of them, by prompt and sample."""
    rows = of_all_ranks(manager.score_responses(rows, tokenizer))
    check_failures(rows)
    return demote_failures(rows)


def of_all_ranks(rows):
    """The rows of this rank -> those of all ranks, on each of them, by prompt and sample."""
    by_rank = [rows]
    if dist.get_world_size() > 1:  # alone, a copy in gloo's thread would slow OpenMP down for good
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, rows)
    return sorted(chain(*by_rank), key=itemgetter("group", "sample"))


CAUSES = (
    "the sampler lacks the trainer's weights, computes the model differently or samples at another"
    " temperature; rows of older weights lack a true older_t; or rounding sends tokens to other experts."
    " How to tell: docs/guides/debugging.md"
)


def check_sampler(rows, weigh, limit, step):
    """Compare sampler and trainer on this rank's rows -> metrics; stop if more than rounding differs.

    weigh: of log-probs and a batch of `collate` -> importance weights. limit: of `families.rounding_limit`.
    Tokens with a true `older_t` are of other weights. Where the sampler gave no finite number there is
    nothing to compare; these tokens are counted.
    """
    sums = torch.zeros(7, dtype=torch.float64)
    largest = 0.0
    for start in range(0, len(rows), 64):  # no more are padded at a time
        batch = collate(rows[start : start + 64], "cpu")
        mask_nt = batch["mask_nt"]
        weight = weigh(batch["old_logp_nt"], batch).expand_as(mask_nt)[mask_nt].double()
        if "older_nt" in batch:
            mask_nt = mask_nt & ~batch["older_nt"]
        found_nt = batch["rollout_logp_nt"].isfinite()
        missing = (mask_nt & ~found_nt).sum()
        ours = batch["old_logp_nt"][mask_nt & found_nt].double()
        theirs = batch["rollout_logp_nt"][mask_nt & found_nt].double()
        gap = (ours - theirs).abs()
        prob_gap = (ours.exp() - theirs.exp()).abs()
        of_batch = len(gap), gap.sum(), prob_gap.sum(), missing, len(weight), weight.sum(), (weight**2).sum()
        sums += torch.tensor(of_batch, dtype=torch.float64)
        if len(prob_gap):
            largest = max(largest, prob_gap.max().item())
    compared, gap, prob_gap, missing, tokens, weight, squares = all_reduce(sums.tolist())
    [largest] = all_reduce([largest], dist.ReduceOp.MAX)
    if missing and not compared:
        fail(f"step {step}: none of the sampler's log-probs is finite. Causes: {CAUSES}")
    compared = max(compared, 1)
    gap = gap / compared
    if not gap < limit:  # `not <` also fails for NaN
        gaps = f"their log-probs by {gap:.3g} on average, over {limit:.3g}, the limit of rounding"
        fail(f"step {step}: sampler and trainer differ, {gaps}. Causes: {CAUSES}")
    return {
        "training/rollout_probs_diff_mean": prob_gap / compared,
        "training/rollout_probs_diff_max": largest,
        "training/rollout_logp_diff_mean": gap,
        "training/rollout_logp_missing": missing,
        "rollout_corr/rollout_is_mean": weight / max(tokens, 1),
        "rollout_corr/rollout_is_eff_sample_size": weight**2 / max(tokens * squares, 1e-30),
    }
