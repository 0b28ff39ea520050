"""What a chat template renders of a conversation, and in which form it takes the messages.

Templates differ in the form that they accept: content as a list of parts, arguments as JSON text, null
content next to calls. To find the form, each part of the conversation is replaced by a unique mark
(`zq3user0z`). The first form that shows all marks, except those of the assistant's words, is used. Marks
also locate each turn (turns.py).
"""

import json
import re
from bisect import bisect_left, bisect_right
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from itertools import accumulate, product
from pathlib import Path

from jinja2 import TemplateError, meta
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from data_prep.lib.conversations import IMAGE, in_text
from system.text import one_line

GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}  # variables that any template is given
DEVELOPER = re.compile("""['"]developer['"]""")  # in a template that knows this role
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # in a template that marks what is trained
# A template is a program. TemplateError is what it raises; the others come from its operations on messages.
RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


# ---- special tokens


def text_only(tokenizer):
    """The tokenizer of a processor that takes images; any other tokenizer is one itself."""
    return getattr(tokenizer, "tokenizer", tokenizer)


@cache
def special_tokens(tokenizer):
    """A pattern of the special tokens, as a text could spell them."""
    added = text_only(tokenizer).added_tokens_decoder.values()
    texts = {token.content for token in added if token.special} - {IMAGE}
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def without_special(value, tokenizer):
    """The value with a space in place of each special token, so no text can fake another role."""
    if isinstance(value, str):
        return special_tokens(tokenizer).sub(" ", value)
    if isinstance(value, list):
        return [without_special(x, tokenizer) for x in value]
    if isinstance(value, dict):
        return {without_special(k, tokenizer): without_special(x, tokenizer) for k, x in value.items()}
    return value


# ---- thoughts

THOUGHTS = {  # the tag that opens a thought in a text, and the one that closes it
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "◁think▷": "◁/think▷",
}
THOUGHT_TAG = re.compile("|".join(map(re.escape, (*THOUGHTS, *THOUGHTS.values()))))


def with_reasoning(message):
    """Move a thought at the start of `content` to `reasoning_content`."""
    if message.get("reasoning_content"):
        return message
    for opening, closing in THOUGHTS.items():
        thought, closed, content = message["content"].partition(closing)
        thought = thought.lstrip()
        if closed and thought.startswith(opening):
            thought = thought.removeprefix(opening).strip("\n")
            return message | dict(content=content.lstrip("\n"), reasoning_content=thought)
    return message


# ---- the template and its variables


def use_template(tokenizer, file, options):
    """Take --chat_template and --chat_template_kwargs: both are saved with the tokenizer.

    The values are set at the beginning of the template. A server of the model then renders as in training,
    and may still pass other values.
    """
    if file:
        try:
            text = Path(file).read_text("utf-8")
            _compile_jinja_template(text)
            if text.lstrip().startswith('{"'):
                raise ValueError("this is JSON; give the template in it")
        except (OSError, ValueError, TemplateError) as error:
            raise ValueError(f"--chat_template {file}: {one_line(error)}") from None
        tokenizer.chat_template = text
    try:
        values = json.loads(options, parse_constant=dict)
        if not isinstance(values, dict) or "Infinity" in json.dumps(values):
            raise ValueError("it is no object of JSON")
        check_variables(values, tokenizer)
    except ValueError as error:
        example = """an example is '{"enable_thinking": false}'"""
        raise ValueError(f"--chat_template_kwargs {options}: {error}; {example}") from None
    line = "{{%- if {0} is not defined %}}{{%- set {0} = {1!r} %}}{{%- endif %}}\n"
    given = "".join(line.format(name, value) for name, value in values.items())
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        tokenizer.chat_template = {name: given + text for name, text in templates.items()}
    elif given:
        tokenizer.chat_template = given + templates
    if hasattr(tokenizer, "image_processor"):
        tokenizer.tokenizer.chat_template = tokenizer.chat_template


def check_variables(options, tokenizer):
    """ValueError if the chat template does not read a variable, or if scripts or transformers set it."""
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        templates = dict(default=templates or "")
    given = GIVEN.union(text_only(tokenizer).special_tokens_map)
    for name in options:
        if name in GIVEN:
            raise ValueError(f"{name!r} is set by the script: leave it out")
        if name in given or not any(name in variables(text) for text in templates.values()):
            raise ValueError(f"the chat template has no variable {name!r}")


