"""Rubrics of rows, in the forms in which data sets have them; see judge.py."""

import json
import math
import os

TEXTS = "criterion", "description"  # one of these is in an item of a rubric,
WEIGHTS = "weight", "points"  # and at most one of these
ASIDE = {"title": str, "tags": list}  # what HealthBench and RaR write besides


def rubric_of(extra_info):
    """The rubric of a row as [(criterion, weight)]. Raises ValueError, in one line."""
    rubric = (extra_info or {}).get("rubric") or os.environ.get("JUDGE_RUBRIC")
    if not rubric:
        raise ValueError("no rubric: give the row extra_info.rubric, or set JUDGE_RUBRIC")
    items = rubric
    if isinstance(rubric, str):
        try:
            items = json.loads(rubric)
        except ValueError:  # a question
            items = [{"criterion": rubric}]
    if isinstance(items, dict):
        items = [items]
    found = []
    if isinstance(items, list | tuple):
        found = [item_of(item) for item in items]
    if not found or None in found or not any(weight > 0 for _, weight in found):
        raise ValueError(
            "a rubric is a question, or a list of {criterion, weight}, {criterion, points, tags} or"
            " {title, description, weight} with finite numbers, one of them above 0, and no other keys;"
            f" not {rubric!r:.200}"
        )
    return found


def item_of(item):
    """(criterion, weight) of an item of a rubric, or None."""
    if not isinstance(item, dict):
        return None
    texts = [item[key] for key in TEXTS if key in item]
    weights = [item[key] for key in WEIGHTS if key in item] or [1]
    if len(texts) != 1 or len(weights) != 1:
        return None
    text = texts[0]
    weight = weights[0]
    if not isinstance(text, str) or not text.strip():
        return None
    if type(weight) not in (int, float) or not math.isfinite(weight):
        return None
    for key, value in item.items():
        if key not in TEXTS + WEIGHTS and not isinstance(value, ASIDE.get(key, ())):
            return None
    return text, float(weight)
