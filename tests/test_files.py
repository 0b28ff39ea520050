"""Files of rows by any writer: all scripts read what was written, and refuse the rest in a line."""

import gzip
import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from tempfile import TemporaryDirectory

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from conftest import golden
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_columns import BASE, says, tokenizer_with, user, written

from data_prep import preference, sft_chat
from data_prep.lib import source
from data_prep.lib.cache import load_prompts
from data_prep.lib.conversations import conversation
from data_prep.lib.schema import load_rows, read_rows, write_parquet
from data_prep.lib.source import Source
from system.families import takes_images

# ---- conversations of any writer

NAMES = st.sampled_from(["x", "y", "role", "content", "ä b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=5,
)
SHORT = st.text(max_size=3)
fixed = st.fixed_dictionaries
FUNCTION = fixed(dict(name=SHORT, arguments=st.dictionaries(NAMES, VALUES, max_size=3)))
CALLS = st.lists(fixed(dict(id=SHORT, function=FUNCTION)), max_size=2)
MESSAGE = fixed(
    dict(role=st.sampled_from(["user", "assistant", "tool"]), content=st.text(max_size=6)),
    optional=dict(name=st.none() | SHORT, reasoning_content=st.none() | SHORT, tool_calls=st.none() | CALLS),
)
TALKS = st.lists(st.lists(MESSAGE, min_size=1, max_size=3), min_size=1, max_size=3)
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def without_nulls(value):
    """A value as a struct keeps it."""
    if isinstance(value, dict):
        return {name: without_nulls(x) for name, x in value.items() if x is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


def said_by(talk, *more):
    """The messages with their role and content, and perhaps more."""
    keys = "role", "content", *more
    return [{key: message[key] for key in keys if key in message} for message in talk]


def of_polars(talks):
    large = pa.list_(pa.struct([("role", pa.large_string()), ("content", pa.string_view())]))
    return pa.table(dict(said=pa.array([said_by(talk) for talk in talks], large)))


def calls_as_json(talks):
    said = [said_by(talk) for talk in talks]
    for message, kept in zip(sum(talks, []), sum(said, [])):
        kept["tool_calls"] = json.dumps(message.get("tool_calls") or [])
    return pa.table(dict(said=said))


def of_datasets(talks):
    features = datasets.Features(said=datasets.List(datasets.Json()))
    return datasets.Dataset.from_list([dict(said=talk) for talk in talks], features=features).data.table


def of_ours(talks):
    with TemporaryDirectory() as folder:
        write_parquet([dict(messages=talk) for talk in talks], f"{folder}/x.parquet")
        return pq.read_table(f"{folder}/x.parquet").rename_columns(["said"])


WRITERS = {  # how conversations get into a file; what is kept of one
    "ours": (of_ours, lambda talk: talk),
    "structs": (lambda talks: pa.table(dict(said=talks)), without_nulls),
    "polars": (of_polars, lambda talk: said_by(talk)),
    "calls as JSON": (calls_as_json, lambda talk: said_by(talk, "tool_calls")),
    "feature Json": (of_datasets, lambda talk: talk),
}


@settings(QUIET, max_examples=20)
@pytest.mark.parametrize("writer", WRITERS)
@given(talks=TALKS)
def test_trainers_read_what_all_others_wrote(writer, talks, tmp_path_factory):
    """Of a column of any name; no null that Arrow fills in, and each that JSON has."""
    write, kept = WRITERS[writer]
    path = tmp_path_factory.mktemp("x") / "x.parquet"
    try:
        table = write(talks)
        inside = pa.StructArray.from_arrays([table["said"].combine_chunks()], ["said"])
        pq.write_table(table.append_column("in", inside), path)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return
    expected = [conversation(kept(talk), "messages") for talk in talks]
    for column in ("said", "in.said"):
        [rows] = read_rows(path, dict(messages=column))
        assert [row["messages"] for row in rows] == expected


@QUIET
@given(value=VALUES | st.lists(VALUES | MESSAGE, max_size=3))
@example(value=[says("") | dict(tool_calls="[" * 10**5)])
@example(value=[says("") | dict(tool_calls=[dict(name="f", arguments="1" * 5000)])])
@example(value=[says("") | dict(tool_calls=[dict(name="f", arguments=dict(x=b""))])])
def test_anything_else_is_one_line(value):
    try:
        assert conversation(value, "messages")
    except ValueError as error:
        assert "\n" not in str(error) and "'messages" in str(error)


# ---- what a reward sees

DAY, HOUR, WORD = date(2020, 1, 2), datetime(2020, 1, 2, 3), pa.string()
SEEN = [  # of `extra_info`: a type of Arrow, a value, what a reward sees
    (pa.timestamp("us"), HOUR, "2020-01-02T03:00:00"),
    (pa.timestamp("ns", tz="UTC"), HOUR, "2020-01-02T03:00:00+00:00"),
    (pa.date32(), DAY, "2020-01-02"),
    (pa.time64("us"), time(3, 4), "03:04:00"),
    (pa.duration("s"), timedelta(seconds=61), "0:01:01"),
    (pa.decimal256(40, 2), Decimal("1.50"), "1.50"),
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


# ---- JSON


@pytest.mark.parametrize("case", golden("json_files"), ids=lambda case: f"{case['why']}, {case['file']}")
def test_json_of_any_writer(case, tmp_path):
    """A document, or lines, with the error in place of a row that is broken."""
    path = tmp_path / case["file"]
    path.write_bytes(case["text"].encode())
    if "line" in case:
        with pytest.raises(ValueError, match=rf"{case['file']}: {case['line']}"):
            source.Source(path)
        return
    found = enumerate(source.Source(path).rows())
    for (i, (place, row)), expected in zip(found, case["rows"], strict=True):
        assert place == f"{path}: row {i}"
        assert row == expected or (expected == "error" and isinstance(row, ValueError))


# ---- scripts that write rows


def test_what_data_scripts_leave_out(tmp_path, capsys):
    """Empty turns, equal replies, half a character; calls of a later group of rows are kept."""
    call = dict(id="1", function=dict(name="f", arguments=dict(x=None, y=[1, "a"])))
    asked = [user(), says("") | dict(tool_calls=[call]), dict(role="tool", content="3", tool_call_id="1")]
    kept = [*asked, says("\U0001f600") | dict(reasoning_content="Hm.", name="bot")]
    left_out = [[user(), says("\ud83d")], [user(), says(" ")], [user(), says(""), user(), says("x")]]
    many = [[user(), says("x")]] * (source.BATCH_ROWS + 7)
    rows = [dict(messages=talk, weight=1) for talk in [*many, *left_out, kept]]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for file in (tmp_path / "a.json", written(tmp_path / "a.jsonl", rows)):
        sft_chat.main(sft_chat.Args(str(tmp_path), str(file)))
        found = [row["messages"] for row in load_rows(tmp_path / "train.parquet", ["messages"])]
        assert found == [*many, kept]
        line = "; 1 left out: broken (named above); 2 left out: an empty turn of the assistant\n"
        assert line in capsys.readouterr().out
    pairs = [dict(chosen=kept, rejected=[user(), says("no")]), dict(chosen=asked[:2], rejected=asked[:2])]
    preference.main(preference.Args(str(tmp_path), written(tmp_path / "a.jsonl", pairs)))
    found = load_rows(tmp_path / "train.parquet", ["prompt", "chosen", "rejected"])
    assert found == [dict(prompt=kept[:1], chosen=kept[1:], rejected=[says("no")])]
    assert "1 left out: both replies are the same" in capsys.readouterr().out


def test_what_no_file_can_hold(tmp_path):
    path = tmp_path / "x.parquet"
    for value in (2**70, "\ud83d"):
        with pytest.raises(ValueError, match=r"x.parquet: rows 0 to 1 cannot be written: [^\n]*$"):
            write_parquet([dict(x=value), dict(x=value)], path)
    call = dict(function=dict(name="f", arguments=dict(x=2**70)))  # arguments are text
    row = dict(messages=[user(), says("") | dict(tool_calls=[call])])
    write_parquet([row], path)
    assert load_rows(path, ["messages"]) == [row]


def test_numbers_next_to_nulls_and_maps(tmp_path):
    """Rows whose later groups have a field, or a fraction, that the first has not; a map is a struct."""
    path = tmp_path / "x.parquet"
    last = dict(x="a", y=0.5, z=[dict(a=1, b=2)])
    write_parquet([*[dict(x=None, y=1, z=[dict(a=1)])] * source.BATCH_ROWS, last], path)
    assert load_rows(path, ["y", "z"])[-1] == dict(y=0.5, z=last["z"])
    talk = [user(), says("3")]
    maps = pa.array([[[*message.items()] for message in talk]], pa.list_(pa.map_(WORD, WORD)))
    pq.write_table(pa.table(dict(messages=maps)), path)
    assert load_rows(path, ["messages"]) == [dict(messages=talk)]


def test_all_of_a_file_is_looked_at(tmp_path):
    """Pictures and columns that begin late, in every kind of file."""
    transformers.Qwen2_5_VLConfig().save_pretrained(tmp_path / "vl")
    row = dict(prompt="<image>What?", completion="a", images=["x.png"])
    rows = [dict(prompt="q" * 100, completion="a")] * 1500 + [row]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    table = pa.Table.from_pylist([row])
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    pq.write_table(table, tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.json.gz", "a.arrow", "a.parquet"):
        path = str(tmp_path / name)
        assert Source(path).names == ["prompt", "completion", "images"]
        assert takes_images(str(tmp_path / "vl"), (path,))
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps(dict(messages=[dict(role="user", content='JSON such as {"image": 1}')])))
    assert not takes_images(str(tmp_path / "vl"), (str(text),))
