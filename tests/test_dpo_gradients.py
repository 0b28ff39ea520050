"""DPO's loss and gradient do not depend on how the work is cut: ranks, replicas, layout, budget."""

import pytest
import torch
from conftest import ROOT, run
from test_grpo_gradients import RANKS
from workers.shared import distance


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory):
    """{ranks: {(LoRA rank, loss, layout, budget) or (LoRA rank, loss, "naive"): ...}}."""
    out = tmp_path_factory.mktemp("gradients")
    for name, (ranks, replicas) in RANKS.items():
        run(ROOT / "tests/workers/dpo_gradients.py", tiny, out / f"{name}.pt", replicas, ranks=ranks)
    return {name: torch.load(out / f"{name}.pt") for name in RANKS}


@pytest.mark.parametrize("ranks", RANKS)
def test_update_equals_plain_code(results, ranks):
    """For four losses, with adapters one, two layouts and two budgets."""
    found = {key: value for key, value in results[ranks].items() if "naive" not in key}
    assert len(found) == (4 + 1) * 2 * 2
    first = {}
    for (lora_rank, name, *cut), (metrics, val, grads) in found.items():
        loss, expected = results["1"][lora_rank, name, "naive"]
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5), cut
        assert distance(grads, expected) < 1e-5 and max(g.abs().max() for g in expected) > 1e-3, cut
        for key in val:  # evaluated in two steps of four pairs, and the last has two
            same = metrics.get(key.removeprefix("val/"), metrics.get(key.replace("val", "train")))
            assert val[key] == pytest.approx(same, rel=1e-5, abs=1e-6), (key, cut)
            other = results["1"][lora_rank, name, "padded", 100_000][1][key]
            assert val[key] == pytest.approx(other, rel=1e-5, abs=1e-5), (key, cut)
        assert first.setdefault(name, len(val)) == len(val) == 8 + (name == "kto")
