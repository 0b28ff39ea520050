"""Ranks that die or hang, full disks, damaged checkpoints: a run goes on, or ends in one clear line."""

import os
import shutil
import time

import psutil
import pytest
import torch
from conftest import ROOT, load_weights, run, same

FAULTY = ROOT / "tests/faults/faulty.py"
SFT = ROOT / "algos/sft.py"
KILLED_SOON = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1"  # a rank that waits for one that has gone; not after 30 s


@pytest.fixture
def notes(tmp_path):
    """A directory for the faults that have struck."""
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


def nothing_is_left(out):
    """No process of the run, and nothing half-written."""
    while any(str(out) in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
        time.sleep(0.1)
    assert not [*(out / "checkpoints").glob(".*")]


def equal(a, b):
    """Metrics and final weights of two runs."""
    same(a, b, tolerance=1e-6)
    a, b = (load_weights(out / "checkpoints/latest/hf") for out in (a, b))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def rl_flags(tiny, arithmetic, out):
    files = "--train_files", arithmetic / "train.parquet", "--val_files", arithmetic / "val.parquet"
    sizes = "--train_batch_size 8 --ppo_mini_batch_size 4 --max_prompt_length 16 --max_response_length 12"
    steps = "--total_steps 6 --save_freq 2 --test_freq 3 --lr 3e-3"
    reward = f"--reward_manager prime --reward_fn {ROOT}/tests/digit_reward.py:digits"
    return ["--model", tiny, "--output_dir", out, *files, *f"{sizes} {steps} {reward}".split()]


def test_killed_while_sampling_and_while_syncing(tiny, arithmetic, notes, tmp_path, monkeypatch):
    monkeypatch.setenv(*KILLED_SOON)
    run(ROOT / "algos/grpo.py", *rl_flags(tiny, arithmetic, tmp_path / "straight"), ranks=2)
    out = tmp_path / "killed"
    faults = "grpo", "gen:1:2:kill,sync:0:4:kill", notes
    run(FAULTY, *faults, *rl_flags(tiny, arithmetic, out), ranks=2, restarts=3)
    assert len(os.listdir(notes)) == 2
    equal(tmp_path / "straight", out)
    nothing_is_left(out)


@pytest.fixture(scope="module")
def sft(tiny, arithmetic, tmp_path_factory):
    """Flags of a run with four checkpoints, and such a run."""
    files = "--train_files", arithmetic / "train.parquet", "--train_batch_size", 16, "--total_steps", 8
    sizes = "--max_length 32 --lr 1e-2 --warmup_steps 1 --save_freq 2 --keep_checkpoints 0".split()

    def flags(out, *more):
        return ["--model", tiny, "--output_dir", out, *files, *sizes, *more]

    out = tmp_path_factory.mktemp("straight")
    run(SFT, *flags(out), ranks=2)
    return flags, out


def test_killed_while_updating_and_while_saving(sft, notes, tmp_path, monkeypatch):
    monkeypatch.setenv(*KILLED_SOON)
    flags, straight = sft
    out = tmp_path / "killed"
    faults = "sft", "update_actor:1:3:kill,save_checkpoint:0:6:kill", notes
    run(FAULTY, *faults, *flags(out), ranks=2, restarts=3)
    assert len(os.listdir(notes)) == 2
    equal(straight, out)
    nothing_is_left(out)


def test_a_rank_that_hangs_shows_its_stack(sft, notes, tmp_path, monkeypatch):
    flags, out = sft[0], tmp_path / "hangs"
    hangs = "sft", "update_actor:1:3:hang", notes
    monkeypatch.setenv("FAULTY_TIMEOUT_S", "10")
    done = run(FAULTY, *hangs, *flags(out), ranks=2, check=False)
    assert done.returncode != 0
    stack = done.stderr.partition("Timeout (0:00:09.250000)!")[2]  # of rank 1, after that of rank 0
    assert "tests/faults/faulty.py" in stack and " in strike" in stack, done.stderr
    assert "Timed out waiting 10000ms" in done.stderr and "Root Cause" in done.stderr  # torchrun's summary
    nothing_is_left(out)


@pytest.mark.parametrize("rank_and_kind", ["1:full", "0:link"])
def test_a_full_disk(sft, notes, tmp_path, rank_and_kind):
    """While files are written, by any rank; while rank 0 points `latest` at them."""
    flags, straight = sft
    out, (rank, kind) = tmp_path / "full", rank_and_kind.split(":")
    full = "sft", f"save_checkpoint:{rank}:4:{kind}", notes
    done = run(FAULTY, *full, *flags(out), ranks=2, check=False)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and f"step_000004 cannot be written: rank {rank}: " in lines[0]
    assert lines[0].endswith("GiB are free")
    assert os.readlink(out / "checkpoints/latest") == "step_000002"
    run(SFT, *flags(out), ranks=2)
    equal(straight, out)
    nothing_is_left(out)


def damage(checkpoint, kind):
    shard = checkpoint / "dcp/__1_0.distcp"
    if kind == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif kind == "half":
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    elif kind == "missing":
        shard.unlink()
    elif kind == "metadata":
        (checkpoint / "dcp/.metadata").write_bytes(b"")
    else:
        (checkpoint / "trainer_state.json").write_text("{")


@pytest.mark.parametrize(("ranks", "kind"), [(0, "truncated"), (0, "state"), (2, "missing"), (2, "metadata")])
def test_a_damaged_checkpoint_is_one_line_that_says_how_to_resume(sft, tmp_path, ranks, kind):
    flags, straight = sft
    out = tmp_path / "damaged"
    shutil.copytree(straight, out, symlinks=True)
    damage(out / "checkpoints/step_000008", kind)
    more = "--total_steps", 9  # one that has all its steps loads nothing
    done = run(SFT, *flags(out), *more, ranks=ranks, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(lines) == 1, done.stderr
    assert f"{out}/checkpoints/step_000008 is damaged, or of another model (" in lines[0]
    assert lines[0].endswith(f"point {out}/checkpoints/latest at an earlier step, or remove step_000008")
    nothing_is_left(out)


def test_an_unfinished_or_damaged_checkpoint_goes(sft, tmp_path):
    """A kill left it, or `latest` was pointed at an earlier step: nothing of it gets into the next one."""
    flags, straight = sft
    out = tmp_path / "unfinished"
    shutil.copytree(straight, out, symlinks=True)
    (out / "checkpoints/latest").unlink()
    (out / "checkpoints/latest").symlink_to("step_000006")
    last = out / "checkpoints/step_000008"
    damage(last, "half")
    (last / "trainer_state.json").unlink()
    (last / "hf/model-00002-of-00002.safetensors").write_bytes(b"")
    run(SFT, *flags(out), ranks=2)
    assert f"resumed from {out}/checkpoints/step_000006" in (out / "log.txt").read_text()
    assert not (last / "hf/model-00002-of-00002.safetensors").exists()
    equal(straight, out)
