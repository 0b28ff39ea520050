"""What README and docs/ say of flags, commands, metrics and files is so."""

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib import import_module
from unicodedata import east_asian_width

import pytest
import tyro
from conftest import ROOT, documented

from benchmarks import gpu_memory
from data_prep.lib.schema import KINDS, load_rows
from system.arguments import unread, unusable

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "benchmarks/README.md"]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
CODE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
FOREIGN = set(  # of torchrun, Slurm, Docker, pip and other programs
    "--nnodes --nproc_per_node --rdzv_backend --rdzv_endpoint --rdzv_id --rdzv_conf --max-restarts"
    " --shutdown-timeout --standalone --no-deps --no-build-isolation --pid --nodes --ntasks-per-node"
    " --gpus-per-node --signal --time --requeue --open-mode"
    " --security-opt --num_processes --served-model-name --max-model-len"
    " --enforce-eager --dtype --system-prompt --private --structured-outputs-config"
    " --gpus --ipc --outfile --outtype --clear --enable-lora --max-lora-rank --lora-modules"
    " --model_args --tasks --apply_chat_template".split()
)
METRIC = re.compile(
    r"(actor|critic|rewards?|rollout_corr|logps|dapo|train|val|val-core|timing_s|timing_per_token_ms|perf|training|global_seqlen"
    r"|response_length|prompt_length)/[\w/*{}, @-]+"
)


@cache
def script_args(name):
    """The Args of a script of this repository, not run."""
    return import_module(name.removesuffix(".py").replace("/", ".")).Args


def flags_of(name):
    names = [f.name for f in fields(script_args(name))]
    return {f"--{no}{x}" for x in names for no in ("", "no-", "no_")} | {"--help"}


def commands(page):
    """[script, arguments] of the commands in a page's code blocks."""
    for block in CODE.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if not re.match(r"(srun |\w+=\S+ )*(python|torchrun)", line.strip()):
                continue
            words = shlex.split(line, comments=True)
            script = re.compile(r"(algos|data_prep|benchmarks)/\w+\.py")
            scripts = [i for i, word in enumerate(words) if script.fullmatch(word)]
            if scripts:
                yield words[scripts[0]], words[scripts[0] + 1 :]
    for line in re.findall(r"`((?:algos|data_prep)/\w+\.py [^`\n]*--\w+_dir [^`\n]*)`", page.read_text()):
        script, *words = shlex.split(line)
        yield script, words


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands(page):
    for script, words in commands(page):
        assert (ROOT / script).is_file(), script
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - flags_of(script)
        assert not unknown, f"{script}: {unknown}"
        if "..." not in words and not any(word.startswith("$") for word in words):
            values = vars(tyro.cli(script_args(script), args=words))
            defaults = {f.name: f.default for f in fields(script_args(script))}
            assert unusable(values, defaults, unread(values, script_args(script))) is None


def script_of(page):
    return ROOT / dict(rft="data_prep/rejection.py").get(page.stem, f"algos/{page.stem}.py")


ALGORITHMS = sorted({*(ROOT / "docs/algorithms").glob("*.md")} - {ROOT / "docs/algorithms/README.md"})


@pytest.mark.parametrize("page", ALGORITHMS, ids=lambda page: page.stem)
def test_read_the_code_names_what_is_there(page):
    """Names of code are in the script, or in what it shares with others."""
    places = (
        "system/*.py",
        "algos/variants/*.py",
        "data_prep/lib/cache.py",
        "envs/messages.py",
        "algos/grpo.py",
    )
    files = [script_of(page), *(path for place in places for path in ROOT.glob(place))]
    code = "".join(path.read_text() for path in files)
    section = page.read_text().split("## Read the code")[1].split("\n## ")[0]
    assert [x for x in re.findall(r"`([A-Za-z_]\w+)`", section) if not re.search(rf"\b{x}\b", code)] == []


