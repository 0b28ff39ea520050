"""Gradients depend on no way to cut the work: world size, micro-batch budget, layout of the rows."""

import pytest
import torch
from conftest import ROOT, run

RANKS = {"1": (1, 1), "2": (2, 1), "2 hsdp": (2, 2)}  # ranks and replicas of the sharded model
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.fixture(scope="module", params=("grpo", "dapo", "agent"))
def gradients(request, tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("gradients")
    for name, (ranks, replicas) in RANKS.items():
        arguments = request.param, tiny, out / f"{name}.pt", replicas
        run(ROOT / "tests/workers/gradients.py", *arguments, ranks=ranks)
    return {name: torch.load(out / f"{name}.pt") for name in RANKS}


def distance(a, b):
    """Largest relative difference of two gradients, over the norm of all parameters."""
    norm = torch.stack([x.norm() for x in b]).norm()
    return (torch.stack([(x - y).norm() for x, y in zip(a, b, strict=True)]).norm() / norm).item()


@pytest.mark.parametrize("gradients", ("grpo",), indirect=True)
@pytest.mark.parametrize("mode", ("token-mean", "lora"))
@pytest.mark.parametrize("ranks", ("1", "2"))
@pytest.mark.parametrize("budget", (70, 200, 100_000))
@pytest.mark.parametrize("layout", ("padded", "one_row"))
def test_update_equals_plain_loss(gradients, mode, ranks, budget, layout):
    assert distance(gradients[ranks][mode, budget, layout], gradients["1"][mode, "naive"]) < 1e-5


@pytest.mark.parametrize("gradients", ("dapo",), indirect=True)
@pytest.mark.parametrize("loss", ("seq-mean-token-mean", "gspo", "lora"))
@pytest.mark.parametrize("ranks", ("2", "2 hsdp"))
@pytest.mark.parametrize("budget", (70, 100_000))
def test_slices_of_a_row_equal_plain_loss(gradients, loss, ranks, budget):
    assert distance(gradients[ranks][loss, budget, "sliced"], gradients["1"][loss, "naive"]) < 1e-5
    if loss != "lora":
        expected = gradients["1"]["metrics", loss, 70, "padded"]
        found = gradients[ranks]["metrics", loss, budget, "sliced"]
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("ranks", "loss"),
    [(ranks, loss) for ranks in ("1", "2") for loss in (*MODES, "lora", "gspo", "cispo", "sapo", "dppo")]
    + [("2 hsdp", loss) for loss in ("token-mean", "gspo", "lora")],
)
@pytest.mark.parametrize("way", ((70, "padded"), (200, "one_row")))
def test_every_script_equals_plain_loss(gradients, loss, ranks, way):
    assert distance(gradients[ranks][loss, *way], gradients["1"][loss, "naive"]) < 1e-5


@pytest.mark.parametrize("ranks", RANKS)
def test_offload_changes_no_gradient(gradients, ranks):
    expected = gradients[ranks]["token-mean", 200, "one_row"]
    assert all(map(torch.equal, gradients[ranks]["hosted"], expected))


@pytest.mark.parametrize("gradients", ("grpo",), indirect=True)
def test_a_shared_prompt_is_computed_once(gradients):
    """Six rows padded to 85 tokens, or 5 + 43 and 60 + 35 in one.

    Sequences of 50 and 17 tokens, a quarter of the budget, have a prompt each, but neighbours share it.
    """
    tokens = {key[1:]: value for key, value in gradients["1"].items() if key[0] == "tokens"}
    assert tokens[100_000, "padded"] == 6 * 85
    assert tokens[100_000, "one_row"] == 48 + 95
    assert (tokens[200, "one_row"], tokens[70, "one_row"]) == (48 + 2 * 60 + 35, 48 + 3 * 60 + 35)


def test_replicas_reduce_their_gradients_once_a_step(gradients):
    counts = {
        ranks: {v for key, v in found.items() if key[0] == "reduced"} for ranks, found in gradients.items()
    }
    assert counts["1"] == counts["2"] == {0} and counts["2 hsdp"] == {3}  # two layers and what is around them


def test_subgroups_wait_as_long_as_the_run(gradients):
    assert [found["time-outs"] for found in gradients.values()] == [[3600], [3600], [3600, 3600]]


def test_the_comparison_can_fail(gradients):
    assert (
        distance(gradients["1"]["token-mean", "naive"], gradients["1"]["seq-mean-token-mean", "naive"]) > 0.1
    )


def test_the_gradient_is_clipped(gradients):
    for ranks in RANKS:
        norm, reported = gradients[ranks]["clipped"]
        assert norm.item() == pytest.approx(1e-3, rel=1e-3) and reported > 1e-2
