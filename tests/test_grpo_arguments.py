"""Bad input: one clear line and a non-zero exit, before any model is loaded."""

import json
from itertools import product
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from families import write
from transformers import AutoConfig, PhiConfig

from algos import agent, grpo
from algos.variants import OF_SCRIPTS, known
from common.arguments import impossible


@pytest.fixture
def refused(tiny, arithmetic, tmp_path, monkeypatch, capsys):
    """Run main with changed flags -> the line that it stops with; loading a model fails the test."""

    def main(*more, **changed):
        given = dict(model=tiny, train_files=arithmetic / "train.parquet", output_dir=tmp_path / "out")
        words = [word for name, value in (given | changed).items() for word in (f"--{name}", str(value))]
        monkeypatch.setattr("sys.argv", ["grpo.py", *words, *map(str, more)])
        for name in ("setup_distributed", "build_engine", "load_model"):
            monkeypatch.setattr(grpo, name, lambda *_: pytest.fail("went on to load a model"))
        with pytest.raises(SystemExit) as stop:
            grpo.main(grpo.Args(**grpo.parse(grpo.Args)))
        assert stop.value.code not in (0, None)
        output = capsys.readouterr()
        line = str(stop.value.code) if isinstance(stop.value.code, str) else output.err + output.out
        assert not isinstance(stop.value.code, str) or "\n" not in line
        return line

    return main


def test_unknown_flag(refused):
    assert "--learning_rat" in refused("--learning_rat", 1)


@pytest.mark.parametrize("family", ("Gemma3", "Qwen3_5"))
def test_a_model_of_images_and_text(refused, tmp_path, family, pictures):
    getattr(transformers, f"{family}Config")().save_pretrained(tmp_path / "vlm")
    assert "Can't load image processor for" in refused(model=tmp_path / "vlm", train_files=pictures)


def test_missing_file(refused):
    assert "nowhere.parquet" in refused(train_files="nowhere.parquet")


def test_missing_model(refused):
    assert "no_such_model" in refused(model="./no_such_model")


def test_model_with_a_bias_on_its_logits(tmp_path):
    sizes = dict(num_hidden_layers=1, num_attention_heads=2, hidden_size=16, vocab_size=9)
    PhiConfig(**sizes).save_pretrained(tmp_path)
    args = grpo.Args(model=str(tmp_path), train_files="", output_dir=tmp_path)
    with pytest.raises(SystemExit, match=f"{tmp_path.name}: its output layer has a bias"):
        grpo.check_model(AutoConfig.from_pretrained(tmp_path), args)


def test_missing_column(refused, tmp_path):
    pq.write_table(pa.table({"prompt": [[{"role": "user", "content": "x"}]]}), tmp_path / "short.parquet")
    assert "data_source" in refused(train_files=tmp_path / "short.parquet")


def test_unknown_data_source(refused, tmp_path, arithmetic):
    rows = pq.read_table(arithmetic / "val.parquet").to_pylist()
    pq.write_table(
        pa.Table.from_pylist([row | dict(data_source="mystery") for row in rows]), tmp_path / "x.parquet"
    )
    line = refused(train_files=tmp_path / "x.parquet", train_batch_size=8, ppo_mini_batch_size=8)
    assert "mystery" in line and "openai/gsm8k" in line and "--reward_fn" in line


def test_reward_fn(refused):
    assert "nowhere.py" in refused("--reward_fn", "nowhere.py:f")
    assert "2 --reward_weights for 1" in refused("--reward_weights", "1", "2")
    assert "above 0" in refused("--reward_timeout_s", "0")


def test_a_weight_of_zero(refused):
    assert "--rollout_is_threshold 0.0 must be above 0" in refused("--rollout_is_threshold", 0)


def test_an_unknown_variant(refused):
    line = "--policy_loss gdpo is none of clip, cispo, dppo, gspo, sapo, nor FILE.py:NAME"
    assert refused("--policy_loss", "gdpo") == f"error: {line}"
    names = "grpo, dr_grpo, rloo, gdpo, maxrl, reinforce_plus_plus_baseline"
    line = f"--adv_estimator gspo is none of {names}, nor FILE.py:NAME"
    assert refused("--adv_estimator", "gspo") == f"error: {line}"


