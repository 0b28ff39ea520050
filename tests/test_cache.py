"""Tokenised rows in the cache: what they are, when they are made again, and what a crash leaves."""

import os
import resource
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_sft import MESSAGES, conversation_tokenizer, make_args

from algos import sft
from data_prep import cache
from data_prep.arithmetic import make_row
from data_prep.cache import load_prompts
from data_prep.schema import write_parquet
from data_prep.tiny_model import make_tokenizer

COLUMNS = ["data_source", "prompt", "reward_model", "extra_info"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty cache -> its directory."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "JOB_ROWS", 7)
    return tmp_path / "cache/post_training"


@pytest.fixture
def file(tmp_path):
    write_parquet([make_row("train", i, i, 10**i) for i in range(20)], tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


class Counting:
    """A tokenizer that notes each prompt in a file, whichever process it is in; then `before(its number)`."""

    def __init__(self, path, before=lambda number: None):
        self.tokenizer, self.path, self.before = make_tokenizer(), Path(path), before

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def apply_chat_template(self, messages, **options):
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")
        self.before(self.count())
        return self.tokenizer.apply_chat_template(messages, **options)

    def count(self):
        return len(self.path.read_text().split()) if self.path.exists() else 0


def in_child(function):
    """Start a copy of this process -> it, and the end of a pipe for what the function returns or raises."""

    def child(pipe):
        try:
            pipe.send(function())
        except (ValueError, SystemExit) as error:
            pipe.send(str(error))

    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    return process, ours


def many(monkeypatch):
    """As if there were rows and cpus enough for two processes."""
    monkeypatch.setattr(cache, "PROCESS_ROWS", 10)
    monkeypatch.setattr(cache.os, "sched_getaffinity", lambda pid: {0, 1})


def plain(paths, tokenizer, limit):
    """What a loop over the rows gives."""
    rows = [row for path in paths for row in pq.read_table(path, columns=COLUMNS).to_pylist()]
    ids = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True)["input_ids"] for r in rows]
    rows = [
        dict({c: row[c] for c in COLUMNS}, prompt_ids=x, index=i, group=i)
        for i, (row, x) in enumerate(zip(rows, ids))
    ]
    return [row for row in rows if len(row["prompt_ids"]) <= limit]


# ---- rows


@pytest.mark.parametrize("processes", (1, 2))
def test_rows_of_files_with_other_structs(file, tmp_path, monkeypatch, processes):
    row = make_row("test", 0, 1, 2)
    truth = dict(names=["a", "b"], scores=[0.5, None])
    rows = [row | dict(reward_model=dict(style="rule", ground_truth=truth), extra_info=dict(deep=dict(x=1)))]
    rows += [row | dict(reward_model=dict(style="model", ground_truth=None), extra_info=dict(deep=None))]
    other = tmp_path / "other.parquet"
    pq.write_table(pa.Table.from_pylist(rows * 10), other)
    if processes == 2:
        many(monkeypatch)
    tokenizer = Counting(tmp_path / "count")
    found, dropped = load_prompts([file, other], tokenizer, 16, True)
    expected = plain([file, other], tokenizer.tokenizer, 16)
    assert [*found] == expected and dropped == 40 - len(expected) > 0
    assert len({*tokenizer.path.read_text().split()}) == processes
    assert [list(row) for row in found] == [list(row) for row in expected]
    assert (
        found[-1] == expected[-1]
        and found[3:20:5] == expected[3:20:5]
        and found.unique("data_source") == {"arithmetic"}
    )
    with pytest.raises(IndexError):
        found[len(expected)]


def test_no_files():
    rows, dropped = load_prompts((), make_tokenizer(), 16, True)
    assert not rows and dropped == 0 and rows.unique("data_source") == set()


@pytest.mark.parametrize("processes", (1, 2))
def test_errors_name_file_and_row(file, tmp_path, monkeypatch, processes, home):
    if processes == 2:
        many(monkeypatch)
    rows = pq.read_table(file).to_pylist()
    rows[13]["prompt"][0]["role"] = "human"
    bad = tmp_path / "bad.parquet"
    pq.write_table(pa.Table.from_pylist(rows), bad)
    with pytest.raises(ValueError, match=r"^.*/bad.parquet: row 13: 'prompt\[0\].role' is 'human'; [^\n]*$"):
        load_prompts([file, bad], make_tokenizer(), 99, True)
    with pytest.raises(ValueError, match=r"rows.parquet: the prompt of row 8 has 14 tokens, over [^\n]*$"):
        load_prompts([file], make_tokenizer(), 13, False)
    with pytest.raises(ValueError, match=r"rows.parquet: no prompt within --max_prompt_length 2; raise it"):
        load_prompts([file], make_tokenizer(), 2, True)
    rows[13]["prompt"][0]["role"] = "tool"
    write_parquet(rows, bad)
    with pytest.raises(ValueError, match=r"^row 33 does not fit the tokenizer's chat template: unknown role"):
        load_prompts([file, bad], make_tokenizer(), 99, True)
    with pytest.raises(ValueError, match=r"no such file"):
        load_prompts([file, tmp_path / "none.parquet"], make_tokenizer(), 99, True)
    assert not [*home.glob("*.new")]


# ---- when they are made


def test_a_second_start_makes_nothing(file, tmp_path):
    tokenizer = Counting(tmp_path / "count")
    first = load_prompts([file], tokenizer, 16, True)
    moved = file.rename(tmp_path / "moved.parquet")
    again = load_prompts([moved], tokenizer, 16, True)
    assert tokenizer.count() == 20 and [*first[0]] == [*again[0]] and first[1] == again[1] > 0


