"""Where the assistant's turns are in what a chat template writes for a conversation."""

from functools import cache, partial

from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from envs.messages import without_special

MESSAGES = nodes.Name("messages", "load")
BEHIND = "first", "index", "index0"  # what a loop knows without a look at the next message


def plain(messages, tokenizer):
    """A conversation of a data set as it is rendered: what users and tools say has no special tokens.

    Turns of the assistant keep them, since some models call tools or think with special tokens.
    """
    ours = "assistant", "system"
    return [m if m["role"] in ours else without_special(m, tokenizer) for m in messages]


def turns(messages, tokenizer, tools=None):
    """-> the text of a conversation, and (number of the message, begin, end) of the assistant's turns in it.

    tools: JSON schemas that the template shows.
    A turn lies between what the template writes for the messages before it, with the generation prompt (what
    a sampler is given), and for those up to it. ValueError if these are not the beginning of the text.
    """
    template = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
    messages = plain(messages, tokenizer)
    text, found = template(messages), []
    cuts, prompt, end = one_by_one(messages, tokenizer, tools, text) or (None, "", "")
    for i in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
        if cuts:
            before, upto = text[: cuts[i]] + prompt, text[: cuts[i + 1]] + end
        else:
            before, upto = template(messages[:i], add_generation_prompt=True), template(messages[: i + 1])
        if not (upto.startswith(before) and text.startswith(upto)):
            raise ValueError(f"the chat template renders message {i} differently when others follow it")
        check_calls(messages[i : i + 1], upto[len(before) :])
        found.append((i, len(before), len(upto)))
    return text, found


def says_nothing(reply):
    """Whether an answer, a string or messages, has an empty turn of the assistant: it would train silence."""
    if isinstance(reply, str):
        return not reply.strip()
    if not isinstance(reply, list) or not all(isinstance(message, dict) for message in reply):
        raise ValueError(f"an answer must be a string or messages, not {reply!r:.60}")
    spoken = [message for message in reply if message.get("role") == "assistant"]
    return any(not turn["content"].strip() and not turn.get("tool_calls") for turn in spoken)


def check_calls(messages, text):
    """ValueError if a chat template left a tool that messages call out of the text that it made of them."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            name = call.get("function", call)["name"]
            if name not in text:
                problem = f"the chat template leaves out tool calls, such as one of {name!r}"
                raise ValueError(f"{problem}; take a model whose template shows them")


def one_by_one(messages, tokenizer, tools, text):
    """-> where each message begins in the text; what follows the last, with generation prompt and without.

    None if that cannot be said of all beginnings of the conversation from one look at the whole.
    """
    compiled = forward(tokenizer.get_chat_template())
    if not compiled or messages[0]["role"] == "assistant":
        return None
    written, cuts = "", []

    class Watched(list):
        def __iter__(self):
            for message in list.__iter__(self):
                cuts.append(len(written))
                yield message
            cuts.append(len(written))

    known = dict(tokenizer.special_tokens_map, tools=tools, documents=None, add_generation_prompt=False)
    for piece in compiled.generate(messages=Watched(messages), **known):
        written += piece
    prompted = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    if len(cuts) <= len(messages) or written != text or not prompted.startswith(text[: cuts[-1]]):
        return None
    return cuts, prompted[cuts[-1] :], text[cuts[-1] :]


@cache
def forward(template):
    """The compiled template, if it writes message after message and then the same for all; else None.

    Then it has one loop over the messages, in which it knows the first and those before, and what follows
    the loop depends on nothing that the template itself has set.
    """
    compiled = _compile_jinja_template(template)
    tree = compiled.environment.parse(template)
    loops = [i for i, x in enumerate(tree.body) if isinstance(x, nodes.For) and x.iter == MESSAGES]
    if len(loops) != 1:
        return None
    loop, until, after = tree.body[loops[0]], tree.body[: loops[0] + 1], tree.body[loops[0] + 1 :]
    names = lambda parts: [name.name for part in parts for name in part.find_all(nodes.Name)]
    first = [x for x in tree.find_all(nodes.Getitem) if x.node == MESSAGES and x.arg == nodes.Const(0)]
    behind = [x for x in tree.find_all(nodes.Getattr) if x.node == nodes.Name("loop", "load")]
    behind = [x for x in behind if x.attr in BEHIND]
    own = {x.name for x in tree.find_all(nodes.Name) if x.ctx != "load"}
    own |= {x.name for x in tree.find_all(nodes.Macro)} | {"messages", "loop"}
    plain = not (loop.else_ or loop.test or loop.recursive)
    plain = plain and names([tree]).count("messages") == 1 + len(first)
    plain = plain and names([tree]).count("loop") == len(behind)
    plain = plain and "add_generation_prompt" not in names(until) and own.isdisjoint(names(after))
    return compiled if plain else None