@lru_cache(100)
def variables(template):
    """Names of the variables that a chat template reads."""
    return meta.find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))


def given_by(row, tools, tokenizer):
    """What a template is given besides messages: a row's tools or those of --env, and the row's variables."""
    for name in ("tools", "chat_template_kwargs"):
        if tools and row[name]:
            raise ValueError(f"it has a column {name!r}, and --env has tools of its own: drop the column")
    if row["tools"] and not shows_tools(tokenizer):
        raise ValueError("it has tools in its column 'tools', and the chat template shows none")
    if tools and not shows_tools(tokenizer):
        hint = "leave out --env if the prompts explain them"
        raise ValueError(f"--env has tools, and the chat template shows none: {hint}")
    options = row["chat_template_kwargs"]
    check_variables(options, tokenizer)
    if options:
        return dict(options, tools=row["tools"])
    return row["tools"] or tools or None


def shows_tools(tokenizer):
    """Whether the chat template shows the tools that it is given."""
    return TOOL["name"] in render([dict(role="user", content="zq")], tokenizer, TOOLS)


# ---- conversations


def render(messages, tokenizer, tools=None, prompted=True):
    """The text of messages and, by default, the generation prompt. tools: JSON schemas, or of `given_by`."""
    return Conversation(messages, tokenizer, tools).text(None, prompted)


class Conversation:
    """Messages and a chat template, which renders the first messages, or marks in place of what they say.

    given: the variables of the template besides messages, such as tools.
    """

    def __init__(self, messages, tokenizer, tools=None):
        if tokenizer.chat_template is None:
            raise ValueError("the model has no chat template; give one by --chat_template FILE")
        self.messages = plain(messages, tokenizer)
        self.tokenizer = tokenizer
        self.given = tools
        if not isinstance(tools, dict):
            self.given = dict(tools=tools)
        self.marked = tuple(in_marks(i, message) for i, message in enumerate(self.messages))
        given = json.dumps(self.given | dict(tools=bool(self.given["tools"])))
        self.template = tokenizer, str(tokenizer.chat_template), given

    @cached_property
    def reasoned(self):
        """The same, with thoughts at the beginning of a turn as its reasoning."""
        return Conversation(map(with_reasoning, self.messages), self.tokenizer, self.given)

    def rendered_marks(self, end, prompted):
        """See `render_marks`, for the messages up to `end`."""
        size, _ = self.sizes(end, prompted)
        if size is None:
            return render_marks(self.marked[:end], *self.template, prompted)
        form, marks, _ = self.whole
        return form, *up_to(size, marks)

    def text(self, end, prompted):
        text, _ = self.rendered(end, prompted)
        return text

    def rendered(self, end, prompted):
        """What the template writes for them, and the places in it that it marks as trained.

        ValueError, in one line, if it cannot write them, or leaves out what somebody says or calls.
        """
        _, size = self.sizes(end, prompted)
        if size is None:
            form, *_ = render_marks(self.marked[:end], *self.template, prompted)
            return self.written(form, end, prompted)
        *_, words = self.whole
        return up_to(size, words)

    def written(self, form, end, prompted):
        messages = [formed(message, *form) for message in self.messages[:end]]
        return written(messages, self.tokenizer, self.given, prompted)

    # ---- a conversation is rendered once where renderings of its first messages are beginnings of the whole

    def sizes(self, end, prompted):
        """What the messages up to `end` are of the whole, in marks and in words; None, None: render them."""
        if end is not None and end < len(self.marked):
            places = self.places.get(self.kind(end), [end])
            if end not in (places[0], places[-1]):
                return self.beginnings.get((end, prompted), (None, None))
        return None, None

    @cached_property
    def beginnings(self):
        """{(end, prompted): sizes}, of all kinds of places or of none.

        The first and the last place of a kind are rendered apart. Where both are beginnings of the whole, and
        have the same text after the last mark, the places between them have it too.
        """
        found = {}
        for places in self.places.values():
            for prompted in (False, True)[: 1 + self.precedes_turn(places[0])]:
                after = self.after_mark(places[0], prompted)
                if after is None or after != self.after_mark(places[-1], prompted):
                    return {}
                for end in places[1:-1]:
                    begin = self.ends[end]
                    size = begin + len(after)
                    words = self.size_in_words(size)
                    if words is None or not self.whole[1][0].startswith(after, begin):
                        return {}
                    found[end, prompted] = size, words
        return found

    def after_mark(self, end, prompted):
        """What a rendering has after its last mark; None: it is no beginning of the whole."""
        if self.whole is None:
            return None
        form, marks, words = self.whole
        try:
            form_here, *marks_here = render_marks(self.marked[:end], *self.template, prompted)
            words_here = self.written(form, end, prompted)
        except ValueError:
            return None
        size = len(marks_here[0] or "")
        words_size = self.size_in_words(size)
        if words_size is None or (form_here, *marks_here) != (form, *up_to(size, marks)):
            return None
        if words_here != up_to(words_size, words):
            return None
        return marks[0][self.ends[end] : size]

    @cached_property
    def whole(self):
        """The form of all messages, and what is written of them in marks and in words; None: nothing."""
        with suppress(ValueError):
            form, *marks = render_marks(self.marked, *self.template, False)
            if marks[0]:
                return form, tuple(marks), self.written(form, None, False)
        return None

    @cached_property
    def places(self):
        """{kind: places before and after turns of the assistant, by the messages that precede them}."""
        found = {}
        for end in range(1, len(self.marked)):
            if self.precedes_turn(end) or self.precedes_turn(end - 1):
                found.setdefault(self.kind(end), []).append(end)
        return found

    def precedes_turn(self, end):
        return self.messages[end]["role"] == "assistant"

    def kind(self, end):
        """The parts of the two messages before a place and of the one after it."""
        before = "".join(self.marked[max(0, end - 2) : end])
        return MARK_NUMBER.sub("", before), MARK_NUMBER.sub("", self.marked[end])

    @cached_property
    def ends(self):
        """Where in the whole the last mark of the messages before each place ends."""
        found = [0] * (len(self.marked) + 1)
        _, [marks, _], _ = self.whole
        for mark in MARK.finditer(marks):
            found[int(mark[1]) + 1] = mark.end()
        return list(accumulate(found, max))

    @cached_property
    def fixed(self):
        """Borders of marks, and of special tokens in marks and in words; None: those are not the same."""
        _, [marks, _], [words, _] = self.whole
        special = special_tokens(self.tokenizer)
        in_marks = [*special.finditer(marks)]
        in_words = [*special.finditer(words)]
        if [x[0] for x in in_marks] != [x[0] for x in in_words]:
            return None
        found = (MARK.finditer(marks), marks), (in_marks, marks), (in_words, words)
        return [borders(matches, text) for matches, text in found]

    def size_in_words(self, size):
        """Of a beginning of the whole in marks; None if what is written around its end occurs twice."""
        if self.fixed is None:
            return None
        _, [marks, _], [words, _] = self.whole
        (starts, ends), (special_starts, special_ends), (word_starts, word_ends) = self.fixed
        number = bisect_right(ends, size) - 1
        begin = ends[number]
        end = starts[number]
        written = marks[begin:end]
        after = word_ends[bisect_right(special_ends, begin) - 1]
        before = word_starts[bisect_left(special_starts, end)]
        place = words.find(written, after, before)
        if place < 0 or place != words.rfind(written, after, before):
            return None
        return place + size - begin


