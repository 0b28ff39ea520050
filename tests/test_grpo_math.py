"""The mathematics of GRPO against tables computed by hand."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AttentionInterface

from algos import dapo, grpo, ppo
from tests import families


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


class LookUp(nn.Module):
    """A language model whose logits after token i are row i of a table."""

    def __init__(self, vocab):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, vocab), nn.Linear(vocab, vocab, bias=False)
        nn.init.eye_(self.head.weight)
        self.base_model = lambda input_ids, **_: SimpleNamespace(last_hidden_state=self.embed(input_ids))
        self.get_output_embeddings = lambda: self.head
        self.config = SimpleNamespace()


@pytest.mark.parametrize("layout", (grpo.padded, grpo.packed, grpo.shared))
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_token_logps_of_a_lookup_table(layout, temperature):
    policy = grpo.TokenLogps(LookUp(6))
    prompts, responses = [[1, 2], [3], [3], [4, 4, 4]], [[5, 1, 3], [2], [1, 4], [0, 5]]
    logp_nt, entropy_nt = grpo.token_logps(policy, prompts, responses, temperature, layout)
    table = (policy.lm.embed.weight / temperature).log_softmax(-1)
    for n, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        before = [p[-1], *r[:-1]]  # the token that predicts each response token
        for t in range(3):
            inside = t < len(r)
            assert logp_nt[n, t].item() == (pytest.approx(table[before[t], r[t]].item()) if inside else 0)
            row = table[before[t]] if inside else torch.zeros(1)
            assert entropy_nt[n, t].item() == pytest.approx(-(row.exp() * row).sum().item() if inside else 0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("temperature", (1.0, 0.7))
@pytest.mark.parametrize("chunk", (1, 2, 3, 100))
@pytest.mark.parametrize("softcap", (None, 0.5))
def test_chunks_of_logits_change_nothing(monkeypatch, chunk, temperature, dtype, softcap):
    """Log-probs, entropies and all gradients are those of plain autograd, whatever the chunk."""
    torch.manual_seed(0)
    monkeypatch.setattr(grpo, "LOGIT_CHUNK", chunk)
    inputs = [torch.randn(n, 4, dtype=dtype, requires_grad=True) for n in (5, 7)]
    target, a, b = torch.tensor([0, 6, 2, 2, 5]), torch.randn(5), torch.randn(5)
    logits = inputs[0].float() @ inputs[1].float().t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logp_lv = (logits / temperature).log_softmax(-1)
    plain = logp_lv[torch.arange(5), target], -(logp_lv.exp() * logp_lv).sum(-1)
    chunked = grpo.LogProbs.apply(*inputs, target, temperature, softcap)
    near = dict(rtol=1e-4, atol=1e-6) if dtype is torch.float32 else dict(rtol=0.05, atol=0.05)
    torch.testing.assert_close(chunked, plain, **near)
    ours, theirs = (torch.autograd.grad((x * a + y * b).sum(), inputs) for x, y in (chunked, plain))
    torch.testing.assert_close(ours, theirs, **near)


def test_entropy_is_left_out_where_nobody_uses_it():
    """Of validation and old log-probs, which have no backward, and of SFT: the rest stays as it is."""
    torch.manual_seed(0)
    inputs = [torch.randn(n, 4, requires_grad=True) for n in (5, 7)]
    target = torch.tensor([0, 6, 2, 2, 5])
    apply = lambda entropy: grpo.LogProbs.apply(*inputs, target, 0.7, None, entropy)
    (logp, entropy), (same, none) = apply(True), apply(False)
    assert (entropy > 0).all() and (none == 0).all() and torch.equal(logp, same)
    ours, theirs = (torch.autograd.grad(x.sum(), inputs) for x in (same, logp))
    torch.testing.assert_close(ours, theirs)
    inputs[0] = inputs[0].detach()  # as a model's output is under no_grad
    assert torch.equal(apply(True)[0], logp) and (apply(True)[1] == 0).all()


def test_a_frozen_output_layer_gets_no_gradient():
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)  # LoRA
    grpo.LogProbs.apply(hidden, weight, torch.zeros(5, dtype=torch.long), 1.0, None)[0].sum().backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


def test_logits_take_two_buffers_of_a_chunk(monkeypatch):
    """No pass, forward or backward, makes a tensor as large as a chunk of logits but those two."""
    monkeypatch.setattr(grpo, "LOGIT_CHUNK", 64)
    hidden, weight = torch.randn(640, 8, requires_grad=True), torch.randn(999, 8)
    target = torch.zeros(640, dtype=torch.long)
    with torch.profiler.profile(profile_memory=True) as profile:
        grpo.LogProbs.apply(hidden, weight, target, 1.0, None)[0].sum().backward()
    made = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sum(n for n in made if n >= 64 * 999 * 4) == 2 * 64 * 999 * 4


def test_packed_rows_by_hand():
    inputs, where = grpo.packed([[7, 8], [9]], [[1, 2], [4]])
    assert inputs["input_ids"].tolist() == [[7, 8, 1, 2, 9, 4]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 4, 6]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 4
    assert [x.tolist() for x in where] == [[1, 2], [4]]


def by_borders(module, query, key, value, mask, scaling, cu_seq_lens_q, max_length_q, **unused):
    """As flash attention does it: borders of rows by what is passed, not by position ids."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    pieces = zip(*(x.split(cu_seq_lens_q.diff().tolist(), 2) for x in (query, key, value)), strict=True)
    assert max_length_q == cu_seq_lens_q.diff().max() and mask is None
    out = [nn.functional.scaled_dot_product_attention(*p, is_causal=True, scale=scaling) for p in pieces]
    return torch.cat(out, 2).transpose(1, 2), None


