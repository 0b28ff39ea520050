"""Files and directories that appear whole or not at all, and what files say."""

import ast
import contextlib
import fcntl
import functools
import json
import mmap
import os
import platform
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from system.arguments import fail

LOADED = "*.json", "*.jinja", "*.model", "*.tiktoken", "*.py", "vocab.*", "merges.txt"  # with a model
ABOUT = "README*", "LICENSE*", "NOTICE*"  # comes along with a model
WEIGHTS = "*.safetensors", "*.bin", "*.pt", "*.pth"  # the first that a directory has
ASSIGNED = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr
NOT_A_LINK = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # which another user may have put there
HELD = {}  # locks of directories, until the process ends


@contextlib.contextmanager
def replacing(path):
    """Yield a free path next to `path`; what the body writes there takes its place when the body ends well.

    Weights in a directory get the mode of other files.
    Raises ValueError if `path` is a directory that holds other things than a model.
    """
    path = Path(path).absolute()
    if path.is_dir() and any(path.iterdir()) and not (path / "config.json").is_file():
        raise ValueError(f"{path} is a directory with other things in it; choose another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    try:
        yield new
        share_weights(new)
        if path.is_dir():  # a directory cannot be renamed over one that is not empty
            path.rename(old)
        os.replace(new, path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)


def share_weights(directory):
    """Give weights the mode of other files; safetensors sets 0600."""
    for file in directory.glob("*.safetensors"):
        file.chmod(directory.stat().st_mode & 0o666)


def files_of(directory):
    """The files of a directory that transformers reads for a model's weights."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (directory / whole).is_file():
            return [directory / whole]
        index = directory / f"{whole}.index.json"
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"].values()
            return [directory / name for name in sorted({*names})]
    return []


def cut_file(directory):
    """The name of a file of a model's weights that cannot be read whole, as after a broken download."""
    try:
        files = files_of(directory)
    except (ValueError, LookupError, TypeError, AttributeError):
        return "the index of its weights"
    for file in files:
        if not file.is_file():
            return file.name
        if file.suffix != ".safetensors":
            continue
        wrong = OSError, ValueError, LookupError, TypeError, AttributeError
        with contextlib.suppress(*wrong), file.open("rb") as opened:
            begin = 8 + int.from_bytes(opened.read(8), "little")  # of the weights, behind a header in JSON
            header = json.loads(opened.read(min(begin - 8, 10**8)))
            ends = [x["data_offsets"][1] for name, x in header.items() if name != "__metadata__"]
            if file.stat().st_size == begin + max(ends):
                continue
        return file.name


def steps_in(checkpoints):
    """The directories of steps, the oldest first. Others next to them are a user's own."""
    steps = [path for path in checkpoints.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(filter(Path.is_dir, steps), key=lambda path: int(path.name[5:]))


def to_disk(directory):
    """Wait until all of a directory is on the disk, and its name: a power cut would leave empty files."""
    for path in (*directory.rglob("*"), directory, directory.parent):
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.close(number)


def json_line(value):
    """A line of JSON, with null for NaN and infinity, which JSON does not have, and text for other things."""
    value = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    return json.dumps(value) + "\n"


def hold(out, flag):
    """Stop if another process writes to this directory. A kill frees the lock; workers do not inherit it."""
    if int(os.environ.get("RANK", 0)) or out in HELD:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        HELD[out] = file = os.fdopen(os.open(out / ".lock", NOT_A_LINK, 0o666), "a+")
    except OSError as error:
        fail(f"{flag} cannot be made: {error}")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        fail(f"{flag} is in use by {file.read()}: wait for it, or choose another")
    except OSError:  # a file system without locks
        return
    file.truncate(0)
    print(f"process {os.getpid()} of {platform.node()}", end="", file=file, flush=True)


@functools.cache
def digests_of_model(model):
    """{file: digest} of what is read when a model is loaded, a directory or a name of the hub."""
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download  # here, because it takes longer than a short script

        with contextlib.suppress(OSError, ValueError):  # whoever loads the model says what is wrong
            wanted = [*LOADED, *ABOUT]
            directory = Path(snapshot_download(model, allow_patterns=[*wanted, "model*.safetensors"]))
            if not [*directory.glob("model*.safetensors")]:
                directory = Path(snapshot_download(model, allow_patterns=[*wanted, "pytorch_model*.bin"]))
    weights = next(filter(None, ([*directory.glob(name)] for name in WEIGHTS)), [])
    files = sorted({*weights, *(path for name in LOADED for path in directory.glob(name))})
    with ThreadPoolExecutor() as pool:
        return {path.name: digest for path, digest in zip(files, pool.map(digest_of_file, map(str, files)))}


@functools.cache
def digest_of_file(name):
    """Digest of what a file, FILE or FILE:NAME, says when this process first asks; of no file its name."""
    file = name.rpartition(":")[0]
    path = next(filter(os.path.isfile, (name, file, f"{Path(__file__).parents[1]}/{file}")), None)
    if path is None:
        return name
    digest = xxhash.xxh3_128(name.removeprefix(path).encode())
    with contextlib.suppress(OSError, ValueError, SyntaxError):  # whoever reads it says what is wrong
        for part in what_it_says(path):
            digest.update(part)
    return digest.hexdigest()


def what_it_says(path):
    """Yield parquet as rows, JSON by its value, code with what it imports and reads, all else as it is."""
    with open(path, "rb") as file:
        kind = file.read(4)
        if kind == b"PAR1":
            yield from rows_of(path)
        elif path.endswith(".json"):
            yield json.dumps(json.loads(Path(path).read_bytes()), sort_keys=True).encode()
        elif path.endswith(".py"):
            yield from map(str.encode, with_imports(Path(path), {}).values())
        elif kind:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                yield whole


def rows_of(path):
    """Yield each row of a parquet file as text, and pictures as they are; about 16 MB are in memory."""
    from pyarrow import parquet  # here, as above

    pictures = []

    def as_text(value):
        if not isinstance(value, bytes):
            return str(value)
        pictures.append(value)
        return len(value)

    file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    row_bytes = sum(group.total_byte_size for group in groups) / max(file.metadata.num_rows, 1)
    for batch in file.iter_batches(max(1, min(1000, int(2**24 / max(row_bytes, 1))))):
        for row in batch.to_pylist():
            yield json.dumps(row, default=as_text, sort_keys=True).encode()
            yield from pictures
            pictures.clear()


def sets_reads(node):
    return isinstance(node, ast.Name) and node.id == "READS" and isinstance(node.ctx, ast.Store)


def with_imports(path, found):
    """Add to {path: text} a file, the modules of its folder that it imports, the variables in its READS."""
    if path in found or not path.is_file():
        return found
    found[path] = path.read_text()
    for node in ast.walk(ast.parse(found[path])):
        if isinstance(node, ASSIGNED) and any(sets_reads(x) for x in ast.walk(node)):
            constants = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
            names = [x for x in constants if isinstance(x, str)]
            found |= {name: digest_of_file(os.environ.get(name, "")) for name in names}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            level = vars(node).get("level")
            module = vars(node).get("module")
            for x in node.names:
                place = path.parents[max(level or 1, 1) - 1]
                for part in f"{module or ''}.{x.name}".strip(".").split("."):
                    place = place / part
                    with_imports(place.with_suffix(".py"), found)
                    with_imports(place / "__init__.py", found)
    return found
