"""The tree is as CONTRIBUTING.md draws it, and a folder imports only from those below it."""

import ast
import re

from conftest import ROOT

# from the lowest to the highest; the scripts of data_prep/ are used by nobody but people
LAYERS = "system", "rewards", "envs", "data_prep/lib", "data_prep", "algos", "benchmarks"
MAP = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]


def layer(path):
    """The number of the folder that a path belongs to."""
    found = [i for i, name in enumerate(LAYERS) if path.startswith(name + "/")]
    return max(found, key=lambda i: len(LAYERS[i]))


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
            if found.startswith(tuple(f"{x}/" for x in LAYERS)):
                yield found


def test_imports_go_downwards():
    upwards = []
    for name in LAYERS:
        for path in (ROOT / name).rglob("*.py"):
            file = path.relative_to(ROOT).as_posix()
            for found in imported(path):
                ours, theirs = layer(file), layer(found)
                script_of_data = theirs == LAYERS.index("data_prep") and LAYERS[ours] == "algos"
                if theirs > ours or script_of_data:
                    upwards.append(f"{file} imports {found}")
    assert not upwards


def test_common_is_small():
    """What knows no algorithm: flags, a run's log and checkpoints, CPUs, families of models."""
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "system").glob("*.py")}
    assert sum(lines.values()) <= 1607
    assert set(lines) == {
        *("__init__.py", "arguments.py", "checkpoints.py", "cpu.py"),
        *("families.py", "files.py", "gpu.py", "log_probs.py", "metrics.py", "run.py"),
    }


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
