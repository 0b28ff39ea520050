"""benchmarks/gpu_bench.py: its budget, what it launches, and its parts on a CPU."""

import dataclasses
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, run

from algos import grpo
from benchmarks import gpu_bench
from benchmarks.lib import workload

LINES = {  # how they begin
    "training": ["write the deep", "write the short"]
    + [f"update, recompute {x}, eager, {n}" for x in ("full", "selective", "none") for n in (128, 256)]
    + ["update, compiled"],
    "sampling": ["sampler, start", "sampler, KV cache"]
    + [f"sampler, wake, sync, sleep with --offload {x}" for x in ("none", "sampling")],
}


@pytest.fixture
def budget(tmp_path):
    return gpu_bench.Budget(tmp_path / "table.md", time.time() + 600)


def lines(budget):
    return [tuple(line.strip("| \n").split(" | ")) for line in budget.table.open()]


def test_a_part_that_fails_or_does_not_fit_is_a_line(budget, monkeypatch, capsys):
    monkeypatch.setattr(gpu_bench, "CUDA", True)

    def fails():
        raise RuntimeError("CUDA out of memory.\nA long story")

    budget.run("fits", 590, budget.say, "fits", "1 s")
    budget.run("fails", 10, fails)
    budget.run("long", 700, fails)
    assert lines(budget) == [
        ("fits", "1 s"),
        ("fails", "failed: RuntimeError: CUDA out of memory."),
        ("long", "left out: it takes 700 s, and 600 s are left"),
    ]
    assert capsys.readouterr().out == budget.table.read_text()


TRAINER = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--output_dir") + 1])
out.mkdir()
for step in range(1, 5):
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"timing_s/gen": step}) + "\\n")
    if step == FAIL:
        sys.exit("error: no memory")
time.sleep(600)  # saves a checkpoint
"""


@pytest.mark.parametrize(
    ("fail", "expected"), [(9, []), (2, [("GRPO", "failed: RuntimeError: error: no memory")])]
)
def test_a_trainer_is_stopped_after_its_steps(budget, tmp_path, monkeypatch, fail, expected):
    (tmp_path / "trainer.py").write_text(TRAINER.replace("FAIL", str(fail)))
    monkeypatch.setattr(gpu_bench, "GRPO", tmp_path / "trainer.py")
    monkeypatch.setattr(gpu_bench, "METRICS", ["timing_s/gen"])
    monkeypatch.setattr(workload, "make_rows", lambda *_: None)
    budget.run("GRPO", 10, gpu_bench.grpo, tmp_path, budget)
    said = [(f"GRPO, step {i}", f"timing_s/gen {i}") for i in range(1, 4 if fail == 9 else 3)]
    assert lines(budget) == said + expected and not (tmp_path / "grpo").exists()


def test_what_does_not_end_is_stopped(budget, tmp_path):
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    budget.run("a worker", 10, gpu_bench.follow, sleep, tmp_path / "x.log", time.time() + 0.5)
    assert lines(budget) == [("a worker", "failed: RuntimeError: stopped at the end of its time")]


def test_flags_are_those_of_grpo():
    names = {field.name for field in dataclasses.fields(grpo.Args)}
    assert workload.sampling_flags(8, 8, 256, 480).keys() <= names


def test_parts_on_a_cpu(budget, tmp_path):
    """All lines, in this order; only what needs CUDA is missing."""
    script = ROOT / "benchmarks/lib/gpu_bench_worker.py"
    for name, expected in LINES.items():
        budget.table.write_text("")
        run(script, tmp_path, budget.table, budget.end, name)
        found = lines(budget)
        assert len(found) == len(expected)
        for (what, value), begin in zip(found, expected, strict=True):
            assert what.startswith(begin) and "failed" not in value and "left out" not in value, (what, value)


def test_of_two_installed_copies_the_first_is_reported(monkeypatch):
    found = [SimpleNamespace(metadata={"Name": "torch"}, version=version) for version in ("2", "1")]
    monkeypatch.setattr(workload.importlib.metadata, "distributions", lambda: iter(found))
    assert workload.machine()["versions"]["torch"] == "2"
