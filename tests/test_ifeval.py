"""Verifiable instructions: each kind by hand, and every question that data_prep/instructions.py makes up."""

import json
import math
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, run
from hypothesis import given
from hypothesis import strategies as st

from data_prep.instructions import INSTRUCTIONS
from rewards.ifeval import CHECKS, check_row, compute_score

# instruction, its arguments, texts that follow it, texts that do not
CASES = [
    ("change_case:english_capital", {}, ["OWLS, 2 OF THEM!"], ["OWLS are", "12"]),
    ("change_case:english_lowercase", {}, ["two owls."], ["Two owls.", "12"]),
    (
        "detectable_content:number_placeholders",
        dict(num_placeholders=2),
        ["[a] and []"],
        ["[a] b]", "[a\nb] [c]"],
    ),
    (
        "detectable_content:postscript",
        dict(postscript_marker="P.S."),
        ["Hi.\nP.S. Bye", "p. s. x"],
        ["PS", "P.P.S"],
    ),
    ("detectable_content:postscript", dict(postscript_marker="P.P.S"), ["P.P.S Bye"], ["P.S. Bye"]),
    ("detectable_content:postscript", dict(postscript_marker="PS:"), ["ps: Bye"], ["P.P.S Bye"]),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', "```json\n[1]\n```", "3"],
        ["{a: 1}", "JSON: {}", "[" * 9999],
    ),
    (
        "detectable_format:number_bullet_lists",
        dict(num_bullets=2),
        ["* a\n* b", "x\n- a\n * b"],
        ["* a", "**a**\n* b"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        dict(num_highlights=2),
        ["*a* b *c*", "**a** *b*"],
        ["*a*", "** **"],
    ),
    ("detectable_format:title", {}, ["<<Owls>>\nx", "a <<b c>>"], ["<Owls>", "<< >>", "<<a\nb>>"]),
    ("keywords:existence", dict(keywords=["new", "c++"]), ["News of C++"], ["new", "c++"]),
    ("keywords:forbidden_words", dict(forbidden_words=["the", "a"]), ["Then all"], ["The owl", "is A"]),
    ("keywords:frequency", dict(keyword="owl", frequency=2, relation="at least"), ["Owls owl"], ["owl"]),
    ("keywords:frequency", dict(keyword="owl", frequency=2, relation="less than"), ["owl"], ["owl owl"]),
    ("length_constraints:number_words", dict(num_words=3, relation="at least"), ["a b, c"], ["a b"]),
    ("length_constraints:number_words", dict(num_words=3, relation="less than"), ["a b"], ["a b c"]),
    ("punctuation:no_comma", {}, ["a b"], ["a, b"]),
    ("startend:end_checker", dict(end_phrase="Peace!"), ["Owls. peace! ", '"Peace!"'], ["Peace! x"]),
    ("length_constraints:number_paragraphs", dict(num_paragraphs=2), ["a *** b", "a\n***\nb***"], ["a"]),
    (
        "length_constraints:nth_paragraph_first_word",
        dict(num_paragraphs=2, nth_paragraph=2, first_word="owls"),
        ["a\n\nOwls, b"],
        ["Owls", "a\n\nb owls", "a\n\nOwls\n\nc"],
    ),
    (
        "detectable_format:multiple_sections",
        dict(section_spliter="PART", num_sections=2),
        ["PART 1 PART 2"],
        ["PART"],
    ),
    ("detectable_format:constrained_response", {}, ["My answer is yes."], ["Yes."]),
    ("combination:two_responses", {}, ["a ****** b", "a******b******"], ["a", "a******a", "a************b"]),
    ("combination:repeat_prompt", dict(prompt_to_repeat="Say a"), ["say a b"], ["b"]),
    ("keywords:letter_frequency", dict(letter="a", let_frequency=2, let_relation="at least"), ["Aa"], ["a"]),
    (
        "change_case:capital_word_frequency",
        dict(capital_frequency=4, capital_relation="at least"),
        [
            "A B C D",
            "IT'S. CANNOT",
            "AT&T (U.S.) X",
            "DON'T. WANNA",
            "ONE--TWO THREE,FOUR",
            "'A' \"B\" “C” [D]",
        ],
        ["A-B C-D E a", "WANNA-BE 3,000 B.C. A/B", "It's mine, NOT Yours", "1 2 3 4"],
    ),
    (
        "length_constraints:number_sentences",
        dict(num_sentences=2, relation="at least"),
        ["Dr. A. Owl left. It is 3.5 m.", "Wow! Owls", "Owls.\n\nOwls.", "It is!!", "Owls, etc. and so on"],
        ["Dr. Owl left at 3 p.m. yesterday", "Owls.owls", "- owls\n- U.S. owls"],
    ),
    (
        "length_constraints:number_sentences",
        dict(num_sentences=2, relation="less than"),
        ["No owls at 3 p.m. in the U.S. today."],
        ["No. Owls."],
    ),
    ("language:response_language", dict(language="en"), ["The owls are flying", "12"], ["Die Eulen fliegen"]),
    (
        "language:response_language",
        dict(language="zh-cn"),
        ["猫头鹰在夜里飞行，寻找食物。"],
        ["梟は夜に飛びます。"],
    ),
    ("startend:quotation", {}, [' "a\n"b" c"\n', '""'], ['"', '"a', "'a'"]),
]


