"""Rows that one rank of a machine reads, checks and tokenises, once: Arrow files that all ranks map.

An entry of the cache is a directory CACHE/KEY with an Arrow file for each parquet file, which
`datasets.Dataset.from_file` opens too, and notes.json. The key is a hash of all that the entry depends on.
"""

import hashlib
import inspect
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from ctypes import CDLL
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import jinja2
import numpy as np
import pyarrow as pa
import tokenizers
import transformers
import xxhash
from filelock import FileLock, Timeout
from huggingface_hub.constants import HF_HOME
from tqdm import tqdm

from data_prep import schema

JOB_ROWS, JOB_BYTES = 1000, 2**24  # rows that a process takes at a time: at most so many, of about this size
PROCESS_ROWS = 2000  # rows that are worth another process
IDS = pa.list_(pa.int32())


class Rows(Sequence):
    """Rows in Arrow files: a dict by index, made when it is asked for; a list of them by slice."""

    def __init__(self, paths):
        self.tables = [pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in paths]
        self.batches = [batch for table in self.tables for batch in table.to_batches()]
        self.ends = np.cumsum([batch.num_rows for batch in self.batches], dtype=int)

    def __len__(self):
        return sum(table.num_rows for table in self.tables)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        i = range(len(self))[i]  # IndexError; counts from the end
        number = np.searchsorted(self.ends, i, side="right")
        batch = self.batches[number]
        return batch.slice(i - self.ends[number] + len(batch), 1).to_pylist()[0]

    def columns(self, name):
        """A column of each file, in Arrow: without a Python object for each row."""
        return [table[name] for table in self.tables]

    def unique(self, name):
        return {value for column in self.columns(name) for value in column.unique().to_pylist()}


def load_prompts(paths, tokenizer, max_length, drop_overlong):
    """Rows of a list of RL data files, with `prompt_ids` (chat template, generation prompt) and `index`.

    Prompts of more than max_length tokens are dropped, or a ValueError.  Returns Rows, number dropped.
    """

    def encode(row, index):
        try:
            ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        except jinja2.TemplateError as error:
            raise ValueError(f"row {index} does not fit the tokenizer's chat template: {error}") from None
        if len(ids) <= max_length:
            return dict(prompt_ids=ids, index=index, group=index), ()
        if not drop_overlong:
            raise ValueError(
                f"{', '.join(map(str, paths))}: the prompt of row {index} has {len(ids)} tokens, over"
                f" --max_prompt_length {max_length}; raise it or drop the row by --filter_overlong_prompts"
            )
        return None, ()

    columns = "data_source", "prompt", "reward_model", "extra_info"
    fields = pa.schema(dict(prompt_ids=IDS, index=pa.int64(), group=pa.int64()))
    rows, dropped, _ = prepare(
        paths, tokenizer, columns, columns, fields, encode, (max_length, drop_overlong)
    )
    if paths and not rows:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no prompt within --max_prompt_length {max_length}; raise it"
        )
    return rows, dropped


def prepare(paths, tokenizer, columns, kept, fields, encode, about, code=()):
    """The columns `kept` of parquet files and the fields of `encode` -> Rows, number dropped, notes.

    encode({column: value}, number of the row over all files) -> values of the fields, or None to drop the
    row; and notes, which are counted over all rows. about, code: what else the result depends on, values and
    functions. Raises what `load_rows` and `encode` raise, in LOCAL_RANK 0; the others wait.
    """
    files = [schema.open_parquet(path, columns)[0] for path in paths]
    work = partial(encode_job, columns, kept, fields, encode)
    home = os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets")
    entry = Path(home, "post_training", key_of(paths, tokenizer, (columns, kept, str(fields), about), code))
    while int(os.environ.get("LOCAL_RANK", 0)) and not entry.is_dir():
        time.sleep(0.05)  # if LOCAL_RANK 0 fails, the launcher ends this one
    if not entry.is_dir():
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else every later fork gives a warning
        try:
            build(entry, work, read_jobs(paths, files, columns), sum(f.metadata.num_rows for f in files))
        except OSError as error:  # of this machine: rank 0, if on another, would not say it
            remedy = "set HF_DATASETS_CACHE or HF_HOME to a directory with space that you may write to"
            sys.exit(f"error: {entry.parent}: tokenised rows cannot be written ({error}); {remedy}")
    dropped, notes = json.loads((entry / "notes.json").read_text())
    return Rows([entry / f"{i}.arrow" for i in range(len(paths))]), dropped, dict(notes)


