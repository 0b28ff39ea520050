"""Data sets as published (a few rows each in tests/fixtures) become rows that can be scored.

golden/data_sets.jsonl has the rows that each script writes of its fixture.
"""

import gzip
import importlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import golden, run

from data_prep import code, geometry3k, gsm8k, prepare, quixbugs, sft_chat
from data_prep.lib import source
from data_prep.lib.schema import load_rows
from rewards import compute_score

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests/fixtures"
COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
FULL_MARKS = {"kk": 3.0, "kk_logic": 3.0}
CASES = golden("data_sets")


def read_raw(path):
    """Rows as they are in a file."""
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['fixture']}, {case['arguments']}")
def test_rows_and_their_scores(tmp_path, capsys, case):
    """What a script writes of its fixture, all columns; twice the same bytes; a solution has full marks."""
    script = importlib.import_module(f"data_prep.{case['script']}")
    arguments = {name: tuple(x) if isinstance(x, list) else x for name, x in case["arguments"].items()}
    for out in ("a", "b"):
        script.main(script.Args(str(tmp_path / out), str(FIXTURES / case["fixture"]), **arguments))
    said = "".join(capsys.readouterr())
    assert all(line in said for line in case["says"])
    files = {path.stem: read_raw(path) for path in (tmp_path / "a").iterdir()}
    assert files == case["files"]
    for split, rows in files.items():
        assert len(load_rows(tmp_path / f"a/{split}.parquet", [*rows[0]])) == len(rows)
        first, second = ((tmp_path / out / f"{split}.parquet").read_bytes() for out in ("a", "b"))
        assert first == second
        for row in rows:
            if not row.get("reward_model"):
                continue
            answer = row["extra_info"]["answer"]
            truth = row["reward_model"]["ground_truth"]
            if answer:
                result = compute_score(row["data_source"], answer, truth, row["extra_info"])
                assert result["score"] == FULL_MARKS.get(row["data_source"], 1.0), row


def test_no_tests_of_a_program():
    with pytest.raises(ValueError, match=r"--max_tests is 0"):
        code.main(code.Args(max_tests=0))


def test_quixbugs(tmp_path):
    quixbugs.main(quixbugs.Args(str(FIXTURES / "quixbugs"), str(tmp_path)))
    rows = load_rows(tmp_path / "test.parquet", COLUMNS)
    asked = "function gcd(a, b) for which\ngcd(17, 0) == 17\ngcd(37, 600) == 1\n"
    assert asked in rows[1]["prompt"][0]["content"]
    for row in rows:
        result = compute_score("quixbugs", row["extra_info"]["answer"], row["reward_model"]["ground_truth"])
        assert result["acc"] == 1.0
    with pytest.raises(ValueError, match=r"no json_testcases"):
        quixbugs.main(quixbugs.Args(str(tmp_path)))


def test_geometry3k_keeps_pictures(tmp_path):
    images = [{"bytes": b"\x89PNG", "path": None}]
    record = {"images": images, "problem": "<image>Find x.", "answer": "3"}
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "train-00000-of-00001.parquet")
    geometry3k.main(geometry3k.Args(str(tmp_path / "out"), str(tmp_path), splits=("train",)))
    [row] = read_raw(tmp_path / "out/train.parquet")
    assert row["images"] == images


def test_mistakes_with_own_data(tmp_path, capsys):
    """One line says what is wrong, and of broken rows no more than ten are named."""
    texts = dict(train='{"asked": "2+2?", "said": "4"}\n' * 20, empty="", blank="\n \n", text="a b\n" * 3)
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    for case in golden("unfit_sources"):
        args = sft_chat.Args(str(tmp_path / "out"), str(tmp_path / case["place"]), (case["split"],))
        with pytest.raises(ValueError, match=case["line"]) as error:
            sft_chat.main(args)
        assert "\n" not in str(error.value) and not [*tmp_path.glob("out/*")]
    named = capsys.readouterr().err.splitlines()
    problem = "no column 'messages, conversations, or prompt and completion'; it has asked, said"
    assert named[:10] == [f"{tmp_path}/train.jsonl: row {i} is broken: {problem}" for i in range(10)]
    assert named[10] == "10 more rows are broken"


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
    scripts = [x for x in (ROOT / "data_prep").glob("*.py") if x.stem not in ("__init__", "prepare")]
    heads = {path.read_text().split('"""\n', 2)[1].split("]\n")[0] for path in scripts}
    assert len(heads) == 1 and "sys.path[:]" in heads.pop()


def test_a_missing_hub_gives_one_line(tmp_path):
    for name, *arguments in (("gsm8k.py",), ("code.py", "--dataset", "apps")):
        done = run(ROOT / "data_prep" / name, "--local_save_dir", tmp_path / "out", *arguments, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("error: nothing came from the hub")
        assert "--local_dataset_path" in done.stderr
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
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(tmp_path / "old.arrow", table.schema) as stream:
        stream.write_table(table)
    found = list(prepare.read_local(tmp_path, "train"))
    assert [record for _, record in found[:5]] == [{"x": i} for i in range(5)]
    assert found[3][0].endswith("train-00001-of-00002.jsonl: row 0") and isinstance(found[5][1], ValueError)
    for split, expected in dict(new=rows, old=rows, test=[{"x": 5}]).items():
        assert [record for _, record in prepare.read_local(tmp_path, split)] == expected
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
