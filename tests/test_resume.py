"""What may change when a run resumes: what decides what it learns is the same, or a line says what is not."""

import json
import os
import re
import shutil
import subprocess
import sys
from ast import literal_eval
from dataclasses import asdict, fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, each, load_weights, make_args, metrics, same
from conftest import changed as differ
from conftest import run as launch

from algos import agent, dapo, distill, dpo, grpo, grpo_nano, ppo, rm, sft
from data_prep.lib.schema import write_parquet
from docs.flags import flags
from system import checkpoints, files, resume
from system.run import clean

# flags of grpo.py that may change: rate and schedule, steps, frequencies, validation, tracker, memory, ranks
MAY = set(
    "output_dir resume total_epochs total_steps save_freq test_freq keep_checkpoints tracker rollout_dump"
    " val_files val_group_size val_temperature lr lr_schedule warmup_steps hsdp_replicas tp_size offload"
    " gradient_checkpointing compile max_tokens_per_microbatch gpu_memory_utilization attn_implementation"
    " reward_timeout_s".split()
)
OTHER = dict(seed=2, adv_estimator="rloo", kl_kind="k1", loss_agg="seq-mean-token-mean", policy_loss="gspo")


def changed(args, name):
    """The arguments with another value of one flag."""
    value = getattr(args, name)
    if name in OTHER:
        return replace(args, **{name: OTHER[name]})
    kinds = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value / 2 + 0.1}
    kinds |= {tuple: lambda: (*value, *value[:1]) or ("1",), str: lambda: f"{value}x", type(None): lambda: 1}
    return replace(args, **{name: kinds[type(value)]()})


SAMPLED = "grpo", "grpo_nano", "dapo", "ppo", "agent", "distill"
PAGE = ROOT / "docs/guides/resume.md"


def table():
    """Rows of the page: flags of grpo.py that may change when it resumes, by their section."""
    sections = {}
    for section, name, *_ in flags(ROOT / "algos/grpo.py"):
        if name in resume.MAY_CHANGE:
            sections.setdefault(section, []).append(f"`--{name}`")
    return "".join(f"| {section} | {', '.join(names)} |\n" for section, names in sections.items())


