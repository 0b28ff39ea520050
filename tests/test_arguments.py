"""Command lines and trackers: what the user meets first."""

import ast
import json
import logging
import math
import re
import runpy
import ssl
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

import httpx2
import huggingface_hub
import pytest
import torch
import tyro
from conftest import ROOT
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils._http import default_client_factory

from algos import grpo
from system.arguments import FLAGS, KNOWN, MODELS, foreign, impossible, no_model, parse, unusable
from system.metrics import data_sheet_speed
from system.run import Run, open_run, open_tracker, ranks_on

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
    """What is known is of flags that are there, each of them once, and what idles a flag too."""
    flags = {name: kind for script in SCRIPTS for name, kind in flags_of(script).items()}
    numbers = {name for name, kind in flags.items() if re.search("int|float", re.sub("Literal.*", "", kind))}
    any_value = {"entropy_coeff", "reward_weights", "rollout_rs_threshold"}
    ranges = {name for name, known in KNOWN.items() if known.range[2]}
    assert ranges | any_value | {"top_k"} == numbers
    named = [flag for names in FLAGS.values() for flag in names.split()]
    assert len(named) == len(set(named)) == len(KNOWN)
    assert {*named} | {other for known in KNOWN.values() for other, _ in known.idle} <= set(flags)
    source = (ROOT / "system/arguments.py").read_text()
    assert len(FLAGS) == len(re.findall(r"^    Known\(", source, re.MULTILINE))  # no two rows are equal


