"""Conversations, prompts and answers of odd writers: what every script reads, and what it refuses."""

import json
import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_sft import CONVERSATION, conversation_tokenizer

from algos import dpo, generate, quantize, rm, sft
from data_prep import preference, sft_chat
from data_prep.lib import replies, source
from data_prep.lib.cache import encoded_rows, load_prompts
from data_prep.lib.chats import conversation
from data_prep.lib.columns import talk_of
from data_prep.lib.replies import pair_of
from data_prep.lib.schema import load_rows, read_rows, write_parquet

CALLS = CONVERSATION.replace(
    "~ m.content -}}",
    "~ m.content -}}{%- for c in m.tool_calls or () -%}{%- set f = c.function or c -%}"
    "{{- '[' ~ f.name ~ f.arguments | tojson ~ ']' -}}{%- endfor -%}",
)


def tokenizer_with(template=CALLS):
    tokenizer = conversation_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def user(text="hi"):
    return dict(role="user", content=text)


def says(text):
    return dict(role="assistant", content=text)


def calls(name, arguments, content=None):
    function = dict(name=name, arguments=arguments)
    return dict(role="assistant", content=content, tool_calls=[dict(id="1", function=function)])


def written(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def with_features(path, rows, **features):
    """As `datasets` writes rows whose tool calls, or whole messages, are the feature Json."""
    datasets.Dataset.from_list(rows, features=datasets.Features(**features)).to_parquet(path)
    return str(path)


TWO = [[user(), calls("weather", dict(city="Oslo"))], [user(), calls("sum", dict(expr="2*3"))]]
NULL = [[user(), calls("weather", dict(city="Oslo", day=None))], TWO[1]]
JSON, TEXT = datasets.Json(), datasets.Value("string")


def as_text(talk):
    """A question and calls, with their arguments as JSON text."""
    question, answer = talk
    functions = [call["function"] for call in answer["tool_calls"]]
    texts = [dict(function=f | dict(arguments=json.dumps(f["arguments"]))) for f in functions]
    return [question, answer | dict(tool_calls=texts)]


WRITERS = {  # how two conversations with calls of two tools get into a file
    "structs": (TWO, lambda path: written(path, [dict(messages=talk) for talk in TWO])),
    "structs with a null": (TWO, lambda path: written(path, [dict(messages=talk) for talk in NULL])),
    "pandas": (TWO, lambda path: pd.DataFrame(dict(messages=TWO)).to_parquet(path) or str(path)),
    "arguments as JSON": (
        NULL,
        lambda path: written(path, [dict(messages=as_text(talk)) for talk in NULL]),
    ),
    "calls as JSON": (
        NULL,
        lambda path: written(
            path,
            [dict(messages=[q, a | dict(tool_calls=json.dumps(a["tool_calls"]))]) for q, a in NULL],
        ),
    ),
    "feature Json": (
        NULL,
        lambda path: with_features(
            path,
            [dict(messages=talk) for talk in NULL],
            messages=datasets.List(dict(role=TEXT, content=TEXT, tool_calls=datasets.List(JSON))),
        ),
    ),
    "feature Json of all": (
        NULL,
        lambda path: with_features(
            path, [dict(messages=talk) for talk in NULL], messages=datasets.List(JSON)
        ),
    ),
    "ours": (NULL, lambda path: write_parquet([dict(messages=x) for x in NULL], path) and str(path)),
}


def shown(talk):
    """What the template writes for the calls of a conversation of two turns."""
    return "".join(
        f"[{c['function']['name']}{json.dumps(c['function']['arguments'])}]" for c in talk[1]["tool_calls"]
    )


# ---- prompts and replies that are none

TALK = [dict(role="user", content="it's 1"), dict(role="assistant", content="2")]
SPELT = {  # a conversation that somebody wrote as a text
    "JSON": json.dumps(TALK),
    "JSON, indented": json.dumps(TALK, indent=1),
    "Python": repr(TALK),
    "ShareGPT": json.dumps([{"from": "human", "value": "1"}]),
    "one message": json.dumps(TALK[:1]),
}
TEXTS = '[{"a": 1}]', "[1, 2]", "[{", '[{"role": "admin"}]', '[{"from": "Rome", "to": "Kyoto"}]', "{}", "[]"
dpo_columns = "prompt", "chosen", "rejected"
READERS = {  # of a prompt and two replies
    "sft": lambda prompt, good, _: sft.encode(prompt, good, tokenizer_with()),
    "dpo": lambda *texts: dpo.encode_pair(*texts, tokenizer_with(), 999),
    "rm": lambda *texts: rm.pair(*texts, 0.0, tokenizer_with(), None, 999),
    "column": lambda *texts: [talk_of(x, name, name) for x, name in zip(texts, dpo_columns)],
}


@pytest.mark.parametrize("reader", READERS)
def test_the_text_of_messages_is_no_prompt(reader):
    read = READERS[reader]
    for text in SPELT.values():
        with pytest.raises(ValueError, match="'prompt' is the text of messages: write it as a list of"):
            read(text, "2", "3")
        if reader != "sft":
            with pytest.raises(ValueError, match="'rejected' is the text of messages"):
                read("1", "2", text)
    for text in TEXTS:
        read(text, text, "3")


@pytest.mark.parametrize("reader", ["sft", "dpo", "rm", "load_prompts", "generate"])
def test_a_prompt_that_ends_with_a_turn_of_the_assistant(reader, tmp_path):
    """A sampler would begin another turn after it."""
    row = dict(data_source="x", reward_model=dict(style="model"), extra_info=dict(index=0), prompt=TALK)
    pq.write_table(pa.Table.from_pylist([row]), file := tmp_path / "rows.parquet")
    read = dict(
        READERS,
        load_prompts=lambda *_: load_prompts([str(file)], tokenizer_with(), 999),
        generate=lambda *_: generate_prompts(str(file), tokenizer_with()),
    )[reader]
    with pytest.raises((ValueError, SystemExit), match="prompt ends with a turn of the assistant"):
        read(TALK, "2", "3")


HEAD, LAST = [dict(role="system", content="add"), *TALK], dict(role="user", content="and 2?")
WHOLE = {  # prompt, and what both replies begin with: how people write HEAD, LAST and two replies
    "replies alone": ([*HEAD, LAST], []),
    "whole conversations": ([*HEAD, LAST], [*HEAD, LAST]),
    "and the last question": ([LAST], [*HEAD, LAST]),
    "and its text": (LAST["content"], [*HEAD, LAST]),
    "the last question alone": ([*HEAD, LAST], [LAST]),
    "without the system's words": ([*HEAD, LAST], [*TALK, LAST]),
    "no prompt": (None, [*HEAD, LAST]),
}


@pytest.mark.parametrize("form", WHOLE)
def test_pairs_of_every_form_are_the_same(form):
    """A prompt is written once, and no turn of it is trained."""
    prompt, start = WHOLE[form]
    chosen, rejected = ([*start, says(text)] for text in "34")
    assert pair_of(prompt, chosen, rejected) == [[*HEAD, LAST], [says("3")], [says("4")]]
    row = dpo.encode_pair(prompt, chosen, rejected, tokenizer_with(), 999)
    assert row == dpo.encode_pair([*HEAD, LAST], "3", "4", tokenizer_with(), 999)
    longer = [[*reply, TALK[0], says("5")] for reply in (chosen, rejected)]  # the user may say it again
    assert pair_of(prompt, *longer)[1:] == [reply[-3:] for reply in longer]


def test_replies_to_another_prompt():
    for prompt, start in (([LAST], [TALK[0]]), (None, []), ([LAST], [*TALK, TALK[0]])):
        with pytest.raises(ValueError, match="are not two replies to one prompt"):
            pair_of(prompt, [*start, says("3")], [*start, says("4")])


# ---- calls of tools


@pytest.mark.parametrize("writer", WRITERS)
def test_every_script_reads_the_calls_that_were_written(writer, tmp_path, monkeypatch):
    """No null that Arrow has filled in, and each that somebody wrote as JSON."""
    talks, write = WRITERS[writer]
    file, tokenizer = write(tmp_path / "talks.parquet"), tokenizer_with()
    expected = [f"{shown(talk)}<|eos|>" for talk in talks]
    # sft, from `messages`, a column of another name, and one inside a struct
    table = pq.read_table(file)
    renamed, inside = tmp_path / "renamed.parquet", tmp_path / "inside.parquet"
    pq.write_table(table.rename_columns(["said"]), renamed)
    struct = pa.StructArray.from_arrays([table["messages"].combine_chunks()], ["said"])
    pq.write_table(pa.table(dict(extra_info=struct)), inside)
    for path, key in ((file, "messages"), (str(renamed), "said"), (str(inside), "extra_info.said")):
        args = sft.Args(model="", train_files=(), output_dir="", messages_key=key)
        rows, *_, dropped = sft.load_examples([path], args, tokenizer)
        assert [tokenizer.decode(row["response_ids"]) for row in rows] == expected and dropped == 0
    # dpo and rm: a call or a word; quantize
    pairs = tmp_path / "pairs.parquet"
    chosen, no = table["messages"], [[user(), says("no")]] * 2
    pq.write_table(pa.table(dict(chosen=chosen, rejected=no)), pairs)
    args = dpo.Args(model="", train_files=(), output_dir="")
    rows, _ = dpo.load_pairs([str(pairs)], args, tokenizer)
    assert [tokenizer.decode(row["chosen_ids"]) for row in rows] == expected
    args = rm.Args(model="", train_files=(), output_dir="")
    rows, _ = rm.read_pairs([str(pairs)], args, tokenizer, None)
    said = lambda ids: tokenizer.decode(ids).removesuffix("\n").partition("<|assistant|>")[2]
    assert [said(row["chosen_ids"]) for row in rows] == expected
    args = quantize.Args("", "")
    assert [said(ids[0]) for ids, _ in quantize.read_texts(file, tokenizer, args)] == expected
    # prompts of the trainers with a sampler, and of generate.py; these end with a call
    for module in (replies, generate):
        monkeypatch.setattr(module, "asked", lambda prompt: prompt)
    prompts, count = tmp_path / "prompts.parquet", len(talks)
    columns = dict(data_source=["x"] * count, reward_model=[dict(style="model", ground_truth="")] * count)
    columns |= dict(extra_info=[dict(index=0)] * count, prompt=table["messages"])
    pq.write_table(pa.table(columns), prompts)
    rows, _ = load_prompts([str(prompts)], tokenizer, 999)
    for row, talk, text in zip(rows, talks, expected, strict=True):
        assert text in tokenizer.decode(row["prompt_ids"])
        [call] = row["prompt"][1]["tool_calls"]  # what a reward model's template is given
        assert call["function"] == talk[1]["tool_calls"][0]["function"] and row["prompt"][1]["content"] == ""
    found = generate_prompts(str(prompts), tokenizer)
    assert [row["prompt_ids"] for row in rows] == [prompt["prompt_ids"] for prompt in found.values()]


def generate_prompts(file, tokenizer, **changes):
    """generate.py's prompts, of a model that takes no images."""
    args = generate.Args(model="none", data=file, output="none", **changes)
    return generate.load_prompts(args, tokenizer, None)[0]


def test_other_forms_of_calls():
    flat = dict(name="f", arguments='{"x": null}')
    [message] = conversation([dict(role="assistant", tool_calls=[flat])], "messages")
    assert message == says("") | dict(tool_calls=[dict(name="f", arguments=dict(x=None))])
    nothing = dict(tool_calls=[], name=None, function_call={})
    assert conversation([says("a") | nothing], "messages") == [says("a")]
    for nothing in (None, "", {}, "{}"):
        [message] = conversation([calls("f", nothing)], "messages")
        assert message["tool_calls"][0]["function"] == dict(name="f", arguments={})
    parts = [dict(type="text", text="a"), dict(type="text", text="b", more=None)]
    assert conversation([user(parts)], "messages") == [user("a\nb")]


BAD = [
    ("hello", "'messages' must be a list of messages, not 'hello'"),
    ([7], "'messages[0]' must be {role, content} or its JSON text, not 7"),
    (["{"], "'messages[0]' must be {role, content} or its JSON text, not '{'"),
    ([user(None)], "'messages[0]' must be {role, content} with a string content"),
    ([user([dict(type="image")])], "'messages[0]' must be {role, content} with a string content"),
    ([user([dict(type="text", text=None)])], "'messages[0]' must be {role, content} with a string content"),
    ([says([dict(type="text", text="a", train=0)])], "'messages[0]' must be {role, content} with a string"),
    ([calls("f", {}) | dict(function_call=dict(name="g"))], "'messages[0]' has 'function_call' and 'tool_ca"),
    ([says("") | dict(tool_calls=[dict(function=dict(name="f"), arguments={})])], "'messages[0].tool_calls["),
    ([calls("f", "{x")], "'messages[0].tool_calls[0]: arguments' must be an object or its JSON text, not '{"),
    ([calls("f", "[1]")], "'messages[0].tool_calls[0]: arguments' must be an object or its JSON text, not '"),
    ([calls("f", dict(x=b""))], "'messages[0].tool_calls[0]: arguments': Object of type bytes is not "),
    ([calls(None, {})], "'messages[0].tool_calls[0]' must be {function: {name, arguments}} with the name of"),
    ([says("") | dict(tool_calls="7")], "'messages[0].tool_calls' must be a list or its JSON text, not '7'"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "problem"), BAD)
def test_what_are_no_messages(value, problem):
    with pytest.raises(ValueError) as error:
        conversation(value, "messages")
    assert str(error.value).startswith(problem) and "\n" not in str(error.value)


def test_a_template_that_leaves_out_calls_is_refused(tmp_path):
    """It would train an empty turn."""
    tokenizer, match = tokenizer_with(CONVERSATION), "row 0.*leaves out tool calls: number 0 of message 1"
    talk, no = [user(), calls("weather", dict(x=1))], [user(), says("no")]
    row = dict(messages=talk, data_source="x", prompt=[*talk, user("?")], chosen=talk[1:], rejected=no[1:])
    row |= dict(reward_model=dict(style="model"), extra_info=dict(answer="3"))
    path = written(tmp_path / "rows.parquet", [row])
    make = lambda script, **how: script.Args(model="", train_files=(), output_dir="", **how)
    for read in (
        lambda: sft.load_examples([path], make(sft, messages_key="messages"), tokenizer),
        lambda: sft.load_examples([path], make(sft), tokenizer),
        lambda: dpo.load_pairs([path], make(dpo), tokenizer),
        lambda: rm.read_pairs([path], make(rm), tokenizer, None),
        lambda: load_prompts([path], tokenizer, 99),
    ):
        with pytest.raises(ValueError, match=match):
            read()
    with pytest.raises(ValueError, match=r"rows.parquet: row 0: the chat template leaves out tool calls"):
        quantize.read_texts(path, tokenizer, quantize.Args("", ""))
    with pytest.raises(SystemExit) as end:
        generate_prompts(path, tokenizer)
    assert "rows.parquet: row 0: prompt: the chat template leaves out tool calls" in str(end.value.code)


def test_results_have_the_order_of_the_calls():
    turn = says("") | dict(tool_calls=[dict(id=[x], function=dict(name="f", arguments={})) for x in "ab"])
    told = {x: dict(role="tool", content=x, tool_call_id=[x]) for x in "abc"}  # whatever an id may be
    for order, expected in (("ba", "ab"), ("ab", "ab"), ("cba", "abc"), ("cc", "cc")):
        talk = [user(), turn, *map(told.get, order), turn, *map(told.get, order), says("x")]
        found = [m["content"] for m in conversation(talk, "messages") if m["role"] == "tool"]
        assert found == [*expected, *expected]


def test_calls_go_through_the_scripts_that_write_chats(tmp_path, capsys):
    talk = [user(), calls("f", dict(x=None, y=[1, "a"])), dict(role="tool", content="3", tool_call_id="1")]
    kept = [*talk, says("3") | dict(reasoning_content="Hm.", name="bot")]
    silent = [[user(), says(" ")], [user(), says(""), user(), says("x")]]
    plain = [[user(), says("x")]] * (source.BATCH_ROWS + 7)  # a field may come first in a later group of rows
    rows = [dict(messages=x, weight=1) for x in [*plain, kept, *silent]]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = dict(local_save_dir=str(tmp_path / "out"), local_dataset_path=str(tmp_path), splits=("train",))
    sft_chat.main(sft_chat.Args(**args))
    found = load_rows(tmp_path / "out/train.parquet", ["messages"])
    expected = [kept[0], kept[1] | dict(content=""), *kept[2:]]
    assert [row["messages"] for row in found] == [*plain, expected]
    assert "2 left out: an empty turn of the assistant\n" in capsys.readouterr().out
    pairs = [dict(chosen=kept, rejected=[user(), says("no")]), dict(chosen=talk[:2], rejected=talk[:2])]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    preference.main(preference.Args(**args))
    [row] = load_rows(tmp_path / "out/train.parquet", ["prompt", "chosen", "rejected"])
    assert row == dict(prompt=kept[:1], chosen=expected[1:], rejected=[says("no")])
    assert "1 left out: both replies are the same" in capsys.readouterr().out


# ---- answers and prompts that are empty; strings


@pytest.mark.parametrize("empty", ["", " \n "])
def test_rows_without_an_answer_are_dropped_and_counted(empty, tmp_path):
    tokenizer, make = tokenizer_with(), partial(sft.Args, model="", train_files=(), output_dir="")
    rows = [dict(prompt="1+2=", completion=text) for text in ("3", empty, "4")]
    path = written(tmp_path / "rows.parquet", rows)
    found, *_, dropped = sft.load_examples([path], make(response_key="completion"), tokenizer)
    assert [tokenizer.decode(row["response_ids"]) for row in found] == ["3<|eos|>", "4<|eos|>"]
    assert dropped == 1
    args = quantize.Args("", "", response_key="completion")
    assert len(quantize.read_texts(path, tokenizer, args)) == 2
    assert len(quantize.read_texts(path, tokenizer, args, limit=2)) == 2
    # a conversation with one silent turn goes, and one with a call stays
    talks = [[user(), says(empty)], [user(), says("a"), user(), says(empty), user(), says("b")]]
    talks += [[user(), calls("f", dict(x=1), empty)], [user(), says("a")]]
    path = written(tmp_path / "talks.parquet", [dict(messages=talk) for talk in talks])
    found, *_, dropped = sft.load_examples([path], make(messages_key="messages"), tokenizer)
    assert [tokenizer.decode(row["response_ids"]) for row in found] == [
        f'{empty}[f{{"x": 1}}]<|eos|>',
        "a<|eos|>",
    ]
    assert dropped == 2
    assert len(quantize.read_texts(path, tokenizer, quantize.Args("", ""))) == 2
    path = written(tmp_path / "none.parquet", [dict(prompt="1+2=", completion=empty)])
    with pytest.raises(ValueError, match=r"none.parquet: no row has an answer with a token within "):
        sft.load_examples([path], make(response_key="completion"), tokenizer)
    with pytest.raises(ValueError, match=r"none.parquet: no row has an answer in 'completion'; --res"):
        quantize.read_texts(path, tokenizer, args)


def test_pairs_with_an_empty_turn_are_no_pairs(tmp_path):
    tokenizer, args = tokenizer_with(), dpo.Args(model="", train_files=(), output_dir="", bad_pairs="drop")
    good = dict(prompt=[user()], chosen=[says("a")], rejected=[says("b")])
    talk = [says("a"), user(), says(""), user(), says("b")]
    rows = [good, good | dict(chosen=talk), good | dict(rejected=[says(" ")])]
    rows, dropped = dpo.load_pairs([written(tmp_path / "x.parquet", rows)], args, tokenizer)
    assert len(rows) == 1 and dropped == 2


def test_an_answer_is_one_message(tmp_path):
    """As TRL has prompt and completion; a longer one is refused."""
    tokenizer, make = tokenizer_with(), partial(sft.Args, model="", train_files=(), output_dir="")
    for bad in ([says("3"), user(), says("4")], [calls("f", dict(x=1))], [user()], ["3"], 3, []):
        path = written(tmp_path / "bad.parquet", [dict(prompt=[user()], completion=bad)])
        with pytest.raises(
            ValueError, match=r"row 0: (an answer must|'completion' is empty|'completion.0.' must be)"
        ):
            sft.load_examples([path], make(response_key="completion"), tokenizer)


def test_a_map_is_read_as_a_struct(tmp_path):
    path, text = tmp_path / "x.parquet", pa.string()
    kind = pa.list_(pa.map_(text, text))
    said = pa.array([[[*x.items()] for x in TALK]], kind)
    pq.write_table(pa.table(dict(messages=said)), path)
    assert load_rows(path, ["messages"]) == [dict(messages=TALK)]


@pytest.mark.parametrize("script", ("sft", "messages", "text", "dpo", "rm", "prompts"))
def test_errors_name_the_file_and_its_row_in_every_script(script, tmp_path):
    """One line without the other file, the number over all files, or the name of an exception."""
    tokenizer, name = (
        tokenizer_with(
            CONVERSATION.replace(
                "{%- for",
                "{%- if messages[0].content == 'bad' -%}{{- raise_exception('a\\nb') -}}{%- endif -%}{%- for",
                1,
            )
        ),
        "extra_info.answer",
    )
    good = dict(
        text="good", chosen="2", rejected="3", messages=[user(), says("2")], extra_info=dict(answer="2")
    )
    good |= dict(prompt=[user()], data_source="", reward_model=dict(style="rule", ground_truth="2"))
    bad = good | dict(prompt=[user("bad")], messages=[user("bad"), says("2")], text="")
    one, two = (written(tmp_path / x, [good, y]) for x, y in (("one.parquet", good), ("two.parquet", bad)))
    base = dict(model="", train_files=(), output_dir="")
    load = {
        "sft": lambda some: sft.load_examples(some, sft.Args(**base, response_key=name), tokenizer),
        "messages": lambda some: sft.load_examples(
            some, sft.Args(**base, messages_key="messages"), tokenizer
        ),
        "text": lambda some: sft.load_examples(some, sft.Args(**base, text_key="extra_info"), tokenizer),
        "dpo": lambda some: dpo.load_pairs(some, dpo.Args(**base), tokenizer),
        "rm": lambda some: rm.read_pairs(some, rm.Args(**base), tokenizer, 0),
        "prompts": lambda some: load_prompts(some, tokenizer, 99),
    }[script]
    file, row = (one, 0) if script == "text" else (two, 1)
    with pytest.raises(
        ValueError, match=rf"^{file}: row {row}: (the chat template: a b|extra_info is no text)"
    ) as error:
        load([one, two])
    assert "\n" not in str(error.value) and "Error" not in str(error.value)


def test_prompts_without_a_token_are_dropped_and_counted(tmp_path):
    tokenizer = tokenizer_with("{%- for m in messages -%}{{- m.content -}}{%- endfor -%}")
    row = dict(data_source="arithmetic", reward_model=dict(style="rule", ground_truth="3"))
    row |= dict(extra_info=dict(index=0))
    path = written(tmp_path / "x.parquet", [row | dict(prompt=[user(x)]) for x in ("1+2=", "", "3")])
    rows, dropped = load_prompts([path], tokenizer, 3)
    assert [row["index"] for row in rows] == [2] and dropped == 2
    assert [*generate_prompts(path, tokenizer, max_prompt_length=3)] == [2]
    path = written(tmp_path / "x.parquet", [row | dict(prompt=[user("")])])
    with pytest.raises(ValueError, match=r"x.parquet: no prompt of 1 to 3 tokens \(--max_prompt_length\)"):
        load_prompts([path], tokenizer, 3)
    with pytest.raises(SystemExit, match=r"x.parquet: no prompt of 1 to 3 tokens \(--max_prompt_length\)"):
        generate_prompts(path, tokenizer, max_prompt_length=3)


# ---- any values, any writer


NAMES = st.sampled_from(["x", "y", "role", "content", "ä b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=5,
)
MESSAGE = st.fixed_dictionaries(
    dict(role=st.sampled_from(["user", "assistant", "tool"]), content=st.text(max_size=6)),
    optional=dict(
        name=st.none() | st.text(max_size=3),
        reasoning_content=st.none() | st.text(max_size=3),
        tool_calls=st.none()
        | st.lists(
            st.fixed_dictionaries(
                dict(
                    id=st.text(max_size=3),
                    function=st.fixed_dictionaries(
                        dict(name=st.text(max_size=3), arguments=st.dictionaries(NAMES, VALUES, max_size=3))
                    ),
                )
            ),
            max_size=2,
        ),
    ),
)
MESSAGE_KEYS = "role", "content", "name", "reasoning_content", "tool_calls"
TALKS = st.lists(st.lists(MESSAGE, min_size=1, max_size=3), min_size=1, max_size=3)


def without_nulls(value):
    """A value as a struct keeps it."""
    if isinstance(value, dict):
        return {name: without_nulls(x) for name, x in value.items() if x is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


def in_structs(talks):
    return pa.Table.from_pylist([dict(messages=talk) for talk in talks])


LARGE = pa.list_(pa.struct([("role", pa.large_string()), ("content", pa.string_view())]))
STRUCTS = {
    "arrow": in_structs,
    "pandas": lambda talks: pa.Table.from_pandas(pd.DataFrame(dict(messages=talks))),
    "polars": lambda talks: pa.table(
        dict(messages=pa.array([[{k: m[k] for k in ("role", "content")} for m in t] for t in talks], LARGE))
    ),
    "datasets": lambda talks: datasets.Dataset.from_list([dict(messages=x) for x in talks]).data.table,
}
TOKENIZER = conversation_tokenizer()
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@QUIET
@given(talks=TALKS)
def test_what_is_written_is_read_back(talks, tmp_path_factory):
    path = tmp_path_factory.mktemp("x") / "x.parquet"
    write_parquet([dict(messages=talk) for talk in talks], path)
    assert [row["messages"] for row in load_rows(path, ["messages"])] == [
        conversation(x, "messages") for x in talks
    ]


@settings(QUIET, max_examples=20)
@pytest.mark.parametrize("writer", STRUCTS)
@given(talks=TALKS)
def test_trainers_read_what_all_others_read(writer, talks, tmp_path_factory):
    """Through the cache, of a column of any name."""
    path, text = tmp_path_factory.mktemp("x") / "x.parquet", dict(text=pa.string())
    try:
        pq.write_table(STRUCTS[writer](talks).rename_columns(["said"]), path)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return
    encode = lambda rows, numbers: [[dict(text=json.dumps(row["messages"]))] for row in rows]
    found, dropped = encoded_rows([path], TOKENIZER, dict(messages="said"), text, encode, path.name)
    [rows] = read_rows(path, dict(messages="said"))
    assert [json.loads(row["text"]) for row in found] == [row["messages"] for row in rows] and dropped == 0
    kept = ("role", "content") if writer == "polars" else MESSAGE_KEYS
    said = [[{k: m[k] for k in kept if k in m} for m in without_nulls(talk)] for talk in talks]
    assert [row["messages"] for row in rows] == [conversation(talk, "messages") for talk in said]


@QUIET
@given(value=VALUES | st.lists(VALUES | MESSAGE, max_size=3))
@example(value=[says("") | dict(tool_calls="[" * 10**5)])
@example(value=[says("") | dict(tool_calls=[dict(function=dict(name="f", arguments="1" * 5000))])])
def test_anything_else_is_one_line(value):
    try:
        assert conversation(value, "messages")
    except ValueError as error:
        assert "\n" not in str(error) and "'messages" in str(error)


RECORDS = st.lists(st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=4)


@QUIET
@given(
    records=RECORDS,
    ascii=st.booleans(),
    bom=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n", "\n \n"]),
)
@example(records=[dict(x="\u2028\x85")], ascii=False, bom=True, end="\n")
def test_json_of_any_writer(records, ascii, bom, end, tmp_path_factory):
    """A document or lines, in a file named .json; lines in .jsonl."""
    folder, dump = tmp_path_factory.mktemp("x"), partial(json.dumps, ensure_ascii=ascii)
    lines = end.join(map(dump, records)) + end
    encoding = "utf-8-sig" if bom else "utf-8"
    for name, text in (
        ("a.json", dump(records)),
        ("b.json", dump(records, indent=2)),
        ("c.json", lines),
        ("d.jsonl", lines),
    ):
        (folder / name).write_bytes(text.encode(encoding))
        assert [record for _, record in source.Source(folder / name).rows()] == records, name


def test_json_that_is_cut_off(tmp_path):
    path = tmp_path / "x.json"
    for text, problem in (('[{"a": 1},\n{"b"', "line 2 column 5"), ("a,b\n1,2", "line 1 column 1")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"x.json: cannot be read .*{problem}"):
            source.Source(path)
    path.write_text('{"a": 1}\n{"b"')
    (_, first), (place, second) = source.Source(path).rows()
    assert first == dict(a=1) and isinstance(second, ValueError) and place.endswith("x.json: row 1")


def test_half_a_character_and_large_integers(tmp_path):
    """JSON may have what no file of UTF-8 or of 64 bits can hold: the row is named and left out."""
    rows = [dict(messages=[user(), says(text)]) for text in ("a", "\ud83d", "\U0001f600", "b")]
    for name, text in (("train.jsonl", "\n".join(map(json.dumps, rows))), ("test.json", json.dumps(rows))):
        (tmp_path / name).write_text(text)
        found = [record for _, record in source.Source(tmp_path / name).rows()]
        assert found[::2] == rows[::2] and found[3] == rows[3] and isinstance(found[1], UnicodeEncodeError)
    sft_chat.main(sft_chat.Args(str(tmp_path / "out"), str(tmp_path), splits=("train", "test")))
    for name in ("train", "test"):
        assert len(load_rows(tmp_path / f"out/{name}.parquet", ["messages"])) == 3
    for value in (2**70, "\ud83d"):
        with pytest.raises(ValueError, match=r"x.parquet: rows 0 to 1 cannot be written: [^\n]*$"):
            write_parquet([dict(x=value), dict(x=value)], tmp_path / "x.parquet")
    talk = [user(), calls("f", dict(x=2**70), "")]  # arguments are text
    write_parquet([dict(messages=talk)], tmp_path / "x.parquet")
    assert load_rows(tmp_path / "x.parquet", ["messages"])[0]["messages"] == talk


def test_numbers_beside_nulls(tmp_path):
    """Rows whose later groups have a field, or a fraction, that the first group has not."""
    rows = [dict(x=None, y=1, z=dict(a=1))] * source.BATCH_ROWS + [
        dict(x="a", y=0.5, z=dict(a=1, b=dict(c=2)))
    ]
    path = tmp_path / "x.parquet"
    rows[-1]["z"].pop("b")
    write_parquet(rows, path)
    found = load_rows(path, ["y", "z"])
    assert found[0]["y"] == 1.0 and math.isclose(found[-1]["y"], 0.5)
    deep = [dict(z=[dict(a=1)])] * source.BATCH_ROWS + [dict(z=[dict(a=1, b=2)])]
    write_parquet(deep, path)
    assert load_rows(path, ["z"])[-1]["z"] == [dict(a=1, b=2)]


@pytest.mark.parametrize("field", ("train", "weight", "training", "trainable", "loss", "loss_mask", "masked"))
@pytest.mark.parametrize("value", (0, 1, False, True, None))
def test_a_turn_that_is_not_to_be_trained_is_context(field, value):
    said = [user("1+2="), says("4") | {field: value}, user("?"), says("3")]
    found = sft.encode_messages(conversation(said, "messages"), tokenizer_with())
    [(ids, trained)] = found
    words = tokenizer_with().decode([x for x, on in zip(ids, trained) if on])
    left_out = value is not None and bool(value) == (field == "masked")
    assert words == "3<|eos|>" if left_out else words == "4<|eos|>3<|eos|>"
    assert "4" in tokenizer_with().decode(ids)


def test_what_is_said_of_training_and_cannot_be_done():
    for message, problem in (
        (says("3") | dict(weight=0.5), "'messages[0].weight' is 0.5; write 'train', 1 or 0"),
        (says("3") | dict(mask=1), "'messages[0].mask' is 1; write 'train'"),
        (user("3") | dict(train=True), "'messages[0].train': only turns of the assistant are trained"),
        (says("3") | dict(thinking=["a"]), "'messages[0].thinking' must be a string"),
        (says("3") | dict(thinking="a", reasoning="b"), "'messages[0]' has two fields of reasoning"),
        (dict(role="chatgpt", content="3"), "'messages[0].role' is 'chatgpt'; use system, developer"),
        (
            says("") | dict(tool_calls=[dict(name="f", parameters={})]),
            "'messages[0].tool_calls[0]' has 'parameters', which is not read",
        ),
    ):
        with pytest.raises(ValueError) as error:
            conversation([message], "messages")
        assert str(error.value).startswith(problem)
    assert conversation([user("3") | dict(weight=0)], "messages") == [user("3")]
    with pytest.raises(ValueError, match="a reward model scores whole conversations"):
        rm.conversation_ids([user()], conversation([says("3") | dict(train=0)], "x"), tokenizer_with(), 0)


@pytest.mark.parametrize("field", ("reasoning_content", "reasoning", "thinking", "thought"))
def test_reasoning_is_shown_or_refused(field):
    said = conversation([user("1+2="), says("3") | {field: "So."}], "messages")
    assert said[1] == says("3") | dict(reasoning_content="So.")
    read = lambda tokenizer: sft.encode_messages(said, tokenizer)
    with pytest.raises(ValueError, match="leaves out of message 1 its reasoning"):
        read(tokenizer_with())
    with pytest.raises(ValueError, match="leaves out of message 1 its reasoning"):
        rm.conversation_ids(said[:1], said[1:], tokenizer_with(), 0)
    for name in ("reasoning_content", "reasoning", "thinking"):  # whatever the template calls it
        shows = CALLS.replace("~ m.content", f"~ (m.{name} ~ '/' if m.{name} else '') ~ m.content")
        [(ids, trained)] = read(tokenizer_with(shows))
        assert tokenizer_with().decode([x for x, on in zip(ids, trained) if on]) == "So./3<|eos|>"


def test_share_gpt():
    call = dict(name="f", arguments=dict(x=1))
    talk = [("system", "Be."), ("human", "1+2="), ("function_call", json.dumps(call)), ("observation", "3")]
    said = [dict(zip(("from", "value"), x)) for x in [*talk, ("gpt", "3")]]
    expected = [dict(role="system", content="Be."), user("1+2="), says("") | dict(tool_calls=[call])]
    expected += [dict(role="tool", content="3"), says("3")]
    assert conversation(said, "conversations") == expected
    assert sft_chat.make_row(dict(conversations=said), "train", 0, "x")["messages"] == expected


SCHEMA = dict(name="weather", description="Of a town.", parameters=dict(type="object", required=["x"]))


@pytest.mark.parametrize(
    ("kind", "value", "seen"),
    [
        (pa.timestamp("us"), datetime(2020, 1, 2, 3), "2020-01-02T03:00:00"),
        (pa.timestamp("ns", tz="UTC"), datetime(2020, 1, 2, 3), "2020-01-02T03:00:00+00:00"),
        (pa.date32(), date(2020, 1, 2), "2020-01-02"),
        (pa.time64("us"), time(3, 4), "03:04:00"),
        (pa.duration("s"), timedelta(seconds=61), "0:01:01"),
        (pa.decimal128(9, 2), Decimal("1.50"), "1.50"),
        (pa.decimal256(40, 2), Decimal("1.50"), "1.50"),
        (pa.binary(), b"a\xff", "a\\xff"),
        (pa.binary(2), b"ab", "ab"),
        (pa.large_binary(), b"ab", "ab"),
        (pa.binary_view(), b"ab", "ab"),
        (pa.string_view(), "ab", "ab"),
        (pa.dictionary(pa.int8(), pa.string()), "ab", "ab"),
        (pa.int64(), 2**60, 2**60),
        (pa.float32(), 0.5, 0.5),
        (pa.list_(pa.date32(), 1), [date(2020, 1, 2)], ["2020-01-02"]),
        (pa.struct([("on", pa.date32())]), dict(on=date(2020, 1, 2)), dict(on="2020-01-02")),
        (pa.null(), None, None),
    ],
)
def test_a_reward_sees_what_json_has(kind, value, seen, tmp_path):
    """In training, in files of rollouts and after a resume alike."""
    row = dict(data_source="arithmetic", prompt=[user()], extra_info=None)
    table = pa.Table.from_pylist([row | dict(reward_model=dict(style="rule", ground_truth="1"))] * 2)
    about = pa.StructArray.from_arrays([pa.array([value] * 2, kind)], ["x"])
    table = table.set_column(table.column_names.index("extra_info"), "extra_info", about)
    pq.write_table(table, path := tmp_path / "rows.parquet")
    [_, read] = load_rows(path, ["extra_info"])
    rows, _ = load_prompts([path], tokenizer_with(), 100)
    assert read["extra_info"] == rows[1]["extra_info"] == dict(x=seen)
    assert json.loads(json.dumps(rows[1])) == rows[1]
