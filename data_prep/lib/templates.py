"""What a chat template is given, and what it writes, in the form in which it shows messages."""

import json
import re
from functools import cached_property, lru_cache
from pathlib import Path

from jinja2 import TemplateError, meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from data_prep.lib.marks import TOOL, TOOLS, formed, kinds, tried, written
from data_prep.lib.replies import thought_apart
from data_prep.lib.special import without_special
from system.text import one_line

DEVELOPER = re.compile("""['"]developer['"]""")  # in a template that knows this role
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

    def text(self, end, prompted):
        return self.written(end, prompted)[0]

    def written(self, end, prompted):
        """What the template writes for them, and the places in it that it marks as trained.

        ValueError, in one line, if it cannot write them, or leaves out what somebody says or calls.
        """
        form, *_ = self.marked(end, prompted)
        messages = [formed(message, *form) for message in self.messages[:end]]
        return written(messages, self.tokenizer, self.given, prompted)
