"""The mathematics of DAPO against tables computed by hand."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import golden

from algos import dapo


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", golden("overlong_penalties"))
def test_overlong_penalty(case):
    length_n = torch.tensor([case["length"]])
    found_n = dapo.overlong_penalty(length_n, case["max_length"], case["buffer"])
    assert found_n.tolist() == [case["expected"]]


@pytest.mark.parametrize("case", golden("keep_groups"))
def test_keep_groups(case):
    keep_n = dapo.keep_groups(f64(*case["acc"]), torch.tensor(case["group"]))
    assert keep_n.dtype == torch.bool
    assert keep_n.tolist() == case["expected"]


def test_draw_goes_through_the_data_epoch_by_epoch():
    data = [dict(name=i, index=i) for i in range(5)]
    whole = dapo.draw(data, 1, 0, 15)
    names = [row["name"] for row in whole]
    assert [sorted(names[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert names[:5] != names[5:10]
    assert [row["index"] for row in whole] == [row["group"] for row in whole] == list(range(15))
    assert dapo.draw(data, 1, 5, 0) == []
    for start in range(13):  # the same prompts, however the batches are cut
        assert dapo.draw(data, 1, start, 2) == whole[start : start + 2]
    assert dapo.draw(data, 2, 0, 15) != whole


def test_a_group_is_as_old_as_its_oldest_token():
    """Step 3 is over: tokens of steps 1 and 3 are three steps old in the next. A row may have none yet."""
    rows = [dict(group=0, length=0, step_t=[]), dict(group=0, length=2, step_t=[1, 3])]
    rows += [dict(group=1, length=1, step_t=[2]), dict(group=2, length=0, step_t=[])]
    assert dapo.split_by_age(rows, 3, 3) == (rows, [])
    assert dapo.split_by_age(rows, 3, 2) == (rows[2:], rows[:2])
    assert dapo.split_by_age(rows, 3, 0) == (rows[3:], rows[:3])


def test_what_is_too_long_is_punished_or_filtered():
    """At most 10 tokens, a buffer of 2: scores 1 0 1 of 8, 9 and 10 tokens are rewards of 1 -1/2 0."""
    lengths, ends = (8, 9, 10), ("stop", "stop", "length")
    rows = [dict(group=0, length=n, finish_reason=end) for n, end in zip(lengths, ends)]
    for row, score in zip(rows, (1.0, 0.0, 1.0)):
        row |= dict(reward=dict(score=score), mask_t=np.ones(row["length"], bool))
    for filtering in (False, True):
        args = dapo.Args(model="", train_files=(), output_dir="", max_response_length=10)
        args.overlong_filtering = filtering
        found = dapo.assign_advantages(rows, args)
        assert [row["mask_t"].all() for row in rows] == [True, True, not filtering]
        assert found["dapo/overlong"] == 2 and found["critic/rewards/min"] == -0.5
    adv_n = dapo.group_advantages(f64(1, -0.5, 0), torch.zeros(3))
    for row, adv in zip(rows, adv_n.tolist()):
        assert row["adv_t"].tolist() == pytest.approx([adv] * row["length"])


def test_rows_wait_in_the_state_of_a_checkpoint():
    row = dict(prompt_ids=[5, 6], reward=dict(score=0.5), length=3)
    for name, dtype in dapo.ARRAYS.items():
        row[name] = np.array([0, 1, 3], dtype)
    row["rollout_logp_t"][:2] = -math.inf, math.nan  # as a sampler may give them
    progress = dapo.Progress(drawn=9, kept=0.5, surplus=[row], unfinished=[row, row])
    again = dapo.read_progress(json.loads(json.dumps(dapo.as_state(progress))))
    assert again.drawn == 9 and again.kept == 0.5 and len(again.unfinished) == 2
    for found in again.surplus + again.unfinished:
        assert found.keys() == row.keys()
        for name, value in row.items():
            np.testing.assert_array_equal(found[name], value)
            assert getattr(found[name], "dtype", None) == getattr(value, "dtype", None)
