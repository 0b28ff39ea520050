"""1 if the response is the ground truth, except for case and white space, else 0."""

from system.thoughts import reply_of


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score: 1.0 | 0.0, acc, pred}."""
    said, truth = (" ".join(text.lower().split()) for text in (reply_of(solution_str), ground_truth))
    return {"score": float(said == truth), "acc": said == truth, "pred": said}
