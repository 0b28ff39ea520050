"""The helper process of rewards: results, time-outs, crashes, limits, from any thread."""

import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rewards import load_reward_fn
from rewards.manager.worker import ERRORS, Worker, WorkerError, call_in_worker, is_readable


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
    def run():
        before = call_in_worker(pid, timeout_s=5)
        with pytest.raises(TimeoutError, match=r"^no result after 0\.5 s of a processor$"):
            call_in_worker(function, timeout_s=0.5)
        assert before != call_in_worker(pid, timeout_s=5)
        assert not _alive(before)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def test_only_the_time_of_a_processor_counts():
    """A busy machine makes no correct answer wrong: a call that waits has no less time."""
    for _ in range(2):
        assert call_in_worker("time:sleep", 0.4, timeout_s=0.2) is None


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds


class Loads:
    """What takes time to load, before a call begins."""

    def __reduce__(self):
        return burn, (0.4,)


def test_loading_has_no_limit_of_an_earlier_call():
    for argument in (0.4, Loads()):
        assert call_in_worker(burn, argument, timeout_s=0.7) == 0.4


def test_crash_memory_exception():
    for function, kind, line in (
        (end, WorkerError, "ended with code 3"),
        (fill_memory, WorkerError, "ended"),
        (fail, ValueError, "no such answer"),
        (fail_unicode, WorkerError, "UnicodeDecodeError"),
        ("no_such_module:f", ModuleNotFoundError, "no_such_module"),
    ):
        with pytest.raises(kind, match=line):
            call_in_worker(function, timeout_s=5)
    assert call_in_worker(add, 1, 2, timeout_s=5) == {"sum": 3}


HIJACK = """
import json, sys, threading, time
from rewards.manager import worker as wire

def say(sock, reply):
    wire.send(sock, reply if isinstance(reply, bytes) else json.dumps(reply).encode())

def take_over(code, later=0.0):
    '''As a response would that runs code here: find the socket and the number of the call.'''
    frame = sys._getframe()
    while frame.f_code.co_name != "serve":
        frame = frame.f_back
    names = dict(frame.f_locals, say=say, time=time)
    if not later:
        return exec(code, names)
    threading.Thread(target=lambda: (time.sleep(later), exec(code, names)), daemon=True).start()
"""


@pytest.fixture
def take_over(tmp_path):
    (tmp_path / "hijack.py").write_text(HIJACK)
    return load_reward_fn(f"{tmp_path}/hijack.py:take_over")


@pytest.mark.parametrize("kind", ["exec", "eval", "SystemExit", "KeyboardInterrupt", "open", "print", "nope"])
def test_a_process_names_no_other_exception(take_over, tmp_path, kind):
    """None of its own choice is called in this process."""
    mark = tmp_path / "mark"
    value = f"open({str(mark)!r}, 'w')" if kind in ("exec", "eval") else str(mark)
    with pytest.raises(WorkerError):
        Worker().call(take_over, f"say(sock, [number, {kind!r}, {value!r}])", timeout_s=30)
    assert not mark.exists()


def test_the_errors_are_exceptions():
    assert all(issubclass(error, Exception) and name == error.__name__ for name, error in ERRORS.items())
    assert not {"TimeoutError", "WorkerError", "MemoryError", "StopIteration"} & ERRORS.keys()


JUNK = [
    *("b''", "b'junk'", "b'\\xff\\xfe'", "b'[' * 100_000", "b'[' + b'9' * 5000 + b']'"),
    *("None", "7", "'abc'", "{}", "[]", "[number]", "[number, 'result']", "[number, 'result', 1, 2]"),
    *("['0' * 16, 'result', 1]", "[[number], 'result', 1]", "[number, ['result'], 1]", "[number, None, 1]"),
    *("[number, 'ValueError', 3]", "[number, 'ValueError', ['x']]", "[number, {}, 'x']"),
]


@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_no_reply(take_over, junk):
    worker = Worker()
    with pytest.raises(WorkerError):
        worker.call(take_over, f"say(sock, {junk})", timeout_s=30)
    assert worker.call(add, 1, 2, timeout_s=30) == {"sum": 3}


@pytest.mark.parametrize(
    "code",
    [
        "time.sleep(1000)",  # nothing
        "sock.sendall(bytes(3)); time.sleep(1000)",  # half of a length
        "sock.sendall((1000).to_bytes(8, 'big') + b'[1'); time.sleep(1000)",  # half of a message
    ],
)
def test_half_a_reply_is_a_time_out(take_over, code):
    worker = Worker()
    with pytest.raises(TimeoutError):
        worker.call(take_over, code, timeout_s=1)
    assert worker.call(add, 1, 2, timeout_s=30) == {"sum": 3}


def test_a_huge_reply_is_not_read(take_over):
    with pytest.raises(WorkerError, match=f"{1 << 60} bytes, at most"):
        Worker().call(take_over, "sock.sendall((1 << 60).to_bytes(8, 'big')); time.sleep(9)", timeout_s=30)


def test_no_reply_is_taken_for_that_of_another_call(take_over):
    """Neither one that was sent before the call, nor one that comes during it."""
    forged = "say(sock, [number, 'result', {'sum': 99}])"
    worker = Worker()
    worker.call(take_over, f"{forged}; {forged}", timeout_s=30)
    assert is_readable(worker._socket, 600)  # the second one is there
    assert worker.call(add, 1, 2, timeout_s=30) == {"sum": 3}
    worker = Worker()
    worker.call(take_over, forged, 1.0, timeout_s=30)
    with pytest.raises(WorkerError, match="it belongs to no call"):
        worker.call("time:sleep", 30, timeout_s=60)
    assert worker.call(add, 1, 2, timeout_s=30) == {"sum": 3}


def test_slow_calls_are_told():
    worker, slow = Worker(), []
    assert worker.call(add, 1, 2, timeout_s=60, patience_s=60, on_slow=lambda: slow.append(1)) == {"sum": 3}
    assert slow == []
    with pytest.raises(TimeoutError):
        worker.call(hang, timeout_s=1, patience_s=0.1, on_slow=lambda: slow.append(1))
    assert slow == [1]


def test_a_worker_does_not_outlive_its_thread_or_its_caller():
    with ThreadPoolExecutor(1) as thread:
        pids = [thread.submit(call_in_worker, pid, timeout_s=5).result()]
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
    while any(_alive(p) for p in pids):
        time.sleep(0.05)


def _alive(p):
    """Whether p is still a worker's number: what has ended has no command line, others have another."""
    try:
        return b"rewards.manager.worker" in Path(f"/proc/{p}/cmdline").read_bytes()
    except OSError:
        return False
