"""The rows of all data sets: their definition, a validator, a reader and a writer.

data_source: str                      which reward scores the row (rewards.SOURCES)
prompt: list of {role, content}       chat messages; role is one of ROLES in conversations.py
ability: str                          kind of task, for people
reward_model: {style, ground_truth}   style "rule..." or "model"; a rule needs the ground truth
extra_info: dict                      split, index (of the row in its source), question, answer, ...
                                      answer: a response with full marks, empty where the source has none

Dialogues for SFT have `messages`, preferences `prompt`, `chosen` and `rejected`: lists of {role, content}.
A `prompt` may be a string, one message of the user; `chosen` and `rejected` too, one of the assistant.
Messages with tool calls, other names of these columns, and further ones: conversations.py.
"""

import json
from os import PathLike
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.lib.conversations import (
    CONVERSATIONS,
    check_fields,
    check_refused,
    in_text,
    inputs_of,
    messages_of,
    opened,
    read_row,
    say_unknown,
    used,
)
from data_prep.lib.source import by_bytes
from system.files import replacing

OPTIONAL = ("images", "tools", "chat_template_kwargs")  # where it is missing or null, a row has none
KINDS = {  # columns of a file
    "RL": ("data_source", "prompt", "ability", "reward_model", "extra_info"),
    "SFT": ("messages",),
    "preferences": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
}


def load_rows(paths, columns):
    """Read files (a path or a list) into a list of dicts with the keys `columns`, in file order.

    A dotted column such as "extra_info.answer" is read from inside a struct and keeps its dotted name.
    Columns that the schema defines are validated; others must be there and not null.  Raises ValueError, in
    one line with file, row and field, for a file that cannot be read, and for a bad row.
    """
    if isinstance(paths, str | PathLike):
        paths = [paths]
    wanted = {name: name for name in columns if name not in OPTIONAL}
    rows = []
    for path in paths:
        for some in read_rows(path, wanted, say=False):
            rows += [{name: row[name] for name in columns} for row in some]
    say_unknown()
    return rows


def read_rows(path, wanted, say=True):
    """Yield lists of rows of a file as `read_row` has them. wanted: {what: column}, see `columns_of`.

    Raises as `load_rows`.
    """
    source, columns = opened(path, wanted, say)
    count = 0
    for batch in source.batches(used(source, columns)):
        rows = []
        for record in batch:
            try:
                rows.append(read_row(record, columns, path))
            except ValueError as error:
                raise ValueError(f"{path}: row {count + len(rows)}: {error}") from None
        yield rows
        count += len(rows)


def write_parquet(rows, path):
    """Write an iterable of dicts to `path`, all or nothing -> how many; the same rows give the same bytes.

    Raises ValueError, in one line with file, row and field, for a row that `load_rows` would refuse.
    """
    count = 0
    names = None
    schema = None
    parts = []
    with replacing(path) as new, TemporaryDirectory(prefix=f"{new.name}.", dir=new.parent) as folder:
        for batch in by_bytes((row, size_of(row)) for row in rows):
            where = f"{path}: rows {count} to {count + len(batch) - 1}"
            for i, row in enumerate(batch):
                batch[i] = stored(row, f"{path}: row {count + i}")
                found = names_of(row)
                names = names or found
                if found != names:  # pyarrow would fill in nulls, or drop what row 0 does not have
                    problem = f"columns {found} differ from those of row 0, {names}"
                    raise ValueError(f"{path}: row {count + i}: {problem}")
            optional = {name: None for name in OPTIONAL if any(name in row for row in batch)}
            part = f"{folder}/{count}"
            parts.append(part)
            try:
                pq.write_table(pa.Table.from_pylist([optional | row for row in batch]), part)
                found = pq.read_schema(part)
                schema = pa.unify_schemas([schema or found, found], promote_options="permissive")
            except pa.ArrowException as error:
                raise ValueError(f"{where}: a column of two types: {error}") from None
            except (OverflowError, UnicodeEncodeError) as error:  # an integer over 64 bits; half a character
                raise ValueError(f"{where} cannot be written: {error}") from None
            count += len(batch)
        if not count:
            raise ValueError(f"{path}: no rows to write")
        with pq.ParquetWriter(new, schema) as writer:  # it has the fields that only later rows have
            for part in parts:
                table = pq.read_table(part)
                # CAREFUL: `cast` makes broken structs where a field is null in all
                if table.schema != schema:
                    table = pa.Table.from_pylist(table.to_pylist(), schema)
                writer.write_table(table)
    return count


def size_of(value):
    """About the bytes of a value."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 8


def stored(row, where):
    """A row as it is written: a file has one struct for the calls of all rows, so they are JSON text."""
    checked = check_row(row, where)
    row = dict(row)
    for name in CONVERSATIONS:
        if isinstance(row.get(name), list):
            row[name] = [in_text(message) for message in checked[name]]
    for name in ("tools", "chat_template_kwargs"):
        if name in row:
            row[name] = None
            if checked[name]:
                row[name] = json.dumps(checked[name], ensure_ascii=False)
    return row


def check_row(row, where):
    """The row with its messages as chat templates read them; ValueError if it is not as defined above.

    The schema's fields that are in the row are checked.
    """
    try:
        check_fields(row)
        messages = {name: messages_of(row[name], name, name) for name in CONVERSATIONS if name in row}
        check_refused(row)
        inputs, _ = inputs_of(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return row | messages | {name: inputs[name] for name in OPTIONAL if name in row}


def names_of(row):
    """Names of the columns that no row may lack, and of the fields in columns."""
    names = sorted(row.keys() - set(OPTIONAL))
    inside = [name for name in names if isinstance(row[name], dict)]
    return names + sorted(f"{name}.{key}" for name in inside for key in row[name])
