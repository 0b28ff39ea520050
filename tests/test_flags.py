"""docs/reference/flags.md is made from the Args of the scripts: `python docs/flags.py` writes it."""

import re

from conftest import ROOT

from docs import flags


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
