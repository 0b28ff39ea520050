"""The rows of all data sets: their definition, a validator, a reader and a writer.

data_source: str                      which reward scores the row (rewards.SOURCES)
prompt: list of {role, content}       chat messages; role is one of ROLES in chats.py
ability: str                          kind of task, for people
reward_model: {style, ground_truth}   style "rule..." or "model"; a rule needs the ground truth
extra_info: dict                      split, index (of the row in its source), question, answer, ...
                                      answer: a response with full marks, empty where the source has none

Dialogues for SFT have `messages`, preferences `prompt`, `chosen` and `rejected`: lists of {role, content}.
A `prompt` may be a string, one message of the user; `chosen` and `rejected` too, one of the assistant.
Messages with tool calls: chats.py.
Any row may have `images`: a list of {bytes, path}, of which one is null, for each <image> in its prompt.
Any row may have `tools`: JSON schemas that its chat template shows, or their JSON text.
"""

import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import replacing
from data_prep.lib.chats import conversation, has_map, plain_rows, say_unknown, storable, tools_of

MESSAGES = ("prompt", "messages", "chosen", "rejected")
FIELDS = {
    "data_source": str,
    "ability": str,
    "reward_model": dict,
    "extra_info": dict,
}
OPTIONAL = ("images", "tools")  # where it is missing or null, a row has none
KINDS = {  # columns of a file
    "RL": ("data_source", "prompt", "ability", "reward_model", "extra_info"),
    "SFT": ("messages",),
    "preferences": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
}
ROW_GROUP = 500  # rows that are written at a time: the tests of a programming problem can be megabytes


def load_rows(paths, columns):
    """Read parquet files (a path or a list) into a list of dicts with the keys `columns`, in file order.

    A dotted column such as "extra_info.answer" is read from inside a struct and keeps its dotted name.
    Columns that the schema defines are validated; others must be there and not null.  Raises ValueError, in
    one line with file, row and field, for a file that is missing, empty or not parquet, and for a bad row.
    """
    rows = []
    for path in [paths] if isinstance(paths, str) or hasattr(paths, "__fspath__") else paths:
        file, names = open_parquet(path, columns)
        rows += checked(file.read(columns=names), columns, path)
    say_unknown()
    return rows


def whole_rows(path, columns):
    """Yield the rows of a file with all their columns, of which only `columns` may not be null.

    Raises as `load_rows`.
    """
    file, _ = open_parquet(path, columns)
    for i, record in enumerate(plain_rows(file.read())):
        row = check_row(record, f"{path}: row {i}")
        for column in columns:
            _get(row, column, f"{path}: row {i}")
        yield row
    say_unknown()


def open_parquet(path, columns):
    """-> a pq.ParquetFile, and the names of its columns that `columns` are in. Raises as `load_rows`."""
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        place = Path(path).absolute()  # a relative path may be meant from elsewhere
        raise ValueError(f"{place}: no such file; write it with a script of data_prep/") from None
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        if Path(path).is_dir():
            raise ValueError(f"{path}: a directory; name its files, as {path}/*.parquet") from None
        page = "docs/start/own-data-and-reward.md converts JSON"
        raise ValueError(f"{path}: not a parquet file; {page} ({reason})") from None
    wanted, names = list(dict.fromkeys(column.split(".")[0] for column in columns)), file.schema_arrow.names
    wanted = [name for name in wanted if name in names or name not in OPTIONAL]
    for name in wanted:
        if name not in names:
            raise ValueError(f"{path}: no column {name!r}; it has {', '.join(names)}")
        if has_map(file.schema_arrow.field(name).type):  # Arrow gives pairs, not a dict
            raise ValueError(f"{path}: column {name!r} has a map; write structs, lists, or JSON text")
    if not file.metadata.num_rows:
        raise ValueError(f"{path}: no rows; write it again with at least one")
    return file, wanted


def checked(table, columns, path, first=0):
    """Yield the rows of a table, row `first` and the next ones of a file, as `load_rows` gives them."""
    for i, record in enumerate(plain_rows(table), first):
        record = check_row(record, f"{path}: row {i}")
        yield {column: _get(record, column, f"{path}: row {i}") for column in columns}


