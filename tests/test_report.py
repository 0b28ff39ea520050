"""report.py: every check on tables, the page's structure for awkward runs, and the page in a browser."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from conftest import ROOT, documented, golden, run

from algos import grpo
from algos import report as report_script
from algos.report import CHECKS, LIMIT, Args, Run, duration, level, meaning, parse, thin, write

SAMPLE = ROOT / "tests/fixtures/report"  # ten steps of the demo, and two of its dumped steps
GAP = "training/rollout_probs_diff_mean"
VAL = "val-core/a/acc/mean@1"
KL = "actor/kl_loss"
NO, OK, WARNING, WRONG = "not applicable", "ok", "warning", "wrong"


def curve(form):
    """The values of a straight line, or of ScaleRL's curve from 0.2 with noise; or a list itself."""
    if isinstance(form, list):
        return form
    steps = form["steps"]
    if "from" in form:
        return [form["from"] + (form["to"] - form["from"]) * i / (steps - 1) for i in range(steps)]
    noise = np.random.default_rng(0).normal(0, 0.02, steps)
    x = np.arange(1, steps + 1)
    return [*(0.2 + (form["rises_to"] - 0.2) / (1 + (form["middle"] / x) ** 1.5) + noise)]


def rows(metrics, steps=None):
    """Rows from {metric: its value in all steps, or its `curve`}; None: it is not in that row."""
    curves = {name: curve(form) for name, form in metrics.items() if isinstance(form, list | dict)}
    steps = steps or max(map(len, curves.values()), default=10)
    table = [{"training/global_step": float(step)} for step in range(1, steps + 1)]
    for name, value in metrics.items():
        for row, x in zip(table, curves.get(name, [value] * steps), strict=True):
            if x is not None:
                row[name] = x
    return table


CASES = golden("report")
RUNS = golden("report_runs")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["check"])
def test_checks(tmp_path, case):
    path = make_run(tmp_path / "run", rows(case["metrics"]), case["args"])
    (path / "log.txt").write_text(case.get("log", ""))
    verdict = Run(path, "run").verdicts[case["check"]]
    assert (verdict.word, verdict.step) == (case["verdict"], case["step"]), verdict
    assert case.get("says", "") in verdict.says


def test_the_checkpoint_of_the_best_validation_is_named(tmp_path):
    run = make_run(tmp_path / "run", rows({VAL: [0.1, 0.9, 0.8]}))
    (run / "checkpoints/step_000002").mkdir(parents=True)
    assert "; checkpoints/step_000002 has it" in Run(run, "run").verdicts["best-validation"].says


def test_a_null_is_what_was_not_finite(tmp_path):
    """Strict JSON has no NaN."""
    text = '{"training/global_step": 1, "train/loss": 3}\n{"training/global_step": 2, "train/loss": null}\n'
    run = Run(make_run(tmp_path / "run", text=text), "run")
    assert run.verdicts["not-finite"] == (WRONG, "train/loss is nan", 2)


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_has_all_its_verdicts_tested(check):
    words = {case["verdict"] for case in CASES if case["check"] == check}
    assert words >= {OK, WRONG} or words >= {OK, WARNING}


NAN = {GAP: math.nan, KL: math.inf, "critic/score/mean": math.nan, "actor/lr": math.nan}


@pytest.mark.parametrize("table", [[], rows({}, 1), rows(NAN, 30)])
def test_checks_do_without_data(tmp_path, table):
    verdicts = Run(make_run(tmp_path / "run", table), "run").verdicts
    assert verdicts.keys() == CHECKS.keys()
    assert verdicts.pop("not-finite").word == (WRONG if len(table) == 30 else OK if table else NO)
    assert {verdict.word for verdict in verdicts.values()} == {NO}


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case["script"])
def test_a_sound_and_a_sick_run_of_each_script(tmp_path, case):
    found = []
    for metrics in (case["sound"], case["sound"] | case["sick"]):
        path = make_run(tmp_path / str(len(found)), rows(metrics, 60), case["args"])
        verdicts = Run(path, case["script"]).verdicts
        found.append({name for name, verdict in verdicts.items() if verdict.word in (WRONG, WARNING)})
    assert found == [set(), {case["check"]}]


