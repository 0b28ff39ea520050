"""Which checkpoint a run resumes from, and whether it may: by its program, its flags, what its files say."""

import inspect
import json
import os
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path

import torch

from system.arguments import KNOWN, MODELS, fail, unread
from system.files import digest_of_file, digests_of_model, hold, steps_in

MAY_CHANGE = {flag for flag, known in KNOWN.items() if known.resume == "may change"}  # when a run resumes
DATA = {flag for flag, known in KNOWN.items() if known.resume == "may begin"}  # and another run begins
FILES = [flag for flag, known in KNOWN.items() if known.content == "file"]


def open_run(args):
    """Check output_dir against the arguments -> the checkpoint to resume from, or None."""
    flags = vars(args)
    for flag in flags.keys() & MODELS:  # not by symbolic links, which may move, as `latest` of another run
        if isinstance(flags[flag], str):
            flags[flag] = without_links(flags[flag])
        elif flags[flag]:
            flags[flag] = tuple(without_links(name) for name in flags[flag])
    if args.tracker != "none" and not find_spec(args.tracker):
        fail(f"--tracker {args.tracker} is missing: pip install --no-deps -r requirements-extra.txt")
    for field in fields(args):  # parse() has not loaded torch
        needs_gpu = field.name in KNOWN and KNOWN[field.name].gpu and flags[field.name] != field.default
        if needs_gpu and not torch.cuda.is_available():
            fail(f"--{field.name} needs a GPU")

    out = Path(args.output_dir)
    hold(out, f"--output_dir {out}")
    if args.resume == "never" and (out / "args.json").exists():
        fail(f"--output_dir {out} already holds a run: choose another, or resume it by --resume auto")
    checkpoint = newest(out)
    remedy = "choose another"
    if checkpoint:
        remedy += f"; its weights are {checkpoint}/hf"
    refuse_other_program(out, checkpoint, args, f"--output_dir {out} holds", remedy)
    if checkpoint:  # the same command resumes its own run
        changes = differences(checkpoint, args, MAY_CHANGE)
        if changes:
            new = "choose another"
            if not differences(checkpoint, args, MAY_CHANGE | DATA):
                new = f"begin in another one by --resume {checkpoint}"
            fail(f"--output_dir {out} holds a run with other arguments ({changes}): put them back, or {new}")
        return checkpoint

    if args.resume in ("auto", "never"):
        return None
    checkpoint = Path(args.resume).resolve()
    if not (checkpoint / "trainer_state.json").is_file():
        fail(f"--resume {args.resume}: not a checkpoint, it has no trainer_state.json")
    remedy = f"to begin with its weights, pass --model {checkpoint}/hf in its place"
    refuse_other_program(checkpoint.parent.parent, checkpoint, args, f"--resume {args.resume} is of", remedy)
    changes = differences(checkpoint, args, MAY_CHANGE | DATA)
    if changes:
        fail(f"--resume {args.resume} is of a run with other arguments ({changes}): pass those")
    return checkpoint


def newest(out):
    """The checkpoint that a run in this directory resumes from, or None.

    A copy of a run may lack the link `latest`, have a copy of what it points at, or a text.
    """
    latest = out / "checkpoints/latest"
    if (latest.is_symlink() and latest.exists()) or (latest / "trainer_state.json").is_file():
        return latest.resolve()
    whole = [path for path in steps_in(out / "checkpoints") if (path / "trainer_state.json").is_file()]
    return whole[-1] if whole else None


def without_links(name):
    """The path of a directory; the name of a model on the hub as it is."""
    if os.path.isdir(name):
        return os.path.realpath(name)
    return name


def refuse_other_program(out, checkpoint, args, what, remedy):
    """Stop where a run is one of another script: other mathematics, whatever its flags.

    checkpoint: of that run, None: it has none.
    """
    now = program(args)
    before = read_dict(out / "args.json").get("program", now)
    if checkpoint:
        before = saved(checkpoint)[1].get("program", before)
    if before != now:
        fail(f"{what} a run of {before}, this is {now}: {remedy}")


def program(args):
    """The name of the script that has these arguments."""
    return Path(inspect.getfile(type(args))).name


def saved(checkpoint):
    """The flags of the run of a checkpoint, and `content` of then."""
    found = read_dict(checkpoint / "trainer_state.json").get("content")
    found = found if isinstance(found, dict) else {}
    flags = found.get("flags") or read_dict(checkpoint.parent.parent / "args.json")  # of an older one
    flags.pop("program", None)
    return flags, found


def read_dict(path):
    """What a file of JSON has; {} if it is missing or damaged, which is refused where it is loaded."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


def differences(checkpoint, args, may):
    """What differs between the run of a checkpoint and this one, except flags that may."""
    flags_before, content_before = saved(checkpoint)
    content_now = content(args)
    flags_now = json.loads(json.dumps(asdict(args)))
    defaults = {field.name: field.default for field in fields(args)}
    idle = unread(vars(args), type(args))
    found = []
    for flag in sorted(flags_now | flags_before):
        by_default = flag in defaults and getattr(args, flag) == defaults[flag]
        if flag in may or (flag in idle and by_default):  # a flag that is not read may have another default
            continue
        value = flags_now.get(flag)
        before = value
        if flags_before:  # a flag that it did not have was not used
            before = flags_before.get(flag, json.loads(json.dumps(defaults.get(flag), default=str)))
        change = ""
        if meaning(flag, before) != meaning(flag, value):
            change = f"{before} there, {value if flag in flags_now else 'not a flag'} now"
        if flag in MODELS or flag in FILES:
            digest = content_now.get(flag)
            digest_before = content_before.get(flag, digest)
            if digest is None or digest_before == digest:
                continue
            if flag in MODELS:
                change = f"{value} has another {changed_files(digest_before, digest)}"
            elif not change:
                change = f"{value} has another content"
        if change:
            found.append(f"--{flag} {change}")
    return "; ".join(found)


def meaning(flag, value):
    """The value of a flag; of JSON what it says, however it is written."""
    if flag in KNOWN and KNOWN[flag].content == "json":
        with suppress(ValueError, TypeError):  # whoever reads it says what is wrong
            return json.loads(value)
    return value


def changed_files(before, now):
    """Names of the files of models that differ."""
    names = set()
    for one, other in zip(before, now):
        names |= {name for name, _ in one.items() ^ other.items()}
    return ", ".join(sorted(names)) or "number of models"


def content(args):
    """What a checkpoint keeps of a run: program, flags, {flag: digests} of the models and files it reads."""
    if int(os.environ.get("RANK", 0)):  # the first rank reads, and speaks
        return {}
    found = dict(program=program(args), flags=asdict(args))
    for flag, value in vars(args).items():
        if flag not in MODELS and flag not in FILES:
            continue
        names = value or ()
        if isinstance(names, str):
            names = [names]
        digest = digests_of_model if flag in MODELS else digest_of_file
        found[flag] = [digest(name) for name in names]
    return found
