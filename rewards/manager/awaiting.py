"""Awaits what an `async def` of a reward, a tool or an environment has returned."""

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor

LOOP = asyncio.Runner()  # one for all calls of a process: a client that a module keeps belongs to its loop
INNER, THREAD = asyncio.Runner(), ThreadPoolExecutor(1)  # for what is to be awaited while LOOP is at work


def awaited(result):
    """What a function returned, awaited if it is to be."""
    if not inspect.isawaitable(result):
        return result
    if not LOOP.get_loop().is_running():
        return LOOP.get_loop().run_until_complete(result)
    # an `async def step` has called ToolEnv's; wait_for without a limit makes a coroutine of any awaitable
    return THREAD.submit(INNER.run, asyncio.wait_for(result, None)).result()
