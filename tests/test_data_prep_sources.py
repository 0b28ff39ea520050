"""Data sets as published (a few rows each in tests/fixtures) become rows that can be scored."""

import gzip
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import run

from data_prep import (
    aime,
    code,
    dapo_math,
    geometry3k,
    gsm8k,
    kk,
    math,
    mbpp_humaneval,
    numina,
    preference,
    prepare,
    quixbugs,
    sft_chat,
)
from data_prep.lib import source
from data_prep.lib.schema import load_rows
from rewards import check_sources, compute_score

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests/fixtures"
COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
MODULES = {"schema", "atomic", "prepare", "source", "arguments", "tracking", "cache", "turns", "images"}
MODULES |= {"__init__", "chats"}
SCRIPTS = sorted(path for path in (ROOT / "data_prep").glob("*.py") if path.stem not in MODULES)
FULL_MARKS = {"kk": 3.0, "kk_logic": 3.0}

# fixture, script, further arguments, {file: rows}, what the report says
CASES = [
    ("gsm8k", gsm8k, {}, {"train": 2, "test": 2}, "2 left out: broken (named above)"),
    ("math", math, {}, {"train": 2, "test": 1, "math500": 1}, "1 left out: broken (named above)"),
    ("kk", kk, {}, {"train": 1, "test": 1}, "1 left out: not 3 to 7 people"),
    ("numina", numina, {}, {"train": 6, "test": 1}, "1 left out: of another source"),
    ("dapo_math", dapo_math, {}, {"train": 2}, "3 left out: a copy of an earlier row"),
    ("aime", aime, {"splits": ("test=train",)}, {"test": 1}, ""),
    ("aime", aime, {"year": "2025"}, {"test": 2}, ""),
    ("geometry3k", geometry3k, {"splits": ("test",)}, {"test": 1}, ""),
    ("codecontests", code, {"dataset": "codecontests"}, {"train": 1, "test": 1}, "1 left out: no tests"),
    ("codeforces", code, {"dataset": "codeforces"}, {"train": 1, "test": 1}, "1 left out: several outputs"),
    ("apps", code, {"dataset": "apps"}, {"train": 3, "test": 1}, "1 left out: no tests; 1 left out: broken"),
    ("taco", code, {"dataset": "taco"}, {"train": 2, "test": 1}, ""),
    ("mbpp", mbpp_humaneval, {"dataset": "mbpp"}, {"train": 1, "test": 1}, ""),
    ("humaneval", mbpp_humaneval, {"dataset": "humaneval"}, {"test": 1}, ""),
]


def prepared(script, fixture, out, **arguments):
    """{split: rows} that a script writes from a fixture."""
    script.main(script.Args(str(out), str(FIXTURES / fixture), **arguments))
    return {path.stem: load_rows(path, COLUMNS) for path in sorted(out.iterdir())}


@pytest.mark.parametrize(("fixture", "script", "arguments", "counts", "report"), CASES)
def test_rows_and_their_scores(tmp_path, capsys, fixture, script, arguments, counts, report):
    written = prepared(script, fixture, tmp_path / "a", **arguments)
    assert {split: len(rows) for split, rows in written.items()} == counts
    assert report in capsys.readouterr().out
    prepared(script, fixture, tmp_path / "b", **arguments)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    for split, rows in written.items():
        assert [row["extra_info"]["index"] for row in rows] == sorted(
            {r["extra_info"]["index"] for r in rows}
        )
        for row in rows:
            check_sources([row["data_source"]])
            assert row["extra_info"]["split"] == split and row["extra_info"]["question"]
            if answer := row["extra_info"]["answer"]:
                truth = row["reward_model"]["ground_truth"]
                result = compute_score(row["data_source"], answer, truth, row["extra_info"])
                score = result["score"] if isinstance(result, dict) else result
                assert score == FULL_MARKS.get(row["data_source"], 1.0), row


