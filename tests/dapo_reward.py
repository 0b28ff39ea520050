"""Rewards whose accuracy is not their score, for dynamic sampling."""


def mixed(data_source, solution_str, ground_truth, extra_info=None):
    """Score: the share of digits. Accuracy: by the sum all right, all wrong, or as good as random."""
    acc = (True, False, sum(map(ord, solution_str)) % 2 == 1)[int(ground_truth) % 3]
    return dict(score=sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1), acc=acc)


def starts_with_one(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.startswith("1"))


def coin(data_source, solution_str, ground_truth, extra_info=None):
    """Nearly every group has both kinds, however long its responses are."""
    return float(sum(map(ord, solution_str)) % 2)
