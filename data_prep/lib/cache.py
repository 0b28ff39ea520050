"""Rows that one rank of a machine reads, checks and tokenises, once: an Arrow file that all ranks map.

An entry of the cache is a directory CACHE/KEY with the file and the number of rows that were read. The key is
a hash of all that the entry depends on.
"""

import ctypes
import hashlib
import inspect
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from bisect import bisect
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from datetime import date
from functools import partial
from itertools import accumulate, chain
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
import transformers
import xxhash
from filelock import FileLock, Timeout
from huggingface_hub.constants import HF_HOME
from tqdm import tqdm

from data_prep.lib import conversations, images, schema, source, templates
from system.arguments import fail

BOOL, INT, BOOLS, IDS = pa.bool_(), pa.int64(), pa.list_(pa.bool_()), pa.list_(pa.int32())
AT_ONCE = 100  # rows that a process tokenises: all cores are to have some
IMAGES = pa.list_(pa.struct(dict(bytes=pa.binary(), path=pa.string())))


class Rows:
    """Rows of a table of Arrow; `row` has some fields as JSON."""

    def __init__(self, table):
        self.table, self.batches = table, table.to_batches()
        self.ends = [*accumulate(map(len, self.batches))]

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        i = range(len(self))[i]
        n = bisect(self.ends, i)  # a table's own `slice` goes through all batches
        [row] = self.batches[n].slice(i - self.ends[n] + len(self.batches[n]), 1).to_pylist()
        return json.loads(row.pop("row", "{}")) | row

    def __iter__(self):
        """All rows, a batch at a time: one of them alone takes three times as long."""
        for batch in self.batches:
            for row in batch.to_pylist():
                yield json.loads(row.pop("row", "{}")) | row

    def column(self, name):
        """A column, in Arrow: without a Python object for each row."""
        return self.table[name]

    def unique(self, name):
        return {*self.table[name].unique().to_pylist()}


def load_prompts(paths, tokenizer, max_length, tools=None):
    """Rows of a list of RL data files, with `prompt_ids` (chat template, generation prompt) and `index`.

    Prompts without a token, or of more than max_length, are dropped.  tools: JSON schemas that the chat
    template shows, where rows have no column `tools`.  With a processor for tokenizer also `images` and
    `sampler_ids`, see images.py.  Returns Rows, and how many were dropped.
    """
    sees = hasattr(tokenizer, "image_processor")
    how = dict(add_special_tokens=False, return_attention_mask=False, verbose=False)

    def encode(rows, numbers):
        try:
            for row in rows:
                conversations.check_prompt(row["prompt"])
            shown = [templates.given_by(row, tools, tokenizer) for row in rows]
            if sees:
                values = [images.encode_prompt(row, tokenizer, x) for row, x in zip(rows, shown)]
            else:
                texts = [templates.render(row["prompt"], tokenizer, x) for row, x in zip(rows, shown)]
                values = [dict(prompt_ids=ids) for ids in tokenizer(texts, **how)["input_ids"]]
        except ValueError:
            if len(rows) > 1:  # which of them? The first that raises it again
                return (values for row, i in zip(rows, numbers) for values in encode([row], [i]))
            raise
        for i, row, found, x in zip(numbers, rows, values, shown):
            text = json.dumps(
                {name: row[name] for name in conversations.RL} | dict(tools=x), default=source.as_text
            )
            found |= dict(group=i, images=row["images"], row=text, data_source=row["data_source"])
        return [[row] * (0 < len(row["prompt_ids"]) <= max_length) for row in values]

    fields = dict(prompt_ids=IDS, group=INT, row=pa.string(), data_source=pa.string())
    fields |= dict(sampler_ids=IDS, images=IMAGES) if sees else {}
    rows, dropped = encoded_rows(paths, tokenizer, conversations.RL, fields, encode, (max_length, tools))
    if paths and not rows:
        names = ", ".join(map(str, paths))
        raise ValueError(f"{names}: no prompt of 1 to {max_length} tokens (--max_prompt_length)")
    return rows, dropped


def load_prompt_files(tokenizer, batch_size, train_files, val_files, max_length, tools=None):
    """-> rows of training, of which a batch is filled, and of validation, and a line about them.

    As `load_prompts` gives them.
    """
    train_rows, dropped = load_prompts(train_files, tokenizer, max_length, tools)
    val_rows, val_dropped = load_prompts(val_files, tokenizer, max_length, tools)
    if len(train_rows) < batch_size:
        fail(f"--train_batch_size {batch_size} is more than the {len(train_rows)} prompts")
    summary = f"{len(train_rows)} training and {len(val_rows)} validation prompts"
    dropped = f"{dropped + val_dropped} dropped: empty or over {max_length} tokens"
    return train_rows, val_rows, f"{summary} ({dropped})"


