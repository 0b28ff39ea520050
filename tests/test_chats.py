"""Conversations, prompts and answers of odd writers: what every script reads, and what it refuses.

What becomes of single rows is in test_columns.py and its table.
"""

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
from test_columns import BASE, read, says, tokenizer_with, user, written
from test_sft import CONVERSATION

from algos import generate, quantize
from data_prep import preference, sft_chat
from data_prep.lib import conversations, source
from data_prep.lib.cache import encoded_rows, load_prompts
from data_prep.lib.conversations import conversation
from data_prep.lib.schema import load_rows, read_rows, write_parquet


def calls(name, arguments, content=None):
    function = dict(name=name, arguments=arguments)
    return dict(role="assistant", content=content, tool_calls=[dict(id="1", function=function)])


def in_structs(talks):
    return pa.Table.from_pylist([dict(messages=talk) for talk in talks])


def of_features(features):
    """As `datasets` writes messages whose tool calls, or all of them, are the feature Json."""

    def write(talks):
        rows = [dict(messages=talk) for talk in talks]
        given = datasets.Features(messages=features)
        return datasets.Dataset.from_list(rows, features=given)

    return write


def with_texts(text):
    """Messages whose calls are as `text` makes them."""

    def write(talks):
        rows = []
        for question, answer in talks:
            rows.append([question, answer | dict(tool_calls=text(answer["tool_calls"]))])
        return in_structs(rows)

    return write


def with_arguments_as_text(made):
    found = []
    for call in made:
        function = call["function"]
        found.append(dict(function=function | dict(arguments=json.dumps(function["arguments"]))))
    return found


TWO = [[user(), calls("weather", dict(city="Oslo"))], [user(), calls("sum", dict(expr="2*3"))]]
NULL = [[user(), calls("weather", dict(city="Oslo", day=None))], TWO[1]]
JSON = datasets.Json()
TEXT = datasets.Value("string")
OF_JSON = dict(role=TEXT, content=TEXT, tool_calls=datasets.List(JSON))
WRITERS = {  # two conversations with calls of two tools, and how they get into a file
    "structs": (TWO, in_structs),
    "pandas": (TWO, lambda talks: pa.Table.from_pandas(pd.DataFrame(dict(messages=talks)))),
    "arguments as JSON": (NULL, with_texts(with_arguments_as_text)),
    "calls as JSON": (NULL, with_texts(json.dumps)),
    "feature Json": (NULL, of_features(datasets.List(OF_JSON))),
    "feature Json of all": (NULL, of_features(datasets.List(JSON))),
    "ours": (NULL, None),
}


def generated(file, tokenizer, **changes):
    """generate.py's prompts, of a model that takes no images."""
    args = generate.Args(model="none", data=file, output="none", **changes)
    return generate.load_prompts(args, tokenizer, None)[0]


