"""Knights and knaves; test_rewards.py has the golden table, test_linear.py hostile input."""

import pytest

from rewards.kk import compute_score

TRUTH = {"solution_text_format": "(1) Ann is a knight\n(2) Bo is a knave"}


RIGHT = "</think> <answer>Ann is a knight, Bo is a knave</answer>"


def test_extra_keys():
    right = compute_score("kk", "<think>a" + RIGHT, TRUTH)
    assert right == {"score": 3.0, "acc": 1.0, "pred": "ann knight, bo knave"}
    assert compute_score("kk", "<think>a" + RIGHT, TRUTH["solution_text_format"]) == right


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("**Ann** is a knight\n**Bo** is a **knave**", 3),
        ("Ann: knight\nBo: knave", 3),
        ("| Name | Role |\n|---|---|\n| Ann | knight |\n| Bo | knave |", 3),
        ("1. Ann is the knight.\n2. Bo's a knave.", 3),
        (r"\boxed{\text{Ann is a knight, Bo is a knave}}", 3),
        ("• <b>Ann</b> is a <b>knight</b>\n> Bo -> knave", 3),
        ('{"Ann": "knight", "Bo": "knave"}', 3),
        ("Ann：knight\nBo → knave", 3),
        ("Ann (knight), Bo (knight)", -0.5),
        ("¬Ann is a knight, Bo is a knave", -1),
        ("Ann =/= knight, Bo is a knave", -1),
        ("Ann is not a knight, Bo is a knave", -1),
        ("Ann != knight\nBo: knave", -1),
        ("I deny that Ann is a knight. Bo is a knave", -1),
    ],
)
def test_markup_and_colons(answer, score):
    assert compute_score("kk", f"</think><answer>{answer}</answer>", TRUTH)["score"] == score


@pytest.mark.parametrize("truth", ["", "nobody", {"solution_text_format": "Ann is tall"}])
def test_broken_truth(truth):
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("kk", "x", truth)
