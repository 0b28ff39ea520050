"""Bad input to DAPO: one clear line before any model is loaded. What grpo.py has too is tested there."""

import pytest

from algos import dapo


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--group_size 1", "--group_size 1"),
        ("--overlong_buffer 101 --max_response_length 100", "--overlong_buffer 101"),
        ("--overlong_buffer -1", "--overlong_buffer -1"),
        ("--lr_schedule cosine", "--total_steps"),
    ],
)
def test_refused(tiny, arithmetic, tmp_path, monkeypatch, flags, line):
    files = "--train_files", arithmetic / "train.parquet", "--output_dir", tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["dapo.py", "--model", str(tiny), *map(str, files), *flags.split()])
    monkeypatch.setattr(dapo, "load_prompts", lambda *_: pytest.fail("went on to load data"))
    with pytest.raises(SystemExit) as stop:
        dapo.main(dapo.Args(**dapo.parse(dapo.Args)))
    assert line in stop.value.code and "\n" not in stop.value.code