@pytest.mark.parametrize("writer", WRITERS)
def test_every_script_reads_the_calls_that_were_written(writer, tmp_path, monkeypatch):
    """No null that Arrow has filled in, and each that somebody wrote as JSON."""
    (talks, write), file, tokenizer = WRITERS[writer], tmp_path / "talks.parquet", tokenizer_with()
    if writer == "ours":
        write_parquet([dict(messages=talk) for talk in talks], file)
    elif "Json" in writer:
        write(talks).to_parquet(file)
    else:
        pq.write_table(write(talks), file)
    table = pq.read_table(file)
    texts = []
    for _, answer in talks:
        function = answer["tool_calls"][0]["function"]
        texts.append(f"[{function['name']}{json.dumps(function['arguments'])}]<|eos|>")
    # of columns of any name, and inside a struct; prompts that end with a call
    said = table["messages"]
    inside = pa.StructArray.from_arrays([said.combine_chunks(), pa.array([0, 1])], ["said", "index"])
    columns = dict(messages=said, said=said, prompt=said, extra_info=inside, data_source=["x"] * 2)
    columns |= dict(reward_model=[dict(style="model", ground_truth="")] * 2)
    pq.write_table(pa.table(columns), file)
    for key in ("messages", "said", "extra_info.said"):
        assert [text for _, text in read("sft", str(file), tokenizer, messages_key=key)] == texts
    rows = quantize.read_texts(str(file), tokenizer, quantize.Args("", ""))
    found = [tokenizer.decode(ids[0]) for ids, _ in rows]
    assert found == [f"<|user|>hi<|assistant|>{text}" for text in texts]
    for module in (conversations, generate):
        monkeypatch.setattr(module, "check_prompt", lambda prompt: None)
    rows, _ = load_prompts([str(file)], tokenizer, 999)
    prompts = generated(str(file), tokenizer)
    for row, prompt, (_, answer), text in zip(rows, prompts.values(), talks, texts, strict=True):
        assert text in tokenizer.decode(row["prompt_ids"]) and row["prompt_ids"] == prompt["prompt_ids"]
        [call] = row["prompt"][1]["tool_calls"]  # what a reward model's template is given
        assert call["function"] == answer["tool_calls"][0]["function"] and row["prompt"][1]["content"] == ""
    pq.write_table(pa.table(dict(chosen=said, rejected=[[user(), says("no")]] * 2)), file)
    assert [text for _, text, _ in read("dpo", str(file), tokenizer)] == texts
    assert [text for text, _ in read("rm", str(file), tokenizer)] == [f"{text}\n" for text in found]


def test_arguments_that_json_cannot_have():
    with pytest.raises(ValueError, match="arguments': Object of type bytes is not JSON serializable; write"):
        conversation([calls("f", dict(x=b""))], "messages")


SCRIPTS = {  # of a file: what they are told of it
    "sft": {},
    "sft, messages": dict(messages_key="messages"),
    "sft, text": dict(text_key="extra_info"),
    "dpo": {},
    "rm": {},
    "rl": {},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_errors_name_the_file_and_its_row_in_every_script(script, tmp_path):
    """One line without the other file, the number over all files, or the name of an exception."""
    raises = "{%- if messages[0].content == 'bad' -%}{{- raise_exception('a\\nb') -}}{%- endif -%}"
    good = BASE["rl"] | dict(chosen="2", rejected="3", messages=[user(), says("2")])
    good |= dict(prompt=[user()], extra_info=dict(answer="2"))
    bad = good | dict(prompt=[user("bad")], messages=[user("bad"), says("2")])
    one = written(tmp_path / "one.parquet", [good, good])
    two = written(tmp_path / "two.parquet", [good, bad])
    line = (
        f"{one}: row 0: extra_info is no text"
        if "text" in script
        else f"{two}: row 1: the chat template: a b"
    )
    with pytest.raises(ValueError) as error:
        read(script.split(",")[0], [one, two], tokenizer_with(raises + CONVERSATION), **SCRIPTS[script])
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value) and "Error" not in str(error.value)


def test_calls_go_through_the_scripts_that_write_chats(tmp_path, capsys):
    """Also those of a later group of rows; empty turns, and pairs of equal replies, are left out."""
    talk = [
        user(),
        calls("f", dict(x=None, y=[1, "a"]), ""),
        dict(role="tool", content="3", tool_call_id="1"),
    ]
    kept = [*talk, says("3") | dict(reasoning_content="Hm.", name="bot")]
    silent = [[user(), says(" ")], [user(), says(""), user(), says("x")]]
    plain = [[user(), says("x")]] * (source.BATCH_ROWS + 7)
    written(tmp_path / "train.jsonl", [dict(messages=x, weight=1) for x in [*plain, kept, *silent]])
    args = dict(local_save_dir=str(tmp_path / "out"), local_dataset_path=str(tmp_path), splits=("train",))
    sft_chat.main(sft_chat.Args(**args))
    found = load_rows(tmp_path / "out/train.parquet", ["messages"])
    assert [row["messages"] for row in found] == [*plain, kept]
    assert "2 left out: an empty turn of the assistant\n" in capsys.readouterr().out
    pairs = [dict(chosen=kept, rejected=[user(), says("no")]), dict(chosen=talk[:2], rejected=talk[:2])]
    written(tmp_path / "train.jsonl", pairs)
    preference.main(preference.Args(**args))
    found = load_rows(tmp_path / "out/train.parquet", ["prompt", "chosen", "rejected"])
    assert found == [dict(prompt=kept[:1], chosen=kept[1:], rejected=[says("no")])]
    assert "1 left out: both replies are the same" in capsys.readouterr().out


