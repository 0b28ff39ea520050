"""Environments of the package verifiers (Prime Intellect, 0.4): --env envs/verifiers.py:TASKSET.

TASKSET: an installed package with one; VERIFIERS_CONFIG: its settings, as JSON.  Each trajectory has servers
of tools of its own, in this process.  The user is `run` of the package.  It begins again after each turn and
hears again what the model said: it must say the same.
"""

import inspect
import json
import os
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from envs import one_line
from envs.tools import ToolEnv
from rewards.manager.awaiting import awaited

READS = ("VERIFIERS_CONFIG",)


class Waiting(BaseException):
    """For the answer of the model."""


@cache  # one class a process: pickled objects find it
def __getattr__(taskset):
    if taskset.startswith("__"):
        raise AttributeError(taskset)
    config = json.loads(os.environ.get("VERIFIERS_CONFIG", "{}")) | dict(id=taskset)
    try:
        env = load_environment(resolve_env_config(dict(taskset=config)))
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(one_line(error)) from None
    task, ours = type(env.taskset).task_type(), (vf.Task.setup, vf.Task.finalize, vf.Env.finalize, 1)
    has = task.setup, task.finalize, type(env).finalize, len(agent_config_fields(env.config))
    if task.NEEDS_CONTAINER or has != ours:
        raise ValueError(f"{taskset}: a container, setup, finalize and several agents are not supported")
    mcp, tools = MCPServer(taskset), []
    for name, function in functions_of(servers_of(env)).items():
        mcp.add_tool(function, name, description=function.__doc__)
    for x in awaited(mcp.list_tools()):
        about = dict(name=x.name, description=x.description, parameters=x.input_schema)
        tools.append(dict(type="function", function=about))
    return type(taskset, (Dialogue, ToolEnv)[: 1 + bool(tools)], dict(env=env, tools=tools or None))


def servers_of(env):
    taskset, config = type(env.taskset), env.config.taskset
    return taskset.task_type().toolsets(config.task) + taskset.toolsets(config)


def functions_of(servers):
    tools = [(server.server_name, fn) for server in servers for fn in discover_decorated(server, "tool")]
    return {f"{server}_{fn.tool_name or fn.__name__}".lstrip("_"): fn for server, fn in tools}


class Dialogue:
    """A conversation about a task.  said: by the model and its tools, a list between messages of the user."""

    def __init__(self, extra_info):
        task_type, servers = type(self.env.taskset).task_type(), servers_of(self.env)
        data = task_type.data_type().model_validate_json(extra_info["task"])
        self.task, self.state = task_type(data, self.env.config.taskset.task), state_cls(task_type)()
        self.said, self.score, self.functions = [[]], 0.0, functions_of(servers)
        bound = [fn for fn in self.task.hooks("reward") if "runtime" in inspect.signature(fn).parameters]
        if bound or self.task.hooks("stop") or discover_decorated(self.task, "intercept"):
            raise ValueError("stop, intercept and rewards that need a runtime are not supported")
        for server in servers:
            server._inert_state = self.state  # which a tool has outside a rollout of the package
            awaited(server.setup())
            awaited(server.setup_task(data))

    @classmethod
    def rows(cls):
        """Prompts and extra_info of the tasks."""
        for task in cls.env.taskset:
            extra = dict(task=task.data.model_dump_json())
            yield cls(extra).play(), extra

    def step(self, text):
        answers = ToolEnv.step(self, text) if self.tools else None
        self.said[-1].append(dict(role="assistant", content=text.rpartition("</think>")[2].strip()))
        self.said[-1] += [dict(answer, tool_call_id="") for answer in answers or []]
        self.said += [] if answers else [[]]
        return answers or self.play()

    def reward(self):
        return self.score

    def play(self):
        """What the user says to the last turn, at first the prompt; None: the task is over and scored."""
        data, said, new = self.task.data, iter(self.said[:-1]), []
        trace = vf.Trace.model_construct(task=vf.TraceTask(type="", data=data), state=self.state)

        def add(messages, sampled=False):
            for x in [dict(role="user", content=messages)] if isinstance(messages, str) else messages or []:
                node = vf.MessageNode(parent=len(trace.nodes) - 1 if trace.nodes else None, message=x)
                node.sampled = sampled and node.message.role == "assistant"
                trace.nodes.append(node)
                new.append(dict(role=node.message.role, content=node.message.content))

        async def turn(message=None):
            add(message)
            if (reply := next(said, None)) is None:
                raise Waiting
            add(reply, sampled=True)
            new.clear()
            return vf.Segment(messages=[node.message for node in trace.nodes[-len(reply) :]])

        @asynccontextmanager
        async def interaction(task):
            yield SimpleNamespace(turn=turn, trace=trace)
            await task.score(trace)

        async def run(task):
            async with interaction(task):
                await turn()

        add(data.system_prompt and [dict(role="system", content=data.system_prompt)])
        add(data.prompt)
        agent = SimpleNamespace(interaction=interaction, run=run)
        try:
            agents = SimpleNamespace(**dict.fromkeys(agent_config_fields(self.env.config), agent))
            awaited(self.env.run(self.task, agents))
        except Waiting:
            return new
        self.score = trace.reward
        return None
