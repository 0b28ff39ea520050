"""SFT: what is trained, truncation, and whole runs that learn, split, stop and resume."""

import json
import math
import shutil
import signal
import subprocess
import time
from functools import partial
from types import SimpleNamespace

import conftest
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, changed, healthy, hf, load_weights, losses, metrics, offline_flags, run, start
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from algos import sft
from data_prep.arithmetic import make_row
from data_prep.lib.schema import write_parquet
from data_prep.tiny_model import make_tokenizer

SCRIPT, STEPS = ROOT / "algos/sft.py", 8
PROMPT, RESPONSE = "<|user|>37+85=<|assistant|>", "122<|eos|>"


make_args = partial(conftest.make_args, sft)
flags = partial(offline_flags, max_tokens_per_microbatch=32)


@pytest.fixture
def rows_file(tmp_path):
    """Responses of 2, 3 and 4 tokens after prompts of 6, 8 and 8."""
    questions = [(1, 2), (10, 20), (60, 70)]
    write_parquet([make_row("train", i, *q) for i, q in enumerate(questions)], tmp_path / "rows.parquet")
    return str(tmp_path / "rows.parquet")


# ---- what is trained


def trained_tokens(rows):
    return sum(sum(row["trained"]) for row in rows)


def loss_of(lm, rows):
    """The loss of plain rows, all of whose response tokens are trained."""
    [logp_nt] = sft.token_logps(sft.TokenLogps(lm, entropy=False), rows)
    return sft.sft_loss(logp_nt, 1, trained_tokens(rows)).item()


def test_the_loss_by_hand():
    """The last token of the first row is a tool's; of DFT each token weighs as much as its probability."""
    logp_nt = torch.tensor([[-1.0, -2, -9], [-3, 0, 0]], requires_grad=True)
    trained_nt = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert sft.sft_loss(logp_nt, trained_nt, 3).item() == pytest.approx(2)
    loss = sft.sft_loss(logp_nt, trained_nt, 3, dft=True)
    p1, p2, p3 = (math.exp(-x) for x in (1, 2, 3))
    assert loss.item() == pytest.approx((p1 + 2 * p2 + 3 * p3) / 3)
    loss.backward()
    assert logp_nt.grad.flatten().tolist() == pytest.approx([-p1 / 3, -p2 / 3, 0, -p3 / 3, 0, 0])


class Spy(torch.nn.Module):
    """Stands for the model, and keeps what it was asked for."""

    def __init__(self, packed):
        super().__init__()
        self.weight, self.packed, self.processor = torch.nn.Parameter(torch.zeros(())), packed, None
        self.lm = SimpleNamespace(config=LlamaConfig())

    def forward(self, where, target, temperature, input_ids, **layout):
        self.asked = [input_ids.flatten()[p + 1].item() for p in where], target.tolist()
        return [torch.zeros(len(target))]


@pytest.mark.parametrize("pad", ("<|pad|>", "<|eos|>"))
@pytest.mark.parametrize("packed", (False, True))
def test_response_and_eos_are_trained_and_nothing_else(pad, packed):
    tokenizer, spy = make_tokenizer(), Spy(packed)
    tokenizer.pad_token = pad
    questions = (("1+2=", "3"), ("37+85=", "122"), ("0+0=", ""))
    rows = [sft.split(*sft.encode([{"role": "user", "content": q}], a, tokenizer)) for q, a in questions]
    assert tokenizer.decode(rows[1]["prompt_ids"]) == PROMPT
    assert tokenizer.decode(rows[1]["response_ids"]) == RESPONSE and all(rows[1]["trained"])
    sft.token_logps(spy, rows)
    at_next_position, target = spy.asked
    assert tokenizer.decode(target) == "3<|eos|>" + RESPONSE + "<|eos|>"  # an empty response is its EOS
    assert at_next_position == target


