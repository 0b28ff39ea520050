"""SFT's loss and gradient do not depend on how the work is cut: ranks, slices of a row, packing, budget."""

import pytest
import torch
from conftest import ROOT, run

WORKER = ROOT / "tests/workers/sft_gradients.py"


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """On one rank: {(kind, LoRA rank, packing, budget) or (kind, LoRA rank, "naive"): loss, gradients}."""
    out = tmp_path_factory.mktemp("gradients") / "one.pt"
    run(WORKER, tiny, out, 1)
    return torch.load(out)


def check(results, reference):
    norm = lambda grads: torch.cat([g.flatten() for g in grads]).norm().item()
    for (kind, lora_rank, *layout), (losses, grads) in results.items():
        if layout == [
            "kept"
        ]:  # AdaLoRA: every rank of the run keeps the same ranks, and as many as it should
            [kept], number = reference[kind, lora_rank, "kept"]
            assert losses == [kept] * len(losses) and grads == number == sum(map(sum, kept)) == 56 + 3
            continue
        loss, expected = reference[kind, lora_rank, "naive"]
        assert len(grads) == len(expected) > 0
        if layout == ["clipped"]:  # the gradient that the optimizer sees, not the norm that is reported
            assert losses == pytest.approx(norm(expected), rel=1e-4) and losses > 0.1
            assert norm(grads) == pytest.approx(1e-3, rel=1e-3)
            continue
        assert losses == pytest.approx([loss] * 2, abs=1e-5), layout
        for a, b in zip(grads, expected):
            assert b.abs().max() > 1e-4 and (a - b).abs().max() < 1e-5, (kind, lora_rank, layout)


def test_one_rank(reference):
    results = {key: value for key, value in reference.items() if "naive" not in key}
    assert len(results) == 3 * (2 * 2 + 1) + 1
    check(results, reference)


@pytest.mark.parametrize(("sp_size", "layouts"), [(1, 16), (2, 10)])
def test_two_ranks(reference, tiny, tmp_path, sp_size, layouts):
    """sp_size 2: the model has one key/value head, which both ranks need."""
    run(WORKER, tiny, tmp_path / "two.pt", sp_size, ranks=2)
    results = torch.load(tmp_path / "two.pt")
    assert len(results) == layouts
    check(results, reference)
