"""Command lines and trackers: what the user meets first."""

import ast
import json
import logging
import os
import re
import runpy
import shutil
import signal
import ssl
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

import httpx2
import huggingface_hub
import pytest
import torch
import tyro
from conftest import ROOT, golden
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils._http import default_client_factory

from algos import grpo
from algos.variants import known
from system import elsewhere, metrics
from system.arguments import (
    FLAGS,
    KNOWN,
    MODELS,
    command_line,
    foreign,
    impossible,
    no_model,
    parse,
    unusable,
)
from system.metrics import data_sheet_speed
from system.ranks import ranks_on
from system.resume import open_run
from system.run import Run
from system.tracker import open_tracker

SCRIPTS = sorted(path.name for path in (ROOT / "algos").glob("*.py"))
SLOW = ("torch", "transformers", "vllm", "datasets", "matplotlib", "sympy", "pyarrow")
RUN = "import runpy, sys\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\n"
RUN += f"except SystemExit as stop: print(stop.code, sorted({{*sys.modules}} & {{*{SLOW}}}))"


@cache
def answer(script, *words):
    """What a script prints for these words, and at the end its exit code and what it has loaded of SLOW."""
    code = f"import sys; sys.argv = {[str(ROOT / 'algos' / script), *words]}; exec({RUN!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout, done.stderr


@cache
def fields_of(script):
    """The fields of a script's Args, which is not imported."""
    tree = ast.parse((ROOT / "algos" / script).read_text())
    args = next(node for node in tree.body if getattr(node, "name", "") == "Args")
    return [node for node in args.body if isinstance(node, ast.AnnAssign)]


def flags_of(script):
    """{flag: annotation} of a script's Args."""
    return {field.target.id: ast.unparse(field.annotation) for field in fields_of(script)}


def defaults_of(script):
    """{flag: default} of a script's Args; those that must be given are empty."""
    return {x.target.id: ast.literal_eval(x.value) if x.value else () for x in fields_of(script)}


def test_every_number_has_a_range():
    """What is known is of flags that are there, each of them once."""
    flags = {name: kind for script in SCRIPTS for name, kind in flags_of(script).items()}
    numbers = {name for name, kind in flags.items() if re.search("int|float", re.sub("Literal.*", "", kind))}
    any_value = {"entropy_coeff", "reward_weights", "rollout_rs_threshold"}
    ranges = {name for name, known in KNOWN.items() if known.range[2]}
    assert ranges | any_value | {"top_k"} == numbers
    named = [flag for names in FLAGS.values() for flag in names.split()]
    assert len(named) == len(set(named)) == len(KNOWN)
    assert {*named} <= set(flags)
    source = (ROOT / "system/arguments.py").read_text()
    assert len(FLAGS) == len(re.findall(r"^    Known\(", source, re.MULTILINE))  # no two rows are equal


@pytest.mark.parametrize("case", golden("flags_together"), ids=lambda case: str(case["flags"]))
def test_flags_that_cannot_work_together(case, monkeypatch):
    """And a copy of a script that has not one of these flags does not break."""
    line = case["line"]
    given = dict(case["flags"])
    monkeypatch.setattr("system.arguments.find_spec", lambda name: None)
    monkeypatch.setenv("WORLD_SIZE", str(given.pop("world", 1)))
    for script in case["scripts"]:
        flags = defaults_of(f"{script}.py")
        assert given.keys() <= flags.keys()
        flags |= given
        found = impossible(flags)
        assert found is None if line is None else found.startswith(line)
        for name in flags:  # none raises
            impossible({other: value for other, value in flags.items() if other != name})


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_lacks_a_flag_or_all_of_them(script):
    """With the defaults nothing is impossible, whatever a copy leaves out."""
    flags = defaults_of(script)
    assert impossible(flags) is None and impossible({}) is None
    for name in flags:
        assert impossible({other: value for other, value in flags.items() if other != name}) is None