def test_prompts(tmp_path):
    rows = {}
    for i, (fixture, script, arguments, *_) in enumerate(CASES):
        for split in prepared(script, fixture, tmp_path / str(i), **arguments).values():
            rows.setdefault(split[0]["data_source"], split[0])
    prompts = {source: [message["content"] for message in row["prompt"]] for source, row in rows.items()}
    question, instruction = "It is 4 degrees and gets 7 degrees colder. How warm is it?", gsm8k.INSTRUCTION
    assert instruction == 'Let\'s think step by step and output the final answer after "####".'
    assert prompts["openai/gsm8k"] == [f"{question} {instruction}"]
    ending = r" Let's think step by step and output the final answer within \boxed{}."
    assert prompts["DigitalLearningGmbH/MATH-lighteval"][0].endswith(ending)
    assert prompts["HuggingFaceH4/MATH-500"][0].endswith(ending)
    assert "Zoey is a knight" in prompts["kk"][0] and prompts["kk"][1].startswith("You meet 3 inhabitants")
    assert prompts["aime2025"][0].startswith(
        "Solve the following math problem step by step. The last line of"
    )
    template = aime.PROMPT.format(problem=r"What is $17 \cdot 2$?")
    assert prompts["math_dapo"] == [template]  # as published
    assert prompts["hiyouga/geometry3k"][0].endswith(r"The final answer MUST BE put in \boxed{}.")
    assert prompts["taco"][0].endswith("```python\nYour code\n```\nat the end.")
    assert rows["hiyouga/geometry3k"]["reward_model"]["ground_truth"] == r"20 \sqrt { 3 }"


def test_tests_of_programs(tmp_path):
    tests = {}
    for dataset in ("codecontests", "codeforces", "apps", "taco"):
        rows = prepared(code, dataset, tmp_path / dataset, dataset=dataset)["train"]
        tests[dataset] = [json.loads(row["reward_model"]["ground_truth"]) for row in rows]
    assert tests["codecontests"] == [
        {"inputs": ["1 2\n", "5 -7\n", "0 0\n", "10 20\n"], "outputs": ["3\n", "-2\n", "0\n", "30\n"]}
    ]
    assert tests["codeforces"] == [{"inputs": ["3", "-4"], "outputs": ["9", "16"]}]
    wrapped = {"inputs": ["[1, 2, 3]", "[]"], "outputs": ["[3, 2, 1]", "[]"], "fn_name": "backwards"}
    assert tests["apps"][1:] == [
        wrapped,
        {"inputs": ["[1, 2, 3]\n5"], "outputs": ["[[2, 3]]"], "fn_name": "pairs"},
    ]
    assert tests["taco"] == [{"inputs": ["1 2 3\n", ["4 5"]], "outputs": ["6\n", ["9"]]}, wrapped]
    rows = prepared(code, "codecontests", tmp_path / "few", dataset="codecontests", max_tests=3)["train"]
    assert len(json.loads(rows[0]["reward_model"]["ground_truth"])["inputs"]) == 3
    with pytest.raises(ValueError, match=r"--max_tests is 0"):
        code.main(code.Args(max_tests=0))


