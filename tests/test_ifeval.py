"""Verifiable instructions: each kind by hand, and every question that data_prep/instructions.py makes up."""

import json
import math
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, golden, run
from hypothesis import given
from hypothesis import strategies as st

from data_prep.instructions import INSTRUCTIONS
from rewards.ifeval import CHECKS, check_row, compute_score

CASES = golden("ifeval")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["instruction"])


def score(text, *instructions):
    names, kwargs = zip(*instructions, strict=True)
    return compute_score("ifeval", text, json.dumps(dict(instruction_id_list=names, kwargs=kwargs)))


def test_a_text_between_two_languages_always_has_the_same():
    """langdetect draws at random: without its seed this text is Afrikaans three times of four, or English."""
    asked = "language:response_language", dict(language="af")
    assert len({score("the owls die eulen", asked)["acc"] for _ in range(60)}) == 1


def test_every_kind_has_a_case():
    assert {case["instruction"] for case in CASES} == {*CHECKS} >= {*INSTRUCTIONS}


@each_case
def test_by_hand(case):
    name = case["instruction"]
    for text in case["right"]:
        found = score(text, (name, case["kwargs"]))
        assert found == dict(score=1.0, acc=1.0, pred="all followed"), text
    for text in [*case["wrong"], "", " \n"]:
        found = score(text, (name, case["kwargs"]))
        assert found == dict(score=0.0, acc=0.0, pred=name), text


ALL_KEYS = {key for case in CASES for key in case["kwargs"]}


@each_case
def test_every_spelling_of_a_row(case):
    """`datasets` gives every dict all keys, often null; parquet gives arrays and floats."""
    name = case["instruction"]
    kwargs = case["kwargs"]
    names = [name, "punctuation:no_comma"]
    nulls = [dict.fromkeys(ALL_KEYS) | kwargs, dict.fromkeys(ALL_KEYS)]
    numbers = [{k: float(v) if isinstance(v, int) else v for k, v in x.items()} for x in nulls]
    arrays = [{k: np.array(v) if isinstance(v, list) else v for k, v in x.items()} for x in nulls]
    columns = {key: [row[key] for row in nulls] for key in ALL_KEYS}
    nan = [{k: math.nan if v is None else v for k, v in x.items()} for x in nulls]
    texts = [json.dumps(x) for x in nulls]
    lists = [kwargs, {}], [kwargs, None], nulls, tuple(nulls), numbers, arrays, columns, nan, texts
    rows = [dict(instruction_id_list=names, kwargs=x) for x in lists]
    rows.append(dict(instruction_id_list=np.array(names), kwargs=np.array(nulls, dtype=object)))
    rows.append(dict(instruction_id_list=json.dumps(names), kwargs=json.dumps(nulls), key=1000, prompt="x"))
    rows += [json.dumps(dict(instruction_id_list=names, kwargs=x)) for x in (nulls, columns)]
    for row in rows:
        for text in case["right"]:
            assert name not in compute_score("ifeval", text, row)["pred"], row
        for text in case["wrong"]:
            assert name in compute_score("ifeval", text, row)["pred"], row


def test_a_missing_argument_is_an_error_of_the_row():
    for row in ([{}], [{"end_phrase": None}], None):
        with pytest.raises(ValueError, match="startend:end_checker has no end_phrase"):
            compute_score("ifeval", "x", dict(instruction_id_list=["startend:end_checker"], kwargs=row))
    row = dict(instruction_id_list=["startend:end_checker"], kwargs=[{"end_phrase": "[end]"}])
    assert compute_score("ifeval", "the [end]", row)["acc"] == 1


@pytest.mark.parametrize("case", golden("ifeval_unfit"), ids=lambda case: case["instruction"])
def test_an_argument_of_another_kind_is_an_error_of_the_row(case):
    name = case["instruction"]
    with pytest.raises(ValueError, match=f"{name} cannot have|the language is 'English'; .*, en, "):
        check_row("ifeval", dict(instruction_id_list=[name], kwargs=[case["kwargs"]]))


def test_a_missing_package_is_an_error_of_the_row(monkeypatch):
    row = dict(instruction_id_list=["language:response_language"], kwargs=[dict(language="en")])
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ValueError, match="response_language needs langdetect: pip install --no-deps -r req"):
        check_row("ifeval", row)


def test_the_share_of_several():
    both = ("punctuation:no_comma", {}), ("change_case:english_capital", {})
    assert score("OWLS ARE", *both) == dict(score=1.0, acc=1.0, pred="all followed")
    assert score("owls are", *both) == dict(score=0.5, acc=0.0, pred="change_case:english_capital")


@given(st.text(alphabet='a,A.*-<>[]"`{}\n P S:1', max_size=40), st.randoms())
def test_any_text_has_a_score(text, random):
    for name, (_, draw) in INSTRUCTIONS.items():
        assert score(text, (name, draw(random)))["score"] in (0.0, 1.0)


def test_questions(tmp_path):
    sizes = "--train_size", 400, "--val_size", 60, "--test_size", 60
    for out in ("a", "b"):
        run(ROOT / "data_prep/instructions.py", "--local_save_dir", tmp_path / out, *sizes)
    splits = {}
    for split, size in dict(train=400, val=60, test=60).items():
        path = f"{split}.parquet"
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
        rows = pq.read_table(tmp_path / "a" / path).to_pylist()
        questions = [row["prompt"][0]["content"] for row in rows]
        assert len({*questions}) == size and not any("{" in question for question in questions)
        for row in rows:
            check_row("ifeval", row["reward_model"]["ground_truth"])
        splits[split] = {question.split(".")[0] for question in questions}  # the tasks, with their subjects
    assert not splits["train"] & (splits["val"] | splits["test"]) and not splits["val"] & splits["test"]
    done = run(ROOT / "data_prep/instructions.py", "--train_size", 0, check=False)
    assert done.stderr.strip() == "error: --train_size is 0; it must be from 1 to 5000"