def test_the_page_has_the_table():
    """`PYTHONPATH=. python tests/test_resume.py` writes it."""
    assert f"|---|---|\n{table()}\n" in PAGE.read_text()


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run with a checkpoint -> its arguments. Its files are in the directory."""
    monkeypatch.setattr("system.files.HELD", {})
    model, step = tmp_path / "model", tmp_path / "run/checkpoints/step_000001"
    model.mkdir()
    (model / "pytorch_model.bin").write_bytes(bytes(range(256)) * 9000)
    for name in ("tokenizer", "config", "generation_config", "processor_config"):
        (model / f"{name}.json").write_text('{"x": 1, "y": {}}')
    write(tmp_path, [dict(x=[1, None]), dict(x=None)] * 700)
    (tmp_path / "reward.py").write_text("import os, helper\nfrom own import *\nREADS: tuple = ('JUDGE',)")
    (tmp_path / "helper.py").write_text("A = READS = 1, 'RULES'\ndef f():\n    from own.deep import x")
    (tmp_path / "own").mkdir()
    for name in ("template.jinja", "own/__init__.py", "own/deep.py", "rules.txt"):
        (tmp_path / name).write_text("x")
    monkeypatch.setenv("JUDGE", '{"long": "' + 300 * "x" + '"}')
    monkeypatch.setenv("RULES", f"{tmp_path}/rules.txt")
    files = dict(train_files=(f"{tmp_path}/rows.parquet",), chat_template=f"{tmp_path}/template.jinja")
    files |= dict(reward_fn=(f"{tmp_path}/reward.py:score",), output_dir=f"{tmp_path}/run")
    args = grpo.Args(model=str(model), **files)
    step.mkdir(parents=True)
    forget()
    assert resume.open_run(args) is None
    (tmp_path / "run/args.json").write_text(json.dumps(asdict(args)))
    (step / "trainer_state.json").write_text(json.dumps(dict(step=1, content=resume.content(args))))
    (step.parent / "latest").symlink_to(step.name)
    return args


def write(out, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows), out / "rows.parquet", **options)


def forget():
    """As in a new process."""
    files.digest_of_file.cache_clear()
    files.digests_of_model.cache_clear()


@pytest.mark.parametrize("name", [field.name for field in fields(grpo.Args)])
def test_what_changes_and_what_a_resume_says(begun, name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # which --offload and --compile need
    assert resume.open_run(begun).name == "step_000001"
    args = changed(begun, name)
    if name in MAY - {"output_dir", "resume", "tracker"}:
        assert resume.open_run(args).name == "step_000001"
    elif name not in MAY | {"model"}:
        line = rf"holds a run with other arguments .*--{name} .* there, .* now"
        with pytest.raises(SystemExit, match=line):
            resume.open_run(args)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("model/pytorch_model.bin", "--model .* another pytorch_model.bin"),
        *[(f"model/{x}.json", f"--model .* another {x}.json") for x in ("config", "processor_config", "a")],
        ("model/chat_template.jinja", "--model .* another chat_template.jinja"),
        ("rows.parquet", "--train_files .* another content"),
        *[(x, "--reward_fn .* another content") for x in ("reward.py", "own/deep.py", "rules.txt", "JUDGE")],
        ("template.jinja", "--chat_template .* another content"),
    ],
)
def test_the_content_of_files_counts(begun, tmp_path, file, says, monkeypatch):
    """A run that begins from the checkpoint may have other data and rewards."""
    if file == "JUDGE":
        monkeypatch.setenv(file, "another")
    elif file == "rows.parquet":
        write(tmp_path, [dict(x=[1, 2]), dict(x=None)] * 700)
    else:
        (tmp_path / file).write_bytes(b"2" * 256 * 9000)
    forget()
    may = says.startswith(("--train_files", "--reward_fn"))
    remedy = "begin in another one by --resume" if may else "choose another$"
    line = rf"^error: .* holds a run with other arguments \({says}\): put them back, or {remedy}"
    with pytest.raises(SystemExit, match=line):
        resume.open_run(begun)
    latest = f"{begun.output_dir}/checkpoints/latest"
    other = replace(begun, output_dir=str(tmp_path / "other"), resume=latest)
    if says.startswith(("--train_files", "--reward_fn")):
        assert resume.open_run(other).name == "step_000001"
    else:
        with pytest.raises(SystemExit, match=says):
            resume.open_run(other)


def test_names_and_spelling_do_not_count(begun, tmp_path, monkeypatch):
    """Another path, a hub's name, JSON, parquet and links that are written otherwise, a README."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    model, moved = tmp_path / "hub/models--own--name", tmp_path / "moved"
    shutil.copytree(tmp_path / "model", model / "snapshots/1")
    (model / "refs").mkdir()
    (model / "refs/main").write_text("1")
    (model / "snapshots/1/config.json").write_text('{"y":{},"x":1}')
    (model / "snapshots/1/README.md").write_text("new")
    shutil.copytree(tmp_path / "own", moved / "own")
    for name in ("reward.py", "helper.py", "rows.parquet", "template.jinja"):
        shutil.copy(tmp_path / name, moved / name)
    write(moved, [dict(x=[1, None]), dict(x=None)] * 700, compression="zstd", row_group_size=90)
    forget()
    own = dict(train_files=("moved/rows.parquet",), chat_template="moved/template.jinja")
    own["chat_template_kwargs"] = " { } "
    args = replace(begun, model="own/name", reward_fn=(f"{moved}/reward.py:score",), **own)
    assert resume.open_run(args).name == "step_000001"
    with pytest.raises(SystemExit, match="--reward_fn"):
        resume.open_run(replace(args, reward_fn=(f"{moved}/reward.py:other",)))


TRAINERS = sft, rm, dpo, grpo_nano, dapo, ppo, agent, distill


@each(*TRAINERS)
def test_a_run_of_another_script_is_not_resumed(script, begun, tmp_path):
    """Not in its directory and not from its checkpoint, whatever the flags; its weights are named."""
    latest = f"{begun.output_dir}/checkpoints/latest"
    hf = f"{os.path.realpath(latest)}/hf"
    name = f"{script.__name__.rpartition('.')[2]}.py"
    own, other = begun.output_dir, f"{tmp_path}/new"
    remedy = f"to begin with its weights, pass --model {hf} in its place"
    for where, what, then in (
        (dict(output_dir=own), f"--output_dir {own} holds", f"choose another; its weights are {hf}"),
        (dict(output_dir=other, resume=latest), f"--resume {latest} is of", remedy),
    ):
        args = make_args(script, model=begun.model, train_files=begun.train_files, **where)
        line = f"error: {what} a run of grpo.py, this is {name}: {then}"
        with pytest.raises(SystemExit, match=f"^{re.escape(line)}$"):
            resume.open_run(args)


def test_a_copy_without_links_goes_on(begun, tmp_path):
    """`latest` is missing there, or a text; a run without a checkpoint is one of its script all the same."""
    run = tmp_path / "run"
    latest = run / "checkpoints/latest"
    latest.unlink()
    shutil.copytree(run / "checkpoints/step_000001", run / "checkpoints/step_000001_best")
    assert resume.open_run(begun).name == "step_000001"
    latest.write_text("step_000001")
    assert resume.open_run(begun).name == "step_000001"
    latest.unlink()
    shutil.rmtree(run / "checkpoints")
    assert resume.open_run(begun) is None
    file = run / "args.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(program="dapo.py")))
    with pytest.raises(SystemExit, match=r"run of dapo\.py, this is grpo\.py: choose another$"):
        resume.open_run(begun)


