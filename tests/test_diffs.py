"""The diffs of docs/algorithms/README.md are of the real code: `python tests/test_diffs.py` writes them.

A comment names the functions, `<!-- diff algos/sft.py:sft_loss algos/grpo.py:cispo_loss -->`. What follows
up to the end of its block is made: the first function with `-`, the second with `+`, lines of both without.
`none` in place of the first function: the second is new.
"""

import ast
import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/algorithms/README.md"
BLOCK = re.compile(r"(<!-- diff (\S+) (\S+) -->\n)```diff\n.*?```\n", re.DOTALL)


def code(place):
    """Lines of a function without its docstring; of FILE:FUNCTION.NAME the statements that set NAME."""
    if place == "none":
        return []
    file, _, name = place.partition(":")
    name, _, target = name.partition(".")
    text = (ROOT / file).read_text()
    [found] = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == name]
    lines = text.splitlines()
    if target:
        sets = [
            x for x in ast.walk(found) if isinstance(x, ast.Assign) and target in ast.unparse(x.targets[0])
        ]
        assert sets, place
        indent = len(lines[sets[0].lineno - 1]) - len(lines[sets[0].lineno - 1].lstrip())
        return [line[indent:] for x in sets for line in lines[x.lineno - 1 : x.end_lineno]]
    keep = set(range(found.lineno, found.end_lineno + 1))
    if ast.get_docstring(found):
        keep -= set(range(found.body[0].lineno, found.body[0].end_lineno + 1))
    return [line for i, line in enumerate(lines, 1) if i in keep and line.strip()]


def block(before, after):
    diff = difflib.ndiff(code(before), code(after))
    return "```diff\n" + "".join(f"{line[0]}{line[1:]}\n" for line in diff if line[0] in " +-") + "```\n"


def page():
    return BLOCK.sub(lambda m: m[1] + block(m[2], m[3]), PAGE.read_text())


def test_the_diffs_are_fresh():
    assert len(BLOCK.findall(PAGE.read_text())) == PAGE.read_text().count("<!-- diff ")
    assert PAGE.read_text() == page(), "python tests/test_diffs.py"


if __name__ == "__main__":
    PAGE.write_text(page())
