"""Environments: formats of calls, steps in processes that can be killed, and those that are shipped."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, golden
from hypothesis import given
from hypothesis import strategies as st

from data_prep import environment
from data_prep.lib.schema import KINDS, load_rows
from envs import load_env
from envs.pool import EnvPool, _checked, step_env
from envs.tools import UNREADABLE, Turn, harmony, parse_calls
from rewards.manager import RewardManager
from rewards.manager.combined import load_rewards
from rewards.sandbox import LOST
from system.plugins import load_file

HOSTILE = '''
import os, random, signal, subprocess, threading, typing

class Env:
    """Does what its text says."""
    tools = [{"type": "function", "function": {"name": "none"}}]
    def __init__(self, extra_info):
        self.texts, self.pids = [extra_info["first"]], set()
        if extra_info["first"] == "broken":
            raise OSError("no\\nsuch game")
    def step(self, text):
        self.texts.append(text)
        self.pids.add(os.getpid())
        return getattr(self, text, self.say)()
    def say(self):
        return [{"role": "user", "content": " ".join(self.texts), "extra": object()}]
    def hang(self):
        while True:
            pass
    def end(self):
        os._exit(0)
    def leave(self):
        raise SystemExit
    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def fail(self):
        raise KeyError("several\\nlines " + "x" * 1000)
    def deep(self):
        return self.deep()
    def large(self):
        return [{"role": "tool", "content": "x" * 2**20, "name": "n"}]
    def finish(self):
        return None
    def lock(self):
        self.lock = threading.Lock()
        return self.say()
    def processes(self):
        return [{"role": "tool", "content": " ".join(map(str, self.pids))}]
    def half(self):
        return [{"role": "tool", "content": "\\ud83d!"}]
    def reward(self):
        return {"score": len(self.texts), "last": self.texts[-1]}

def add(a: int, b: int = 1, text: str = "") -> int:
    """Adds.

    Args:
        a: first
        b: second
        text: joined
    """
    return f"{a + b}{text}" if text else a + b

def fail(kind: str):
    """Fails.

    Args:
        kind: how
    """
    if kind in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
        raise getattr(__builtins__, kind, None) or __builtins__[kind]
    raise ValueError("of kind\\n" + kind)

def undocumented(a):
    return a

class Counter:
    """In TRL's manner."""
    def reset(self, **row):
        self.count, self.reward = row["start"], 0.0
        return "begin"
    def more(self, by: int) -> str:
        """Counts.

        Args:
            by: how far
        """
        self.count += by
        self.reward = float(self.count)
        return f"now {self.count}"
    def _hidden(self):
        pass

class Nothing:
    pass

def f(
    names: list[str],
    sizes: dict[str, int] | None = None,
    unit: str | None = "C",
    mode: typing.Literal["1", "2"] = "1",
    level: typing.Literal[1, 2] = 1,
    maybe: typing.Optional[list[int]] = None,
    free: typing.Any = None,
    either: int | str = 0,
    flag: bool = False,
    pair: tuple[str, str] = ("", ""),
):
    return [names, sizes, unit, mode, level, maybe, free, either, flag, pair]

TOOLS, KINDS, BAD_TOOLS, NONE = [add, fail], [f], [undocumented], []
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("env") / "mine.py"
    path.write_text(HOSTILE)
    return path


@pytest.fixture
def pools():
    """Makes pools, and ends them."""
    made = []

    def make(*args):
        made.append(EnvPool(*args))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def ask(pool, **texts):
    """{key: answer} of a step for each key."""
    for key, text in texts.items():
        pool.step(key, text, {"first": "hello", "start": 2})
    answers = []
    while len(answers) < len(texts):
        answers += pool.answers(wait=True)
    assert pool.answers(wait=False) == pool.answers(wait=True) == []
    return {answer.pop("key"): answer for answer in answers}


def failed(why):
    return {"messages": None, "reward": None, "failure": why}


def hermes(name, **arguments):
    return f"<tool_call>{json.dumps(dict(name=name, arguments=arguments))}</tool_call>"


PIECES = "<tool_call> </tool_call> </think> to=functions.f <|message|> <|call|> lambda: null **".split()
PIECES += ['{"name": "f", "arguments": ', '{"a": 1}', "not ", *"{}[]()f1-'\"\\,:;*= \n\0\ud800"]


