"""The helper process of rewards: results, time-outs, crashes, limits, from any thread."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rewards import load_reward_fn
from rewards.manager.worker import Worker, WorkerError, call_in_worker


def add(a, b):
    return {"sum": a + b}


def pid():
    return os.getpid()


def hang():
    while True:
        pass


def hang_in_c():
    return 10**10**9  # holds the interpreter's lock all the time


def fill_memory():
    return len(bytearray(1 << 34))


def end():
    os._exit(3)


def fail():
    raise ValueError("no such answer")


def fail_unicode():
    return b"\xff".decode()


def test_result_and_reuse():
    assert call_in_worker(add, 1, 2, timeout_s=5) == {"sum": 3}
    assert call_in_worker("operator:add", "a", "b", timeout_s=5) == "ab"
    first = call_in_worker(pid, timeout_s=5)
    assert first == call_in_worker(pid, timeout_s=5) != os.getpid()


@pytest.mark.parametrize("function", [hang, hang_in_c])
def test_timeout_in_a_thread(function):
    outcome = []

    def run():
        before = call_in_worker(pid, timeout_s=5)
        try:
            call_in_worker(function, timeout_s=0.5)
        except TimeoutError as error:
            outcome.append(str(error))
        outcome.append(before != call_in_worker(pid, timeout_s=5))
        outcome.append(_alive(before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outcome == ["no result after 0.5 s", True, False]


def test_crash_memory_exception():
    with pytest.raises(WorkerError, match="ended with code 3"):
        call_in_worker(end, timeout_s=5)
    with pytest.raises(WorkerError, match="ended"):
        call_in_worker(fill_memory, timeout_s=5)
    with pytest.raises(ValueError, match="no such answer"):
        call_in_worker(fail, timeout_s=5)
    with pytest.raises(WorkerError, match="UnicodeDecodeError"):
        call_in_worker(fail_unicode, timeout_s=5)
    with pytest.raises(ModuleNotFoundError):
        call_in_worker("no_such_module:f", timeout_s=5)
    assert call_in_worker(add, 1, 2, timeout_s=5) == {"sum": 3}


def test_slow_calls_are_told():
    worker, slow = Worker(), []
    assert worker.call(add, 1, 2, timeout_s=60, patience_s=60, on_slow=lambda: slow.append(1)) == {"sum": 3}
    assert slow == []
    with pytest.raises(TimeoutError):
        worker.call(hang, timeout_s=1, patience_s=0.1, on_slow=lambda: slow.append(1))
    assert slow == [1]


def test_function_of_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("def f(x):\n    return x + 1\n")
    assert call_in_worker(load_reward_fn(f"{tmp_path}/mine.py:f"), 1, timeout_s=5) == 2


def test_a_worker_does_not_outlive_its_thread_or_its_caller():
    pids = []
    thread = threading.Thread(target=lambda: pids.append(call_in_worker(pid, timeout_s=5)))
    thread.start()
    thread.join()
    script = """
        import os, signal
        from rewards.manager.worker import call_in_worker
        print(call_in_worker("os:getpid", timeout_s=5), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parents[1]
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=root, capture_output=True, check=False
    )
    pids.append(int(out.stdout))
    deadline = time.monotonic() + 120
    while any(_alive(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(p) for p in pids)


def _alive(p):
    """Whether p is still a worker's number: what has ended has no command line, others have another."""
    try:
        return b"rewards.manager.worker" in Path(f"/proc/{p}/cmdline").read_bytes()
    except OSError:
        return False