RL, OFFLINE = "grpo dapo ppo agent distill", "sft dpo rm"
ALL = f"{RL} {OFFLINE}"
BOUNDS = "--rollout_rs needs --rollout_rs_threshold HIGH, at least 1, or 0 <= LOW <= HIGH;"
BOUNDS += " with off_policy one value, at least 0"
SHORT = "--max_tokens_per_microbatch 63 is less than"
ROW = "--max_tokens_per_microbatch %d is less than a row, %d tokens"
TOP_P = "--top_p 0.9: pass --rollout_is None and no --rollout_rs"
TEXTS = "--text_key: pass no --messages_key and no --env"
FLASH = dict(attn_implementation="flash_attention_2")
RANKS = "--lora_kind adalora need --lora_rank"
few = lambda tokens, **more: dict(more, max_tokens_per_microbatch=tokens)
two = dict(world=2, sp_size=2)
alone = dict(train_batch_size=1, ppo_mini_batch_size=1)
rejects = lambda level, *bounds: dict(rollout_rs=level, rollout_rs_threshold=bounds)
TOGETHER = (  # scripts, their flags, what is said
    (RL, alone | dict(train_batch_size=8, ppo_mini_batch_size=3), "--train_batch_size 8 is not"),
    (RL, dict(world=3, tp_size=2), "3 ranks are not a multiple of --tp_size 2"),
    ("generate", dict(tp_size=2), "1 ranks: use a multiple of --tp_size 2"),
    (ALL, dict(hsdp_replicas=2), "1 ranks are not a multiple of --hsdp_replicas 2"),
    ("dapo sft", dict(world=4, sp_size=3), "4 ranks are not a multiple of --sp_size 3"),
    (RL, few(1535), ROW % (1535, 1536)),
    (RL, few(1536), None),
    ("dapo", few(767, **two), ROW % (767, 768)),
    ("dapo", few(768, **two), None),
    ("dpo rm", few(63, max_length=32), f"{SHORT} 64, twice --max_length"),
    ("dpo", few(31, max_length=32, loss="kto"), "--max_tokens_per_microbatch 31 times --sp_size 1 is"),
    ("dpo rm", few(64, max_length=32), None),
    ("sft", few(15, **two, max_length=32), "--max_tokens_per_microbatch 15 times --sp_size 2 is"),
    ("sft", few(16, **two, max_length=32), None),
    (OFFLINE, dict(max_length=1), "--max_length 1 is less than two tokens"),
    (ALL, FLASH | dict(compute_dtype="float32"), "--attn_implementation flash_attention_2 needs"),
    (ALL, FLASH | dict(compute_dtype="bfloat16"), None),
    (RL, dict(temperature=0.001), "--temperature 0.001: vLLM samples at 0.01 or above"),
    (RL, dict(temperature=0.01), None),
    ("generate", dict(temperature=0.0, top_p=0.9), None),
    (RL, dict(top_p=0.9), TOP_P),
    (RL, dict(top_p=0.9, rollout_is=None, **rejects("token", 2.0)), TOP_P),
    (RL, dict(top_p=0.9, rollout_is=None), None),
    ("generate", dict(top_k=-2), "--top_k -2: use -1 (off) or a number of tokens"),
    *((RL, rejects("token", *x), BOUNDS) for x in ((), (3, 2), (-1, 2), (1, 2, 3), (0.5,))),
    *((RL, rejects("off_policy", *x), BOUNDS) for x in ((0.1, 2), (-0.1,))),
    *((RL, rejects("geometric", *x), None) for x in ((1,), (0, 0.5), (2, 2))),
    (RL, rejects("off_policy", 0.0), None),
    ("dapo", dict(group_size=1), "--group_size 1: one response has no spread, so its group would be dropped"),
    ("dapo", dict(overlong_buffer=1025), "--overlong_buffer 1025 is not within --max_response_length"),
    ("dapo", dict(overlong_buffer=1024), None),
    ("dapo", dict(partial_rollout=True, max_staleness=0), "--partial_rollout needs"),
    ("dapo", dict(lr_schedule="cosine"), "--lr_schedule cosine needs --total_steps: dropped"),
    ("dapo", dict(lr_schedule="cosine", total_steps=9), None),
    ("dapo", dict(max_staleness=0), None),
    ("sft", dict(messages_key="x", env="x"), None),
    ("sft", dict(text_key="text"), None),
    *(("sft", {"text_key": "text", name: "x"}, TEXTS) for name in ("env", "messages_key")),
    *(("sft", x, f"--qlora and {RANKS}") for x in (dict(qlora=True), dict(lora_kind="adalora"))),
    ("dpo", dict(qlora=True), "--qlora needs --lora_rank"),
    ("sft dpo", dict(qlora=True, lora_rank=4), "--qlora needs bitsandbytes: pip install bitsandbytes"),
    ("sft", dict(liger=True), "--liger needs a GPU and Liger's kernels: pip install liger-kernel"),
    *(
        ("sft", two | x, "--sp_size 2 needs --packing, and --attn_implementation sdpa")
        for x in (dict(packing=False), dict(attn_implementation="eager"))
    ),
)


@pytest.mark.parametrize(("scripts", "given", "line"), TOGETHER)
def test_flags_that_cannot_work_together(scripts, given, line, monkeypatch):
    """And a copy of a script that has not one of these flags does not break."""
    monkeypatch.setattr("system.arguments.find_spec", lambda name: None)
    monkeypatch.setenv("WORLD_SIZE", str(given.get("world", 1)))
    given = {name: value for name, value in given.items() if name != "world"}
    for script in scripts.split():
        flags = defaults_of(f"{script}.py")
        assert given.keys() <= flags.keys()
        found = impossible(flags | given)
        assert found is None if line is None else found.startswith(line)
        for name in flags:  # none raises
            impossible({other: value for other, value in (flags | given).items() if other != name})


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_lacks_a_flag_or_all_of_them(script):
    """With the defaults nothing is impossible, whatever a copy leaves out."""
    flags = defaults_of(script)
    assert impossible(flags) is None and impossible({}) is None
    for name in flags:
        assert impossible({other: value for other, value in flags.items() if other != name}) is None


VARIANT = "--policy_loss gpso is none of clip, cispo, dppo, gspo, sapo, nor FILE.py:NAME"


