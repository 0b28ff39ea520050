"""Tokenised rows in the cache: what they are, when they are made again, and what a crash leaves."""

import os
import resource
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from test_sft import MESSAGES, conversation_tokenizer, make_args
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig

from algos import sft
from data_prep.arithmetic import make_row
from data_prep.lib import cache, source
from data_prep.lib.cache import load_prompts
from data_prep.lib.images import load_processor
from data_prep.lib.schema import write_parquet
from data_prep.tiny_model import make_tokenizer

COLUMNS = ["data_source", "prompt", "reward_model", "extra_info"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty cache -> its directory."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "BATCH_ROWS", 7)
    return tmp_path / "cache/post_training"


@pytest.fixture
def file(tmp_path):
    write_parquet([make_row("train", i, i, 10**i) for i in range(20)], tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


class Counting:
    """A tokenizer that notes in a file which process had a prompt; then `before(number of the prompt)`."""

    def __init__(self, path, before=lambda number: None):
        self.tokenizer, self.path, self.before = make_tokenizer(), Path(path), before

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, texts, **options):
        for _ in texts:
            with open(self.path, "a") as file:
                file.write(f"{os.getpid()}\n")
            self.before(self.count())
        return self.tokenizer(texts, **options)

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


def plain(paths, tokenizer, limit):
    """What a loop over the rows gives."""
    rows = [row for path in paths for row in pq.read_table(path, columns=COLUMNS).to_pylist()]
    ids = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True)["input_ids"] for r in rows]
    rows = [
        dict({c: row[c] for c in COLUMNS}, prompt_ids=x, group=i, tools=None, index=i)
        for i, (row, x) in enumerate(zip(rows, ids))
    ]
    return [row for row in rows if len(row["prompt_ids"]) <= limit]


# ---- rows


def test_rows_of_files_with_other_structs(file, tmp_path):
    row = make_row("test", 0, 1, 2)
    truth = dict(names=["a", "b"], scores=[0.5, None])
    rows = [row | dict(reward_model=dict(style="rule", ground_truth=truth), extra_info=dict(deep=dict(x=1)))]
    rows += [row | dict(reward_model=dict(style="model", ground_truth=None), extra_info=dict(deep=None))]
    other = tmp_path / "other.parquet"
    pq.write_table(pa.Table.from_pylist(rows * 10), other)
    tokenizer = Counting(tmp_path / "count")
    found, dropped = load_prompts([file, other], tokenizer, 16)
    expected = plain([file, other], tokenizer.tokenizer, 16)
    assert [*found] == expected and dropped == 40 - len(expected) > 0
    assert tokenizer.count() == 40
    assert found[-1] == expected[-1] and found[3:20:5] == expected[3:20:5]
    assert found.unique("data_source") == {"arithmetic"}
    assert found.column("index").to_pylist() == [row["index"] for row in expected]
    with pytest.raises(IndexError):
        found[len(expected)]


def test_ids_of_a_batch_are_those_of_a_row(file):
    """Also where the tokenizer adds BOS to texts that are no prompts."""
    tokenizer = make_tokenizer()
    expected, bos = plain([file], tokenizer, 99), (tokenizer.eos_token, tokenizer.eos_token_id)
    assert [*load_prompts([file], tokenizer, 99)[0]] == expected
    processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.backend_tokenizer.post_processor = processor
    assert tokenizer.encode("1")[0] == bos[1]
    assert [*load_prompts([file], tokenizer, 99)[0]] == plain([file], tokenizer, 99) == expected


def test_no_hub_and_no_word(file, tmp_path):
    """Of a small set nothing is said, and nobody is asked."""
    program = f"import socket, sys; sys.path.insert(0, {str(ROOT)!r});"
    program += "socket.socket.connect = lambda *x: sys.exit(f'asked {x}');"
    program += "from data_prep.lib.cache import load_prompts;"
    program += "from data_prep.tiny_model import make_tokenizer;"
    program += f"print(len(load_prompts([{str(file)!r}], make_tokenizer(), 99)[0]), 'pandas' in sys.modules)"
    env = dict(os.environ, HF_DATASETS_CACHE=str(tmp_path / "elsewhere"))
    command = [sys.executable, "-c", program]
    for made in (True, False):  # the second start finds the rows, and loads no pandas
        result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
        assert (result.stdout, result.stderr) == (f"20 {made}\n", "")