def write_parquet(rows, path):
    """Write an iterable of dicts to `path`, all or nothing -> how many; the same rows give the same bytes.

    Raises ValueError, in one line with file, row and field, for a row that `load_rows` would refuse.
    """
    rows, count, first, schema, parts = iter(rows), 0, None, None, []
    with replacing(path) as new, TemporaryDirectory(prefix=f"{new.name}.", dir=new.parent) as folder:
        while batch := list(itertools.islice(rows, ROW_GROUP)):
            for i, row in enumerate(batch, start=count):
                chats = check_row(row, f"{path}: row {i}")
                first = first or _names(row)
                if _names(row) != first:  # pyarrow would fill in nulls, or drop what row 0 does not have
                    raise ValueError(
                        f"{path}: row {i}: columns {_names(row)} differ from those of row 0, {first}"
                    )
                lists = [name for name in MESSAGES if isinstance(row.get(name), list)]
                batch[i - count] = row | {name: storable(chats[name]) for name in lists}
                if "tools" in row:  # as JSON text: a file has one struct for the schemas of all rows
                    tools = json.dumps(chats["tools"], ensure_ascii=False)
                    batch[i - count]["tools"] = tools if chats["tools"] else None
            given = {name: None for name in OPTIONAL if any(name in row for row in batch)}
            batch = [given | row for row in batch]
            try:
                parts.append(f"{folder}/{count}")
                pq.write_table(pa.Table.from_pylist(batch), parts[-1])
                now = pq.read_schema(parts[-1])
                schema = pa.unify_schemas([schema or now, now], promote_options="permissive")
            except pa.ArrowException as error:
                raise ValueError(f"{path}: rows {count} to {i}: a column of two types: {error}") from None
            except (OverflowError, UnicodeEncodeError) as error:  # an integer over 64 bits; half a character
                raise ValueError(f"{path}: rows {count} to {i} cannot be written: {error}") from None
            count += len(batch)
        if not count:
            raise ValueError(f"{path}: no rows to write")
        with pq.ParquetWriter(new, schema) as writer:  # it has the fields that only later rows have
            for part in parts:
                table = pq.read_table(part)
                if (
                    table.schema != schema
                ):  # CAREFUL: `cast` makes broken structs where a field is null in all
                    table = pa.Table.from_pylist(table.to_pylist(), schema)
                writer.write_table(table)
    return count


def check_row(row, where):
    """The row with its messages as chat templates read them; ValueError if it is not as defined above.

    The schema's fields that are in the row are checked.
    """
    for name, kind in FIELDS.items():
        if name in row and not isinstance(row[name], kind):
            raise ValueError(f"{where}: {name!r} must be a {kind.__name__}, not {row[name]!r:.60}")
    chats = {name: _messages(row[name], name, where) for name in MESSAGES if name in row}
    for i, image in enumerate(row.get("images") or ()):
        if not isinstance(image, dict) or not (image.get("bytes") or image.get("path")):
            raise ValueError(f"{where}: 'images[{i}]' must be {{bytes, path}}, with one of them")
    if "tools" in row:
        try:
            row = row | dict(tools=tools_of(row["tools"]))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if "reward_model" in row:
        style, truth = (row["reward_model"].get(key) for key in ("style", "ground_truth"))
        # published data sets name a kind of rule too, such as rule-lighteval/MATH_v2
        if not isinstance(style, str) or not (style == "model" or style.startswith("rule")):
            raise ValueError(f"{where}: 'reward_model.style' is {style!r}; use 'rule' or 'model'")
        if style != "model" and truth is None:
            raise ValueError(f"{where}: 'reward_model.ground_truth' is missing; a rule compares with it")
    return row | chats


def _messages(value, name, where):
    try:
        return conversation(value, name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _get(row, column, where):
    """The value of a possibly dotted column; ValueError if it is not there, null, or no messages."""
    value = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None and column in OPTIONAL:
        return []
    if value is None:
        raise ValueError(f"{where}: {column!r} is missing or null; fill it in or drop the row")
    if value == [] and column not in OPTIONAL:
        raise ValueError(f"{where}: {column!r} is an empty list; fill it in or drop the row")
    if isinstance(value, list) and any(
        isinstance(x, dict) and not x.keys().isdisjoint(("role", "from")) for x in value
    ):
        return value if column in MESSAGES else _messages(value, column, where)
    return value


def _names(row):
    """Names of the columns that no row may lack, and of the fields in columns."""
    return sorted(row.keys() - set(OPTIONAL)) + sorted(
        f"{key}.{name}" for key in row if isinstance(row[key], dict) for name in row[key]
    )