@pytest.mark.parametrize(
    ("script", "flags", "line"),
    (
        ("sft.py", "--max_length 1", "--max_length 1 is less than two tokens"),
        ("grpo.py", "--policy_loss gpso", VARIANT),
        ("agent.py", "--policy_loss gpso --env x", VARIANT),
    ),
)
def test_flags_are_looked_at_before_libraries_are_loaded(script, flags, line, tmp_path):
    """Also where the model is missing, which would be looked for on the hub."""
    words = f"--model a/b --train_files a --output_dir {tmp_path}/run {flags}".split()
    assert answer(script, *words)[0] == f"error: {line} []\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("flag", "value"), (("offload", "always"), ("compile", True), ("liger", True)))
def test_what_needs_a_gpu(flag, value, tmp_path, monkeypatch):
    """Only torch knows whether there is one."""
    args = Tracked(str(tmp_path / "run"))
    setattr(args, flag, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=f"error: --{flag} needs a GPU"):
        open_run(args)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert open_run(args) is None


@pytest.mark.parametrize(
    ("values", "line"),
    (
        (dict(train_batch_size=0), "--train_batch_size 0 must be at least 1"),
        (dict(seed=-1), "--seed -1 must be at least 0"),
        (dict(top_p=0.0), "--top_p 0.0 must be above 0 and at most 1"),
        (dict(top_p=1.5), "--top_p 1.5 must be above 0 and at most 1"),
        (dict(lr=math.nan), "--lr nan must be finite"),
        (dict(kl_coef=math.inf), "--kl_coef inf must be finite"),
        (dict(reward_weights=(1.0, -math.inf)), "--reward_weights -inf must be finite"),
        (dict(entropy_coeff=-0.5), None),
        (dict(kl="full", clip_ratio_high=0.1), "--clip_ratio_high 0.1 has no effect with --kl full"),
        (dict(train_files=()), "train_files needs at least one value"),
        (dict(val_files=()), None),
        (dict(k=(1, 0)), "--k 0 must be at least 1"),
        (dict(label_smoothing=0.5), "--label_smoothing 0.5 must be at least 0 and below 0.5"),
        (dict(label_smoothing=0.49), None),
        (dict(mine=math.nan), "--mine nan must be finite"),
        (dict(rollout_is_threshold=3.0), None),  # of a script without --rollout_is
        (dict(kl_target=0.2, kl_coef=0.0), "--kl_target 0.2 has no effect with --kl_coef 0"),
        (dict(kl_loss_coef=0.2, use_kl_loss=False), "--kl_loss_coef 0.2 has no effect with --use_kl_loss"),
        (dict(decay_steps=4, lr_schedule="constant"), "--decay_steps 4 has no effect with --lr_schedule"),
        (dict(total_steps=None, grad_clip=1e9, kl_target=0.2, kl_coef=0.1), None),
    ),
)
def test_values_out_of_range_and_flags_without_effect(values, line):
    defaults = dict(kl_loss_coef=0.001, decay_steps=0, train_files=MISSING, val_files=())
    found = unusable(values, defaults)
    assert found is None if line is None else found.startswith(line)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--learning_rate 1e-6", "--learning_rate is no flag: here it is --lr (docs/reference/from-trl.md)"),
        ("--lr_scheduler_type=cosine", "here it is --lr_schedule ("),
        ("--num-generations 8", "--num-generations is no flag: here it is --group_size ("),
        ("--scale_rewards none", "here it is --adv_estimator dr_grpo ("),
        ("--vllm_mode colocate", "here it is always; --gpu_memory_utilization, --tp_size ("),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "here it is --lr (docs/reference/from-verl.md)"),
        ("trainer.save_freq=20", "here it is --save_freq ("),
        ("--use_kl_loss True", "--use_kl_loss takes no value: leave True out"),
        ("--use_kl_loss false", "--use_kl_loss takes no value: leave --use_kl_loss out"),
        ("--use_kl_loss=False", "--use_kl_loss takes no value: leave --use_kl_loss out"),
        ("--output_dir a=lr=1 --model runs/x.lr=1e-6", None),  # values, not words of verl
        ("--output_dir rollout.n=8 --train_files a x/data.n=8.parquet", None),
        ("--weight_decay=0.1 --beta2 x --no_use_kl_loss", None),
    ],
)
def test_words_of_other_libraries(words, said):
    found = foreign(fields(grpo.Args), words.split())
    assert found == said if said is None else said in found


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_wrong_flags_are_answered_before_libraries_are_loaded(script):
    out, _ = answer(script, "--help")
    assert out.splitlines()[-1] == "0 []"
    first = (ROOT / "algos" / script).read_text().split('"""')[1].split()[:4]
    assert " ".join(out.partition("\n\n")[2].split()[:4]) == " ".join(first)
    words = {"export.py": ("a", "b"), "quantize.py": ("a", "b"), "report.py": ("a", "--output", "b")}
    words = words.get(script, ())
    out, err = answer(script, *words, "--no_such_flag", "1")
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


