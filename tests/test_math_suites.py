"""Cases of other people's suites: what we say, what math-verify says and what a person says.

    python tests/test_math_suites.py

asks math-verify again (golden/math_suites.jsonl) and writes the table of docs/results/rewards.md.
"""

import json
import logging
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rewards.mathematics.equivalence import equal

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests/golden/math_suites.jsonl"
PAGE = ROOT / "docs/results/rewards.md"
# suite, case, gold, answer; same: what a person says; math_verify: what it says; missed: we do not see it
CASES = [json.loads(line) for line in FILE.open()]
HEAD = (
    "| Suite | Cases | We agree | miss | accept wrongly | math-verify agrees | misses | accepts wrongly |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['suite']} {case['case']}")
def test_as_a_person_says(case):
    assert equal(case["answer"], case["gold"]) == (case["same"] and not case["missed"])


def table():
    """Agreement of both with a person, by suite."""
    lines, suites = [], dict.fromkeys(case["suite"] for case in CASES)
    for suite in [*suites, "All"]:
        cases = [case for case in CASES if suite in (case["suite"], "All")]
        n = len(cases)
        missed = sum(case["missed"] for case in cases)
        their_missed = sum(case["same"] and not case["math_verify"] for case in cases)
        their_wrong = sum(case["math_verify"] and not case["same"] for case in cases)
        cells = n, n - missed, missed, 0, n - their_missed - their_wrong, their_missed, their_wrong
        lines.append(f"| {suite} | {' | '.join(map(str, cells))} |\n")
    return HEAD + "".join(lines)


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(), "run python tests/test_math_suites.py"


def main():
    from math_verify import parse, verify

    logging.disable()
    for case in CASES:
        gold, answer = (parse(f"${case[key]}$") for key in ("gold", "answer"))
        case["math_verify"] = bool(verify(gold, answer))
        ours = equal(case["answer"], case["gold"])
        assert case["same"] or not ours, f"accepted wrongly: {case}"
        case["missed"] = case["same"] and not ours
    FILE.write_text("".join(json.dumps(case, ensure_ascii=False) + "\n" for case in CASES))
    PAGE.write_text(re.sub(r"\| Suite \|(?:.*\n)(?:\|.*\n)*", lambda _: table(), PAGE.read_text()))


if __name__ == "__main__":
    main()
