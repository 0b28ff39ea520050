"""Rows of a data set as published: from the hub, or from a local copy of its files."""

import gzip
import itertools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.lib.chats import plain_rows

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz", ".arrow")
BATCH = 100  # rows that are read at a time


def read_hub(arguments):
    """Iterator of (place, record) of one split; arguments: those of `datasets.load_dataset`."""
    from datasets import load_dataset  # slow to import, and not needed for local files
    from huggingface_hub.errors import HTTPError

    try:
        batches = (
            load_dataset(**arguments).with_format("arrow").iter(BATCH)
        )  # as stored: no picture is decoded
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"nothing came from the hub for {arguments} ({reason});"
            " pass --local_dataset_path DIR, a directory with a copy of the data set"
        ) from None
    place = f"{arguments.get('data_files', arguments['path'])} {arguments['split']}"
    rows = itertools.chain.from_iterable(map(plain_rows, batches))
    return ((f"{place}: row {i}", row) for i, row in enumerate(rows))


def read_local(directory, split):
    """Iterator of (place, record) of one split of a local copy.

    Its files are, at any depth, SPLIT.parquet, its parts SPLIT-*.parquet, or all in a folder SPLIT; any of
    ENDINGS will do.  The record of a line that is no JSON is the ValueError.
    """
    files, others = [], []
    if not Path(directory).is_dir():
        problem = "is no directory" if Path(directory).exists() else "does not exist"
        raise ValueError(f"--local_dataset_path {directory} {problem}: pass the directory of the files")
    for path in sorted(Path(directory).rglob("*")):
        name = next((path.name.removesuffix(x) for x in ENDINGS if path.name.endswith(x)), None)
        folders = path.relative_to(directory).parts[:-1]
        if name is not None and (name == split or name.startswith(f"{split}-") or split in folders):
            files.append(path)
        elif name is not None:
            others.append(name)
    if not files:
        raise ValueError(
            f"{directory}: no file {split}.* or {split}-*.* and no folder {split} with files of the kinds"
            f" {' '.join(ENDINGS)}; files of another name: --splits OUT={(*others, 'NAME')[0]}"
        )
    return itertools.chain.from_iterable(map(read_file, files))


def read_file(path):
    """Yield (place, record) of a file."""
    try:
        for i, record in enumerate(_records(path)):
            yield f"{path}: row {i}", record
    except (
        OSError,
        EOFError,
        ValueError,
        RecursionError,
        pa.ArrowException,
    ) as error:  # damaged, or not what its name says
        raise ValueError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from None


def _records(path):
    if path.suffix == ".parquet":
        for batch in pq.ParquetFile(path).iter_batches(BATCH):
            yield from plain_rows(batch)
    elif path.suffix == ".arrow":
        for batch in pa.ipc.open_stream(pa.memory_map(str(path))):
            yield from plain_rows(batch)
    else:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            first = next(filter(str.strip, file), "")
            lines = ".jsonl" in path.suffixes and not first.lstrip().startswith("[")  # else a list of rows
            yield from _lines(itertools.chain([first], file)) if lines else _document(first + file.read())


def _lines(lines):
    return map(_parse, filter(str.strip, lines))


def _document(text):
    """Rows of a JSON document; `datasets` writes lines of JSON to files of this name, too."""
    try:
        rows = json.loads(text)
    except ValueError:
        lines = [*_lines(text.split("\n"))]
        if not lines or not isinstance(lines[0], dict):
            raise
        return lines
    return [_whole(row, text) for row in (rows if isinstance(rows, list) else [rows])]


def _whole(record, text):
    """A record; the UnicodeEncodeError of one with half a character, as a string that was cut may have."""
    try:
        if "\\ud" in text.lower():
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return error
    return record


def _parse(line):
    try:
        return _whole(json.loads(line), line)
    except ValueError as error:
        return error
    except RecursionError as error:
        return ValueError(str(error))
