"""What a copy in each trainer must not leave out: dropout, refusals, dtypes and seeds of adapters."""

import json
import shutil
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import each, load_policy, load_weights, make_args
from transformers import AutoConfig, GenerationConfig, LlamaConfig

from algos import agent, dapo, distill, dpo, generate, grpo, grpo_nano, ppo, quantize, rm, sft
from data_prep.lib.images import load_processor
from system import attention, checkpoints
from system.batches import layout_gap, token_logps
from system.families import hf_overrides
from system.model import freeze, merge_error, read_config, whole_weights
from tests import families

NO_TOOLS = SimpleNamespace(tools=[], parser=None, calls_tools=False)  # in place of an EnvPool
SAMPLED = grpo, dapo, ppo, agent, distill


def test_no_trainer_has_dropout(tmp_path):
    """Sampler and trainer would differ, and the first ratio would not be 1."""
    LlamaConfig(attention_dropout=0.5, resid_pdrop=0.5, num_hidden_layers=1).save_pretrained(tmp_path)
    for config in (read_config(str(tmp_path)), grpo_nano.read_config(str(tmp_path))[0]):
        assert config.attention_dropout == config.resid_pdrop == 0


@each(grpo, generate, quantize)
def test_a_reward_model_writes_no_text(script, tmp_path):
    """Its output layer would be random, or that of the embeddings."""
    LlamaConfig(architectures=["LlamaForSequenceClassification"]).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=f"{tmp_path} gives scores and no text"):
        if script is generate:
            hf_overrides(config, sees=False)
        elif script is quantize:
            quantize.main(quantize.Args(str(tmp_path), str(tmp_path / "out")))
        else:
            script.check_model(str(tmp_path), "sdpa", freeze)


@each(*SAMPLED, grpo_nano, sft, dpo, rm)
def test_a_checkpoint_says_what_ends_a_turn(script, mesh, tiny, tmp_path):
    """Those of the model's files, EOS of the tokenizer, and what a script names; no text: none."""
    model = shutil.copytree(tiny, tmp_path / "model")
    GenerationConfig(eos_token_id=4).save_pretrained(model)
    lm = load_policy(script, make_args(script, model=str(model)), mesh).lm
    optimizer = torch.optim.AdamW([p for p in lm.parameters() if p.requires_grad])
    parts = dict(hf=lm), optimizer, load_processor(str(model)), script.whole_weights, [5]
    path = checkpoints.write_checkpoint(tmp_path, str(model), 0, dict(step=1), *parts)
    file = path / "hf/generation_config.json"
    assert file.exists() == (script is not rm)
    assert script is rm or json.loads(file.read_text())["eos_token_id"] == [1, 4, 5]


@each(*SAMPLED, sft, dpo, rm)
def test_adapters_of_every_script(script, mesh, tmp_path):
    """Frozen weights keep the dtype of their files, adapters are float32, follow the seed, and are merged."""
    families.write("qwen3_moe", tmp_path)
    whole = families.build("qwen3_moe").bfloat16()
    whole.config.dtype = torch.bfloat16
    whole.save_pretrained(tmp_path)
    flags = dict(lora_rank=2, attn_implementation="sdpa")
    policies = []
    for seed in (1, 1, 2):
        args = make_args(script, model=str(tmp_path), seed=seed, **flags)
        policies.append(load_policy(script, args, mesh).lm)
    assert policies[0].config.dtype == torch.bfloat16  # of hf/
    for p in policies[0].parameters():
        assert p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16)
    found = [[p.full_tensor() for n, p in lm.named_parameters() if ".lora_A." in n] for lm in policies]
    assert all(map(torch.equal, found[0], found[1])) and not any(map(torch.equal, found[0], found[2]))
    lm, files = policies[0], load_weights(tmp_path)
    for name, p in lm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(p.detach().to_local(), std=0.1)
    rounded = dict(whole_weights(lm, torch.bfloat16))
    assert {x.dtype for x in rounded.values()} == {torch.bfloat16}
    weights = dict(whole_weights(lm, torch.float32))
    changed = [name for name in weights if "_proj" in name and "experts" not in name]
    update = torch.cat([(weights[name] - files[name].float()).flatten() for name in changed])
    error = torch.cat([(rounded[name].float() - weights[name]).flatten() for name in changed])
    expected = (error.norm() / update.norm()).item()
    found = merge_error(lm, torch.bfloat16)["lora/merge_error"]
    assert found == pytest.approx(expected, rel=0.3) and 1e-4 < found < 0.1
    assert merge_error(lm)["lora/merge_error"] == found
    lm.file_dtypes = dict.fromkeys(weights, torch.float32)
    assert merge_error(lm)["lora/merge_error"] < 1e-4
    assert weights.keys() ^ files.keys() == ({"score.weight", "lm_head.weight"} if script is rm else set())
    for name in weights.keys() & files.keys():
        expected = files[name].float()
        if "_proj" in name and "experts" not in name:
            parts = lm.get_submodule(name.removesuffix(".weight"))
            a, b = (getattr(parts, x)["default"].weight.full_tensor() for x in ("lora_A", "lora_B"))
            expected = expected + 16 / 2 * b @ a  # lora_alpha over lora_rank
        torch.testing.assert_close(weights[name], expected)


