"""Programs that attack the machine they run on.  As root, the whole file runs again as an ordinary user."""

import ctypes
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rewards import sandbox
from rewards.sandbox import Result, SandboxError, run_judge, run_python, run_tests
from system.files import hold

ROOT = Path(__file__).resolve().parents[1]
HAS_LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1) > 0
OUT_OF_REACH = ROOT / "tests/golden/out_of_reach.jsonl"
SECRET = "secret-of-the-caller"


def processes(pid):
    """Living processes of sandboxes that process `pid` started: their command line ends with it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().endswith(f"sandbox/child.py\0{pid}\0".encode()):
                found.append(int(path.parent.name))
        except OSError:  # it ended, or belongs to somebody else
            continue
    return found


def wait_until_gone(pid):
    while processes(pid):
        time.sleep(0.01)


def memory_mb():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) / 1024


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """A caller with a secret and a file in its directory; afterwards all must be as before."""
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").write_text(SECRET)
    sandbox.tier()
    gc.collect()  # else garbage of earlier tests closes its descriptors meanwhile
    descriptors, memory = os.listdir("/proc/self/fd"), memory_mb()
    yield
    wait_until_gone(os.getpid())
    assert os.listdir("/proc/self/fd") == descriptors
    assert memory_mb() < memory + 40
    assert os.listdir(tmp_path) == ["data"] and (tmp_path / "data").read_text() == SECRET


def run(source, timeout_s=30, **arguments):
    return run_python(textwrap.dedent(source), timeout_s=timeout_s, **arguments)


def test_a_program():
    source = """
        import sys, heapq, decimal, threading
        print(input(), sys.stdin.buffer.read(), sys.argv)
        print("Grüße", file=sys.stderr)
        threading.stack_size(128 << 20)
        threading.Thread(target=lambda: print("thread")).start()
        exit(3)
    """
    expected = Result("a b b'' ['program.py']\nthread\n", "Grüße\n", 3, None)
    assert run(source, stdin="a b\n") == expected
    assert run_python("print(open('/dev/stdin').read())", "x").stdout == "x\n"
    assert run_python("def f(:").returncode == 1
    assert run_python("x = '\ud800\0'").returncode == 1
    assert run_python("import os; os.write(1, b'\\xff')").stdout == "\ufffd"


def test_each_test_starts_clean():
    source = """
        import builtins, os, sys
        print(sys.stdin.read(), os.path.exists("mark"), hasattr(builtins, "mark"), "json" in sys.modules)
        builtins.mark = 1
        import json
        try:
            os.makedirs("mark/mark")
            open(".stdin", "w").write("other")
        except PermissionError:
            pass
    """
    results = run_tests(textwrap.dedent(source), ["1", "2", "3"])
    assert [r.stdout for r in results] == [f"{i} False False False\n" for i in (1, 2, 3)]
    assert list(run_tests("print(1)", [])) == []


def test_time_outs_halve():
    """A program's limit of CPU seconds is 2 above its time-out; one that is killed at once prints nothing."""
    source = """
        import resource
        print(resource.getrlimit(resource.RLIMIT_CPU)[0], flush=True)
        n = int(input())
        while n: pass
    """
    results = list(run_tests(textwrap.dedent(source), "0" + "1" * 40, timeout_s=2))
    assert [r.reason for r in results] == [None] + ["timeout"] * 40
    limits = [4, 4, 3] + [2] * 38
    assert all(r.stdout in ("", f"{limit}\n") for r, limit in zip(results, limits, strict=True))
    assert results[1].stdout


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "10**10**9",
        # deaf to signals
        """
        import signal, time
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        signal.alarm(0)
        time.sleep(60)
        """,
        # fork bombs
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        """
        import ctypes
        while True:
            ctypes.CDLL(None).fork()
        """,
        # streams closed, lives on
        """
        import os, time
        os.closerange(0, 100)
        time.sleep(60)
        """,
        # ends, but for a thread
        """
        import threading, time
        threading.Thread(target=time.sleep, args=[60]).start()
        """,
        "import time\nwhile True: time.sleep(0.001)",
        "import time\nwhile True: print(1, flush=True), time.sleep(0.01)",
        """
        import threading, time
        def poll():
            while True: time.sleep(0.005)
        threads = [threading.Thread(target=poll) for _ in range(9)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """,
    ],
)
def test_time_out(source, monkeypatch):
    """By its processor time, or because it sleeps, in sum: as a program that polls does."""
    monkeypatch.setattr(sandbox, "IDLE_S", 1)
    result = run(source, timeout_s=0.5)
    assert (result.reason, result.returncode) == ("timeout", -9)


