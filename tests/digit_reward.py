"""Rewards that a random model can climb: the share of digits in the response, and its shortness."""

from itertools import count


def shortness(solution_str, **_):
    return 1 / (1 + len(solution_str))


def digits(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)


scored = count()


def digits_at_first(solution_str, **_):
    """Nothing after two steps of 32 responses on each rank."""
    return digits("", solution_str, "") * (next(scored) < 64)
