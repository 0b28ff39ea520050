"""generate.py as users call it: its output, equal for any number of ranks and after a kill, and bad input."""

import shutil
import signal
import subprocess
from collections import deque
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, golden, holder, kill, run, start
from transformers import AutoTokenizer

from algos import generate
from data_prep.lib.source import Source
from system.files import HELD

COLUMNS = generate.COLUMNS[:-1]
GENERATE = ROOT / "algos/generate.py"
ROWS, SAMPLES, BATCH, LONG = 22, 3, 4, 5  # row LONG has a prompt over the limit


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file of prompts with the columns of the schema and one more."""
    questions = [f"{i}+{i * 7 % 90}" for i in range(ROWS)]
    questions[LONG] = "1+1" * 10
    about = dict(data_source="arithmetic", reward_model=dict(style="rule", ground_truth="0"))
    talks = [[dict(role="user", content=question)] for question in questions]
    rows = [about | dict(prompt=talk, extra_info=dict(index=i)) for i, talk in enumerate(talks)]
    path = tmp_path_factory.mktemp("prompts") / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def flags(model, data, output, /, **changed):
    values = dict(model=model, data=data, output=output, n_samples=SAMPLES, batch_size=BATCH, temperature=1.0)
    values |= dict(max_prompt_length=16, max_response_length=12) | changed
    return [word for name, value in values.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def alone(tiny, data, tmp_path_factory):
    """The output of one process."""
    out = tmp_path_factory.mktemp("alone") / "out.parquet"
    done = run(GENERATE, *flags(tiny, data, out))
    assert f"{ROWS - 1} of {ROWS} prompts" in done.stdout
    return out


def test_columns(alone, data, tiny):
    table, prompts = pq.read_table(alone), pq.read_table(data)
    assert table.drop_columns(list(COLUMNS)).equals(prompts)
    assert not list(alone.parent.glob("*.shards"))
    tokenizer, distinct = AutoTokenizer.from_pretrained(tiny), set()
    for i, row in enumerate(table.to_pylist()):
        answers = list(zip(*(row[name] for name in COLUMNS), strict=True))
        assert len(answers) == SAMPLES
        if i == LONG:
            assert answers == [("", 0, "prompt_too_long")] * SAMPLES
            continue
        for text, tokens, reason in answers:
            distinct.add(text)
            assert reason in ("stop", "length") and 1 <= tokens <= 12
            assert tokens == 12 or reason == "stop"
            # characters are tokens here; the text has all but the one that ended it
            assert len(tokenizer(text, add_special_tokens=False).input_ids) == tokens - (reason == "stop")
    assert len(distinct) > ROWS  # neither rows nor samples repeat each other


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_ranks_do_not_matter(alone, tiny, data, tmp_path, tp_size):
    run(GENERATE, *flags(tiny, data, tmp_path / "out.parquet", tp_size=tp_size), ranks=2)
    assert (tmp_path / "out.parquet").read_bytes() == alone.read_bytes()


KILLED = """
import os, runpy, signal, sys
replace, done = os.replace, []
def replace_or_die(new, path):
    done.append(path) if str(path).endswith(".parquet") else None
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(new, path)
os.replace, sys.argv = replace_or_die, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # kill -9 when the third shard is written but does not have its name


