"""Calls of tools as a model writes them, read by vLLM's tool parsers.

Which parser is a model's is not known but tried: its chat template writes a call, as sft.py trains it, and
the parser has to give it back, with the types of its arguments.
"""

import json
import logging
import re
from collections import Counter
from copy import copy
from functools import partial

from data_prep.lib.templates import TOOLS, Conversation, render, shows_tools, special_tokens
from data_prep.lib.turns import prompt_and_turn
from envs import messages as plain_messages
from envs.tools import UNREADABLE, calls_after_thought, harmony
from system import cpu
from system.text import one_line
from system.thoughts import reply_of

ONE = "zqtool", dict(text="New York, NY", number=3, names=["a", "b c"], on=True)
HARD = "zqtool", dict(text='L\'Aquila "x"\nis <b>北京', number=-1, names=[], on=False)
TRIES = ("", [ONE]), ("", [HARD]), ("I look it up.", [ONE]), ("", [ONE, HARD])  # the first one must be read
TAG_AT_END = re.compile(r"(?:[<\[][^<>\[\]]*[>\]])?\Z")
OWN = {"gptoss": harmony}  # vLLM's needs a vocabulary from the network


def learn_calls(pool, tokenizer):
    """Find out how a model calls the tools of an EnvPool, and what ends its turns -> tools for the template.

    Raises ValueError, in one line.
    """
    pool.ends, schemas, parser = [tokenizer.eos_token_id], pool.tools, pool.parser
    if parser and not schemas:
        raise ValueError(f"--tool_parser {parser}: the environment of --env has no tools")
    if schemas and not shows_tools(tokenizer):
        if not parser:
            raise ValueError(
                "--env has tools, and the chat template shows none: take another by --chat_template,"
                " or, if the prompts explain them, say how calls are read: --tool_parser hermes"
            )
        pool.tools = None
    if schemas:  # the template must have a place for what a tool returns
        observation(tokenizer, [dict(role="tool", name="tool", content="42")], pool.tools, None)
    if parser or pool.calls_tools:
        _, pool.read_calls, ends = find_reader(tokenizer, schemas, parser)
        pool.ends += [i for i in ends if i not in pool.ends]
    return pool.tools


def observation(tokenizer, messages, tools, last):
    """As in envs/messages.py, but results follow a call, where the template writes calls."""
    after = after_calls(tokenizer, messages, tools)
    return plain_messages.observation(tokenizer, messages, tools, last, after)


class Vocabulary(dict):
    """One that has every mark that a parser asks for: its ids matter to vLLM's streams alone."""

    def get(self, key, default=None):
        return super().get(key, -1 if default is None else default)


def find_reader(tokenizer, tools, name=None):
    """-> (name, a function from the text of a turn to its calls, ids of the tokens that end such turns).

    tools: JSON schemas; name: --tool_parser, None: the first that reads what the chat template writes.
    Raises ValueError, in one line.
    """
    classes, missing = parsers(name)
    written = [written_call(*said, tokenizer) for said in TRIES]
    marked = copy(tokenizer)
    vocabulary = Vocabulary(tokenizer.get_vocab())
    marked.get_vocab = lambda: vocabulary  # made once: a tokenizer makes one each time
    stop_ids = tokenizer.convert_tokens_to_ids(sorted({last for _, last in written if last}))
    if not written[0][0]:
        if name is None:
            raise ValueError("the chat template writes no calls: say by --tool_parser how they are read")
        read = reader(classes[name], marked, tools)
        if read("zq"):
            raise ValueError(f"--tool_parser {name}: vLLM's parser of this name reads no text")
        return name, read, stop_ids
    right = {}
    for key, parser in classes.items():
        pairs = [(*said, calls) for said, (_, calls) in zip(written, TRIES) if said[0]]
        right[key] = [reader(parser, marked, TOOLS, end=end)(text) == calls for text, end, calls in pairs]
    names = Counter(classes.values())
    best = max(classes, key=lambda key: (right[key][0], sum(right[key]), names[classes[key]]))
    if not right[best][0]:
        tried = ", ".join(classes) + "".join(f"; not installed: {package}" for package in sorted(missing))
        raise ValueError(
            f"a call as the chat template writes it, {written[0][0]!r}, is not read by {tried}:"
            " pass another --tool_parser or --chat_template"
        )
    call = reply_of(written[0][0]).strip()
    tags = re.match(r"[<\[][^\s{]*|", call.partition("zqtool")[0])[0], TAG_AT_END.search(call)[0]
    two = written[-1][0] or ""
    shared = two.count(tags[1]) < 2
    return best, reader(classes[best], marked, tools, tags, shared, written[0][1]), stop_ids


