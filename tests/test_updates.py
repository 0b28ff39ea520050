"""The optimizer step of each trainer: it sees a clipped gradient, and none where the gradient is NaN."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algos import agent, dapo, distill, dpo, grpo, grpo_nano, ppo, rm, sft
from algos.variants import load_loss
from system.run import Run, learning_rate
from tests import families
from tests.conftest import load_policy, make_args


class Capture(torch.optim.SGD):
    """Counts its steps, and keeps the norm of the gradient of the last."""

    def step(self):
        self.steps = getattr(self, "steps", 0) + 1
        grads = [p.grad.full_tensor().norm() for group in self.param_groups for p in group["params"]]
        self.norm = torch.stack(grads).norm().item()


def sampled_rows():
    """Two responses to a prompt, with all columns that a loss reads."""
    rows = [dict(group=0, prompt_ids=[7, 8], response_ids=ids, prompt_length=2) for ids in ([30, 40], [50])]
    for row, adv in zip(rows, (1.0, -1.0), strict=True):
        n = len(row["response_ids"])
        row |= dict(length=n, mask_t=np.ones(n, bool), adv_t=torch.full((n,), adv))
        row |= dict(rollout_logp_t=torch.full((n,), -4.0), teacher_logp_t=torch.full((n,), -1.0))
        row |= dict(nll_weight_t=torch.ones(n))
    rows[0]["rollout_logp_t"][0] = math.nan  # missing
    rows[1]["rollout_logp_t"] -= 5  # a weight over the bound
    return rows


OFFLINE = {  # a row of each script that samples nothing
    sft: dict(prompt_ids=[7, 8], response_ids=[30, 40], trained=[True] * 2),
    dpo: dict(prompt_ids=[7, 8], chosen_ids=[30, 40], rejected_ids=[50], tokens=[2, 1])
    | dict(chosen_trained=[True] * 2, rejected_trained=[True], reference=[-9.0, -5.0]),
    rm: dict(chosen_ids=[7, 8, 30], rejected_ids=[7, 8], margin=0.0),
}


def case(script, model, mesh):
    """-> the model, its flags, and a function of (optimizer, flags) that takes one optimizer step."""
    flags = dict(model=model)
    if script is not grpo_nano:
        flags["attn_implementation"] = "sdpa"
    if script not in OFFLINE:
        flags |= dict(ppo_mini_batch_size=1, group_size=2, clip_ratio_low=0.2, clip_ratio_high=0.2)
    args = make_args(script, **flags)
    policy = load_policy(script, args, mesh)
    if script in OFFLINE:
        return policy, args, partial(script.update, policy, rows=[OFFLINE[script]])
    mini_batches, *_ = script.distribute(sampled_rows(), 1, 8192, policy.packed)
    if script is grpo_nano:
        return policy, args, partial(grpo_nano.update_actor, policy, mini_batches=mini_batches)
    if script is distill:
        return policy, args, partial(distill.update_actor, policy, None, mini_batches=mini_batches)
    args, token_loss = load_loss(args, clip=script.policy_loss)
    if script is agent:
        loss = partial(agent.batch_loss, args, token_loss)
    else:
        loss = partial(script.actor_loss, args, token_loss)
    if script is ppo:
        return policy, args, partial(ppo.update, policy, mini_batches=mini_batches, loss=loss, name="actor")
    return policy, args, partial(script.update_actor, policy, mini_batches=mini_batches, loss=loss)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("model")
    families.write("llama", out)
    return str(out)


@pytest.mark.parametrize("script", (sft, rm, dpo, grpo_nano, grpo, dapo, ppo, agent, distill))
def test_an_optimizer_step(script, model, mesh, monkeypatch):
    """And two of the same rows, by --ppo_epochs where there is one, whose metrics are those of one."""
    policy, args, update = case(script, model, mesh)
    optimizer = Capture(policy.parameters(), lr=1.0)
    args.grad_clip = 1e-3
    two = dict(mini_batches=2 * update.keywords["mini_batches"]) if script in (grpo_nano, distill) else {}

    def updated(**more):
        found = update(optimizer=optimizer, args=args, **more)
        assert all(p.grad is None for p in policy.parameters())
        return {name.rpartition("/")[2]: float(x) for name, x in found.items()}

    metrics = updated()
    assert optimizer.steps == 1 and optimizer.norm == pytest.approx(1e-3, rel=1e-3)
    assert metrics["grad_norm"] > 1e-2 and metrics["skipped_updates"] == 0
    args.ppo_epochs = 2
    assert updated(**two) == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    steps = optimizer.steps
    assert steps == (2 if script in (sft, rm, dpo) else 3)
    no_number = SimpleNamespace(full_tensor=lambda: torch.tensor(math.nan))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, limit: no_number)
    skipped = updated(**two)["skipped_updates"]
    assert skipped == steps - 1 and optimizer.steps == steps


def test_nano_is_grpo(model, mesh):
    """With the same weights of tokens whose log-prob in the sampler is another, or missing."""
    found = []
    for script in (grpo, grpo_nano):
        policy, args, update = case(script, model, mesh)
        found.append(update(optimizer=Capture(policy.parameters(), lr=1.0), args=args))
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5)


def test_learning_rates_by_hand():
    """Two steps of warm-up, then four that decay, or the last two of them; or five, and one that does not."""
    wave = 4.5**0.5
    rates = {
        (2, "constant"): [3, 6, 6, 6, 6, 6],
        (2, "linear"): [3, 6, 6, 4.5, 3, 1.5],
        (2, "cosine"): [3, 6, 6, 3 + wave, 3, 3 - wave],
        (2, "linear", 2): [3, 6, 6, 6, 6, 3],
        (5, "linear"): [1.2, 2.4, 3.6, 4.8, 6, 6],
    }
    for schedule, expected in rates.items():
        found = [learning_rate(6.0, step, 6, *schedule) for step in range(1, 7)]
        assert found == pytest.approx(expected), schedule


def test_a_dump_has_all_keys_of_a_reward(tmp_path):
    run = SimpleNamespace(rank0=True, args=SimpleNamespace(rollout_dump=True), out=tmp_path, step=1)
    row = dict(index=0, sample=1, finish_reason="stop", response_ids=np.array([5]))
    Run.dump(run, [row | dict(sampled={}, reward=dict(score=1.0, index=7, sample=8, response_ids=9))])
    line = json.loads((tmp_path / "rollouts/step_000001.jsonl").read_text())
    own = dict(score=1.0, reward_index=7, reward_sample=8, reward_response_ids=9)
    assert line == row | own | dict(response_ids=[5])