def test_flags_are_looked_at_before_libraries_are_loaded(tmp_path):
    """Also where the model is missing, which would be looked for on the hub."""
    words = f"--model a/b --train_files a --output_dir {tmp_path}/run --policy_loss gpso".split()
    names = ", ".join(known("policy_loss"))
    line = f"error: --policy_loss gpso is none of clip, {names}, nor FILE.py:NAME []\n"
    assert answer("grpo.py", *words)[0] == line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    (("offload", "always"), ("compile", True), ("liger", True), ("gpu_memory_utilization", 0.4)),
)
def test_what_needs_a_gpu(flag, value, tmp_path, monkeypatch):
    """Only torch knows whether there is one."""
    args = replace(OnGpu(str(tmp_path / "run")), **{flag: value})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=f"error: --{flag} needs a GPU"):
        open_run(args)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert open_run(args) is None


@pytest.mark.parametrize("case", golden("flags_alone"), ids=lambda case: str(case["flags"]))
def test_values_out_of_range(case):
    defaults = dict(train_files=MISSING, val_files=())
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in case["flags"].items()}
    found = unusable(values, defaults, {})
    line = case["line"]
    assert found is None if line is None else found.startswith(line)


@pytest.mark.parametrize("case", golden("foreign_words"), ids=lambda case: case["words"])
def test_words_of_other_libraries(case):
    found = foreign(fields(grpo.Args), case["words"].split())
    line = case["line"]
    assert found is None if line is None else line in found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_hint_names_only_flags_that_there_are(script):
    """Of the script itself, or of the scripts that it names."""
    flags = {script: set(flags_of(script)) for script in SCRIPTS}
    for name in elsewhere.HERE:
        found = elsewhere.hint(name, flags[script])
        way, _, others = found.partition(" of ")
        owners = re.findall(r"\w+\.py", others) or [script]
        for owner in owners:
            assert set(elsewhere.flags_in(way)) <= flags[owner], (name, found)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_answered_before_libraries_are_loaded(script):
    out, _ = answer(script, "--help")
    assert out.splitlines()[-1] == "0 []"
    first = (ROOT / "algos" / script).read_text().split('"""')[1].split()[:4]
    assert " ".join(out.partition("\n\n")[2].split()[:4]) == " ".join(first)


@pytest.mark.parametrize("words", ("grpo.py", "export.py a b", "report.py a --output b"))
def test_wrong_flags_are_answered_before_libraries_are_loaded(words):
    out, err = answer(*words.split(), "--no_such_flag", "1")
    assert out.splitlines()[-1] == "2 []" and "--no_such_flag" in err


