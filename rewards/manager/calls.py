"""How a reward is called: for one response or for a group, awaited if it is `async def`; what it returned."""

import asyncio
import copy
import functools
import inspect
import json
import math
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable, signature
from pathlib import Path

from system.plugins import guest

# Parameter -> the key of a row that it gets
ONE = {name: name for name in ("data_source", "solution_str", "ground_truth", "extra_info", "prompt")}
GROUP = {f"{name}s": name for name in ONE}  # verl's names: lists, one entry a response
EARLIER = "results"  # of a reward of a group: what the rewards before it in --reward_fn gave
ASKED = "prompt", "prompts", EARLIER  # only for who asks; prompts are chat messages
LAST_WORD_S = 1  # in which a reward whose time is up may raise what it was waiting for
LOOP = asyncio.Runner()  # one for all calls of a process: a client that a module keeps belongs to its loop
INNER, THREAD = asyncio.Runner(), ThreadPoolExecutor(1)  # for what is to be awaited while LOOP is at work


@functools.lru_cache(64)
def hashed_parameters(function):
    return signature(function).parameters


def parameters(function):
    """What a reward asks for; to look is slower than a short reward."""
    try:
        return hashed_parameters(function)
    except TypeError:  # an object without a hash
        return signature(function).parameters


def sees_group(function):
    """Whether a reward gets all responses to a prompt at once: it has the parameter `solution_strs`."""
    return "solution_strs" in parameters(function)


def check_signature(function, spec):
    """Raise ValueError, in one line, if a reward does not take what it will be called with."""
    given = arguments(function, [dict.fromkeys(ONE)], [])
    names = ", ".join(given)
    try:
        signature(function).bind(**given)
    except TypeError as error:
        raise ValueError(
            f"--reward_fn {spec}: a reward is called with {names} by name: {error};"
            f" write it as def NAME({names}) or with **_"
        ) from None


def keys(function):
    """What a reward gets of a row: parameter -> key."""
    names = GROUP if sees_group(function) else ONE
    asks = parameters(function)
    return {name: key for name, key in names.items() if name in asks or name not in ASKED}


def arguments(function, rows, earlier):
    """The arguments of one call, its own copies. rows: those of a group, or a single one."""
    names = keys(function)
    if not sees_group(function):
        row = dict(extra_info=None, prompt=None) | rows[0]
        return {name: copy.deepcopy(row[key]) for name, key in names.items()}
    found = {name: [copy.deepcopy(row.get(key)) for row in rows] for name, key in names.items()}
    if EARLIER in parameters(function):
        found[EARLIER] = copy.deepcopy(earlier)
    return found


def begin(function, rows, earlier=None):
    """Call a reward -> what it returned or is to be awaited, or the exception that it raised."""
    own = os.getpid()
    try:
        return function(**arguments(function, rows, earlier))
    # CAREFUL: the one place that catches everything. A reward is anybody's code run on anything a model
    # writes; its failure is reported in the row, where the trainer counts it, not disguised as a 0.
    except KeyboardInterrupt:  # of whoever looks at the terminal
        raise
    except BaseException as error:  # SystemExit too, of argparse for one
        return error
    finally:
        if os.getpid() != own:  # a fork that the reward has not ended makes no further calls
            os._exit(1)


def end(function, rows, returned):
    """What a call returned or raised -> the results of its rows."""
    if isinstance(returned, KeyboardInterrupt):  # in a task it would come again in the next loop
        raise returned
    try:
        if isinstance(returned, BaseException):
            raise returned
        return results_of(returned, len(rows)) if sees_group(function) else [result_of(returned)]
    except BaseException as error:  # also of a method of what it returned
        return [failed(error, function)] * len(rows)


async def _outcome(awaitable):
    try:
        return await awaitable
    except BaseException as error:  # for SystemExit asyncio would end the run
        return error


def call_here(function, calls, timeout_s, at_once):
    """Make calls in this process -> the results of each. calls: [(rows, earlier results)].

    Those of an `async def` wait for each other's answers, so many at once; each has timeout_s seconds.
    """
    with guest(name_of(function)):
        returned = [begin(function, *call) for call in calls]
    waits = {i: x for i, x in enumerate(returned) if isawaitable(x)}

    async def wait_for_all():
        places = asyncio.Semaphore(at_once)

        async def wait_for(i):
            async with places:
                task = asyncio.ensure_future(_outcome(waits[i]))
                done, _ = await asyncio.wait([task], timeout=timeout_s)
                if done:
                    returned[i] = task.result()
                    return
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=LAST_WORD_S)
                why = f": {task.result()}" if done and str(task.result()) else ""
                returned[i] = TimeoutError(f"no result after {timeout_s} s (--reward_timeout_s){why}")

        await asyncio.gather(*map(wait_for, waits))

    with guest(name_of(function)):
        if waits:
            awaited(wait_for_all())
        return [end(function, rows, x) for (rows, _), x in zip(calls, returned, strict=True)]


def call_once(function, rows, earlier):
    """The results of one call, in the process of a worker, which has the time-out."""
    returned = begin(function, rows, earlier)
    if isawaitable(returned):
        returned = awaited(_outcome(returned))
    return end(function, rows, returned)


def awaited(result):
    """What a function returned, awaited if it is to be."""
    if not isawaitable(result):
        return result
    if not LOOP.get_loop().is_running():
        return LOOP.get_loop().run_until_complete(result)
    # an `async def step` has called ToolEnv's; wait_for without a limit makes a coroutine of any awaitable
    return THREAD.submit(INNER.run, asyncio.wait_for(result, None)).result()


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


def own_file(function):
    """The name of a reward, and the file that defines it; None: it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    name = getattr(function, "__name__", type(function).__name__)
    return name, getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)


def name_of(function):
    """FILE.py:NAME, for people."""
    name, file = own_file(function)
    return f"{Path(file).name}:{name}" if file else name


def _where(error, function):
    """The last line of the reward's own folder that the exception has passed, or the reward's name."""
    _, file = own_file(function)
    if file:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if Path(frame.filename).parent == Path(file).parent:
                return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return f" ({name_of(function)})"
