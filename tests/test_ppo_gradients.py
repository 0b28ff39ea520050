"""Updates of actor and critic, scores and checkpoints depend on no way to split the work over ranks."""

import pytest
import torch
from conftest import ROOT, run
from transformers import AutoModelForSequenceClassification
from workers.ppo_reward_model import score, write_reward_model
from workers.shared import distance, norm

TEXTS = ["7", "1234", "", "a9", "no digit", "5 and a long end 3"]  # as in the worker
MODELS = "actor", "critic"
CUTS = [(budget, layout) for budget in (70, 200, 100_000) for layout in ("padded", "one_row", "mixed")]


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("ppo")
    torch.manual_seed(0)
    for name, labels in dict(critic=1, quantile_critic=3).items():  # with heads that are not 0
        critic = AutoModelForSequenceClassification.from_pretrained(
            tiny, num_labels=labels, dtype=torch.float32
        )
        critic.save_pretrained(out / name)
    write_reward_model(out / "reward_model")
    for ranks in (2, 1):  # two write the checkpoint that one reads
        models = tiny, out / "critic", out / "quantile_critic", out / "reward_model"
        run(ROOT / "tests/workers/ppo_gradients.py", *models, out / f"{ranks}.pt", ranks=ranks)
    return {ranks: torch.load(out / f"{ranks}.pt") for ranks in (1, 2)}


@pytest.mark.parametrize("model", (0, 1), ids=MODELS)
@pytest.mark.parametrize("ranks", (1, 2))
def test_updates_equal_the_plain_losses(results, model, ranks):
    """By budget and layout, with replicas, with adapters of the actor and quantiles, and clipped."""
    found, whole = results[ranks], results[1]["naive"][model]
    for cut in CUTS + ["hsdp"] * (ranks == 2):
        assert distance(found[cut][model], whole) < 1e-5, cut
    expected = results[1]["naive_lora"][model]
    assert len(expected) == (28, 21)[model] and distance(found["lora"][model], expected) < 1e-5
    assert norm(whole) > 0.01 and found["norms"][model] == pytest.approx(norm(whole), rel=1e-4)
    bound = 1e-3 / norm(whole)  # --grad_clip 1e-3: what the optimizer sees
    assert distance(found["clipped"][model], [g * bound for g in whole]) < 1e-3


def test_scores_of_a_reward_model_with_its_own_tokens(results):
    for ranks in (1, 2):
        padded, alone, one_by_one, _ = ([row["score"] for row in rows] for rows in results[ranks]["scores"])
        assert padded == pytest.approx([score(text) for text in TEXTS], abs=1e-4)
        assert alone == pytest.approx(padded[:1], abs=1e-6)
        assert one_by_one == pytest.approx(padded, abs=1e-6)
        assert not any("failure" in row for rows in results[ranks]["scores"][:3] for row in rows)


def test_failures_of_a_reward_model(results):
    """A conversation over its limit (15 tokens, 3 of them not the response's), and NaN at a 4."""
    for ranks in (1, 2):
        got = dict(zip(TEXTS, results[ranks]["scores"][3], strict=True))
        failed = {text: got[text].pop("failure") for text in ("1234", "5 and a long end 3")}
        assert failed["1234"].startswith("ValueError: the reward model gives nan for")
        assert "a conversation of 21 tokens; it takes 15" in failed["5 and a long end 3"]
        for text, result in got.items():
            assert result == {"score": pytest.approx(0 if text in failed else score(text), abs=1e-4)}


def test_a_new_head_starts_at_0(results):
    assert not any(results[ranks]["new head"].any() for ranks in (1, 2))


def test_a_checkpoint_of_two_ranks_is_read_by_one(results):
    written, read = (results[ranks]["checkpoint"] for ranks in (2, 1))
    assert written["step"] == read["step"] == 7
    assert written["kl_coef"] == read["kl_coef"] != 0.1  # to the last bit
    for part in ("weights", "moments"):
        assert len(written[part]) == 28 + 21
        for a, b in zip(written[part], read[part], strict=True):
            assert torch.equal(a, b)
