"""Runs the environments of trajectories in helper processes, several at a time.

An environment belongs to no process: each step returns its pickled state, and the next step sends it to any
process that is free.  So a hang, which is killed, costs one process and one trajectory.  The caller never
unpickles a state.
"""

import base64
import functools
import pickle
import queue
import threading

import cloudpickle

from envs import load_env
from envs.tools import ToolEnv, Turn, unique
from rewards.manager.calls import awaited
from rewards.manager.worker import Worker, WorkerError
from system.text import one_line


class EnvPool:
    """Environments of `--env FILE.py:NAME`, one for each key.

    workers: steps at a time, each in a process.  timeout_s: for one step; loading the file is not counted.
    parser: a name of vLLM's for calls, and the prompts may explain the tools; None: the chat template does,
    and what reads its calls is the parser.  tools: JSON schemas for the template, or None.
    Raises ValueError, in one line.
    """

    def __init__(self, spec, workers, timeout_s, parser=None):
        if workers < 1 or not timeout_s > 0:
            raise ValueError(f"environments with {workers} workers, {timeout_s} s: both must be above 0")
        env_class = load_env(spec)
        self.tools = env_class.tools
        unique(tool["function"]["name"] for tool in self.tools or ())
        self.calls_tools = issubclass(env_class, ToolEnv)
        self.parser, self.read_calls, self.ends = parser, None, []  # the last two: envs/calls.py
        self._loading = _Loading(spec)
        self._timeout_s = timeout_s
        self._workers = workers
        self._states = {}
        self._in_flight = 0
        self._calls = queue.SimpleQueue()
        self._answers = queue.SimpleQueue()
        for _ in range(workers):  # CAREFUL: daemons, since an executor's threads hold up the end of a run
            threading.Thread(target=self._serve, daemon=True).start()

    def step(self, key, text, extra_info):
        """Begin a step of the environment of `key` (hashable), which is made at its first step."""
        if self.read_calls:
            text = Turn(text, self.read_calls(text))
        self._in_flight += 1
        self._calls.put((key, (self._loading, self._states.get(key), extra_info, text)))

    def answers(self, wait):
        """The steps that are done since -> dicts with key, messages (None: finished), reward, failure.

        failure: None, "timeout", "crash" (the process died) or "error: ..." (one line); messages and reward
        are None then.  wait: until there is at least one, unless none was begun.
        """
        answers = []
        while not self._answers.empty() or (wait and not answers and self._in_flight):
            key, state, answer = self._answers.get()
            self._in_flight -= 1
            self._states[key] = state
            answers.append({"key": key, **answer})
        return answers

    def clear(self):
        """Forget all environments.  Nothing may be under way."""
        if self._in_flight:
            raise RuntimeError(f"{self._in_flight} steps of environments are under way")
        self._states.clear()

    def close(self):
        """End the threads and their processes, each after its step."""
        for _ in range(self._workers):
            self._calls.put(None)

    def _serve(self):
        """A thread and its process."""
        worker = Worker()
        while call := self._calls.get():
            key, args = call
            state = None
            messages = None
            reward = None
            failure = None
            try:
                reply = worker.call("envs.pool:step_env", *args, timeout_s=self._timeout_s)
                # CAREFUL: looked at here again, since a process that was taken over may send anything
                if "error" in reply:
                    failure = f"error: {one_line(reply['error'])}"
                else:
                    messages, state, reward = _checked(reply["messages"]), reply["state"], reply["reward"]
            except TimeoutError:
                failure = "timeout"
            except WorkerError:
                failure = "crash"
            except Exception as error:  # the file is anybody's: what cannot be loaded or be sent as JSON
                failure = f"error: {one_line(error)}"
            self._answers.put((key, state, {"messages": messages, "reward": reward, "failure": failure}))
        worker.close()


class _Loading:
    """Is the environment class once it is unpickled, in a process: time of loading is no time of a step."""

    def __init__(self, spec):
        self.spec = spec

    def __reduce__(self):
        return _loaded, (self.spec,)


@functools.cache
def _loaded(spec):
    return load_env(spec)


def step_env(env_class, state, extra_info, text):
    """One step, in a process -> a dict with state, messages and reward, or with `error`, a line."""
    try:
        env = env_class(extra_info) if state is None else pickle.loads(base64.b64decode(state))
        messages = _checked(awaited(env.step(text)))
        reward = awaited(env.reward()) if hasattr(env, "reward") else None
        state = base64.b64encode(cloudpickle.dumps(env)).decode()
    except MemoryError:
        raise  # ends the process
    except BaseException as error:  # an environment is anybody's code: a failure ends its trajectory only
        return {"error": one_line(f"{type(error).__name__}: {error}")}
    return {"state": state, "messages": messages, "reward": reward}


def _checked(messages):
    """What `step` returned, with nothing in it that a tokenizer or a template would fail on."""
    if messages is None:
        return None
    if not isinstance(messages, list | tuple) or not messages:
        raise TypeError(f"step returned {one_line(repr(messages))}, not messages and not None")
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ("tool", "user")
            or not isinstance(message.get("content"), str)
            or not isinstance(message.get("name", ""), str)
        ):
            raise TypeError(
                f"step returned the message {one_line(repr(message))}: role tool or user, content a str"
            )
    known = ("role", "name", "content")
    # half of a surrogate pair, which JSON of a model may hold, has no UTF-8
    return [{k: m[k].encode("utf-8", "replace").decode() for k in known if k in m} for m in messages]
