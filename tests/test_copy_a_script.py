"""The five changes of docs/start/copy-a-script.md, made to a copy elsewhere, do what the page says."""

import re

import pytest
import torch
from conftest import ROOT, as_installed, cut_back, metrics, rollouts, run, same
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

PAGE = (ROOT / "docs/start/copy-a-script.md").read_text()
CHANGES = re.findall(r"^## \d\. [^\n]*\((\d+) lines\)\n.*?```diff\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
FLAGS = "--train_batch_size 8 --ppo_mini_batch_size 4 --max_prompt_length 16 --max_response_length 12"
FLAGS += " --max_tokens_per_microbatch 300 --total_steps 4 --save_freq 2 --keep_checkpoints 0 --rollout_dump"


def side(hunk, sign):
    """The text of a hunk before (-) or after (+) the change."""
    return "".join(f"{line[1:]}\n" for line in hunk if line[0] in f" {sign}")


def copy(folder, *numbers):
    """grpo.py with some of the changes, in a folder of its own."""
    code = (ROOT / "algos/grpo.py").read_text()
    for number in numbers:
        lines, diff = CHANGES[number - 1]
        assert len(re.findall(r"^\+", diff, re.MULTILINE)) == int(lines), number
        for hunk in re.split("^@@.*\n", diff, flags=re.MULTILINE)[1:]:
            hunk = hunk.splitlines()
            assert code.count(side(hunk, "-")) == 1, hunk
            code = code.replace(side(hunk, "-"), side(hunk, "+"))
    (folder / "mine.py").write_text(code)
    return folder / "mine.py"


@pytest.fixture
def trained(tiny, arithmetic):
    def trained(script, out, reward, *more, **options):
        files = "--model", tiny, "--train_files", arithmetic / "train.parquet", "--output_dir", out
        reward = "--reward_fn", f"{ROOT}/tests/digit_reward.py:{reward}"
        return run(*as_installed(script), *files, *FLAGS.split(), *reward, "--lr", 3e-3, *more, **options)

    return trained


def test_advantage_term_and_replay(trained, tmp_path):
    """On two ranks. In steps 3 and 4 all scores are equal; step 3 still replays groups of step 2."""
    trained(copy(tmp_path, 1, 2, 4), tmp_path, "digits_at_first", "--hold_coef", 0.1, ranks=2)
    steps = metrics(tmp_path)
    assert [m["mine/replayed"] for m in steps.values()] == [0, 16, 16, 0]
    for step, m in steps.items():
        groups = {}
        for row in rollouts(tmp_path, step):
            groups.setdefault(row["index"], []).append(row["score"])
        adv = [x - sorted(scores)[3] for scores in groups.values() for x in scores]
        assert m["critic/advantages/mean"] == pytest.approx(sum(adv) / len(adv), abs=1e-6)
        assert (m["critic/advantages/zero"] == 1) == (step > 2)
        assert m["actor/grad_norm"] > 0 and m["training/nonfinite"] == m["actor/skipped_updates"] == 0
        assert m["actor/hold_loss"] > 0.99 * (m["actor/entropy"] - 1) ** 2  # of all rows, not only some
    dcp_to_torch_save(tmp_path / "checkpoints/latest/dcp", tmp_path / "dcp.pt")
    states = torch.load(tmp_path / "dcp.pt")["optimizer"]["state"].values()
    assert {int(state["step"]) for state in states} == {8}  # two for each rollout


def test_temperature_and_state(trained, tmp_path):
    script, straight = copy(tmp_path, 3, 5), tmp_path / "straight"
    trained(script, straight, "digits")
    found = [m["mine/temperature"] for m in metrics(straight).values()]
    assert found == pytest.approx([1.2, 1.2 - 0.4 / 3, 1.2 - 0.8 / 3, 0.8])
    resumed = cut_back(straight, tmp_path / "resumed", 2)
    trained(script, resumed, "digits")
    same(straight, resumed)
    assert f"resumed from {resumed}" in (resumed / "log.txt").read_text()
    script.write_text(script.read_text().replace("temperature=args.temperature)", "temperature=1.0)"))
    done = trained(script, tmp_path / "sampler", "digits", check=False)
    assert done.returncode == 1 and "step 1: sampler and trainer differ" in done.stderr