def key_of(paths, tokenizer, about, code):
    """Hash of the files, the tokenizer and its chat template, other arguments, and code."""
    about = *about, transformers.__version__, tokenizers.__version__
    about += tuple(inspect.getsource(x) for x in (sys.modules[__name__], schema, *code))
    if "strftime_now" in str(tokenizer.chat_template):
        about += (date.today(),)  # which the template writes into the prompt
    digest = xxhash.xxh3_128(repr(about).encode())
    with tempfile.TemporaryDirectory() as state:
        tokenizer.save_pretrained(state)
        for path in [*paths, *sorted(path for path in Path(state).rglob("*") if path.is_file())]:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()


def build(entry, work, jobs, rows):
    """Make an entry of the cache: beside, and renamed when it is whole."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    for other in entry.parent.glob("*.new"):  # if its builder was killed, the lock is free
        with suppress(Timeout), FileLock(other.with_suffix(".lock"), timeout=0):
            shutil.rmtree(other, ignore_errors=True)
    new, writers, dropped, notes = entry.with_suffix(".new"), {}, 0, Counter()
    with FileLock(entry.with_suffix(".lock")):
        if entry.is_dir():  # by another run, meanwhile
            return
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir()
            quiet = rows < 2 * PROCESS_ROWS or os.environ.get("RANK", "0") != "0"
            with ExitStack() as stack, tqdm(total=rows, desc="tokenising", disable=quiet or None) as bar:
                for number, batch, lost, noted in in_order(work, jobs, rows):
                    if number not in writers:
                        file = stack.enter_context(open(new / f"{number}.arrow", "wb"))
                        writers[number] = stack.enter_context(pa.ipc.new_stream(file, batch.schema))
                    writers[number].write_batch(batch)
                    dropped, notes = dropped + lost, notes + noted
                    bar.update(len(batch) + lost)  # on a terminal: disable=None
            (new / "notes.json").write_text(json.dumps([dropped, [*notes.items()]]))
            for path in new.iterdir():  # so that a power cut leaves no entry with holes
                with open(path) as file:
                    os.fsync(file.fileno())
            os.replace(new, entry)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def read_jobs(paths, files, columns):
    """Yield (number of the file, path, first row in the file, first row over all files, record batch)."""
    before, names = 0, [*{column.split(".")[0]: None for column in columns}]
    for number, (path, file) in enumerate(zip(paths, files)):
        first = 0
        try:
            for group in range(
                file.num_row_groups
            ):  # pyarrow keeps what it read of all groups that it is given
                size = file.metadata.row_group(group).total_byte_size // JOB_BYTES + 1
                rows = max(1, min(JOB_ROWS, file.metadata.row_group(group).num_rows // size))
                for batch in file.iter_batches(rows, [group], names):
                    yield number, path, first, before + first, batch
                    first += len(batch)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: damaged ({str(error).splitlines()[0]}); write it again") from None
        before += first


def encode_job(columns, kept, fields, encode, job):
    """A job of `read_jobs` -> its file's number, what is written, number of rows dropped, notes."""
    number, path, start, index, batch = job
    rows, numbers, notes = [], [], Counter()
    for i, row in enumerate(schema.checked(batch, columns, path, start)):
        values, noted = encode(row, index + i)
        notes.update(noted)
        if values is not None:
            rows.append(values)
            numbers.append(i)
    old = [batch.column(name).take(pa.array(numbers, pa.int64())) for name in kept]
    new = pa.RecordBatch.from_pylist(rows, fields)
    result = pa.RecordBatch.from_arrays([*old, *new.columns], [*kept, *fields.names])
    return number, result, len(batch) - len(rows), notes


def in_order(function, jobs, rows):
    """map, for so many rows in all: if they are worth it, in processes, which inherit the function."""
    processes = min(len(os.sched_getaffinity(0)), rows // PROCESS_ROWS)
    if processes < 2:
        yield from map(function, jobs)
        return
    pool, waiting = ProcessPoolExecutor(processes, get_context("fork"), start, (function,)), deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(call, job))
            if len(waiting) > 2 * processes:  # no more of the data is in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ValueError("a process that tokenises was killed; was there memory enough?") from None
    finally:
        pool.shutdown(cancel_futures=True)


def start(function):
    """Begin a process of the pool, which ends with its parent."""
    CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # CAREFUL: a tokenizer that runs in parallel would wait for threads, which a fork does not inherit
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    transformers.logging.set_verbosity_error()  # or each of them would give a warning that one gives
    call.function = function


def call(job):
    return call.function(job)