def borders(matches, text):
    """Where matches begin, and then the end; where they end, and before it 0."""
    spans = [match.span() for match in matches]
    return [*(start for start, _ in spans), len(text)], [0, *(end for _, end in spans)]


def up_to(size, rendering):
    """The beginning of a text, and of its spans."""
    text, spans = rendering
    return text[:size], type(spans)(span for span in spans if span[1] <= size)


def plain(messages, tokenizer):
    """A conversation of a data set as it is rendered: what users and tools say has no special tokens.

    Turns of the assistant keep them, since some models call tools or think with special tokens. Reasoning
    has all names that templates read; a developer is the system for a template that knows none.
    """
    found = []
    for message in messages:
        if message["role"] not in ("assistant", "system", "developer"):
            message = without_special(message, tokenizer)
        if message["role"] == "developer" and not DEVELOPER.search(str(tokenizer.chat_template)):
            message = message | dict(role="system")
        thought = message.get("reasoning_content")
        if thought:
            message = message | dict(reasoning=thought, thinking=thought)
        found.append(message)
    return found


def written(messages, tokenizer, given, prompted):
    """What the template writes, and the places in it that it marks as trained; ValueError: it cannot."""
    given = given | dict(tools=given["tools"] or None, add_generation_prompt=prompted)
    try:
        if not GENERATION_TAG.search(str(tokenizer.chat_template)):
            return tokenizer.apply_chat_template(messages, tokenize=False, **given), ()
        tokenizer = text_only(tokenizer)
        template = tokenizer.get_chat_template(None, given["tools"])
        given |= tokenizer.special_tokens_map
        given["return_assistant_tokens_mask"] = True
        [text], [spans] = render_jinja_template([messages], chat_template=template, **given)
        return text, spans
    except RENDER_ERRORS as error:
        name = f"{type(error).__name__}: "
        if isinstance(error, TemplateError):
            name = ""
        raise ValueError(one_line(f"the chat template: {name}{error}")) from None


