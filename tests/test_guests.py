"""What a reward or an environment does to its process changes nothing of a run."""

import gc
import io
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy.random  # noqa: F401 - whose state a guest may change
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, changed, hf, run, same

from rewards.manager import RewardManager
from rewards.manager.combined import load_rewards
from system import plugins
from system.ranks import leave
from tests.workers.guests import KINDS

REWARD = ROOT / "tests/guest_reward.py"
SCORING = "grpo", "grpo_nano", "agent"  # the others score as grpo.py


@pytest.mark.parametrize(("ranks", "trainers"), ((0, (*SCORING, "dapo", "ppo", "distill")), (2, SCORING)))
def test_trainers_with_a_bad_guest(ranks, trainers, tiny, arithmetic, tmp_path):
    """At import and in its calls: metrics and weights are those of a plain reward."""
    worker = ROOT / "tests/workers/guests.py"
    run(worker, tiny, arithmetic / "val.parquet", tmp_path, *trainers, ranks=ranks)
    for name in trainers:
        calm, bad = tmp_path / name / "calm", tmp_path / name / "bad"
        same(calm, bad)
        assert not changed(hf(calm), hf(bad))


def test_generate_and_eval_with_a_bad_guest(tiny, arithmetic, tmp_path):
    """Their paths are relative, to `/` in `run`."""
    relative = tmp_path.relative_to("/")
    flags = "--max_response_length 8 --n_samples 2 --temperature 1".split()
    for ranks, env in ((0, []), (2, ["--env", f"{REWARD}:Env"])):
        files = (
            "--model",
            tiny,
            "--data",
            arithmetic / "val.parquet",
            "--output",
            relative / f"{ranks}.parquet",
        )
        run(ROOT / "algos/generate.py", *files, *flags, *env, ranks=ranks)
    tables = [pq.read_table(tmp_path / f"{ranks}.parquet") for ranks in (0, 2)]
    assert tables[0].column("responses") == tables[1].column("responses")
    found = []
    for kind, names in KINDS.items():
        rewards = "--reward_fn", *(f"{REWARD}:{name}" for name in names.split())
        files = "--data", relative / "2.parquet", "--output", relative / kind
        done = run(ROOT / "algos/eval.py", *files, *rewards)
        written = sorted(path.name for path in (tmp_path / kind).iterdir())
        found.append((re.sub(r"guest_reward\.\w+", "", done.stdout), written))
    assert found[0] == found[1] and found[0][1]


@pytest.mark.parametrize("mode", ("naive", "prime"))
def test_a_row_is_not_what_a_reward_makes_of_it(mode, tmp_path):
    """Two responses share the row of their prompt; each reward, and each call, gets it as it was."""
    file = tmp_path / "rewards.py"
    file.write_text(
        "def first(solution_str, extra_info, ground_truth, **_):\n"
        "    ground_truth.clear()\n"
        "    return float(extra_info.pop('target') == solution_str)\n"
        "def of_group(solution_strs, extra_infos, prompts, results, **_):\n"
        "    prompts[0].clear(), results[0].clear()\n"
        "    return [float(info.popitem()[1] == text) for info, text in zip(extra_infos, solution_strs)]\n"
        "def last(extra_info, prompt, ground_truth, **_):\n"
        "    return float(bool(extra_info and prompt and ground_truth))\n"
    )
    names = "first", "of_group", "last"
    manager = RewardManager(mode, load_rewards([f"{file}:{name}" for name in names], (), group_size=2))
    prompt = [dict(role="user", content="q")]
    row = dict(data_source="x", ground_truth=["a"], extra_info=dict(target="a"), prompt=prompt)
    results = manager.score([dict(row, solution_str="a"), dict(row, solution_str="b")], groups=[0, 0])
    expected = [{f"score/rewards.{name}": 1.0 for name in names} | dict(score=3.0)]
    expected += [{f"score/rewards.{name}": float(name == "last") for name in names} | dict(score=1.0)]
    assert results == expected


def test_guests_have_settings_of_their_own():
    own = plugins.read_settings(), dict(os.environ), sys.stdin, sys.stdout, sys.stderr
    reward = plugins.load_from(f"{REWARD}:score", "--reward_fn")
    with plugins.guest("score"):
        theirs = plugins.read_settings()
        assert os.environ["WORLD_SIZE"] == "7" and "PATH" not in os.environ
        different = {key[2] for key, value in theirs.items() if not plugins.same(value, own[0].get(key))}
        reward("x", {})
    expected = "chdir write_path set_grad_enabled set_default_dtype write_device set_num_threads setstate"
    expected += " set_float32_matmul_precision set_deterministic_debug_mode set_autocast_enabled seterr"
    expected += " setdefaulttimeout setrecursionlimit write_collector set_anomaly_enabled setrlimit"
    expected += " write_logging write_warnings enable_flash_sdp _set_fp32_precision_setter setprofile"
    assert {*expected.split()} <= different
    now = plugins.read_settings(), dict(os.environ), sys.stdin, sys.stdout, sys.stderr
    assert now[1:] == own[1:]
    for key, value in own[0].items():
        assert repr(now[0][key]) == repr(value), key
    umask = os.umask(0o022)
    os.umask(umask)
    assert umask != 0o777 and not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with plugins.guest("calm"):
        os.chdir("/")
        for key, value in own[0].items():
            if key[2] in different:
                plugins.put(key, value)


