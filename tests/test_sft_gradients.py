"""SFT's loss and gradient do not depend on how the work is cut: ranks, slices of a row, packing, budget."""

import pytest
import torch
from conftest import ROOT, run
from workers.shared import distance, norm

WORKER = ROOT / "tests/workers/sft_gradients.py"


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """On one rank: {(model, slices, packing, budget) or (model, "naive"): loss, gradients}."""
    out = tmp_path_factory.mktemp("gradients") / "one.pt"
    run(WORKER, tiny, out, 1)
    return torch.load(out)


def check(results, reference):
    # AdaLoRA: every rank keeps the same ranks of the adapters, and as many as it should
    kept, number = results.pop("kept")
    [[expected], _] = reference["kept"]
    assert kept == [expected] * len(kept) and number == sum(map(sum, expected)) == 56 + 3
    for key in [key for key in results if key[0] == "dft"]:
        assert distance(results.pop(key), reference["dft", "naive"]) < 1e-5, key
    for (name, *layout), (losses, grads) in results.items():
        loss, expected = reference[name, "naive"]
        assert len(grads) == len(expected) > 0
        if layout[-1] == "clipped":  # the gradient that the optimizer sees, not the norm that is reported
            assert losses == pytest.approx(norm(expected), rel=1e-4) and losses > 0.1
            assert norm(grads) == pytest.approx(1e-3, rel=1e-3)
            continue
        assert losses == pytest.approx([loss] * 2, abs=1e-5), layout
        for a, b in zip(grads, expected):
            assert b.abs().max() > 5e-5 and (a - b).abs().max() < 1e-5, (name, layout)


def test_one_rank(reference):
    results = {key: value for key, value in reference.items() if "naive" not in key}
    assert len(results) == 3 * (2 * 2 + 1) + 2 * 2 + 1
    check(results, reference)


@pytest.mark.parametrize(
    ("ranks", "sp_size", "kinds"),
    [(2, 1, []), (2, 2, ["ulysses", "ring"]), (3, 3, ["ring"])],
)
def test_more_ranks(reference, tiny, tmp_path, ranks, sp_size, kinds):
    """sp_size 2: the model has one key/value head, which both ranks need; 3: and two heads."""
    run(WORKER, tiny, tmp_path / "more.pt", sp_size, *kinds, ranks=ranks)
    results = torch.load(tmp_path / "more.pt")
    assert len(results) == 1 + ((2 * len(kinds) + 1) * 3 + 2 * len(kinds) if kinds else 3 * 5 + 4)
    check(results, reference)
