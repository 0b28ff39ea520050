"""Knights and knaves: the golden table; test_linear.py has hostile input."""

import json
from pathlib import Path

import pytest

from rewards.kk import compute_score

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden" / "kk.jsonl").open()]
TRUTH = {"solution_text_format": "(1) Ann is a knight\n(2) Bo is a knave"}


@pytest.mark.parametrize("case", [c for c in GOLDEN if not c["debatable"]], ids=lambda c: c["id"])
def test_golden(case):
    got = compute_score(case["data_source"], case["solution_str"], case["ground_truth"], case["extra_info"])
    assert got["score"] == pytest.approx(case["expected"], abs=1e-6), case["why"]


RIGHT = "</think> <answer>Ann is a knight, Bo is a knave</answer>"


def test_extra_keys():
    right = compute_score("kk", "<think>a" + RIGHT, TRUTH)
    assert right == {"score": 3.0, "acc": 1.0, "pred": "ann knight, bo knave"}
    assert compute_score("kk", "<think>a" + RIGHT, TRUTH["solution_text_format"]) == right


@pytest.mark.parametrize("truth", ["", "nobody", {"solution_text_format": "Ann is tall"}])
def test_broken_truth(truth):
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("kk", "x", truth)