@pytest.mark.parametrize("family", ("llama", "qwen2", "qwen3", "mixtral"))
def test_borders_of_packed_rows_reach_the_kernel(family):
    AttentionInterface.register("by_borders", by_borders)
    policy = grpo.TokenLogps(families.build(family).eval())
    texts = [[7, 8], [9, 10, 11], [12]], [[1, 2], [4], [5, 6, 7]]
    logp_nt = []
    for kernel, layout in (("sdpa", grpo.padded), ("by_borders", grpo.packed)):
        policy.lm.set_attn_implementation(kernel)
        logp_nt.append(grpo.token_logps(policy, *texts, 1.0, layout)[0])
    torch.testing.assert_close(*logp_nt)


def test_a_tree_by_hand():
    """Two responses to prompt 7 8, then one to 9: see the docstring of `shared`."""
    inputs, where = grpo.shared([[7, 8], [7, 8], [9]], [[1, 2], [3], [4]])
    ids, positions, mask = inputs.values()
    assert ids.tolist() == [[7, 8, 1, 2, 3], [9, 4, 0, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 3, 2], [0, 1, 0, 0, 0]]
    seen = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4]]
    assert [row.nonzero().flatten().tolist() for row in mask[0, 0]] == seen
    assert [x.tolist() for x in where] == [[1, 2], [1], [5]]


@pytest.mark.parametrize("grpo", (grpo, dapo))
def test_group_advantages(grpo):
    score_n, group_n = (
        f64(1, 5, 0, 0, 5, 1, 7),
        torch.tensor([0, 1, 0, 0, 1, 0, 2]),
    )  # interleaved; group 2 is alone
    std = math.sqrt(1 / 3)  # unbiased, of 1 0 0 1
    expected = [0.5 / (std + 1e-6), 0, -0.5 / (std + 1e-6), -0.5 / (std + 1e-6), 0, 0.5 / (std + 1e-6), 7]
    assert grpo.group_advantages(score_n, group_n).tolist() == pytest.approx(expected)
    assert grpo.group_advantages(score_n, group_n, norm_by_std=False).tolist() == [
        0.5,
        0,
        -0.5,
        -0.5,
        0,
        0.5,
        7,
    ]


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12), st.randoms())
def test_group_advantages_do_not_depend_on_order(scores, random):
    order = list(range(len(scores)))
    random.shuffle(order)
    group_n = torch.arange(len(scores)) % 3
    straight = grpo.group_advantages(f64(*scores), group_n)
    shuffled = grpo.group_advantages(f64(*scores)[order], group_n[order])
    assert torch.allclose(straight[order], shuffled, atol=1e-9)


