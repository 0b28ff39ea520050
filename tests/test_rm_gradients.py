"""Loss and gradient of the reward model do not depend on how the work is cut: ranks, layout, budget."""

import pytest
import torch
from conftest import ROOT, run
from transformers import AutoModelForSequenceClassification
from workers.shared import norm

WORKER = ROOT / "tests/workers/rm_gradients.py"


@pytest.fixture(scope="module")
def classifier(tiny, tmp_path_factory):
    """With a head that is not 0."""
    out = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def reference(classifier, tmp_path_factory):
    """On one rank: {(LoRA rank, one row, budget) or (LoRA rank, "naive"): metrics or loss, gradients}."""
    out = tmp_path_factory.mktemp("gradients") / "one.pt"
    run(WORKER, classifier, out, 1)
    return torch.load(out)


def check(results, reference):
    assert len(results) == 2 * (2 * 2 + 1)
    for (lora_rank, *layout), (found, grads) in results.items():
        loss, expected = reference[lora_rank, "naive"]
        # an embedding, 9 weights a layer, a norm and the head; or two matrices for each of 14 layers, and it
        assert len(grads) == len(expected) == (29 if lora_rank else 21)
        if layout == ["clipped"]:  # the gradient that the optimizer sees, not the norm that is reported
            assert found == pytest.approx(norm(expected), rel=1e-4) and found > 0.1
            assert norm(grads) == pytest.approx(1e-3, rel=1e-3)
            continue
        assert [found["train/loss"], found["val/loss"]] == pytest.approx([loss] * 2, abs=1e-5), layout
        assert found["val/margin"] == pytest.approx(found["rewards/margins"], abs=1e-6)
        assert found["rewards/margins"] == pytest.approx(
            found["rewards/chosen"] - found["rewards/rejected"], abs=1e-6
        )
        assert found["train/accuracy"] == found["val/accuracy"] == results[0, True, 130][0]["val/accuracy"]
        for a, b in zip(grads, expected):
            assert b.abs().max() > 1e-5 and (a - b).abs().max() < 1e-5, (lora_rank, layout)


def test_one_rank(reference):
    check({key: value for key, value in reference.items() if "naive" not in key}, reference)


@pytest.mark.parametrize("replicas", (1, 2))
def test_two_ranks(reference, classifier, tmp_path, replicas):
    run(WORKER, classifier, tmp_path / "two.pt", replicas, ranks=2)
    check(torch.load(tmp_path / "two.pt"), reference)
