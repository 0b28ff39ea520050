"""docs/reference/flags.md is made from the Args of the scripts: `python tests/test_flags.py` writes it."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/flags.md"
HEAD = """# Flags

Every flag of every script, from its `Args`. `SCRIPT --help` prints the same text.

A flag takes underscores or hyphens: `--max_prompt_length` and `--max-prompt-length` are one flag.
A switch such as `--packing` is turned off by `--no_packing`.
A flag of several values takes them separated by spaces.
A flag without a default is required.

"""
TRAINERS = "sft rm dpo grpo_nano grpo dapo ppo agent distill".split()
TOOLS = "generate eval report export quantize".split()
KINDS = {"int": "integer", "float": "number", "str": "text", "bool": "switch", "Path": "path"}


def kind(annotation):
    """What a flag takes, in words."""
    if isinstance(annotation, ast.BinOp):  # TYPE | None
        return kind(annotation.left)
    if isinstance(annotation, ast.Subscript):
        name, inner = ast.unparse(annotation.value), annotation.slice
        if name == "Literal":
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return ", ".join(f"`{value.value}`" for value in values)
        if name.endswith("Positional"):
            return f"{kind(inner)}, without the name of the flag"
        return f"{kind(inner.elts[0])}s"  # tuple[TYPE, ...]
    return KINDS.get(ast.unparse(annotation), ast.unparse(annotation))


def default(value):
    """The default as it is typed at the command line."""
    if value is None:
        return "required"
    try:
        value = ast.literal_eval(value)
    except ValueError:
        return f"`{ast.unparse(value).removeprefix('ROOT / ').strip(chr(39))}`"
    if isinstance(value, tuple):
        value = " ".join(map(str, value)) or "none"
    value = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
    return f"`{value}`"


def flags(path):
    """[group, name, kind, default, help] of the Args of a script, and of the Args that it is made from."""
    text = path.read_text()
    lines, found, group = text.splitlines(), [], ""
    tree = ast.parse(text)
    [args] = [x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "Args"]
    for base in args.bases:
        if ast.unparse(base) == "prepare.Args":
            found += flags(ROOT / "data_prep/prepare.py")
    for node, following in zip(args.body, [*args.body[1:], None]):
        if not isinstance(node, ast.AnnAssign):
            continue
        above = node.lineno - 2
        comments = []
        while lines[above].lstrip().startswith("#"):
            comment = lines[above].strip().removeprefix("#").strip()
            if comment.startswith("----"):
                group = comment.removeprefix("----").strip()
                break
            comments.insert(0, comment)
            above -= 1
        said = lines[node.end_lineno - 1][node.end_col_offset :].strip().removeprefix("#").strip()
        said = said or " ".join(comments)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said = " ".join(following.value.value.split())
        row = [group, node.target.id, kind(node.annotation), default(node.value), said]
        found = [x for x in found if x[1] != row[1]] + [row]
    return found


def section(path):
    """Heading and tables of a script, a table for each group."""
    text, last = f"### {path.name}\n", None
    for group, name, kind_, default_, said in flags(path):
        if group != last:
            text += f"\n**{group}**\n" if group else ""
            text += "\n| Flag | Takes | Default | Meaning |\n|---|---|---|---|\n"
            last = group
        said = said.replace("|", "\\|")
        text += f"| `--{name}` | {kind_} | {default_} | {said} |\n"
    return text


def page():
    data = sorted(path for path in (ROOT / "data_prep").glob("*.py") if "class Args" in path.read_text())
    parts = {
        "Trainers": [ROOT / f"algos/{name}.py" for name in TRAINERS],
        "Tools": [ROOT / f"algos/{name}.py" for name in TOOLS],
        "Data": data,
    }
    scripts = {name: "\n".join(map(section, paths)) for name, paths in parts.items()}
    return HEAD + "\n".join(f"## {name}\n\n{text}" for name, text in scripts.items())


def test_every_script_is_in_the_page():
    assert {path.stem for path in (ROOT / "algos").glob("*.py")} == {*TRAINERS, *TOOLS}


def test_flags_have_a_help_and_the_page_is_fresh():
    lacking = [row[1] for path in (ROOT / "algos").glob("*.py") for row in flags(path) if not row[4]]
    assert not lacking
    assert PAGE.read_text() == page(), "python tests/test_flags.py"


if __name__ == "__main__":
    PAGE.write_text(page())
