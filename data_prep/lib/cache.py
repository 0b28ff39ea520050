"""Rows that one rank of a machine reads, checks and tokenises, once: Datasets that all ranks map.

An entry of the cache is a directory CACHE/KEY, in which N/*.arrow are the rows of the parquet file N, as
`Dataset.map` wrote them. The key is a hash of all that the entry depends on.
"""

import hashlib
import inspect
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from datetime import date
from pathlib import Path

import datasets
import jinja2
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
import transformers
import xxhash
from datasets import Dataset, Features, concatenate_datasets
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock, Timeout
from torch.utils.data import ConcatDataset

from data_prep.lib import chats, images, schema, turns

BATCH_ROWS, BATCH_BYTES = 1000, 2**24  # tokenised at a time: at most so many rows, of about this size
QUIET_ROWS = 5000  # fewer are tokenised before a progress bar is of use
BOOL, INT, BOOLS, IDS = pa.bool_(), pa.int64(), pa.list_(pa.bool_()), pa.list_(pa.int32())
IMAGES = pa.list_(pa.struct(dict(bytes=pa.binary(), path=pa.string())))


class Rows(ConcatDataset):
    """The rows of a Dataset for each file: their structs may differ, so they are not one Dataset."""

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        [row] = chats.plain_rows(super().__getitem__(i))
        if "prompt" in row:
            row["prompt"] = chats.conversation(row["prompt"], "prompt")
        return row

    def column(self, name):
        """A column, in Arrow: without a Python object for each row."""
        return concatenate_datasets([part.select_columns(name) for part in self.datasets]).data.column(name)

    def unique(self, name):
        return {value for part in self.datasets for value in part.unique(name)}


def load_prompts(paths, tokenizer, max_length, tools=None):
    """Rows of a list of RL data files, with `prompt_ids` (chat template, generation prompt) and `index`.

    Prompts without a token, or of more than max_length, are dropped.  tools: JSON schemas that the chat
    template shows.  With a processor for tokenizer also `images` and `sampler_ids`, see images.py.  Returns
    Rows, and how many were dropped.
    """
    names, sees = ", ".join(map(str, paths)), hasattr(tokenizer, "image_processor")
    how = dict(tools=tools, add_generation_prompt=True, return_dict=False)
    how["tokenizer_kwargs"] = dict(return_attention_mask=False, verbose=False)

    def encode(rows, numbers):
        try:
            if sees:
                values = [images.encode_prompt(row, tokenizer, tools) for row in rows]
            else:
                prompts = [turns.plain(row["prompt"], tokenizer) for row in rows]
                ids = tokenizer.apply_chat_template(prompts, **how)
                values = [dict(prompt_ids=x) for x in ids]
                for row, x in zip(rows, ids):
                    if any("tool_calls" in message for message in row["prompt"]):
                        turns.check_calls(row["prompt"], tokenizer.decode(x))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            if len(rows) > 1:  # which of them?
                return [values for row, i in zip(rows, numbers) for values in encode([row], [i])]
            unfit = "does not fit the tokenizer's chat template"
            unfit = f"of {names}" if isinstance(error, images.Unfit) else unfit
            raise ValueError(f"row {numbers[0]} {unfit}: {error}") from None
        for i, row, found in zip(numbers, rows, values):
            found |= dict(index=i, group=i, images=row["images"])
        return [row if 0 < len(row["prompt_ids"]) <= max_length else None for row in values]

    columns = "data_source", "prompt", "reward_model", "extra_info"
    fields = dict(prompt_ids=IDS, index=INT, group=INT)
    fields |= dict(sampler_ids=IDS, images=IMAGES) if sees else {}
    rows, dropped = prepare(paths, tokenizer, columns, columns, fields, encode, (max_length, tools))
    if paths and not rows:
        raise ValueError(f"{names}: no prompt of 1 to {max_length} tokens (--max_prompt_length)")
    return rows, dropped


