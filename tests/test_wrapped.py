"""Models with a vision tower, trained on text: the language model learns, the rest stays as it was."""

import json

import pytest
import torch
from conftest import ROOT, changed, cut_back, healthy, load_policy, load_weights, run, same
from transformers import AutoConfig, AutoModelForImageTextToText

from algos import grpo, ppo, rm
from data_prep.lib.schema import load_rows
from system.checkpoints import write_hf
from system.families import auto_class, decoder, hf_overrides, unused_weights
from tests import families

INSIDE = "language_model.", "lm_head."  # what names of the language model's weights begin with or have


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories by family, with a tokenizer and a processor's file, but no processor."""
    out = tmp_path_factory.mktemp("wrapped")
    for family in families.WRAPPED:
        families.write(family, out / family)
        (out / family / "preprocessor_config.json").write_text('{"image_processor_type": "None"}')
    return out


@pytest.fixture(scope="module")
def trained(models, arithmetic, tmp_path_factory):
    """A step of GRPO with LoRA on two ranks, and another one on one rank, which resumes."""
    out = tmp_path_factory.mktemp("grpo")
    files = "--model", models / "mistral3", "--train_files", arithmetic / "train.parquet", "--output_dir", out
    sizes = "--train_batch_size 8 --ppo_mini_batch_size 4 --group_size 4 --max_response_length 8".split()
    rest = "--max_prompt_length 24 --lr 1e-2 --lora_rank 4 --save_freq 1 --keep_checkpoints 0".split()
    flags = *files, *sizes, *rest, "--reward_fn", f"{ROOT}/tests/digit_reward.py:digits"
    run(ROOT / "algos/grpo.py", *flags, "--total_steps", 1, ranks=2)
    print(run(ROOT / "algos/grpo.py", *flags, "--total_steps", 2).stdout)
    return out


def test_two_ranks_and_a_resumed_one_agree_with_the_sampler(trained):
    steps = healthy(trained)
    log = (trained / "log.txt").read_text()
    assert list(steps) == [1, 2] and "resumed from" in log
    layers = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    assert f"weights: {layers}\n" in log
    assert min(m["actor/grad_norm"] for m in steps.values()) > 0


def test_hf_is_the_same_model_with_another_language_model(trained, models):
    """Same class, files and names; towers are equal to the bit, and what LoRA trains is not."""
    before, after = models / "mistral3", trained / "checkpoints/latest/hf"
    assert {path.name for path in before.iterdir()} == {path.name for path in after.iterdir()}
    source, saved = (AutoConfig.from_pretrained(path).to_dict() for path in (before, after))
    assert source.pop("_name_or_path") != saved.pop("_name_or_path") and source == saved
    names = load_weights(before)
    linear = {name for name in names if "language_model.model.layers" in name and "_proj" in name}
    assert changed(before, after) == linear
    _, found = AutoModelForImageTextToText.from_pretrained(
        trained / "checkpoints/latest/hf", output_loading_info=True
    )
    assert not any(found.values())


@pytest.mark.parametrize(("family", "rank"), (("qwen3_vl", 0), ("gemma4", 4)))
def test_an_interrupted_run_equals_an_uninterrupted_one(family, rank, models, arithmetic, tmp_path):
    """To the bit: language model or adapters, their optimizer state, and the tower, which is not in dcp/."""
    out = tmp_path / "whole"
    flags = "--total_steps 4 --save_freq 2 --keep_checkpoints 0 --train_batch_size 8 --max_length 32".split()
    flags += "--lr", 1e-2, "--lora_rank", rank, "--model", models / family
    flags += "--train_files", arithmetic / "train.parquet", "--output_dir"
    run(ROOT / "algos/sft.py", *flags, out)
    half = cut_back(out, tmp_path / "half", 2)
    run(ROOT / "algos/sft.py", *flags, half)
    assert "resumed from" in (half / "log.txt").read_text()
    same(out, half)
    assert not changed(*(x / "checkpoints/step_000004/hf" for x in (out, half)))
    moved = changed(models / family, half / "checkpoints/step_000004/hf")
    assert moved and all(any(part in name for part in INSIDE) for name in moved)


def test_generate_and_export_take_it(trained, models, arithmetic, tmp_path):
    """vLLM loads hf/ for text alone; peft puts the exported adapters on the model that transformers loads."""
    peft = pytest.importorskip("peft")
    limits = "--max_prompt_length 24 --max_response_length 8 --temperature 0".split()
    files, out = ("--model", trained, "--data", arithmetic / "test.parquet"), tmp_path / "answers.parquet"
    run(ROOT / "algos/generate.py", *files, "--output", out, *limits)
    rows = load_rows(out, ["responses", "prompt"])
    run(ROOT / "algos/export.py", trained, tmp_path / "adapters", "--adapters")
    lm = AutoModelForImageTextToText.from_pretrained(models / "mistral3")
    lm = peft.PeftModel.from_pretrained(lm, tmp_path / "adapters").merge_and_unload().eval()
    tokenizer = grpo.load_processor(str(models / "mistral3"))
    for row in rows[:3]:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        ids = lm.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
        assert tokenizer.decode(ids) == row["responses"][0]