def test_memory():
    result = run("x = []\nwhile True: x.append(bytearray(1 << 20))", memory_mb=200)
    assert result.returncode == 1 and result.stderr.endswith("MemoryError\n")
    # kinds of memory that the limit of the address space does not count
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None)
        print(libc.shmget(0, 1 << 30, 0o1777), libc.syscall(319, b"x", 0), libc.syscall(447, 0))
        os.memfd_create("x")
    """
    result = run(source)
    assert result.stdout == "-1 -1 -1\n" and "PermissionError" in result.stderr


def test_output():
    flood = "import os\nfor _ in range(300): os.write({}, b'x' * 1_000_000)\nprint('end')"
    result = run(flood.format(1))
    assert result.reason == "output" and len(result.stdout) == sandbox.OUTPUT_BYTES
    result = run(flood.format(2))  # is dropped: what it writes there is no fault of a program
    assert result.reason is None and result.stdout == "end\n" and len(result.stderr) < 1 << 18


def test_limits():
    threads = """
        import threading, time
        count, reserve = 0, bytearray(1 << 24)
        threading.stack_size(1 << 16)
        try:
            while True:
                threading.Thread(target=time.sleep, args=[60], daemon=True).start()
                count += 1
        except (RuntimeError, MemoryError):
            del reserve
            print(count < {})
    """
    most = 64 if sandbox.tier() == "namespaces" else 20_000
    found = run(threads.format(most), memory_mb=256)
    assert found.stdout == "True\n", found
    recursion = "import sys\nsys.setrecursionlimit(10**9)\nf = lambda x: [*map(f, [x])]\nf(1)"
    assert run(recursion).returncode == -signal.SIGSEGV
    descriptors = "files = []\nfor _ in range(10_000): files.append(open('/dev/null'))"
    assert "Too many open files" in run(descriptors).stderr
    disk = """
        import os
        total = 0
        try:
            for i in range(10_000):
                with open(f"/tmp/{i}", "wb", buffering=0) as file:
                    total += file.write(bytes(1_000_000))
        except OSError as error:
            print(total < 100_000_000)
    """
    assert run(disk).stdout == "True\n"
    inodes = "import os\nfor i in range(100_000): os.mkdir(f'/tmp/{i}')"
    assert run(inodes).returncode == 1


def test_out_of_reach():
    source = """
        import ctypes, fcntl, os, resource, signal, socket, subprocess
        CALLER, PORT, NAME, DIRECTORY, REPOSITORY = {}
        libc = ctypes.CDLL(None)

        def check(result):
            if result < 0:
                raise OSError

        try:
            exec(input())
        except (OSError, ImportError) as error:
            print("denied")
    """
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        name = f"sandbox-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        known = (os.getpid(), tcp.getsockname()[1], name, os.getcwd(), str(ROOT))
        acts = [json.loads(line)["act"] for line in OUT_OF_REACH.open()]
        results = run_tests(textwrap.dedent(source.format(known)), acts)
        assert [x for x in zip(acts, results) if x[1].stdout != "denied\n"] == []


def test_secret():
    """Neither in the environment nor anywhere in memory."""
    source = """
        import ctypes, gc, os, sys
        def frames():
            frame = sys._getframe()
            while frame:
                yield frame.f_globals, frame.f_locals
                frame = frame.f_back
        text = str([os.environ, *frames(), *map(repr, gc.get_objects())])
        print("sandbox/child.py" in text, {!r}[::-1] in text)
    """
    assert run(source.format(SECRET[::-1])).stdout == "True False\n"


def test_namespaces():
    """System calls are denied first, so that these walls show only to a look from outside."""
    source = """
        import os, time
        print([os.statvfs(path).f_flag & os.ST_RDONLY for path in ("/", os.__file__, "/dev/null")])
        if input(): time.sleep(60)
    """

    def namespaces(pid):
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("user", "mnt", "pid", "net", "ipc")}

    results = run_tests(textwrap.dedent(source), ["\n", "x"], timeout_s=60)
    is_read_only = next(results).stdout
    shared = [namespaces(pid) & namespaces("self") for pid in processes(os.getpid())]
    results.close()
    if sandbox.tier() == "namespaces":
        assert is_read_only == "[1, 1, 1]\n" and set() in shared


def test_temporary_directory():
    source = """
        import os
        os.makedirs("a/b", mode=0)
        os.symlink("/", "root")
        os.symlink({!r}, "caller")
        os.rename("a", "..") if os.path.exists("x") else os.link("root", "hard")
        os.chdir("/tmp")
        print(os.listdir("caller"))
    """
    result = run(source.format(os.getcwd()))
    assert result.returncode == 1 and SECRET not in result.stdout


def test_many_at_once():
    """From threads, among programs that fork and fill the memory; each has its own limits."""
    bad = ["import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "x = bytes(1 << 40)"]
    good = "import threading\nfor _ in range(8): threading.Thread(target=print).start()\nprint(6 * 7)"
    with ThreadPoolExecutor(6) as pool:
        limits = {good: 60, bad[0]: 5, bad[1]: 60}  # the first bad one takes all its time
        sources = [good, *bad, good, good] * 2
        results = list(pool.map(lambda source: run_python(source, "", limits[source]), sources))
    assert [r.stdout.split() for r in results if r.reason is None and r.returncode == 0] == [["42"]] * 6


def test_a_thread_can_end_before_its_caller():
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(run_python, "print(1)").result()
    assert result.stdout == run_python("print(1)").stdout == "1\n"


def test_abandoned_tests_end():
    for _ in range(10):  # the end falls between the fork of the next program and its first line, or later
        results = run_tests("input()\nwhile True: pass", ["", "1", "1"], timeout_s=60)
        assert next(results).returncode == 1
        results.close()


def test_a_broken_sandbox_is_no_result():
    results = run_tests("print(input())", ["1"] + ["2"] * 50_000)
    assert next(results).stdout == "1\n"
    for pid in processes(os.getpid()):
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    with pytest.raises(SandboxError, match=sandbox.LOST):
        list(results)


def test_dies_with_its_caller():
    script = """
        from rewards.sandbox import run_tests
        for result in run_tests("import time\\nif input(): time.sleep(60)", ["\\n", "x"], timeout_s=60):
            print(result, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as caller:
        assert b"reason=None" in caller.stdout.readline()
        assert len(processes(caller.pid)) >= 2
        caller.kill()
    wait_until_gone(caller.pid)


def test_judge():
    judge = """
        import sys
        print("6 7", flush=True)
        sys.exit(0 if input() == "42" else "wrong")
    """
    judge = textwrap.dedent(judge)
    program = "a, b = map(int, input().split())\nprint(a {} b)"
    assert run_judge(judge, program.format("*")) == Result("", "", 0, None)
    assert run_judge(judge, program.format("+")) == Result("", "wrong\n", 1, None)
    assert run_judge(judge, "exit(0)").returncode > 0
    assert run_judge(judge, "while True: pass", timeout_s=0.5).reason == "timeout"


def test_tier(monkeypatch, tmp_path_factory):
    assert sandbox.tier() in (
        [os.environ["REWARDS_SANDBOX"]] if "REWARDS_SANDBOX" in os.environ else sandbox.TIERS
    )
    monkeypatch.setattr(sandbox, "tier", sandbox.tier.__wrapped__)
    monkeypatch.setenv("REWARDS_SANDBOX", "walls")
    with pytest.raises(SandboxError, match=r"walls; known: namespaces, landlock, rlimits$"):
        sandbox.tier()
    monkeypatch.delenv("REWARDS_SANDBOX")
    child = tmp_path_factory.mktemp("child") / "child.py"
    child.write_text("import os; os.write(1, b'setup 1 0 5'.ljust(64) + b'no ns')")
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(SandboxError, match=r"\(namespaces: no ns; landlock: no ns\): allow .*") as error:
        run_python("print(1)")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ("a link", "open to others", "of another user"))
