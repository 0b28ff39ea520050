"""Write docs/reference/flags.md, a table of all flags, from the Args of the scripts, and the tables of
options in the pages on verl and TRL, from system/elsewhere.py; a test compares them.

python docs/flags.py
"""

import ast
import re
import sys
from collections import Counter
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

Every flag of every script, from its `Args`. `SCRIPT --help` prints the whole help, and what a flag takes.

A flag takes underscores or hyphens: `--max_prompt_length` and `--max-prompt-length` are one flag.
A switch such as `--packing` is turned off by `--no_packing`.
A flag of several values takes them separated by spaces.

A default in brackets is that of the scripts after it. Names of several scripts:

| Name | Scripts |
|---|---|
"""
TRAINERS = "sft rm dpo grpo_nano grpo dapo ppo agent distill".split()
TOOLS = "generate eval report export quantize".split()
RL = "grpo dapo ppo agent distill".split()
SETS = {  # names that stand for scripts, the largest first
    "trainers": TRAINERS,
    "trainers except nano": [name for name in TRAINERS if name != "grpo_nano"],
    "RL with nano": ["grpo_nano", *RL],
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
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def flags(path):
    """[section, name, default, help] of the Args of a script, and of the Args that it is made from."""
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
        found[node.target.id] = [section, node.target.id, default_of(node.value), said]
    return list(found.values())


def scripts():
    """Path of each script that has flags, by its name."""
    paths = [ROOT / f"algos/{name}.py" for name in TRAINERS + TOOLS]
    paths += sorted(path for path in (ROOT / "data_prep").glob("*.py") if "class Args" in path.read_text())
    return {path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("algos/"): path for path in paths}


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


def short(text):
    """The first phrase of a help text."""
    return re.split(r"; |\. ", text)[0].rstrip(".").replace("|", "\\|")


def table():
    found = {}
    for script, path in scripts().items():
        if script == "data_prep/prepare":
            continue
        for _, name, default, said in flags(path):
            found.setdefault(name, []).append((script, default, said))
    lines = ["| Flag | Meaning | Default | Scripts |", "|---|---|---|---|"]
    for name, uses in sorted(found.items()):
        meaning = Counter(short(said) for _, _, said in uses).most_common(1)[0][0]
        by_default = {}
        for script, default, _ in uses:
            by_default.setdefault(default, []).append(script)
        usual, *others = sorted(by_default, key=lambda x: -len(by_default[x]))
        defaults = f"`{usual}`"
        defaults += "".join(f" (`{x}`: {named(by_default[x])})" for x in others)
        lines.append(f"| `--{name}` | {meaning} | {defaults} | {named([use[0] for use in uses])} |")
    return "\n".join(lines) + "\n"


def page():
    names = [
        f"| {word} | {', '.join(x.removeprefix('data_prep/') for x in x)} |" for word, x in sets().items()
    ]
    return HEAD + "\n".join(names) + "\n\n## All flags\n\n" + table()


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
