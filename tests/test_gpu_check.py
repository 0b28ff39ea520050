"""Verdicts of benchmarks/gpu_check.py, on figures as its launches leave them, and one launch on a CPU."""

import copy
import json
import sys

import pytest
from conftest import ROOT, golden, run

sys.path.append(str(ROOT / "benchmarks"))
import gpu_check

STEP = {"actor/grad_norm": 1.0, "actor/skipped_updates": 0.0, "actor/entropy": 4.0, "perf/throughput": 100.0}
STEP |= {"response_length/mean": 16.0, "training/rollout_logp_diff_mean": 1e-9, "perf/mfu/actor": 0.3}
STEP |= {"perf/max_memory_allocated_gb": 40.0, "timing_s/sync": 0.1, "timing_s/step": 1.0}
PAIRS = [f"{layout} : sampler" for layout in gpu_check.LAYOUTS] + ["one row : padded"]
WORKER = dict(gaps=dict.fromkeys(PAIRS, 1e-6), norms={"padded": 2.0, "one row": 2.0}, borders=0.1)
WORKER |= dict(stale=0.1, asleep=2.0, awake=40.0, total=80.0, freed=0.99, owned=6.0, offloaded=[2.0, 2.0])
GOOD = dict(here=(0, "(torch)"), worker=WORKER, sft=dict(before=4.0, after=3.0), trl=50.0)
STEPS = dict(grpo=range(1, 6), resume=[4], tp=[1, 2])
GOOD |= {name: {i: dict(STEP) for i in steps} for name, steps in STEPS.items()}
GOOD |= dict(ranks={"layout": "padded", "1": 2.0, "2": 2.0})


def verdicts(results, errors=None, cuda=False, ranks=2, trl=True):
    checks = gpu_check.checks(cuda, ranks, trl)
    return {check.name: check.line(results, errors or {}) for check in checks}


def failing(results, **options):
    return [name for name, line in verdicts(results, **options).items() if line["verdict"] == "FAIL"]


def test_all_good():
    everything = verdicts(GOOD, cuda=True)
    left_out = [name for name, line in everything.items() if line["verdict"] == "left out"]
    assert left_out == ["2 ranks, --tp_size 2 --hsdp_replicas 2, GRPO, step 1 against one rank"]
    assert not failing(GOOD, cuda=True) and not failing(GOOD)


def test_what_is_left_out_says_why():
    lines = verdicts(GOOD, ranks=0, trl=False).values()
    reasons = [line["measured"] for line in lines if line["verdict"] == "left out"]
    found = {x: reasons.count(x) for x in reasons}
    assert found == {"a CPU": 4, "one GPU": 4, "TRL is not installed": 1}


@pytest.mark.parametrize("case", golden("wrong_figures"), ids=lambda case: case["line"])
def test_a_wrong_figure_fails_its_line_alone(case):
    results = copy.deepcopy(GOOD)
    *path, last = case["path"]
    there = results
    for key in path:
        there = there[key]
    there[last] = case["value"]
    [name] = failing(results, cuda=True)
    assert name.startswith(case["line"])


def test_the_worker_passes_on_a_cpu(tiny, tmp_path):
    gpu_check.make_rows(tiny, tmp_path / "rows.parquet", 8, 24, 16)
    run(ROOT / "benchmarks/lib/gpu_check_worker.py", tiny, tmp_path / "rows.parquet", tmp_path, 24, 16)
    worker = json.loads((tmp_path / "worker.json").read_text())
    lines = verdicts(GOOD | dict(worker=worker), ranks=0)
    assert [name for name, line in lines.items() if line["verdict"] == "FAIL"] == []
    assert worker["gaps"].keys() == set(PAIRS) and worker["norms"].keys() == set(gpu_check.LAYOUTS)


def test_a_launch_that_fails_fails_its_lines_and_no_others():
    launches = gpu_check.Launches()
    launches.run("ranks", dict, "benchmarks/no_such_script.py")
    results = {name: x for name, x in GOOD.items() if name != "ranks"}
    lines = verdicts(results | launches.results, launches.errors)
    bad = {name: line["measured"] for name, line in lines.items() if line["verdict"] == "FAIL"}
    assert list(bad) == ["2 ranks, gradient norm against one", "2 ranks, --hsdp_replicas 2, the same"]
    assert all("no_such_script" in text for text in bad.values())
    table = gpu_check.markdown([*lines.values()], "here")
    assert table.count("\n") == len(lines) + 3 and table.count("| FAIL |") == 2
