"""Command lines: the fields of an `Args` dataclass are the flags, their comments the help, in groups."""

import inspect
import os
import re
import sys
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import partial
from typing import Annotated, get_type_hints

import tyro
from tyro._docstrings import get_field_docstring  # the comments, which tyro finds only in a class of a file


def parse(args_class, words=None):
    """The command line (or `words`) -> the values of the fields of `args_class`, a dict.

    --help begins with the first paragraph of the script. A comment `# ---- NAME` in the class begins a
    group of flags: tyro has groups for nested dataclasses, so each becomes one. Under torchrun rank 0 prints.
    """
    hints, known = get_type_hints(args_class, include_extras=True), {x.name: x for x in fields(args_class)}
    parts = flags = []  # before the first heading the flags are in no group
    for name, heading in re.findall(
        r"^    (\w+):|^    # ---- (\w+)$", inspect.getsource(args_class), re.MULTILINE
    ):
        if heading:
            parts.append((heading, flags := []))
        elif name in known:
            about = tyro.conf.arg(help=get_field_docstring(args_class, name, ()) or "")
            default = {} if known[name].default is MISSING else dict(default=known[name].default)
            flags.append((name, Annotated[hints[name], about], field(**default)))
    make = partial(make_dataclass, kw_only=True)
    parsed = tyro.cli(
        make("Args", [part if len(part) == 3 else (part[0], make(*part)) for part in parts]),
        args=words,
        description=sys.modules[args_class.__module__].__doc__.partition("\n\n")[0],
        config=[tyro.conf.OmitArgPrefixes],
        use_underscores=True,
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    values = {}
    for name, value in vars(parsed).items():
        values |= vars(value) if is_dataclass(value) else {name: value}
    return values