def parsers(name):
    """{name: parser} of all that can be imported, or of one; names of packages that are not installed."""
    with cpu.own_vllm():
        from vllm.tool_parsers import ToolParserManager
    for part in ("vllm.tool_parsers", "vllm.parser"):  # what a model writes is no error of the run
        logging.getLogger(part).setLevel(logging.CRITICAL + 1)
    known = [*OWN, *ToolParserManager.list_registered()]
    missing = set()
    found = dict(OWN)
    if name not in (None, *known):
        raise ValueError(f"--tool_parser {name}: there are {', '.join(known)}")
    for key in known[len(OWN) :] if name is None else {name} - OWN.keys():
        try:
            found[key] = ToolParserManager.get_tool_parser(key)
        except ImportError as error:
            if name:
                raise ValueError(f"--tool_parser {name}: {one_line(error)}") from None
            missing.add(str(error.name))
    return (found if name is None else {name: found[name]}), missing


def called(content, calls):
    """A conversation of a question and a turn with calls."""
    calls = [
        dict(id=f"callzq{i:03}", type="function", function=dict(name=name, arguments=arguments))
        for i, (name, arguments) in enumerate(calls)
    ]
    return [dict(role="user", content="zq"), dict(role="assistant", content=content, tool_calls=calls)]


def written_call(content, calls, tokenizer):
    """A turn with calls as the template writes it and sft.py trains it, without the token that ends it; that.

    None, "": the template cannot write it.
    """
    try:
        _, text = prompt_and_turn(Conversation(called(content, calls), tokenizer, TOOLS), 1)
    except ValueError:
        return None, ""
    text = text.rstrip()
    last = next((x[0] for x in special_tokens(tokenizer).finditer(text) if x.end() == len(text)), "")
    return text.removesuffix(last), last


def after_calls(tokenizer, messages, tools):
    """What the template writes after a turn of calls, with the results that answer it, and without them.

    None: they are no results, or the template does not write calls like these.
    """
    names = [message.get("name", "tool") for message in messages if message["role"] == "tool"]
    calls = [(name, dict(x="zqvaluez")) for name in names]
    written = len(names) == len(messages) and written_call("", calls, tokenizer)[0]
    if not written:
        return None
    results = [message | dict(tool_call_id=f"callzq{i:03}") for i, message in enumerate(messages)]
    try:
        answered = render(called("", calls) + results, tokenizer, tools)
    except ValueError:
        return None
    alone = render(called("", calls), tokenizer, TOOLS, prompted=False)
    closing, answered, alone = (text.rpartition("zqvaluez")[2] for text in (written, answered, alone))
    if answered.startswith(closing):
        return answered.removeprefix(closing), alone.removeprefix(closing)


def reader(parser, tokenizer, tools, tags=("", ""), shared=True, end=""):
    """A function from the text of a turn to [(name, arguments), ...]; (None, what is wrong) for no call.

    tags: what begins and ends a call, or where shared all calls of a turn.  What has the first and not the
    last is cut, and is answered as a wrong call.  end: the token that ended the turn, for some parsers.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionRequest,
        ChatCompletionToolsParam,
    )

    request = ChatCompletionRequest(messages=[dict(role="user", content="x")], tools=tools)
    params = [ChatCompletionToolsParam(**tool) for tool in tools]

    def extract(text):
        if parser in OWN.values():
            return parser(text)
        # a parser keeps what it has read: each text has one of its own
        found = parser(tokenizer, params).extract_tool_calls(text, request).tool_calls
        return [(x.function.name, dict(json.loads(x.function.arguments or "{}"))) for x in found]

    def read(text):
        unreadable = begins and begins in text
        for whole in dict.fromkeys((text, text + end)):
            try:
                if calls := extract(whole):
                    return calls
            except Exception:  # whatever vLLM's parser raises for what a model writes: the model is told
                unreadable = True
        return [UNREADABLE] if unreadable else []

    def read_whole(text):
        calls = read(text)
        values = str([arguments for _, arguments in calls])
        opened, closed = (text.count(tag) - values.count(tag) if tag else len(calls) for tag in tags)
        if shared:
            return calls if closed or not calls else [UNREADABLE]
        if opened == closed == len(calls):
            return calls
        found = []
        for part in text.split(tags[0])[1:]:
            found += read(tags[0] + part) if tags[1] in part else [UNREADABLE]
        return found

    begins = tags[0]
    return partial(calls_after_thought, read_whole)
