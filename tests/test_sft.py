"""SFT: what is trained, truncation, and whole runs that learn, split, stop and resume."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, metrics, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from algos import sft
from data_prep.arithmetic import make_row
from data_prep.schema import write_parquet
from data_prep.tiny_model import make_tokenizer

SCRIPT, STEPS = ROOT / "algos/sft.py", 8
PROMPT, RESPONSE = "<|user|>37+85=<|assistant|>", "122<|eos|>"


def make_args(**changes):
    return sft.Args(model="", train_files=(), output_dir="", **changes)


@pytest.fixture
def rows_file(tmp_path):
    """Responses of 2, 3 and 4 tokens after prompts of 6, 8 and 8."""
    questions = [(1, 2), (10, 20), (60, 70)]
    write_parquet([make_row("train", i, *q) for i, q in enumerate(questions)], tmp_path / "rows.parquet")
    return str(tmp_path / "rows.parquet")


# ---- what is trained


class Spy(torch.nn.Module):
    """Stands for the model, and keeps what it was asked for."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, position_ids, where, target, temperature):
        self.asked = [input_ids.flatten()[p + 1].item() for p in where], target.tolist(), temperature
        return torch.zeros(len(target)), torch.zeros(len(target))


@pytest.mark.parametrize("pad", ("<|pad|>", "<|eos|>"))
@pytest.mark.parametrize("packed", (False, True))
def test_response_and_eos_are_trained_and_nothing_else(pad, packed):
    tokenizer, spy = make_tokenizer(), Spy()
    tokenizer.pad_token = pad
    questions = (("1+2=", "3"), ("37+85=", "122"))
    short, long = (sft.encode([{"role": "user", "content": q}], a, tokenizer) for q, a in questions)
    assert tokenizer.decode(long[0]) == PROMPT and tokenizer.decode(long[1]) == RESPONSE
    sft.token_logps(spy, [short[0], long[0]], [short[1], long[1]], 1.0, packed)
    at_next_position, target, temperature = spy.asked
    assert tokenizer.decode(target) == "3<|eos|>" + RESPONSE
    assert at_next_position == target and temperature == 1.0


def test_loss_is_that_of_transformers(tiny):
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    pairs = [sft.encode(q, a, tokenizer) for q, a in (("1+2=", "3"), ("37+85=", "122"), ("0+0=", ""))]
    tokens = sum(len(response) for _, response in pairs)
    assert tokens == 2 + 4 + 1  # an empty response is its EOS
    logp_nt, _ = sft.token_logps(sft.TokenLogps(lm), *zip(*pairs), 1.0, packed=False)
    expected = sum(
        lm(input_ids=torch.tensor([p + r]), labels=torch.tensor([[-100] * len(p) + r])).loss * len(r)
        for p, r in pairs
    )
    assert sft.sft_loss(logp_nt, tokens).item() == pytest.approx(expected.item() / tokens, abs=1e-5)


def test_loss_by_hand():
    assert sft.sft_loss(torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), 3).item() == 2.0
    assert sft.sft_loss(torch.zeros(0, 1), 3).item() == 0.0  # an empty micro-batch


def test_a_string_is_one_user_message(rows_file):
    as_messages = sft.load_examples([rows_file], make_args(), make_tokenizer())
    as_strings = sft.load_examples([rows_file], make_args(prompt_key="extra_info.question"), make_tokenizer())
    assert as_messages == as_strings and as_messages[1:] == (0, 0)


# ---- truncation


@pytest.mark.parametrize(
    ("side", "limit", "kept"),
    [
        ("right", 6, ([1, 2, 3], [4, 5, 6])),
        ("right", 4, ([1, 2, 3], [4])),
        ("right", 3, ([1, 2, 3], [])),
        ("right", 2, ([1, 2], [])),
        ("left", 6, ([1, 2, 3], [4, 5, 6])),
        ("left", 4, ([3], [4, 5, 6])),
        ("left", 3, ([4], [5, 6])),
        ("left", 2, ([5], [6])),
        ("left", 1, ([6], [])),
    ],
)
def test_truncate(side, limit, kept):
    assert sft.truncate([1, 2, 3], [4, 5, 6], limit, side) == kept


def test_rows_over_the_limit(rows_file):
    load = lambda **changes: sft.load_examples([rows_file], make_args(**changes), make_tokenizer())
    with pytest.raises(ValueError, match=r"rows.parquet: row 1 has 11 tokens, over --max_length 10"):
        load(max_length=10)
    rows, truncated, dropped = load(max_length=10, truncation="right")
    assert [len(row["response_ids"]) for row in rows] == [2, 2, 2] and (truncated, dropped) == (2, 0)
    rows, truncated, dropped = load(max_length=7, truncation="right")
    assert [len(row["response_ids"]) for row in rows] == [1] and (truncated, dropped) == (3, 2)
    rows, truncated, dropped = load(max_length=7, truncation="left")
    assert [len(row["response_ids"]) for row in rows] == [2, 3, 4] and (truncated, dropped) == (3, 0)
    with pytest.raises(ValueError, match="leaves no row a response"):
        load(max_length=6, truncation="right")


# ---- whole runs


