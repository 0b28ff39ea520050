"""Shared by the tests: a tiny model, data, and a torchrun that does not leak its environment."""

import functools
import gc
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

gc.disable()  # until all tests are there: a search of the libraries takes a second

import pytest
import sources
import torch
import torch.distributed as dist
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
inspect.findsource = sources.find_source


@pytest.fixture(autouse=True)
def digits():
    """A data script lifts the limit of digits, for which the JSON of another test would take minutes."""
    yield
    sys.set_int_max_str_digits(4300)  # Python's own


def golden(name):
    """The cases of a table in tests/golden, one a line."""
    return [json.loads(line) for line in (ROOT / f"tests/golden/{name}.jsonl").open()]


@functools.cache
def python():
    """The words that run a program with the libraries loaded, see forked.py."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # its processes share a server
    place = Path(tempfile.gettempdir()) / f"forked_{run or uuid.uuid4().hex}"
    suite, socket = os.getppid() if run else os.getpid(), place / "socket"
    loaded = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1")
    env = os.environ | loaded | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, ROOT / "tests/forked.py", "serve", str(suite), socket, "loaded"]
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
        subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    while not socket.exists():
        assert place.exists(), "tests/forked.py: the server has ended"
        time.sleep(0.1)
    return [sys.executable, "-I", "-S", str(ROOT / "tests/forked.py"), "run", str(socket)]


def environment():
    """Of a program that is started from outside of torchrun."""
    inherited = {
        name: x for name, x in os.environ.items() if not re.match("(LOCAL_)?RANK|WORLD_S|MASTER_P", name)
    }
    return inherited | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def quantize(*runs):
    """What quantize.py said of each dict of flags; its libraries are not those of this process."""
    command = [sys.executable, ROOT / "tests/workers/quantize.py", json.dumps(runs, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    return [json.loads(line.removeprefix("said ")) for line in lines if line.startswith("said ")]


def start(*command, ranks=0, restarts=0, **options):
    """Start a script of the repository under python, or under torchrun with `ranks` -> the process."""
    env = environment() | dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    launcher = [*python(), "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    launcher += [f"--max-restarts={restarts}", "--no-python"] if ranks else []
    command = [*(launcher if ranks else []), *python(), *map(str, command)]
    return subprocess.Popen(command, text=True, env=env, cwd="/", **options)


def run(*command, check=True, **options):
    """`start`, and wait -> the finished process."""
    with start(*command, **options, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        done = subprocess.CompletedProcess(process.args, None, *process.communicate())
    done.returncode = process.returncode
    assert not check or done.returncode == 0, f"{done.args}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def as_installed(script):
    """The words that run a copy of a script elsewhere: it finds this repository as an installed one."""
    start = f"import runpy, sys; sys.path.append({str(ROOT)!r}); sys.argv[0] = {str(script)!r}"
    return "-c", start + "; runpy.run_path(sys.argv[0], run_name='__main__')"


def kill(process, out):
    """Kill -9 the program of `start` that holds a directory, and wait for its end."""
    os.kill(holder(out), signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def holder(out):
    """The number of the process that writes to a directory, the first rank's."""
    return int((Path(out) / ".lock").read_text().split()[1])


def load_weights(directory):
    """All weights of a Hugging Face directory, of however many files."""
    files = sorted(Path(directory).glob("model*.safetensors"))
    assert files, directory
    return {name: x for path in files for name, x in load_file(path).items()}


def metrics(out):
    """{step: metrics} of a run."""
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    return {int(m["training/global_step"]): m for m in map(json.loads, lines)}


def documented(name):
    """Whether docs/reference/metrics.md has a metric; {...} and * there stand for anything."""
    names = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    patterns = [re.sub(r"\{.*?\}", "*", x) for x in re.findall(r"`([^`]+)`", " ".join(names))]
    name = re.sub(r"\{.*?\}", "*", name)
    return any(fnmatch(name, pattern) or fnmatch(pattern, name) for pattern in patterns)


def hf(out):
    return Path(out) / "checkpoints/latest/hf"


def losses(out):
    return [m["train/loss"] for step, m in metrics(out).items() if step]