@pytest.mark.parametrize("grpo", (grpo, dapo))
def test_rloo_and_reinforce_plus_plus_baseline(grpo):
    score_n, group_n, length_n = (
        f64(1, 0, 0, 1, 3, 0),
        torch.tensor([0, 0, 0, 1, 1, 1]),
        torch.tensor([1, 2, 3, 4, 5, 6]),
    )
    args = SimpleNamespace(adv_estimator="rloo", group_size=3)
    expected = [1 - 0, 0 - 0.5, 0 - 0.5, 1 - 1.5, 3 - 0.5, 0 - 2]  # score minus the mean of the two others
    assert grpo.advantages(args, score_n, group_n, length_n).tolist() == pytest.approx(expected)
    args.adv_estimator = "reinforce_plus_plus_baseline"
    tokens = grpo.advantages(args, score_n, group_n, length_n).repeat_interleave(length_n)
    assert tokens.mean().item() == pytest.approx(0, abs=1e-9)
    assert tokens.var().item() == pytest.approx(1)


@pytest.mark.parametrize("grpo", (grpo, dapo, ppo))
def test_policy_loss(grpo):
    ratio, high, low = [0.5, 1.0, 1.5, 5.0], 0.3, 0.2
    logp, old = torch.tensor([ratio]).log(), torch.zeros(1, 4)
    loss, clipped, lower = grpo.policy_loss(logp, old, torch.ones(1, 4), low, high, 3.0)
    assert loss[0].tolist() == pytest.approx([-0.5, -1.0, -1.3, -1.3])
    assert clipped[0].tolist() == [False, False, True, True] and not lower.any()
    loss, clipped, lower = grpo.policy_loss(logp, old, -torch.ones(1, 4), low, high, 3.0)
    assert loss[0].tolist() == pytest.approx([0.8, 1.0, 1.5, 3.0])
    assert clipped[0].tolist() == [True, False, False, False] and lower[0].tolist() == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("grpo", (grpo, dapo, ppo))
def test_ratio_is_bounded(grpo):
    loss, _, _ = grpo.policy_loss(
        torch.zeros(1, 1), torch.full((1, 1), -1e4), torch.ones(1, 1), 0.2, 0.2, 3.0
    )
    assert loss.isfinite().all()


@pytest.mark.parametrize("grpo", (grpo, ppo))
def test_kl_estimates(grpo):
    logp, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    expected = {
        "k1": [0.5, -1.0],
        "abs": [0.5, 1.0],
        "k2": [0.125, 0.5],
        "k3": [math.exp(-0.5) - 1 + 0.5, math.exp(1) - 1 - 1],
    }
    for kind, values in expected.items():
        assert grpo.kl_estimate(logp, ref, kind)[0].tolist() == pytest.approx(values), kind
    assert grpo.kl_estimate(torch.tensor([[-50.0]]), torch.tensor([[0.0]]), "k3").item() == 10


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4], [0, 0, 0]]),
        ("seq-mean-token-sum", [[1 / 2, 0, 0], [1 / 2, 1 / 2, 1 / 2], [0, 0, 0]]),
        ("seq-mean-token-mean", [[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6], [0, 0, 0]]),
        ("seq-mean-token-sum-norm", [[1 / 20, 0, 0], [1 / 20, 1 / 20, 1 / 20], [0, 0, 0]]),
    ],
)
@pytest.mark.parametrize("grpo", (grpo, dapo, ppo))
def test_loss_weights(grpo, mode, expected):
    mask_nt = grpo.response_mask([1, 3, 0])
    assert grpo.loss_weights(mask_nt, mode, max_length=10).tolist() == [
        pytest.approx(row) for row in expected
    ]


