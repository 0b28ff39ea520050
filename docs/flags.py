"""Write docs/reference/flags.md, a table of all flags, from the Args of the scripts, and the tables of
options in the pages on verl and TRL, from system/elsewhere.py; a test compares them.

python docs/flags.py
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from system import elsewhere

OPTIONS = {  # pages with a table of options
    ROOT / "docs/reference/from-trl.md": elsewhere.TRL,
    ROOT / "docs/reference/from-verl.md": elsewhere.VERL,
}
PAGE = ROOT / "docs/reference/flags.md"
HEAD = """# Flags

Every flag of every script, from its `Args`, with its whole help. Each meaning of a flag has a row.
Names in brackets after a help are all that the flag takes.
A name without dashes is given without a flag: `report.py RUNS`.

A flag takes underscores or hyphens: `--max_prompt_length` and `--max-prompt-length` are one flag.
A switch such as `--packing` is turned off by `--no_packing`.
A flag of several values takes them separated by spaces, and may be given again; "empty" means no value.
A meaning that begins with a condition, as "with --lora_rank:", is of a flag that is read then alone.
Elsewhere such a flag is refused, unless it has its default.

A flag without a default is required. In brackets: the default of some scripts.
Names of several scripts:

| Name | Scripts |
|---|---|
"""
OF_DATA = """
## Flags of one data script

`python data_prep/SCRIPT.py --help` says what they mean. A data set also has the flags of "data sets" above.