def test_flags_of_one_side_count(begun, tmp_path):
    """A run of a version with a flag that is gone, and one from before a flag: then it had its default."""
    file = tmp_path / "run/checkpoints/step_000001/trainer_state.json"
    state = json.loads(file.read_text())
    flags = state["content"]["flags"]

    def begin(flags):
        file.write_text(json.dumps(state | dict(content=state["content"] | dict(flags=flags))))

    begin({key: value for key, value in flags.items() if key != "kl_kind"})
    assert resume.open_run(begun)
    with pytest.raises(SystemExit, match=r"--kl_kind k3\+ there, k1 now"):
        resume.open_run(replace(begun, kl_kind="k1"))
    begin(flags | dict(kl_kind="k3"))  # another default, of a flag that was not read
    assert resume.open_run(begun)
    with pytest.raises(SystemExit, match=r"--kl_kind k3 there, k3\+ now; --use_kl_loss"):
        resume.open_run(replace(begun, use_kl_loss=True))
    begin({key: value for key, value in flags.items() if key != "chat_template_kwargs"})
    assert resume.open_run(begun)
    begin(flags | dict(gone=2))
    with pytest.raises(SystemExit, match="--gone 2 there, not a flag now"):
        resume.open_run(begun)


@pytest.mark.parametrize("lost", ("args.json", "flags"))
def test_flags_are_compared_without_args_json(begun, tmp_path, lost):
    """A checkpoint has them; one of an older version does not."""
    file = tmp_path / "run/checkpoints/step_000001/trainer_state.json"
    if lost == "flags":
        state = json.loads(file.read_text())
        del state["content"]["flags"]
        file.write_text(json.dumps(state))
    else:
        (tmp_path / "run/args.json").unlink()
    assert resume.open_run(begun)
    with pytest.raises(SystemExit, match="--seed 1 there, 7 now"):
        resume.open_run(replace(begun, seed=7))


def test_a_checkpoint_may_be_anywhere(tmp_path):
    """Also where a machine mounts it, without a run around it; what its file does not say is not compared."""
    assert resume.saved(Path("/checkpoint")) == ({}, {})
    for content in ([], None, "x"):
        (tmp_path / "trainer_state.json").write_text(json.dumps(dict(step=1, content=content)))
        assert resume.saved(tmp_path) == ({}, {})