def test_a_place_that_another_user_has_made(place, tmp_path_factory, monkeypatch):
    """Nothing is followed, made or cut off there; programs run all the same."""
    tmp_path = tmp_path_factory.mktemp("shared")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox._folder_of_process.cache_clear()
    user = os.getuid() + (place == "of another user")
    monkeypatch.setattr(os, "getuid", lambda: user)
    victim, theirs, found = tmp_path / "victim", tmp_path / "theirs", tmp_path / f"rewards-sandbox-{user}"
    victim.write_text("kept")
    theirs.mkdir(mode=0o700)
    for i in range(os.cpu_count()):
        (theirs / str(i)).symlink_to(victim)
    if place == "a link":
        found.symlink_to(theirs)
    else:
        theirs.rename(found)
        found.chmod(0o777 if place == "open to others" else 0o700)
    before = sorted(found.iterdir())
    with sandbox.a_core():
        assert victim.read_text() == "kept" and sorted(found.iterdir()) == before
    sandbox._folder_of_process.cache_clear()


def test_a_link_in_a_place_of_ones_own_is_not_followed(tmp_path_factory, monkeypatch):
    tmp_path = tmp_path_factory.mktemp("shared")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "victim").write_text("kept")
    own = tmp_path / f"rewards-sandbox-{os.getuid()}"
    own.mkdir(mode=0o700)
    for path in (own / "0", tmp_path / ".lock"):
        path.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"), sandbox.a_core():
        pass
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=r"cannot be made: .*symbolic links"):
        hold(tmp_path, "--output_dir x")
    assert (tmp_path / "victim").read_text() == "kept"