CODE, MESSAGE = "X-Error-Code", "X-Error-Message"
GATED, NONE = "gated on the hub: accept the licence on its page", "none on the hub; a private one needs `hf"
REFUSED, AWAY = "the hub refuses (HfHubHTTPError: ", "the hub cannot be reached ("


@pytest.mark.parametrize(
    ("found", "line"),
    (
        ((401, {CODE: "GatedRepo", MESSAGE: "Access to model a/b is restricted."}), GATED),  # no log-in
        ((403, {CODE: "GatedRepo", MESSAGE: "Your request is awaiting a review."}), GATED),
        ((401, {MESSAGE: "Invalid username or password."}), NONE),  # none, and no log-in
        ((404, {CODE: "RepoNotFound", MESSAGE: "Repository not found"}), NONE),
        ((401, {MESSAGE: "Invalid credentials in Authorization header"}), f"{REFUSED}Client error '401 Unau"),
        ((403, {MESSAGE: "Access to this resource is disabled."}), "the hub refuses (DisabledRepoError: "),
        ((404, {CODE: "EntryNotFound"}), "the hub refuses (RemoteEntryNotFoundError: 404 "),
        ((404, {}), f"{REFUSED}Client error '404 Not Found'"),  # a mirror
        ((429, {}), f"{REFUSED}429 Too Many Requests"),
        ((500, {}), f"{REFUSED}Server error '500"),
        (httpx2.ConnectError("[Errno -2] Name or service not known"), f"{AWAY}ConnectError: [Errno -2] Name"),
        (httpx2.ReadTimeout("timed out"), f"{AWAY}ReadTimeout: timed out"),
        (httpx2.RemoteProtocolError("closed"), f"{AWAY}RemoteProtocolError: closed"),
        (httpx2.TooManyRedirects("many"), f"{AWAY}TooManyRedirects: many"),
        (ssl.SSLCertVerificationError("certificate"), f"{AWAY}SSLCertVerificationError"),
        (OfflineModeIsEnabled("unset HF_HUB_OFFLINE"), f"{AWAY}OfflineModeIsEnabled: unset HF_HUB_OFFLINE"),
        ((200, {}), None),
    ),
)
def test_a_model_that_the_hub_does_not_give(found, line, hub):
    """One line that says why, after one request."""
    asked = hub(found)
    said = no_model(dict(model="a/b"))
    assert said == line or said.startswith(f"--model a/b: no directory here, and {line}") and "\n" not in said
    assert asked == ["a/b"]