def state(out, step):
    """What a checkpoint has of its run, without flags: runs that are compared have other directories."""
    found = json.loads((out / f"checkpoints/step_{step:06d}/trainer_state.json").read_text())
    del found["content"]["flags"]
    return found


def offline_flags(model, data, out, **changes):
    """Of a run of sft.py, dpo.py or rm.py over eight steps, with two checkpoints."""
    values = dict(model=model, output_dir=out, total_steps=8, max_length=32, max_tokens_per_microbatch=64)
    values |= dict(train_batch_size=15, lr=3e-3, warmup_steps=2, save_freq=4, keep_checkpoints=0, test_freq=4)
    values |= dict(train_files=data / "train.parquet", val_files=data / "val.parquet") | changes
    return [*(word for name, value in values.items() for word in (f"--{name}", value))]


def flags_of(model, data, out, flags):
    """The words of a run: its model, rows and directory, and flags in a text."""
    rows = "--train_files", data / "train.parquet", "--val_files", data / "val.parquet"
    return ["--model", model, "--output_dir", out, *rows, *flags.split()]


def rollouts(out, step):
    return [
        json.loads(x) for x in (Path(out) / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    ]


CLOCKS = "timing", "perf", "global_seqlen"


def same(a, b, steps=None, tolerance=0, but=CLOCKS):
    """Two runs have the same metrics except those that a clock touches, and the same responses."""
    ours, theirs = metrics(a), metrics(b)
    assert steps or list(ours) == list(theirs)
    for step in steps or ours:
        for name, value in ours[step].items():
            if not name.startswith(but):
                expected = pytest.approx(value, rel=tolerance, abs=tolerance)
                assert theirs[step][name] == expected, (step, name)
        if (Path(a) / f"rollouts/step_{step:06d}.jsonl").exists():
            ids = [[row["response_ids"] for row in rollouts(out, step)] for out in (a, b)]
            assert ids[0] == ids[1], step


def changed(before, after):
    """Names of the weights that differ between two directories, which have the same names."""
    before, after = load_weights(before), load_weights(after)
    assert before.keys() == after.keys()
    return {name for name, x in before.items() if not torch.equal(x, after[name])}


def healthy(out):
    """{step: metrics} of a run, finite and documented; sampler and trainer agree; it saves when it should."""
    steps, args = metrics(out), json.loads((Path(out) / "args.json").read_text())
    last = max(steps)

    def due(freq):
        return {step for step in steps if step == last or step % (freq or last) == 0}

    validated = {step for step, m in steps.items() if any(name.startswith("val") for name in m)}
    assert validated == (due(args["test_freq"]) if args["val_files"] else set())
    saved = {int(path.name[5:]) for path in Path(out).glob("checkpoints/step_*")}
    assert args["keep_checkpoints"] or saved == due(args["save_freq"]) - {0}
    for name, value in [item for m in steps.values() for item in m.items()]:
        assert math.isfinite(value) and documented(name), name
    assert all(m.get("training/rollout_probs_diff_max", 0) < 1e-4 for m in steps.values())
    return steps


def check_advantages(out, steps, advantages):
    """The logged advantages are those of the dumped rows of a step -> all of them."""
    found = [advantages(rollouts(out, step)) for step in steps]
    for step, adv_n in zip(steps, found, strict=True):
        for name in ("max", "min", "mean"):
            expected = pytest.approx(getattr(adv_n, name)().item(), abs=1e-6)
            assert metrics(out)[step][f"critic/advantages/{name}"] == expected
        assert adv_n.abs().max() > 0
    return found


def column(rows, name):
    return torch.tensor([float(row[name]) for row in rows], dtype=torch.float64)


def killed_at_a_checkpoint(command, out):
    """Start a program and kill it as soon as its run has a checkpoint."""
    process = start(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / "checkpoints/latest").exists():
        assert process.poll() is None
        time.sleep(0.02)
    kill(process, out)


def cut_back(run, out, step):
    """A copy of a run as a kill leaves it before its next checkpoint: with the metrics of later steps."""
    shutil.copytree(run, out, symlinks=True)
    for path in (out / "checkpoints").glob("step_*"):
        if path.name > f"step_{step:06d}":
            shutil.rmtree(path)
    (out / "checkpoints/latest").unlink()
    (out / "checkpoints/latest").symlink_to(f"step_{step:06d}")
    return out


def pytest_configure(config):
    """Tokenised rows are not those of earlier sessions; programs that are started inherit it."""
    config.rows = tempfile.TemporaryDirectory(prefix="rows_")
    os.environ["HF_DATASETS_CACHE"] = config.rows.name


def pytest_collection_finish():
    """Of what is there by then nothing is searched again."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="module")
def mesh():
    """One rank, in this process, for models that FSDP shards."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def small_model(tmp_path_factory, layers):
    """Directory of a random model with tied embeddings."""
    out = tmp_path_factory.mktemp("tiny") / "model"
    sizes = ["--layers", layers, "--hidden_size", 64, "--heads", 2, "--kv_heads", 1]
    run(ROOT / "data_prep/tiny_model.py", "--local_save_dir", out, *sizes, "--intermediate_size", 128)
    return out


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model with two layers."""
    return small_model(tmp_path_factory, 2)


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory):
    """A model for dozens of runs."""
    return small_model(tmp_path_factory, 1)


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory):
    """Directory with train.parquet, val.parquet and test.parquet."""
    out = tmp_path_factory.mktemp("arithmetic")
    sizes = "--train_size 64 --val_size 8 --test_size 8".split()
    run(ROOT / "data_prep/arithmetic.py", "--local_save_dir", out, *sizes)
    return out


@pytest.fixture(scope="session")
def pictures(arithmetic, tmp_path_factory):
    """A file of rows with a column `images`: a model that takes some is shown them."""
    import pyarrow as pa  # here, because the sandbox's tests run where it cannot be loaded
    import pyarrow.parquet as pq

    rows = pq.read_table(arithmetic / "val.parquet").to_pylist()
    table = pa.Table.from_pylist([row | dict(images=[dict(bytes=b"no picture", path=None)]) for row in rows])
    pq.write_table(table, out := tmp_path_factory.mktemp("pictures") / "rows.parquet")
    return str(out)


@pytest.fixture
def refused(tiny, arithmetic, tmp_path, monkeypatch):
    """Run main of a script with more flags -> the line that it stops with; loading a model fails the test."""

    def main(script, *words):
        given = ["--model", tiny, "--output_dir", tmp_path / "out"]
        if "--train_files" not in words:
            given += ["--train_files", arithmetic / "train.parquet"]
        for name in {"setup_distributed", "build_engine", "load_model"} & vars(script).keys():
            monkeypatch.setattr(script, name, lambda *_: pytest.fail("went on to load a model"))
        with pytest.raises(SystemExit) as stop:
            script.main(script.Args(**script.parse(script.Args, [*map(str, (*given, *words))])))
        assert stop.value.code.startswith("error: ") and "\n" not in stop.value.code
        return stop.value.code

    return main


def make_args(script, **flags):
    """Arguments of a trainer, with what it must be given."""
    own = flags.get("model", "")
    more = {"algos.agent": dict(env=""), "algos.distill": dict(teacher=(own,), kl="sampled")}
    given = dict(model="", train_files=(), output_dir="") | more.get(script.__name__, {})
    return script.Args(**given | flags)


def each(*scripts):
    """A test runs once for each script: a copy may leave lines out."""
    return pytest.mark.parametrize("script", scripts, ids=lambda script: script.__name__)


def load_policy(script, args, mesh):
    """The policy of a trainer, on a CPU."""
    name = script.__name__.removeprefix("algos.")
    device = torch.device("cpu")
    if name == "rm":
        return script.load_model(args, mesh, device, 0)
    if name == "grpo_nano":
        return script.load_model(args, mesh, device)
    trained = script.adapters_of(args)
    if name == "grpo":
        return script.load_model(args, mesh, device, None, trained)
    if name == "sft":
        return script.load_model(args, mesh, device, None)
    if name == "agent":
        return script.load_model(args, mesh, device, trained)
    if name in ("ppo", "distill"):
        return script.load_model(args, args.model, mesh, device, trained, script.TokenLogps)
    return script.load_model(args, mesh, device)