@pytest.mark.parametrize("left", [0, 400, -8])  # -8: between two batches
def test_an_entry_that_is_damaged(file, home, left):
    load_prompts([file], make_tokenizer(), 99)
    [rows] = home.glob("*/*.arrow")
    os.truncate(rows, left % rows.stat().st_size)
    with pytest.raises(SystemExit, match=rf"error: {rows.parent} is damaged \([^\n]+\): delete it$"):
        load_prompts([file], make_tokenizer(), 99)


def test_no_files():
    rows, dropped = load_prompts((), make_tokenizer(), 16)
    assert not rows and dropped == 0 and rows.unique("data_source") == set()


def test_errors_name_file_and_row(file, tmp_path, home):
    rows = pq.read_table(file).to_pylist()
    rows[13]["prompt"][0]["role"] = "bot"
    bad = tmp_path / "bad.parquet"
    pq.write_table(pa.Table.from_pylist(rows), bad)
    with pytest.raises(ValueError, match=r"^.*/bad.parquet: row 13: 'prompt\[0\].role' is 'bot'; [^\n]*$"):
        load_prompts([file, bad], make_tokenizer(), 99)
    with pytest.raises(ValueError, match=r"rows.parquet: no prompt of 1 to 2 tokens \(--max_prompt_length\)"):
        load_prompts([file], make_tokenizer(), 2)
    rows[13]["prompt"][0]["role"] = "tool"
    write_parquet(rows, bad)
    with pytest.raises(ValueError, match=r"/bad.parquet: row 13: the chat template: unknown role tool$"):
        load_prompts([file, bad], make_tokenizer(), 99)
    pages = bytearray(file.read_bytes())
    pages[4:100] = bytes(96)
    bad.write_bytes(pages)
    with pytest.raises(ValueError, match=r"^.*/bad.parquet: cannot be read \([^\n]*\); write it again$"):
        load_prompts([file, bad], make_tokenizer(), 99)
    with pytest.raises(ValueError, match=r"no such file"):
        load_prompts([file, tmp_path / "none.parquet"], make_tokenizer(), 99)
    assert not [*home.glob("*.new")]


# ---- when they are made


def test_a_second_start_makes_nothing(file, tmp_path):
    tokenizer = Counting(tmp_path / "count")
    first = load_prompts([file], tokenizer, 16)
    moved = file.rename(tmp_path / "moved.parquet")
    again = load_prompts([moved], tokenizer, 16)
    assert tokenizer.count() == 20 and [*first[0]] == [*again[0]] and first[1] == again[1] > 0


def test_what_the_key_depends_on(file, tmp_path, monkeypatch):
    tokenizer = Counting(tmp_path / "count")
    shown = "{% for tool in tools or () %}{{ tool }}{% endfor %}"
    tokenizer.tokenizer.chat_template = shown + tokenizer.tokenizer.chat_template

    def made(limit=99, paths=(file,), tools=None):
        before = tokenizer.count()
        load_prompts(paths, tokenizer, limit, tools)
        return tokenizer.count() - before

    assert (made(), made()) == (20, 0)
    assert (made(limit=98), made(paths=(file, file))) == (20, 40)
    tools = [dict(name="calculate")], [dict(name="calculator")]
    assert [made(tools=x) for x in (*tools, *tools)] == [20, 20, 0, 0]
    tokenizer.tokenizer.chat_template += "{{- '' -}}"
    assert (made(), made()) == (20, 0)
    tokenizer.tokenizer.add_tokens(["37"])
    assert (made(), made()) == (20, 0)
    tokenizer.tokenizer.eos_token = "<|pad|>"
    assert (made(), made()) == (20, 0)
    write_parquet([make_row("train", i, 2, 3 + i) for i in range(20)], file)
    assert (made(), made()) == (20, 0)
    monkeypatch.setattr(cache, "__file__", __file__)  # another version of this program
    assert (made(), made()) == (20, 0)


def test_examples_for_sft(tmp_path):
    path = str(tmp_path / "rows.parquet")
    write_parquet([dict(messages=MESSAGES[: 2 + i % 4]) for i in range(20)], path)

    def load(tools=None, **how):
        return sft.load_examples([path], make_args(messages_key="messages", **how), tokenizer, tools)

    tokenizer = conversation_tokenizer()
    found = [sft.encode_messages(MESSAGES[: 2 + i % 4], tokenizer) for i in range(20)]
    expected = [sft.split(*row) for rows in found for row in rows]
    first, again, cut = load(), load(), load(max_length=18, truncation="right")
    assert [*first[0]] == [*again[0]]
    assert [{name: row[name] for name in expected[1]} for row in first[0]] == [row for row in expected if row]
    assert first[1:] == again[1:] == ({tokenizer.eos_token_id}, 0, 5)
    assert cut[1:] == ({tokenizer.eos_token_id}, 15, 5)
    assert [len(x["prompt_ids"] + x["response_ids"]) for x in cut[0]] == sft.lengths(cut[0]) == [18] * 15
    assert sft.lengths(first[0]) == sft.lengths([*first[0]])
    tokenizer.chat_template = "{{- tools | tojson if tools else '' -}}" + tokenizer.chat_template

    def length(**how):
        return sum(sft.lengths(load(**how)[0]))

    assert length(tools=[dict(a=1)]) > length()