@pytest.mark.parametrize("flag", MODELS)
@pytest.mark.parametrize("name", ("models/none", "/no/such/place", "a b", "runs/one/two", "models/none/"))
def test_a_model_that_is_nowhere(flag, name, hub):
    """One line that names it; what cannot be a name of the hub is not asked for."""
    hub((404, {CODE: "RepoNotFound"}))
    why = NONE if name == "models/none" else "no name of the hub"
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
    monkeypatch.setattr("system.run.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"--tracker wandb is missing: pip install .*-extra.txt"):
        open_run(Tracked(str(tmp_path), "wandb"))


@pytest.mark.parametrize(
    "ranks, nodes, threads, cores, idle",
    [
        (2, 1, 1, 2, ""),
        (1, 1, 2, 2, ""),
        (2, 1, 1, None, ""),
        (2, 1, 1, 8, ", 6 of 8 cores idle: OMP_NUM_THREADS=4 or --nproc_per_node 8"),
        (4, 2, 3, 8, ", 2 of 8 cores idle: OMP_NUM_THREADS=4 or --nproc_per_node 8"),
    ],
)
def test_idle_cores_are_told(ranks, nodes, threads, cores, idle, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as vLLM's platform for CPUs leaves it
    monkeypatch.setattr("system.run.dist.get_world_size", lambda: ranks)
    monkeypatch.setattr("system.run.torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("system.run.psutil.cpu_count", lambda logical: cores)
    lm, trains = torch.nn.Linear(2000, 1000), "\ntrains 2M of 2.001M weights"
    some = f"{ranks} rank{'s' * (ranks > 1)}"
    assert ranks_on(lm) == f"{some} on cpu{idle}{trains}"
    monkeypatch.setattr("system.run.compute_device", lambda: torch.device("cuda"))
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
    for name in ("run", "run", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
        open_tracker(Tracked(str(tmp_path / name), "wandb"), 0)
    first, again, other = (flags["id"] for flags in seen)
    assert first == again != other and {flags["resume"] for flags in seen} == {"allow"}


@pytest.mark.parametrize(("steps", "total", "said"), [(6, 6, "done"), (6, 3, "done"), (2, 6, "stopped; ")])
def test_how_a_run_ends(steps, total, said, tmp_path, monkeypatch, capsys):
    """Also one that has more steps than --total_steps says now."""
    monkeypatch.setattr("system.run.leave", lambda code: None)
    monkeypatch.setattr("system.run.ranks_on", lambda *_: "")
    monkeypatch.setattr(logging.getLogger("rewards"), "handlers", [])
    run = Run(Tracked(str(tmp_path / "run")))
    run.step = steps
    run.start(total, "", None)
    run.log({"actor/skipped_updates": 1.0})
    run.close()
    assert f"step {steps}: updates were skipped" in (tmp_path / "run/log.txt").read_text()
    assert f"step {steps} of {total}, {said}" in (tmp_path / "run/log.txt").read_text()


def test_a_signal_long_after_the_first_ends_the_run(tmp_path, monkeypatch):
    run, now = Run(Tracked(str(tmp_path / "run"))), [5.0]
    monkeypatch.setattr("system.run.time.monotonic", lambda: now[0])
    for now[0] in (5.0, 14.9):
        run.on_signal(15, None)
    assert run.signal == 15
    now[0] = 15.1
    with pytest.raises(SystemExit, match="143"):
        run.on_signal(15, None)


@pytest.mark.parametrize("flag", MODELS)
def test_adapters_and_runs_are_no_models(flag, tmp_path):
    """Only generate.py, which has --data, takes the directory of a run; the line names the model in it."""
    adapters, run = tmp_path / "adapters", tmp_path / "run"
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
    assert b"actor/lr" in written and b"output_dir" in written


@pytest.mark.parametrize(
    ("gpu", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H20", "bfloat16", 148),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB", "float32", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", None),
    ],
)
def test_the_data_sheet(gpu, dtype, teraflops, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: gpu)
    assert data_sheet_speed(dtype) == (teraflops and teraflops * 1e12)
