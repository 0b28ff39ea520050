"""Checkpoints in 8 or 4 bits: trained as the whole weights that they stand for, or refused at once."""

import json

import pytest
import torch
from conftest import ROOT, each, load_policy, load_weights, make_args, metrics, quantize, run
from transformers import AutoConfig, AutoModelForCausalLM

from algos import agent, dapo, distill, dpo, grpo, ppo, rm, sft
from system.families import auto_class, dequantised
from system.model import read_config
from tests import families

TRAINERS = agent, dapo, distill, dpo, grpo, ppo, rm, sft
REFUSED = "awq", "gptq", "bitsandbytes"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories by name, and the weights that the packed ones stand for, by hand."""
    out = tmp_path_factory.mktemp("quantised")
    return out, {name: families.write(name, out / name) for name in families.QUANTISED}


@pytest.mark.parametrize("name", ("qwen3_fp8", "gpt_oss_mxfp4", "qwen3_moe_int4"))
def test_they_are_trained_as_whole_weights(name, models, arithmetic, tmp_path):
    """hf/ has the numbers that the packed ones stand for, and does not call itself quantised.

    One goes through the sampler, too, whose weights come from the trainer in all three.
    """
    model, whole = models[0] / name, models[1][name]
    assert len(whole) == (4 if "gpt_oss" in name else 14 if name == "qwen3_fp8" else 32)
    files = "--model", model, "--train_files", arithmetic / "train.parquet", "--output_dir", tmp_path
    sizes = "--train_batch_size 8 --lr 0 --total_steps 1 --attn_implementation eager".split()
    if name == "gpt_oss_mxfp4":
        lengths = "--ppo_mini_batch_size 8 --group_size 2 --max_response_length 8".split()
        run(ROOT / "algos/grpo.py", *files, *sizes, *lengths, "--max_prompt_length", 24)
        assert metrics(tmp_path)[1]["training/rollout_logp_diff_mean"] < 1e-5
    else:
        run(ROOT / "algos/sft.py", *files, *sizes, "--max_length", 32)
    hf = tmp_path / "checkpoints/latest/hf"
    assert "quantization_config" not in (hf / "config.json").read_text()
    saved = load_weights(hf)
    assert all(torch.allclose(saved[name], x, rtol=1e-6, atol=0) for name, x in whole.items())
    assert {x.dtype for x in saved.values()} == {torch.float32}
    _, found = AutoModelForCausalLM.from_pretrained(hf, output_loading_info=True)
    assert not any(found.values())


def test_what_quantize_py_writes_is_trained_again(mesh, tmp_path):
    whole = tmp_path / "whole"
    families.write("qwen3", whole)
    limits = dict(w8a8=0.01, w4a16=0.15, fp8=0.04)
    quantize(*[dict(model=whole, output=tmp_path / scheme, scheme=scheme) for scheme in limits])
    for scheme, error in limits.items():
        path = str(tmp_path / scheme)
        args = grpo.Args(model=path, train_files=(), output_dir="", attn_implementation="sdpa")
        policy = load_policy(grpo, args, mesh)
        weights = dict(grpo.whole_weights(policy.lm, torch.float32))
        for name, x in load_weights(whole).items():
            assert (weights[name] - x).norm() < error * x.norm(), name
        with pytest.raises(SystemExit, match="to which no head for scores is added"):  # a critic
            auto_class(AutoConfig.from_pretrained(path), scores=True)


@pytest.mark.parametrize("rank", (0, 1))
@each(*TRAINERS)
def test_other_forms_are_refused_before_anything_is_loaded(script, rank, models, arithmetic, monkeypatch):
    """By every rank of every trainer, with the rows: before the sampler and before weights."""
    monkeypatch.setenv("RANK", str(rank))
    files = dict(train_files=(str(arithmetic / "train.parquet"),), output_dir="")
    for form in REFUSED:
        args = make_args(script, model=str(models[0] / f"qwen3_{form}"), **files)
        line = f"error: .*qwen3_{form} has weights in {form}, which cannot be trained: take the checkpoint"
        with pytest.raises(SystemExit, match="^1$" if rank else line):
            script.load_data(args, *([None] if script is agent else []))  # agent.py: tools


def test_so_are_teachers_critics_and_reward_models(models, tiny, arithmetic):
    refused = str(models[0] / "qwen3_gptq")
    files = dict(model=str(tiny), train_files=(str(arithmetic / "train.parquet"),), output_dir="")
    tokenizer = grpo.load_processor(str(tiny))
    with pytest.raises(SystemExit, match="has weights in gptq, which cannot be trained"):
        distill.check_teacher(distill.Args(**files, teacher=(refused,)), tokenizer, [])
    with pytest.raises(SystemExit, match="has weights in gptq, which cannot be trained"):
        ppo.check_critic(ppo.Args(**files, critic_model=refused))
    with pytest.raises(SystemExit, match="has weights in gptq, which cannot be trained"):
        ppo.check_reward_models(ppo.Args(**files, reward_model=(refused,)))


def test_qlora_wants_whole_weights(models, arithmetic, monkeypatch):
    for script in (sft, dpo):
        files = dict(train_files=(str(arithmetic / "train.parquet"),), output_dir="")
        args = script.Args(model=str(models[0] / "qwen3_fp8"), **files, lora_rank=2, qlora=True)
        with pytest.raises(SystemExit, match=r"qwen3_fp8 \(qwen3\) has rounded ones"):
            script.load_data(args)


def test_a_form_inside_the_text_config(tmp_path):
    """Wrapped checkpoints such as Kimi K2.5 name the form of their language model there."""
    families.write("mistral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["quantization_config"] = dict(quant_method="awq", bits=4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="has weights in awq"):
        dequantised(AutoConfig.from_pretrained(tmp_path))
    config["text_config"]["quantization_config"] = dict(quant_method="fp8")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dequantised(AutoConfig.from_pretrained(tmp_path))["quantization_config"].dequantize
    assert "quantization_config" not in str(read_config(tmp_path).to_dict())


def test_files_that_lack_weights_are_one_line(models, mesh, tmp_path):
    """transformers would train random ones in their place."""
    families.write("qwen3", tmp_path)
    weights = load_weights(tmp_path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    families.save_file(weights, tmp_path / "model.safetensors", dict(format="pt"))
    args = grpo.Args(model=str(tmp_path), train_files=(), output_dir="", attn_implementation="sdpa")
    line = "its files lack weights of the model, 1 in all, such as model.layers.1.mlp.up_proj.weight"
    with pytest.raises(SystemExit, match=line):
        load_policy(grpo, args, mesh)