def test_no_program_minds_that_nobody_reads_its_help(monkeypatch):
    """All programs but those that another starts, in this process."""
    files = [path for room in ("algos", "data_prep", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    programs = [path for path in files if "\nif __name__ ==" in path.read_text()]
    programs = [path for path in programs if not re.search("_worker|^peer_trl", path.name)]
    monkeypatch.setattr("tyro.cli", Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr("os._exit", sys.exit)
    for path in programs:
        monkeypatch.setattr("sys.argv", [str(path), "--help"])
        monkeypatch.setattr("sys.path", [*sys.path])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
        assert end.value.code == 0, path
    assert len(programs) > 45


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copy_elsewhere_says_what_it_needs(script, tmp_path):
    """Without the packages of site-packages, where somebody may have installed this repository."""
    (tmp_path / script).write_text((ROOT / "algos" / script).read_text())
    done = subprocess.run([sys.executable, "-S", script], capture_output=True, text=True, cwd=tmp_path)
    needs = "activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY"
    assert (done.returncode, done.stderr) == (1, f"error: No module named 'system': {needs}\n")


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    """No hub. A function: it answers so from now on, or cannot be reached -> the list of models asked for."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/nowhere")

    def answers(found):
        asked = []
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

        def answer(request):
            asked.extend(re.findall("([^/]+/[^/]+)/resolve/main/config.json$", str(request.url)))
            if isinstance(found, Exception):
                raise found
            return httpx2.Response(found[0], headers=found[1], request=request)

        client = httpx2.Client(transport=httpx2.MockTransport(answer))
        huggingface_hub.set_client_factory(lambda: client)
        return asked

    yield answers
    huggingface_hub.set_client_factory(default_client_factory)


AWAY = (  # no answer
    httpx2.ConnectError("[Errno -2] Name or service not known"),
    httpx2.ReadTimeout("timed out"),
    httpx2.RemoteProtocolError("closed"),
    httpx2.TooManyRedirects("many"),
    ssl.SSLCertVerificationError("certificate"),
    OfflineModeIsEnabled("unset HF_HUB_OFFLINE"),
)


def test_a_model_that_the_hub_does_not_give(hub):
    """One line that says why, after one request."""
    cases = [((case["status"], case["headers"]), case["line"]) for case in golden("hub_answers")]
    lines = [f"the hub cannot be reached ({type(error).__name__}: {error}" for error in AWAY]
    for found, line in (*cases, *zip(AWAY, lines)):
        asked = hub(found)
        said = no_model(dict(model="a/b"))
        assert asked == ["a/b"]
        if line is None:
            assert said is None
        else:
            assert said.startswith(f"--model a/b: no directory here, and {line}") and "\n" not in said


@pytest.mark.parametrize("flag", MODELS)
@pytest.mark.parametrize("name", ("models/none", "/no/such/place", "a b", "runs/one/two", "models/none/"))
def test_a_model_that_is_nowhere(flag, name, hub):
    """One line that names it; what cannot be a name of the hub is not asked for."""
    hub((404, {"X-Error-Code": "RepoNotFound"}))
    why = "none on the hub; a private one needs `hf" if name == "models/none" else "no name of the hub"
    for value in (name, (str(ROOT), name)):
        assert no_model({flag: value}).startswith(f"--{flag} {name}: no directory here, and {why}")
    assert no_model({flag: str(ROOT), "model": "", "teacher": ()}) is None
    hub((200, {}))
    assert (no_model({flag: name}) is None) is (name == "models/none")


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "model" in flags_of(name)])
def test_a_missing_model_is_answered_before_libraries_are_loaded(script, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    of_tools = {"quantize.py": ("models/none", "b"), "generate.py": ("--data", "a", "--output", "b")}
    words = of_tools.get(script, ("--train_files", "a", "--output_dir", str(tmp_path)))
    words += {"agent.py": ("--env", "a"), "distill.py": ("--teacher", "a")}.get(script, ())
    words += () if script == "quantize.py" else ("--model", "models/none")
    out, _ = answer(script, *words)
    line = "error: --model models/none: no directory here, and the hub cannot be reached ("
    assert out.startswith(line) and out.endswith("unset the `HF_HUB_OFFLINE` environment variable.) []\n")


@dataclass(kw_only=True)
class Args:
    # ---- run
    place: tyro.conf.Positional[str]  # where
    # ---- my size, 2nd
    size: int  # how large
    # ---- import
    # of these
    names: tuple[str, ...] = ("a",)
    keep: bool = True  # or not

    def __post_init__(self):
        self.size += 1


SHOWN = "where", "how large", "of these", "or not", "my size, 2nd options", "import options"


def test_parse(capsys, monkeypatch):
    assert parse(Args, ["x", "--size", "3", "--no_keep"]) == dict(place="x", size=3, names=("a",), keep=False)
    assert parse(Args, ["x", "--size", "3", "--names", "b", "c"])["names"] == ("b", "c")
    words = "x --names b c --size=2 --names=d --size 3 --no_keep --names e -1 --names".split()
    assert parse(Args, words) == dict(place="x", size=3, names=("b", "c", "d", "e", "-1"), keep=False)
    assert vars(command_line(Args, words))["names"] == ("b", "c", "d", "e", "-1")
    assert Args(**parse(Args, ["x", "--size", "3"])).size == 4
    for rank, speaks in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            parse(Args, ["--help"])
        out = capsys.readouterr().out
        assert (out != "") is speaks
        assert not speaks or [out.count(x) for x in SHOWN] == [1] * len(SHOWN)


@dataclass
class Tracked:
    output_dir: str
    tracker: str = "none"
    resume: str = "auto"
    model: str = "hub/name"
    save_freq: int = 50
    test_freq: int = 10


@dataclass
class OnGpu(Tracked):
    offload: str = "none"
    compile: bool = False
    liger: bool = False
    gpu_memory_utilization: float = 0.5


@dataclass
class Taught(Tracked):
    teacher: tuple = ()
    reward_model: tuple = ()
    critic_model: str | None = None


def test_links_to_models_are_followed(tmp_path):
    """Of one flag all, and a hub's name stays."""
    (tmp_path / "model").mkdir()
    (link := tmp_path / "link").symlink_to(tmp_path / "model")
    args = Taught(str(tmp_path / "run"), teacher=(str(link), "hub/name"), critic_model=str(link))
    assert open_run(args) is None
    assert args.teacher == (str(tmp_path / "model"), "hub/name")
    assert args.critic_model == str(tmp_path / "model") and args.reward_model == ()


def test_a_tracker_that_is_missing_is_refused(monkeypatch, tmp_path):
    assert open_run(Tracked(str(tmp_path))) is None
    monkeypatch.setattr("system.resume.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"--tracker wandb is missing: pip install .*-extra.txt"):
        open_run(Tracked(str(tmp_path), "wandb"))


@pytest.mark.parametrize("case", golden("idle_cores"))
def test_idle_cores_are_told(case, monkeypatch):
    ranks = case["ranks"]
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(case["nodes"]))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as vLLM's platform for CPUs leaves it
    monkeypatch.setattr("system.ranks.dist.get_world_size", lambda: ranks)
    monkeypatch.setattr("system.ranks.torch.get_num_threads", lambda: case["threads"])
    monkeypatch.setattr("system.ranks.psutil.cpu_count", lambda logical: case["cores"])
    lm = torch.nn.Linear(2000, 1000)
    trains = "\ntrains 2M of 2.001M weights"
    some = f"{ranks} rank{'s' * (ranks > 1)}"
    assert ranks_on(lm) == f"{some} on cpu{case['idle']}{trains}"
    monkeypatch.setattr("system.ranks.compute_device", lambda: torch.device("cuda"))
    assert ranks_on(lm) == f"{some} on cuda{trains}"


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, steps in ((0, (1, 2, 3)), (2, (3, 4))):  # killed after step 3, the checkpoint is of step 2
        track = open_tracker(Tracked(str(tmp_path), "tensorboard"), done)
        for step in steps:
            track({"val/texts": [["ask", "an\nanswer", "truth", "1.0"]]}, step)
            track({"actor/lr": step + done / 10}, step)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert (
        b"    ask\n\n    an\n    answer\n"
        in events.Tensors("val/texts/text_summary")[0].tensor_proto.string_val[0]
    )
    seen = [(event.step, round(event.value, 1)) for event in events.Scalars("actor/lr")]
    assert seen == [(1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2)]


def test_a_resumed_run_continues_in_wandb(tmp_path, monkeypatch):
    import wandb

    seen = []
    monkeypatch.setattr(wandb, "init", lambda **flags: seen.append(flags) or SimpleNamespace(log=None))
    for name in ("run", "run", "other", "killed"):
        (tmp_path / name).mkdir(exist_ok=True)
        if name == "killed":
            (tmp_path / "killed/wandb.id").touch()
        open_tracker(Tracked(str(tmp_path / name), "wandb"), 0)
    first, again, other, killed = (flags["id"] for flags in seen)
    assert first == again != other and killed and {flags["resume"] for flags in seen} == {"allow"}


@pytest.mark.parametrize(("steps", "said"), [(6, "done"), (2, "stopped; the same command resumes it")])
def test_how_a_run_ends(steps, said, tmp_path, monkeypatch):
    monkeypatch.setattr("system.run.leave", lambda code: None)
    monkeypatch.setattr("system.run.ranks_on", lambda *_: "")
    monkeypatch.setattr(logging.getLogger("rewards"), "handlers", [])
    with Run(Tracked(str(tmp_path / "run"))) as run:
        run.plan(6, "8 rows")
        run.step = steps
        run.start(None)
        run.log({"actor/skipped_updates": 1.0})
    log = (tmp_path / "run/log.txt").read_text()
    assert log.startswith("8 rows\n") and f"step {steps}: updates were skipped" in log
    assert f"step {steps} of 6, {said}" in log
    (tmp_path / "run/metrics.jsonl").unlink()
    (tmp_path / "run/metrics.jsonl").mkdir()  # as a full disk
    with pytest.raises(SystemExit, match=r"^error: .*metrics\.jsonl cannot be written: "):
        run.log({})


def test_a_run_that_fails_ends_by_the_next_signal(tmp_path):
    """Nothing is left to save; something of a user's may keep the process."""
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]
    try:
        with pytest.raises(RuntimeError), Run(Tracked(str(tmp_path / "run"))) as run:
            run.total = 1
            for number in numbers:
                signal.signal(number, run.on_signal)
            raise RuntimeError
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_DFL] * 2
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


@pytest.mark.parametrize("total", [4, 3])
def test_a_run_without_a_step_left_loads_nothing(total, tmp_path, capsys):
    """It says where its weights are; with fewer steps, or in another directory, it has nothing to train."""
    checkpoint = tmp_path / "run/checkpoints/step_000004"
    (checkpoint / "hf").mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"step": 4, "drawn": 7}')
    latest = checkpoint.with_name("latest")
    latest.symlink_to(checkpoint)
    lines = []
    for args in (Tracked(str(tmp_path / "run")), Tracked(str(tmp_path / "other"), resume=str(checkpoint))):
        with pytest.raises(SystemExit) as end, Run(args) as run:
            run.plan(total, "8 rows")
        lines.append(end.value.code)
    nothing_to_train = f"error: {checkpoint} has 4 steps, and this run has {total}: pass more"
    done = f"step 4 of {total}, done\nweights: {latest}/hf" in capsys.readouterr().out
    assert done == (total == 4)
    for line in lines[done:]:
        assert line.startswith(nothing_to_train)
    assert lines[0] is None or not done
    shutil.rmtree(checkpoint / "hf")
    with pytest.raises(SystemExit, match=r"is damaged, or of another model \(hf/ is missing\): point"):
        Run(Tracked(str(tmp_path / "run"))).plan(4, "8 rows")


