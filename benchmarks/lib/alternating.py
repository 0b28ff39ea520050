"""Rewards whose groups have right and wrong answers: DAPO keeps them, and advantages are not zero."""

import itertools

counter = itertools.count()


def score(data_source, solution_str, ground_truth, extra_info=None):
    """0, 1, 0, 1, ... The rows of a group follow each other."""
    return float(next(counter) % 2)


def half_constant(data_source, solution_str, ground_truth, extra_info=None):
    """As `score`, but all responses to every second prompt are wrong: such a group teaches nothing."""
    return score(data_source, solution_str, ground_truth) * (extra_info["index"] % 2)


def parity(data_source, solution_str, ground_truth, extra_info=None):
    """0 or 1 by the response alone, whichever rank has it."""
    return float(sum(map(ord, solution_str)) % 2)
