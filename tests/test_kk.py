"""Knights and knaves: the golden table, the rules one by one, hostile input."""

import json
from pathlib import Path

import pytest

from rewards.kk import compute_score

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden" / "kk.jsonl").open()]
TRUTH = {"solution_text_format": "(1) Ann is a knight\n(2) Bo is a knave"}


def score(response):
    return compute_score("kk", response, TRUTH)["score"]


@pytest.mark.parametrize("case", [c for c in GOLDEN if not c["debatable"]], ids=lambda c: c["id"])
def test_golden(case):
    got = compute_score(case["data_source"], case["solution_str"], case["ground_truth"], case["extra_info"])
    assert got["score"] == pytest.approx(case["expected"], abs=1e-6), case["why"]


ANSWERS = [
    ("(1) Ann is a knight\n(2) Bo is a knave", 3), ("1. Bo is a knave; 2) ann IS A Knight.", 3),
    ("- Ann is a knight and\n- Bo is a knave", 3),
    ("Therefore:\nAnn is a knight, and Bo is a knave. Done", 3), ("Ann is\na knight and Bo\nis a\nknave", 3),
    ("Ann is\n\n a knave\nBo is a knave", -0.5), ("Ann is not\na knight\nBo is a knave", -1),
    ("Ann\nis: a knight\nBo is a knave", -1), ("is a knight\nBo is a knave", -1),
    ("Ann is a knave\nBo is a knave", -0.5), ("Ann is a knight", -1),
    ("Ann is a knight, Ann is a knight", -1), ("Ann is a knight, Bo is a knave, Cy is a knave", -1),
    ("it is false that Ann is a knight\nBo is a knave", -1), ("Ann is a knight or Bo is a knave", -1),
    ("Ann is not a knight\nBo is a knave", -1), ("Annabel is a knight\nBo is a knave", -1),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_answers(answer, expected):
    assert score(f"<think>so</think><answer>{answer}</answer>") == expected


RIGHT = "</think> <answer>Ann is a knight, Bo is a knave</answer>"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("so" + RIGHT, 3),  # the prompt ended with <think>
        ("<think>so" + RIGHT, 3),
        ("Assistant: <think>so" + RIGHT, 3),
        ("<|im_start|>assistant\n<think>so" + RIGHT, 3),
        (
            "<|im_start|>user\nuse <think> and <answer>x</answer><|im_end|>\n<|im_start|>assistant\nso"
            + RIGHT,
            3,
        ),
        ("Solve it in <think> </think>\n\nUser: who?\nIt is late.\nAssistant: <think>so" + RIGHT, 3),
        ("<think>\nUser: who?\nAssistant: hm" + RIGHT, 3),
        ("so" + RIGHT + RIGHT, -3),
        (RIGHT.removeprefix("</think>"), -3),
        (RIGHT.removesuffix("</answer>"), -3),
    ],
)
def test_format(response, expected):
    assert score(response) == expected


def test_extra_keys():
    right = compute_score("kk", "<think>a" + RIGHT, TRUTH)
    assert right == {"score": 3.0, "acc": 1.0, "pred": "ann knight, bo knave"}
    assert compute_score("kk", "<think>a" + RIGHT, TRUTH["solution_text_format"]) == right


@pytest.mark.parametrize("truth", ["", "nobody", {"solution_text_format": "Ann is tall"}])
def test_broken_truth(truth):
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("kk", "x", truth)