def test_what_cannot_be_put_back_names_the_guest(tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    file = tmp_path / "reward.py"
    file.write_text(
        f"import os\ndef gone(**_):\n    os.chdir('/')\n    os.rmdir({str(place)!r})\n    return 1.0"
    )
    manager = RewardManager("naive", load_rewards([f"{file}:gone"], ()))
    row = dict(data_source="x", solution_str="", ground_truth="", extra_info={}, prompt=[])
    with pytest.raises(
        SystemExit, match=r"^error: reward.py:gone has changed what cannot be put back: os.chdir: "
    ):
        manager.score([row])


def test_a_process_group_that_is_gone_names_the_guest(monkeypatch):
    there = [True]
    monkeypatch.setattr(plugins, "read_process_group", lambda: there[0])
    with (
        pytest.raises(SystemExit, match=r"^error: score has .*it was made or destroyed"),
        plugins.guest("score"),
    ):
        there[0] = False


def test_a_fork_that_a_guest_leaves_is_no_second_run(tmp_path):
    """It ends with its own call: else each call would double the processes."""
    file = tmp_path / "reward.py"
    file.write_text(
        "import os\n"
        "def forks(**_):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        raise SystemExit\n"
        "    return child\n"
    )
    manager = RewardManager("naive", load_rewards([f"{file}:forks"], ()))
    row = dict(data_source="x", solution_str="", ground_truth="", extra_info={}, prompt=[])
    children = [int(result["score"]) for result in manager.score([row] * 4)]
    ends = [os.waitpid(child, 0)[1] for child in children]
    assert [os.waitstatus_to_exitcode(end) for end in ends] == [1] * 4


def test_a_thread_that_a_guest_leaves_holds_up_no_end():
    """Python waits at its end for threads that are no daemons."""
    end = threading.Event()
    with plugins.guest("serves"):
        thread = threading.Thread(target=end.wait)
        thread.start()
    assert thread.daemon and not threading.current_thread().daemon
    end.set()


def test_what_a_guest_leaves_is_let_go(monkeypatch):
    """A call that hangs in a pool, and a process: Python would wait for both at its end."""
    end = threading.Event()
    with plugins.guest("leaves"):
        pool = ThreadPoolExecutor(1)
        pool.submit(end.wait)
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    [worker] = pool._threads
    assert worker in plugins.pools._threads_queues
    plugins.let_go()
    child.join()
    assert child.exitcode == -signal.SIGKILL and worker not in plugins.pools._threads_queues
    end.set()
    assert plugins.let_go in [call.func for call in threading._threading_atexits]
    done = []
    monkeypatch.setattr("system.ranks.let_go", lambda: done.append("let go"))
    monkeypatch.setattr("system.ranks.dist.barrier", lambda: None)
    monkeypatch.setattr("system.ranks.atexit._run_exitfuncs", lambda: done.append("exit functions"))
    monkeypatch.setattr(os, "_exit", done.append)
    leave(3)
    assert done == ["let go", "exit functions", 3]


def test_a_stream_that_a_guest_has_wrapped(capfd):
    """Its end would close what it wraps; the guest has it again, and the run its own."""
    with plugins.guest("wraps"):
        sys.stdout = mine = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", write_through=True)
    del mine
    gc.collect()
    print("of the run")
    with plugins.guest("writes"):
        print("of the guest")
        sys.stdout.detach()
        sys.stdout = plugins.Lent(sys.__stdout__)
    assert plugins.kept["streams"]["stdout"] is None
    assert "of the run" in capfd.readouterr().out


def test_a_guest_does_not_end_the_run(tmp_path):
    """Not when its file is loaded, and not when it checks a row."""
    (tmp_path / "loads.py").write_text("import os\nos._exit(0)")
    with pytest.raises(ValueError, match=r"loads.py cannot be loaded: SystemExit\('os._exit\(0\)'\)"):
        plugins.load_from(f"{tmp_path}/loads.py:score", "--reward_fn")
    checks = "def check_row(source, truth, extra_info):\n    assert truth\n    os._exit(0)\n"
    (tmp_path / "checks.py").write_text(f"import os\n{checks}def score(**_):\n    return 1.0")
    manager = RewardManager("naive", load_rewards([f"{tmp_path}/checks.py:score"], ()))
    rows = [
        dict(data_source="x", reward_model=dict(ground_truth=x), extra_info={}, index=i)
        for i, x in enumerate("a")
    ]
    rows.append(rows[0] | dict(reward_model={}, index=1))
    faults = [str(fault) for fault in manager.faults({"x"}, rows)]
    assert faults == [
        "row 0, data_source 'x': checks.py:check_row: SystemExit: os._exit(0)",
        "row 1, data_source 'x': checks.py:check_row: AssertionError: ",
    ]


def test_a_file_that_changes_in_a_second_is_read_again(tmp_path, monkeypatch):
    """Python compares the second and the size of what it has compiled."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for value in (1, 2):
        file.write_text(f"def score():\n    return {value}\n")
        os.utime(file, (1, 1))
        assert plugins.load_from(f"{file}:score", "--reward_fn")() == value
    assert not sys.dont_write_bytecode
