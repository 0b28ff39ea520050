"""Environments: what answers a model between its turns.  One object a trajectory.

class Environment:
    tools = None                     # or JSON schemas of tools, which the chat template shows; optional
    def __init__(self, extra_info):  # extra_info of the row
    def step(self, text):            # the model's turn -> chat messages that answer it, or None: finished
        return [{"role": "tool", "content": "42"}]  # role: tool or user; a `name` where there is one
    def reward(self):                # asked after each step: a number, or a dict with `score`; optional

The code runs in processes that can be killed, each step perhaps in another one: the object must be picklable,
and what is big and never changes belongs into a cache of its module.  A hang, a crash or an exception ends
its trajectory only.  Methods and tools may be `async def`: each process has one event loop.
"""

import warnings

from system.plugins import load_from

warnings.filterwarnings("ignore", category=SyntaxWarning)  # what a model writes is parsed as Python, too


def load_env(spec):
    """The environment class of `--env FILE.py:NAME`, with `tools`.

    NAME: such a class; a list of functions, tools in OpenAI's manner; or an environment class of TRL.
    Raises ValueError, in one line.
    """
    from envs.tools import ToolEnv, trl_env, unique

    found = load_from(spec, "--env")
    if isinstance(found, type) and callable(getattr(found, "reset", None)):
        return trl_env(found)
    if isinstance(found, type) and callable(getattr(found, "step", None)):
        if "tools" not in dir(found):  # CAREFUL: getattr would make schemas, and load torch in every process
            found.tools = None
        return found
    if isinstance(found, list | tuple) and found and all(hasattr(f, "__code__") for f in found):
        names = unique(f.__name__ for f in found)
        return type("Tools", (ToolEnv,), {"functions": dict(zip(names, found))})
    raise ValueError(
        f"--env {spec}: {spec.rpartition(':')[2]!r} is no class with `step`, no list of functions"
        " and no class of TRL with `reset`"
    )
