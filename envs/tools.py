"""Tools in OpenAI's manner: plain functions, which the model is shown as JSON schemas and calls in its text.

parse_calls: [(name, arguments), ...] of a turn, (None, what is wrong) for a call that cannot be read; nothing
if there is no call.  Each format is tried; the first that finds a call is taken.
Special tokens around a call may be marks that no format knows: it is read without them, too.
"""

import ast
import inspect
import json
import re
import types
import typing
from contextlib import suppress

from envs import one_line
from rewards.manager.awaiting import awaited

TAGGED = re.compile(
    r"<function=(.*?)(?:</function>|\Z)|<tool_call>(?!\s*<function=)(.*?)(?:</tool_call>|\Z)", re.DOTALL
)
SPECIAL = re.compile(r"<\|/?\w+\|>\s*")  # a special token
DECODER, BETWEEN = json.JSONDecoder(), re.compile(r"[;\s]*")


def parse_calls(text):
    text = text.rpartition("</think>")[2].strip()
    texts = text, _inside(text)
    return next(filter(None, (read(x) for x in texts for read in FORMATS)), [])


def _inside(text):
    """A text without the special tokens at both its ends."""
    begin, end = 0, len(text)
    while token := SPECIAL.match(text, begin):
        begin = token.end()
    while (last := text.rfind("<|", begin, end)) >= 0 and SPECIAL.fullmatch(text, last, end):
        end = last
    return text[begin:end].strip()


def _hermes(text):
    """Hermes, Qwen: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>, any number of them
    Qwen3-Coder, Qwen3.5: <tool_call><function=f><parameter=a>1</parameter></function></tool_call>, also
    without the outer tags, or several functions in them, as these models and vLLM's parser have it"""
    return [_xml(call[1]) if call[2] is None else _json(call[2]) for call in TAGGED.finditer(text)]


def _llama(text):
    """Llama 3: {"name": "f", "parameters": {"a": 1}} as the whole text, after <|python_tag|> or not; several
    with ; between them"""
    marked, text = text.startswith("<|python_tag|>"), text.removeprefix("<|python_tag|>").rstrip("; \n")
    calls, begin = [], 0
    while begin < len(text):
        try:
            call, begin = DECODER.raw_decode(text, BETWEEN.match(text, begin).end())
        except (ValueError, RecursionError):
            call, begin = None, len(text)
        calls.append(_json(call))
    return calls if marked or all(name is not None for name, _ in calls) else []


def _mistral(text):
    """Mistral: [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}], or [TOOL_CALLS]f[ARGS]{"a": 1}"""
    _, mark, marked = text.partition("[TOOL_CALLS]")
    calls = []
    for part in filter(None, map(str.strip, (marked if mark else text).split("[TOOL_CALLS]"))):
        if match := re.fullmatch(r"([\w.-]+)(?:\[ARGS\])?\s*(\{.*\})", part, re.DOTALL):
            calls.append(_json({"name": match[1], "arguments": match[2]}))
        else:
            parsed = _loads(part)
            calls += map(_json, parsed if isinstance(parsed, list) else [part])
    return calls if mark or all(name is not None for name, _ in calls) else []


def _pythonic(text):
    """Llama 4, Gemma: [f(a=1), g(b="x")] as the whole text, arguments by name, literals only"""
    try:
        calls = ast.parse(text, mode="eval").body.elts if text.startswith("[") else []
        calls = [] if any(call.args for call in calls) else calls
        return [(c.func.id, {word.arg: ast.literal_eval(word.value) for word in c.keywords}) for c in calls]
    except (AttributeError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return []


FORMATS = _hermes, _llama, _mistral, _pythonic


def _json(call):
    """(name, arguments) of a call as JSON; its arguments may be JSON in a string."""
    call = _loads(call)
    with suppress(KeyError, TypeError, ValueError):
        arguments = _loads(call["arguments"] if "arguments" in call else call["parameters"])
        return str(call["name"]), dict(arguments or {})
    return None, "the call is no valid JSON with name and arguments"


def _loads(value):
    """JSON, or the value itself where it is none."""
    with suppress(TypeError, ValueError, RecursionError):
        return json.loads(value)
    return value


def _xml(body):
    name, _, body = body.partition(">")
    first, *parts = body.split("<parameter=")
    arguments = {}
    for part in parts:
        key, _, value = part.partition(">")
        arguments[key.strip()] = value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
    if not parts and first.strip():  # Llama 3.1's way: <function=f>{"a": 1}</function>
        return _json({"name": name.strip(), "arguments": first})
    return name.strip(), arguments


def _typed(value, hint):
    """A string for a parameter that takes none, as in XML, is read as a literal of JSON or Python."""
    is_none = value == "null" and type(None) in typing.get_args(hint)
    if isinstance(value, str) and (is_none or not _takes_text(hint)):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError):
                return read(value)
    return value


def _takes_text(hint):
    """Of `str | None` yes, of `list[str]` no; a Literal by its values."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal):
        return any(map(_takes_text, typing.get_args(hint)))
    return hint in (str, typing.Any) or isinstance(hint, str)


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
        return [self._answer(*call) for call in parse_calls(text)] or None

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
                result = json.dumps(result, default=str, ensure_ascii=False)
        except MemoryError:
            raise  # ends the process
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
