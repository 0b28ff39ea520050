"""Rejection sampling: which responses become rows and pairs, from a file that eval.py has scored."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import golden
from hypothesis import given
from hypothesis import strategies as st

from algos import eval as evaluation
from algos import rm, sft
from data_prep import difficulty, rejection
from data_prep.arithmetic import make_row
from data_prep.difficulty import whole_rows
from data_prep.lib.schema import load_rows
from data_prep.tiny_model import make_tokenizer

STOP = "stop"
RESPONSES = {  # question -> responses, why each ended
    (1, 2): (["3", "The sum is 3", " 3 ", "4"], [STOP] * 4),  # the third is the first, up to white space
    (2, 2): (["4", "it is 4", "4", "four, 4"], [STOP] * 4),
    (3, 3): (["5", "7", "", "6"], [STOP, STOP, STOP, "length"]),
    (4, 4): (["9", "8", "1", "9"], [STOP] * 4),
}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """What eval.py makes of a file as generate.py writes it."""
    out, rows = tmp_path_factory.mktemp("scored"), []
    for i, (question, (texts, reasons)) in enumerate(RESPONSES.items()):
        rows.append(make_row("test", i, *question) | dict(responses=texts, finish_reasons=reasons))
    pq.write_table(pa.Table.from_pylist(rows), out / "responses.parquet")
    evaluation.main(evaluation.Args(data=(str(out / "responses.parquet"),), output=str(out / "eval")))
    return str(out / "eval/scored_A.parquet")


def build(out, *files, **flags):
    """-> [(question, response)] of sft.parquet, [(question, chosen, rejected)] of pairs.parquet."""
    rejection.main(rejection.Args(files=files, local_save_dir=str(out), **flags))
    found = {"sft": [], "pairs": []}
    for name, columns in (("sft", ["messages"]), ("pairs", ["prompt", "chosen", "rejected"])):
        if (out / f"{name}.parquet").exists():
            for row in load_rows(out / f"{name}.parquet", columns):
                found[name].append(tuple(m["content"] for messages in row.values() for m in messages))
    return found["sft"], found["pairs"]


def test_rows_and_pairs(scored, tmp_path, capsys):
    rows, pairs = build(tmp_path, scored)
    assert rows == [
        *(("1+2=", "3"), ("1+2=", "The sum is 3")),
        *(("2+2=", "4"), ("2+2=", "it is 4"), ("2+2=", "four, 4")),
        ("4+4=", "8"),
    ]
    assert pairs == [
        *(("1+2=", "3", "4"), ("1+2=", "The sum is 3", "4")),
        *(("4+4=", "8", "9"), ("4+4=", "8", "1")),
    ]
    assert capsys.readouterr().out.splitlines()[-3:] == [
        f"{tmp_path}/sft.parquet: 6 rows from 3 of 4 prompts (75.0%)",
        f"{tmp_path}/pairs.parquet: 4 rows from 2 of 4 prompts (50.0%)",
        "responses left out: 1 empty; 1 cut off",
    ]


@pytest.mark.parametrize("case", golden("kept_responses"), ids=lambda case: str(case["flags"]))
def test_what_is_kept(scored, tmp_path, case):
    rows, _ = build(tmp_path, scored, **case["flags"])
    assert [text for _, text in rows] == case["kept"]


def write(rows, path):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def row_of(responses, results, **columns):
    prompt = [dict(role="user", content="?")]
    texts = [json.dumps(result) for result in results]
    return dict(data_source="mine", prompt=prompt, responses=responses, results=texts) | columns


def test_shortest_first_and_graded_scores(tmp_path):
    """`acc` decides where it is there; of two files with a prompt the responses are one list."""
    results = [dict(score=3.0), dict(score=0.5), dict(score=9.0, acc=0.0), dict(score=0, failure="E: x")]
    one = write([row_of(["long", "bb", "c", "d"], results)], tmp_path / "one.parquet")
    two = write([row_of(["f"], [dict(score=-1.0, acc=True)])], tmp_path / "two.parquet")
    rows, pairs = build(tmp_path, one, two, keep="shortest")
    assert rows == [("?", "f")]
    assert pairs == [("?", *pair) for pair in (("long", "bb"), ("f", "c"), ("long", "c"), ("f", "bb"))]
    rows, pairs = build(tmp_path, one, two, right=0.5, max_pairs=1)
    assert rows == [("?", "long"), ("?", "bb"), ("?", "f")] and pairs == [("?", "long", "c")]


@pytest.mark.parametrize("case", golden("alike_prompts"), ids=lambda case: case["why"])
def test_rows_that_ask_the_same(case, tmp_path):
    """A text of two pictures, tools or games is two prompts, whose rows keep pictures and tools."""
    columns = case["columns"]
    rows = [
        row_of(["x", "y"], [dict(score=1.0), dict(score=0.0)], **dict(zip(columns, values)))
        for values in zip(*columns.values())
    ]
    path = write([dict(extra_info=dict(index=0)) | row for row in rows], tmp_path / "scored.parquet")
    build(tmp_path, path)
    made = {name: [*whole_rows(tmp_path / f"{name}.parquet", [])] for name in ("sft", "pairs")}
    for name in {"images", "tools"} & {*columns}:
        given = [json.loads(x) if isinstance(x, str) else x for x in columns[name]]
        assert all([row[name] or None for row in kept] == given for kept in made.values())
    difficulty.main(difficulty.Args(files=(path,), local_save_dir=str(tmp_path / "middle")))
    middle = [*whole_rows(tmp_path / "middle/train.parquet", [])]
    prompts = len({row["extra_info"]["index"] for row in made["sft"]})
    assert prompts == len(middle) == 1 + case["apart"]


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 40))
def test_pairs(right, wrong, most):
    """As many different ones as there may be, and every response once before one comes twice."""
    made = rejection.pairs([*range(right)], [*range(wrong)], most)
    assert len(made) == len(set(made)) == min(most, right * wrong)
    for side, responses in zip(zip(*made), (right, wrong)):
        uses = [side.count(i) for i in range(responses)]
        assert max(uses) - min(uses) <= 1
    assert rejection.pairs("ab", "xyz", 5) == [*map(tuple, ("ax", "by", "az", "bx", "ay"))]


def episode(*texts):
    """A conversation with an environment, as a column has it."""
    turns = [dict(role=role, content=text) for role, text in zip(("assistant", "tool", "assistant"), texts)]
    return json.dumps(dict(messages=turns))


def test_conversations_with_an_environment(tmp_path):
    """The whole conversation is the row, and no answer stands alone."""
    episodes = [episode("<<1+2>>", "3", "3")] * 2
    row = row_of(["3", "3"], [dict(score=1.0), dict(score=0.0)], episodes=episodes)
    rows, pairs = build(tmp_path, write([row], tmp_path / "agent.parquet"))
    assert rows == [("?", "<<1+2>>", "3", "3")] and pairs == [("?", "<<1+2>>", "3", "3", "<<1+2>>", "3", "3")]
    assert pq.read_schema(tmp_path / "sft.parquet").names == ["data_source", "messages", "extra_info"]


def test_thoughts_of_conversations(tmp_path):
    """Each turn has the mark that its prompt opened; one that leaves its thought open spoils the row."""
    episodes = [episode(thought + "<<1+2>>", "3", "b</think>3") for thought in ("a</think>", "<think>a")]
    row = row_of(["3", "3"], [dict(score=1.0)] * 2, episodes=episodes)
    rows, _ = build(tmp_path, write([row], tmp_path / "agent.parquet"))
    assert rows == [("?", "<think>\na</think><<1+2>>", "3", "<think>\nb</think>3")]


def test_trainers_take_what_it_writes(scored, tmp_path):
    build(tmp_path, scored)
    base, tokenizer = dict(model="", train_files=(), output_dir=""), make_tokenizer()
    plain, *_ = sft.load_examples([str(tmp_path / "sft.parquet")], sft.Args(**base), tokenizer)
    assert tokenizer.decode(plain[1]["prompt_ids"]) == "<|user|>1+2=<|assistant|>"
    assert tokenizer.decode(plain[1]["response_ids"]) == "The sum is 3<|eos|>"
    talks = sft.Args(**base, messages_key="messages")
    assert [*sft.load_examples([str(tmp_path / "sft.parquet")], talks, tokenizer)[0]] == [*plain]
    pairs, dropped = rm.read_pairs([str(tmp_path / "pairs.parquet")], rm.Args(**base), tokenizer, 0)
    assert len(pairs) == 4 and not dropped


def test_bad_input(scored, tmp_path):
    for rows, problem in (
        ([make_row("test", 0, 1, 2)], "no column 'results'; it has"),
        ([row_of(["a", "b"], [dict(score=1.0)])], "row 0: 'responses' and 'results' differ in length"),
        ([row_of(["a"], [dict(score=0.0)])], "no response is correct"),
    ):
        with pytest.raises(ValueError, match=problem):
            build(tmp_path, write(rows, tmp_path / "bad.parquet"))
    with pytest.raises(ValueError, match="--max_pairs is 0; it must be at least 1"):
        build(tmp_path, scored, max_pairs=0)


def test_thoughts_of_responses(tmp_path, capsys):
    """A row has the mark that the prompt of its response opened; a thought that is left open is no row.

    generate.py says so of the third, whose prompt has opened it.
    """
    texts = ["So.\n</think>\n\n3", "<think>\nIt is\n</think>\n\n3", "It is 3", "<think>\nno end"]
    texts += ["<|channel>thought\nno end", "<|channel|>analysis<|message|>no end"]
    reasons = [STOP, STOP, "thought", STOP, STOP, STOP]
    row = row_of(texts, [dict(score=1.0)] * 6, finish_reasons=reasons)
    rows, _ = build(tmp_path / "out", write([row], tmp_path / "scored.parquet"))
    assert [text for _, text in rows] == ["<think>\n" + texts[0], texts[1]]
    assert "4 a thought is not closed" in capsys.readouterr().out
