"""The tree is as CONTRIBUTING.md draws it, and a folder imports only from those below it."""

import ast
import re

from conftest import ROOT

ROOMS = "system", "rewards", "envs", "data_prep/lib", "data_prep", "algos/variants", "algos", "benchmarks"
# what the files of a room may import besides those of their own room
MAY = {
    "system": ("rewards", "envs", "data_prep/lib"),
    "rewards": ("system/arguments", "system/plugins", "system/text", "system/thoughts"),
    "envs": ("rewards", "data_prep/lib", "system/cpu", "system/plugins", "system/text", "system/thoughts"),
    "data_prep/lib": ("system/arguments", "system/files", "system/text", "system/thoughts"),
    "data_prep": ROOMS[:4],
    "algos/variants": ("system/arguments", "system/plugins"),
    "algos": (*ROOMS[:4], "algos/variants"),
    "benchmarks": ROOMS,
}
MAP = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]


def room(path):
    """The folder that a path belongs to."""
    return max((name for name in ROOMS if path.startswith(name + "/")), key=len)


def imported(path):
    """Paths of this repository that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            found = name.replace(".", "/") + "/"
            if found.startswith(tuple(f"{x}/" for x in ROOMS)):
                yield found


def test_rooms_import_what_they_may():
    wrong = []
    for name in ROOMS:
        for path in (ROOT / name).rglob("*.py"):
            file = path.relative_to(ROOT).as_posix()
            own = room(file)
            for found in imported(path):
                allowed = tuple(f"{other}/" for other in MAY[own])
                if room(found) != own and not found.startswith(allowed):
                    wrong.append(f"{file} imports {found}")
    assert not wrong


def test_the_map_is_the_tree():
    """Each file of a folder that the map lists is in it, and nothing else is."""
    drawn, folder = {}, None
    for line in MAP.splitlines():
        if match := re.match(r"([\w/.]+/) ", line):
            folder = match[1]
        if folder:
            drawn.setdefault(folder, set()).update(re.findall(r"\b\w+\.py\b", line))
    assert [name for name in drawn if not (ROOT / name).is_dir()] == []
    for name in ("algos/", "rewards/", "envs/", "system/", "data_prep/", "data_prep/lib/", "benchmarks/"):
        there = {path.name for path in (ROOT / name).glob("*.py")} - {"__init__.py"}
        assert there == drawn[name], name
    folders = {f"{path.name}/" for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert folders <= set(drawn) and len(MAP.splitlines()) <= 48


def test_the_table_of_scripts_is_complete():
    table = re.findall(r"^\|.*?\| `(\w+\.py)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(path.name for path in (ROOT / "algos").glob("*.py"))
