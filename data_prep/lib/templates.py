"""What a chat template writes, in the form in which it shows messages."""

import json
import re
from functools import lru_cache
from itertools import product
from pathlib import Path

from jinja2 import TemplateError, meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from envs import one_line
from envs.messages import RENDER_ERRORS, without_special

DEVELOPER = re.compile("""['"]developer['"]""")  # in a template that knows this role
TOOL = {  # one of which no text speaks
    "name": "zqtool",
    "description": "zq",
    "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "zq"}}},
}
OURS = {"messages", "tools", "documents", "add_generation_prompt"}  # variables that are given anyway


def plain(messages, tokenizer):
    """A conversation of a data set as it is rendered: what users and tools say has no special tokens.

    Turns of the assistant keep them, since some models call tools or think with special tokens. Reasoning
    has all names that templates read; a developer is the system for a template that knows none.
    """
    ours = "assistant", "system", "developer"
    found = [m if m["role"] in ours else without_special(m, tokenizer) for m in messages]
    for i, message in enumerate(found):
        if message["role"] == "developer" and not DEVELOPER.search(str(tokenizer.chat_template)):
            found[i] = message | dict(role="system")
        if thought := message.get("reasoning_content"):
            found[i] = message | dict(reasoning=thought, thinking=thought)
    return found


def use_template(tokenizer, args):
    """Take --chat_template and --chat_template_kwargs: both are saved with the tokenizer.

    The values stand at the beginning of the template, so whoever serves the model renders as it was trained,
    and may still give others.
    """
    if args.chat_template:
        try:
            tokenizer.chat_template = text = Path(args.chat_template).read_text("utf-8")
            _compile_jinja_template(text)
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            raise ValueError(f"--chat_template {args.chat_template}: {one_line(error)}") from None
        if text.lstrip().startswith('{"'):
            raise ValueError(f"--chat_template {args.chat_template}: this is JSON; give the template in it")
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        templates = {"": templates}
    read, problem, values = set(), None, {}
    for text in filter(None, templates.values()):
        read |= meta.find_undeclared_variables(_compile_jinja_template(text).environment.parse(text))
    try:
        values = json.loads(args.chat_template_kwargs)
        json.dumps(values, allow_nan=False)
        if not isinstance(values, dict):
            problem = "it is no JSON object"
        elif unread := values.keys() - read | values.keys() & OURS:
            problem = f"the chat template has no variable {min(unread)!r}"
    except ValueError as error:
        problem = f"it is no JSON ({error})"
    if problem:
        example = """write it as '{"enable_thinking": false}'"""
        raise ValueError(f"--chat_template_kwargs {args.chat_template_kwargs}: {problem}; {example}")
    given = [
        f"{{%- if {x} is not defined %}}{{%- set {x} = {y!r} %}}{{%- endif %}}\n" for x, y in values.items()
    ]
    if given:
        templates = {name: "".join(given) + text for name, text in templates.items()}
        tokenizer.chat_template = templates.get("", templates)
    if hasattr(tokenizer, "image_processor"):
        tokenizer.tokenizer.chat_template = tokenizer.chat_template


def render(messages, tokenizer, tools=None, prompted=True):
    """The text of messages, with the generation prompt; tools: JSON schemas that the template shows.

    ValueError, in one line, if the template cannot write them, or leaves out what somebody says or calls.
    """
    return written(shown(messages, tokenizer, tools, prompted), tokenizer, tools, prompted)


def shown(messages, tokenizer, tools, prompted):
    """Messages in the form in which the template shows them."""
    if tokenizer.chat_template is None:
        raise ValueError("the model has no chat template; give one by --chat_template FILE")
    messages = plain(messages, tokenizer)
    about = []
    for m in messages:
        fields = sorted({"reasoning_content", "name"} & m.keys())
        about.append(
            (m["role"], type(m["content"]), bool(m["content"]), len(m.get("tool_calls") or ()), *fields)
        )
    form = form_of(tuple(about), tokenizer, str(tokenizer.chat_template), bool(tools), prompted)
    return [formed(message, *form) for message in messages]


def written(messages, tokenizer, tools, prompted):
    """What the template writes; Unwritten where it cannot."""
    options = dict(tools=tools or None, tokenize=False, add_generation_prompt=prompted)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except RENDER_ERRORS as error:
        name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise Unwritten(one_line(f"the chat template: {name}{error}")) from None


class Unwritten(ValueError):
    """A template cannot write messages."""


def formed(message, parts, text, none):
    """A message in a form that some templates want.

    parts: its content is a list. Calls are as OpenAI has them; text: their arguments are JSON text; none: no
    content is None where there are calls.
    """
    if parts and isinstance(message["content"], str):
        message = message | dict(content=[dict(type="text", text=message["content"])])
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if text:
            function = function | dict(arguments=json.dumps(function["arguments"], ensure_ascii=False))
        calls.append(dict(type="function") | call | dict(function=function))
    return message | dict(tool_calls=calls, content=message["content"] or (None if none else ""))


@lru_cache(10000)
def form_of(about, tokenizer, template, tools, prompted):
    """The form in which a template shows messages like these: tried on marks in their place.

    All but the assistant's words must be shown, which a template may rewrite; see `turn`.
    """
    marks, messages = {}, []
    for i, (role, kind, said, calls, *more) in enumerate(about):
        mark = f"zq{i}said"
        message = dict(role=role, content=mark if said else "", **dict.fromkeys(more, f"zq{i}more"))
        if kind is list and said:
            message["content"] = [dict(type="image"), dict(type="text", text=mark)]
        if said and role != "assistant":
            marks[mark] = f"what message {i} ({role}) says"
        for j in range(calls):
            name, value = f"zq{i}name{j}z", f"zq{i}value{j}z"
            call = dict(function=dict(name=name, arguments=dict(x=value)))
            message.setdefault("tool_calls", []).append(call)
            marks[name] = marks[value] = f"tool calls: number {j} of message {i}"
        messages.append(message)
    # a list only where text will not do, and other calls only where there are any
    forms, problem = [*product((False, True), repeat=3)], None
    for form in forms if any(calls for _, _, _, calls, *_ in about) else forms[::4]:
        try:
            text = written(
                [formed(x, *form) for x in messages],
                tokenizer,
                tools and [dict(type="function", function=TOOL)],
                prompted,
            )
        except Unwritten:
            continue
        lost = [what for mark, what in marks.items() if mark not in text]
        if not lost:
            return form
        problem = problem or f"the chat template leaves out {lost[0]}; take a model whose template shows it"
    if problem:
        raise ValueError(problem)
    return (False,) * 3  # the messages themselves may say why


def shown_tools(own, given, tokenizer):
    """The tools that a template shows: those in the column of a row, or those that a script gives to all."""
    if own and given:
        raise ValueError("it has tools in its column 'tools', and --env has others: drop the column")
    probe = [dict(role="user", content="zq")], tokenizer, [dict(type="function", function=TOOL)]
    if own and TOOL["name"] not in render(*probe):
        raise ValueError("it has tools in its column 'tools', and the chat template shows none")
    return given or own or None