def test_a_killed_run_goes_on(alone, tiny, data, tmp_path, refused):
    out, shards = tmp_path / "out.parquet", tmp_path / "out.parquet.shards"
    assert run("-c", KILLED, GENERATE, *flags(tiny, data, out), check=False).returncode == -signal.SIGKILL
    left = {path.name: path.stat().st_mtime_ns for path in shards.glob("*.parquet")}
    assert list(sorted(left)) == ["00000000.parquet", "00000004.parquet"] and not out.exists()
    assert len(list(shards.glob("[!.]*"))) == 2 and len(list(shards.iterdir())) == 4  # .lock, one not done

    program = "import sys, time; from pathlib import Path; from system import files;"
    program += "files.hold(Path(sys.argv[1]), ''); print('held', flush=True); time.sleep(600)"
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}"
    with start("-c", program, shards, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == "held\n"
        line = f"--output {out} is in use by process {holder(shards)} of "
        assert line in refused(*flags(tiny, data, out))
        kill(other, shards)
    HELD.clear()
    assert "temperature 1.0 there, 0.5 now" in refused(*flags(tiny, data, out, temperature=0.5))
    pq.write_table(pq.read_table(data).slice(1), tmp_path / "changed.parquet")
    assert "digest of the prompts" in refused(*flags(tiny, tmp_path / "changed.parquet", out))
    assert left == {path.name: path.stat().st_mtime_ns for path in shards.glob("*.parquet")}

    for file in HELD.values():  # by the calls of main in this process
        file.close()
    HELD.clear()
    run(GENERATE, *flags(tiny, data, out), ranks=2)
    assert out.read_bytes() == alone.read_bytes() and not shards.exists()


@pytest.fixture
def refused(monkeypatch):
    """Call main with arguments that it must refuse, in one line, before it builds an engine -> the line."""

    def call(*arguments):
        monkeypatch.setattr(generate, "build_engine", lambda args: pytest.fail("an engine for bad input"))
        with pytest.raises(SystemExit) as stopped:
            generate.main(generate.Args(**generate.parse(generate.Args, [*map(str, arguments)])))
        assert stopped.value.code.startswith("error: ") and "\n" not in stopped.value.code
        return stopped.value.code

    return call


@pytest.mark.parametrize("case", golden("unfit_generations"), ids=lambda case: case["line"])
def test_bad_input_gives_one_line(alone, tiny, data, tmp_path, refused, case):
    (tmp_path / "[1]").mkdir()
    before = alone.read_bytes()
    places = dict(here=tmp_path, alone=alone, test=__file__, envs=ROOT / "envs")
    changed = {name: str(value).format_map(places) for name, value in case["flags"].items()}
    assert case["line"] in refused(*flags(tiny, data, tmp_path / "out.parquet", **changed))
    assert [*tmp_path.iterdir()] == [tmp_path / "[1]"] and alone.read_bytes() == before


def test_a_run_is_read_at_its_latest_checkpoint(tiny, tmp_path):
    step = tmp_path / "run/checkpoints/step_000010"
    shutil.copytree(tiny, step / "hf")
    (step.parent / "latest").symlink_to(step.name)
    for model in (tmp_path / "run", step, step.parent / "latest", step / "hf"):
        args = generate.Args(model=str(model), data="", output=str(tmp_path / "out.parquet"))
        assert generate.check_paths(args) == str(step / "hf")  # not `latest`, which may move on


def test_a_written_shard_is_looked_at_once():
    """Those at the front are counted: a later one waits for them."""
    looked_at = []

    def shard(name, done):
        return SimpleNamespace(is_file=lambda: looked_at.append(name) or done)

    waiting = deque([shard(0, True), shard(1, True), shard(2, False), shard(3, True)])
    bar = SimpleNamespace(update=lambda: None)
    generate.count_done(waiting, bar)
    generate.count_done(waiting, bar)
    assert len(waiting) == 2
    assert looked_at == [0, 1, 2, 2]


def test_rows_without_a_source_keep_the_name_of_their_file(tmp_path):
    """So eval.py pairs the answers of two models, whatever the files are called."""
    files = {}
    for name, about in (("mine.jsonl", ""), ("known.jsonl", ', "data_source": "sums"')):
        (tmp_path / name).write_text(f'{{"prompt": "1+1", "solution": "2"{about}}}\n')
        source = Source(tmp_path / name)
        answers = generate.with_source(pa.table(dict(responses=[["2"]])), source, dict(a="b"))
        source.write(tmp_path / "out.parquet", iter([answers]))
        files[name] = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["data_source"] for [row] in files.values()] == ["mine.jsonl", "sums"]
