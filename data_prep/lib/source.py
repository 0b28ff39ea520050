"""Files of rows, read in batches whose size follows from their bytes.

A file is parquet, JSON, lines of JSON or a stream of Arrow; a row is a dict, as JSON would have it.
"""

import gzip
import itertools
import json
import re
from datetime import date, time
from functools import cache, cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from system.text import one_line

JSON = ".jsonl", ".jsonl.gz", ".json", ".json.gz"
ENDINGS = ".parquet", *JSON, ".arrow"
BATCH_ROWS, BATCH_BYTES = 1000, 2**24  # a batch has at most so many rows, of about this size
FOR_REWARDS = "extra_info", "reward_model"
MEDIUM = re.compile(r"(\w*list<\w+: )?struct<(bytes|path): \w+, (bytes|path): \w+>")  # a type of Arrow
NO_JSON = re.compile("date|time|duration|decimal|binary")  # in the name of a type of Arrow
UNREADABLE = OSError, EOFError, ValueError, KeyError, RecursionError, pa.ArrowException


class Source:
    """A file of rows: the names of its columns, and its batches."""

    def __init__(self, path):
        """ValueError, in one line, for a file that is missing, or of another kind."""
        self.path = path
        file = Path(path).absolute()  # a relative path may be meant from elsewhere
        if file.is_dir():
            raise ValueError(f"{path}: a directory; name its files, as {path}/*.parquet")
        if not file.is_file():
            raise ValueError(f"{file}: no such file; write it with a script of data_prep/")
        self.kind = ".parquet"
        for ending in ENDINGS:
            if file.name.endswith(ending):
                self.kind = ending
        self.media = []  # columns of pictures, sounds or films
        self.metadata = {}
        if self.kind in JSON:
            self.names = names_in(file, self.kind, file.stat().st_mtime_ns)
        else:
            schema = self._stored_schema()
            self.names = schema.names
            self.metadata = schema.metadata or {}
            self.media = [field.name for field in schema if MEDIUM.match(str(field.type))]
        self.empty = not next(self.batches(), [])
        for name in self.names:
            if self.names.count(name) > 1:
                raise ValueError(f"{path}: it has the column {name!r} twice; rename one of them")

    def _stored_schema(self):
        if self.kind == ".arrow":
            return next(guarded(self.path, map(schema_of_stream, [self.path])))
        try:
            return pq.read_schema(self.path)
        except UNREADABLE as error:
            page = "docs/start/own-data-and-reward.md#files"
            reason = f"not a parquet file; {page} has the kinds ({one_line(error)})"
            raise ValueError(f"{self.path}: {reason}") from None

    def batches(self, names=None):
        """Yield lists of rows, with these columns or all; in place of a row of broken JSON the ValueError."""
        if self.kind in JSON:
            yield from guarded(self.path, by_bytes(_json_records(Path(self.path), self.kind)))
            return
        first = 0
        for batch in guarded(self.path, self._arrow(names)):
            yield named_rows(batch, self.path, first)
            first += len(batch)

    def rows(self):
        """Yield (place, row) of all rows, the errors of broken JSON among them."""
        for i, row in enumerate(itertools.chain.from_iterable(self.batches())):
            yield f"{self.path}: row {i}", row

    @cached_property
    def schema(self):
        """That of all rows in Arrow; JSON is read for it. ValueError if no parquet file can have it."""
        tables = self._tables()
        if self.kind not in JSON:
            tables = itertools.islice(tables, 1)
        try:
            schema = pa.unify_schemas([table.schema for table in tables], promote_options="permissive")
            pq.ParquetWriter(pa.BufferOutputStream(), schema).close()
        except (pa.ArrowException, OverflowError) as error:  # an integer over 64 bits
            raise ValueError(f"{self.path}: its rows fit no parquet file: {one_line(error)}") from None
        return schema

    def write(self, new, added):
        """Write all rows to the parquet file `new`, each with its row of `added`, an iterator of tables."""
        more = next(added)
        metadata = (self.schema.metadata or {}) | (more.schema.metadata or {})
        fields = pa.schema([*self.schema, *more.schema], metadata)
        with pq.ParquetWriter(new, fields) as writer:
            for rows in self._tables(self.schema):
                while len(rows):
                    if not len(more):
                        more = next(added)
                    n = min(len(rows), len(more))
                    columns = rows.slice(0, n).columns + more.slice(0, n).columns
                    writer.write_table(pa.table(columns, schema=fields))
                    rows = rows.slice(n)
                    more = more.slice(n)

    def _tables(self, schema=None):
        """Yield all rows in Arrow; those of JSON have this schema, or what is in a batch."""
        if self.kind in JSON:
            for batch in self.batches():
                names = dict.fromkeys(names_of(batch))
                yield pa.Table.from_pylist([names | row for row in batch], schema)
            return
        for batch in guarded(self.path, self._arrow(None)):
            yield pa.Table.from_batches([batch])

    def _arrow(self, names):
        if self.kind == ".arrow":
            for batch in pa.ipc.open_stream(pa.memory_map(str(self.path))):
                size = max(1, BATCH_BYTES * len(batch) // max(1, batch.nbytes))
                for i in range(0, len(batch), size):
                    yield batch.slice(i, size)
            return
        file = pq.ParquetFile(self.path)
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            size = BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
            size = min(BATCH_ROWS, max(1, size))
            yield from file.iter_batches(size, row_groups=[number], columns=names)


def guarded(path, batches):
    """The batches of a file; ValueError, in one line, if it cannot be read."""
    try:
        yield from batches
    except UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read ({one_line(error)}); write it again") from None


def schema_of_stream(path):
    return pa.ipc.open_stream(pa.memory_map(str(path))).schema


@cache
def names_in(path, kind, _):
    """The names of the columns of JSON: all of the file is read, once for each time that it was written."""
    records = guarded(path, _json_records(path, kind))
    return names_of(record for record, _ in records if isinstance(record, dict))


def names_of(rows):
    """The names of all columns, in the order in which rows have them."""
    return list(dict.fromkeys(itertools.chain.from_iterable(rows)))


def by_bytes(pairs):
    """Lists of the items of (item, bytes), each within BATCH_ROWS and about BATCH_BYTES."""
    batch = []
    size = 0
    for item, more in pairs:
        if batch and (len(batch) == BATCH_ROWS or size + more > BATCH_BYTES):
            yield batch
            batch = []
            size = 0
        batch.append(item)
        size += more
    if batch:
        yield batch


def _json_records(path, kind):
    """Yield (record, bytes); a line that is no JSON is its ValueError."""
    opener = open
    if kind.endswith(".gz"):
        opener = gzip.open
    with opener(path, "rb") as file:
        lines = filter(bytes.strip, file)
        first = next(lines, b"").removeprefix(b"\xef\xbb\xbf")
        if not first:
            return
        in_lines = "jsonl" in kind and not first.lstrip().startswith(b"[")  # else a list of rows
        if in_lines or isinstance(_parsed(first), dict):  # `datasets` writes lines to .json, too
            for line in itertools.chain([first], lines):
                yield _parsed(line), len(line)
            return
        text = first + file.read()
        rows = json.loads(text)
        if not isinstance(rows, list):
            rows = [rows]
        for row in rows:
            yield _whole(row, text), len(text) // len(rows)


def _parsed(line):
    try:
        return _whole(json.loads(line), line)
    except ValueError as error:
        return error
    except RecursionError as error:
        return ValueError(str(error))


def _whole(record, text):
    """A record; the UnicodeEncodeError of one with half a character, as a string that was cut may have."""
    try:
        if b"\\ud" in text.lower():
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return error
    return record


# ---- Arrow's values as JSON has them


def named_rows(batch, path, first):
    """`plain_rows` of a batch that begins at row `first`; ValueError with row and column if one has none."""
    try:
        return plain_rows(batch)
    except UNREADABLE:
        for i, name in itertools.product(range(len(batch)), batch.schema.names):
            try:
                plain_rows(batch.slice(i, 1).select([name]))
            except UNREADABLE as error:
                raise ValueError(f"{path}: row {first + i}: {name!r}: {one_line(error)}") from None
        raise


def plain_rows(table):
    """Rows of an Arrow table, without what Arrow fills in: in messages no field is null, and JSON is read.

    Arrow has one struct for all messages, and one for all arguments of tools: each has all fields of all.
    A null that JSON has is kept, because somebody wrote it. What a reward gets, `extra_info` and
    `reward_model`, is as JSON has it, because files of rollouts and checkpoints have it so: a date is text.
    """
    rows = table.to_pylist(maps_as_pydicts="strict")
    for field in table.schema:
        if isinstance(field.type, pa.JsonType):
            convert = json.loads
        elif field.name in FOR_REWARDS and NO_JSON.search(str(field.type)):
            convert = as_json
        elif pa.types.is_nested(field.type):
            convert = tidy
        else:
            continue
        for row in rows:
            if row[field.name] is not None:
                row[field.name] = convert(row[field.name])
    return rows


def as_json(value):
    """A value as JSON has it."""
    return json.loads(json.dumps(tidy(value), default=as_text))


def tidy(value, inside=False):
    """A value without nulls in messages, which are a list of dicts with a role; inside: in all dicts."""
    if isinstance(value, list):
        inside = inside or any(isinstance(x, dict) and {"role", "from"} & x.keys() for x in value)
        return [tidy(x, inside) for x in value]
    if isinstance(value, dict):
        return {name: tidy(x, inside) for name, x in value.items() if x is not None or not inside}
    return value


def as_text(value):
    """Dates, times, decimal numbers and bytes as text."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value)
