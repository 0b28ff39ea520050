"""PPO on fixed rows, on one rank or two: MODEL CRITIC CRITIC_OF_QUANTILES REWARD_MODEL OUT.

Writes the gradients of both updates, for many ways to split the same work, and clipped ones; results of
the reward model; a new critic's head; what is in a checkpoint that two ranks write and one reads.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from shared import Capture, clipped_loss, fill_adapters, full, plain_logps, save, trained
from shared import make_rows as sampled_rows
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import ppo
from data_prep.lib.images import load_tokenizer
from system.batches import distribute, store_logps
from system.checkpoints import load_checkpoint, read_state, write_checkpoint
from system.model import whole_weights
from system.ranks import setup_distributed

MOVED = 0.3  # change of the values since the step began: more than --cliprange_value
CORRECT = 1  # a response with a negative score
TEXTS = ["7", "1234", "", "a9", "no digit", "5 and a long end 3"]  # responses for the reward model
# attention of the policy and of the critic; by sdpa they share rows, by eager they do not
LAYOUTS = dict(padded=("eager", "eager"), one_row=("sdpa", "sdpa"), mixed=("sdpa", "eager"))


def make_rows():
    """The rows of a step, on every rank all of them."""
    rows = sampled_rows()
    for row, text in zip(rows, TEXTS, strict=True):
        row |= dict(prompt=[dict(role="user", content="?")], sampled=dict(solution_str=text))
        row |= dict(reward=dict(score=row["adv_t"][0].item()))
    rows[CORRECT]["reward"] |= dict(score=-1.0, acc=1.0)
    return rows


def prepare(policy, critic, args, kl_coef=0.2, moved=0.0):
    """What main does between rewards and updates, with fixed old and reference log-probs.

    moved: how far the values of the critic are from what they were when the step began, up and down in turn.
    -> the mini-batches, and what metrics are made of.
    """
    rows = make_rows()
    for row, weight in zip(rows, ppo.nll_weights(rows, args), strict=True):
        row["nll_weight_t"] = weight.expand(row["length"])
    budget = args.max_tokens_per_microbatch
    mini_batches, own_rows, _ = distribute(rows, 1, budget, policy.packed and critic.packed)
    store_logps(critic, mini_batches, "value_t", args.temperature, budget)
    for row in own_rows:
        row["value_t"] = row["value_t"] + moved * (-1.0) ** torch.arange(row["length"])[:, None]
    step_nt = ppo.advantages(own_rows, kl_coef, args.critic_lam or args.lam, args)
    return mini_batches, ppo.critic_metrics(rows, step_nt, replace(args, reward_model=()))


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
        values.append(critic.score(hidden))
        old_values.append(values[-1].detach() + MOVED * torch.tensor([[(-1.0) ** t] for t in range(n)]))
        mean, spread = old_values[-1].mean(1), [*old_values[-1].std(1, correction=0).tolist(), 0.0]
        scored, lam = (row["reward"]["score"], mean, args.gamma), 1 - 1 / (args.lam_alpha * n)
        advs.append(plain_gae(*scored, max(lam, 0)) + args.uncertainty_bonus * torch.tensor(spread[1:]))
        returns.append(plain_gae(*scored, args.critic_lam) + mean)
    every, loss, value_loss = torch.cat(advs), 0.0, 0.0
    correct = [row["reward"].get("acc", row["reward"]["score"]) > 0 for row in rows]
    correct_tokens = sum(row["length"] for row, good in zip(rows, correct, strict=True) if good)
    assert correct[CORRECT] and 0 < correct_tokens < len(every)
    columns = rows, correct, values, old_values, advs, returns
    for row, good, value, old_value, adv, return_ in zip(*columns, strict=True):
        adv = (adv - every.mean()) / every.std()
        n = row["length"]
        logp = plain_logps(lm, row["prompt_ids"], row["response_ids"], args.temperature)
        entropy = -(logp.exp() * logp).sum(-1)
        logp, rollout = logp[range(n), row["response_ids"]], row["rollout_logp_t"]
        ratio = (logp - rollout - 0.05).exp()
        pg = clipped_loss(ratio, adv, 0.9, 1.3) * 2.718281828**0.05
        loss = loss + (pg - 0.01 * entropy).sum() / len(every)
        loss = loss - 0.5 * good * logp.sum() / correct_tokens
        for i, (v, old) in enumerate(zip(value.unbind(1), old_value.unbind(1), strict=True)):
            losses, tau = [], (i + 0.5) / args.value_quantiles
            for x in (v, torch.minimum(torch.maximum(v, old - 0.2), old + 0.2)):
                pinball = torch.maximum(tau * (return_ - x), (tau - 1) * (return_ - x))
                losses.append(pinball if args.value_quantiles > 1 else (x - return_) ** 2 / 2)
            value_loss = value_loss + torch.maximum(*losses).sum() / len(every) / args.value_quantiles
    loss.backward()
    value_loss.backward()
    return [[p.grad for p in trained(model)] for model in (lm, critic)]


def update_critic(critic, optimizer, mini_batches, args):
    return ppo.update(critic, optimizer, mini_batches, partial(ppo.critic_loss, args), "critic", args)


def update_actor(policy, optimizer, mini_batches, args):
    args, token_loss = ppo.load_loss(args, clip=ppo.policy_loss)
    loss = partial(ppo.actor_loss, args, token_loss)
    return ppo.update(policy, optimizer, mini_batches, loss, "actor", args)


def updates(policy, critic, args):
    """-> the actor's and the critic's gradients, and the metrics of both updates."""
    optimizer, critic_optimizer = (Capture(trained(model), lr=1.0) for model in (policy, critic))
    mini_batches, _ = prepare(policy, critic, args, moved=MOVED)
    metrics = update_critic(critic, critic_optimizer, mini_batches, args)
    metrics |= update_actor(policy, optimizer, mini_batches, args)
    return optimizer.grads, critic_optimizer.grads, metrics


def load(args, mesh, device, layout="one_row"):
    """-> policy and critic."""
    actor, critic = (replace(args, attn_implementation=kernel) for kernel in LAYOUTS[layout])
    policy = ppo.load_model(actor, actor.model, mesh, device, ppo.adapters_of(actor))
    models = policy, ppo.load_critic(critic, mesh, device)
    assert [model.packed for model in models] == [kernel == "sdpa" for kernel in LAYOUTS[layout]]
    return models


def gradients(args, lora, mesh, device):
    """(actor's, critic's) gradients by budget and layout, with replicas, and with adapters of the actor."""
    results = {}
    for layout in LAYOUTS:
        models = load(args, mesh, device, layout)
        for budget in (70, 200, 100_000):  # 200: two of three responses share a row
            cut = replace(args, max_tokens_per_microbatch=budget)
            results[budget, layout] = updates(*models, cut)[:2]
    # what the optimizers see, and what is reported, where the norm is far over its bound
    *results["clipped"], metrics = updates(*models, replace(args, grad_clip=1e-3))
    results["norms"] = [float(metrics[f"{model}/grad_norm"]) for model in ("actor", "critic")]
    small = dict(max_tokens_per_microbatch=70)
    if dist.get_world_size() == 2:  # every rank has all weights
        replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        models = load(args, replicas, device)
        results["hsdp"] = updates(*models, replace(args, **small))[:2]
    models = load(lora, mesh, device)
    fill_adapters(models[0].lm)
    results["lora"] = updates(*models, replace(lora, **small))[:2]
    return results


def scores(args, mesh, device):
    """Results of the reward model, in four ways.

    More texts than fit a micro-batch; only one, so that a second rank has none; without a pad token; with a
    limit of tokens that one text exceeds, and a head that gives NaN for a text that ends in 4.
    """
    args = replace(args, max_tokens_per_microbatch=30)
    model = ppo.load_reward_model(args, args.reward_model[0], mesh, device)
    tokenizer = load_tokenizer(args.reward_model[0])
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def score(rows):
        """The results of all ranks, in the order of the rows."""
        by_rank, results = [None] * ranks, [None] * len(rows)
        dist.all_gather_object(by_rank, ppo.model_scores(model, tokenizer, rows[rank::ranks], args))
        for number, own in enumerate(by_rank):
            results[number::ranks] = own
        return results

    results = [score(make_rows()), score(make_rows()[:1])]
    model.config.pad_token_id = None
    results.append(score(make_rows()))
    model.config.max_position_embeddings = 15
    embed = full(model.model.embed_tokens.weight)
    embed[tokenizer.convert_tokens_to_ids("4")] = float("nan")
    options = dcp_state.StateDictOptions(full_state_dict=True, strict=False)
    dcp_state.set_model_state_dict(model, {"model.embed_tokens.weight": embed}, options=options)
    return [*results, score(make_rows())]


def checkpoint(policy, critic, critic_optimizer, args):
    """What is trained, moments and KL weight included, after two ranks saved it or one loaded it.

    Of the actor, adapters: one rank starts with others.
    """
    optimizer = torch.optim.AdamW(trained(policy), lr=1e-3)
    models, optimizers = dict(hf=policy.lm, critic=critic.lm), [optimizer, critic_optimizer]
    if dist.get_world_size() == 2:
        mini_batches, _ = prepare(policy, critic, args)
        update_critic(critic, critic_optimizer, mini_batches, args)
        update_actor(policy, optimizer, mini_batches, args)
        state = dict(step=7, kl_coef=ppo.adapted(0.1, 5.0, 1.0, 1, horizon=7))
        parts = models, optimizers, load_tokenizer(args.model), whole_weights
        write_checkpoint(Path(args.output_dir), args.model, 0, state, *parts)
    else:
        latest = Path(args.output_dir) / "checkpoints/latest"
        load_checkpoint(latest, models, optimizers)
        state = read_state(latest)
    moments = [full(state["exp_avg"]) for one in optimizers for state in one.state.values()]
    weights = [full(p) for model in (policy, critic) for p in trained(model)]
    return dict(weights=weights, moments=moments, step=state["step"], kl_coef=state["kl_coef"])


def main(model, critic_model, quantile_critic, reward_model, out):
    device, mesh = setup_distributed()
    args = ppo.Args(
        model=model,
        critic_model=critic_model,
        reward_model=(reward_model,),
        train_files=(),
        output_dir=str(Path(out).parent),
        max_prompt_length=60,
        max_response_length=64,
        ppo_mini_batch_size=2,
        group_size=3,
        grad_clip=1e9,
    )
    plain = replace(args, critic_model=None, reward_model=(), grad_clip=1.0)
    plain = replace(plain, lora_rank=4, seed=dist.get_world_size())
    args = replace(
        args,
        temperature=0.7,
        gamma=0.9,
        lam=0.8,
        kl_coef=0.2,
        entropy_coeff=0.01,
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
        cliprange_value=0.2,
        critic_lam=0.95,
        lam_alpha=0.2,
        positive_nll_coef=0.5,
    )
    lora = replace(args, lora_rank=4, critic_model=quantile_critic, value_quantiles=3)
    lora = replace(lora, uncertainty_bonus=0.5)
    results = gradients(args, lora, mesh, device) | dict(scores=scores(args, mesh, device))
    policy, critic = load(plain, mesh, device)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-3)
    results["new head"] = full(critic.lm.score.weight)
    results["checkpoint"] = checkpoint(policy, critic, optimizer, plain)
    if dist.get_world_size() == 1:
        for name, way in dict(naive=args, naive_lora=lora).items():
            lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            ppo.adapters_of(way)(lm)
            fill_adapters(lm)
            of = way.critic_model
            head = AutoModelForSequenceClassification.from_pretrained(of, dtype=torch.float32)
            results[name] = naive(lm, head, way)
    save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