def score(text, *instructions):
    names, kwargs = zip(*instructions, strict=True)
    return compute_score("ifeval", text, json.dumps(dict(instruction_id_list=names, kwargs=kwargs)))


def test_a_text_between_two_languages_always_has_the_same():
    """langdetect draws at random: without its seed this text is Afrikaans three times of four, or English."""
    asked = "language:response_language", dict(language="af")
    assert len({score("the owls die eulen", asked)["acc"] for _ in range(60)}) == 1


def test_every_kind_has_a_case():
    assert {name for name, *_ in CASES} == {*CHECKS} >= {*INSTRUCTIONS}


@pytest.mark.parametrize(("name", "kwargs", "right", "wrong"), CASES)
def test_by_hand(name, kwargs, right, wrong):
    for text in right:
        assert score(text, (name, kwargs)) == dict(score=1.0, acc=1.0, pred="all followed"), text
    for text in [*wrong, "", " \n"]:
        assert score(text, (name, kwargs)) == dict(score=0.0, acc=0.0, pred=name), text


ALL_KEYS = {key for _, kwargs, _, _ in CASES for key in kwargs} | {"language"}


@pytest.mark.parametrize(("name", "kwargs", "right", "wrong"), CASES)
def test_every_spelling_of_a_row(name, kwargs, right, wrong):
    """`datasets` gives every dict all keys, often null; parquet gives arrays and floats."""
    names = [name, "punctuation:no_comma"]
    nulls = [dict.fromkeys(ALL_KEYS) | kwargs, dict.fromkeys(ALL_KEYS)]
    numbers = [{k: float(v) if isinstance(v, int) else v for k, v in x.items()} for x in nulls]
    arrays = [{k: np.array(v) if isinstance(v, list) else v for k, v in x.items()} for x in nulls]
    columns = {key: [row[key] for row in nulls] for key in ALL_KEYS}
    nan = [{k: math.nan if v is None else v for k, v in x.items()} for x in nulls]
    rows = [
        *(
            dict(instruction_id_list=names, kwargs=x)
            for x in ([kwargs, {}], nulls, numbers, arrays, columns, nan)
        ),
        dict(instruction_id_list=np.array(names), kwargs=np.array(nulls, dtype=object)),
        dict(instruction_id_list=tuple(names), kwargs=tuple(nulls), key=1000, prompt="x"),
        dict(instruction_id_list=names, kwargs=[kwargs, None]),
        dict(instruction_id_list=json.dumps(names), kwargs=json.dumps(nulls)),
        dict(instruction_id_list=names, kwargs=[json.dumps(x) for x in nulls]),
        json.dumps(dict(instruction_id_list=names, kwargs=nulls)),
        json.dumps(dict(instruction_id_list=names, kwargs=columns)),
    ]
    for row in rows:
        for text in right:
            assert name not in compute_score("ifeval", text, row)["pred"], row
        for text in wrong:
            assert name in compute_score("ifeval", text, row)["pred"], row


def test_a_missing_argument_is_an_error_of_the_row():
    for row in ([{}], [{"end_phrase": None}], None):
        with pytest.raises(ValueError, match="startend:end_checker has no end_phrase"):
            compute_score("ifeval", "x", dict(instruction_id_list=["startend:end_checker"], kwargs=row))
    row = dict(instruction_id_list=["startend:end_checker"], kwargs=[{"end_phrase": "[end]"}])
    assert compute_score("ifeval", "the [end]", row)["acc"] == 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("length_constraints:number_words", dict(num_words=3, relation="at most")),
        ("length_constraints:number_words", dict(num_words="3", relation="at least")),
        ("detectable_format:number_bullet_lists", dict(num_bullets=True)),
        ("keywords:existence", dict(keywords="owl")),  # each letter would be a word
        ("keywords:existence", dict(keywords=[])),
        ("keywords:forbidden_words", dict(forbidden_words=["owl", 3])),
        ("combination:repeat_prompt", dict(prompt_to_repeat=" ")),
        ("language:response_language", dict(language="English")),
    ],
)
def test_an_argument_of_another_kind_is_an_error_of_the_row(name, wrong):
    with pytest.raises(ValueError, match=f"{name} cannot have|the language is 'English'; .*, en, "):
        check_row("ifeval", dict(instruction_id_list=[name], kwargs=[wrong]))


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
        assert all(
            0 <= compute_score("ifeval", "x", row["reward_model"]["ground_truth"])["score"] <= 1
            for row in rows
        )
        splits[split] = {question.split(".")[0] for question in questions}  # the tasks, with their subjects
    assert not splits["train"] & (splits["val"] | splits["test"]) and not splits["val"] & splits["test"]
    done = run(ROOT / "data_prep/instructions.py", "--train_size", 0, check=False)
    assert done.stderr.strip() == "error: --train_size is 0; it must be from 1 to 5000"
