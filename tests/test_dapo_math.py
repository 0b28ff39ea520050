"""The mathematics of DAPO against tables computed by hand."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algos import dapo


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("length", "max_length", "buffer", "expected"),
    [
        (0, 10, 4, 0.0),
        (6, 10, 4, 0.0),  # the buffer begins after L - b
        (7, 10, 4, -0.25),
        (8, 10, 4, -0.5),
        (9, 10, 4, -0.75),
        (10, 10, 4, -1.0),
        (11, 10, 4, -1.0),
        (10, 10, 0, 0.0),  # no buffer, no penalty
        (5, 10, 10, -0.5),  # all of the response is buffer
        (16384, 20480, 4096, 0.0),  # the paper's
        (18432, 20480, 4096, -0.5),
        (20480, 20480, 4096, -1.0),
    ],
)
def test_overlong_penalty(length, max_length, buffer, expected):
    assert dapo.overlong_penalty(torch.tensor([length]), max_length, buffer).tolist() == [expected]


@pytest.mark.parametrize(
    ("acc", "group", "expected"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]),  # all right
        ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),  # all wrong
        ([-1, -1, -1, 1], [0, 0, 0, 0], [1, 1, 1, 1]),
        ([1, 0, 1, 1], [7, 7, 8, 8], [1, 1, 0, 0]),
        ([1, 1, 0, 1], [7, 8, 7, 8], [1, 0, 1, 0]),  # interleaved
        ([0.5, 0.5, 0.5, 0.25], [3, 3, 4, 4], [0, 0, 1, 1]),  # partial credit
        ([1], [0], [0]),  # one response has no spread
        ([], [], []),
    ],
)
def test_keep_groups(acc, group, expected):
    keep_n = dapo.keep_groups(f64(*acc), torch.tensor(group))
    assert keep_n.dtype == torch.bool and keep_n.tolist() == list(map(bool, expected))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), min_size=1, max_size=30))
def test_kept_groups_are_those_with_an_advantage(rows):
    acc_n, group_n = f64(*(a for a, _ in rows)), torch.tensor([g for _, g in rows])
    member_n = torch.tensor([sum(g == h for _, h in rows) > 1 for _, g in rows])
    adv_n = dapo.group_advantages(acc_n, group_n)
    assert torch.equal(dapo.keep_groups(acc_n, group_n), (adv_n != 0) & member_n)


def test_defaults_are_the_papers():
    args = dapo.Args(model="", train_files=(), output_dir="")
    assert args.overlong_penalty == 1 and not hasattr(args, "use_kl_loss")


def test_draw_goes_through_the_data_epoch_by_epoch():
    data = [dict(name=i, index=i) for i in range(5)]
    whole = dapo.draw(data, 1, 0, 15)
    names = [row["name"] for row in whole]
    assert [sorted(names[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert names[:5] != names[5:10]
    assert [row["index"] for row in whole] == [row["group"] for row in whole] == list(range(15))
    for start in range(13):  # the same prompts, however the batches are cut
        assert dapo.draw(data, 1, start, 2) == whole[start : start + 2]
    assert dapo.draw(data, 2, 0, 15) != whole


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(dapo.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dapo.dist, "get_rank", lambda: 0)


def make_row(prompt, n, **more):
    """A scored row; its log-probs are minus `prompt`."""
    row = dict(prompt_ids=[prompt], response_ids=[2] * n, rollout_logps=[-1.0 * prompt] * n)
    return row | dict(prompt_length=1, length=n, rank=0, finish_reason="stop") | more


@pytest.mark.parametrize("filtering", (False, True))
def test_overlong_filtering(monkeypatch, filtering):
    """A truncated response has no weight in the loss, and the others share it."""
    args = dapo.Args(model="", train_files=(), output_dir="", overlong_filtering=filtering, group_size=3)
    args = dataclasses.replace(args, train_batch_size=1, ppo_mini_batch_size=1)
    why = {1: "stop", 4: "length", 2: "stop"}
    rows = [make_row(1, n, group=0, carried_over=False) | dict(finish_reason=why[n]) for n in why]
    monkeypatch.setattr(dapo, "exchange", lambda parts: parts)
    batch, _ = dapo.make_batch(rows, f64(1, 0, -1), args, torch.device("cpu"))
    counted = {len(batch["responses"][i]): batch["counted_nt"][i].item() for i in range(3)}
    assert counted == {1: True, 2: True, 4: not filtering}
    assert batch["counted"] == [(3, 2) if filtering else (7, 3)] and batch["totals"] == [(7, 3)]
    part = dapo.columns(batch, range(3), torch.device("cpu"))
    weight_nt = dapo.loss_weights(part["mask_nt"] & part["counted_nt"], "token-mean", 4, batch["counted"][0])
    weight = {len(ids): row.tolist() for ids, row in zip(batch["responses"], weight_nt, strict=True)}
    each = 1 / 3 if filtering else 1 / 7
    assert weight[1] == pytest.approx([each, 0, 0, 0]) and weight[2] == pytest.approx([each, each, 0, 0])
    assert weight[4] == pytest.approx([0 if filtering else each] * 4)


def test_surplus_groups_keep_their_log_probs(monkeypatch):
    """Their sampler was one with other weights: no disagreement, and each row keeps its own log-probs."""
    args = dapo.Args(model="", train_files=(), output_dir="", group_size=2, ppo_mini_batch_size=2)
    rows = [make_row(n, n, group=n // 3, carried_over=n > 2) for n in (1, 2, 3, 4)]
    monkeypatch.setattr(dapo, "exchange", lambda parts: parts)
    batch, _ = dapo.make_batch(rows, f64(1, 0, -1, 0), args, torch.device("cpu"))
    for i, prompt in enumerate(batch["prompts"]):
        [n] = prompt
        assert batch["rollout_logp_nt"][i].tolist() == [-1.0 * n] * n
        assert (i in batch["new"]) == (n <= 2)
