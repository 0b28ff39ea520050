"""benchmarks/models.py, which makes the tables of docs/reference/models.md: whole runs of a few families."""

import json

from conftest import ROOT, run

from benchmarks import models


def test_the_page_has_the_tables_of_the_results():
    rows = json.loads(models.RESULTS.read_text())
    assert models.tables(rows) in models.PAGE.read_text()


def test_runs_of_families(tmp_path):
    """Each has had a trap: smollm3 is a class of transformers in vLLM too; glm4_moe has shared experts."""
    names = "smollm3", "glm4_moe", "gpt_oss", "phi"
    flags = "--families", *names, "--runs", "LoRA", "--output_dir", tmp_path / "out"
    run(ROOT / "benchmarks/models.py", *flags)
    rows = json.loads((tmp_path / "out/models.json").read_text())
    assert [rows[name]["attention"] for name in names] == ["sdpa", "sdpa", "eager", "sdpa"]
    stopped = {(name, kind): rows[name][kind]["stopped"] for name in names for kind in ("SFT", "LoRA")}
    assert {key for key, line in stopped.items() if line} == {("phi", "SFT"), ("phi", "LoRA")}
    assert "its output layer has a bias" in stopped["phi", "LoRA"]
    assert max(rows["glm4_moe"]["LoRA"]["gap"]) < 1e-5 < rows["glm4_moe"]["SFT"]["loss"][-1]
