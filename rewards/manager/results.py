"""What a reward returned, as plain data; its failure, as one line that names the place."""

import functools
import inspect
import json
import math
import sys
import traceback
from pathlib import Path


def result_of(returned):
    """The dict of a reward, with its score, accuracy and answer as the manager promises them.

    Raises TypeError and ValueError for what is none, and what its values raise.
    """
    result = returned if isinstance(returned, dict) else {"score": returned}
    result = {key: value for key, value in result.items() if key != "failure"}
    if "score" not in result:
        raise ValueError(f"the reward returned a dict without 'score': {_short(returned)}")
    result["score"] = _number(result["score"], "score")
    if (acc := result.pop("acc", None)) is not None:
        result["acc"] = _number(acc, "acc")
    if result.get("pred") is not None:
        result["pred"] = str(result["pred"]).strip() or None
    return json.loads(json.dumps(result, default=_as_json, skipkeys=True))


def results_of(returned, n):
    """A list of n results, each a dict or a failure, from what a reward of a group returned."""
    returned = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(returned, list | tuple) or len(returned) != n:
        raise TypeError(f"a reward of a group returns a list of {n} results, not {_short(returned)}")
    results = []
    for one in returned:
        try:
            results.append(result_of(one))
        except Exception as error:  # a value is anybody's object: its methods may raise anything
            results.append(failed(error))
    return results


def received(result):
    """A result from a process, which a response that has taken it over may have written."""
    if "failure" in result:
        return {"score": 0.0, "failure": str(result["failure"])}
    return result_of(result)


def _number(value, name):
    number = value.item() if hasattr(value, "item") else value  # one element, of numpy or torch
    if isinstance(number, str | list | tuple | dict) or number is None:
        raise TypeError(f"the reward returned {_short(value)} as {name}, which is no number")
    if not math.isfinite(number):  # TypeError if it is no number
        raise ValueError(f"the reward returned {value} as {name}")
    return float(number)


def _short(value):
    return f"{repr(value)[:60]} ({type(value).__name__})"


def _as_json(value):
    """For JSON: a number for one element of numpy or torch, lists for an array, the text of all else."""
    if hasattr(value, "shape") and hasattr(value, "tolist"):
        return value.item() if math.prod(value.shape) == 1 else value.tolist()
    return str(value)


def failed(error, function=None):
    """The result of a response whose reward failed: the exception, and where in which file."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return {"score": 0.0, "failure": text + (_where(error, function) if function else "")}


def _where(error, function):
    """The last line of the reward's own folder that the exception has passed, or the reward's name."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    name = getattr(function, "__name__", type(function).__name__)
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    if not file:
        return f" ({name})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).parent == Path(file).parent:
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return f" ({Path(file).name}:{name})"
