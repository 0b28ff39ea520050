"""What the scripts of this directory share: flags, and the way of rows from a source to parquet."""

import itertools
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

from data_prep.lib.conversations import say_unknown
from data_prep.lib.schema import check_row, write_parquet
from data_prep.lib.source import ENDINGS, Source, plain_rows
from system.arguments import command_line, unread, unusable
from system.text import one_line

BROKEN = (ValueError, TypeError, LookupError, AttributeError)  # what a mapping raises on an unexpected record
SHOWN = 10  # broken rows that are named


class LeftOut(Exception):
    """A row that does not belong to the data set; such rows are counted by their reason."""


@dataclass
class Args:
    local_save_dir: str
    """Directory for the parquet files."""
    local_dataset_path: str | None = None
    """Directory with a copy of the data set, a file or folder for each split; or a file; None: the hub."""
    splits: tuple[str, ...] = ()
    """Splits to read, each into SPLIT.parquet; OUT=SPLIT writes OUT.parquet; none: all published splits."""
    max_samples: int | None = None
    """Rows of each split to keep, drawn with the seed; None: all."""
    seed: int = 0
    """With --max_samples: seed of the draw."""


def run(main, args_class):
    """Run a script; a ValueError becomes one line, and `SCRIPT ... | head` ends it without one."""
    sys.set_int_max_str_digits(0)  # tests of programs have integers of more than Python's 4,300 digits
    try:
        args = command_line(args_class)
        values = vars(args)
        defaults = {field.name: field.default for field in fields(args)}
        if problem := unusable(values, defaults, unread(values, args_class)):
            raise ValueError(problem)
        main(args)
    except BrokenPipeError:
        os._exit(0)
    except ValueError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def prepare(args, splits, hub, make_row):
    """Read the splits, write them and report.  All sources are found before the first file is written.

    splits: the default of --splits.  hub(split): the arguments of `datasets.load_dataset`.
    """
    if args.max_samples is not None and args.max_samples < 1:
        raise ValueError(f"--max_samples is {args.max_samples}; it must be at least 1")
    sources = {}
    local = args.local_dataset_path
    names = args.splits or splits
    if local and Path(local).is_file():  # it is one split, which it may be named after
        named = [name for name in names if Path(local).name.startswith(name.rpartition("=")[2])]
        names = (*named, *names)[:1]
    for name in names:
        out, _, split = name.rpartition("=")
        sources[out or split] = read_hub(hub(split)) if local is None else read_local(local, split)
    write_splits(args.local_save_dir, sources, make_row, args.max_samples, args.seed)


def read_hub(arguments):
    """Iterator of (place, record) of one split; arguments: those of `datasets.load_dataset`."""
    from datasets import load_dataset  # slow to import, and not needed for local files
    from huggingface_hub.errors import HTTPError

    try:  # in Arrow, as stored: no picture is decoded
        batches = load_dataset(**arguments).with_format("arrow").iter(100)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(
            f"nothing came from the hub for {arguments} ({reason});"
            " pass --local_dataset_path, a directory with a copy of the data set, or a file"
        ) from None
    place = f"{arguments.get('data_files', arguments['path'])} {arguments['split']}"
    rows = itertools.chain.from_iterable(map(plain_rows, batches))
    return ((f"{place}: row {i}", row) for i, row in enumerate(rows))


def read_local(place, split):
    """Iterator of (place, record) of a file, or of one split of a local copy.

    Its files are, at any depth, SPLIT.parquet, its parts SPLIT-*.parquet, or all in a folder SPLIT; any of
    ENDINGS will do.  The record of a line that is no JSON is the ValueError.
    """
    files = []
    others = []
    if Path(place).is_file():
        return Source(place).rows()
    if not Path(place).is_dir():
        raise ValueError(f"--local_dataset_path {place} does not exist: pass a file, or their directory")
    for path in sorted(Path(place).rglob("*")):
        name = next((path.name.removesuffix(x) for x in ENDINGS if path.name.endswith(x)), None)
        folders = path.relative_to(place).parts[:-1]
        if name is not None and (name == split or name.startswith(f"{split}-") or split in folders):
            files.append(path)
        elif name is not None:
            others.append(name)
    if not files:
        raise ValueError(
            f"{place}: no file {split}.* or {split}-*.* and no folder {split} with files of the kinds"
            f" {' '.join(ENDINGS)}; files of another name: --splits OUT={(*others, 'NAME')[0]}"
        )
    return itertools.chain.from_iterable(Source(path).rows() for path in files)