# ---- what test_columns.py has not, of quantize.py and generate.py


def test_texts_of_quantize(tmp_path):
    """Rows without an answer are none, and a conversation with one silent turn is none."""
    tokenizer = tokenizer_with()
    path = tmp_path / "x.parquet"
    args = quantize.Args("", "", response_key="completion")
    for empty in ("", " \n "):
        talks = [[user(), says(empty)], [user(), says("a"), user(), says(empty), user(), says("b")]]
        talks += [[user(), calls("f", dict(x=1), empty)], [user(), says("a")]]
        file = written(path, [dict(messages=talk) for talk in talks])
        assert len(quantize.read_texts(file, tokenizer, quantize.Args("", ""))) == 2
        with pytest.raises(ValueError, match=r"x.parquet: row 2: the chat template leaves out tool calls"):
            quantize.read_texts(file, tokenizer_with(CONVERSATION), quantize.Args("", ""))
        written(path, [dict(prompt="1+2=", completion=text) for text in ("3", empty, "4")])
        for limit in (2, 3):
            assert len(quantize.read_texts(file, tokenizer, args, limit=limit)) == 2
        written(path, [dict(prompt="1+2=", completion=empty)])
        with pytest.raises(ValueError, match=r"x.parquet: no row has an answer in 'completion'; --res"):
            quantize.read_texts(file, tokenizer, args)


def test_prompts_of_generate(tmp_path):
    """Those without a token, or with too many, are dropped as by trainers; others are refused as there."""
    tokenizer = tokenizer_with("{%- for m in messages -%}{{- m.content -}}{%- endfor -%}")
    prompts = [[user(x)] for x in ("1+2=", "", "3")]
    path = written(tmp_path / "x.parquet", [BASE["rl"] | dict(prompt=x) for x in prompts])
    rows, dropped = load_prompts([path], tokenizer, 3)
    assert [row["index"] for row in rows] == [2] and dropped == 2
    assert [*generated(path, tokenizer, max_prompt_length=3)] == [2]
    talk = [user(), calls("f", dict(x=1)), user("?")]
    none = "no prompt of 1 to 3 tokens .--max_prompt_length.$"
    for prompt, line in (
        (prompts[1], none),
        ([user(), says("3")], "row 0: prompt: the prompt ends with a turn of the assistant"),
        (talk, "row 0: prompt: the chat template leaves out tool calls"),
    ):
        written(tmp_path / "x.parquet", [BASE["rl"] | dict(prompt=prompt)])
        with pytest.raises(SystemExit, match=rf"x.parquet: {line}"):
            generated(path, tokenizer, max_prompt_length=3)
    written(tmp_path / "x.parquet", [BASE["rl"] | dict(prompt=prompts[1])])
    with pytest.raises(ValueError, match=f"x.parquet: {none}"):
        load_prompts([path], tokenizer, 3)