def flags(model, data, out, **changes):
    values = dict(model=model, output_dir=out, total_steps=STEPS, max_length=32, max_tokens_per_microbatch=32)
    values |= dict(train_batch_size=15, lr=3e-3, warmup_steps=2, save_freq=STEPS // 2, keep_checkpoints=0)
    values |= dict(test_freq=4) | changes
    files = ["--train_files", data / "train.parquet", "--val_files", data / "val.parquet"]
    return [*files, *(word for name, value in values.items() for word in (f"--{name}", value))]


@pytest.fixture(scope="module")
def straight(tiny, arithmetic, tmp_path_factory):
    """A run on one rank, with many micro-batches in a step."""
    out = tmp_path_factory.mktemp("sft") / "straight"
    run(SCRIPT, *flags(tiny, arithmetic, out))
    return out


def weights(out):
    return AutoModelForCausalLM.from_pretrained(out).state_dict()


def losses(out):
    return [m["train/loss"] for m in metrics(out).values()]


def test_it_learns(straight, tiny, arithmetic):
    by_step = metrics(straight)
    assert list(by_step) == list(range(1, STEPS + 1))
    assert by_step[STEPS]["train/loss"] < by_step[1]["train/loss"] - 0.5
    assert by_step[STEPS]["val/loss"] < by_step[4]["val/loss"]
    assert [m["training/epoch"] for m in by_step.values()] == [0] * 4 + [1] * 4  # 64 rows, 15 a step
    assert by_step[2]["train/lr"] == 3e-3 and by_step[1]["train/lr"] == 1.5e-3 > by_step[STEPS]["train/lr"]
    page = (ROOT / "docs/sft.md").read_text()
    for name, value in [item for m in by_step.values() for item in m.items()]:
        assert math.isfinite(value), name
        assert f"`{name}`" in page, f"{name} is not in docs/sft.md"
    before, after = weights(tiny), weights(straight / "checkpoints/latest/hf")
    assert before.keys() == after.keys() and all((before[k] != after[k]).any() for k in before)


def test_the_checkpoint_gives_the_logged_loss(straight, arithmetic):
    lm = AutoModelForCausalLM.from_pretrained(straight / "checkpoints/latest/hf")
    tokenizer = AutoTokenizer.from_pretrained(straight / "checkpoints/latest/hf")
    rows, _, _ = sft.load_examples([str(arithmetic / "val.parquet")], make_args(), tokenizer)
    pairs = [[row[name] for row in rows] for name in ("prompt_ids", "response_ids")]
    logp_nt, _ = sft.token_logps(sft.TokenLogps(lm), *pairs, 1.0, packed=False)
    loss = sft.sft_loss(logp_nt, sum(map(len, pairs[1]))).item()
    assert loss == pytest.approx(metrics(straight)[STEPS]["val/loss"], abs=1e-5)


def test_two_ranks_and_large_microbatches_change_nothing(straight, tiny, arithmetic, tmp_path):
    run(SCRIPT, *flags(tiny, arithmetic, tmp_path / "two", max_tokens_per_microbatch=4096), ranks=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(straight), abs=1e-5)
    one, two = metrics(straight)[STEPS], metrics(tmp_path / "two")[STEPS]
    assert two["val/loss"] == pytest.approx(one["val/loss"], abs=1e-5)
    assert two["perf/total_num_tokens"] == one["perf/total_num_tokens"]


def test_a_killed_run_goes_on(straight, tiny, arithmetic, tmp_path):
    """As a kill after the checkpoint of step 4 leaves it: metrics of later steps, but no checkpoint."""
    half = tmp_path / "half"
    shutil.copytree(straight, half, symlinks=True)
    shutil.rmtree(half / f"checkpoints/step_{STEPS:06d}")
    (half / "checkpoints/latest").unlink()
    (half / "checkpoints/latest").symlink_to(f"step_{STEPS // 2:06d}")
    run(SCRIPT, *flags(tiny, arithmetic, half))
    assert "resumed from" in (half / "log.txt").read_text()
    assert list(metrics(half)) == list(range(1, STEPS + 1))
    assert losses(half) == pytest.approx(losses(straight), abs=1e-6)
    a, b = (weights(out / "checkpoints/latest/hf") for out in (straight, half))
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)


def test_sigterm_saves_and_ends_well(tiny, arithmetic, tmp_path):
    env = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, SCRIPT, *flags(tiny, arithmetic, tmp_path / "run", total_steps=100_000)]
    command += ["--save_freq", "0", "--test_freq", "0"]
    process = subprocess.Popen(list(map(str, command)), env=env, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and not (tmp_path / "run/metrics.jsonl").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, stderr[-3000:]
    last = max(metrics(tmp_path / "run"))
    assert (tmp_path / "run/checkpoints/latest").resolve().name == f"step_{last:06d}"
    assert weights(tmp_path / "run/checkpoints/latest/hf")


def test_a_step_without_a_finite_gradient_is_skipped(tiny, arithmetic, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(tiny)
    lm.model.norm.weight.data[0] = math.inf
    lm.save_pretrained(tmp_path / "model")
    out = tmp_path / "run"
    run(SCRIPT, *flags(tmp_path / "model", arithmetic, out, total_steps=1, test_freq=0), "--tokenizer", tiny)
    assert metrics(out)[1]["train/skipped_updates"] == 1
    before, after = weights(tmp_path / "model"), weights(out / "checkpoints/latest/hf")
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_length=9), "row 0 has 11 tokens, over --max_length 9"),
        (dict(train_batch_size=65), "--train_batch_size 65 is more than the 64 training rows"),
    ],
)
def test_errors_are_one_line(tiny, arithmetic, tmp_path, changes, message):
    done = run(SCRIPT, *flags(tiny, arithmetic, tmp_path / "run", **changes), check=False)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_row_must_fit_into_a_microbatch():
    with pytest.raises(SystemExit, match="microbatch 31 is less than a row of --max_length 32"):
        sft.check_args(make_args(max_tokens_per_microbatch=31, max_length=32))