@each(*SAMPLED, sft, dpo, rm)
def test_text_alone_does_not_train_encoders(script, mesh, tmp_path):
    families.write("mistral3", tmp_path)
    args = make_args(script, model=str(tmp_path), attn_implementation="sdpa")
    lm = load_policy(script, args, mesh).lm
    trained = {
        name: "language_model." in name or name.startswith(("lm_head", "score")) for name in lm.state_dict()
    }
    assert {*trained.values()} == {True, False}
    assert {name: p.requires_grad for name, p in lm.named_parameters()} == trained


@each(*SAMPLED)
@pytest.mark.parametrize(
    ("flags", "line"),
    (
        (dict(train_batch_size=8), "mystery.*openai/gsm8k.*--reward_fn"),  # a row that no scorer is for
        (dict(reward_fn=("none",), train_batch_size=9), "--train_batch_size 9 is more than the 8 prompts"),
        (dict(val_files=("nowhere.parquet",)), "nowhere.parquet"),
    ),
)
def test_every_script_reads_its_rows(script, flags, line, tiny, arithmetic, tmp_path):
    """A line before a model is loaded."""
    rows = pq.read_table(arithmetic / "val.parquet").to_pylist()
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row | dict(data_source="mystery") for row in rows]), path)
    args = make_args(script, model=str(tiny), **dict(train_files=(str(path),)) | flags)
    with pytest.raises(SystemExit, match=line):
        script.load_data(args, *([NO_TOOLS] if script is agent else []))


@each(*SAMPLED)
def test_what_vllm_refuses_is_one_line(script, tiny, monkeypatch):
    def refuse(*_):
        raise ValueError("max_model_len is greater\nthan max_position_embeddings")

    shown = {}  # what the engine is told
    engine = SimpleNamespace(from_engine_args=refuse)
    vllm = SimpleNamespace(EngineArgs=lambda **given: shown.update(given), LLMEngine=engine)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    usage = SimpleNamespace(UsageContext=SimpleNamespace(LLM_CLASS=None))
    monkeypatch.setitem(sys.modules, "vllm.usage.usage_lib", usage)
    monkeypatch.setattr(script.cpu, "own_vllm", nullcontext)
    monkeypatch.setattr(script.families, "vllm_options", lambda *_: {})
    with pytest.raises(SystemExit, match=r"^error: max_model_len is greater than max_position_embeddings$"):
        script.build_engine(
            make_args(script, model=str(tiny), rollout_quantization="fp8"), torch.device("cpu")
        )
    assert shown["quantization"] == "fp8" and shown["dtype"] == "float32"


def test_a_restart_needs_a_new_store(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    with pytest.raises(SystemExit, match="--max-restarts: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for"):
        grpo.setup_distributed(1)


def test_more_ranks_than_gpus(monkeypatch):
    for name, value in dict(RANK=0, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2, TORCHELASTIC_MAX_RESTARTS=0).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2 ranks on a machine with 1 GPUs: --nproc_per_node 1"):
        grpo.setup_distributed()


@pytest.mark.parametrize(
    ("script", "kernel", "cause"),
    (
        (dpo, "sdpa", "responses see one another, or sdpa leaves out a soft cap"),
        (dpo, "eager", "it does something to its logits that TokenLogps leaves out"),
        (rm, "sdpa", "conversations in one row see one another, or sdpa leaves out a soft cap"),
    ),
)
def test_a_model_that_a_layout_changes_is_not_trained(script, kernel, cause, mesh, tmp_path, monkeypatch):
    families.write("llama", tmp_path)
    args = make_args(script, model=str(tmp_path), attn_implementation=kernel)
    policy = load_policy(script, args, mesh)
    check = script.check_scores if script is rm else script.check_layout
    pair = dict(prompt_ids=[9, 30], chosen_ids=[31, 32, 33], rejected_ids=[40, 41])
    pair |= dict(chosen_trained=[True] * 3, rejected_trained=[True] * 2)
    check(policy, [pair], args)
    attend = attention.segment_attention
    monkeypatch.setattr(attention, "segment_attention", lambda *a: attend(*a[:4], 3 * a[4], *a[5:]))
    policy.scale = 3
    with pytest.raises(SystemExit, match=f"off by .*likely {cause}"):
        check(policy, [pair], args)


def test_the_gap_of_a_layout_is_a_mean_over_tokens(mesh, tmp_path):
    """Of a row of three and a row of one, in a layout that has three times the logits."""
    families.write("llama", tmp_path)
    policy = load_policy(dpo, make_args(dpo, model=str(tmp_path), attn_implementation="sdpa"), mesh)
    rows = [dict(prompt_ids=[9, 30], response_ids=ids) for ids in ([31, 32, 33], [40])]
    own_nt = token_logps(policy, rows)[0]
    policy.scale = 3
    off_nt = token_logps(policy, rows)[0] - own_nt
    assert layout_gap(policy, rows) == pytest.approx(off_nt.abs().sum().item() / 4, rel=1e-3)
    assert torch.equal(token_logps(policy, rows)[0] - own_nt, off_nt)  # in the layout that trains again
