"""The benchmarks still run with the trainers as they are: the smallest sizes of some of them."""

import json
import sys

import pytest
from conftest import ROOT, run

from benchmarks import growth, peer
from benchmarks.lib.stages import Stages
from data_prep.lib.images import load_processor
from system.plugins import load_from


def test_throughput(tiny, tmp_path):
    """A step has its parts, and the raw forward and backward as the limit of its update."""
    sizes = "--algo sft --prompts 2 --prompt_length 16 --response_length 8 --rounds 1 --steps 1".split()
    script = ROOT / "benchmarks/throughput.py"
    out = tmp_path / "x.json"
    run(script, "--model", tiny, *sizes, "--output", out)
    [result] = json.loads(out.read_text())["rounds"]
    assert set(result["limits_s"]) == {"update_actor"} and result["overhead"] > 0


@pytest.mark.parametrize("part", growth.PARTS, ids=lambda part: part.__name__)
def test_growth(part, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    part(20, load_processor(str(tiny)))()


def test_stages(tmp_path, capfd):
    """A stage is a line, what it prints is in a file, and a stage that is done is not run again."""
    data = ["data_prep/arithmetic.py", "--local_save_dir", tmp_path / "data", "--train_size", 20]
    Stages(tmp_path, 1).run("data", "the data", data)
    out, err = capfd.readouterr()
    assert out == "" and "[1/1] the data" in err and "1/1" in err
    assert "train.parquet: 20 rows" in (tmp_path / "logs/data.log").read_text()
    assert list(json.loads((tmp_path / "stages.json").read_text())) == ["data"]
    written = (tmp_path / "data/train.parquet").stat().st_mtime_ns
    again = Stages(tmp_path, 2)
    again.run("data", "the data", data)
    assert capfd.readouterr().out.split() == ["[1/2]", "the", "data", "done", "before"]
    assert (tmp_path / "data/train.parquet").stat().st_mtime_ns == written
    with pytest.raises(SystemExit, match=r"error: more failed; all that it printed is in .*more\.log"):
        again.run("more", "more", data + ["--digits", 99])
    assert "--digits is 99" in capfd.readouterr().out


STOPPED = """
import os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from benchmarks.lib.stages import Stages
from data_prep.lib.images import load_processor
from system.plugins import load_from
out, script = Path(sys.argv[1]), sys.argv[2]
def stop():
    while not (out / "run/metrics.jsonl").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
threading.Thread(target=stop, daemon=True).start()
Stages(out, 1).train("run", "train", [script], 3)
"""
TRAINER = """
import signal, sys, time
from pathlib import Path
out, stop = Path(sys.argv[2]), []
signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
out.mkdir()
(out / "metrics.jsonl").write_text('{"training/global_step": 1}\\n')
while not stop:
    time.sleep(0.05)
(out / "saved").touch()
"""


def test_a_stage_saves_at_control_c(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    done = run("-c", STOPPED, tmp_path, tmp_path / "trainer.py", ROOT, check=False)
    assert "stopped; the same command resumes the demo here" in done.stderr
    assert (tmp_path / "run/saved").exists() and not (tmp_path / "stages.json").exists()


def test_table_of_peers(tmp_path, monkeypatch, capsys):
    """Ratios are of one round each."""
    seconds = iter((1.0, 2.0, 3.0, 2.0, 3.0, 5.0))
    names = "step_s", "ms_per_token", "peak_memory_gb"
    monkeypatch.setattr(peer, "measure", lambda *_: dict.fromkeys(names, next(seconds)))
    monkeypatch.setattr(peer.workload, "write_work", lambda *_: None)
    words = "peer.py --model tiny --rounds 2 --output"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(out := tmp_path / "x.json")])
    peer.main()
    ratios = json.loads(out.read_text())["ratios"]
    assert ratios["TRL"] == [2.0, 1.5] and ratios["TRL, vLLM"] == [3.0, 2.5]
    assert "1.75 (1.5 to 2)" in capsys.readouterr().out


def test_a_step_of_peers_trains(tmp_path):
    """The rewards of our side are not constant: such groups would be left out of the update."""
    args = peer.Args(model="tiny")
    _, flags = peer.contestants(args, tmp_path)["ours"]
    score = load_from(flags["reward_fn"], "reward_fn")
    assert [score("", "", "") for _ in range(4)] == [0, 1, 0, 1]


def test_tokens_of_both_sides(tmp_path, monkeypatch):
    """TRL counts tokens and seconds from its start, and its first step warms up."""
    ours = [
        {"timing_s/step": 9.0, "perf/total_num_tokens": 10},
        {"timing_s/step": 2.0, "perf/total_num_tokens": 20},
    ]
    theirs = [dict(num_tokens=100, seconds=10), dict(num_tokens=300, seconds=14)]
    monkeypatch.setattr(peer.workload, "launch", lambda *_: 1.0)
    for steps, expected in ((ours, 100), (theirs, 20)):
        monkeypatch.setattr(peer.workload, "read_metrics", lambda _, steps=steps: steps)
        assert peer.measure("", {}, tmp_path, 1)["ms_per_token"] == expected


def test_exact_compares_each_part(tiny):
    """Sampler and trainer, part by part: in float32 they are as near as rounding, and the norms are equal."""
    sizes = "--model", tiny, "--dtype", "float32", "--tokens", 40
    lines = run(ROOT / "benchmarks/exact.py", *sizes).stdout.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {part for part, compared, *_ in rows if compared == "sampler, trainer"} == {
        *("linear", "RMSNorm", "addition", "addition and RMSNorm", "rotary embedding", "SwiGLU"),
        *("output layer", "log-probs", "attention"),
    }
    assert all((equal == "yes") == (float(gap) == 0) and float(gap) < 1e-4 for *_, equal, gap, _ in rows)
    assert {row[2] for row in rows if row[:2] == ["SwiGLU", "sampler, trainer"]} == {"yes"}
