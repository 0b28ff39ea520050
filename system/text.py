"""Text for people."""


def one_line(text):
    """An error for a model or a log: one line of at most 200 characters."""
    return " ".join(str(text).split())[:200]