def test_quixbugs(tmp_path):
    for folder, name, text in (
        ("json_testcases", "gcd.json", "[[17, 0], 17]\n[[37, 600], 1]\n"),
        ("correct_python_programs", "gcd.py", "def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)\n"),
        ("json_testcases", "bitcount.json", "[127, 7]\n\n[[128], 1]\n"),
        ("correct_python_programs", "bitcount.py", "def bitcount(n):\n    return bin(n).count('1')\n"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    quixbugs.main(quixbugs.Args(str(tmp_path), str(tmp_path / "out")))
    rows = load_rows(tmp_path / "out/test.parquet", COLUMNS)
    assert (
        "function gcd(a, b) for which\ngcd(17, 0) == 17\ngcd(37, 600) == 1\n"
        in rows[1]["prompt"][0]["content"]
    )
    for row in rows:
        result = compute_score("quixbugs", row["extra_info"]["answer"], row["reward_model"]["ground_truth"])
        assert result["acc"] == 1.0
    with pytest.raises(ValueError, match=r"no json_testcases"):
        quixbugs.main(quixbugs.Args(str(tmp_path / "out")))


def test_geometry3k_keeps_pictures(tmp_path):
    images = [{"bytes": b"\x89PNG", "path": None}]
    record = {"images": images, "problem": "<image>Find x.", "answer": "3"}
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "train-00000-of-00001.parquet")
    arguments = {"local_save_dir": str(tmp_path / "out"), "splits": ("train",)}
    geometry3k.main(geometry3k.Args(local_dataset_path=str(tmp_path), **arguments))
    row = load_rows(tmp_path / "out/train.parquet", [*COLUMNS, "images"])[0]
    assert row["images"] == images
    assert row["prompt"][0]["content"].startswith("<image>Find x. You FIRST think")


def test_dialogues(tmp_path, capsys):
    sft_chat.main(sft_chat.Args(str(tmp_path), str(FIXTURES / "sft_chat")))
    rows = load_rows(tmp_path / "train.parquet", ["data_source", "messages"])
    assert [(m["role"], m["content"]) for m in rows[0]["messages"]] == [
        ("user", "Name a colour."),
        ("assistant", "Red."),
        ("user", "And a fruit of it?"),
        ("assistant", "A cherry."),
    ]
    output = capsys.readouterr()
    assert "train.parquet: 1 rows; 2 left out: broken (named above)" in output.out
    assert (
        "train_sft.jsonl: row 1 is broken: ValueError: the last message is not the assistant's" in output.err
    )
    assert "train_sft.jsonl: row 2 is broken: ValueError: 'messages[1]' must be" in output.err
    assert "test.parquet: 1 rows have the prompt of train.parquet: 0" in output.out


def test_mistakes_with_own_data(tmp_path, capsys):
    """One line says what is wrong, and of broken rows no more than ten are named."""
    rows = [dict(asked="2+2?", said="4")] * 20
    for name, lines in dict(train=map(json.dumps, rows), empty=(), blank=["", " "], text=["a b"] * 3).items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for place, split, line in (
        (tmp_path, "train", "no rows for train.parquet: 20 left out: broken (named above)"),
        (tmp_path, "empty", "no rows for empty.parquet: the source is empty"),
        (tmp_path, "blank", "no rows for blank.parquet: the source is empty"),
        (tmp_path, "text", "no rows for text.parquet: 3 left out: broken (named above)"),
        (
            tmp_path,
            "tra",
            r"no file tra.* or .*another name: --splits OUT=(blank|empty|text|train)$",
        ),
        (tmp_path / "nowhere", "train", "nowhere does not exist: pass a file, or"),
        (tmp_path / "*.jsonl", "train", "does not exist: pass a file, or"),
    ):
        with pytest.raises(ValueError, match=line.replace("(named above)", r"\(named above\)")) as error:
            sft_chat.main(sft_chat.Args(str(tmp_path / "out"), str(place), (split,)))
        assert "\n" not in str(error.value) and not [*tmp_path.glob("out/*")]
    named = capsys.readouterr().err.splitlines()
    problem = "no column 'messages, conversations, or prompt and completion'; it has asked, said"
    assert named[:10] == [f"{tmp_path}/train.jsonl: row {i} is broken: {problem}" for i in range(10)]
    assert named[10] == "10 more rows are broken"


def test_preferences(tmp_path, capsys):
    preference.main(preference.Args(str(tmp_path), str(FIXTURES / "preference")))
    names = ["prompt", "chosen", "rejected"]
    train, test = (load_rows(tmp_path / f"{split}.parquet", names) for split in ("train", "test"))
    assert [[(m["role"], m["content"]) for m in train[0][name]] for name in names] == [
        [("user", "Add 2 and 2.")],
        [("assistant", "The sum is 4.")],
        [("assistant", "The sum is 5.")],
    ]
    assert [[m["content"] for m in test[0][name]] for name in names] == [
        ["How do I boil an egg?", "How soft?", "Hard."],
        ["Ten minutes."],
        ["I do not know."],
    ]
    assert "1 left out: both replies are the same; 1 left out: broken" in capsys.readouterr().out


# ---- what all scripts share


def test_programs_with_long_integers(tmp_path):
    """A number of 20,000 digits is in the tests of TACO; Python reads 4,300 by default."""
    big = "9" * 20_000
    record = dict(question="Add 1.", url="", starter_code="", difficulty="")
    record["input_output"] = f'{{"fn_name": "f", "inputs": [[{big}]], "outputs": [1{"0" * len(big)}]}}'
    record["solutions"] = json.dumps(["def f(x): return x + 1"])
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/train.jsonl").write_text(json.dumps(record) + "\n")
    arguments = ["--dataset", "apps", "--splits", "train", "--local_dataset_path", tmp_path / "raw"]
    done = run(ROOT / "data_prep/code.py", *arguments, "--local_save_dir", tmp_path / "out")
    assert "left out" not in done.stdout
    [row] = load_rows(tmp_path / "out/train.parquet", COLUMNS)
    truth = row["reward_model"]["ground_truth"]
    assert compute_score("apps", row["extra_info"]["answer"], truth)["score"] == 1
    assert compute_score("apps", "```python\ndef f(x): return x\n```", truth)["score"] == 0


def test_scripts_run_by_path_and_as_modules(tmp_path):
    """math.py, code.py and inspect.py of data_prep hide no module of Python; below: all begin alike."""
    (tmp_path / "elsewhere").symlink_to(ROOT / "data_prep")
    commands = [([ROOT / "data_prep/gsm8k.py"], tmp_path), (["gsm8k.py"], ROOT / "data_prep")]
    commands += [(["elsewhere/math.py"], tmp_path)]
    commands += [(["-m", f"data_prep.{name}"], ROOT) for name in ("inspect", "math", "code")]

    def usage(command):
        arguments, directory = command
        arguments = [sys.executable, *arguments, "--help"]
        done = subprocess.run(arguments, cwd=directory, capture_output=True, text=True)
        assert done.returncode == 0 and "usage:" in done.stdout, f"{command}: {done.stderr[-2000:]}"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(usage, commands))