@pytest.mark.parametrize(
    "page", [page for page in ALGORITHMS if page.stem != "rft"], ids=lambda page: page.stem
)
def test_key_flags_are_those_of_the_script(page):
    """And their defaults, where a number is said."""
    defaults = {f.name: f.default for f in fields(script_args(f"algos/{page.stem}.py"))}
    section = page.read_text().split("## Key flags")[1].split("\n### ")[0].split("\n## ")[0]
    for flags, said in re.findall(r"^\| (`--.*?) \| (.*?) \|", section, re.MULTILINE):
        flags, said = re.findall(r"--(\w+)", flags), said.replace("`", "").split(", ")
        assert set(flags) <= set(defaults)
        for flag, text in zip(flags, said):
            if re.fullmatch(r"[\d.e-]+", text) and defaults[flag] is not None:
                assert float(text) == defaults[flag], flag


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_of_the_repository_are_there(page):
    """FILE.py in text: a path from the root, the end of one, or what the page itself has the reader save."""
    if page.parent.name == "results" or page.parent.name == "benchmarks":  # history, with its commit
        return
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    text = page.read_text()
    saved = {
        *re.findall(r"(?:[Ss]ave (?:it|this) as|Write|保存为) `([\w/]+\.py)`", text),
        *("FILE.py", "mine.py", "platforms/cuda.py"),
    }
    said = {*re.findall(r"`([\w/]+\.py)(?::{1,2}\w+)?`", CODE.sub("", text))} - saved
    assert [x for x in said if not any(path.endswith(f"/{x}") for path in files)] == []
    for name, file in re.findall(r"`(\w+)` (?:of|in) `?([\w/]+\.py)`?", text):
        code = "".join((ROOT / path[1:]).read_text() for path in files if path.endswith(f"/{file}"))
        assert not code or re.search(rf"\b{name}\b", code), (name, file)


def test_the_chinese_readme_has_the_same_commands():
    """And the same code, scripts and figures; only comments and prose are translated."""

    def parts(name):
        text = (ROOT / name).read_text()
        lines = "".join(CODE.findall(text)).splitlines()  # a telephone shows few columns
        assert max(sum(1 + (east_asian_width(c) == "W") for c in line) for line in lines) <= 68
        blocks = [re.sub(r"(^| +)# .*", "", block, flags=re.MULTILINE) for block in CODE.findall(text)]
        cells = re.findall(r"\| (`[^`]+`|[\d.]+%?|yes) (?=\|)", text.replace("| 够 ", "| yes "))
        links = re.findall(r"\]\(((?!README)[^)]+)\)", text.replace(".zh-CN.svg", ".svg"))
        return blocks, cells, links

    assert parts("README.md") == parts("README.zh-CN.md")
    text = (ROOT / "README.zh-CN.md").read_text()
    assert not re.search(r"[，。：；]\n[^\n\d-]", text)  # GitHub shows the end of a line as a blank


def test_the_command_for_a_7b_model_is_one():
    """Of the README, of its page, and of the demo's last lines. It takes over a hundred steps of GSM8K."""
    [command] = re.findall(r"^torchrun .*\n(?: +\S.*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    for name in ("docs/start/train-7b.md", "benchmarks/demo.py"):
        assert command in (ROOT / name).read_text(), name
    [script, *words] = shlex.split(command.replace("\\\n", " "))[4:]
    args = tyro.cli(script_args(script), args=words)
    steps = 7473 // args.train_batch_size * args.total_epochs
    assert steps >= 100 and args.save_freq and args.rollout_dump
    assert all(
        f"{steps} steps" in (ROOT / name).read_text() for name in ("README.md", "docs/start/train-7b.md")
    )


def test_the_readme_says_how_long_the_code_is():
    """Within a twentieth, so one edit does not change a page."""
    said = (ROOT / "README.md").read_text()
    [grpo, system] = re.search(r"one file of ([\d,]+) lines, on a `system/` of ([\d,]+) lines", said).groups()
    assert f"{int(grpo)} 行" in (ROOT / "README.zh-CN.md").read_text()
    for number, files in ((grpo, ["algos/grpo.py"]), (system, (ROOT / "system").glob("*.py"))):
        there = sum(len((ROOT / file).read_text().splitlines()) for file in files)
        assert abs(int(number.replace(",", "")) / there - 1) < 0.05, there


def test_headers_train_models_tiny():
    """The tiny model holds a prompt and a response of the default lengths."""
    defaults = {f.name: f.default for f in fields(script_args("algos/grpo.py"))}
    longest = defaults["max_prompt_length"] + defaults["max_response_length"]
    assert script_args("data_prep/tiny_model.py")().max_positions >= longest


def test_the_tables_of_what_fits_are_computed():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"\| [\d.]+B ", line)]
    table = gpu_memory.table(gpu_memory.QWEN, (1, 2, 4, 8, 16))
    assert rows and set(rows) <= set(table.splitlines())
    assert table in (ROOT / "docs/guides/memory.md").read_text()
    assert gpu_memory.table(gpu_memory.RECIPES, (1, 2, 4, 8)) in (ROOT / "docs/guides/recipes.md").read_text()


