"""Prompts by their pass rate, from files that eval.py has scored."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import golden

from data_prep import difficulty
from data_prep.arithmetic import make_row
from data_prep.lib.schema import load_rows

GOOD, BAD, FAILED = dict(score=1.0), dict(score=1.0, acc=0.0), dict(score=0.0, failure="E: x")
PROMPTS = {  # question: results of four responses
    (1, 1): [GOOD] * 4,
    (1, 2): [GOOD, GOOD, GOOD, BAD],
    (1, 3): [GOOD, BAD, BAD, BAD],
    (1, 4): [BAD] * 4,
    (1, 5): [FAILED] * 4,
    (1, 6): [GOOD, BAD, FAILED, FAILED],
}


def write(path, prompts):
    rows = []
    for i, (question, results) in enumerate(prompts.items()):
        row = make_row("train", i, *question) | dict(responses=["x"] * len(results))
        row |= dict(response_tokens=[1] * len(results), scores=[x["score"] for x in results])
        rows.append(row | dict(results=[json.dumps(x) for x in results]))
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def scored(tmp_path):
    return write(tmp_path / "scored.parquet", PROMPTS)


def build(out, *files, **flags):
    """-> {question: pass rate} of train.parquet."""
    difficulty.main(difficulty.Args(files=files, local_save_dir=str(out), **flags))
    rows = load_rows(out / "train.parquet", ["prompt", "extra_info"])
    return {row["prompt"][0]["content"]: row["extra_info"]["pass_rate"] for row in rows}


@pytest.mark.parametrize("case", golden("pass_rates"))
def test_what_is_kept(scored, tmp_path, case):
    """Both ends belong to it."""
    found = build(tmp_path, scored, low=case["low"], high=case["high"])
    assert found == case["kept"]


def test_counts_and_columns(scored, tmp_path, capsys):
    build(tmp_path, scored)
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/train.parquet: 3 rows, 3 of 6 prompts (50.0%), correct on average in 50.0%",
        "prompts left out: 1 correct in more than 90%; 1 correct in less than 10%;"
        " 1 no response could be scored",
    ]
    names = pq.read_schema(tmp_path / "train.parquet").names
    assert names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def test_a_prompt_in_two_files_is_one(scored, tmp_path):
    more = write(tmp_path / "more.parquet", {(1, 3): [GOOD] * 4, (7, 7): [GOOD, BAD]})
    assert build(tmp_path, scored, more) == {"1+2=": 0.75, "1+3=": 0.625, "1+6=": 0.5, "7+7=": 0.5}


def test_right_decides_on_graded_scores(tmp_path):
    results = [dict(score=x / 4) for x in range(4)]
    path = write(tmp_path / "graded.parquet", {(1, 2): results})
    assert build(tmp_path, path, right=0.5) == {"1+2=": 0.5}


def test_bad_input(scored, tmp_path):
    with pytest.raises(ValueError, match="0 <= low <= high <= 1"):
        build(tmp_path, scored, low=0.9, high=0.1)
    with pytest.raises(ValueError, match=r"no prompt from --low to --high: \d correct in"):
        build(tmp_path, scored, low=0.6, high=0.7)
    pq.write_table(pa.Table.from_pylist([make_row("train", 0, 1, 2)]), tmp_path / "bare.parquet")
    with pytest.raises(ValueError, match="no column 'results'"):
        build(tmp_path, str(tmp_path / "bare.parquet"))
