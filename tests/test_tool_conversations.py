"""Conversations with tools: SFT trains on the very tokens that an agent's rollout consists of."""

import re

import pytest
from test_sft import make_args
from transformers import AutoConfig

from algos import sft
from data_prep import tiny_model
from data_prep.arithmetic import make_row
from data_prep.lib.cache import load_prompts
from data_prep.lib.schema import write_parquet
from envs.messages import observation

TOOLS = [dict(type="function", function=dict(name="calculate", parameters=dict(type="object")))]
SHOW = "{%- for tool in tools -%}{{- '\n' ~ tool | tojson -}}{%- endfor -%}"
CHATML = """\
{%- for m in messages -%}
{%- if m.role == 'user' or m.role == 'system' and not loop.first -%}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' ~ m.content ~ '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif -%}
{{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
THINKING = """\
{%- set thought = (m.content.split('</think>')[0].split('<think>') | last).strip('\n') -%}
{%- set thought = thought if '</think>' in m.content else '' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.query and (loop.last or thought) -%}
{{- '<think>\n' ~ thought ~ '\n</think>\n\n' -}}
{%- endif -%}
{{- (m.content.split('</think>') | last).lstrip('\n') ~ '<|im_end|>\n' -}}"""
TEMPLATES = {  # what the templates of these models write for messages of {role, content}, with shorter words
    "tiny": tiny_model.make_tokenizer(tool_role=True).chat_template,
    "smollm2": "{%- for m in messages -%}{%- if loop.first and messages[0].role != 'system' -%}"
    "{{- '<|im_start|>system\nYou are SmolLM<|im_end|>\n' -}}{%- endif -%}"
    "{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}",
    "smollm2, with tools": "{%- if tools -%}<|im_start|>system" + SHOW + "{{- '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}",
    "qwen2.5": "<|im_start|>system\n{{- '\n' -}}"
    "{{- messages[0].content if messages[0].role == 'system' else 'You are Qwen' -}}"
    "{%- if tools -%}{{- '\n\n# Tools\n\n<tools>' -}}" + SHOW + "{{- '\n</tools>' -}}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}" + CHATML,
    "qwen3": "{%- set own = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{%- if tools or own -%}{{- '<|im_start|>system\n' ~ own -}}{%- endif -%}"
    "{%- if tools -%}{{- ('\n\n' if own else '') ~ '# Tools\n\n<tools>' -}}" + SHOW
    + "{{- '\n</tools>' -}}{%- endif -%}{%- if tools or own -%}{{- '<|im_end|>\n' -}}{%- endif -%}"
    "{%- set ns = namespace(query=messages | length - 1, found=false) -%}"
    "{%- for m in messages[::-1] -%}{%- if m.role == 'user' and not ns.found -%}"
    "{%- set ns.query = messages | length - loop.index -%}{%- set ns.found = true -%}"
    "{%- endif -%}{%- endfor -%}"
    + CHATML.replace("{{- '<|im_start|>assistant\n' ~ m.content ~ '<|im_end|>\n' -}}", THINKING),
    "llama3.1": """\
{{- bos_token -}}
{%- set own = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{%- if messages[0].role == 'system' -%}{%- set messages = messages[1:] -%}{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' -}}
{{- 'Environment: ipython\n' if tools is not none else '' -}}
{{- 'Today Date: 26 Jul 2024\n\n' ~ own ~ '<|eot_id|>' -}}
{%- if tools is not none -%}
{{- '<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions\n\n' -}}
{%- for tool in tools -%}{{- tool | tojson(indent=4) ~ '\n\n' -}}{%- endfor -%}
{{- messages[0].content | trim ~ '<|eot_id|>' -}}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' ~ m.content | tojson ~ '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content | trim ~ '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}""",
}  # fmt: skip
SHOWS_NO_TOOLS = "tiny", "smollm2"
ENDS = {"tiny": "<|eos|>", "llama3.1": "<|eot_id|>"}


def make_tokenizer(name):
    """Of characters, the template's special tokens, and some of several characters."""
    tokenizer = tiny_model.make_tokenizer(tool_role=True)
    tokenizer.chat_template = TEMPLATES[name]
    special = {*re.findall(r"<\|\w+?\|>", TEMPLATES[name]), "<|begin_of_text|>"}
    tokenizer.add_special_tokens(dict(additional_special_tokens=sorted(special)))
    tokenizer.add_tokens(["\n\n", ">\n", "<<", ">>"])
    tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", ENDS.get(name, "<|im_end|>")
    return tokenizer


def rollout(prompt_ids, turns, tokenizer, tools):
    """-> ids of a rollout whose turns have these texts, each but the last with the messages that answer it;
    which were sampled."""
    ids, sampled = [*prompt_ids], [False] * len(prompt_ids)
    for text, answers in turns:
        turn = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
        follow = observation(tokenizer, answers, tools, turn[-1]) if answers else []
        ids, sampled = ids + turn + follow, sampled + [True] * len(turn) + [False] * len(follow)
    return ids, sampled


def conversation(turns):
    return [x for text, answers in turns for x in (dict(role="assistant", content=text), *answers)]


def tool(*contents):
    return [dict(role="tool", content=content) for content in contents]


TURNS = {
    "one call": [("<<37*85>>", tool("3145")), ("3145", [])],
    "calls": [
        ("I call <<37*80>> <<37*5>>", tool("2960", "185")),
        ("<<2960+185>>", tool("3145")),
        ("3145", []),
    ],
    "a user answers": [("3144", [dict(role="user", content="Wrong.")]), ("3145", [])],
    "no call": [("3145", [])],
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", TURNS)
@pytest.mark.parametrize("system", (False, True))
def test_sft_trains_on_the_tokens_of_a_rollout(name, said, system, tmp_path):
    tokenizer, row, turns = (
        make_tokenizer(name),
        make_row("train", 0, 37, 85, operation="multiply"),
        TURNS[said],
    )
    row["prompt"] = [dict(role="system", content="Be exact.")] * system + row["prompt"]
    if name == "qwen3":
        turns = [(f"<think>\nHm.\n</think>\n\n{text}", answers) for text, answers in turns]
    file = str(tmp_path / "rows.parquet")
    write_parquet([row | dict(messages=row["prompt"] + conversation(turns))], file)
    tools = None if name in SHOWS_NO_TOOLS else TOOLS
    load = lambda tools: sft.load_examples([file], make_args(messages_key="messages"), tokenizer, tools)[0]
    if not tools:
        with pytest.raises(ValueError, match="--env has tools, and the chat template shows none"):
            load(TOOLS)
    [prompt] = load_prompts([file], tokenizer, 999, tools)[0]
    assert ("calculate" in tokenizer.decode(prompt["prompt_ids"])) == bool(tools)
    *earlier, written = load(tools)
    if (name, said) == ("qwen3", "a user answers"):  # it then forgets the thoughts of the turns before
        [first], tail = earlier, "<think>\nHm.\n</think>\n\n3144<|im_end|>"
        assert tokenizer.decode(first["response_ids"]) == tail
        shown = tokenizer.decode(written["prompt_ids"])
        assert "\n3144<|im_end|>" in shown and "Hm." not in shown
        assert tokenizer.decode(written["response_ids"]) == tail.replace("3144", "3145")
        return
    assert not earlier
    expected = sft.split(*rollout(prompt["prompt_ids"], turns, tokenizer, tools))
    assert {key: written[key] for key in expected} == expected
    if said == "no call":
        [plain] = sft.load_examples([file], make_args(response_key="extra_info.answer"), tokenizer, tools)[0]
        assert name == "qwen3" or plain == written


def test_flag_env(tmp_path, capsys):
    tiny_model.main(tiny_model.Args(str(tmp_path / "model"), layers=1, tool_role=True))
    config = AutoConfig.from_pretrained(tmp_path / "model")
    config.vocab_size += 9  # the tokens of qwen2.5's template
    config.save_pretrained(tmp_path / "model")
    make_tokenizer("qwen2.5").save_pretrained(tmp_path / "model")
    (tmp_path / "env.py").write_text(
        f"class Env:\n    tools = {TOOLS}\n    def step(self, text):\n        pass\n"
    )
    row = make_row("train", 0, 37, 85, operation="multiply")
    write_parquet([dict(messages=row["prompt"] + conversation(TURNS["one call"]))], tmp_path / "rows.parquet")
    args = make_args(messages_key="messages", train_batch_size=1)
    args.model = str(tmp_path / "model")
    args.train_files = (str(tmp_path / "rows.parquet"),)
    for args.env in (None, f"{tmp_path}/env.py:Env"):
        tokenizer, [row], *_ = sft.load_data(args)
        assert ("calculate" in tokenizer.decode(row["prompt_ids"])) == bool(args.env)
        assert tokenizer.decode(row["response_ids"]).count("3145<|im_end|>") == 1
    args.env = f"{tmp_path}/env.py:Other"
    with pytest.raises(SystemExit) as end:
        sft.load_data(args)
    assert re.fullmatch(r"error: [^\n]*Other[^\n]*", str(end.value.code))