def test_formats():
    """Of golden/calls.jsonl, and texts that are very long."""
    for case in golden("calls"):
        read = parse_calls if case["reader"] == "hermes" else harmony
        expected = [UNREADABLE if call == "unreadable" else tuple(call) for call in case["calls"]]
        assert read(case["text"]) == expected, case
    for text in ("[" * 100_000, '{"name": "f", "arguments": {"a": ' + "1" * 200_000 + "}}"):
        assert parse_calls(f"<tool_call>{text}") == [UNREADABLE]


def test_tools(file):
    """A string stays one where it should be; no error ends the process."""
    env_class = load_env(f"{file}:TOOLS")
    names = [schema["function"]["name"] for schema in env_class.tools]
    assert names == ["add", "fail"]
    assert env_class.tools[0]["function"]["parameters"]["required"] == ["a"]
    for case in golden("tools"):
        assert env_class({}).step(case["text"]) == case["answers"]
    [message] = env_class({}).step(hermes("fail", kind="x" * 9999))
    assert len(message["content"]) == 200


@pytest.fixture(scope="module")
def kinds(file):
    return load_env(f"{file}:KINDS")


def test_arguments_in_xml_have_the_types_of_the_tool(kinds):
    """As vLLM's parser reads them; what may be a text stays one."""
    for case in golden("xml_arguments"):
        [message] = kinds({}).step(hermes("f", **case["arguments"]))
        assert json.loads(message["content"])[: len(case["expected"])] == case["expected"]


def test_what_a_tool_is_given_fits_or_stays_a_text(kinds):
    [message] = kinds({}).step(hermes("f", names="1,000", flag="1,000", level="1,000", pair="5"))
    names, _, _, _, level, *_, flag, pair = json.loads(message["content"])
    assert (names, level, flag, pair) == ([1, 0], "1,000", "1,000", "5")


def test_two_tools_of_one_name_are_refused(tmp_path):
    same = "def a(x: int):\n    return x\nTOOLS = [a, a]\n"
    same += "class Env:\n    tools = [dict(function=dict(name='a'))] * 2\n    def step(self, text): pass\n"
    (tmp_path / "same.py").write_text(same)
    for name in ("TOOLS", "Env"):
        with pytest.raises(ValueError, match="two tools are named 'a'"):
            EnvPool(f"{tmp_path}/same.py:{name}", 1, 1)