def test_one_rank_of_a_machine_tokenises(file, tmp_path, monkeypatch):
    tokenizer, children = Counting(tmp_path / "count", lambda number: time.sleep(0.01)), []
    for rank in (1, 0):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        children.append(in_child(lambda: [*load_prompts([file], tokenizer, 16)[0]]))
        time.sleep(0.2)
    one, zero = (pipe.recv() for _, pipe in children)
    assert one == zero == plain([file], make_tokenizer(), 16)
    assert str(children[0][0].pid) not in tokenizer.path.read_text().split() and tokenizer.count() == 20


def test_two_runs_at_once(file, tmp_path):
    tokenizer = Counting(tmp_path / "count", lambda number: time.sleep(0.01))
    pipes = [in_child(lambda: [*load_prompts([file], tokenizer, 16)[0]])[1] for _ in range(2)]
    one, two = (pipe.recv() for pipe in pipes)
    assert one == two == plain([file], make_tokenizer(), 16) and tokenizer.count() == 20


# ---- what goes wrong


def test_a_killed_builder(file, tmp_path, home):
    """What it left is neither read nor kept."""
    slow = Counting(tmp_path / "count", lambda number: time.sleep(number > 10 and 1000))
    process, _ = in_child(lambda: load_prompts([file], slow, 16))
    while slow.count() < 11:
        time.sleep(0.01)
    process.kill()
    process.join()
    [left] = [path for path in home.iterdir() if path.is_dir()]
    assert left.suffix == ".new"
    load_prompts([file], make_tokenizer(), 15)  # of another key
    assert not left.exists()
    assert [*load_prompts([file], make_tokenizer(), 16)[0]] == plain([file], make_tokenizer(), 16)


def test_a_full_disk(file, monkeypatch, home):
    def load():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        load_prompts([file], make_tokenizer(), 16)

    monkeypatch.setattr(cache, "key_of", lambda *_: "key")  # which writes too
    message = in_child(load)[1].recv()
    assert message.startswith(f"error: {home}: tokenised rows cannot be written ([Errno 27] File too large")
    assert message.endswith(
        "set HF_DATASETS_CACHE or HF_HOME to a directory with space that you may write to"
    )
    assert not [path for path in home.iterdir() if path.is_dir()]
    assert [*load_prompts([file], make_tokenizer(), 16)[0]] == plain([file], make_tokenizer(), 16)


def test_a_directory_that_cannot_be_written(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(file))
    with pytest.raises(SystemExit, match=r"^error: .*/rows.parquet/post_training: tokenised rows cannot be"):
        load_prompts([file], make_tokenizer(), 16)


def test_tokens_that_the_model_does_not_know(file, tmp_path):
    """The tokenizer of another model, or with tokens added, over an embedding that was not resized."""
    tokenizer = make_tokenizer()
    LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, num_attention_heads=1).save_pretrained(tmp_path)
    tokenizer.add_tokens(["What"])
    tokenizer.save_pretrained(tmp_path)
    loaded = load_processor(str(tmp_path))  # one more token than the model has is no harm
    write_parquet([make_row("train", 0, 1, 2)], tmp_path / "other.parquet")
    row = make_row("train", 0, 1, 2) | dict(prompt=[dict(role="user", content="What")])
    write_parquet([row], tmp_path / "new.parquet")
    with pytest.raises(ValueError, match=r"token 'What' has number .*, and the model knows .* tokens"):
        load_prompts([tmp_path / "new.parquet"], loaded, 99)
    tokenizer.eos_token = "What"
    end = tmp_path / "end"
    LlamaConfig(vocab_size=len(tokenizer) - 1, hidden_size=8, num_attention_heads=1).save_pretrained(end)
    tokenizer.save_pretrained(end)
    with pytest.raises(ValueError, match="token 'What' has number"):
        load_processor(str(end))
