"""What a chat template writes, in the form in which it shows messages.

Which form, and what of a message is shown, is tried on marks in the place of what the messages say.
"""

import json
import re
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path

from jinja2 import TemplateError, meta
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from data_prep.lib.chats import in_text
from data_prep.lib.thoughts import MARK_OF_THOUGHT, thought_apart
from envs import one_line
from envs.messages import RENDER_ERRORS, without_special

DEVELOPER = re.compile("""['"]developer['"]""")  # in a template that knows this role
PARTS = re.compile(f"({MARK_OF_THOUGHT.pattern})")
TYPES = dict(text="string", number="integer", names="array", on="boolean")
TOOL = {  # with parameters of every type; no text of a template has its name
    "name": "zqtool",
    "description": "zq",
    "parameters": {
        "type": "object",
        "properties": {name: {"type": kind, "description": "zq"} for name, kind in TYPES.items()},
        "required": [*TYPES],
    },
}
TOOL["parameters"]["properties"]["names"]["items"] = {"type": "string"}
TOOLS = [dict(type="function", function=TOOL)]
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that says itself what is trained
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


def use_template(tokenizer, file, options):
    """Take --chat_template and --chat_template_kwargs: both are saved with the tokenizer.

    The values stand at the beginning of the template, so whoever serves the model renders as it was trained,
    and may still give others.
    """
    if file:
        try:
            tokenizer.chat_template = text = Path(file).read_text("utf-8")
            _compile_jinja_template(text)
            if text.lstrip().startswith('{"'):
                raise ValueError("this is JSON; give the template in it")
        except (OSError, ValueError, TemplateError) as error:
            raise ValueError(f"--chat_template {file}: {one_line(error)}") from None
    try:
        values = json.loads(options, parse_constant=dict)
        if not isinstance(values, dict) or "Infinity" in json.dumps(values):
            raise ValueError("it is no object of JSON")
        check_variables(values, tokenizer)
    except ValueError as error:
        example = """write it as JSON, '{"enable_thinking": false}'"""
        raise ValueError(f"--chat_template_kwargs {options}: {error}; {example}") from None
    line = "{{%- if {0} is not defined %}}{{%- set {0} = {1!r} %}}{{%- endif %}}\n"
    given = "".join(line.format(*pair) for pair in values.items())
    if given and isinstance(tokenizer.chat_template, dict):
        tokenizer.chat_template = {name: given + text for name, text in tokenizer.chat_template.items()}
    elif given:
        tokenizer.chat_template = given + tokenizer.chat_template
    if hasattr(tokenizer, "image_processor"):
        tokenizer.tokenizer.chat_template = tokenizer.chat_template


def check_variables(options, tokenizer):
    """ValueError if the chat template does not read a variable, or it is given another value anyway."""
    text_only, templates = getattr(tokenizer, "tokenizer", tokenizer), tokenizer.chat_template
    texts = [*templates.values()] if isinstance(templates, dict) else [templates or ""]
    for name in options:
        given = name in OURS or name in text_only.special_tokens_map
        if given or not any(name in variables(x) for x in texts):
            raise ValueError(f"the chat template has no variable {name!r}")


@lru_cache(100)
def variables(template):
    """Names of the variables that a chat template reads."""
    return meta.find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))


def shows_tools(tokenizer):
    """Whether the chat template shows the tools that it is given."""
    return TOOL["name"] in render([dict(role="user", content="zq")], tokenizer, TOOLS)


def given_by(row, tools, tokenizer):
    """What a template is given besides messages: a row's tools or those of --env, and the row's variables."""
    own, options = row["tools"], row["chat_template_kwargs"]
    if tools and (own or options):
        name = "tools" if own else "chat_template_kwargs"
        raise ValueError(f"it has a column {name!r}, and --env has tools of its own: drop the column")
    if (own or tools) and not shows_tools(tokenizer):
        which = "it has tools in its column 'tools'" if own else "--env has tools"
        hint = "" if own else ": leave out --env if the prompts explain them"
        raise ValueError(f"{which}, and the chat template shows none{hint}")
    check_variables(options, tokenizer)
    return dict(options, tools=own) if options else own or tools or None


def render(messages, tokenizer, tools=None, prompted=True):
    """The text of messages, with the generation prompt; tools: JSON schemas, or what `given_by` gives."""
    return Talk(messages, tokenizer, tools).text(None, prompted)