DAY, HOUR, CENTS, WORD = date(2020, 1, 2), datetime(2020, 1, 2, 3), Decimal("1.50"), pa.string()
SEEN = [  # of `extra_info`: a type of Arrow, a value, what a reward sees
    (pa.timestamp("us"), HOUR, "2020-01-02T03:00:00"),
    (pa.timestamp("ns", tz="UTC"), HOUR, "2020-01-02T03:00:00+00:00"),
    (pa.date32(), DAY, "2020-01-02"),
    (pa.time64("us"), time(3, 4), "03:04:00"),
    (pa.duration("s"), timedelta(seconds=61), "0:01:01"),
    (pa.decimal256(40, 2), CENTS, "1.50"),
    (pa.binary(), b"a\xff", "a\\xff"),
    (pa.binary(2), b"ab", "ab"),
    (pa.string_view(), "ab", "ab"),
    (pa.dictionary(pa.int8(), WORD), "ab", "ab"),
    (pa.int64(), 2**60, 2**60),
    (pa.list_(pa.date32(), 1), [DAY], ["2020-01-02"]),
    (pa.struct([("on", pa.date32())]), dict(on=DAY), dict(on="2020-01-02")),
    (pa.null(), None, None),
]


@pytest.mark.parametrize(("kind", "value", "seen"), SEEN)
def test_a_reward_sees_what_json_has(kind, value, seen, tmp_path):
    """In training, in files of rollouts and after a resume alike."""
    about = pa.StructArray.from_arrays([pa.array([value] * 2, kind)], ["x"])
    table = pa.Table.from_pylist([BASE["rl"]] * 2).drop("extra_info")
    path = tmp_path / "rows.parquet"
    pq.write_table(table.append_column("extra_info", about), path)
    [_, record] = load_rows(path, ["extra_info"])
    rows, _ = load_prompts([path], tokenizer_with(), 100)
    assert record["extra_info"] == rows[1]["extra_info"] == dict(x=seen)
    assert json.loads(json.dumps(rows[1])) == rows[1]


# ---- any values, any writer


