"""Environments of agent_rollout.py and peer.py: they answer whatever the model says."""

import time

from envs.calculator import calculate
from envs.tools import ToolEnv

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "(37 + 5) * 12.5"}}\n</tool_call>'


class Slow:
    """Asks for a further turn after each of the row's `delays`, in seconds."""

    def __init__(self, extra_info):
        self.delays = list(extra_info["delays"])

    def step(self, text):
        if not self.delays:
            return None
        time.sleep(self.delays.pop(0))
        return [dict(role="user", content="And then?")]


class Calls(ToolEnv):
    """Reads every turn as if it were a call of the calculator."""

    functions = dict(calculate=calculate)  # noqa: RUF012

    def step(self, text):
        return super().step(CALL)
