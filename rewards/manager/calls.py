"""How a reward is called: for one response or for a group, awaited if it is `async def`."""

import asyncio
import os
from inspect import isawaitable, signature
from unittest import mock

from rewards.manager.awaiting import awaited
from rewards.manager.results import failed, result_of, results_of

# Parameter -> the key of a row that it gets
ONE = {name: name for name in ("data_source", "solution_str", "ground_truth", "extra_info", "prompt")}
GROUP = {f"{name}s": name for name in ONE}  # verl's names: lists, one entry a response
EARLIER = "results"  # of a reward of a group: what the rewards before it in --reward_fn gave
ASKED = "prompt", "prompts", EARLIER  # only for who asks; prompts are chat messages
LAST_WORD_S = 1  # in which a reward whose time is up may raise what it was waiting for


def sees_group(function):
    """Whether a reward gets all responses to a prompt at once: it has the parameter `solution_strs`."""
    return "solution_strs" in signature(function).parameters


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
    asks = signature(function).parameters
    return {name: key for name, key in names.items() if name in asks or name not in ASKED}


def arguments(function, rows, earlier):
    """The arguments of one call. rows: those of a group, or a single one."""
    if not sees_group(function):
        row = dict(extra_info=None, prompt=None) | rows[0]
        return {name: row[key] for name, key in keys(function).items()}
    found = {name: [row.get(key) for row in rows] for name, key in keys(function).items()}
    return found | ({EARLIER: earlier} if EARLIER in signature(function).parameters else {})


def kept_alive():
    """While the block lasts, os._exit ends the reward and not the run."""
    own, leave = os.getpid(), os._exit

    def stay(code):
        if os.getpid() != own:  # a process that the reward has forked
            leave(code)
        raise SystemExit(f"os._exit({code})")

    return mock.patch.object(os, "_exit", stay)


def begin(function, rows, earlier=None):
    """Call a reward -> what it returned or is to be awaited, or the exception that it raised."""
    try:
        return function(**arguments(function, rows, earlier))
    # CAREFUL: the one place that catches everything. A reward is anybody's code run on anything a model
    # writes; its failure is reported in the row, where the trainer counts it, not disguised as a 0.
    except KeyboardInterrupt:  # of whoever looks at the terminal
        raise
    except BaseException as error:  # SystemExit too, of argparse for one
        return error


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
    with kept_alive():
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

    if waits:
        with kept_alive():
            awaited(wait_for_all())
    return [end(function, rows, x) for (rows, _), x in zip(calls, returned, strict=True)]


def call_once(function, rows, earlier):
    """The results of one call, in the process of a worker, which has the time-out."""
    returned = begin(function, rows, earlier)
    if isawaitable(returned):
        returned = awaited(_outcome(returned))
    return end(function, rows, returned)
