"""docs/reference/flags.md is made from the Args of the scripts: `python docs/flags.py` writes it.

A help that begins with a condition says when its flag is read: that it is, then, and has no effect elsewhere.
"""

import itertools
import json
import re
from dataclasses import fields
from importlib import import_module
from typing import get_args

import pyarrow.parquet as pq
import pytest
from conftest import ROOT, golden, run
from tyro._docstrings import get_field_docstring

from data_prep.lib.schema import write_parquet
from docs import flags
from system import arguments


def test_every_script_has_its_flags_in_the_page():
    assert {path.stem for path in (ROOT / "algos").glob("*.py")} == {*flags.TRAINERS, *flags.TOOLS}


def test_flags_have_a_help_and_the_page_is_fresh():
    lacking = [row[1] for path in (ROOT / "algos").glob("*.py") for row in flags.flags(path) if not row[3]]
    assert not lacking
    assert flags.PAGE.read_text() == flags.page(), "python docs/flags.py"


def test_the_pages_on_other_libraries_have_the_table():
    for path, names in flags.OPTIONS.items():
        text = path.read_text()
        assert text == flags.with_options(text, names), "python docs/flags.py"


def test_each_meaning_of_a_flag_has_a_row():
    text = flags.table().lower()
    for row in (
        "`--seed 1` | with --temperature: seed for sampling |",
        "`--lam 1.0` | share of the prompts",
        "| `runs` | dir",
    ):
        assert row in text
    for script, name, _, said, annotation in flags.all_flags():
        if not script.startswith("data_prep/"):
            row = rf"\| `{re.escape(name)}.*\| {re.escape(flags.meaning(said, annotation))} \|"
            assert re.search(row, text, re.IGNORECASE), (script, name)


def conditions(script):
    """{flag: its condition, as `with` and `--val_files`} of a script."""
    found = {}
    for field in fields(script.Args):
        said = arguments.CONDITION.match(get_field_docstring(script.Args, field.name, ()))
        if said:
            found[field.name] = said[1].lower(), said[2]
    return found


SCRIPTS = [
    import_module(f"algos.{name}".replace("algos.data_prep/", "data_prep.")) for name in flags.scripts()
]
CONDITIONAL = [(script, flag) for script in SCRIPTS for flag in conditions(script)]


@pytest.mark.parametrize(("script", "flag"), CONDITIONAL)
def test_a_flag_is_refused_where_its_condition_is_false(script, flag):
    """Whatever the flags that it names are; nowhere, if it has its default."""
    word, condition = conditions(script)[flag]
    defaults = {field.name: field.default for field in fields(script.Args)}
    types = {field.name: field.type for field in fields(script.Args)}
    values = {}  # of the flags that the condition names
    for term in re.split(" and | or ", condition):
        if term.startswith("--"):
            name, _, term = term[2:].partition(" ")
            values[name] = [defaults[name]]
        above = re.match(r"above (\d+)", term)
        if above:
            values[name] += [int(above[1]), int(above[1]) + 1]
        elif term == "FILE.py:NAME":
            values[name] += [("none",), ("none", "mine.py:score")]
        elif term:
            assert term in get_args(types[name]), f"--{name} is never {term}"
            values[name] += get_args(types[name])
        else:
            values[name] += [None, 0.5]
    verdicts = set()
    for given in itertools.product(*values.values()):
        given = defaults | dict(zip(values, given))
        is_read = arguments.holds(condition, given) == (word == "with")
        for value, refused in (("another", not is_read), (defaults[flag], False)):
            typed = given | {flag: value}
            idle = arguments.unread(typed, script.Args)
            line = arguments.unusable({flag: value}, defaults, idle) or ""
            assert refused == line.startswith(f"--{flag} another has no effect with"), (given, line)
        verdicts.add(is_read)
    assert verdicts == {True, False}


NEEDED = dict(generate="--data a --output b --model c", eval="--data a --output b")
NEEDED |= dict(agent="--env a", distill="--teacher a")


@pytest.mark.parametrize("case", golden("flags_read"), ids=lambda case: f"{case['script']} {case['words']}")
def test_flags_without_an_effect(case, monkeypatch):
    monkeypatch.setattr("system.arguments.no_model", lambda _: None)
    name = case["script"]
    words = NEEDED.get(name, "") + " " + case["words"]
    if name not in ("generate", "eval"):
        words += " --model a --train_files a --output_dir b"
    said = None
    try:
        arguments.parse(import_module(f"algos.{name}").Args, words.split())
    except SystemExit as stop:
        said = stop.code
    assert said == (case["line"] and f"error: {case['line']}")


def test_flags_are_read_under_their_condition(one_layer, arithmetic, tmp_path):
    """In runs of each trainer: its other flags change nothing, not even those that are looked at."""
    rows, texts, pairs = arithmetic / "val.parquet", tmp_path / "texts.parquet", tmp_path / "pairs.parquet"
    talks = []
    two = []
    for row in pq.read_table(rows).to_pylist():
        answer = row["extra_info"]["answer"]
        talk = [*row["prompt"], dict(role="assistant", content=answer)]
        talks.append(row | dict(messages=talk, text=answer))
        two.append(dict(prompt=row["prompt"], chosen=answer, rejected="0"))
    write_parquet(talks, texts)
    write_parquet(two, pairs)
    done = run(
        ROOT / "tests/workers/flags_read.py", one_layer, rows, texts, pairs, tmp_path / "runs", ranks=1
    )
    seen = {}  # {script: sets of flags without an effect}
    for line in re.findall(r"^READ (.+)", done.stdout, re.MULTILINE):
        name, missed, idle, same = json.loads(line)
        assert (missed, same) == ([], True), line
        seen.setdefault(name, []).append({*idle})
    assert {*seen} == {*flags.TRAINERS}
    for name, idle in seen.items():
        everywhere = conditions(import_module(f"algos.{name}")).keys() - {"reward_timeout_s", "sp_attention"}
        assert everywhere <= set.union(*idle), name  # and somewhere it has one
        assert not everywhere & set.intersection(*idle), name
