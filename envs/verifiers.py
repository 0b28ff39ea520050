"""Tasksets of the package verifiers (Prime Intellect, 0.4): --env envs/verifiers.py:TASKSET.

TASKSET: an installed package with one; VERIFIERS_CONFIG: its settings, as JSON.  Each trajectory has servers
of tools of its own, in this process.  A turn without a call is the last.
"""

import inspect
import json
import os
from functools import cache

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from envs.tools import ToolEnv, unique
from rewards.manager.calls import awaited
from system.text import one_line
from system.thoughts import reply_of

READS = ("VERIFIERS_CONFIG",)


@cache  # one class a process: pickled objects find it
def __getattr__(taskset):
    if taskset.startswith("__"):
        raise AttributeError(taskset)
    config = json.loads(os.environ.get("VERIFIERS_CONFIG", "{}")) | dict(id=taskset)
    try:
        env = load_environment(resolve_env_config(dict(taskset=config)))
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(one_line(error)) from None
    task = type(env.taskset).task_type()
    taskset_class = type(env.taskset)
    if (task.setup, task.finalize, type(env)) != (vf.Task.setup, vf.Task.finalize, vf.SingleAgentEnv):
        raise ValueError(f"{taskset}: setup, finalize and an Env of its own, as of a user, are not supported")

    def servers():
        return task.toolsets(env.config.taskset.task) + taskset_class.toolsets(env.config.taskset)

    mcp = MCPServer(taskset)
    tools = []
    for name, function in functions_of(servers()).items():
        mcp.add_tool(function, name, description=function.__doc__)
    for x in awaited(mcp.list_tools()):
        about = dict(name=x.name, description=x.description, parameters=x.input_schema)
        tools.append(dict(type="function", function=about))
    parts = dict(task=task, env=env, servers=staticmethod(servers), tools=tools or None)
    return type(taskset, (Dialogue,), parts)


def functions_of(servers):
    tools = [(server.server_name, fn) for server in servers for fn in discover_decorated(server, "tool")]
    names = unique(f"{server}_{fn.tool_name or fn.__name__}".lstrip("_") for server, fn in tools)
    return {name: fn for name, (_, fn) in zip(names, tools)}


class Dialogue(ToolEnv):
    def __init__(self, extra_info):
        data = self.task.data_type().model_validate_json(extra_info["task"])
        self.own, self.score, servers = self.task(data, self.env.config.taskset.task), 0.0, self.servers()
        bound = [fn for fn in self.own.hooks("reward") if "runtime" in inspect.signature(fn).parameters]
        bound += self.own.hooks("stop") + discover_decorated(self.own, "intercept")
        if bound or self.task.NEEDS_CONTAINER:
            raise ValueError("containers, stop, intercept and rewards with a runtime are not supported")
        self.state, self.functions = state_cls(self.task)(), functions_of(servers)
        prompt = [dict(role="user", content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        system = [dict(role="system", content=data.system_prompt)] if data.system_prompt else []
        self.messages = [*system, *prompt]
        for server in servers:
            server._inert_state = self.state  # which a tool has outside a rollout of the package
            awaited(server.setup())
            awaited(server.setup_task(data))

    @classmethod
    def rows(cls):
        """Prompts and extra_info of the tasks."""
        for task in cls.env.taskset:
            extra = dict(task=task.data.model_dump_json())
            yield cls(extra).messages, extra

    def step(self, text):
        answers = super().step(text) if self.tools else None
        self.messages.append(dict(role="assistant", content=reply_of(text).strip()))
        self.messages += [dict(answer, tool_call_id="") for answer in answers or []]
        if not answers:
            nodes = [vf.MessageNode(message=message) for message in self.messages]
            for i, node in enumerate(nodes[1:]):
                node.parent, node.sampled = i, node.message.role == "assistant"
            about = vf.TraceTask(type="", data=self.own.data)
            trace = vf.Trace.model_construct(task=about, state=self.state, nodes=nodes)
            awaited(self.own.score(trace))
            self.score = trace.reward
        return answers

    def reward(self):
        return self.score
