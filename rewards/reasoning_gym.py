"""Procedural tasks of the library reasoning-gym: the score of the task's own `score_answer`, 0 to 1.

The answer is the text in the last `<answer>...</answer>`; a thought gives none.
The library runs in a process that can be killed.  An answer on which its scorer fails is `unreadable`: 0.
"""

import ast
import contextlib
import io
from functools import cache
from importlib.util import find_spec

from rewards.manager.worker import call_in_worker
from system.thoughts import reply_of

TIMEOUT_S = 20.0  # of a processor; the first call of a task also loads its data
EVALUATED = """
binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24
simple_integration spiral_matrix string_insertion
"""
REFUSED = dict.fromkeys(EVALUATED.split(), "its scorer evaluates the model's text as Python code") | {
    "coin_flip": "its scorer gives full marks to 0 where 0.234 is correct",
    "complex_arithmetic": "its scorer gives full marks to nan",
    "game_of_life_halting": "its scorer gives full marks to any answer",
    "composite": "it is a mixture of others; prepare those",
}


def check_installed():
    """Raise ValueError, in one line, if the library is not installed.  It is not imported, which is slow."""
    if find_spec("reasoning_gym") is None:
        raise ValueError(
            "the package reasoning_gym is not installed;"
            " pip install --no-deps -r requirements-reasoning-gym.txt"
        )


def check_task(name):
    """Raise ValueError, in one line, if the library or its task is not there, or its scorer is refused."""
    if name in REFUSED:
        raise ValueError(f"reasoning-gym's task {name} is refused: {REFUSED[name]}")
    check_installed()
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(
            f"reasoning-gym has no task {name!r}; it has {', '.join(sorted(DATASETS.keys() - REFUSED))}"
        )


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score, acc, pred, unreadable}.

    extra_info["entry"]: the library's entry as a Python literal; it has the ground truth too.
    Raises ValueError for an unknown or refused task and for a broken entry, TimeoutError and WorkerError.
    """
    task = data_source.removeprefix("reasoning_gym/")
    entry = check_row(data_source, ground_truth, extra_info)
    return call_in_worker("rewards.reasoning_gym:score", task, entry, solution_str, timeout_s=TIMEOUT_S)


def check_row(data_source, ground_truth, extra_info):
    entry = (extra_info or {}).get("entry")
    if not isinstance(entry, str):
        raise ValueError("extra_info['entry'] is missing; write the rows with data_prep/reasoning_gym.py")
    return entry


def score(task, entry, solution_str):
    """`compute_score` in the process of the library."""
    check_task(task)
    from reasoning_gym.utils import extract_answer

    try:
        entry = ast.literal_eval(entry)
    except (ValueError, SyntaxError):
        raise ValueError("extra_info['entry'] is no Python literal") from None
    answer = extract_answer(reply_of(solution_str))
    points = 0.0
    unreadable = False
    if answer is not None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # tower_of_hanoi prints what it does not like
                points = float(dataset(task).score_answer(answer, entry))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            unreadable = True
    acc = float(points >= 1)
    return {"score": points, "acc": acc, "pred": answer or "", "unreadable": unreadable}


@cache
def dataset(task):
    """The task with the library's default settings, as data_prep/reasoning_gym.py uses it."""
    from reasoning_gym import create_dataset

    return create_dataset(task)