def test_what_the_key_depends_on(file, tmp_path, monkeypatch):
    tokenizer = Counting(tmp_path / "count")

    def made(limit=99, drop=True, paths=(file,)):
        before = tokenizer.count()
        load_prompts(paths, tokenizer, limit, drop)
        return tokenizer.count() - before

    assert (made(), made()) == (20, 0)
    assert (made(limit=98), made(drop=False), made(paths=(file, file))) == (20, 20, 40)
    tokenizer.tokenizer.chat_template += "{{- '' -}}"
    assert (made(), made()) == (20, 0)
    tokenizer.tokenizer.add_tokens(["37"])
    assert (made(), made()) == (20, 0)
    tokenizer.tokenizer.eos_token = "<|pad|>"
    assert (made(), made()) == (20, 0)
    write_parquet([make_row("train", i, 2, 3 + i) for i in range(20)], file)
    assert (made(), made()) == (20, 0)
    monkeypatch.setattr(cache.inspect, "getsource", lambda x: "another version of this program")
    assert (made(), made()) == (20, 0)


def test_examples_for_sft(tmp_path):
    path = str(tmp_path / "rows.parquet")
    write_parquet([dict(messages=MESSAGES[: 2 + i % 4]) for i in range(20)], path)
    load = lambda **how: sft.load_examples([path], make_args(messages_key="messages", **how), tokenizer)
    tokenizer = conversation_tokenizer()
    expected = [sft.split(*sft.encode_messages(MESSAGES[: 2 + i % 4], tokenizer)) for i in range(20)]
    first, again, cut = load(), load(), load(max_length=18, truncation="right")
    assert [*first[0]] == [*again[0]] == [row for row in expected if row]
    assert first[1:] == again[1:] == ({tokenizer.eos_token_id}, 0, 5)
    assert cut[1:] == ({tokenizer.eos_token_id}, 15, 5)
    assert [len(x["prompt_ids"] + x["response_ids"]) for x in cut[0]] == sft.lengths(cut[0]) == [18] * 15
    assert sft.lengths(first[0]) == sft.lengths([*first[0]])


def test_one_rank_of_a_machine_tokenises(file, tmp_path, monkeypatch):
    tokenizer, children = Counting(tmp_path / "count", lambda number: time.sleep(0.01)), []
    for rank in (1, 0):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        children.append(in_child(lambda: [*load_prompts([file], tokenizer, 16, True)[0]]))
        time.sleep(0.2)
    one, zero = (pipe.recv() for _, pipe in children)
    assert one == zero == plain([file], make_tokenizer(), 16)
    assert {*tokenizer.path.read_text().split()} == {str(children[1][0].pid)} and tokenizer.count() == 20


def test_two_runs_at_once(file, tmp_path):
    tokenizer = Counting(tmp_path / "count", lambda number: time.sleep(0.01))
    pipes = [in_child(lambda: [*load_prompts([file], tokenizer, 16, True)[0]])[1] for _ in range(2)]
    one, two = (pipe.recv() for pipe in pipes)
    assert one == two == plain([file], make_tokenizer(), 16) and tokenizer.count() == 20


# ---- what goes wrong


def alive(pid):
    """Whether a process runs; one that ended, of which nobody asked, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_builder(file, tmp_path, monkeypatch, home):
    """Its processes end with it; what it left is neither read nor kept."""
    many(monkeypatch)
    slow = Counting(tmp_path / "count", lambda number: time.sleep(number > 10 and 1000))
    process, _ = in_child(lambda: load_prompts([file], slow, 16, True))
    while slow.count() < 12:
        time.sleep(0.01)
    process.kill()
    process.join()
    pids = {*slow.path.read_text().split()}
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 2 and not any(map(alive, pids))
    [left] = [path for path in home.iterdir() if path.is_dir()]
    assert left.suffix == ".new"
    load_prompts([file], make_tokenizer(), 15, True)  # of another key
    assert not left.exists()
    assert [*load_prompts([file], make_tokenizer(), 16, True)[0]] == plain([file], make_tokenizer(), 16)


def test_a_killed_process_of_the_pool(file, tmp_path, monkeypatch):
    many(monkeypatch)
    tokenizer = Counting(
        tmp_path / "count", lambda number: number > 5 and os.kill(os.getpid(), signal.SIGKILL)
    )
    with pytest.raises(ValueError, match="a process that tokenises was killed"):
        load_prompts([file], tokenizer, 16, True)


def test_a_full_disk(file, monkeypatch, home):
    def load():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        load_prompts([file], make_tokenizer(), 16, True)

    monkeypatch.setattr(cache, "key_of", lambda *_: "key")  # which writes too
    message = in_child(load)[1].recv()
    assert message.startswith(f"error: {home}: tokenised rows cannot be written ([Errno 27] File too large")
    assert message.endswith(
        "set HF_DATASETS_CACHE or HF_HOME to a directory with space that you may write to"
    )
    assert not [path for path in home.iterdir() if path.is_dir()]
    assert [*load_prompts([file], make_tokenizer(), 16, True)[0]] == plain([file], make_tokenizer(), 16)


def test_a_directory_that_cannot_be_written(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(file))
    with pytest.raises(SystemExit, match=r"^error: .*/rows.parquet/post_training: tokenised rows cannot be"):
        load_prompts([file], make_tokenizer(), 16, True)
