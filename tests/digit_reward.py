"""A reward that a random model can climb: the share of digits in the response."""


def digits(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