def write_splits(directory, sources, make_row, max_samples=None, seed=0):
    """Write OUT.parquet for each {OUT: iterator of (place, record)}, and say what became of the rows.

    make_row(record, split, index) returns a row of the schema or raises LeftOut; a row on which it fails is
    named and left out.
    """
    prompts = {}
    for out, records in sources.items():
        path = Path(directory) / f"{out}.parquet"
        left_out = Counter()
        rows = usable_rows(records, make_row, out, left_out)
        rows = rows if max_samples is None else draw(rows, max_samples, seed)
        rows = remember(rows, prompts.setdefault(path.name, []))
        count = write_parquet(rows, path)
        say_unknown("it is left out")
        print("; ".join(filter(None, (f"{path}: {count} rows", reasons(left_out)))))
    for line in repeated_prompts(prompts):
        print(line)


class Noted(dict):
    """A record that notes which of its columns are read."""

    def __init__(self, record, read):
        super().__init__(record)
        self.read = read

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)


def usable_rows(records, make_row, out, left_out):
    """Yield the rows; count the others in `left_out`; name the first broken ones, and unread columns."""
    used = 0
    broken = "broken (named above)"
    names = {}
    read = set()
    for index, (place, record) in enumerate(records):
        try:
            if isinstance(record, ValueError):
                raise record
            if isinstance(record, dict):  # else a script of this directory has made it
                names |= dict.fromkeys(record)
                record = Noted(record, read)
            row = make_row(record, out, index)
            check_row(row, out)
        except LeftOut as reason:
            left_out[str(reason)] += 1
        except BROKEN as error:
            left_out[broken] += 1
            if left_out[broken] <= SHOWN:
                lacks = isinstance(error, KeyError) and f"no column {error}; it has {', '.join(record)}"
                print(f"{place} is broken: {lacks or f'{type(error).__name__}: {error}'}", file=sys.stderr)
        else:
            used += 1
            yield row
    if used and (rest := [name for name in names if name not in read]):
        print(f"{out}.parquet: not read: {', '.join(rest)}")
    if left_out[broken] > SHOWN:
        print(f"{left_out[broken] - SHOWN} more rows are broken", file=sys.stderr)
    if not used:
        raise ValueError(f"no rows for {out}.parquet: {reasons(left_out) or 'the source is empty'}")


def reasons(left_out):
    """Numbers of the rows that were left out, in words."""
    return "; ".join(f"{n} left out: {why}" for why, n in left_out.items() if n)


def draw(rows, n, seed):
    """n of the rows in their order, all choices equally likely (reservoir sampling)."""
    rng = random.Random(seed)
    kept = []
    for i, row in enumerate(rows):
        place = i if i < n else rng.randrange(i + 1)
        if place < n:
            kept[place : place + 1] = [(i, row)]
    return [row for _, row in sorted(kept, key=lambda pair: pair[0])]


def remember(rows, keys):
    """Yield the rows, appending their `prompt_key` to `keys`."""
    for row in rows:
        keys.append(prompt_key(row))
        yield row


def prompt_key(row):
    """A number, the same for prompts that differ in white space alone; of a dialogue: up to the reply."""
    messages = row.get("prompt") or itertools.takewhile(lambda m: m["role"] != "assistant", row["messages"])
    text = " ".join(" ".join(message["content"] for message in messages).split())
    return hash((text, *(image.get("bytes") or image.get("path") for image in row.get("images") or ())))


def repeated_prompts(prompts):
    """Yield a line for two files with prompts in common, or one in which prompts stand twice.

    prompts: {name of a file: [prompt_key of each row]}.
    """
    seen = {}
    found = {}
    for name, keys in prompts.items():
        for row, key in enumerate(keys):
            if key in seen:
                found.setdefault((name, seen[key]), []).append(row)
            else:
                seen[key] = name
    for (name, other), rows in found.items():
        some = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
        where = "an earlier row" if name == other else other
        yield f"{name}: {len(rows)} rows have the prompt of {where}: {some}"