VALUES = st.none() | st.booleans() | st.integers() | st.text()
JSON = st.recursive(VALUES, lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(json.dumps)


@given(text=JSON | st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_is_read(kinds, text):
    """As calls: a name and arguments, or what is wrong; and each is answered."""
    for begin in ("", "<tool_call>", "to=functions.f<|message|>"):
        text = begin + text
        for calls in (parse_calls(text), harmony(text)):
            for name, arguments in calls:
                told = type(arguments) is dict if name else type(arguments) is str
                assert told and type(name) in (str, type(None))
            answers = kinds({}).step(Turn(text, calls))
            assert len(answers or []) == len(calls) == len(_checked(answers) or [])


def test_methods_of_trl_are_tools(file):
    [schema] = load_env(f"{file}:Counter").tools
    assert schema["function"]["name"] == "more"
    assert list(schema["function"]["parameters"]["properties"]) == ["by"]


ASYNC = '''
import asyncio, functools
from envs.tools import ToolEnv

SCHEMA = [{"type": "function", "function": {"name": "f"}}]
CLIENT = asyncio.Queue(1)  # belongs to the loop that it is first waited for in

class Late:
    """An awaitable that is no coroutine."""
    def __init__(self, value):
        self.value = value
    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return self.value

async def twice(a: int) -> int:
    """Doubles.

    Args:
        a: a number
    """
    await asyncio.sleep(0.001)
    with_timeout = asyncio.create_task(asyncio.sleep(0, a))  # needs a loop
    return a + await with_timeout

@functools.wraps(twice)
def wrapped(a):
    return twice(a)

@functools.wraps(twice)
def late(a):
    return Late({"twice": 2 * a})

@functools.wraps(twice)
def plain(a):
    return 2 * a

async def client(a: int) -> int:
    """Asks a client that its module keeps: it is of use in the next call, too.

    Args:
        a: a number
    """
    waiting = asyncio.create_task(CLIENT.get())
    await asyncio.sleep(0)
    await CLIENT.put(2 * a)
    return await waiting

@functools.wraps(twice)
async def fail(a):
    raise ValueError("no")

@functools.wraps(twice)
async def hang(a):
    await asyncio.Event().wait()

@functools.wraps(twice)
async def cancelled(a):
    raise asyncio.CancelledError

class Object:
    async def method(self, a: int) -> int:
        return await twice(a)
    async def __call__(self, a: int) -> int:
        return await twice(a)
    async def rows(self, a: int):
        yield a

async def agen(a: int):
    yield a

def gen(a: int):
    yield a

KINDS = dict(plain=plain, twice=twice, wrapped=wrapped, late=late, client=client, fail=fail, hang=hang,
    cancelled=cancelled)
globals().update({f"LIST_{name}": [function] for name, function in KINDS.items()})
LIST_agen, LIST_gen, LIST_rows = [agen], [gen], [Object().rows]
LIST_partial, LIST_object = [functools.partial(twice, a=1)], [Object()]

def of_class(tool):
    """Where a list is not: a class made by hand, with its own schemas."""
    return type("Made", (ToolEnv,), dict(functions=dict(f=tool), tools=SCHEMA))
method = type("Method", (ToolEnv,), dict(functions=dict(f=Object().method), tools=SCHEMA))

class Env:
    """Its step says what to do."""
    def __init__(self, extra_info):
        self.score = 0
    async def step(self, text):
        await asyncio.sleep(0.001)
        if text == "hang":
            await asyncio.Event().wait()
        if text == "fail":
            raise ValueError("no")
        self.score += 1
        return None if text == "stop" else [{"role": "user", "content": text}]
    async def reward(self):
        await asyncio.sleep(0)
        return {"score": self.score}

class Sync(Env):
    """A step that is no coroutine, and returns one."""
    def step(self, text):
        return Late([{"role": "user", "content": text}])
    def reward(self):
        return Late(7)

class AsyncInit(Env):
    async def __init__(self, extra_info):
        pass

class Yields(Env):
    async def step(self, text):
        yield text

class Mine(ToolEnv):
    functions, tools = KINDS, SCHEMA
    async def step(self, text):
        await asyncio.sleep(0)
        answers = super().step(text)
        return answers and [*answers, {"role": "user", "content": "Go on."}]

class Trl:
    async def reset(self, first, start):
        await asyncio.sleep(0)
        self.count = 2
    async def twice(self, a: int) -> int:
        """Doubles.

        Args:
            a: a number
        """
        return await twice(a)
    @property
    async def reward(self):
        return self.count

class TrlYields(Trl):
    async def rows(self, a: int):
        """Rows.

        Args:
            a: a number
        """
        yield a
'''


@pytest.fixture(scope="module")
def async_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("async") / "mine.py"
    path.write_text(ASYNC)
    return path


@pytest.mark.parametrize("case", golden("env_answers"), ids=lambda case: f"{case['file']} {case['env']}")
def test_answers_of_environments(async_file, file, pools, case):
    """Methods and tools may be async, and are awaited as often as they are called.

    A failure, of which the beginning is in the table, ends its trajectory only.
    """
    path = async_file if case["file"] == "async" else file
    pool = pools(f"{path}:{case['env']}", 2, case["timeout_s"])
    for texts, answers in case["turns"]:
        found = ask(pool, **texts)
        for key, expected in answers.items():
            why = found[key]["failure"]
            if expected["failure"]:
                assert why.startswith(expected["failure"]) and len(why) < 220
                expected = expected | dict(failure=why)
            assert found[key] == expected, key


def test_a_tool_of_a_class_is_a_function(async_file):
    module = load_file(async_file, "async_tools")
    for tools in (module.LIST_partial, module.LIST_object):
        with pytest.raises(ValueError, match="'f' must be a function that returns"):
            module.of_class(*tools)


@pytest.mark.parametrize("case", golden("unfit_envs"), ids=lambda case: case["spec"])
def test_what_is_no_environment_is_refused(file, async_file, tmp_path, case):
    (tmp_path / "broken.py").write_text("import sys; sys.exit(0)")
    paths = dict(plain=file, awaits=async_file, folder=tmp_path)
    with pytest.raises(ValueError) as error:
        EnvPool(case["spec"].format_map(paths), 1, 1)
    said = str(error.value)
    assert said.startswith(case["line"].format_map(paths)) and "\n" not in said


def test_a_pool_has_a_worker(file):
    with pytest.raises(ValueError, match="above 0"):
        EnvPool(f"{file}:Env", 0, 1)


def test_no_torch_in_a_worker(file):
    """Schemas are made with transformers, in the process that shows them to the model and in no other."""
    specs = f"{file}:Env", f"{file}:TOOLS", f"{file}:Counter"
    specs += "envs/calculator.py:Calculator", "envs/calculator.py:TOOLS", "envs/guess.py:Guess"
    code = f"import sys, envs; from envs.pool import *; from envs.tools import *; [*map(load_env, {specs})]"
    code += "; print([m for m in ('torch', 'transformers', 'vllm', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


def test_failures_at_the_start(file, pools):
    pool = pools(f"{file}:Env", 2, 60)
    ask(pool, b="x")
    for first, why in (("broken", "error: OSError: no such game"), (threading.Lock(), "error: .*pickle")):
        pool.step("key", "", {"first": first})
        [answer] = pool.answers(wait=True)
        assert re.match(why, answer["failure"])
    pool.clear()
    assert ask(pool, b="new")["b"]["messages"][0]["content"] == "hello new"


def test_what_an_environment_says_can_be_sent(file, pools):
    pool = pools(f"{file}:Env", 2, 60)
    answers = ask(pool, large="large", half="half", lock="lock")
    assert answers["large"]["messages"] == [{"role": "tool", "name": "n", "content": "x" * 2**20}]
    assert answers["half"]["messages"][0]["content"] == "?!" and "pickle" in answers["lock"]["failure"]


@pytest.mark.parametrize("case", golden("hostile_replies"), ids=lambda case: str(case["reply"]))
def test_a_process_that_is_taken_over_ends_its_trajectory_only(file, pools, monkeypatch, case):
    """How a trajectory ended is not for it to say: the word before the colon becomes its finish_reason."""
    monkeypatch.setattr("envs.pool.Worker.call", lambda *_, **__: case["reply"])
    answer = ask(pools(f"{file}:Env", 1, 60), a="x")["a"]
    assert answer["failure"].startswith(case["failure"]) and answer["messages"] is answer["reward"] is None


def test_state_goes_from_process_to_process(file, pools):
    pool = pools(f"{file}:Env", 3, 60)
    keys = [f"k{i}" for i in range(6)]
    said = dict.fromkeys(keys, "hello")
    for turn in range(10):
        answers = ask(pool, **{key: f"{key}-{turn}" for key in keys})
        for key in keys:
            said[key] += f" {key}-{turn}"
            assert answers[key]["messages"][0]["content"] == said[key]
    used = ask(pool, **dict.fromkeys(keys, "processes"))
    processes = {int(pid) for answer in used.values() for pid in answer["messages"][0]["content"].split()}
    assert len(processes) == 3 and os.getpid() not in processes
    pool.step("k0", "x", {})
    with pytest.raises(RuntimeError, match="under way"):
        pool.clear()
    assert len(pool.answers(wait=True)) == 1


def leaks():
    """Files, threads, and helper processes that are there now."""
    workers = [task.read_text().split() for task in Path("/proc/self/task").glob("*/children")]
    return len(os.listdir("/proc/self/fd")), threading.active_count(), sum(map(len, workers))


def test_many_trajectories_leave_nothing(file, pools):
    pool = pools(f"{file}:Env", 4, 20)
    chance = random.Random(0)
    ask(pool, **dict.fromkeys("abcdefgh", "x"))
    before = leaks()
    texts = ["say"] * 80 + ["large"] + ["deep", "fail", "finish"] * 6 + ["end"]
    turns = dict.fromkeys(range(300), 0)
    open_ = 0
    for key in turns:
        pool.step(key, chance.choice(texts), {"first": str(key)})
        open_ += 1
    while open_:
        for answer in pool.answers(wait=True):
            open_ -= 1
            turns[answer["key"]] += 1
            if answer["messages"] and turns[answer["key"]] < 8:
                assert answer["reward"]["score"] == turns[answer["key"]] + 1
                pool.step(answer["key"], chance.choice(texts), {"first": "another"})
                open_ += 1
    assert max(turns.values()) == 8 and sum(turns.values()) > 900
    files, threads, processes = leaks()
    assert files <= before[0] + 4  # the socket of a dead process stays until its successor
    assert threads <= before[1] and processes <= before[2]
    pool.clear()
    pool.close()
    wait_for(lambda: leaks()[1] <= before[1] - 4 and leaks()[2] <= before[2] - 4)


def wait_for(condition):
    while not condition():
        time.sleep(0.02)


def test_a_killed_owner_leaves_no_process(file):
    script = f"""
        import os, signal, time
        from envs.pool import EnvPool
        pool = EnvPool("{file}:Env", 3, 1)
        pids = set()
        while len(pids) < 3:
            for key in range(3):
                pool.step(key, "processes", dict(first="x"))
            while answers := pool.answers(wait=True):
                pids.update(*(answer["messages"][0]["content"].split() for answer in answers))
        print(*pids, flush=True)
        pool.step(0, "hang", None)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, check=False
    )
    assert out.returncode == -signal.SIGKILL, out.stderr
    files = [Path(f"/proc/{pid}/cmdline") for pid in out.stdout.decode().split()]
    assert len(files) == 3
    wait_for(lambda: not any(f.exists() and b"rewards.manager.worker" in f.read_bytes() for f in files))


def test_calculator():
    calculator = load_env(f"{ROOT}/envs/calculator.py:Calculator")({})
    for case in golden("calculator"):
        [message] = calculator.step(f"It is <<1+1>>2, then <<{case['expression']}>> \n")
        assert message == {"role": "tool", "content": case["value"]}, case


def test_calculator_as_a_tool():
    env_class = load_env(f"{ROOT}/envs/calculator.py:TOOLS")
    calls = hermes("calculate", expression="1/0") + hermes("calculate", expression="4*3")
    said = [message["content"] for message in env_class({}).step(calls)]
    assert said == ["error: ValueError: division by zero", "12"]


@pytest.mark.parametrize("text", ("", "42", "<<1+1>>2", "<<1+1>", "<<1 < 2>>", "<1+1>>"))
def test_a_text_without_a_call_at_its_end_is_an_answer(text):
    assert load_env(f"{ROOT}/envs/calculator.py:Calculator")({}).step(text) is None


def test_python(pools, monkeypatch):
    pool = pools(f"{ROOT}/envs/python_sandbox.py:TOOLS", 1, 60)

    def python(code):
        pool.step(0, hermes("python", code=code), {})
        [answer] = pool.answers(wait=True)
        return answer["messages"][0]["content"]

    assert python("print(6 * 7)") == "42\n"
    assert python("x = 1") == "the program printed nothing"
    assert python("print(1); [][1]") == "1\nerror: IndexError: list index out of range"
    assert python("raise SystemExit(3)") == "error: exit code 3"
    assert python("while True: pass") == "error: no end after 5 s"
    assert python("open('/etc/passwd')").startswith("error: ")
    monkeypatch.setattr("rewards.sandbox.START_S", 1)  # the wide bound of the clock
    monkeypatch.setattr("rewards.sandbox.BUSY", 0)
    env_class = load_env(f"{ROOT}/envs/python_sandbox.py:TOOLS")
    answer = step_env(env_class, None, {}, hermes("python", code="import time; time.sleep(99)"))
    assert answer == dict(error=f"SandboxError: {LOST}")  # the pool counts it as a failure


@pytest.mark.skipif(not find_spec("bm25s"), reason="it is in requirements-extra.txt")
def test_search(tmp_path, monkeypatch, pools):
    corpus = tmp_path / "corpus.jsonl"
    spec = f"{ROOT}/envs/search.py:TOOLS"
    for path in ("", corpus, tmp_path):
        monkeypatch.setenv("SEARCH_CORPUS", str(path))
        with pytest.raises(ValueError, match="set SEARCH_CORPUS"):
            load_env(spec)
    texts = ["A cat is a mammal.", "A dog barks.", "Cats and dogs; a cat, too, sleeps.", None]
    texts += [
        "巴黎是法国的首都。",
        "東京は日本の首都です。",
        "กรุงเทพเป็นเมืองหลวง",
        "Café Müller",
        "서울은 대한민국의 수도이다",
    ]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setenv("SEARCH_CORPUS", str(corpus))
    pool = pools(spec, 2, 60)
    assert len(list(tmp_path.iterdir())) == 2  # the index, and nothing that is left over

    def search(**arguments):
        pool.step(0, hermes("search", **arguments), {})
        [answer] = pool.answers(wait=True)
        return answer["messages"][0]["content"]

    assert search(query="cat mammal", k="1") == "[1] A cat is a mammal."
    assert search(query="barks", k=100) == "[1] A dog barks."
    for query, place in (("法国", 4), ("東京", 5), ("เมืองหลวง", 6), ("cafe muller", 7), ("수도", 8)):
        assert search(query=query, k=1) == f"[1] {texts[place]}"
    assert search(query="zebra") == search(query="", k=-1) == "nothing was found"
    assert search(k=1).startswith("error: TypeError")


def test_guess():
    game = load_env(f"{ROOT}/envs/guess.py:Guess")({"low": 1, "high": 100, "number": 42})
    rules = "Guess a number from 1 to 100."
    said = {"50": "lower", "1 to 10": "higher", "?": rules, "0": rules, "9" * 5000: rules, "-42": rules}
    for text, answer in said.items():
        assert game.step(text) == [{"role": "user", "content": answer}]
        assert game.reward() == 0
    assert game.step("<think>42</think> 41")[0]["content"] == "higher"
    assert game.step("So 50-42") is None and game.reward() == pytest.approx(0.9**7)


@pytest.mark.skipif(not find_spec("reasoning_gym"), reason="it is in requirements-reasoning-gym.txt")
def test_reasoning_gym(pools):
    import reasoning_gym

    entry = reasoning_gym.create_dataset("leg_counting", seed=1, size=1)[0]
    info = {"entry": repr(entry)}
    right = f"<answer>{entry['answer']}</answer>"
    pool = pools(f"{ROOT}/envs/reasoning_gym.py:Retry", 1, 120)

    def answer(key, text):
        pool.step(key, text, info)
        [answer] = pool.answers(wait=True)
        assert answer["failure"] is None
        return answer["messages"] and answer["messages"][0]["role"], answer["reward"]

    assert answer(0, right) == (None, 1)
    assert answer(1, "no idea") == ("user", 0)
    assert answer(1, right) == (None, 0.5)
    for role in ("user", "user", None):
        assert answer(2, "<answer>-1</answer>")[0] == role
    pool.step(3, "", {"entry": repr(entry | {"metadata": {"source_dataset": "n_queens"}})})
    assert "refused" in pool.answers(wait=True)[0]["failure"]


def test_reward_of_the_environment():
    spec = f"{ROOT}/rewards/env.py:compute_score"
    manager = RewardManager("naive", load_rewards(["none", spec], [1.0, 0.5]))
    rows = [
        {"data_source": "any", "solution_str": "", "ground_truth": "", "extra_info": {"env_reward": reward}}
        for reward in (0.5, {"score": 2, "last": "x"}, None)
    ]
    first, second, third = manager.score(rows)
    assert (first["score"], second["score"], second["last"]) == (0.25, 1.0, "x")
    assert third["failure"].startswith("ValueError: the environment gave no reward")


def test_prompts_of_the_environment(tmp_path, file):
    row = "([dict(role='user', content=f'{i}?')], dict(seed=i))"
    text = f"class Env:\n    step = len\n    rows = lambda: ({row} for i in range(5))\n"
    (tmp_path / "mine.py").write_text(text)
    environment.main(environment.Args(f"{tmp_path}/mine.py:Env", str(tmp_path), train_size=9, test_size=2))
    for split, seeds in dict(test=[0, 1], train=[2, 3, 4]).items():
        rows = load_rows(tmp_path / f"{split}.parquet", KINDS["RL"])
        assert [row["extra_info"]["seed"] for row in rows] == seeds
    environment.main(environment.Args(f"{tmp_path}/mine.py:Env", str(tmp_path / "all"), test_size=0))
    assert len(load_rows(tmp_path / "all/train.parquet", KINDS["RL"])) == 5
    for spec, what in (
        (f"{file}:Env", "has no `rows`"),
        (f"{tmp_path}/mine.py:Env", "--test_size 100: 5 tasks leave none to train"),
        (f"{ROOT}/envs/openenv.py:Remote", "set OPENENV_URL"),
    ):
        with pytest.raises(ValueError, match=what):
            environment.main(environment.Args(spec, str(tmp_path / "none")))


def test_examples_of_the_docs(tmp_path):
    page = (ROOT / "docs/guides/environments.md").read_text()
    (tmp_path / "mine.py").write_text("".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    game = load_env(f"{tmp_path}/mine.py:Countdown")({"left": 2})
    assert game.step("go") == [{"role": "user", "content": "1 left"}] and game.reward() == 0
    assert game.step("go") is None and game.reward() == 1
    assert load_env(f"{tmp_path}/mine.py:Multiply")({}).step("<<37*85>>")[0]["content"] == "3145"
    tools = load_env(f"{tmp_path}/mine.py:TOOLS")
    assert tools.tools[0]["function"]["parameters"]["required"] == ["city"]
    assert tools({}).step(hermes("temperature", city="Rome"))[0]["content"] == "21.5"