if os.getuid():

    def test_weakest_tier(monkeypatch):
        monkeypatch.setattr(sandbox, "tier", sandbox.tier.__wrapped__)
        monkeypatch.setenv("REWARDS_SANDBOX", "rlimits")
        assert sandbox.tier() == "rlimits"
        assert run_python("print(input())", "x").stdout == "x\n"
        assert run_python("import os; os.fork()").returncode == 1

else:
    AS_NOBODY = """
        import os, sys
        from rewards.sandbox import walls

        python, repository, packages, tmp, tier, *chosen = sys.argv[1:]
        walls.call("unshare", 0x20000)  # CLONE_NEWNS
        walls.mount(None, "/", flags=0x44000)  # MS_REC | MS_PRIVATE
        for source, name in ((python, "python"), (repository, "repository"), (packages, "packages")):
            walls.mount(source, f"{tmp}/{name}", flags=0x5000)  # MS_BIND | MS_REC
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        os.chdir(f"{tmp}/repository")
        python = f"{tmp}/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
        environment = {"PYTHONPATH": f"{tmp}/packages", "REWARDS_SANDBOX": tier}
        options = ["--noconftest", "-p", "no:cacheprovider", "--basetemp", f"{tmp}/tmp/pytest", *chosen]
        os.execve(python, [python, "-m", "pytest", "tests/test_sandbox.py", *options], environment)
    """

    @pytest.mark.parametrize("tier", sandbox.TIERS[: 2 if HAS_LANDLOCK else 1])
    def test_as_an_ordinary_user(tier):
        """In a mount namespace that shows Python and the repository where the user can read them."""
        tmp = tempfile.mkdtemp()
        try:
            for name in ("python", "repository", "packages", "tmp"):
                os.mkdir(f"{tmp}/{name}")
            os.chmod(tmp, 0o755)
            os.chown(f"{tmp}/tmp", 65534, 65534)
            packages = sysconfig.get_paths()["purelib"]
            command = [sys.executable, "-c", textwrap.dedent(AS_NOBODY)]
            command += [sys.base_prefix, ROOT, packages, tmp, tier]
            if tier != sandbox.TIERS[0]:  # time and output are watched by the same code in all tiers
                command += ["-k", "not time_out and not processor and not output and not many"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
            assert "skipped" not in done.stdout
        finally:
            shutil.rmtree(tmp)


BLIND = """
import os, sys
sys.path.append({folder!r})
import child
wait = lambda pid: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
child.watch = lambda pid, *_: (wait(pid), ("ended", b"", b""))[1]
exec(child.main(), dict(__name__="__main__"))
"""


@pytest.mark.parametrize(("work_s", "reason"), [(0, None), (0.3, "timeout"), (99, "timeout")])
def test_processor_time_decides_though_nobody_watches(work_s, reason, tmp_path_factory, monkeypatch):
    """By itself at its end, or by the kernel's limit two seconds later."""
    blind = tmp_path_factory.mktemp("blind") / "child.py"
    blind.write_text(BLIND.format(folder=str(sandbox.CHILD.parent)))
    monkeypatch.setattr(sandbox, "CHILD", blind)
    result = run_python(f"import time\nwhile time.process_time() < {work_s}: pass", timeout_s=0.2)
    assert result.reason == reason