def encoded_rows(paths, tokenizer, wanted, fields, encode, about, code=()):
    """Rows of files, of the columns that `columns_of` finds for `wanted` -> Rows, number dropped.

    encode(rows as `read_row` has them, their numbers over all files) -> of each row the rows that it becomes,
    with values of the fields; none: it is dropped. about, code: what else the result depends on, values and
    functions. Raises ValueError, in one line with file and row, in LOCAL_RANK 0; the others wait.
    Rows with images are an error unless they are a field. `index` of a row is its number over all files.
    """
    fields = pa.schema(dict(fields, index=INT))
    for path in paths:
        conversations.opened(path, wanted)
    entry = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets"), "post_training")
    entry /= key_of(paths, tokenizer, (wanted, str(fields), about), code)
    while int(os.environ.get("LOCAL_RANK", 0)) and not entry.is_dir():
        time.sleep(0.05)  # if LOCAL_RANK 0 fails, the launcher ends this one
    if not entry.is_dir():
        try:
            build(entry, paths, wanted, fields, encode)
        except OSError as error:  # of this machine: rank 0, if on another, would not say it
            remedy = "set HF_DATASETS_CACHE or HF_HOME to a directory with space that you may write to"
            sys.exit(f"error: {entry.parent}: tokenised rows cannot be written ({error}); {remedy}")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else every later fork gives a warning
    try:
        rows = Rows(pa.ipc.open_file(pa.memory_map(str(entry / "rows.arrow"))).read_all())
        count = int((entry / "count").read_text())
    except (pa.ArrowException, OSError, ValueError) as error:
        sys.exit(f"error: {entry} is damaged ({str(error).splitlines()[0]}): delete it")
    for field in fields:
        if field.type == IDS and len(rows):
            images.check_known(pc.max(pc.list_flatten(rows.column(field.name))).as_py() or 0, tokenizer)
    return rows, count - pc.count_distinct(rows.column("index")).as_py()


def key_of(paths, tokenizer, about, code):
    """Hash of the files and their endings, the tokenizer and its chat template, code, and other arguments."""
    about = *about, transformers.__version__, tokenizers.__version__, pa.__version__
    about += tuple(str(Path(path).suffixes[-2:]) for path in paths)
    about += tuple(map(inspect.getsource, code))
    if "strftime_now" in str(tokenizer.chat_template):
        about += (date.today(),)  # which the template writes into the prompt
    digest = xxhash.xxh3_128(repr(about).encode())
    with tempfile.TemporaryDirectory() as state:
        tokenizer.save_pretrained(state)
        ours = Path(__file__).parent.glob("*.py")
        for path in [*paths, *sorted(map(str, ours)), *sorted(filter(Path.is_file, Path(state).rglob("*")))]:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()


def build(entry, *how):
    """Make an entry of the cache under another name, and rename it when it is whole."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    for other in entry.parent.glob("*.new"):  # if its builder was killed, the lock is free
        with suppress(Timeout), FileLock(other.with_suffix(".lock"), timeout=0):
            shutil.rmtree(other, ignore_errors=True)
    new = entry.with_suffix(".new")
    with FileLock(entry.with_suffix(".lock")):
        if entry.is_dir():  # by another run, meanwhile
            return
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir()
            (new / "count").write_text(str(tokenise(new / "rows.arrow", *how)))
            os.replace(new, entry)
            conversations.say_unknown()
        finally:
            shutil.rmtree(new, ignore_errors=True)


def tokenise(new, paths, wanted, fields, encode):
    """Write the Arrow file `new` of the rows of files -> how many there were."""
    count, quiet = 0, not sys.stderr.isatty() or int(os.environ.get("RANK", 0)) > 0
    bar = tqdm(desc="tokenising", unit=" rows", disable=quiet, delay=3)
    work = partial(rows_of, fields=fields, encode=encode)
    with open(new, "wb") as out, bar:
        with pa.ipc.new_file(out, fields) as file:
            for number, batch in on_all_cores(work, numbered(paths, wanted)):
                file.write(batch)
                count += number
                bar.update(number)
        out.flush()
        os.fsync(out.fileno())  # so that a power cut leaves no entry with holes
    return count


def numbered(paths, wanted):
    """Yield lists of rows of files, the number of the first one over all files and in its file, the file."""
    count = 0
    for path in paths:
        first = count
        for batch in schema.read_rows(path, wanted):
            for i in range(0, len(batch), AT_ONCE):
                rows = batch[i : i + AT_ONCE]
                yield rows, count, f"{path}: row ", first
                count += len(rows)


def on_all_cores(function, items):
    """Yield function(item) in the order of the items; after the first in forks, one for each core."""
    cores = 1
    if sys.platform == "linux":  # elsewhere a fork may not use what has been loaded
        cores = len(os.sched_getaffinity(0))
    pool = None
    waiting = deque()
    with ExitStack() as stack:
        for number, item in enumerate(items):
            if number == 0 or cores == 1:
                yield function(item)
                continue
            if pool is None:
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else a fork gives a warning
                fork = multiprocessing.get_context("fork")
                pool = ProcessPoolExecutor(cores, fork, begin_fork, (function,))
                stack.callback(pool.shutdown, cancel_futures=True)
            waiting.append(pool.submit(call_in_fork, item))
            if len(waiting) == 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def begin_fork(function):
    """What a fork calls is inherited: it cannot be sent. The fork ends with the process that made it."""
    global in_fork
    in_fork = function
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def call_in_fork(item):
    return in_fork(item)


def rows_of(item, fields, encode):
    """-> how many rows an item of `numbered` has, and what `encode` makes of them."""
    rows, count, where, first = item
    values, numbers = [], range(count, count + len(rows))
    for i, row in zip(numbers, rows):
        if row["images"] and "images" not in fields.names:
            remedy = "take a model with a vision tower, or drop the pictures and the marks <image>"
            raise ValueError(f"{where}{i - first} has images, which are not read here: {remedy}")
    try:
        for i, some in zip(numbers, encode(rows, numbers)):
            values.append([x | dict(index=i) for x in some])
    except (TypeError, KeyError, AttributeError, ValueError) as error:  # of one row
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        number = count + len(values) - first
        raise ValueError(f"{where}{number}: {' '.join(f'{name}{error}'.split())}") from None
    return len(rows), pa.RecordBatch.from_pylist(list(chain.from_iterable(values)), fields)
