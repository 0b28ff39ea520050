"""What is trained under published chat templates, against their twins that mark it, and by hand.

benchmarks/chat_templates.py makes the table of docs/reference/chat-templates.md from all templates of TRL.
"""

import json
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, golden
from conversations import SHAPES, ends_of, make_tokenizer, messages_of

from algos import sft
from benchmarks import chat_templates
from data_prep import rejection
from data_prep.lib.turns import encode_messages

TEMPLATES = ROOT / "tests/fixtures/chat_templates"
ROWS = {  # of each shape, in the order of SHAPES; -: refused
    "qwen2_5": "1 1 1 1 1 1 1  - 1 -  1 1 - 1",  # it has no place for reasoning
    "qwen3": "1 1 1 2 1 1 1  1 1 2  2 2 1 2",  # an empty thought is shown in the last turn alone
    "qwen3_5_think": "1 1 1 2 1 1 1  1 1 2  1 1 1 1",  # thoughts are shown since the last question
    "deepseek_r1_distill": "1 1 1 2 1 1 1  1 1 2  2 2 - -",
    "deepseekv3": "1 1 1 2 1 1 1  1 1 2  2 2 - 2",
    "glm4moe": "1 1 1 2 1 1 1  1 1 2  2 2 2 2",  # the history has no EOS
    "phi3": "1 1 1 1 1 1 1  - 1 -  - - - -",  # it knows no tools
    "gptoss": "1 1 1 2 1 1 1  1 1 2  1 - 1 1",  # one call in a turn; the history has another end
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_each_shape_and_their_marks(name):
    """Any exception besides a refusal ends this test."""
    found = chat_templates.try_template(name, TEMPLATES)
    rows = {shape: str(row.get("rows", "-")) for shape, row in found.items()}
    assert rows == dict(zip(SHAPES, ROWS[name].split(), strict=True))
    assert all("leaves out" in row["refused"] for row in found.values() if "refused" in row)
    assert not {shape: row["wrong"] for shape, row in found.items() if row.get("wrong")}
    assert sum(row.get("compared", 0) for row in found.values()) > 8


def marked(ids, trained, tokenizer):
    """A row as the table has it; a token is trained as a whole."""
    texts = []
    for on, run in groupby(range(len(ids)), key=trained.__getitem__):
        text = tokenizer.decode([ids[i] for i in run])
        texts.append(f"⟦{text}⟧" if on else text)
    return "".join(texts)


def tokenizer_of(name):
    return make_tokenizer(name, (TEMPLATES / f"{name}.jinja").read_text())


@pytest.mark.parametrize(
    "case", golden("chat_templates"), ids=lambda case: f"{case['template']}, {case['shape']}"
)
def test_by_hand(case):
    """Rows of a template and a shape; what is between ⟦ and ⟧ is trained."""
    name = case["template"]
    tokenizer = tokenizer_of(name)
    messages, tools = messages_of(case["shape"], tokenizer)
    rows = [marked(*row, tokenizer) for row in encode_messages(messages, tokenizer, tools)]
    if name == "gptoss":  # before it are the date and the tools
        rows = [row[row.index("<|start|>user") :] for row in rows]
    assert rows == case["rows"]


@pytest.mark.parametrize("shape", ("one turn", "reasoning"))
@pytest.mark.parametrize("name", ROWS)
def test_what_a_sampler_wrote_is_trained_as_it_was(name, shape, tmp_path):
    """Decoded, chosen by rejection.py and read by sft.py it is the same tokens; some marks are special."""
    tokenizer = tokenizer_of(name)
    [*prompt, reply], _ = messages_of(shape, tokenizer)
    if shape == "reasoning" and name in ("qwen2_5", "phi3"):  # which have no place for it, and may write it
        reply = dict(role="assistant", content="<think>\nIt is so.\n</think>\n\nFirst.")
    [(ids, trained)] = encode_messages([*prompt, reply], tokenizer)
    begin = trained.index(True)
    end = next(i for i in range(begin, len(ids)) if tokenizer.decode(ids[i]) in ends_of(name)[1:])
    text = tokenizer.decode(ids[begin:end])
    assert "First." in text and ("It is so." in text) == (shape == "reasoning")
    row = dict(data_source="", prompt=prompt, responses=[text], finish_reasons=["stop"])
    pq.write_table(pa.Table.from_pylist([row | dict(results=['{"score": 1}'])]), tmp_path / "scored.parquet")
    rejection.main(rejection.Args(files=(str(tmp_path / "scored.parquet"),), local_save_dir=str(tmp_path)))
    args = sft.Args(model="", train_files=(), output_dir="", max_length=9999)
    [[again], *_] = sft.load_examples([str(tmp_path / "sft.parquet")], args, tokenizer)
    assert again["prompt_ids"] == ids[:begin]
    assert again["response_ids"][: end + 1 - begin] == ids[begin : end + 1]


def no_end(ids, trained):
    return ids, [on and following for on, following in zip(trained, [*trained[1:], False])]


def too_early(ids, trained):
    return ids, [*trained[1:], True]


def silent(ids, trained):
    return ids[:-13] + ids[-1:], trained[:-13] + trained[-1:]  # without what ends with "First."


def untrained(ids, trained):
    return ids, [False] * len(ids)


FAULTS = {
    no_end: ["no token that stops a sampler ends it"],
    too_early: ["its prompt is not what a sampler is given"],
    silent: ["it leaves out what it says"],
    untrained: ["turns are missing"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(monkeypatch, fault):
    """The benchmark would find them in what is trained of one turn."""
    faulty = lambda *given: [fault(*row) for row in encode_messages(*given)]
    monkeypatch.setattr(chat_templates, "encode_messages", faulty)
    monkeypatch.setattr(chat_templates, "SHAPES", ["one turn"])
    found = chat_templates.try_template("qwen3", TEMPLATES)["one turn"]
    differs = [what for what in found["wrong"] if what.startswith("it differs from its marks")]
    assert [what for what in found["wrong"] if what not in differs] == FAULTS[fault]
    assert len(differs) == (fault is not untrained)


def test_the_page_has_the_tables_of_the_results():
    """And the results are those of this code."""
    found = json.loads(chat_templates.RESULTS.read_text())
    assert chat_templates.tables(found) in chat_templates.PAGE.read_text()
    rows = [row for shapes in found.values() for row in shapes.values()]
    assert not any(row.get("wrong") for row in rows)
    for name in ("qwen3", "glm4moe"):
        read = {chat_templates.READ: chat_templates.read_by(name, TEMPLATES)}
        assert found[name] == chat_templates.try_template(name, TEMPLATES) | read
