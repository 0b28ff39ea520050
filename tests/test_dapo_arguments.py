"""Bad input to DAPO: one clear line before any model is loaded. What grpo.py has too is tested there."""

import json
import shutil

import pytest
from families import write
from transformers import AutoTokenizer

from algos import dapo


@pytest.fixture
def refused(tiny, arithmetic, tmp_path, monkeypatch):
    """Run main with more flags -> the line that it stops with; loading a model fails the test."""

    def main(flags, model=tiny):
        files = "--train_files", arithmetic / "train.parquet", "--output_dir", tmp_path / "out"
        files = *files, "--model", model
        monkeypatch.setattr("sys.argv", ["dapo.py", *map(str, files), *flags.split()])
        for name in ("setup_distributed", "build_engine", "load_model"):
            monkeypatch.setattr(dapo, name, lambda *_: pytest.fail("went on to load a model"))
        with pytest.raises(SystemExit) as stop:
            dapo.main(dapo.Args(**dapo.parse(dapo.Args)))
        assert "\n" not in stop.value.code
        return stop.value.code

    return main


def test_ranks_that_share_a_row(refused, tiny, tmp_path, monkeypatch):
    """What --sp_size cannot do: a window, other attention, heads to divide."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    write("mistral", tmp_path / "mistral")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "mistral")
    line = refused("--sp_size 3", tmp_path / "mistral")
    assert "(mistral) has sliding_window, which --sp_size 3 does not support" in line
    line = refused("--sp_size 3 --attn_implementation eager")
    assert "--sp_size 3 needs --attn_implementation sdpa" in line
    assert "(llama) has 2 attention heads, which --sp_size 3 does not divide" in refused("--sp_size 3")
    shutil.copytree(tiny, tmp_path / "more")  # a model that they can share goes on
    config = json.loads((tmp_path / "more/config.json").read_text())
    config |= dict(num_attention_heads=4, head_dim=16)
    (tmp_path / "more/config.json").write_text(json.dumps(config))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(pytest.fail.Exception, match="went on to load a model"):
        refused("--sp_size 4", tmp_path / "more")
