"""Conversations with tools: SFT trains on the very tokens that an agent's rollout consists of."""

import re

import pytest
from conftest import golden
from test_sft import make_args
from transformers import AutoConfig

from algos import sft
from data_prep import tiny_model
from data_prep.arithmetic import make_row
from data_prep.lib.cache import load_prompts
from data_prep.lib.schema import write_parquet
from envs.messages import observation

TOOLS = [dict(type="function", function=dict(name="calculate", parameters=dict(type="object")))]
# what the templates of these models write for messages of {role, content}, with shorter words
CASES = {case["name"]: case for case in golden("tool_templates")}
TEMPLATES = {name: case["template"] for name, case in CASES.items()}


def make_tokenizer(name):
    """Of characters, the template's special tokens, and some of several characters."""
    tokenizer = tiny_model.make_tokenizer(tool_role=True)
    tokenizer.chat_template = TEMPLATES[name]
    special = {*re.findall(r"<\|\w+?\|>", TEMPLATES[name]), "<|begin_of_text|>"}
    tokenizer.add_special_tokens(dict(additional_special_tokens=sorted(special)))
    tokenizer.add_tokens(["\n\n", ">\n", "<<", ">>"])
    tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", CASES[name]["end"]
    return tokenizer


def rollout(prompt_ids, turns, tokenizer, tools):
    """-> ids of a rollout whose turns have these texts, each but the last with the messages that answer it;
    which were sampled."""
    ids = [*prompt_ids]
    sampled = [False] * len(prompt_ids)
    for text, answers in turns:
        turn = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
        follow = observation(tokenizer, answers, tools, turn[-1]) if answers else []
        ids = ids + turn + follow
        sampled = sampled + [True] * len(turn) + [False] * len(follow)
    return ids, sampled


def conversation(turns):
    return [x for text, answers in turns for x in (dict(role="assistant", content=text), *answers)]


def tool(*contents):
    return [dict(role="tool", content=content) for content in contents]


TURNS = {case["said"]: case["turns"] for case in golden("tool_turns")}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", TURNS)
@pytest.mark.parametrize("system", (False, True))
def test_sft_trains_on_the_tokens_of_a_rollout(name, said, system, tmp_path):
    tokenizer = make_tokenizer(name)
    turns = TURNS[said]
    row = make_row("train", 0, 37, 85, operation="multiply")
    if system:
        row["prompt"] = [dict(role="system", content="Be exact."), *row["prompt"]]
    if name == "qwen3":
        turns = [(f"<think>\nHm.\n</think>\n\n{text}", answers) for text, answers in turns]
    file = str(tmp_path / "rows.parquet")
    write_parquet([row | dict(messages=row["prompt"] + conversation(turns))], file)

    def load(tools, **flags):
        return sft.load_examples([file], make_args(**flags), tokenizer, tools)[0]

    tools = TOOLS if CASES[name]["shows_tools"] else None
    if not tools:
        with pytest.raises(ValueError, match="--env has tools, and the chat template shows none"):
            load(TOOLS, messages_key="messages")
    [prompt] = load_prompts([file], tokenizer, 999, tools)[0]
    assert ("calculate" in tokenizer.decode(prompt["prompt_ids"])) == bool(tools)
    *earlier, written = load(tools, messages_key="messages")
    if (name, said) == ("qwen3", "a user answers"):  # it then forgets the thoughts of the turns before
        rows = [
            [tokenizer.decode(row[key]) for key in ("prompt_ids", "response_ids")]
            for row in (*earlier, written)
        ]
        [(_, first), (shown, second)] = rows
        assert first == "<think>\nHm.\n</think>\n\n3144<|im_end|>" and second == first.replace("3144", "3145")
        assert "\n3144<|im_end|>" in shown and "Hm." not in shown
        return
    expected = sft.split(*rollout(prompt["prompt_ids"], turns, tokenizer, tools))
    assert not earlier and expected.items() <= written.items()
    if said == "no call" and name != "qwen3":
        assert [*load(tools, response_key="extra_info.answer")] == [written]


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