def test_learning_rate():
    args = SimpleNamespace(lr=1.0, warmup_steps=2, lr_schedule="linear")
    assert [grpo.learning_rate(args, s, 6) for s in range(1, 7)] == [0.5, 1, 1, 0.75, 0.5, 0.25]
    args.lr_schedule = "cosine"
    assert grpo.learning_rate(args, 5, 6) == pytest.approx(0.5)
    args.lr_schedule, args.warmup_steps = "constant", 0
    assert grpo.learning_rate(args, 1, 6) == 1


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 5))
def test_balance(lengths, ranks):
    parts = grpo.balance(lengths, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@pytest.mark.parametrize("packed", (False, True))
def test_split_micro_batches(packed, monkeypatch):
    monkeypatch.setattr(grpo, "all_reduce", lambda values, op: [values[0] + 1])  # another rank needs one more
    lengths = [3, 9, 1, 4, 4, 2]
    *batches, empty = grpo.split_micro_batches(lengths, 10, packed)
    assert empty == [] and sorted(i for b in batches for i in b) == list(range(6))
    for b in batches:
        cost = sum(lengths[i] for i in b) if packed else max(lengths[i] for i in b) * len(b)
        assert cost <= 10


def test_the_sampler_must_hold_the_trainers_weights(monkeypatch):
    """Only what this step sampled counts, and not where the sampler cuts its distribution."""
    monkeypatch.setattr(grpo, "all_reduce", lambda values, op=None: values)
    args = grpo.Args(model="", train_files=(), output_dir="", compute_dtype="float32")
    sampled_nt = torch.tensor([[True] * 2, [False] * 2])
    batch = dict(rollout_logp_nt=torch.tensor([[0.0, 0.0], [-9.0, -9.0]]), sampled_nt=sampled_nt)
    assert set(grpo.check_sampler(torch.zeros(2, 2), batch, args, 1).values()) == {0}
    empty = batch | dict(sampled_nt=torch.zeros(2, 2, dtype=torch.bool))
    assert set(grpo.check_sampler(torch.zeros(2, 2), empty, args, 1).values()) == {0}
    for wrong in (0.01, math.nan):
        with pytest.raises(SystemExit, match="weight sync failed at step 1: the sampler does not hold"):
            grpo.check_sampler(torch.full((2, 2), wrong), batch, args, 1)
    assert grpo.check_sampler(torch.full((2, 2), -0.01), batch, dataclasses.replace(args, top_p=0.9), 1)
    with pytest.raises(SystemExit):  # at the start the whole distribution is sampled
        grpo.check_sampler(torch.full((2, 2), -0.01), batch, dataclasses.replace(args, top_p=0.9), 0)


@pytest.mark.parametrize("grpo", (grpo, dapo, ppo))
def test_a_failed_reward_beats_no_wrong_answer_of_its_group(grpo, monkeypatch):
    def scored(rows, tokenizer):
        failed = dict(score=0.0, failure="TimeoutError: no result")
        rewards = dict(score=1.0), dict(score=-1.0), failed
        return [row | dict(reward=reward) for row, reward in zip(rows, rewards, strict=True)]

    monkeypatch.setattr(grpo.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(grpo.dist, "all_gather_object", lambda out, value: out.__setitem__(0, value))
    rows = [dict(group=0, sample=i, prompt_ids=[1], response_ids=[2]) for i in range(3)]
    rows, tokens = grpo.score_rows(rows, SimpleNamespace(score_responses=scored), None)
    assert [row["reward"]["score"] for row in rows] == [1, -1, -1] and tokens == [6]
