"""Spellings of random values get full marks, and no spelling of a wrong value near them does.

    python tests/test_math_values.py SEED ROUNDS

tries more of them and prints what is accepted wrongly or missed.
"""

import itertools
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from math_values import cases

from rewards import compute_score

# how an answer is given; before it another one is thought of
FORMS = [
    ("lighteval/MATH", r"At first I had $\boxed{{{other}}}$. Now $\boxed{{{answer}}}$."),
    (
        "lighteval/MATH",
        "<think>It is \\boxed{{{other}}}.</think>\n**Final answer**\n\\[\\boxed{{{answer}}}\\]",
    ),
    ("aime2024", "It is not {other}.\nAnswer: {other}\nNo.\n\n**Answer:** {answer}\nThat is all."),
    (
        "numina_olympiads",
        r"The answer is not \fbox{{{other}}}, it is $\boxed{{{answer}}}$, because 1 + 1 = 2.",
    ),
    ("hiyouga/geometry3k", r"<think>maybe {other}</think> \boxed{{{answer}}}"),
]


def tries(seed, rounds, rights=3, wrongs=5):
    """(kind, source, response, ground truth, whether it is right)"""
    forms = itertools.cycle(FORMS)
    for kind, right, wrong in cases(seed, rounds):
        truth = right[0]
        for answer in (*right[1 : rights + 1], *wrong[:: len(wrong) // wrongs + 1]):
            source, form = next(forms)
            is_right = answer in right
            other = wrong[0] if is_right else truth
            response = form.format(answer=answer.replace("\n", " "), other=other.replace("\n", " "))
            yield kind, source, response, truth, is_right
        if kind == "integer" and truth.lstrip("-").isdecimal():
            for answer in wrong:
                yield kind, "openai/gsm8k", f"Not {truth}.\n#### {answer}", truth, False


def mistakes(seed, rounds):
    """(tries, right spellings that are missed, wrong ones that are accepted), as lists."""
    tried, missed, accepted = [], [], []
    for one in tries(seed, rounds):
        *_, source, response, truth, is_right = one
        has_full_marks = compute_score(source, response, truth)["score"] == 1
        tried.append(one)
        missed += [one] * (is_right and not has_full_marks)
        accepted += [one] * (has_full_marks and not is_right)
    return tried, missed, accepted


def test_values():
    tried, missed, accepted = mistakes(seed=0, rounds=3)
    assert not accepted and not missed
    assert len(tried) > 150


if __name__ == "__main__":
    tried, missed, accepted = mistakes(*map(int, sys.argv[1:]))
    for name, found in (("missed", missed), ("accepted wrongly", accepted)):
        print(*(f"{name}: {one}" for one in found), sep="\n")
    print("of each kind:", *(f"{kind} {n}" for kind, n in Counter(one[0] for one in tried).items()))
    right = sum(one[-1] for one in tried)
    print(
        f"right: {right - len(missed)} of {right}; accepted wrongly: {len(accepted)} of {len(tried) - right}"
    )