class Talk:
    """A conversation under a chat template: the text of its beginnings, and the same on marks."""

    def __init__(self, messages, tokenizer, tools=None):
        if tokenizer.chat_template is None:
            raise ValueError("the model has no chat template; give one by --chat_template FILE")
        self.messages, self.tokenizer = plain(messages, tokenizer), tokenizer
        self.given = tools if isinstance(tools, dict) else dict(tools=tools)
        self.kinds = kinds(self.messages)
        given = json.dumps(self.given | dict(tools=bool(self.given["tools"])))
        self.about = tokenizer, str(tokenizer.chat_template), given

    @cached_property
    def apart(self):
        """The same, with thoughts at the beginning of a turn as its reasoning."""
        return Talk(map(thought_apart, self.messages), self.tokenizer, self.given)

    def marked(self, end, prompted):
        """Of the messages up to `end`: see `tried`."""
        return tried(self.kinds[:end], *self.about, prompted)

    def text(self, end, prompted, spans=None):
        """What the template writes for them. spans: a list for what it marks as trained.

        ValueError, in one line, if it cannot write them, or leaves out what somebody says or calls.
        """
        form, *_ = self.marked(end, prompted)
        messages = [formed(message, *form) for message in self.messages[:end]]
        return written(messages, self.tokenizer, self.given, prompted, spans)


def written(messages, tokenizer, given, prompted, spans=None):
    """What the template writes; Unwritten where it cannot. spans: a list for what it marks as trained."""
    given = given | dict(tools=given["tools"] or None, add_generation_prompt=prompted)
    try:
        if spans is None:
            return tokenizer.apply_chat_template(messages, tokenize=False, **given)
        text_only = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
        template = text_only.get_chat_template(None, given["tools"])
        given |= text_only.special_tokens_map | dict(return_assistant_tokens_mask=True)
        [text], [found] = render_jinja_template([messages], chat_template=template, **given)
    except RENDER_ERRORS as error:
        name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise Unwritten(one_line(f"the chat template: {name}{error}")) from None
    spans += found
    return text


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
    calls = map(in_text, message["tool_calls"]) if text else message["tool_calls"]
    calls = [dict(type="function") | call | dict(function=call.get("function", call)) for call in calls]
    return message | dict(tool_calls=calls, content=message["content"] or (None if none else ""))


def kinds(messages):
    """Of each message what its form may depend on: role, type, the parts of its words, calls, fields."""
    found = []
    for m in messages:
        parts = ["x" * bool(m["content"])]
        if m["role"] == "assistant" and isinstance(m["content"], str):  # thoughts and spaces part its words
            parts = PARTS.split(m["content"])
            for n, part in enumerate(parts[::2]):
                begins, ends = len(part) - len(part.lstrip()), len(part.rstrip())
                parts[2 * n] = part[:begins] + "x" + part[ends:] if ends else part
        fields = sorted({"reasoning_content", "name"} & m.keys())
        found.append((m["role"], type(m["content"]), (*parts,), len(m.get("tool_calls") or ()), *fields))
    return tuple(found)


def in_marks(i, kind):
    """Message number i of a kind, with a mark in the place of each part, and {mark: what it stands for}."""
    role, form, parts, calls, *fields = kind
    marks, said = {}, ""
    for n, part in enumerate(parts):
        mark = f"zq{i}said{n}z"
        if n % 2 == 0 and "x" in part:
            marks[mark], part = f"what message {i} ({role}) says", part.replace("x", mark)
        said += part
    message = dict(role=role, content=said)
    if form is list and said:
        message["content"] = [dict(type="image"), dict(type="text", text=said)]
    for field in fields:
        message[field] = f"zq{i}{field}z"
    if "reasoning_content" in fields:
        marks[f"zq{i}reasoning_contentz"] = f"of message {i} its reasoning"
        message |= dict.fromkeys(("reasoning", "thinking"), message["reasoning_content"])
    for j in range(calls):
        name, value = f"zq{i}name{j}z", f"zq{i}value{j}z"
        call = dict(function=dict(name=name, arguments=dict(x=value)))
        message.setdefault("tool_calls", []).append(call)
        marks[name] = marks[value] = f"tool calls: number {j} of message {i}"
    return message, marks


@lru_cache(10000)
def tried(about, tokenizer, template, given, prompted):
    """The form in which a template shows messages like these, tried on marks; the text, and its spans.

    All but the assistant's words must be shown, which a template may rewrite; see turns.py.
    """
    marks, messages, given = {}, [], json.loads(given)
    for i, kind in enumerate(about):
        message, found = in_marks(i, kind)
        messages.append(message)
        own = {x: what for x, what in found.items() if "call" in what} if kind[0] == "assistant" else found
        marks |= own
    given["tools"] = given["tools"] and TOOLS
    # a list only where text will not do, and other calls only where there are any
    forms, problem = [*product((False, True), repeat=3)], None
    for form in forms if any(calls for _, _, _, calls, *_ in about) else forms[::4]:
        spans = [] if MARKED.search(template) else None
        try:
            text = written([formed(x, *form) for x in messages], tokenizer, given, prompted, spans)
        except Unwritten:
            continue
        lost = [what for mark, what in marks.items() if mark not in text]
        if not lost:
            return form, text, spans
        problem = problem or f"the chat template leaves out {lost[0]}; take a model whose template shows it"
    if problem:
        raise ValueError(problem)
    return (False,) * 3, None, None  # the messages themselves may say why
