"""What scripts ask of the sampler, what becomes of its answers, and the check of its weights."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from algos import grpo
from system import sampler
from system.families import rounding_limit
from tests.conftest import make_args


def weigh(logp_nt, batch):
    return torch.ones_like(logp_nt)


@pytest.fixture
def alone(monkeypatch):
    """One rank, without a process group."""
    monkeypatch.setattr(sampler, "all_reduce", lambda values, op=None: [*map(float, values)])


def rows_with(theirs, ours=0.0, older=False):
    """A row of two tokens of the policy and one of an environment."""
    row = dict(rollout_logp_t=np.array([0, theirs, 0], np.float32), mask_t=np.array([True, True, False]))
    return [row | dict(old_logp_t=torch.tensor([0, ours, -9.0]), older_t=np.full(3, older))]


@pytest.mark.parametrize("wrong", (0.01, 1e4, math.nan, -math.inf))
def test_the_sampler_must_hold_the_trainers_weights(alone, wrong):
    """The trainer's number differs from the sampler's, or is none: all causes are said."""
    causes = "lacks the trainer's weights.*another temperature.*older_t.*other experts.*debugging.md"
    with pytest.raises(SystemExit, match=f"step 1: sampler and trainer differ, .*{causes}"):
        sampler.check_sampler(rows_with(0.0, wrong), weigh, 1e-4, 1)


def test_only_what_this_step_sampled_is_compared(alone):
    old = rows_with(0.0, -9.0, older=True)
    for rows in ([], rows_with(0.0), rows_with(-0.2, -0.2)):
        found = sampler.check_sampler(rows + old, weigh, 1e-4, 1)
        assert found["training/rollout_logp_diff_mean"] == 0
    found = sampler.check_sampler(rows_with(0.0, -0.3), weigh, math.inf, 1)  # with top_p
    assert found["training/rollout_logp_diff_mean"] == pytest.approx(0.15)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(1 - math.exp(-0.3))


def test_weights_of_older_tokens_count(alone):
    """Of surplus groups, which other weights sampled. Not what an environment wrote."""

    def trainer_over_sampler(logp_nt, batch):
        return (logp_nt - batch["rollout_logp_nt"]).exp()

    old = rows_with(0.0, math.log(1.5), older=True)
    found = sampler.check_sampler(rows_with(0.0) + old, trainer_over_sampler, 1e-4, 1)
    assert found["training/rollout_probs_diff_max"] == 0
    assert found["rollout_corr/rollout_is_mean"] == pytest.approx((3 + 1.5) / 4)
    effective = 4.5**2 / (3 + 1.5**2) / 4
    assert found["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(effective)
    old[0]["older_t"][1] = False  # one token of these weights
    with pytest.raises(SystemExit, match="step 1: sampler and trainer differ"):
        sampler.check_sampler(old, trainer_over_sampler, 1e-4, 1)


@pytest.mark.parametrize("missing", (math.nan, math.inf, -math.inf))
def test_a_number_that_the_sampler_does_not_have_ends_no_run(alone, missing):
    found = sampler.check_sampler(rows_with(missing) + rows_with(0.0), weigh, 1e-4, 1)
    assert found["training/rollout_logp_missing"] == 1
    assert found["training/rollout_logp_diff_mean"] == 0
    assert all(math.isfinite(x) for x in found.values())
    none = rows_with(missing)
    none[0]["rollout_logp_t"] = np.full(3, missing, np.float32)
    found = sampler.check_sampler(none, weigh, 1e-4, 1)
    assert found["training/rollout_logp_missing"] == 2


def test_a_rank_sees_the_rows_of_the_others(monkeypatch):
    """Its own two tokens agree; one of another rank has a log-prob that differs by 0.3."""
    others = {7: [1, 0.3, 0.1, 0, 1, 1, 1], 1: [0.1]}  # by the number of sums

    def add(values, op=None):
        return [float(a) + b for a, b in zip(values, others[len(values)], strict=True)]

    monkeypatch.setattr(sampler, "all_reduce", add)
    found = sampler.check_sampler(rows_with(0.0), weigh, math.inf, 1)
    assert found["training/rollout_logp_diff_mean"] == pytest.approx(0.1)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.1 / 3)
    assert found["rollout_corr/rollout_is_mean"] == found["rollout_corr/rollout_is_eff_sample_size"] == 1
    with pytest.raises(SystemExit, match=r"log-probs by 0\.1 on average, over 0\.0001"):
        sampler.check_sampler(rows_with(0.0), weigh, 1e-4, 1)


class TinyExperts(nn.Module):
    """As transformers names experts; a layer has them all."""


def test_a_mixture_of_experts_may_differ_more_in_bfloat16():
    """A router rounds, too. In float32 it has been seen to choose the same experts."""
    dense = nn.Linear(1, 1)
    mixture = nn.Sequential(nn.Linear(1, 1), nn.Sequential(TinyExperts()))
    assert [rounding_limit(lm, "float32") for lm in (dense, mixture)] == [1e-4, 1e-4]
    assert [rounding_limit(lm, "bfloat16") for lm in (dense, mixture)] == [0.1, 0.3]
    assert rounding_limit(dense, "bfloat16", "fp8") == 0.3


class Sampler:
    """Of vLLM's engine what `rollout` calls: two requests at a time, of which it ends the last one first."""

    def __init__(self):
        self.model_config = SimpleNamespace(hf_config=PreTrainedConfig(), model="tiny")
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=2))
        self.running, self.seeds = [], {}
        self.has_unfinished_requests = lambda: bool(self.running)
        self.get_num_unfinished_requests = lambda: len(self.running)

    def add_request(self, name, prompt, params):
        self.running.append((name, prompt["prompt_token_ids"]))
        self.seeds.setdefault(tuple(prompt["prompt_token_ids"]), []).append(params.seed)

    def step(self):
        name, prompt_ids = self.running.pop()
        logprobs = SimpleNamespace(logprobs=[-1.0, -0.5 - int(name)])
        response = SimpleNamespace(token_ids=[prompt_ids[-1], 1], logprobs=logprobs, finish_reason="stop")
        yield SimpleNamespace(request_id=name, prompt_token_ids=prompt_ids, outputs=[response])