NAMES = st.sampled_from(["x", "y", "role", "content", "ä b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=5,
)
SHORT = st.text(max_size=3)
fixed = st.fixed_dictionaries
FUNCTION = fixed(dict(name=SHORT, arguments=st.dictionaries(NAMES, VALUES, max_size=3)))
MADE = st.lists(fixed(dict(id=SHORT, function=FUNCTION)), max_size=2)
MESSAGE = fixed(
    dict(role=st.sampled_from(["user", "assistant", "tool"]), content=st.text(max_size=6)),
    optional=dict(name=st.none() | SHORT, reasoning_content=st.none() | SHORT, tool_calls=st.none() | MADE),
)
MESSAGE_KEYS = "role", "content", "name", "reasoning_content", "tool_calls"
TALKS = st.lists(st.lists(MESSAGE, min_size=1, max_size=3), min_size=1, max_size=3)


def without_nulls(value):
    """A value as a struct keeps it."""
    if isinstance(value, dict):
        return {name: without_nulls(x) for name, x in value.items() if x is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


def kept(talk, keys):
    """A conversation as a writer keeps it, with these fields of its messages."""
    return [{key: message[key] for key in keys if key in message} for message in without_nulls(talk)]


def of_polars(talks):
    large = pa.list_(pa.struct([("role", pa.large_string()), ("content", pa.string_view())]))
    return pa.table(dict(messages=pa.array([kept(talk, MESSAGE_KEYS[:2]) for talk in talks], large)))


STRUCTS = {
    "arrow": in_structs,
    "pandas": WRITERS["pandas"][1],
    "polars": of_polars,
    "datasets": lambda talks: datasets.Dataset.from_list([dict(messages=x) for x in talks]).data.table,
}
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@QUIET
@given(talks=TALKS)
def test_what_is_written_is_read_back(talks, tmp_path_factory):
    path = tmp_path_factory.mktemp("x") / "x.parquet"
    write_parquet([dict(messages=talk) for talk in talks], path)
    found = [row["messages"] for row in load_rows(path, ["messages"])]
    assert found == [conversation(talk, "messages") for talk in talks]


@settings(QUIET, max_examples=20)
@pytest.mark.parametrize("writer", STRUCTS)
@given(talks=TALKS)
def test_trainers_read_what_all_others_read(writer, talks, tmp_path_factory):
    """Through the cache, of a column of any name."""
    path = tmp_path_factory.mktemp("x") / "x.parquet"
    wanted = dict(messages="said")
    try:
        pq.write_table(STRUCTS[writer](talks).rename_columns(["said"]), path)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return
    encode = lambda rows, numbers: [[dict(text=json.dumps(row["messages"]))] for row in rows]
    text = dict(text=pa.string())
    found, dropped = encoded_rows([path], tokenizer_with(), wanted, text, encode, path.name)
    [rows] = read_rows(path, wanted)
    said = [row["messages"] for row in rows]
    assert [json.loads(row["text"]) for row in found] == said and dropped == 0
    keys = MESSAGE_KEYS[:2] if writer == "polars" else MESSAGE_KEYS
    assert said == [conversation(kept(talk, keys), "messages") for talk in talks]


@QUIET
@given(value=VALUES | st.lists(VALUES | MESSAGE, max_size=3))
@example(value=[says("") | dict(tool_calls="[" * 10**5)])
@example(value=[calls("f", "1" * 5000)])
def test_anything_else_is_one_line(value):
    try:
        assert conversation(value, "messages")
    except ValueError as error:
        assert "\n" not in str(error) and "'messages" in str(error)


@QUIET
@given(
    records=st.lists(st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=4),
    ascii=st.booleans(),
    encoding=st.sampled_from(["utf-8", "utf-8-sig"]),
    end=st.sampled_from(["\n", "\r\n", "\n\n", "\n \n"]),
)
@example(records=[dict(x="\u2028\x85")], ascii=False, encoding="utf-8-sig", end="\n")
def test_json_of_any_writer(records, ascii, encoding, end, tmp_path_factory):
    """A document or lines, in a file named .json; lines in .jsonl."""
    folder = tmp_path_factory.mktemp("x")
    dump = partial(json.dumps, ensure_ascii=ascii)
    lines = end.join(map(dump, records)) + end
    texts = {"a.json": dump(records), "b.json": dump(records, indent=2), "c.json": lines, "d.jsonl": lines}
    for name, text in texts.items():
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
    written(tmp_path / "train.jsonl", rows)
    (tmp_path / "test.json").write_text(json.dumps(rows))
    sft_chat.main(sft_chat.Args(str(tmp_path / "out"), str(tmp_path), splits=("train", "test")))
    for name in ("train.jsonl", "test.json"):
        found = [record for _, record in source.Source(tmp_path / name).rows()]
        assert isinstance(found.pop(1), UnicodeEncodeError) and found == [rows[0], *rows[2:]]
        path = (tmp_path / "out" / name).with_suffix(".parquet")
        assert load_rows(path, ["messages"]) == found
    path = tmp_path / "x.parquet"
    for value in (2**70, "\ud83d"):
        with pytest.raises(ValueError, match=r"x.parquet: rows 0 to 1 cannot be written: [^\n]*$"):
            write_parquet([dict(x=value), dict(x=value)], path)
    row = dict(messages=[user(), calls("f", dict(x=2**70), "")])  # arguments are text
    write_parquet([row], path)
    assert load_rows(path, ["messages"]) == [row]


def test_numbers_beside_nulls_and_maps(tmp_path):
    """Rows whose later groups have a field, or a fraction, that the first has not; a map is a struct."""
    path = tmp_path / "x.parquet"
    many = source.BATCH_ROWS
    write_parquet([dict(x=None, y=1, z=[dict(a=1)])] * many + [dict(x="a", y=0.5, z=[dict(a=1, b=2)])], path)
    first, *_, last = load_rows(path, ["y", "z"])
    assert first["y"] == 1.0 and math.isclose(last["y"], 0.5) and last["z"] == [dict(a=1, b=2)]
    talk = [user(), says("3")]
    text = pa.string()
    said = pa.array([[[*message.items()] for message in talk]], pa.list_(pa.map_(text, text)))
    pq.write_table(pa.table(dict(messages=said)), path)
    assert load_rows(path, ["messages"]) == [dict(messages=talk)]
