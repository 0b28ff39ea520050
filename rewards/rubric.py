"""Rubrics of rows, in the forms in which data sets have them; see judge.py."""

import json
import math
import os

TEXTS, WEIGHTS = ("criterion", "description"), ("weight", "points")  # one of each in an item of a rubric
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
    items = [items] if isinstance(items, dict) else items
    found = [*map(item_of, items)] if isinstance(items, list | tuple) else []
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
    rest = {key: value for key, value in item.items() if key not in (*TEXTS, *WEIGHTS)}
    is_number = type(weights[0]) in (int, float) and math.isfinite(weights[0])
    is_text = bool(texts) and isinstance(texts[0], str) and bool(texts[0].strip())
    known = all(isinstance(value, ASIDE.get(key, ())) for key, value in rest.items())
    good = is_number and is_text and known and len(texts) == len(weights) == 1
    return (texts[0], float(weights[0])) if good else None