@pytest.mark.parametrize(
    ("step", "error", "warns"), [(1, 0.99, False), (10, 0.99, True), (10, 0.7, False), (13, 0.81, True)]
)
def test_a_run_says_when_rounding_loses_its_adapters(step, error, warns, tmp_path, capsys):
    run = Run(Tracked(str(tmp_path / "run"), save_freq=10))
    run.rank0 = False  # no files
    run.total = 13
    run.step = step
    said = []
    run.say = said.append
    run.log({"lora/merge_error": error})
    line = f"warning: step {step}: rounding loses {error:.0%} of the adapters' update: a larger --lr"
    assert [text.startswith(line) for text in said] == [True] * warns


@pytest.mark.parametrize(
    ("done", "freq", "seconds", "first", "cost"),
    [
        (0, 50, 100, 50, "warning: a step takes 100.0 s: a kill costs 50 steps at most, 1.4 hours; one hour"),
        (
            0,
            50,
            9000,
            50,
            "warning: a step takes 9000.0 s: a kill costs 50 steps at most, 125.0 hours; one hour",
        ),
        (51, 50, 12, 100, "a step takes 12.0 s: a kill costs 50 steps at most, 10 minutes"),
        (0, 0, 12, 120, "a step takes 12.0 s: a kill costs 120 steps at most, 24 minutes"),
        (119, 500, 12, 120, "a step takes 12.0 s: a kill costs 120 steps at most, 24 minutes"),
    ],
)
def test_a_run_says_what_a_kill_costs(done, freq, seconds, first, cost, tmp_path, monkeypatch):
    monkeypatch.setattr("system.run.ranks_on", lambda _: "2 ranks")
    monkeypatch.setattr(logging.getLogger("rewards"), "handlers", [])
    run = Run(Tracked(str(tmp_path / "run"), save_freq=freq))
    run.step = done
    run.total = 120
    run.start(None)
    for run.step in (done + 1, done + 2):
        run.log({"timing_s/step": float(seconds)})
    log = (tmp_path / "run/log.txt").read_text()
    assert f"the next checkpoint comes after step {first}\n" in log and log.count(cost) == 1
    if "hour" in cost:
        assert f"one hour is --save_freq {max(3600 // seconds, 1)}\n" in log


