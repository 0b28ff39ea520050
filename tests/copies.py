"""What a copy of a function, class or constant is, and how an edit of one is carried over to the others."""

import ast
import re
import subprocess
from collections import defaultdict
from difflib import SequenceMatcher
from pathlib import Path
from tempfile import TemporaryDirectory


def units(text, script="script"):
    """Functions, classes and constants at the top level of a script -> {name: text}."""
    lines, found = text.splitlines(), {}
    for node in ast.parse(text, script).body:
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else getattr(node, "name", None)
        if name:
            start = min(x.lineno for x in (node, *getattr(node, "decorator_list", ())))
            found[name] = "\n".join(lines[start - 1 : node.end_lineno])
    return found


def stripped(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def copies(texts, own):
    """{script: text} -> {name: {script: lines}} of units that several scripts share; own: see OWN."""
    found = defaultdict(dict)
    for script, text in texts.items():
        for name, unit in units(text).items():
            if script not in own.get(name, ()):
                found[name][script] = stripped(unit)
    return {name: shared for name, shared in found.items() if len(shared) > 1}


def strange(lines, master):
    """Lines that the master has not, or not after the lines before them."""
    found, start = [], 0
    for line in lines:
        if line in master[start:]:
            start = master.index(line, start) + 1
        else:
            found.append(line)
    return found


def check(texts, own, variants):
    """Stop at a copy that is no ordered subset of the longest, or at a variant that is none."""
    left = dict(variants)
    for name, shared in copies(texts, own).items():
        longest = max(shared, key=lambda script: len(shared[script]))
        for script, lines in shared.items():
            found, listed = strange(lines, shared[longest]), left.pop((name, script), [])
            says = f"{name} of {script} has lines that {longest}, the longest, has not: {found}"
            assert found == listed, f"{says}; VARIANTS has {listed}; make fix-copies FROM=algos/{longest}"
    assert not left, f"no copies: {left}"


def changes(old, new):
    """Lines a to b of old become lines c to d of new -> a, b, c, d; line by line where they are as many."""
    lines = ([line.strip() for line in text] for text in (old, new))
    for _, a, b, c, d in SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        if b - a == d - c:
            yield from ((a + k, a + k + 1, c + k, c + k + 1) for k in range(b - a))
        else:
            yield a, b, c, d


def carry(old, new, copy):
    """Merge the edit old -> new of a unit into a copy, by git -> text, whether there is a conflict.

    First old and new lose the lines that the copy leaves out, and get those that it alone has: beside such
    lines git would see a conflict in each edit. It shall in new lines alone: they may belong to that block.
    """
    old, new, copy = (re.findall(r"\n*.+", text) for text in (old, new, copy))
    edits, differences = [*changes(old, new)], [*changes(old, copy)]
    left_out = {i for a, b, c, d in differences if c == d for i in range(a, b)}
    extra = {a: copy[c:d] for a, b, c, d in differences if a == b}
    for a, b, *_ in edits:
        if a == b:
            extra.pop(a, None)
            left_out -= set() if {a - 1, a} <= left_out else {a - 1, a}
    head, edited = [], []
    for a, b, c, d in edits:
        if not ({*range(a, b)} or {a - 1, a}) <= left_out:
            head += extra.get(a, []) + old[a:b]
            edited += extra.get(a, []) + new[c:d]
    with TemporaryDirectory() as folder:
        for name, lines in dict(copy=copy, HEAD=head, edited=edited).items():
            (Path(folder) / name).write_text("".join(lines).strip("\n") + "\n")
        command = ["git", "merge-file", "-p", "copy", "HEAD", "edited"]
        merged = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert merged.returncode < 128, "git merge-file failed"
    return merged.stdout.strip("\n"), merged.returncode > 0


def fix_copies(source, scripts, own):
    """Carry what has changed in a script since HEAD over to the others -> whether there is a conflict."""
    command = ["git", "show", f"HEAD:./{source.name}"]
    head = subprocess.run(command, cwd=source.parent, stdout=subprocess.PIPE, text=True, check=True).stdout
    old, new, any_conflict = units(head), units(source.read_text(), str(source)), False
    for name in sorted(old.keys() ^ new.keys()):
        print(f"{source}: {name} is {'new' if name in new else 'gone'}, which is not carried over")
    changed = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    texts = {path: path.read_text() for path in map(source.with_name, scripts) if path != source}
    found = {path: units(text, str(path)) for path, text in texts.items()}  # first all: it may be no Python
    for path, text in texts.items():
        for name, copy in found[path].items():
            if name not in changed or {path.name, source.name} & own.get(name, set()):
                continue
            merged, conflict = carry(old[name], new[name], copy)
            without, _ = carry(new[name], old[name], copy)
            if without != copy and carry(old[name], new[name], without) == (copy, False):
                merged, conflict = copy, False  # it has been carried before
            text = text.replace(f"\n{copy}\n", f"\n{merged}\n")
            any_conflict |= conflict
            result = "has a conflict" if conflict else "is merged" if merged != copy else "stays as it is"
            print(f"{path}: {name} {result}")
        path.write_text(text)
    return any_conflict
