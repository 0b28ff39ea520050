"""The messages of docs/reference/errors.md are those with which scripts stop."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/errors.md"


def skeleton(node, names):
    """A message with ... in place of what is filled in; None if nothing is fixed.

    names: strings that the function has put together before, by name.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "one_line":
        [node] = node.args
    if not isinstance(node, ast.JoinedStr):
        return None
    texts = []
    for part in node.values:
        name = ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else None
        texts.append(part.value if name is None else skeleton(names.get(name), {}) or "...")
    text = re.sub(r"(\.\.\.)+", "...", "".join(texts))
    return text if re.search(r"\w{3}", text) else None


def calls_of(tree, *names):
    """The arguments of each call of functions of these names."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call.args for call in calls if ast.unparse(call.func) in names]


def of_rewards():
    """What a reward, an environment or a variant is refused with, or fails with for every response."""
    files = [*(ROOT / "rewards").glob("*.py"), *(ROOT / "rewards/manager").glob("*.py")]
    envs = "__init__", "openenv", "pool", "search", "tools", "verifiers"
    files += [ROOT / f"envs/{name}.py" for name in envs]
    files.append(ROOT / "algos/variants/__init__.py")
    found = set()
    for path in files:
        if path.name not in ("results.py", "wire.py", "worker.py"):  # the failures of single responses
            calls = calls_of(ast.parse(path.read_text()), "ValueError", "stop")
            found |= {skeleton(arguments[0], {}) for arguments in calls}
    return found


def of_data():
    """What a file or a row is refused with."""
    found = set()
    for path in (ROOT / "data_prep/lib").glob("*.py"):
        calls = calls_of(ast.parse(path.read_text()), "ValueError")
        found |= {skeleton(arguments[0], {}) for arguments in calls}
    return found


def messages():
    """What `fail` gets, the messages that `refuse` gets, what `impossible` returns; rewards and data."""
    found = of_rewards() | of_data()
    cache = ROOT / "data_prep/lib/cache.py"
    for path in sorted([*(ROOT / "algos").glob("**/*.py"), *(ROOT / "system").glob("*.py"), cache]):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            nodes = [*ast.walk(function)]
            sets = [x for x in nodes if isinstance(x, ast.Assign | ast.AugAssign)]
            names = {ast.unparse(x.targets[0]): x.value for x in sets if isinstance(x, ast.Assign)}
            if function.name.startswith("wrong_"):  # flags together: `impossible` of system/arguments.py
                found |= {skeleton(x.value, names) for x in nodes if isinstance(x, ast.Return)}
            found |= {skeleton(arguments[0], names) for arguments in calls_of(function, "fail")}
            for pairs in calls_of(function, "refuse"):
                found |= {skeleton(pair.elts[1], names) for pair in pairs if isinstance(pair, ast.Tuple)}
    return {" ".join(message.split()) for message in found - {None}}


def documented():
    rows = re.findall(r"^\| `` ?(.*?) ?`` \|", PAGE.read_text(), re.MULTILINE)
    return set(rows)


def test_the_messages_of_the_page_are_in_the_code():
    assert documented()
    assert documented() - messages() == set()