def prepare(paths, tokenizer, columns, kept, fields, encode, about, code=()):
    """The columns `kept` of parquet files and the fields of `encode` -> Rows, number dropped.

    encode([{column: value}], their numbers over all files) -> for each row values of the fields, or None to
    drop it. about, code: what else the result depends on, values and functions. Raises what `load_rows` and
    `encode` raise, in LOCAL_RANK 0; the others wait. Rows with images are an error unless they are a field.
    """
    columns = *columns, "images"
    files, fields = [(path, *schema.open_parquet(path, columns)) for path in paths], pa.schema(fields)
    entry = Path(datasets.config.HF_DATASETS_CACHE, "post_training")
    entry /= key_of(paths, tokenizer, (columns, kept, str(fields), about), code)
    while int(os.environ.get("LOCAL_RANK", 0)) and not entry.is_dir():
        time.sleep(0.05)  # if LOCAL_RANK 0 fails, the launcher ends this one
    if not entry.is_dir():
        try:
            build(entry, files, columns, kept, fields, encode)
        except OSError as error:  # of this machine: rank 0, if on another, would not say it
            remedy = "set HF_DATASETS_CACHE or HF_HOME to a directory with space that you may write to"
            sys.exit(f"error: {entry.parent}: tokenised rows cannot be written ({error}); {remedy}")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else every later fork gives a warning
    found = [sorted((entry / str(n)).glob("*.arrow")) for n in range(len(paths))]
    parts = [concatenate_datasets([Dataset.from_file(str(x)) for x in some]) for some in found]
    none = pa.schema([*((name, pa.null()) for name in kept), *fields]).empty_table()
    rows = Rows([part.with_format("arrow") for part in parts or [Dataset(none)]])
    for field in fields:
        if field.type == IDS and len(rows):
            images.check_known(pc.max(pc.list_flatten(rows.column(field.name))).as_py() or 0, tokenizer)
    return rows, sum(file.metadata.num_rows for _, file, _ in files) - len(rows)


def key_of(paths, tokenizer, about, code):
    """Hash of the files, the tokenizer and its chat template, other arguments, and code."""
    about = *about, transformers.__version__, tokenizers.__version__, datasets.__version__
    about += tuple(inspect.getsource(x) for x in (sys.modules[__name__], chats, schema, turns, images, *code))
    if "strftime_now" in str(tokenizer.chat_template):
        about += (date.today(),)  # which the template writes into the prompt
    digest = xxhash.xxh3_128(repr(about).encode())
    with tempfile.TemporaryDirectory() as state:
        tokenizer.save_pretrained(state)
        for path in [*paths, *sorted(path for path in Path(state).rglob("*") if path.is_file())]:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()


def build(entry, files, *how):
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
            before = 0
            for n, source in enumerate(files):
                before += tokenise(new / str(n), before, *source, *how)
            for path in new.rglob("*.arrow"):  # so that a power cut leaves no entry with holes
                with open(path) as file:
                    os.fsync(file.fileno())
            os.replace(new, entry)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def tokenise(new, before, path, file, names, columns, kept, fields, encode):
    """Write Arrow files of a parquet file's rows into the directory `new` -> how many there were."""

    def encode_batch(table, numbers):
        rows = [*schema.checked(table, columns, path, numbers[0])]
        blind = [i for i, row in zip(numbers, rows) if row["images"] and "images" not in fields.names]
        if blind:
            remedy = "take a model with a vision tower, or drop the column 'images' and the marks <image>"
            raise ValueError(f"{path}: row {blind[0]} has images, which are not read here: {remedy}")
        values = [*encode(rows, [before + i for i in numbers])]
        old = table.select(kept).filter(pa.array([x is not None for x in values]))
        made = pa.Table.from_pylist([x for x in values if x is not None], fields)
        return pa.table([*old.columns, *made.columns], [*kept, *fields.names])

    # without the metadata of datasets, which would make other values of what pyarrow reads
    try:
        types = Features.from_arrow_schema(pa.schema([file.schema_arrow.field(name) for name in names]))
    except ValueError as error:
        raise ValueError(f"{path}: {error} Write structs, lists, or JSON text.") from None
    quiet = file.metadata.num_rows < QUIET_ROWS or int(os.environ.get("RANK", 0)) or not sys.stderr.isatty()
    (datasets.disable_progress_bars if quiet else datasets.enable_progress_bars)()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    raw = new.with_suffix(".raw")
    try:
        rows = Dataset.from_parquet(str(path), columns=names, features=types, cache_dir=str(raw))
        # CAREFUL: no num_proc. Its processes outlive a killed run, and map may wait for ever for one that is
        # killed; the tokenizer has threads of its own
        rows.with_format("arrow").map(
            encode_batch,
            with_indices=True,
            batched=True,
            batch_size=max(1, min(BATCH_ROWS, BATCH_BYTES * len(rows) // rows.data.nbytes)),
            cache_file_name=str(new / "rows.arrow"),
            new_fingerprint=new.name,  # else a hash of all that encode refers to
            desc="tokenising",
        )
    except DatasetGenerationError as error:
        if getattr(error.__cause__, "errno", None):  # of the disk
            raise error.__cause__ from None
        problem = str(error.__cause__).splitlines()[0]
        raise ValueError(f"{path}: damaged ({problem}); write it again") from None
    shutil.rmtree(raw)
    return len(rows)
