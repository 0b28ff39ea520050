"""Environments on a server of OpenEnv (Meta, from 0.5): OPENENV_URL=http://... --env envs/openenv.py:Remote

What the model writes is an action: JSON, or the text alone where an action has one required field.  If the
server has tools, the model calls them.  The reward is the sum of those of the steps.  Each trajectory is a
session: the server needs a ConcurrencyConfig with room for them, and a time-out for what --max_turns ends.
"""

import asyncio
import json
import os
import urllib.request
from contextlib import suppress
from itertools import count

import aiohttp

from envs.tools import ToolEnv
from rewards.manager.calls import awaited
from system.thoughts import reply_of

READS = ("OPENENV_URL",)
URL = os.environ.get("OPENENV_URL", "").rstrip("/")
if not URL.startswith("http"):
    raise ValueError("set OPENENV_URL to the address of the server: http://localhost:8000")


def fetch(path, **data):
    body = json.dumps(data).encode() if data else None
    request = urllib.request.Request(URL + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def session(method, **params):
    answer = fetch("/mcp", jsonrpc="2.0", id=1, method=f"openenv/session/{method}", params=params)
    if answer.get("error"):
        raise ValueError(answer["error"]["message"])
    return answer["result"]["session_id"]


async def exchange(key, kind, data):
    """What the environment of a session answers: {observation, reward, done}."""
    async with aiohttp.ClientSession() as client, client.ws_connect(f"{URL}/ws?session_id={key}") as socket:
        with suppress(ConnectionError):
            await socket.send_json(dict(type=kind, data=data))
        answer = await socket.receive_json()
    if answer["type"] != "error":
        return answer["data"]
    message = answer["data"]["message"]
    if answer["data"]["code"] == "VALIDATION_ERROR":  # an action that is none: the model is told
        return dict(observation=dict(error=answer["data"]["errors"][0]["msg"]), reward=0, done=False)
    if "already has an attached" not in message:
        raise ValueError(message)
    await asyncio.sleep(0.05)  # the connection of the last step has not ended yet
    return await exchange(key, kind, data)


ACTION = fetch("/schema")["action"]
TOOLS = []
if ACTION["title"] in ("Action", "CallToolAction", "ListToolsAction"):
    TOOLS = fetch("/step", action=dict(type="list_tools"))["observation"]["tools"]


class Remote(ToolEnv if TOOLS else object):
    functions = {tool["name"]: fetch for tool in TOOLS}  # noqa: RUF012, called by _function alone
    tools = [dict(type="function", function=dict(x, parameters=x.pop("input_schema"))) for x in TOOLS] or None

    def __init__(self, extra_info):
        self.key, self.score = session("create"), 0.0
        self.first = self.send("reset", json.loads(extra_info["reset"]))

    @classmethod
    def rows(cls):
        """Prompts and extra_info, one for each seed."""
        for seed in count():
            env = cls(extra := dict(reset=json.dumps(dict(seed=seed))))
            session("close", session_id=env.key)
            yield [dict(role="user", content=env.first)], extra

    def send(self, kind, data):
        """Do a step of the environment -> the text in what it shows, or all of that as JSON."""
        answer = awaited(exchange(self.key, kind, data))
        self.score += answer["reward"] or 0.0
        self.done = answer["done"]
        seen = answer["observation"]
        if self.done:
            session("close", session_id=self.key)
        if TOOLS and seen.get("result"):
            return "\n".join(part.get("text", "") for part in seen["result"]["content"])
        seen = {name: value for name, value in seen.items() if value not in (None, {}, "")}
        alone = len(seen) == 1 and isinstance(next(iter(seen.values())), str)
        return seen.popitem()[1] if alone else json.dumps(seen, ensure_ascii=False)

    def step(self, text):
        if TOOLS:
            answers = super().step(text)
        else:
            said = reply_of(text).strip()
            action = dict.fromkeys(ACTION.get("required", [])[:1], said)
            with suppress(ValueError, TypeError):
                action = dict(json.loads(said))
            answers = [dict(role="user", content=self.send("step", action))]
        return None if self.done else answers

    def _function(self, name):
        return lambda **x: self.send("step", dict(type="call_tool", tool_name=name, arguments=x))

    def reward(self):
        return self.score
