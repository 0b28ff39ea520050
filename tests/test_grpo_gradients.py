"""Gradients depend on no way to cut the work: world size, micro-batch budget, layout of the rows."""

import pytest
import torch
from conftest import ROOT, run
from workers.shared import distance

from algos.variants import known

RANKS = {"1": (1, 1), "2": (2, 1), "2 hsdp": (2, 2)}  # ranks and replicas of the sharded model
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES = {*MODES, *known("policy_loss"), "lora"}
FEWER = {"token-mean", "seq-mean-token-mean", "gspo", "cispo", "lora"}  # of scripts with the same formulas
WAYS = {(70, "padded"), (200, "one_row")}
EVERY = {(budget, layout) for budget in (70, 200, 100_000) for layout in ("padded", "one_row")}
SLICED = {(budget, "sliced") for budget in (70, 100_000)}


@pytest.fixture(scope="module", params=("grpo", "dapo", "agent"))
def gradients(request, tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("gradients")
    for name, (ranks, replicas) in RANKS.items():
        arguments = request.param, tiny, out / f"{name}.pt", replicas
        run(ROOT / "tests/workers/gradients.py", *arguments, ranks=ranks)
    return request.param, {name: torch.load(out / f"{name}.pt") for name in RANKS}


@pytest.mark.parametrize("ranks", RANKS)
def test_update_equals_plain_loss(gradients, ranks):
    """By budget and layout; dapo's two ranks share rows, too, and then report the same metrics."""
    script, results = gradients
    found = {key: x for key, x in results[ranks].items() if key[1:] in EVERY | SLICED and key[0] in LOSSES}
    names = LOSSES if script == "grpo" else FEWER
    if "hsdp" in ranks:
        names = {"token-mean", "gspo", "lora"}
    cuts = {(name, *way) for name in names for way in WAYS}
    if script == "grpo" and ranks != "2 hsdp":
        cuts |= {(name, *way) for name in ("token-mean", "lora") for way in EVERY}
    if script == "dapo" and ranks != "1":
        cuts |= {(name, *way) for name in ("seq-mean-token-mean", "gspo", "lora") for way in SLICED}
    assert found.keys() == cuts
    for (name, *cut), grads in found.items():
        assert distance(grads, results["1"][name, "naive"]) < 1e-5, (name, cut)
        if "sliced" in cut and name != "lora":
            expected = pytest.approx(results["1"]["metrics", name, 70, "padded"], rel=1e-4, abs=1e-6)
            assert results[ranks]["metrics", name, *cut] == expected


@pytest.mark.parametrize("ranks", RANKS)
def test_offload_changes_no_gradient(gradients, ranks):
    _, results = gradients
    expected = results[ranks]["token-mean", 200, "one_row"]
    assert all(map(torch.equal, results[ranks]["hosted"], expected))


@pytest.mark.parametrize("gradients", ("grpo",), indirect=True)
def test_a_shared_prompt_is_computed_once(gradients):
    """Six rows padded to 85 tokens, or 5 + 43 and 60 + 35 in one.

    Sequences of 50 and 17 tokens, a quarter of the budget, have a prompt each, but neighbours share it.
    """
    tokens = {key[1:]: value for key, value in gradients[1]["1"].items() if key[0] == "tokens"}
    assert tokens[100_000, "padded"] == 6 * 85
    assert tokens[100_000, "one_row"] == 48 + 95
    assert (tokens[200, "one_row"], tokens[70, "one_row"]) == (48 + 2 * 60 + 35, 48 + 3 * 60 + 35)


def test_replicas_reduce_their_gradients_once_a_step(gradients):
    """Two layers and what is around them; and each group of ranks waits as long as the run."""
    for ranks, found in gradients[1].items():
        assert {x for key, x in found.items() if key[0] == "reduced"} == {3 if "hsdp" in ranks else 0}
        assert found["time-outs"] == [3600] * (2 if "hsdp" in ranks else 1)


def test_the_comparison_can_fail(gradients):
    naive = [gradients[1]["1"][mode, "naive"] for mode in ("token-mean", "seq-mean-token-mean")]
    assert distance(*naive) > 0.1
