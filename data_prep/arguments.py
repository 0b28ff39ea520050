"""Command lines: the fields of an `Args` dataclass are the flags, their comments the help, in groups."""

import inspect
import os
import re
import sys
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Annotated, get_type_hints

import tyro
from tyro._docstrings import get_field_docstring  # the comments, which tyro finds only in a class of a file


def parse(args_class, words=None):
    """The command line (or `words`) -> the values of the fields of `args_class`, a dict.

    --help begins with the first paragraph of the script. A comment `# ---- NAME` in the class begins a
    group of flags: tyro has groups for nested dataclasses, so each becomes one. Under torchrun rank 0 prints.
    """
    hints, groups = get_type_hints(args_class, include_extras=True), {}
    known = {x.name: x for x in fields(args_class)}
    names = [x for x in re.findall(r"^    (\w+):|^    # ---- (\w+)$", inspect.getsource(args_class), re.M)]
    group = "general"
    for name, heading in names:
        if heading:
            group = heading
        elif name in known:
            about = tyro.conf.arg(help=get_field_docstring(args_class, name, ()) or "")
            default = {} if known[name].default is MISSING else dict(default=known[name].default)
            groups.setdefault(group, []).append((name, Annotated[hints[name], about], field(**default)))
    parts = [(name, make_dataclass(name, flags, kw_only=True)) for name, flags in groups.items()]
    parts = tyro.cli(
        make_dataclass("Args", parts),
        args=words,
        description=sys.modules[args_class.__module__].__doc__.partition("\n\n")[0],
        config=[tyro.conf.OmitArgPrefixes],
        use_underscores=True,
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    return {name: value for part in vars(parts).values() for name, value in vars(part).items()}
