"""Command lines: the fields of an `Args` dataclass are the flags, and the comments beside them the help."""

import os
import sys
from dataclasses import dataclass

import tyro

# before torch is loaded: its notes on NUMA nodes and Triton, which nobody can act on
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TORCH_LOGS", "-torch._library")


def parse(args_class, words=None):
    """The command line (or `words`) -> the values of the fields of `args_class`, a dict.

    --help begins with the first paragraph of the script. Under torchrun rank 0 prints.
    """

    @dataclass(kw_only=True)
    class Flags(args_class):
        def __post_init__(self):
            """The defaults that depend on the machine need torch, which is not loaded yet."""

    flags = tyro.cli(
        Flags,
        args=words,
        description=sys.modules[args_class.__module__].__doc__.partition("\n\n")[0],
        use_underscores=True,
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    return vars(flags)