"""
TRAINERS = "sft rm dpo grpo_nano grpo dapo ppo agent distill".split()
TOOLS = "generate eval report export quantize".split()
OF_ANY_FILE = ["data_prep/difficulty", "data_prep/inspect", "data_prep/rejection"]
RL = "grpo dapo ppo agent distill".split()
SETS = {  # names that stand for scripts, the largest first
    "trainers": [name for name in TRAINERS if name != "grpo_nano"],
    "RL": RL,
    "RL except distill": RL[:-1],
    "offline": "sft rm dpo".split(),
}


def default_of(value):
    """The default as it is typed at the command line."""
    if value is None:
        return "required"
    try:
        value = ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value).removeprefix("ROOT / ").strip("'")
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "empty"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def choices_of(annotation):
    """The values of a Literal, as they are typed; none for another type."""
    for part in ast.walk(annotation):
        if isinstance(part, ast.Subscript) and ast.unparse(part.value) == "Literal":
            none = "None" if ast.unparse(annotation).endswith("| None") else ""
            values = ast.literal_eval(part.slice)
            return [*([values] if isinstance(values, str) else values), *([none] if none else [])]
    return []


@cache
def flags(path):
    """[section, name, default, help, annotation] of the Args of a script, and of those it is made from."""
    text = path.read_text()
    lines = text.splitlines()
    found = {}
    section = ""
    [args] = [x for x in ast.parse(text).body if isinstance(x, ast.ClassDef) and x.name == "Args"]
    for base in args.bases:
        if ast.unparse(base) == "prepare.Args":
            found |= {row[1]: row for row in flags(ROOT / "data_prep/prepare.py")}
    for node, following in zip(args.body, [*args.body[1:], None]):
        if not isinstance(node, ast.AnnAssign):
            continue
        said = lines[node.end_lineno - 1][node.end_col_offset :].strip()
        above = node.lineno - 2
        comments = []
        while lines[above].lstrip().startswith("#"):
            comment = lines[above].strip().removeprefix("#").strip()
            if comment.startswith("----"):
                section = comment.removeprefix("----").strip()
                break
            comments.insert(0, comment)
            above -= 1
        said = said.removeprefix("#").strip() or " ".join(comments)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said = " ".join(following.value.value.split())
        found[node.target.id] = [section, node.target.id, default_of(node.value), said, node.annotation]
    return list(found.values())


@cache
def scripts():
    """Path of each script that has flags, by its name."""
    paths = [ROOT / f"algos/{name}.py" for name in TRAINERS + TOOLS]
    paths += sorted(path for path in (ROOT / "data_prep").glob("*.py") if "class Args" in path.read_text())
    return {path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("algos/"): path for path in paths}


@cache
def data_scripts():
    """Scripts of data sets: those that have the flags of prepare.py."""
    return [name for name, path in scripts().items() if "(prepare.Args)" in path.read_text()]


def sets():
    return {"data sets": data_scripts(), **SETS}


def named(names):
    """Scripts as words, where names of SETS stand for several."""
    left = list(names)
    words = []
    for word, members in sets().items():
        if set(members) <= set(left):
            words.append(word)
            left = [name for name in left if name not in members]
    return ", ".join(words + [name.removeprefix("data_prep/") for name in left])


def with_default(name, default):
    """A flag as it is typed, with its default; a required flag has none."""
    if default == "required":
        return f"`{name}`"
    if default in ("on", "off", "empty"):
        return f"`{name}` ({default})"
    return f"`{name} {default}`"


def meaning(said, annotation):
    """A help text as a cell of a table, and the choices of the flag, unless the text names all of them."""
    text = said.replace("  ", " ").rstrip(".").replace("|", "\\|")
    choices = [x for x in choices_of(annotation) if f"{x}: " not in text or x != "None"]
    if all(re.search(rf"\b{re.escape(x)}\b", text) for x in choices):
        return text
    return f"{text} ({', '.join(f'`{x}`' for x in choices)})"


def all_flags():
    """[script, name as it is given, default, help, annotation] of every script; and of prepare.py."""
    for script, path in scripts().items():
        for _, name, default, said, annotation in flags(path):
            dashes = "" if "Positional" in ast.unparse(annotation) else "--"
            yield script, dashes + name, default, said, annotation


def of_one_script(script, name, default, said):
    """Whether a flag is of a script that makes data or models, and not of all data sets."""
    base = {(f"--{row[1]}", *row[2:4]) for row in flags(ROOT / "data_prep/prepare.py")}
    shared = script in data_scripts() and (name, default, said) in base
    return script.startswith("data_prep/") and script not in OF_ANY_FILE and not shared


def table():
    """A row for each meaning of a flag; meanings that differ in case alone are one."""
    found = {}
    for script, name, default, said, annotation in all_flags():
        if script == "data_prep/prepare" or of_one_script(script, name, default, said):
            continue
        text = meaning(said, annotation)
        uses = found.setdefault((name, text.lower()), (text, []))[1]
        uses.append((script, default))
    lines = ["| Flag and default | Meaning | Scripts |", "|---|---|---|"]
    for (name, _), (text, uses) in sorted(found.items(), key=lambda x: x[0][0].strip("-")):
        by_default = {}
        for script, default in uses:
            by_default.setdefault(default, []).append(script)
        usual, *others = sorted(by_default, key=lambda x: -len(by_default[x]))
        flag = with_default(name, usual)
        flag += "".join(f" (`{x}`: {named(by_default[x])})" for x in others)
        lines.append(f"| {flag} | {text} | {named([use[0] for use in uses])} |")
    return "\n".join(lines) + "\n"


def table_of_data():
    """A row for each script that makes data or models: its own flags, defaults and choices."""
    found = {}
    for script, name, default, said, annotation in all_flags():
        if script != "data_prep/prepare" and of_one_script(script, name, default, said):
            more = [f"`{x}`" for x in choices_of(annotation) if x != default]
            flag = with_default(name, default) + (f" ({', '.join(more)})" if more else "")
            found.setdefault(script.removeprefix("data_prep/"), []).append(flag)
    lines = ["| Script | Flags with their defaults, and other choices |", "|---|---|"]
    lines += [f"| {script} | {', '.join(found[script])} |" for script in sorted(found)]
    return "\n".join(lines) + "\n"


def page():
    names = [
        f"| {word} | {', '.join(x.removeprefix('data_prep/') for x in x)} |" for word, x in sets().items()
    ]
    text = HEAD + "\n".join(names) + "\n\n## All flags\n\n" + table()
    return text + OF_DATA + table_of_data()


def with_options(text, names):
    """A page with its table of options."""
    rows = ["<!-- made by docs/flags.py -->", "| there | here |", "|---|---|"]
    for name, here in names.items():
        here = re.sub(r"(--\w+)", r"`\1`", here.replace(" | ", ", or "))
        rows.append(f"| `{name}` | {here} |")
    rows.append("<!-- end -->")
    return re.sub(r"<!-- made by .*?<!-- end -->", "\n".join(rows), text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page())
    for path, names in OPTIONS.items():
        path.write_text(with_options(path.read_text(), names))
