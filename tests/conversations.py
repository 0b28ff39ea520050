"""Conversations of every shape that data have, and tokenizers for chat templates whose own cannot be had."""

import json
import re

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_prep.lib.conversations import conversation
from data_prep.tiny_model import make_tokenizer as tiny_tokenizer
from tests.conftest import golden

# ---- tokenizers ----------------------------------------------------------------------------------
SPECIAL = re.compile(
    r'<\|[\w"/]+\|?>|<\w+\|>|<｜[^<>｜]+｜>|<(?:start|end)_of_\w+>|\[/?INST\]|\[gMASK\]|<sop>|<image>'
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# by how names begin: BOS, EOS, and at what else samplers of the family stop; that of muse is a guess
ENDS = {case["family"]: case["ends"] for case in golden("ends_of_templates")}


def ends_of(name):
    """BOS, EOS and more tokens that end turns under a template."""
    return next(ends for family, ends in ENDS.items() if name.startswith(family))


def make_tokenizer(name, template, twin=""):
    """A token for each byte, and for each mark of a template and its twin."""
    bos, eos, *_ = ends_of(name)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = {*SPECIAL.findall(template + twin), bos, eos} - {None}
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in sorted(marks)])
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in PLAIN])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    tokenizer.chat_template, tokenizer.name_or_path = template, name
    return tokenizer


# ---- conversations -------------------------------------------------------------------------------
NUMBERS = dict(type="object", required=["a", "b"])
NUMBERS["properties"] = {x: dict(type="integer", description=f"number {x}") for x in "ab"}
TOOLS = [dict(type="function", function=dict(name="add", description="A sum.", parameters=NUMBERS))]
SHAPES = {case["shape"]: case["messages"] for case in golden("conversations")}  # {eos}: the tokenizer's


def messages_of(shape, tokenizer):
    """The messages of a shape, and the tools that they call."""
    text = json.dumps(SHAPES[shape]).replace("{eos}", tokenizer.eos_token)
    return conversation(json.loads(text), "messages"), TOOLS if "call" in shape else None


def forms(messages):
    """Messages in the forms that some templates want: content in parts, calls without content and as text."""
    yield messages
    yield [message | dict(content=[dict(type="text", text=message["content"])]) for message in messages]
    found = []
    for message in messages:
        calls = [
            x | dict(function=x["function"] | dict(arguments=json.dumps(x["function"]["arguments"])))
            for x in message.get("tool_calls", ())
        ]
        found.append(message | (dict(tool_calls=calls, content=message["content"] or None) if calls else {}))
    yield found


# ---- with tools, as an agent sees them -----------------------------------------------------------
CALCULATE = [dict(type="function", function=dict(name="calculate", parameters=dict(type="object")))]
# what the templates of these models write for messages of {role, content}, with shorter words
TOOL_TEMPLATES = {case["name"]: case for case in golden("tool_templates")}


def tool_tokenizer(name):
    """Of characters, the template's special tokens, and some of several characters."""
    case = TOOL_TEMPLATES[name]
    tokenizer = tiny_tokenizer(tool_role=True)
    tokenizer.chat_template = case["template"]
    special = {*re.findall(r"<\|\w+?\|>", case["template"]), "<|begin_of_text|>"}
    tokenizer.add_special_tokens(dict(additional_special_tokens=sorted(special)))
    tokenizer.add_tokens(["\n\n", ">\n", "<<", ">>"])
    tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", case["end"]
    return tokenizer


def of_turns(turns):
    """The messages of turns, each a text and the messages that answer it."""
    return [x for text, answers in turns for x in (dict(role="assistant", content=text), *answers)]


def tool(*contents):
    return [dict(role="tool", content=content) for content in contents]
