"""PPO on fixed rows, on one rank or two: MODEL CRITIC REWARD_MODEL OUT.

Writes the gradients of both updates, for many ways to split the same work, and clipped ones; results of
the reward model; how a critic learns a fixed batch; what is in a checkpoint that two ranks write and one
reads.
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import ppo

# tokens of the prompts and of three responses to each: very unequal
LENGTHS = {5: (40, 1, 2), 60: (3, 25, 7)}
MOVED = 0.3  # of the values since the step began, further than --cliprange_value
RIGHT = 1  # a response with a negative score
TEXTS = ["7", "1234", "", "a9", "no digit", "5 and a long end 3"]  # responses for the reward model


def make_rows():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for group, (prompt, responses) in enumerate(LENGTHS.items()):
        prompt_ids = torch.randint(6, 100, (prompt,), generator=generator).tolist()
        for n in responses:
            ids = torch.randint(6, 100, (n,), generator=generator).tolist()
            logps = (-4.6 + 0.3 * torch.randn(n, generator=generator)).tolist()
            row = dict(prompt_ids=prompt_ids, response_ids=ids, rollout_logps=logps, group=group)
            row |= dict(prompt_length=prompt, length=n, rank=len(rows) % dist.get_world_size())
            row |= dict(prompt=[dict(role="user", content="?")], sampled=dict(solution_str=TEXTS[len(rows)]))
            rows.append(row | dict(reward=dict(score=torch.randn((), generator=generator).item())))
    rows[RIGHT]["reward"] |= dict(score=-1.0, acc=1.0)
    return rows


class Capture(torch.optim.SGD):
    """Keeps the gradient of the step, clipped as it is, and does not move."""

    def step(self):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.grads = [full(g) for g in grads]


def prepare(rows, critic, args, device, moved=0.0):
    """What main does between rewards and updates, with fixed old and reference log-probs.

    moved: how far the values of the critic are from what they were when the step began, up and down in turn.
    """
    batch, _ = ppo.balance_batch(rows, args, device)
    batch["old_logp_nt"] = [x + 0.05 for x in batch["rollout_logp_nt"]]
    batch["ref_logp_nt"] = [x - 0.1 for x in batch["rollout_logp_nt"]]
    values = ppo.all_logps(critic, batch, args)
    batch["value_nt"] = {i: x + moved * (-1.0) ** torch.arange(len(x)) for i, x in values.items()}
    step_nt = ppo.advantages(rows, batch, 0.2, args)
    return batch | {name: step_nt[name] for name in ("adv_nt", "return_nt", "nll_weight_nt")}


def plain_gae(score, value, gamma, lam):
    """The advantages of one response, with k1 = old - ref = .15 at a weight of .2 in the rewards."""
    value, adv, next_adv = [*value.tolist(), 0.0], [0.0] * len(value), 0.0
    for t in reversed(range(len(adv))):
        reward = -0.2 * 0.15 + (score if t == len(adv) - 1 else 0.0)
        adv[t] = next_adv = reward + gamma * value[t + 1] - value[t] + gamma * lam * next_adv
    return torch.tensor(adv)


def naive(lm, critic, args):
    """Both losses written out row by row and token by token, with plain Hugging Face models."""
    rows, values, old_values, advs, returns = make_rows(), [], [], [], []
    for row in rows:
        ids, n = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(row["response_ids"])
        hidden = critic.model(input_ids=ids).last_hidden_state[0, -n - 1 : -1]
        values.append(critic.score(hidden)[:, 0])
        old_values.append(values[-1].detach() + MOVED * torch.tensor([(-1.0) ** t for t in range(n)]))
        scored, lam = (row["reward"]["score"], old_values[-1], args.gamma), 1 - 1 / (args.lam_alpha * n)
        advs.append(plain_gae(*scored, max(lam, 0)))
        returns.append(plain_gae(*scored, args.critic_lam) + old_values[-1])
    every, loss, value_loss = torch.cat(advs), 0.0, 0.0
    right = [row["reward"].get("acc", row["reward"]["score"]) > 0 for row in rows]
    right_tokens = sum(row["length"] for row, good in zip(rows, right, strict=True) if good)
    assert right[RIGHT] and 0 < right_tokens < len(every)
    columns = rows, right, values, old_values, advs, returns
    for row, good, value, old_value, adv, return_ in zip(*columns, strict=True):
        adv = (adv - every.mean()) / every.std()
        ids, n = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(row["response_ids"])
        logp = (lm(input_ids=ids).logits[0, -n - 1 : -1] / args.temperature).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        logp, rollout = logp[range(n), row["response_ids"]], torch.tensor(row["rollout_logps"])
        ratio = (logp - rollout - 0.05).exp()
        pg = torch.maximum(-ratio * adv, -ratio.clamp(0.9, 1.3) * adv)
        pg = torch.where(adv < 0, torch.minimum(pg, -3.0 * adv), pg) * 2.718281828**0.05
        kl = (rollout - 0.1 - logp).exp() - (rollout - 0.1 - logp) - 1
        loss = loss + (pg + 0.1 * kl - 0.01 * entropy).sum() / len(every)
        loss = loss - 0.5 * good * logp.sum() / right_tokens
        clipped = torch.minimum(torch.maximum(value, old_value - 0.2), old_value + 0.2)
        worst = torch.maximum((value - return_) ** 2, (clipped - return_) ** 2)
        value_loss = value_loss + (worst / 2).sum() / len(every)
    loss.backward()
    value_loss.backward()
    return [[p.grad for p in model.parameters()] for model in (lm, critic)]


def updates(policy, critic, args, device):
    """-> the actor's and the critic's gradients, and the metrics of both updates."""
    batch = prepare(make_rows(), critic, args, device, MOVED)
    optimizer, critic_optimizer = (Capture(model.parameters(), lr=1.0) for model in (policy, critic))
    metrics = ppo.update_critic(critic, critic_optimizer, batch, args)
    metrics |= ppo.update_actor(policy, optimizer, batch, args)[0]
    return optimizer.grads, critic_optimizer.grads, metrics


def gradients(policy, critic, base, mesh, device):
    """(actor's, critic's) gradients by budget and layout."""
    results = {}
    assert ppo.share_prefixes(base).attn_implementation == "shared"
    for budget in (70, 200, 100_000):  # 200: two of three responses share a row
        # as in gradients.py
        for layout, kernel in dict(shared="shared", packed="flash_attention_2", padded="sdpa").items():
            for model in (policy, critic):
                model.lm.set_attn_implementation("shared" if layout == "shared" else "sdpa")
            args = dataclasses.replace(base, max_tokens_per_microbatch=budget, attn_implementation=kernel)
            results[budget, layout] = updates(policy, critic, args, device)[:2]
    if dist.get_world_size() == 2:  # every rank has all weights
        replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        models = ppo.load_model(base, replicas, device), ppo.load_critic(base, replicas, device)
        args = dataclasses.replace(base, max_tokens_per_microbatch=70)
        results["hsdp"] = updates(*models, args, device)[:2]
        args = ppo.share_rows(dataclasses.replace(args, sp_size=2), device)
        models = ppo.load_model(args, mesh, device, wrap=ppo.Sliced), ppo.load_critic(args, mesh, device)
        results["sliced"] = updates(*models, args, device)[:2]
        ppo.share_rows(base, device)
    # what the optimizers see, and what is reported, where the norm is far over its bound
    args = dataclasses.replace(base, grad_clip=1e-3)
    *results["clipped"], metrics = updates(policy, critic, args, device)
    results["norms"] = [float(metrics[f"{model}/grad_norm"]) for model in ("actor", "critic")]
    return results


def scores(args, mesh, device):
    """Results of the reward model, in four ways.

    More texts than fit a micro-batch; only one, so that a second rank has none; without a pad token; with a
    limit of tokens that one text exceeds, and a head that gives NaN for a text that ends in 4.
    """
    args = dataclasses.replace(args, max_tokens_per_microbatch=30)
    [model], [tokenizer] = ppo.load_reward_models(args, mesh, device), ppo.check_models(args)
    score = partial(ppo.model_scores, model, tokenizer, args=args, device=device)
    results = [score(rows=make_rows()), score(rows=make_rows()[:1])]
    model.config.pad_token_id = None
    results.append(score(rows=make_rows()))
    model.config.max_position_embeddings = 15
    embed = full(model.model.embed_tokens.weight)
    embed[tokenizer.convert_tokens_to_ids("4")] = float("nan")
    options = ppo.dcp_state.StateDictOptions(full_state_dict=True, strict=False)
    ppo.dcp_state.set_model_state_dict(model, {"model.embed_tokens.weight": embed}, options=options)
    return [*results, score(rows=make_rows())]


def fit(critic, optimizer, args, device):
    """critic/vf_explained_var over updates on one batch."""
    rows, explained = make_rows(), []
    for _ in range(60):
        batch = prepare(rows, critic, args, device)
        metrics = ppo.critic_metrics(rows, ppo.advantages(rows, batch, 0.0, args), args)
        explained.append(metrics["critic/vf_explained_var"])
        ppo.update_critic(critic, optimizer, batch, args)
    return explained


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def checkpoint(policy, critic, critic_optimizer, args, device):
    """What is trained, moments and KL weight included, after two ranks saved it or one loaded it.

    Of the actor, adapters.
    """
    actor = ppo.Adapters(policy.lm, args)
    weight, optimizer = ppo.AdaptiveKL(0.1, 1.0, 10), torch.optim.AdamW(actor.parameters(), lr=1e-3)
    trained, optimizers = ppo.Trained(actor, critic.lm, weight), [optimizer, critic_optimizer]
    if dist.get_world_size() == 2:
        ppo.update_actor(policy, optimizer, prepare(make_rows(), critic, args, device), args)
        weight.update(5.0, 1)
        ppo.save_checkpoint(args, 7, trained, optimizers, ppo.load_processor(args.model))
    else:
        path = Path(args.output_dir) / "checkpoints/latest"
        assert ppo.load_checkpoint([path], trained, optimizers)["step"] == 7
    moments = [full(state["exp_avg"]) for one in optimizers for state in one.state.values()]
    return {name: full(x) for name, x in trained.state_dict().items()} | dict(enumerate(moments))


def main(model, critic_model, reward_model, out):
    device, mesh = ppo.setup_distributed(1)
    args = ppo.Args(model=model, train_files=(), output_dir=str(Path(out).parent), attn_implementation="sdpa")
    args = dataclasses.replace(args, critic_model=critic_model, reward_model=(reward_model,), grad_clip=1e9)
    args = dataclasses.replace(
        args, max_prompt_length=60, ppo_mini_batch_size=2, group_size=3, max_response_length=64
    )
    plain = dataclasses.replace(args, critic_model=None, reward_model=(), grad_clip=1.0, lora_rank=4)
    args = dataclasses.replace(args, temperature=0.7, gamma=0.9, lam=0.8, use_kl_in_reward=True)
    args = dataclasses.replace(args, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
    args = dataclasses.replace(args, clip_ratio_low=0.1, clip_ratio_high=0.3, cliprange_value=0.2)
    args = dataclasses.replace(args, critic_lam=0.95, lam_alpha=0.2, positive_nll_coef=0.5)
    policy, critic = ppo.load_model(args, mesh, device), ppo.load_critic(args, mesh, device)
    results = gradients(policy, critic, args, mesh, device) | dict(scores=scores(args, mesh, device))
    fresh = ppo.load_critic(plain, mesh, device)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=3e-3)
    results["explained"] = fit(fresh, optimizer, plain, device)
    results["checkpoint"] = checkpoint(policy, fresh, optimizer, plain, device)
    if dist.get_world_size() == 1:
        lm = ppo.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        head = ppo.AutoModelForSequenceClassification.from_pretrained(critic_model, dtype=torch.float32)
        results["naive"] = naive(lm, head, args)
    if dist.get_rank() == 0:
        torch.save(results, out)
    ppo.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
