"""A reward whose groups have right and wrong answers: DAPO keeps them, and advantages are not zero."""

import itertools

counter = itertools.count()


def score(data_source, solution_str, ground_truth, extra_info=None):
    """0, 1, 0, 1, ... The rows of a group follow each other, so a row's score is that of its place."""
    return float(next(counter) % 2)
