"""A reward whose groups all have right and wrong answers: DAPO keeps them, and no advantage is zero."""

import itertools

counter = itertools.count()


def score(data_source, solution_str, ground_truth, extra_info=None):
    """0, 1, 0, 1, ... The rows of a group follow each other."""
    return float(next(counter) % 2)