def test_a_fork_of_a_run_ends_by_a_signal(tmp_path):
    """As a process of a pool that a reward ends by terminate()."""
    run = Run(Tracked(str(tmp_path / "run")))
    child = os.fork()
    if not child:
        run.on_signal(15, None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15


def test_a_signal_long_after_the_first_ends_the_run(tmp_path, monkeypatch):
    run = Run(Tracked(str(tmp_path / "run")))
    now = [5.0]
    monkeypatch.setattr("system.run.time.monotonic", lambda: now[0])
    for now[0] in (5.0, 15.0):
        run.on_signal(15, None)
    assert run.signal == 15
    now[0] = 15.1
    with pytest.raises(SystemExit, match="143"):
        run.on_signal(15, None)


@pytest.mark.parametrize("flag", MODELS)
def test_adapters_and_runs_are_no_models(flag, tmp_path):
    """Only generate.py, which has --data, takes the directory of a run; the line names the model in it."""
    adapters = tmp_path / "adapters"
    run = tmp_path / "run"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    line = f"--{flag} {adapters}: adapters alone: merge them first, see docs/guides/lora.md"
    assert no_model({flag: str(adapters)}) == no_model({flag: (str(ROOT), str(adapters))}) == line
    (adapters / "config.json").write_text("{}")
    assert no_model({flag: str(adapters)}) is None
    (run / "checkpoints/latest/hf").mkdir(parents=True)
    line = f"--{flag} {run}: a run; its model is {run}/checkpoints/latest/hf"
    assert no_model({flag: str(run)}) == line
    assert no_model({flag: str(run), "data": "a.parquet"}) is None


def test_wandb_offline(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    track = open_tracker(Tracked(str(tmp_path), "wandb"), 0)
    track({"val/texts": [["ask", "answer", "truth", "1.0"]]}, step=1)
    track({"actor/lr": 0.25}, step=1)
    wandb.finish()
    [table] = tmp_path.glob("wandb/offline-run-*/files/media/table/val/texts*.json")
    assert json.loads(table.read_text())["data"] == [["ask", "answer", "truth", "1.0"]]
    written = b""
    while b"actor/lr" not in written:  # a process of its own writes
        [log] = tmp_path.glob("wandb/offline-run-*/*.wandb")
        written = log.read_bytes()
    assert b"output_dir" in written


@pytest.mark.parametrize("case", golden("gpu_speeds"), ids=lambda case: f"{case['gpu']} {case['dtype']}")
def test_the_data_sheet(case, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: case["gpu"])
    teraflops = case["teraflops"]
    assert data_sheet_speed(case["dtype"]) == (teraflops and teraflops * 1e12)


def test_the_numbers_of_a_step(monkeypatch):
    """Texts of 2 + 3 and 5 + 1 tokens by two ranks that train on 6 and 3; 6 weights, 2 layers of width 5."""
    assert metrics.matmul_speed("float32") > 0
    monkeypatch.setattr(metrics.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(metrics, "matmul_speed", lambda dtype: 1000.0)
    monkeypatch.setattr(metrics, "unused_weights", lambda lm, sees_images: {})
    lm = metrics.torch.nn.Linear(3, 2, bias=False)
    lm.config = SimpleNamespace(num_hidden_layers=2, hidden_size=5, dtype=None)
    lm.config.get_text_config = lambda: lm.config
    row = dict(reward=dict(score=1.0), finish_reason="stop")
    rows = [row | dict(prompt_length=2, length=3, rank=0), row | dict(prompt_length=5, length=1, rank=1)]
    rows[1]["finish_reason"] = "length"
    timing = dict(step=4.0, gen=2.0, update_actor=0.5)
    found = metrics.step_metrics(rows, [6, 3], SimpleNamespace(lm=lm), timing, "float32")
    expected = {
        "response_length/mean": 2,
        "prompt_length/mean": 3.5,
        "response_length/clip_ratio": 0.5,
        "global_seqlen/mean": 5.5,
        "global_seqlen/minmax_diff": 1,
        "global_seqlen/max": 6,
        "global_seqlen/balanced_min": 3,
        "timing_per_token_ms/gen": 500,
        "timing_per_token_ms/update_actor": 500 / 11,
        "perf/throughput": 11 / 4 / 2,
        "perf/mfu/actor": 6 * (6 * 9 + 2 * 5 * (5**2 + 6**2)) / 0.5 / (2 * 1000),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
