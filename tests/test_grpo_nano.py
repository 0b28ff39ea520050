"""grpo_nano.py from end to end: the numbers of grpo.py, on two ranks, and as a killed copy elsewhere."""

import math
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    as_installed,
    changed,
    flags_of,
    hf,
    killed_at_a_checkpoint,
    load_weights,
    metrics,
    run,
)

from algos import grpo_nano

NANO, GRPO = ROOT / "algos/grpo_nano.py", ROOT / "algos/grpo.py"
SHOWN = "critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl"


FLAGS = (
    "--train_batch_size 8 --ppo_mini_batch_size 4 --max_prompt_length 16 --max_response_length 12"
    " --lr 3e-3 --total_steps 5 --save_freq 2 --test_freq 3 --max_tokens_per_microbatch 300"
)


def flags(tiny, arithmetic, out):
    reward = "--reward_fn", f"{ROOT}/tests/digit_reward.py:digits"
    return [*flags_of(tiny, arithmetic, out, FLAGS), *reward]


@pytest.fixture(scope="module")
def straight(tiny, arithmetic, tmp_path_factory):
    out = tmp_path_factory.mktemp("nano")
    run(NANO, *flags(tiny, arithmetic, out))
    return out


def test_it_is_grpo(straight, tiny, arithmetic, tmp_path):
    run(GRPO, *flags(tiny, arithmetic, tmp_path))
    ours, theirs = metrics(straight), metrics(tmp_path)
    assert list(ours) == list(theirs) == [0, 1, 2, 3, 4, 5]
    assert ours[5]["critic/score/mean"] > ours[1]["critic/score/mean"]
    for step in range(1, 6):
        for name in SHOWN:
            assert ours[step][name] == pytest.approx(theirs[step][name], rel=1e-4, abs=1e-6), name
        assert set(ours[step]) <= set(theirs[step])
    assert ours[5]["training/rollout_logp_diff_mean"] < 1e-5
    weights = (load_weights(hf(out)) for out in (straight, tmp_path))
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_a_killed_copy_elsewhere_is_resumed_to_the_bit(straight, tiny, arithmetic, tmp_path):
    """Shared modules ask for no flag that the script has not: it is started from a directory of its own."""
    script, out = shutil.copy(NANO, tmp_path / "mine.py"), tmp_path / "run"
    command = *as_installed(script), *flags(tiny, arithmetic, out)
    killed_at_a_checkpoint(command, out)
    run(*command)
    assert not changed(hf(out), hf(straight))


def test_two_ranks(straight, tiny, arithmetic, tmp_path):
    run(NANO, *flags(tiny, arithmetic, tmp_path), ranks=2)
    for name in SHOWN:
        assert metrics(tmp_path)[2][name] == pytest.approx(metrics(straight)[2][name], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("gap", "stops"), ((1e-6, False), (0.01, True), (math.nan, True)))
def test_the_sampler_must_hold_the_trainers_weights(gap, stops, monkeypatch):
    monkeypatch.setattr(grpo_nano, "all_reduce", lambda values: values)
    args = SimpleNamespace(compute_dtype="float32")
    row = dict(old_logp_t=torch.full((3,), -1.0 - gap), rollout_logp_t=np.full(3, -1.0, np.float32))
    rows = [row, row | dict(old_logp_t=torch.full((3,), -1.0))]
    check = partial(grpo_nano.check_sampler, SimpleNamespace(lm=torch.nn.Linear(1, 1)), rows, args, 1)
    if stops:
        with pytest.raises(SystemExit, match="step 1: sampler and trainer differ"):
            check()
    else:
        assert check()["training/rollout_logp_diff_mean"] == pytest.approx(gap / 2, rel=0.1)
