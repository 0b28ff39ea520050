"""Verdicts of benchmarks/gpu_check.py, on figures as its launches leave them, and one launch on a CPU."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, golden, run

from benchmarks import gpu_check
from benchmarks.lib import workload
from system.gpu import unused_gpu

STEP = {"actor/grad_norm": 1.0, "actor/skipped_updates": 0.0, "actor/entropy": 4.0}
STEP |= {"response_length/mean": 16.0, "training/rollout_logp_diff_mean": 1e-9}
STEP |= {"perf/max_memory_allocated_gb": 40.0, "timing_s/sync": 0.1, "timing_s/step": 1.0}
PAIRS = "one row against padded", "one row against sampler", "padded against sampler"
WORKER = dict(gaps=dict.fromkeys(PAIRS, 1e-6), norms={"padded": 2.0, "one row": 2.0}, stale=0.1)
WORKER |= dict(asleep=2.0, awake=40.0, total=80.0, freed=0.99, owned=6.0, onloaded=2.0, offloaded=2.0)
GOOD = dict(versions={}, worker=WORKER, ranks={"1": 2.0, "2": 2.0})
GOOD["sft"] = {0: {"val/loss": 4.0}, 4: {"val/loss": 3.0}}
for name, steps in dict(grpo=range(1, 6), resume=[4], tp=[1, 2]).items():
    GOOD[name] = {step: dict(STEP) for step in steps}


def verdicts(results, verdict, cuda=True, ranks=2):
    lines = gpu_check.table(results, cuda, ranks)
    return {line["check"]: line["measured"] for line in lines if line["verdict"] == verdict}


def test_all_good():
    for cuda in (True, False):
        assert verdicts(GOOD, "FAIL", cuda) == {}
    assert verdicts(GOOD, "left out") == {}


def test_what_is_left_out_says_why():
    left_out = verdicts(GOOD, "left out", cuda=False, ranks=0)
    assert list(left_out.values()) == ["a CPU", "one GPU"]


@pytest.mark.parametrize("case", golden("wrong_figures"), ids=lambda case: case["line"])
def test_a_wrong_figure_fails_its_line_alone(case):
    results = copy.deepcopy(GOOD)
    *path, last = case["path"]
    there = results
    for key in path:
        there = there[key]
    there[last] = case["value"]
    [name] = verdicts(results, "FAIL")
    assert name.startswith(case["line"])


def test_the_worker_passes_on_a_cpu(tiny, tmp_path):
    workload.make_rows(tiny, tmp_path / "rows.parquet", 8, 24, 16)
    run(ROOT / "benchmarks/lib/gpu_check_worker.py", tiny, tmp_path / "rows.parquet", tmp_path, 24, 16)
    worker = json.loads((tmp_path / "worker.json").read_text())
    assert verdicts(GOOD | dict(worker=worker), "FAIL", cuda=False, ranks=0) == {}
    assert worker["gaps"].keys() == set(PAIRS) and worker["norms"].keys() == {"padded", "one row"}


def test_a_launch_that_fails_fails_its_checks_and_no_others(tmp_path):
    launches = gpu_check.Launches(tmp_path)
    launches.update({name: x for name, x in GOOD.items() if name != "ranks"})
    launches.run("ranks", "benchmarks/no_such_script.py", [])
    [(check, why)] = verdicts(launches, "FAIL").items()
    assert check == "several ranks" and "No such file" in why and "no_such_script" in why


def test_a_run_that_ends_early_fails(tmp_path):
    """What it has left is not taken for a whole run: it has no step to compare."""
    results = GOOD | dict(resume={})
    assert verdicts(results, "FAIL") == {"resumed": "KeyError: 4"}


@pytest.mark.parametrize(
    ("nodes", "works", "refused"), [((), False, 0), (("nvidia0",), False, 1), (("nvidia0",), True, 0)]
)
def test_a_gpu_that_torch_cannot_use(nodes, works, refused, monkeypatch):
    """As with the CPU's torch in the environment of a GPU: a run warns, this check stops."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: works)
    monkeypatch.setattr("system.gpu.Path", lambda _: SimpleNamespace(glob=lambda _: nodes))
    line = f"this machine has a GPU, which torch {torch.__version__} cannot use"
    assert unused_gpu().startswith(line) == bool(refused)
    if refused:
        with pytest.raises(SystemExit, match=f"^error: {re.escape(line)}"):
            gpu_check.main(None)