def test_scripts_begin_alike():
    heads = {path.read_text().split('"""\n', 2)[1].split("]\n")[0] for path in SCRIPTS}
    assert len(heads) == 1 and "sys.path[:]" in heads.pop()


def test_a_missing_hub_gives_one_line(tmp_path):
    for name, *arguments in (("gsm8k.py",), ("code.py", "--dataset", "apps")):
        done = run(ROOT / "data_prep" / name, "--local_save_dir", tmp_path / "out", *arguments, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert (
            done.stderr.startswith("error: nothing came from the hub")
            and "--local_dataset_path" in done.stderr
        )
    assert not (tmp_path / "out").exists()


def test_the_hub(monkeypatch, tmp_path):
    import datasets

    asked = []

    def load_dataset(**arguments):
        asked.append(arguments)
        return datasets.Dataset.from_list([{"question": "1+1?", "answer": "#### 2"}] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    gsm8k.main(gsm8k.Args(str(tmp_path)))
    assert asked == [{"path": "openai/gsm8k", "name": "main", "split": split} for split in ("train", "test")]
    assert len(load_rows(tmp_path / "train.parquet", COLUMNS)) == 3


def test_local_files(tmp_path):
    rows = [{"x": i} for i in range(3)]
    (tmp_path / "main").mkdir()
    (tmp_path / "new").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "main/train-00000-of-00002.parquet")
    (tmp_path / "main/train-00001-of-00002.jsonl").write_text('{"x": 3}\n\n{"x": 4}\nno json\n')
    (tmp_path / "new/a.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "test.jsonl.gz", "wt") as file:
        file.write('{"x": 5}\n')
    with pa.OSFile(str(tmp_path / "old.arrow"), "w") as file:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    found = list(prepare.read_local(tmp_path, "train"))
    assert [record for _, record in found[:5]] == [{"x": i} for i in range(5)]
    assert found[3][0].endswith("train-00001-of-00002.jsonl: row 0") and isinstance(found[5][1], ValueError)
    assert [record for _, record in prepare.read_local(tmp_path, "new")] == rows
    assert [record for _, record in prepare.read_local(tmp_path, "old")] == rows
    assert [record for _, record in prepare.read_local(tmp_path, "test")] == [{"x": 5}]
    with pytest.raises(ValueError, match=r"no file trai.* or trai-"):
        prepare.read_local(tmp_path, "trai")
    for name in ("bad.parquet", "bad.json", "bad.jsonl.gz", "bad.arrow"):
        (tmp_path / name).write_text("neither")
        with pytest.raises(ValueError, match=rf"{name}: (cannot be read|not a parquet file)"):
            list(source.Source(tmp_path / name).rows())


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.json"])
def test_columns_are_added_in_batches(tmp_path, monkeypatch, name):
    """Cut in two ways; types are those of all rows, though a later row of JSON has more."""
    rows = [dict(x=i, y=[dict(z="a" * i)], late=None) for i in range(8)]
    rows += [dict(x=0.5, y=[dict(z="b", more=True)], late="c")]
    table = pa.Table.from_pylist(rows)
    monkeypatch.setattr(source, "BATCH_ROWS", 4)
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    pq.write_table(table, tmp_path / "a.parquet")
    lines = [json.dumps({key: x for key, x in row.items() if x is not None}) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.json").write_text(f"[{', '.join(lines)}]")
    added = pa.table(dict(text=[[str(i)] for i in range(9)]))
    parts = added[:3], added[3:8], added[8:]
    source.Source(tmp_path / name).write(tmp_path / "new", iter(parts))
    file = pq.ParquetFile(tmp_path / "new")
    assert file.read().equals(table.append_column("text", added["text"])) and file.num_row_groups > 2
    for row in (dict(x="text"), dict(x=1, y={}), dict(x=2**63)):
        (tmp_path / "bad.jsonl").write_text(f"{lines[0]}\n{json.dumps(row)}\n")
        with pytest.raises(ValueError, match=r"bad.jsonl: its rows fit no parquet file: [^\n]+$"):
            assert source.Source(tmp_path / "bad.jsonl").schema


def test_broken_rows_are_named(tmp_path, capsys):
    gsm8k.main(gsm8k.Args(str(tmp_path), str(FIXTURES / "gsm8k")))
    output = capsys.readouterr()
    assert "train.parquet: 2 rows; 2 left out: broken (named above)\n" in output.out
    assert (
        "gsm8k/train.jsonl: row 2 is broken: ValueError: 'answer' does not end in '#### NUMBER'" in output.err
    )
    assert "gsm8k/train.jsonl: row 3 is broken: JSONDecodeError" in output.err
    assert "test.parquet: 1 rows have the prompt of train.parquet: 1\n" in output.out


def test_tool_traces(tmp_path):
    """RL rows as without, and conversations beside."""
    names = ["prompt", "reward_model", "extra_info"]
    for traces in (False, True):
        gsm8k.main(gsm8k.Args(str(tmp_path / f"{traces}"), str(FIXTURES / "gsm8k"), tool_traces=traces))
    plain, traced = (load_rows(tmp_path / f"{x}/train.parquet", names) for x in (False, True))
    assert plain == traced
    messages = load_rows(tmp_path / "True/train.parquet", ["messages"])[0]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["12", "36"]
    assert messages[:1] == plain[0]["prompt"] and messages[-1]["content"] == "36 clips.\n#### 36"


def test_max_samples(tmp_path):
    records = [{"question": f"{i}+0?", "answer": f"#### {i}"} for i in range(50)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def indices(out, **arguments):
        gsm8k.main(gsm8k.Args(str(tmp_path / out), str(tmp_path), ("new=test",), **arguments))
        return [row["extra_info"]["index"] for row in load_rows(tmp_path / out / "new.parquet", COLUMNS)]

    first, again, other = (indices(f"{seed}", max_samples=10, seed=seed) for seed in (0, 0, 1))
    assert first == again == sorted(set(first)) and len(first) == 10 and first != other
    assert indices("all", max_samples=60) == list(range(50))
    with pytest.raises(ValueError, match=r"--max_samples is 0"):
        indices("none", max_samples=0)
    counts = [0] * 5
    for seed in range(1000):
        for row in prepare.draw(iter(range(5)), 2, seed):
            counts[row] += 1
    assert all(340 < count < 460 for count in counts)  # 400 each


def test_nothing_is_written_unless_all_sources_are_there(tmp_path):
    arguments = (str(tmp_path), str(FIXTURES / "gsm8k"), ("train", "validation"))
    with pytest.raises(ValueError, match=r"no file validation"):
        gsm8k.main(gsm8k.Args(*arguments))
    assert not list(tmp_path.iterdir())
