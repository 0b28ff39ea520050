"""What transformers 4 reads of hf/. Tried with 4.57.6: its log-probs and ids were those of transformers 5."""

import json

import pytest
import transformers
from conftest import golden
from families import ATTENTION, FAMILIES
from transformers import AutoConfig, AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from data_prep.tiny_model import make_tokenizer
from system.families import add_older_names, save_tokenizer

THETA = dict(rope_theta=30000.0)
LINEAR = dict(rope_type="linear", factor=8.0)
BY_KIND = dict(sliding_attention=dict(rope_type="default", rope_theta=5000.0), full_attention=LINEAR | THETA)


def written(config, directory):
    """config.json with the older names, and the configuration that is read from it."""
    config.save_pretrained(directory)
    add_older_names(directory / "config.json")
    once = (directory / "config.json").read_text()
    add_older_names(directory / "config.json")
    assert (directory / "config.json").read_text() == once
    return json.loads(once), AutoConfig.from_pretrained(directory)


def positions(config):
    """All rope_parameters of a configuration, by where they are; an older name of a type is no difference."""
    found = {}
    for name, x in config.items():
        if name == "rope_parameters" and x:
            found[name] = {key: value for key, value in x.items() if key != "type"}
        elif isinstance(x, dict):
            found[name] = positions(x)
    return found


@pytest.mark.parametrize("case", golden("older_positions"), ids=lambda case: case["family"])
def test_older_names_of_positions_and_experts(case, tmp_path):
    """They are beside the newer names, and the newer transformers still reads the same."""
    family = case["family"]
    fields = dict(Gemma3nText=dict(num_hidden_layers=4), Qwen3Moe=dict(num_experts=4)).get(family, {})
    config = getattr(transformers, f"{family}Config")(
        **ATTENTION | fields | dict(rope_parameters=case["rope"])
    )
    found, again = written(config, tmp_path)
    expected = THETA | case["older"]
    assert {name: found.get(name, "none") for name in expected} == expected
    assert positions(again.to_dict()) == positions(config.to_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_older_names_change_no_configuration(family, tmp_path):
    name, fields = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**fields)
    found, again = written(config, tmp_path)
    assert positions(again.to_dict()) == positions(config.to_dict())
    before, after = (x.get_text_config().to_dict().get("layer_types") for x in (config, again))
    assert before == after
    text = found.get("text_config", found)
    theta = (text.get("rope_parameters") or {}).get("rope_theta")
    assert text.get("rope_theta") == theta or family.startswith("gemma3")


def test_older_names_of_layers(tmp_path):
    """Kinds of layers of two families have other names there; it reads infinity, and no dict for it."""
    name, fields = FAMILIES["granitemoehybrid"]
    found, _ = written(getattr(transformers, f"{name}Config")(**fields), tmp_path)
    assert found["layer_types"] == ["mamba", "attention"]
    config = transformers.Zamba2Config(num_hidden_layers=2, layers_block_type=["linear_attention", "hybrid"])
    found, again = written(config, tmp_path)
    assert found["layers_block_type"] == ["mamba", "hybrid"]
    assert again.layers_block_type == config.layers_block_type
    found, again = written(transformers.ModernBertDecoderConfig(rope_parameters=BY_KIND), tmp_path)
    assert (found["global_rope_theta"], found["local_rope_theta"]) == (30000, 5000)
    assert again.rope_parameters == BY_KIND
    found, again = written(transformers.Mamba2Config(), tmp_path)
    assert found["time_step_limit"] == [0.0, float("inf")] == [*again.time_step_limit]


def named(**more):
    """A tokenizer with marks, of which some have names."""
    backend = make_tokenizer().backend_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>", padding_side="left", **more)


MARKS = dict(additional_special_tokens=["<|user|>", "<|assistant|>"])
TOKENIZERS = {
    "a list": lambda: make_tokenizer(),
    "names": lambda: named(extra_special_tokens=dict(image_token="<|system|>")),
    "both": lambda: named(extra_special_tokens=dict(image_token="<|system|>"), **MARKS),
    # the older class of this name would need tokenizer.model
    "a class": lambda: LlamaTokenizer(
        {x: i for i, x in enumerate(("<unk>", "<s>", "</s>", "▁", "H", "i"))}, []
    ),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_have_older_names(kind, tmp_path):
    """Also after the next stage has saved what it read."""
    tokenizer, template = TOKENIZERS[kind](), "{{ messages[0].content }} of the run — 中"
    tokenizer.chat_template = template
    (tmp_path / "start").mkdir()
    for before, stage in ("start", "first"), ("first", "second"):
        (tmp_path / before / "config.json").write_text("{}")
        save_tokenizer(tokenizer, str(tmp_path / before), tmp_path / stage)
        found = json.loads((tmp_path / stage / "tokenizer_config.json").read_text("utf-8"))
        assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert found["padding_side"] == tokenizer.padding_side  # of its class
        assert found["model_input_names"] == ["input_ids", "attention_mask"]  # else token_type_ids too
        assert isinstance(found.get("extra_special_tokens", {}), dict)
        assert (tmp_path / stage / "chat_template.jinja").read_text("utf-8") == template
        again = AutoTokenizer.from_pretrained(tmp_path / stage)
        assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == template
        assert again.all_special_tokens == tokenizer.all_special_tokens
        assert getattr(again, "image_token", None) == getattr(tokenizer, "image_token", None)
        for text in ("Hi  Hi", "<|user|>Hi<|assistant|>"):
            assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
        tokenizer = again