def test_checks_and_docs_agree():
    """guides/report.md has each check in the words of its docstring, and no other; all curves are metrics."""
    text = (ROOT / "docs/guides/report.md").read_text()
    said = dict(re.findall(r"^\| `([a-z-]+)` \| (.*?) \|", text, re.M))
    assert said == {name: check.__doc__ for name, check in CHECKS.items()}
    page = (ROOT / "algos/report.html").read_text()
    patterns = " ".join(re.findall(r'curves\("[^"]*", "([^"]*)"\)', page)).split()
    assert len(patterns) >= 50 and not [name for name in patterns if not documented(name)]


# ---- curves
@pytest.mark.parametrize("case", golden("thin"), ids=lambda case: case["why"])
def test_thin(case):
    assert thin(case["values"], case["steps"], case["points"]) == case["line"]


# ---- the page
class Page(HTMLParser):
    """What a browser would make of the file: attributes that fetch, scripts, texts."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.fetched, self.tags, self.text, self.inside = {}, [], [], "", None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.fetched += [v for k, v in attributes.items() if k in ("src", "href", "action", "data", "srcset")]
        self.inside = attributes.get("id", "code")

    def handle_data(self, text):
        if self.cdata_elem == "script":
            self.scripts[self.inside] = text
        elif self.cdata_elem is None:
            self.text += text


def read_page(path):
    page = Page(path.read_bytes().decode())
    assert path.stat().st_size < 6_000_000
    page.links = [x for x in page.fetched if not x.startswith("#")]  # to files that are there
    assert all((path.parent / unquote(x)).exists() for x in page.links)
    assert len(page.links) == sum(tag == "a" and not x["href"].startswith("#") for tag, x in page.tags)
    assert list(page.scripts) == ["data", "plotly", "code"]
    # nothing fetches by CSS or script either, and the page itself forbids it
    fetches = r"url\(|@import|fetch\(|XMLHttp|import\(|https?://(?!www\.w3\.org)"
    assert not re.search(fetches, page.scripts["code"])
    assert any("default-src 'none'" in a.get("content", "") for _, a in page.tags)
    page.data = json.loads(page.scripts["data"])
    page.charts = {a["data-metric"]: json.loads(a["data-lines"]) for _, a in page.tags if "data-lines" in a}
    page.times = [json.loads(a["data-parts"]) for _, a in page.tags if "data-parts" in a]
    page.verdicts = {a["data-check"]: a["data-verdict"] for _, a in page.tags if "data-check" in a}
    return page


def report(tmp_path, *runs):
    path = tmp_path / "report.html"
    write(Args(runs=[str(x) for x in runs], output=str(path)), reload_s=0)
    return read_page(path)


def make_run(path, table=(), args=None, text=None):
    path.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in table) if text is None else text
    (path / "metrics.jsonl").write_text(text)
    if args is not None:
        (path / "args.json").write_text(json.dumps(args))
    return path


@pytest.mark.parametrize(
    "mode", ["token-mean", *(f"seq-mean-token-{x}" for x in ("sum", "mean", "sum-norm"))]
)
@pytest.mark.parametrize(("nats", "word"), [(0.3, OK), (0.7, WARNING), (2.3, WRONG)])
def test_a_kl_is_judged_by_the_token(tmp_path, mode, nats, word):
    """However --loss_agg weighs it: responses of 3 and 7 tokens, of at most 40."""
    mask_nt = torch.arange(7) < torch.tensor([[3], [7]])
    kl = nats * grpo.loss_weights(mask_nt, mode, 40).sum().item()
    for length, of_environment in ((5, None), (20, 0.75)):
        table = rows({KL: kl, "response_length/mean": length, "env/token_ratio": of_environment})
        path = make_run(tmp_path / str(length), table, dict(loss_agg=mode, max_response_length=40))
        assert Run(path, "run").verdicts["kl-growth"].word == word


def test_what_is_wrong_is_printed(tmp_path, capsys):
    report(tmp_path, make_run(tmp_path / "run", rows({"train/loss": [1, math.nan]})))
    assert "  wrong: not-finite, train/loss is nan (step 2)\n" in capsys.readouterr().out


def test_command(tmp_path):
    out = tmp_path / "new/report.html"
    done = run(ROOT / "algos/report.py", SAMPLE, "--output", out)
    assert str(out) in done.stdout and not done.stderr and [*out.parent.iterdir()] == [out]
    assert "report: 0 wrong, 0 warning, " in done.stdout
    page = read_page(out)
    assert page.verdicts.keys() == CHECKS.keys() and set(page.verdicts.values()) == {OK, NO}
    assert "critic/score/mean" in page.charts and VAL.replace("/a/", "/arithmetic/") in page.charts
    assert "actor/kl_loss" not in page.charts and "actor/kl_loss" in page.text  # 0 in all steps: named
    [score] = page.charts["critic/score/mean"]
    assert score["x"] == [*range(1, 11)] and "low" not in score
    assert len(page.data["rollouts"]) == 6 and "24 responses of 2 of 2 dumped steps" in page.text
    group = page.data["rollouts"][0]
    assert group["step"] == 1 and group["prompt"].endswith("=") and len(group["rows"]) == 4
    assert group["rows"][0].keys() == {"text", "finish", "score", "advantages", "more"}


def test_a_page_in_its_run(tmp_path):
    """Its title names script and model, its links work wherever the run is, its metrics are explained."""
    args = dict(program="sft.py", model="Qwen/Qwen2.5-0.5B")
    path = make_run(tmp_path / "a run: #1", rows({"train/loss": 2, "timing_s/step": 13.0}), args)
    report_script.main(Args(**parse(Args, [str(path)])))
    page = read_page(path / "report.html")
    assert "a run: #1: sft.py on Qwen/Qwen2.5-0.5B" in page.text and "2.2 min" in page.text
    assert "metrics.jsonl" in page.links and any(x.endswith("docs/guides/debugging.md") for x in page.links)
    titles = [attributes["title"] for tag, attributes in page.tags if tag == "code" and "title" in attributes]
    meaning = "SFT: sft_loss, before the update; --dft weighs its tokens; trained tokens"
    assert any(title.startswith(meaning) for title in titles)


def test_meanings_and_durations():
    assert meaning("val-core/openai/gsm8k/acc/mean@4").startswith(
        "GRPO, PPO, DAPO: mean of N responses; acc where"
    )
    assert "](" not in "".join(text for _, text in report_script.described()) and meaning("mine/metric") == ""
    assert [duration(x) for x in (26.3, 90, 8000)] == ["26 s", "1.5 min", "2.2 h"]


def test_only_light_modules_are_loaded():
    heavy = {"torch", "transformers", "vllm", "pandas", "plotly.graph_objs"}
    code = f"import sys; import algos.report; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_seeds_are_a_band_and_other_arguments_another_curve(tmp_path):
    for i, (seed, lr, scale) in enumerate([(1, 0.1, 1), (2, 0.1, 3), (1, 0.2, 5)]):
        table = rows({"critic/score/mean": [scale * x for x in (1, 2, 3, 4)[: 4 - i % 2]]})
        make_run(tmp_path / f"run_{i}", table, dict(seed=seed, lr=lr, output_dir=f"run_{i}", model="m"))
    page = report(tmp_path, *(tmp_path / f"run_{i}" for i in range(3)))
    assert page.data["series"] == ["run (seeds 1, 2)", "run_2"]
    band, tail, other = page.charts["critic/score/mean"]
    assert band == dict(series=0, x=[1, 2, 3], y=[2, 4, 6], low=[1, 2, 3], high=[3, 6, 9])
    assert tail == dict(series=0, x=[4], y=[4]) and other == dict(series=1, x=[1, 2, 3, 4], y=[5, 10, 15, 20])
    head, _, folded = page.text.partition("equal in all")
    assert "--lr" in head and "--model" not in head and "--model" in folded


def test_time_is_not_counted_twice(tmp_path):
    times = dict(step=10, gen=4, update_actor=5, save_checkpoint=[None, None, 3], testing=[None, 1, None])
    table = rows({f"timing_s/{name}": value for name, value in times.items()})
    [time] = report(tmp_path, make_run(tmp_path / "run", table)).times
    assert dict(time["parts"]) == {
        "gen 36%": [4, 4, 4],
        "testing 3%": [0, 1, 0],
        "update_actor 45%": [5, 5, 5],
        "other 6%": [1, 0, 1],
        "save_checkpoint 9%": [0, 0, 3],
    }


def test_killed_and_resumed_and_half_written(tmp_path):
    """Steps 1 to 5, killed; from 3 on again, other values; a line that is no dict; the last one not whole."""
    first = rows({"train/loss": [5, 4, 3, 2, 1]})
    second = rows({"train/loss": [0, 0, 30, 20]})[2:]
    text = "".join(json.dumps(row) + "\n" for row in [*first, *second]) + '[]\n{"train/loss": 7, "traini'
    path = make_run(tmp_path / "run", text=text)
    run = Run(path, "run")
    assert [*zip(*run.curve("train/loss"))] == [(1, 5), (2, 4), (3, 30), (4, 20)]
    assert run.broken == 1 and run.args == {}
    assert "lines that could not be read: 1" in report(tmp_path, path).text


NASTY = "</script><script>document.body.remove()</script><!-- \0 \u202e \ud800 \u2028 & @@DATA@@ ]]> é 漢"


def test_untrusted_text_stays_text(tmp_path):
    table = rows({f"val-core/{NASTY}/acc/mean@1": [1, 2]})
    path = make_run(tmp_path / "run<b>", table, dict(model=NASTY, x=1))
    (path / "rollouts").mkdir()
    row = dict(data_source=NASTY, prompt_str=NASTY, solution_str=NASTY + "x" * 50_000, score=1e999, index=3)
    other = dict(row, score=0, pred={NASTY: NASTY}, advantages=[0.5, -1])
    bare = dict(solution_str=None, score="high", advantages=0.5)
    lines = [json.dumps(x) for x in (row, other, bare)]
    (path / "rollouts/step_000007.jsonl").write_text("\n".join([*lines, "[1]", '{"half']))
    page = report(tmp_path, path)
    assert page.text.count("</script><script>") >= 2 and "@@DATA@@" in page.text  # a metric, an argument
    first, second = page.data["rollouts"]
    clean = NASTY.replace("\ud800", "?")
    assert first["prompt"] == clean and first["step"] == 7 and len(first["rows"]) == 2
    text = first["rows"][0]["text"]
    assert text.startswith(clean) and "characters left out" in text and len(text) < 21_000
    assert first["rows"][0]["score"] is None and first["rows"][1]["advantages"] == [0.5, -1]
    assert json.loads(first["rows"][1]["more"]["pred"]) == {clean: clean}
    assert second["rows"][0]["score"] is None


def test_rollouts_are_bounded_and_whole_groups(tmp_path):
    path = make_run(tmp_path / "run", rows({"critic/score/mean": 0.5}))
    (path / "rollouts").mkdir()
    for step in range(1, 41):
        said = dict(solution_str="word " * 200, data_source="a")
        dump = [said | dict(index=i // 8, sample=i % 8, score=i % 2) for i in range(160)]
        text = "".join(json.dumps(row) + "\n" for row in dump)
        (path / f"rollouts/step_{step:06d}.jsonl").write_text(text)
    page = report(tmp_path, path)
    assert (tmp_path / "report.html").stat().st_size > 0.9 * LIMIT  # 6.8 MB were there
    assert all(len(group["rows"]) == 8 for group in page.data["rollouts"])
    numbers = {(group["step"], group["index"]) for group in page.data["rollouts"]}
    assert len(numbers) == len(page.data["rollouts"])  # what the page pairs steps by: texts may be equal
    steps = {group["step"] for group in page.data["rollouts"]}
    assert len(steps) > 15 and min(steps) < 4 and max(steps) > 36 and "left out" in page.text


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ("nowhere", "nowhere has no metrics.jsonl"),
        ("empty", "empty has no metrics.jsonl"),
        ("file", "file has no metrics.jsonl"),
        ("", "runs needs at least one value"),
        ("good --output empty", "empty is a directory"),
        ("good large", "2 runs make a file over 1.0 MB; give fewer at a time"),
    ],
)
def test_bad_input_gives_one_line_and_leaves_an_old_report(tmp_path, monkeypatch, runs, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("good", "large"):
        make_run(tmp_path / name, rows({"train/loss": [1]}))
    (tmp_path / "report.html").write_text("old")
    monkeypatch.chdir(tmp_path)
    if "large" in runs:
        monkeypatch.setattr(report_script, "LIMIT", 1_000_000)  # less than the library that draws
    with pytest.raises(SystemExit, match=f"^error: .*{re.escape(message)}[^\n]*$"):
        report_script.main(Args(**parse(Args, ["--output", "report.html", *runs.split()])))
    assert (tmp_path / "report.html").read_text() == "old"


def test_several_runs_need_a_name_for_their_page(tmp_path):
    with pytest.raises(SystemExit, match="error: several runs in one page"):
        report_script.main(Args(**parse(Args, [str(tmp_path / "a"), str(tmp_path / "b")])))


def test_a_run_that_has_just_begun(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run", args=dict(total_steps=5)))
    assert "no steps yet" in page.text and "0 of 5" in page.text


def test_follow_sees_new_steps_and_stops_reloading(tmp_path):
    path = make_run(tmp_path / "run", rows({"train/loss": [3, 2]}))
    out = tmp_path / "report.html"
    command = [sys.executable, ROOT / "algos/report.py", path, "--output", out, "--follow", "0.2"]

    def heed():
        return signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs ignore it

    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    try:

        def written():
            return any(str(out) in line for line in iter(process.stdout.readline, ""))

        assert written()
        assert read_page(out).data["reload_s"] == 0.2
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"train/loss": 1.0, "training/global_step": 3}) + "\n")
        assert written() and written()
        assert read_page(out).charts["train/loss"][0]["x"] == [1, 2, 3]
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait() == 0 and read_page(out).data["reload_s"] == 0


# ---- a browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
def test_browser_draws_every_chart_and_lists_rollouts(tmp_path):
    path = tmp_path / "run"
    shutil.copytree(SAMPLE, path)
    row = dict(index=0, prompt_str="1+1=", solution_str=NASTY, score=1.0, data_source="a", advantages=[1, -1])
    (path / "rollouts/step_000011.jsonl").write_text(json.dumps(row) + "\n")
    page = report(tmp_path, path, SAMPLE)
    flags = "--headless --disable-gpu --disable-quic --no-first-run"
    flags += " --disable-background-networking --disable-component-update --disable-sync --disable-extensions"
    flags += " --virtual-time-budget=60000 --dump-dom" + " --no-sandbox" * (os.geteuid() == 0)
    flags += f" --user-data-dir={tmp_path}/profile file://{tmp_path}/report.html"
    done = subprocess.run([CHROMIUM, *flags.split()], capture_output=True)
    dom = Page(done.stdout.decode(errors="replace"))
    root = dict(dom.tags)["html"]
    assert "data-errors" not in root and int(root["data-charts"]) == len(page.charts) + len(page.times)
    drawn = [
        a for tag, a in dom.tags if tag == "path" and "js-line" in (a.get("class") or "") and len(a["d"]) > 20
    ]
    assert len(drawn) >= len(page.charts)
    assert "⟨0000⟩" in dom.text and "⟨202e⟩" in dom.text and "</script><script>document" in dom.text
    assert [a.get("class") for tag, a in dom.tags if tag == "svg"].count("bars") == 1
    assert "next to step" in dom.text


@pytest.mark.parametrize("true", [0.3, 0.6, 0.9])
def test_where_a_score_levels_off(true):
    scores = np.array(curve(dict(rises_to=true, middle=30, steps=300)))
    found, low, high = level(np.arange(1, 301), scores, 0.1)
    assert low < true < high < low + 0.1 and abs(found - true) < 0.03


def test_dumps_are_read_until_the_page_is_full(tmp_path, monkeypatch):
    """A damaged dump hides no other."""
    (tmp_path / "rollouts").mkdir()
    row = json.dumps(dict(index=0, solution_str="x" * 1000))
    for step in range(8):
        (tmp_path / f"rollouts/step_{step:06d}.jsonl").write_text("{" if step == 0 else row)
    opened = []
    read = report_script.read_dump
    monkeypatch.setattr(report_script, "read_dump", lambda path: opened.append(path) or read(path))
    run_here = SimpleNamespace(path=tmp_path, name="run")
    for budget, shown, looked_at in ((100_000, 7, 8), (3_000, 2, 4), (500, 0, 2)):
        opened.clear()
        groups, (_, dumps, _) = report_script.read_rollouts(run_here, budget)
        assert (len(groups), dumps) == (shown, 8)
        assert len(opened) <= looked_at
