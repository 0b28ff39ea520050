"""Gradients of distillation do not depend on how the work is split, and are those of plain logits."""

import pytest
import torch
from conftest import ROOT, run
from test_grpo_gradients import RANKS, distance


@pytest.fixture(scope="module")
def gradients(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("gradients")
    for name, (ranks, replicas) in RANKS.items():
        worker = ROOT / "tests/workers/distill_gradients.py"
        run(worker, "distill", tiny, out / f"{name}.pt", replicas, ranks=ranks)
    return {name: torch.load(out / f"{name}.pt") for name in RANKS}


EVERY = [(budget, layout) for budget in (70, 200, 100_000) for layout in ("padded", "one_row")]
WAYS = [(70, "padded"), (200, "one_row")]
CASES = [(ranks, mode, *way) for ranks in ("1", "2") for mode in ("full", "sampled") for way in EVERY]
CASES += [("2 hsdp", "full", *way) for way in EVERY] + [("2 hsdp", "lora", *way) for way in WAYS]
CASES += [
    (ranks, mode, *way)
    for ranks in ("1", "2")
    for mode in ("lora", "window", "shown", "shown sampled", "sources")
    for way in WAYS
]


@pytest.mark.parametrize(("ranks", "mode", "budget", "layout"), CASES)
def test_update_equals_plain_loss(gradients, ranks, mode, budget, layout):
    grads, kl = gradients[ranks][mode, budget, layout]
    assert distance(grads, gradients["1"][mode, "naive"]) < 1e-5
    assert kl == pytest.approx(gradients["1"][mode, 100_000, "padded"][1], rel=1e-5)


def test_the_comparison_can_fail(gradients):
    assert distance(gradients["1"]["full", "naive"], gradients["1"]["sampled", "naive"]) > 0.1