def test_rows_of_the_sampler(monkeypatch):
    """Each has what was sampled for it, EOS is trained, and no two responses have one seed."""
    kinds = SimpleNamespace(FINAL_ONLY=None)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", SimpleNamespace(RequestOutputKind=kinds))
    prompts = [dict(prompt_ids=[7, 20 + i], index=i, group=i) for i in range(3)]

    def sampled(step, rank=0, world=1):
        """-> (prompt, sample) and row of one rank of a sampler over `world` ranks, and all seeds."""
        monkeypatch.setattr(grpo.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(grpo.dist, "get_world_size", lambda: world)
        args, engine = make_args(grpo, tp_size=world), Sampler()
        rows = grpo.rollout(engine, args, prompts, step, 2)
        return {(row["index"], row["sample"]): row for row in rows}, engine.seeds

    rows, seeds = sampled(1)
    assert list(rows) == [(i, g) for i in range(3) for g in range(2)]
    for number, ((index, _), row) in enumerate(rows.items()):
        assert row["response_ids"].tolist() == [20 + index, 1] and row["finish_reason"] == "stop"
        assert row["rollout_logp_t"].tolist() == [-1, -0.5 - number]
        assert row["mask_t"].tolist() == [True, True]
        assert row["length"] == row["prompt_length"] == 2
    both = [seed for found in (seeds, sampled(2)[1]) for some in found.values() for seed in some]
    assert len(both) == len(set(both)) == 12
    (one, seeds_one), (two, seeds_two) = (sampled(1, rank, 2) for rank in (0, 1))  # they share a sampler
    assert seeds_one == seeds_two == seeds
    assert one.keys() | two.keys() == rows.keys()  # a group is on one rank, for a reward that sees it
    assert [{index for index, _ in found} for found in (one, two)] == [{0, 2}, {1}]
    answers = Sampler.step

    def fewer(self):
        [answer] = answers(self)
        answer.prompt_token_ids = answer.prompt_token_ids[1:]
        return [answer]

    monkeypatch.setattr(Sampler, "step", fewer)
    with pytest.raises(ValueError, match="vLLM and processor make other tokens of an image"):
        sampled(1)


def test_rows_are_sorted_by_prompt_and_a_failure_beats_no_wrong_answer(monkeypatch):
    """However rows were spread over the ranks: a mini-batch is a slice of them."""
    monkeypatch.setattr(sampler.dist, "get_world_size", lambda: 1)
    rows = [dict(group=g, sample=s, reward=dict(score=0.0)) for s in (2, 1, 0) for g in (0, 2, 1)]
    rows[3]["reward"], rows[6]["reward"] = dict(score=-1.0), dict(score=0.0, failure="TimeoutError: no")
    manager = SimpleNamespace(score_responses=lambda rows, tokenizer: rows)
    rows = sampler.score_rows(rows, manager, None)
    found = [(row["group"], row["sample"], row["reward"]["score"]) for row in rows]
    scores = {(0, 0): -1, (0, 1): -1}
    assert found == [(g, s, scores.get((g, s), 0)) for g in range(3) for s in range(3)]