CONVERSATION = """\
{%- for m in messages -%}
{{- '<|' ~ (m.role if m.role != 'tool' else 'user') ~ '|>' ~ m.content -}}
{%- if m.role == 'assistant' -%}{{- eos_token ~ '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
TURNS = [("system", "add"), ("user", "1+2="), ("assistant", "call 1+2"), ("tool", "3"), ("assistant", "3")]
MESSAGES = [dict(role=role, content=content) for role, content in TURNS]


def conversation_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template, tokenizer.pad_token = CONVERSATION, tokenizer.eos_token
    return tokenizer


def test_conversations_from_a_file(tmp_path):
    file = str(tmp_path / "rows.parquet")
    short = [dict(role="user", content="hi")]  # nothing to train
    write_parquet([dict(messages=MESSAGES), dict(messages=short)], file)
    args = make_args(messages_key="messages")
    [row], _, truncated, dropped = sft.load_examples([file], args, conversation_tokenizer())
    [expected] = sft.encode_messages(MESSAGES, conversation_tokenizer())
    expected = sft.split(*expected)
    assert row == dict(
        expected, ends=[conversation_tokenizer().eos_token_id], truncated=False, lost=0, index=0
    )
    assert (truncated, dropped) == (0, 1)
    with pytest.raises(ValueError, match=r"rows.parquet: row 0: the chat template: unknown role tool$"):
        sft.load_examples([file], args, make_tokenizer())


# ---- truncation


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (slice(6), ([1, 2, 3], [4, 5, 6])),
        (slice(4), ([1, 2, 3], [4])),
        (slice(-4, None), ([3], [4, 5, 6])),
        (slice(-3, None), ([4], [5, 6])),  # nothing predicts 4
        *((keep, None) for keep in (slice(3), slice(2), slice(-1, None))),  # its response is gone
    ],
)
def test_split_after_truncation(keep, kept):
    row = sft.split([1, 2, 3, 4, 5, 6][keep], ([False] * 3 + [True] * 3)[keep])
    assert (row and (row["prompt_ids"], row["response_ids"])) == kept
    assert row is None or all(row["trained"])


def test_rows_over_the_limit(rows_file):
    def load(**changes):
        return sft.load_examples([rows_file], make_args(**changes), make_tokenizer())

    with pytest.raises(ValueError, match=r"rows.parquet: row 1: 11 tokens, over --max_length 10"):
        load(max_length=10)
    rows, _, truncated, dropped = load(max_length=10, truncation="right")
    assert [len(row["response_ids"]) for row in rows] == [2, 2, 2] and (truncated, dropped) == (2, 0)
    rows, _, truncated, dropped = load(max_length=7, truncation="right")
    assert [len(row["response_ids"]) for row in rows] == [1] and (truncated, dropped) == (1, 2)
    rows, _, truncated, dropped = load(max_length=7, truncation="left")
    assert [len(row["response_ids"]) for row in rows] == [2, 3, 4] and (truncated, dropped) == (3, 0)
    assert sum(rows.column("lost").to_pylist()) == 0
    with pytest.raises(ValueError, match="no row has an answer with a token within --max_length 6"):
        load(max_length=6, truncation="right")


def test_turns_that_truncation_loses_are_counted(tmp_path):
    talk = []
    for question in ("1", "3", "5"):
        talk += [dict(role="user", content=question), dict(role="assistant", content="22")]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(dict(messages=talk)))
    tokenizer = conversation_tokenizer()
    for length, lost in ((8, 2), (14, 1), (99, 0)):
        for keep in ("left", "right"):
            args = make_args(max_length=length, truncation=keep)
            rows, _, truncated, dropped = sft.load_examples([str(path)], args, tokenizer)
            assert (sum(rows.column("lost").to_pylist()), truncated, dropped) == (lost, lost > 0, 0)


def write_texts(path, texts):
    pq.write_table(pa.table(dict(extra=[dict(text=text) for text in texts])), path)
    return str(path)


def test_texts_are_cut_and_packed(tmp_path):
    """Every token is in one row, and each is trained that has another before it in its row."""
    tokenizer, load = make_tokenizer(), partial(sft.load_examples, tokenizer=make_tokenizer())
    path, args = write_texts(tmp_path / "texts.parquet", ["12", "", "3456"]), make_args(text_key="extra.text")
    cuts = {5: ["12<|eos|>34", "56<|eos|>"], 7: ["12<|eos|>3456"], 8: ["12<|eos|>3456<|eos|>"]}
    for length, cut in cuts.items():
        args.max_length = length
        rows, ends, truncated, dropped = load([path], args)
        assert [tokenizer.decode(row["prompt_ids"] + row["response_ids"]) for row in rows] == cut
        assert all(len(row["prompt_ids"]) == 1 and all(row["trained"]) for row in rows)
        assert sft.lengths(rows) == sft.lengths([*rows]) and len(rows) == len(cut)
        assert (ends, truncated, dropped) == ({tokenizer.eos_token_id}, 0, 1)
        assert rows.tokens_per_byte == 8 / 6
    nothing, *_ = load([], args)
    assert not nothing and not [*nothing]
    path = write_texts(tmp_path / "bytes.parquet", ["12", "\u00e9\u20ac"])  # of two and three bytes
    assert load([path], args)[0].tokens_per_byte == (2 + len(tokenizer.encode("\u00e9\u20ac")) + 2) / 7
    twice = make_tokenizer()  # one that ends texts with EOS itself, as T5's does
    ends = TemplateProcessing(single="$A <|eos|>", special_tokens=[("<|eos|>", twice.eos_token_id)])
    twice.backend_tokenizer.post_processor = ends
    args.max_length, path = 8, write_texts(tmp_path / "again.parquet", ["12", "", "3456"])
    assert [*sft.load_examples([path], args, twice)[0]] == [*load([path], args)[0]]
    with pytest.raises(ValueError, match=r"row 0: extra.text is no text: 1"):
        load([write_texts(tmp_path / "numbers.parquet", [1])], args)


# ---- whole runs


@pytest.fixture(scope="module")
def straight(tiny, arithmetic, tmp_path_factory):
    """A run on one rank, with many micro-batches in a step, and without a warning."""
    out = tmp_path_factory.mktemp("sft") / "straight"
    assert "Warning: " not in run(SCRIPT, *flags(tiny, arithmetic, out)).stderr
    return out


def test_it_learns(straight, tiny, arithmetic):
    by_step = healthy(straight)
    assert list(by_step) == list(range(STEPS + 1))
    assert by_step[STEPS]["train/loss"] < by_step[1]["train/loss"] - 0.4
    assert by_step[STEPS]["val/loss"] < by_step[4]["val/loss"] < by_step[0]["val/loss"]
    epochs = [by_step[i]["training/epoch"] for i in range(1, STEPS + 1)]
    assert epochs == [0] * 4 + [1] * 4  # 64 rows, 15 a step
    assert by_step[2]["train/lr"] == 3e-3 and by_step[1]["train/lr"] == 1.5e-3 > by_step[STEPS]["train/lr"]
    assert changed(tiny, hf(straight)) == load_weights(tiny).keys()


def test_texts_are_learned(tiny, tmp_path):
    """On two ranks as on one; a byte has as many bits as its tokens, each text with its EOS."""
    sums = [f"{i}+{i}={2 * i}" for i in range(1, 80)]
    val = sums[::7]
    texts = dict(train_files=write_texts(tmp_path / "train.parquet", sums * 3), text_key="extra.text")
    texts |= dict(val_files=write_texts(tmp_path / "val.parquet", val), train_batch_size=16, lr=1e-2)
    for ranks in (0, 2):
        run(SCRIPT, *flags(tiny, tmp_path, tmp_path / f"run{ranks}", **texts), ranks=ranks)
    one, two = (metrics(tmp_path / f"run{ranks}") for ranks in (0, 2))
    assert losses(tmp_path / "run2") == pytest.approx(losses(tmp_path / "run0"), abs=1e-5)
    assert two[STEPS]["val/bits_per_byte"] == pytest.approx(one[STEPS]["val/bits_per_byte"], abs=1e-5)
    assert one[1]["perf/total_num_tokens"] == 16 * 32  # full rows
    assert one[STEPS]["val/loss"] < one[0]["val/loss"] - 0.5
    tokens_per_byte = sum(len(make_tokenizer().encode(text)) + 1 for text in val) / len("".join(val))
    bits = one[STEPS]["val/loss"] / math.log(2) * tokens_per_byte
    assert one[STEPS]["val/bits_per_byte"] == pytest.approx(bits, abs=1e-4)
    healthy(tmp_path / "run0")


def test_four_rows_are_learned_by_heart(tiny, tmp_path):
    """And the saved model stops; its template ends a turn with a token that is not EOS."""
    questions = [(12, 34), (56, 78), (9, 1), (50, 60)]
    rows = [make_row("train", i, *q) for i, q in enumerate(questions)]
    answers = [dict(role="assistant", content=row["extra_info"]["answer"]) for row in rows]
    rows = [dict(messages=[*row["prompt"], answer]) for row, answer in zip(rows, answers)]
    write_parquet(rows, tmp_path / "train.parquet")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CONVERSATION.replace("eos_token", "'<|system|>'")
    model = shutil.copytree(tiny, tmp_path / "model")
    tokenizer.save_pretrained(model)
    sizes = dict(
        train_batch_size=4, total_steps=80, lr=1e-2, lr_schedule="constant", save_freq=0, test_freq=0
    )
    sizes |= dict(messages_key="messages", val_files=tmp_path / "train.parquet")
    run(SCRIPT, *flags(model, tmp_path, tmp_path / "run", **sizes))
    lm, tokenizer = (x.from_pretrained(hf(tmp_path / "run")) for x in (AutoModelForCausalLM, AutoTokenizer))
    for row in rows:
        [encoded] = sft.encode_messages(row["messages"], tokenizer)
        row = sft.split(*encoded)
        prompt = torch.tensor([row["prompt_ids"]])
        found = lm.generate(prompt, max_new_tokens=16, do_sample=False)[0].tolist()
        assert found == row["prompt_ids"] + row["response_ids"]  # and stops


# ---- stop and resume


def test_it_goes_on_with_cut_files_and_from_its_own_checkpoint(straight, tiny, arithmetic, tmp_path):
    """A full disk left half a line of metrics; the run began with --resume PATH."""
    out, path = tmp_path / "run", straight / f"checkpoints/step_{STEPS // 2:06d}"
    shutil.copytree(straight, out, symlinks=True)
    lines = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text(lines + lines.splitlines()[-1][:20])
    run(SCRIPT, *flags(tiny, arithmetic, out, total_steps=STEPS + 1, lr=1e-3, resume=path))
    assert f"resumed from {out}/checkpoints/step_{STEPS:06d}" in (out / "log.txt").read_text()
    assert (out / "metrics.jsonl").read_text().startswith(lines)
    assert list(metrics(out)) == list(range(STEPS + 2)) and metrics(out)[STEPS + 1]["train/lr"] < 1e-3


def test_sigint_saves(tiny, arithmetic, tmp_path):
    command = [SCRIPT, *flags(tiny, arithmetic, tmp_path / "run", total_steps=100_000)]
    process = start(*command, "--save_freq", 0, "--test_freq", 0, stderr=subprocess.PIPE)
    try:
        log = tmp_path / "run/metrics.jsonl"
        while process.poll() is None and not (log.exists() and log.read_text()):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130, stderr[-3000:]
    last = max(metrics(tmp_path / "run"))
    assert (tmp_path / "run/checkpoints/latest").resolve().name == f"step_{last:06d}"
    assert load_weights(hf(tmp_path / "run"))


def test_heads_that_ranks_do_not_divide(tiny, monkeypatch):
    config = AutoConfig.from_pretrained(tiny)
    config.num_attention_heads = 9
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda model: config)
    line = "9 attention heads, which --sp_size 2 does not divide: take --sp_attention ring$"
    with pytest.raises(SystemExit, match=line):
        sft.refuse_model(make_args(sp_size=2))
