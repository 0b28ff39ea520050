r"""1 if the response's final answer equals the ground truth, else 0; the answer needs no box.

- The last \boxed{} counts.  Without: the formula, or else the rest of the line, after the last "answer is" or
  "answer:" (in any language of LABEL); or else the last formula $...$; or else the last number, read
  as `rewards.gsm8k` does.  With "or $6$" or "is wrong" behind it, or "not" before it, it is not the answer.
- Thoughts (all up to the last `</think>`) give no answer; without a box, only the last WINDOW characters do.
"""

import re

from rewards import gsm8k
from rewards.mathematics.equivalence import equal, judge, spelling
from rewards.mathematics.latex import LABEL, last_boxed
from rewards.mathematics.units import NUMBER_WORD

WINDOW = 1000
MARKER = re.compile(rf"{LABEL}(?:\s+is|[是为]|\**\s?[:：])[*:：\s]{{0,9}}([^\n]+)", re.IGNORECASE)
FORMULA = re.compile(r"(?<!\\)\$\$?([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
NO_ANSWER = re.compile(  # before a formula: another answer, or what makes another value of it
    r"(?:\b(?:not|never|least|most|about|approximately|around|roughly|than|between|minus|negative|or)"
    r"|n't|[\d$)],|[\d$)],? and|\d(?: \w+)? to)(?: maybe)?\s*$"
)
GOES_ON = re.compile(  # after a formula: another answer, or a factor
    r"\s*(?:,?\s*(?:or|times)\b|to\s*(?:\$|\\\(|\d)|"
    rf"(?:,|,?\s*and)\s*(?:\$|\\\()?\s*-?\d|%|{NUMBER_WORD}\b)"
)
DENIED = re.compile(gsm8k.DENIED)
LAST_NUMBER = re.compile(
    r"(?:(\bor|\band|\d,|\d(?:\s\w+)?\sto)(?:\s+maybe)?\s+)?(?<!\S)(\S*\d\S*)\D*$"
)  # 7 or 8 is two answers


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score, acc, pred}.  A ground truth that is no formula equals only its own spelling."""
    text = solution_str.rpartition("</think>")[2]
    if "\\boxed" in text or "\\fbox" in text:
        return judge(last_boxed(text), ground_truth)
    text = text[-WINDOW:]
    lines = MARKER.findall(text)
    where = lines[-1] if lines else text
    formulas = [*FORMULA.finditer(where)]
    if formulas:
        formula = formulas[0 if lines else -1]
        texts = ["".join(filter(None, each.groups())) for each in formulas]
        answer, rest = texts[0 if lines else -1], where[formula.end() :]
        if NO_ANSWER.search(where[: formula.start()]) or DENIED.match(rest):
            answer = None
        elif GOES_ON.match(rest) and not (len(texts) > 1 and all(equal(x, str(ground_truth)) for x in texts)):
            answer += " " + re.sub(r"\$|\\[()]", " ", rest)
        return judge(answer, ground_truth)
    result = judge(lines[-1] if lines else None, ground_truth)
    if result["acc"]:
        return result
    result = gsm8k.compute_score(data_source, text, ground_truth, {"method": "flexible"})
    number = LAST_NUMBER.search(text)
    correct = result["acc"] and number[1] is None
    return {"score": float(correct), "acc": correct, "pred": spelling(number[2]) if number else ""}