def test_a_variant_that_cannot_be_used(refused, tmp_path):
    """A user's file, which may lack the function, or have one that takes something else."""
    (tmp_path / "mine.py").write_text(
        "def swapped(old_logp_nt, logp_nt, adv_nt, mask_nt): pass\n"
        "def short(score_n, group_n): pass\n"
        "def open(score_n, group_n, length_n, parts, more): pass\n"
        "number = 3\n"
    )
    mine, loss = f"{tmp_path}/mine.py", "must be a function of logp_nt, old_logp_nt, adv_nt, mask_nt; more"
    assert "no such file" in refused("--policy_loss", f"{tmp_path}/other.py:f")
    assert "defines no 'f'" in refused("--policy_loss", f"{mine}:f")
    assert f"--policy_loss {mine}:swapped {loss}" in refused("--policy_loss", f"{mine}:swapped")
    assert f"--policy_loss {mine}:number {loss}" in refused("--policy_loss", f"{mine}:number")
    for name in ("short", "open"):
        line = refused("--adv_estimator", f"{mine}:{name}")
        assert "must be a function of score_n, group_n, length_n, parts; more needs a default" in line


@pytest.mark.parametrize("flag", ("--clip_ratio_low", "--clip_ratio_high"))
def test_a_clip_for_a_loss_without_one(refused, flag):
    assert f"{flag} 0.1 has no effect with --policy_loss sapo" in refused("--policy_loss", "sapo", flag, 0.1)


def test_more_prompts_than_data(refused):
    line = refused("--train_batch_size", 1000, "--ppo_mini_batch_size", 1000)
    assert "1000" in line and "64" in line


def test_only_long_prompts(refused):
    assert "no prompt" in refused("--max_prompt_length", 5)


@pytest.mark.parametrize("script", (grpo, agent), ids=lambda script: script.__name__)
@pytest.mark.parametrize("estimator", (*OF_SCRIPTS["adv_estimator"], *known("adv_estimator")))
def test_an_estimator_has_an_advantage_or_is_refused(script, estimator):
    """Enumerated: some scores from 0 to 1 give an advantage, or the sizes are refused."""
    for prompts, group_size in product((1, 2), (1, 2)):
        sizes = dict(adv_estimator=estimator, train_batch_size=prompts, group_size=group_size)
        group_n = torch.arange(prompts).repeat_interleave(group_size)
        length_n, learns = 1 + torch.arange(len(group_n)), False
        for scores in product((0.0, 1.0), repeat=len(group_n)):
            score_n, parts = torch.tensor(scores).double(), [(1.0, list(scores))]
            adv_n = script.advantages(SimpleNamespace(**sizes), score_n, group_n, length_n, parts)
            learns |= adv_n.abs().max().item() > 1e-3
        line = impossible(sizes)
        assert line is None if learns else line.startswith(f"--adv_estimator {estimator} needs --group_size ")


def test_resume_from_what_is_no_checkpoint(refused, tmp_path):
    assert "not a checkpoint" in refused("--resume", tmp_path)


def test_output_dir_of_another_run(refused, tmp_path):
    """A run goes on with another learning rate, but not with other data."""
    (tmp_path / "out/checkpoints/latest").mkdir(parents=True)
    (tmp_path / "out/args.json").write_text(json.dumps(dict(seed=7, lr=1.0)))
    line = refused()
    assert "(--seed 7 there, 1 now)" in line
    assert "already holds a run" in refused("--resume", "never")
    assert "--seed 7 there" in refused("--resume", tmp_path)
    assert json.loads((tmp_path / "out/args.json").read_text()) == dict(seed=7, lr=1.0)


def test_a_kl_loss_without_a_gradient(refused):
    assert "k1" in refused("--use_kl_loss", "--kl_kind", "k1")


@pytest.mark.parametrize(
    ("family", "line"),
    [
        ("phi", "its output layer has a bias"),
        ("gemma2", "(gemma2) caps attention, sdpa cannot: --attn_implementation eager"),
        ("gpt_oss", "does not support an attention implementation through torch.nn.functional"),
    ],
)
def test_models_that_the_trainer_would_compute_otherwise(refused, tmp_path, family, line):
    write(family, tmp_path / family)
    assert line in refused(model=tmp_path / family)
