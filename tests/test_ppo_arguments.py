"""Bad input to what PPO has over GRPO: one clear line and a non-zero exit, before any model is loaded."""

import shutil

import pytest
from transformers import AutoModelForSequenceClassification, Gemma3Config
from workers.ppo_reward_model import write_reward_model

from algos import ppo


@pytest.fixture
def refused(tiny, arithmetic, tmp_path, monkeypatch):
    """Run main with more flags -> the line that it stops with; loading a model fails the test."""

    def main(*flags):
        given = [
            "--model",
            tiny,
            "--train_files",
            arithmetic / "train.parquet",
            "--output_dir",
            tmp_path / "out",
        ]
        monkeypatch.setattr("sys.argv", ["ppo.py", *map(str, given), *map(str, flags)])
        for name in ("setup_distributed", "build_engine", "load_model"):
            monkeypatch.setattr(ppo, name, lambda *_: pytest.fail("went on to load a model"))
        with pytest.raises(SystemExit) as stop:
            ppo.main(ppo.Args(**ppo.parse(ppo.Args)))
        assert isinstance(stop.value.code, str) and "\n" not in stop.value.code
        return stop.value.code

    return main


def test_a_model_of_images_and_text(refused, tmp_path, pictures):
    Gemma3Config().save_pretrained(tmp_path)
    assert "(gemma3) takes images" in refused("--model", tmp_path, "--train_files", pictures)


def test_missing_models(refused):
    assert "no_such_critic" in refused("--critic_model", "./no_such_critic")
    assert "no_such_model" in refused("--reward_model", "./no_such_model")


def test_models_that_cannot_be_read(refused, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert f"{tmp_path}" in refused("--critic_model", tmp_path)
    line = f"error: {tmp_path}: its tokenizer cannot be read: copy tokenizer.json and"
    assert line in refused("--reward_model", tmp_path)


def test_critic_with_fewer_tokens(refused, tmp_path):
    write_reward_model(tmp_path)
    assert "knows 100 tokens" in refused("--critic_model", tmp_path)


def test_critic_with_other_values(refused, tiny, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=2).save_pretrained(tmp_path)
    line = "--critic_model {} gives 2 values, --value_quantiles is {}"
    for flags, quantiles in (((), 1), (("--value_quantiles", 8), 8)):
        assert line.format(tmp_path, quantiles) in refused("--critic_model", tmp_path, *flags)


def test_reward_model_with_two_labels(refused, tmp_path):
    write_reward_model(tmp_path, num_labels=2)
    assert "gives 2 numbers" in refused("--reward_model", tmp_path)


def test_reward_model_without_a_chat_template(refused, tmp_path):
    write_reward_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert "no chat template" in refused("--reward_model", tmp_path)


def test_reward_weights(refused, tmp_path):
    write_reward_model(tmp_path)
    assert "1 --reward_weights for 1 --reward_fn and 1 --reward_model" in refused(
        "--reward_model", tmp_path, "--reward_weights", 1
    )


def test_no_rule(refused, arithmetic):
    assert "--reward_fn" in refused("--reward_fn")
    assert "--val_files without --reward_fn" in refused(
        "--reward_fn", "--val_files", arithmetic / "val.parquet"
    )


def test_a_reward_model_may_be_the_only_reward(refused, tmp_path):
    """It is not that which stops the run."""
    write_reward_model(tmp_path)
    alone = "--reward_model", tmp_path, "--reward_fn", "--train_batch_size", 65, "--ppo_mini_batch_size", 65
    for weights in ((), ("--reward_weights", 2)):
        assert "--train_batch_size 65 is more than the 64 prompts" in refused(*alone, *weights)


def test_lambdas(refused):
    flags = "--lam_alpha", 0.05, "--max_response_length", 20
    assert "--lam_alpha 0.05: lambda is 0 up to 20 tokens" in refused(*flags)
    assert "--critic_lam 1.5 must be at least 0 and at most 1" in refused("--critic_lam", 1.5)


@pytest.mark.parametrize("name", ("kl_target", "lam_alpha"))
def test_above_0(refused, name):
    assert f"--{name} 0.0 must be above 0" in refused(f"--{name}", 0)


def test_critic_with_other_tokens(refused, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "critic")
    path = tmp_path / "critic/tokenizer.json"
    text = path.read_text()
    assert '"a":' in text and '"b":' in text
    path.write_text(text.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":'))
    line = refused("--critic_model", tmp_path / "critic")
    assert "has another vocabulary: 2 tokens have other numbers, such as 'a'" in line


def test_warm_up_as_long_as_the_run(refused):
    line = refused("--critic_warmup", 3, "--total_steps", 3)
    assert "--critic_warmup 3: the actor rests in all 3 steps" in line
