"""Gradients of distillation do not depend on how the work is split, and are those of plain logits."""

import pytest
import torch
from conftest import ROOT, run
from test_grpo_gradients import EVERY, RANKS, WAYS
from workers.shared import distance


@pytest.fixture(scope="module")
def gradients(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("gradients")
    for name, (ranks, replicas) in RANKS.items():
        run(ROOT / "tests/workers/distill_gradients.py", tiny, out / f"{name}.pt", replicas, ranks=ranks)
    return {name: torch.load(out / f"{name}.pt") for name in RANKS}


@pytest.mark.parametrize("ranks", RANKS)
def test_update_equals_plain_loss(gradients, ranks):
    found = {key: x for key, x in gradients[ranks].items() if "naive" not in key}
    cuts = {("full", *way) for way in EVERY}
    cuts |= {("sampled", *way) for way in EVERY} if ranks != "2 hsdp" else set()
    more = "window", "shown", "shown sampled", "sources", "forward", "js"
    modes = ("lora",) if ranks == "2 hsdp" else ("lora", *more)
    assert found.keys() == cuts | {(mode, *way) for mode in modes for way in WAYS | {(100_000, "padded")}}
    for (mode, *cut), (grads, kl) in found.items():
        assert distance(grads, gradients["1"][mode, "naive"]) < 1e-5, (mode, cut)
        assert kl == pytest.approx(gradients["1"][mode, 100_000, "padded"][1], rel=1e-5)


def test_the_comparison_can_fail(gradients):
    assert distance(gradients["1"]["full", "naive"], gradients["1"]["sampled", "naive"]) > 0.1
