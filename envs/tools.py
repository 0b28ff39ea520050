"""Tools in OpenAI's manner: plain functions, which the model is shown as JSON schemas and calls in its text.

Calls are [(name, arguments), ...] of a turn, (None, what is wrong) for a call that cannot be read; nothing if
there is no call.  vLLM's parsers read them, see envs/calls.py; here are formats read without it.
"""

import ast
import inspect
import json
import re
import types
import typing
from contextlib import suppress

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from rewards.manager.calls import awaited
from rewards.sandbox import SandboxError
from system.text import one_line
from system.thoughts import CLOSING, OPENING, reply_of

TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
CHANNELS = re.compile(r"to=functions\.([^\s<]+)[^{]*?<\|message\|>(.*?)(?:<\|(?:call|end)\|>|\Z)", re.DOTALL)
UNIONS = typing.Union, types.UnionType
UNREADABLE = None, "the call cannot be read: write it as JSON with name and arguments, or as you were shown"


def unique(names):
    """The names of tools. ValueError, in one line, if two are the same."""
    names = [*names]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--env: two tools are named {name!r}: a call could not say which it means")
    return names


class Turn(str):
    """A turn of the model: its text, and the calls in it, as the parser of the model reads them."""

    def __new__(cls, text, calls):
        turn = super().__new__(cls, text)
        turn.calls = calls
        return turn

    def __getnewargs__(self):
        return str(self), self.calls


def parse_calls(text):
    """Hermes, Qwen: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>, any number of them"""
    return calls_after_thought(lambda said: [_json(call) for call in TAGGED.findall(said)], text)


def harmony(text):
    """gpt-oss: to=functions.f<|channel|>commentary json<|message|>{"a": 1}"""

    def read(said):
        return [_json(dict(name=name, arguments=arguments)) for name, arguments in CHANNELS.findall(said)]

    return calls_after_thought(read, text)


def calls_after_thought(read, text):
    """The calls that `read` finds behind the thought of a text. A mark in an argument ends no thought."""
    said = reply_of(text)
    if said != text and not OPENING.match(text.lstrip()):
        calls = read(text)
        if any(CLOSING.search(str(arguments)) for _, arguments in calls):
            return calls
    return read(said)


def _json(call):
    """(name, arguments) of a call as JSON; its arguments may be JSON in a string."""
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        call = json.loads(call) if isinstance(call, str) else call
        arguments = call["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(call["name"], str) and (arguments is None or isinstance(arguments, dict)):
            return call["name"], arguments or {}
    return UNREADABLE


def _typed(value, hint):
    """A string for a parameter that takes none, as in XML, as a literal of JSON or Python of its type."""
    is_none = value == "null" and type(None) in typing.get_args(hint)
    if isinstance(value, str) and (is_none or not _takes_text(hint)):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, PydanticUserError):
                return TypeAdapter(_bare(hint)).validate_python(read(value))
    return value


def _bare(hint):
    """list of `list[int]`: what a model writes is held against the outer type."""
    origin = typing.get_origin(hint)
    if origin in UNIONS:
        return typing.Union[tuple(map(_bare, typing.get_args(hint)))]  # noqa: UP007, of a tuple
    return hint if origin is typing.Literal else origin or hint


def _takes_text(hint):
    """Of `str | None` yes, of `list[str]` no; a Literal by its values."""
    if typing.get_origin(hint) in (*UNIONS, typing.Literal):
        return any(map(_takes_text, typing.get_args(hint)))
    return hint in (str, typing.Any) or isinstance(hint, str)


def _plain(value):
    """Numbers and arrays of numpy and torch as Python's own; all else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class _Schemas:
    """JSON schemas of the functions of a class, made when asked for: transformers is slow to import."""

    def __get__(self, _, env):
        from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

        try:
            return [get_json_schema(function) for function in env.functions.values()]
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(
                f"--env: {one_line(error)} (type hints, and a docstring with Args: for each)"
            ) from None


class ToolEnv:
    """Answers the calls of a turn; one without calls is the last.  functions: {name: function}.

    step is an ordinary function, also for an `async def step` of a class of its own that calls it.
    """

    functions = {}  # noqa: RUF012, each class has its own
    tools = _Schemas()

    def __init_subclass__(cls):
        for name, tool in cls.functions.items():
            yields = inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool)
            if yields or not inspect.isroutine(tool):
                raise ValueError(f"--env: the tool {name!r} must be a function that returns its result")

    def __init__(self, extra_info):
        pass

    def step(self, text):
        return [self._answer(*call) for call in self._calls(text)] or None

    def _calls(self, text):
        """A plain text, as in a test, is read as Hermes has it."""
        return text.calls if isinstance(text, Turn) else parse_calls(text)

    def _answer(self, name, arguments):
        if name is None:
            return {"role": "tool", "content": f"error: {arguments}"}
        if name not in self.functions:
            known = ", ".join(self.functions)
            return {"role": "tool", "content": one_line(f"error: no tool {name[:50]!r}; there are: {known}")}
        try:
            function = self._function(name)
            hints = typing.get_type_hints(function)
            arguments = {key: _typed(value, hints.get(key, str)) for key, value in arguments.items()}
            bound = inspect.signature(function).bind(**arguments)
            result = awaited(function(*bound.args, **bound.kwargs))
            if not isinstance(result, str):
                result = json.dumps(result, default=_plain, ensure_ascii=False)
        except (MemoryError, SandboxError):
            raise  # of the machine, not of the model: the trajectory ends with a failure
        except (
            BaseException
        ) as error:  # a tool is anybody's code, called with anything: the model gets the error
            result = one_line(f"error: {type(error).__name__}: {error}")
        return {"role": "tool", "name": name, "content": result}

    def _function(self, name):
        return self.functions[name]


class TrlEnv(ToolEnv):
    """An environment of TRL: its public methods are the tools, its attribute `reward` the reward."""

    trl_class = None

    def __init__(self, extra_info):
        self.env = self.trl_class()
        awaited(self.env.reset(**extra_info))

    def _function(self, name):
        return getattr(self.env, name)

    def reward(self):
        reward = getattr(self.env, "reward", None)
        return None if callable(reward) else reward


def trl_env(trl_class):
    """The environment class that wraps one of TRL's."""
    methods = {
        name: method.__get__(trl_class)  # bound to anything: the schema then leaves `self` out
        for name, method in inspect.getmembers(trl_class, inspect.isfunction)
        if not name.startswith("_") and name != "reset"
    }
    return type("Trl", (TrlEnv,), {"trl_class": trl_class, "functions": methods})
