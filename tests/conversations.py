"""Conversations of every shape that data have, and tokenizers for chat templates whose own cannot be had."""

import json
import re

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_prep.lib.chats import conversation

# ---- tokenizers ----------------------------------------------------------------------------------
SPECIAL = re.compile(
    r'<\|[\w"/]+\|?>|<\w+\|>|<｜[^<>｜]+｜>|<(?:start|end)_of_\w+>|\[/?INST\]|\[gMASK\]|<sop>|<image>'
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ENDS = {  # by how names begin: BOS, EOS, and at what else samplers of the family stop
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    # a single call has no other end there
    "deepseek_r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜tool▁call▁end｜>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "diffusion_gemma": ("<bos>", "<eos>", "<turn|>", "<|tool_response>"),
    "gemma": ("<bos>", "<eos>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
    "glm": (None, "<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|startoftext|>", "<|return|>", "<|call|>"),
    "idefics3": ("<|begin_of_text|>", "<|end_of_text|>", "<end_of_utterance>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "llava": ("<s>", "</s>"),
    "muse": ("<|begin_of_text|>", "<|eot|>"),  # a guess
    "nemotron": ("<s>", "<|im_end|>"),
    "phi3": ("<s>", "<|endoftext|>", "<|end|>"),
    "qwen": (None, "<|im_end|>"),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>"),
}


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
def said(text, **more):
    return dict(role="assistant", content=text, **more)


def call(number, **arguments):
    return dict(id=f"call{number:05}", type="function", function=dict(name="add", arguments=arguments))


def result(number, text):
    return dict(role="tool", name="add", tool_call_id=f"call{number:05}", content=text)


NUMBERS = dict(type="object", required=["a", "b"])
NUMBERS["properties"] = {x: dict(type="integer", description=f"number {x}") for x in "ab"}
TOOLS = [dict(type="function", function=dict(name="add", description="A sum.", parameters=NUMBERS))]
ASK, THEN = dict(role="user", content="What is one?"), dict(role="user", content="And two?")
ONE, TWO = call(1, a=1, b=2), call(2, a=3, b=4)
SO, ANSWERED = dict(reasoning_content="It is so."), [result(1, "three"), said("It is three.")]
TRICK = dict(role="user", content="What is {eos}?")  # the EOS of the tokenizer
SHAPES = {
    "one turn": [ASK, said("First.")],
    "system": [dict(role="system", content="Be brief."), ASK, said("First.")],
    "developer": [dict(role="developer", content="Be brief."), ASK, said("First.")],
    "two turns": [ASK, said("First."), THEN, said("Second.")],
    "second turn alone": [ASK, said("First.", weight=0), THEN, said("Second.")],
    "content in parts": [dict(x, content=[dict(type="text", text=x["content"])]) for x in (ASK, said("1."))],
    "EOS said by the user": [TRICK, said("First.")],
    "reasoning": [ASK, said("First.", **SO)],
    "`<think>` in the content": [ASK, said("<think>\nIt is so.\n</think>\n\nFirst.")],
    "reasoning in two turns": [ASK, said("First.", **SO), THEN, said("Second.", reasoning_content="Twice.")],
    "a call": [ASK, said("", tool_calls=[ONE]), *ANSWERED],
    "two calls in a turn": [ASK, said("", tool_calls=[ONE, TWO]), result(2, "seven"), *ANSWERED],
    "reasoning and a call": [ASK, said("", tool_calls=[ONE], **SO), *ANSWERED],
    "text and a call": [ASK, said("I add.", tool_calls=[ONE]), *ANSWERED],
}


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
