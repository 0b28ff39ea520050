"""The environment of peer.py: it answers whatever the model says."""

from envs.calculator import calculate
from envs.tools import ToolEnv

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "(37 + 5) * 12.5"}}\n</tool_call>'


class Calls(ToolEnv):
    """Reads every turn as if it were a call of the calculator."""

    functions = dict(calculate=calculate)  # noqa: RUF012

    def step(self, text):
        return super().step(CALL)