def formed(message, parts, text, none):
    """A message in a form that some templates accept. Calls always get OpenAI's form.

    parts: content is a list. text: arguments of calls are JSON text. none: empty content next to calls is
    None, otherwise ''.
    """
    content = message["content"]
    if parts and isinstance(content, str):
        content = [dict(type="text", text=content)]
        message = message | dict(content=content)
    if not message.get("tool_calls"):
        return message
    if text:
        message = in_text(message)
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        calls.append(dict(type="function") | call | dict(function=function))
    if not content:
        content = None if none else ""
    return message | dict(tool_calls=calls, content=content)


# ---- marks

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
FORMS = list(product((False, True), repeat=3))  # see `formed`
MARK = re.compile(r"zq(\d+)([a-z]+)(\d+)(?:name|value)?z")  # message number, its role or part, part number
MARK_NUMBER = re.compile(r"(?<=zq)\d+")  # of the message
REWRITTEN = ("assistant", "assistantreasoning")  # marks of these may be missing: see turns.py
SPLIT_BY_TAGS = re.compile(f"({THOUGHT_TAG.pattern})")


def in_marks(i, message):
    """Message number i with a mark in the place of each part that it says."""
    role = message["role"]
    content = message["content"]
    marked = dict(role=role, content=content)
    if role == "assistant" and isinstance(content, str):
        parts = SPLIT_BY_TAGS.split(content)
        for n, part in enumerate(parts):
            words = part.strip()  # the spaces around them stay
            if words and n % 2 == 0:
                parts[n] = part.replace(words, f"zq{i}{role}{n}z")
        marked["content"] = "".join(parts)
    elif content:
        marked["content"] = f"zq{i}{role}0z"
    if content and isinstance(content, list):
        marked["content"] = [dict(type="image"), dict(type="text", text=marked["content"])]
    if "name" in message:
        marked["name"] = "zqname"
    if "reasoning_content" in message:
        marked |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), f"zq{i}{role}reasoning0z")
    calls = []
    for j in range(len(message.get("tool_calls", ()))):
        function = dict(name=f"zq{i}call{j}namez", arguments=dict(x=f"zq{i}call{j}valuez"))
        calls.append(dict(function=function))
    if calls:
        marked["tool_calls"] = calls
    return json.dumps(marked, ensure_ascii=False)


def lost(marked, text, optional=()):
    """What a text leaves out of a message in marks, or None."""
    for mark in MARK.finditer(marked):
        i, part, number = mark.groups()
        if part in optional or mark[0] in text:
            continue
        if part == "call":
            return f"tool calls: number {number} of message {i}"
        if part.endswith("reasoning"):
            return f"of message {i} its reasoning"
        return f"what message {i} ({part}) says"
    return None


@lru_cache(10000)
def render_marks(marked, tokenizer, template, given, prompted):
    """-> the first form in which a template shows all marks, the text, and the spans marked as trained.

    Marks of the assistant's words may be missing. ValueError if no form shows the others.
    """
    given = json.loads(given)
    if given["tools"]:
        given["tools"] = TOOLS
    messages = [json.loads(message) for message in marked]
    forms = FORMS
    if not any("tool_calls" in message for message in messages):
        forms = FORMS[::4]  # content as text, then as a list; the rest is about calls
    problem = None
    for form in forms:
        try:
            text, spans = written([formed(x, *form) for x in messages], tokenizer, given, prompted)
        except ValueError:
            continue
        missing = lost(" ".join(marked), text, REWRITTEN)
        if not missing:
            return form, text, spans
        problem = problem or missing
    if problem:
        raise ValueError(f"the chat template leaves out {problem}; take a model whose template shows it")
    return FORMS[0], None, ()  # no form renders the marks: the messages may, or may raise why not