@pytest.mark.parametrize("family", families.WRAPPED)
def test_text_alone_freezes_the_encoders(family, models):
    """What learns is inside the language model, of which nothing is frozen; so it is with LoRA."""
    config = AutoConfig.from_pretrained(models / family)
    with torch.device("meta"):
        lm, adapted = (auto_class(config).from_config(config) for _ in range(2))
    args = grpo.Args(model=str(models / family), train_files=(), output_dir="", lora_rank=2)
    frozen = unused_weights(lm, args.sees_images)
    assert frozen and not any(part in name for name in frozen for part in INSIDE)
    for name, _ in lm.named_parameters():
        assert any(part in name for part in INSIDE) == (name not in frozen), name
    grpo.adapters_of(args)(adapted)
    layers = [name for name, layer in adapted.named_modules() if hasattr(layer, "lora_A")]
    assert layers and all("language_model." in name and "router" not in name for name in layers)


def test_a_file_of_rows_decides(models, arithmetic):
    """No flag, no processor: without images the tokenizer is all that is loaded besides the model."""
    train = str(arithmetic / "train.parquet")
    args = grpo.Args(model=str(models / "gemma3"), train_files=(train,), output_dir="")
    assert not args.sees_images and not hasattr(grpo.load_processor(args.model), "image_processor")


def test_weights_that_the_configuration_ties_wrongly(models, mesh, tmp_path):
    """Mistral Small 3.1 says nothing of its output layer, and transformers takes that for tied."""
    out = tmp_path / "model"
    families.write("mistral3", out)
    config = json.loads((out / "config.json").read_text())
    del config["tie_word_embeddings"]
    (out / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(out).tie_word_embeddings
    args = grpo.Args(model=str(out), train_files=(), output_dir="", attn_implementation="sdpa")
    policy = load_policy(grpo, args, mesh)
    whole, files = dict(grpo.whole_weights(policy.lm, torch.float32)), load_weights(out)
    assert whole.keys() == files.keys() and all(torch.equal(whole[name], x) for name, x in files.items())
    assert not policy.lm.config.tie_word_embeddings


# of all but gemma3 transformers has no classifier
@pytest.mark.parametrize("family", (*families.WRAPPED, "granite", "cohere2", "lfm2", "mamba2", "nemotron_h"))
def test_reward_models_have_the_weights_of_the_model(family, models, mesh, tmp_path):
    """And ppo.py's forward of them is the head on the last token's state of the decoder."""
    if not (models / family).exists():
        families.write(family, models / family)
    attention = dict(attn_implementation="eager" if family == "mamba2" else "sdpa")  # which has none
    args = rm.Args(model=str(models / family), train_files=(), output_dir="", **attention)
    config = AutoConfig.from_pretrained(args.model)
    rm.check_classifier(config, args)
    scorer = load_policy(rm, args, mesh).lm
    causal = auto_class(config).from_pretrained(models / family)
    theirs = decoder(causal).state_dict()
    for name, x in decoder(scorer).state_dict().items():
        assert torch.equal(x.full_tensor() if hasattr(x, "full_tensor") else x, theirs[name]), name
    assert not scorer.score.weight.full_tensor().any() and scorer.score.weight.requires_grad
    for name, x in scorer.named_parameters():
        learns = "language_model." in name or name == "score.weight" or family not in families.WRAPPED
        assert x.requires_grad == (learns and "lm_head." not in name), name  # of llama4, without use
    files = load_weights(models / family)
    whole = {name: x.clone() for name, x in rm.whole_weights(scorer, torch.float32)}
    inner = {name.removeprefix("model.") for name in whole} if family == "llama4" else whole.keys()
    assert inner - files.keys() == {"score.weight"}  # of Llama 4 transformers knows the whole model alone

    whole["score.weight"].normal_(generator=torch.Generator().manual_seed(0))
    write_hf(tmp_path, scorer, whole)
    of_ppo = attention | dict(model=str(models / family), reward_model=(str(tmp_path),))
    args = ppo.Args(train_files=(), output_dir="", **of_ppo)
    model = ppo.load_reward_model(args, str(tmp_path), mesh, torch.device("cpu"))
    ids = torch.tensor([[5, 9, 7, 30, 6], [6, 8, 11, 0, 0]])
    mask = (ids > 0).long()
    hidden = decoder(causal)(input_ids=ids, attention_mask=mask).last_hidden_state
    wanted = hidden[torch.arange(2), mask.sum(1) - 1] @ whole["score.weight"][0]
    assert torch.allclose(model(input_ids=ids, attention_mask=mask).logits[:, 0], wanted, atol=1e-4)


@pytest.mark.parametrize("family", ("qwen3_5", "qwen3_5_text", "qwen3_5_moe"))
def test_qwen3_5_without_torchvision_is_one_line(family, models, monkeypatch):
    """vLLM would say no more than that its architecture failed to be inspected."""
    monkeypatch.setattr("system.families.find_spec", lambda name: None)
    if not (models / family).exists():
        families.write(family, models / family)
    line = rf"{family} \({family}\): vLLM needs torchvision: install the build for torch 2"
    with pytest.raises(SystemExit, match=line):
        hf_overrides(AutoConfig.from_pretrained(models / family), sees=False)
