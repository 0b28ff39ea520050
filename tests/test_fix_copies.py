"""The rule of copies, and how an edit is carried over to them, on two small scripts."""

import subprocess

import pytest
from copies import check, fix_copies

LOSS = '''
RATE = 0.1


def loss(a, b, kind):
    """Of numbers a, b."""
    a = a.exp()

    b = b.exp()
    if kind == "l1":
        return (a - b).abs()
    return (a - b).square()
'''
SHORT = LOSS.replace('    if kind == "l1":\n        return (a - b).abs()\n', "")


@pytest.mark.parametrize(
    ("old", "new", "name", "lines"),
    [
        ("    a = a.exp()\n", "", "loss", []),
        ("0.1", "0.2", "RATE", ["RATE = 0.2"]),
        ("square", "sqrt", "loss", ["return (a - b).sqrt()"]),
        ("    a = a.exp()\n\n    b = b.exp()", "    b = b.exp()\n    a = a.exp()", "loss", ["a = a.exp()"]),
        ("    b =", "    b = b + 1\n    b =", "loss", ["b = b + 1"]),
    ],
    ids=["left out", "constant", "changed", "moved", "added"],
)
def test_a_line_of_its_own_is_found(old, new, name, lines):
    texts = {"grpo.py": LOSS, "sft.py": SHORT.replace(old, new)}
    check(texts, {}, {(name, "sft.py"): lines})
    wrong = {} if lines else {("loss", "sft.py"): ["a = a.exp()"]}
    with pytest.raises(AssertionError, match=f"{name} of sft"):
        check(texts, {}, wrong)


def test_fix_copies(tmp_path, capsys):
    """An edit is carried where a copy has the line, also beside lines that only one of both has."""
    scripts = ["grpo.py", "sft.py", "rm.py"]
    source, short, long = (tmp_path / script for script in scripts)
    before = [LOSS, SHORT, LOSS.replace("    return (a - b).s", "    b = b + 1\n    return (a - b).s")]
    after = [text.replace("0.1", "0.2").replace("square", "sqrt") for text in before]
    for path, text in zip((source, short, long), before):
        path.write_text(text)
    for command in ("init -q", "add .", "-c user.name=me -c user.email=me commit -qm copies"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)

    source.write_text(after[0].replace("l1", "L1") + "NEW = 1\n")  # "l1" is not in the shorter copy
    for _ in range(2):  # the second time changes nothing
        assert not fix_copies(source, scripts, {})
        assert [short.read_text(), long.read_text()] == [after[1], after[2].replace("l1", "L1")]
    assert "NEW is new" in capsys.readouterr().out

    short.write_text(SHORT.replace("square", "sum"))
    assert not fix_copies(source, scripts, {"loss": {"sft.py"}}) and "sum" in short.read_text()
    assert fix_copies(source, scripts, {}) and ">>>>>>> edited" in short.read_text()
    assert "sft.py: loss has a conflict" in capsys.readouterr().out