@pytest.mark.parametrize("numbers", [dict(gpus=(1, 0)), dict(gpu_gib=(-3,))])
def test_no_gpus_are_refused(numbers):
    with pytest.raises(SystemExit, match="error: --gpus and --gpu_gib are numbers of at least 1"):
        gpu_memory.main(gpu_memory.Args(**numbers))


def test_the_reward_of_the_readme(tmp_path):
    """The block about own data and rewards runs, and writes rows that the schema accepts."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "digits.py").write_text(code)
    command, env = [sys.executable, "digits.py"], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *scores, count = done.stdout.splitlines()
    assert count == "5 rows" and [float("'acc': 1.0" in line) for line in scores] == [1, 0, 0, 0, 0]
    assert len(load_rows(tmp_path / "data/digits.parquet", KINDS["RL"])) == 5


@pytest.mark.parametrize("script", sorted((ROOT / "algos").glob("*.py")), ids=lambda path: path.name)
def test_commands_in_headers(script):
    """The docstring of a script has commands that parse, and names a page that exists."""
    header = ast.get_docstring(ast.parse(script.read_text()))
    lines = re.findall(r"python (algos/\w+\.py) (.*(?:\n {12,}--.*)*)", header)
    assert lines
    for name, words in lines:
        tyro.cli(script_args(name), args=shlex.split(words.replace("\\\n", " ")))
    assert (ROOT / re.search(r"^Docs: (\S+)", header, re.MULTILINE)[1]).is_file()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_flags(page):
    folders = ["algos", "data_prep"]
    if "benchmarks" in page.read_text():
        folders += ["benchmarks"]
    scripts = [f"{d}/{p.name}" for d in folders for p in (ROOT / d).glob("*.py")]
    known = set().union(*(flags_of(s) for s in scripts if "class Args" in (ROOT / s).read_text()))
    said = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))

    def plain(names):
        return {name.replace("-", "_") for name in names}  # tyro takes both

    assert not plain(said) - plain(known | FOREIGN)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_metrics(page):
    said = [name for name in re.findall(r"`([^`\n]+)`", page.read_text()) if METRIC.fullmatch(name)]
    assert not [name for name in said if not documented(name)]


def test_documented_metrics_are_computed():
    places = "algos/*.py", "algos/*.html", "system/*.py", "rewards/manager/*.py"
    code = "".join(path.read_text() for place in places for path in ROOT.glob(place))
    names = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    for name in re.findall(r"`([^`]+)`", " ".join(names)):
        stem, _, last = re.sub(r"\{.*", "", name).rpartition("/")
        assert f"{stem}/{last}".rstrip("/") in code or last in code, name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links(page):
    text = CODE.sub("", page.read_text())
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", there.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_tests_that_are_named_exist(page):
    for file, name in re.findall(r"(test_\w+\.py)::(test_\w+)", page.read_text()):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), name


def test_the_table_of_papers_is_complete():
    """Each paper that a trainer or a page of an algorithm names has its row in algorithms/README.md."""
    number, pages = re.compile(r"\b\d{4}\.\d{5}\b"), ROOT / "docs/algorithms"
    table = (pages / "README.md").read_text().partition("## Papers")[2].partition("\n## ")[0]
    named = {*pages.glob("*.md"), *(ROOT / "algos").glob("*.py")} - {pages / "README.md"}
    assert set(number.findall("".join(path.read_text() for path in named))) <= set(number.findall(table))
    for row in re.findall(r"^\| .*", table, re.MULTILINE)[1:]:
        [test] = re.findall(r"`(test_\w+\.py)", row)
        assert (ROOT / "tests" / test).is_file(), row