def test_what_is_no_line_of_metrics_goes(tmp_path):
    lines = (
        '{"training/global_step": 1}',
        '{"training/global_step": null}',
        "{}",
        "[1]",
        '{"training/global_step": 2}',
        '{"training/glo',
        "}",
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    clean(tmp_path, 1, make_args(grpo))
    assert (tmp_path / "metrics.jsonl").read_text() == f"{lines[0]}\n"


def test_a_run_that_begins_from_another_has_its_arguments(begun, tmp_path):
    latest = f"{begun.output_dir}/checkpoints/latest"
    other = replace(begun, output_dir=str(tmp_path / "other"), resume=latest)
    assert resume.open_run(replace(other, total_steps=9, train_files=("x",), seed=7)).name == "step_000001"
    with pytest.raises(SystemExit, match=r"is of a run with other arguments .*--lora_alpha .* there, 33 now"):
        resume.open_run(replace(other, lora_alpha=33))


def test_two_runs_in_one_directory(begun):
    """The second says which process has it; a kill frees it."""
    program = "import sys, time; from system import files; from pathlib import Path;"
    program += "files.hold(Path(sys.argv[1]), ''); print('held', flush=True); time.sleep(600)"
    for file in files.HELD.values():  # a new process has none
        file.close()
    files.HELD.clear()
    start = [sys.executable, "-c", program, begun.output_dir]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(SystemExit, match=f"is in use by process {process.pid} of .*: wait for it"):
            resume.open_run(begun)
        process.kill()
    files.HELD.clear()
    assert resume.open_run(begun).name == "step_000001"


def test_a_directory_that_cannot_be_made(begun, tmp_path):
    with pytest.raises(SystemExit, match=r"^error: --output_dir .*/reward.py/run cannot be made: "):
        resume.open_run(replace(begun, output_dir=f"{tmp_path}/reward.py/run"))


def test_a_run_that_was_copied_with_its_links_followed(begun, tmp_path, capsys):
    root, step = tmp_path / "run/checkpoints", tmp_path / "run/checkpoints/step_000002"
    (root / "latest").unlink()
    (root / "latest").mkdir()
    (root / "latest/trainer_state.json").write_text((root / "step_000001/trainer_state.json").read_text())
    assert resume.open_run(begun) == root / "latest"
    step.mkdir()
    checkpoints.point_latest_at(step, 0)
    assert (root / "latest").readlink().name == "step_000002" and (root / "step_000001").is_dir()
    assert "latest is a copy of a checkpoint: it is a link again" in capsys.readouterr().err
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_000001", "step_000002"]


def test_whatever_ends_a_run_saves_first(tiny, arithmetic, tmp_path):
    """Where all ranks end before an update; the same command then gives the weights of a straight run."""
    worker = ROOT / "tests/workers/ends.py", tiny, arithmetic / "train.parquet", tmp_path
    done = launch(*worker, "straight", "before", "stops", "during", "full", ranks=2)
    found = [line.split("|")[1:] for line in done.stdout.splitlines() if line.startswith("END")]
    again = "ended", "ended"
    firsts = dict(before=["before the update"] * 2, stops=["error: all ranks stop", 1])
    firsts |= dict(during=["during the update"] * 2, full=["error: all ranks stop", 1])
    expected = [("straight", [*again])]
    for name, first in firsts.items():
        expected += [(name, first), (name, [*again])]
    assert [(name, literal_eval(how)) for name, how in found] == expected
    straight = load_weights(tmp_path / "straight/checkpoints/latest/hf")
    for name, first in dict(before=3, stops=3, during=1, full=1).items():  # the step that was done again
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert metrics(tmp_path / name).keys() == {1, 2, 3, 4} and len(lines) == 4
        steps = sorted(path.name for path in (tmp_path / name / "checkpoints").glob("step_*"))
        assert steps == ["step_000002"] * (first == 3) + ["step_000004"]
        weights = load_weights(tmp_path / name / "checkpoints/latest/hf")
        assert all(torch.equal(x, weights[key]) for key, x in straight.items())
    for name in ("before", "stops"):
        line = f"saved first: {tmp_path / name}/checkpoints/step_000002\n"
        assert line in (tmp_path / name / "log.txt").read_text()
    assert done.stdout.count("saved first: ") + done.stderr.count("saved first: ") == 2
    assert "is lost: error: " in done.stderr and "No space left on device" in done.stderr


@pytest.mark.parametrize("names", ["sft rm dpo grpo grpo_nano", "dapo ppo agent distill"])
def test_whatever_ends_a_step_after_its_update(names, one_layer, arithmetic, tmp_path):
    """At each statement of a trainer up to the checkpoint: weights of all models, and metrics."""
    rows, pairs = arithmetic / "val.parquet", tmp_path / "pairs.parquet"
    texts = [(row["prompt"], row["extra_info"]["answer"]) for row in pq.read_table(rows).to_pylist()]
    write_parquet([dict(prompt=prompt, chosen=text, rejected="0") for prompt, text in texts], pairs)
    worker = ROOT / "tests/workers/statements.py", one_layer, rows, pairs, tmp_path
    done = launch(*worker, *names.split())
    found = re.findall(r"^ENDED\|(\w+)\|(\d+)", done.stdout, re.MULTILINE)
    assert [name for name, _ in found] == names.split()
    for name, times in found:
        straight, ended = tmp_path / name / "straight", tmp_path / name / "ended"
        assert (ended / "log.txt").read_text().count("saved first: ") == int(times) > 9
        same(ended, straight, steps=metrics(ended))
        models = {path.parent.name for path in (ended / "checkpoints/latest").glob("*/config.json")}
        for part in models:
            assert not differ(*(out / "checkpoints/latest" / part for out in (straight, ended))), (name, part)
        out = tmp_path / name / "rejected"
        if name in SAMPLED:
            assert f"REJECTED|{name}|{['error: step 2 is rejected'] * 2}\n" in done.stdout
            assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest", "step_000001"]
            assert list(metrics(out)) == [0, 1]


def test_one_rank_that_ends_alone_does_not_wait_for_ever(tiny, arithmetic, tmp_path):
    worker = ROOT / "tests/workers/ends.py", tiny, arithmetic / "train.parquet", tmp_path
    done = launch(*worker, "alone", ranks=2, check=False)
    assert done.returncode and "what was trained since the last checkpoint is lost" in done.stderr
    assert not (tmp_path / "alone/checkpoints").exists()


def test_a_run_without_a_checkpoint_may_have_other_flags(begun, tmp_path):
    """Its error may ask for another flag; with a checkpoint the flag would have to agree."""
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert resume.open_run(replace(begun, temperature=0.5)) is None
    with pytest.raises(SystemExit, match="already holds a run"):
        resume.open_run(replace(begun, resume="never"))


if __name__ == "__main__":
    old = re.search(r"\| Section \|.*\n\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text())
    PAGE.write_text(PAGE.read_text().replace(old[1], table()))
