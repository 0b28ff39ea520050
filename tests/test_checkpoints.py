"""What a run keeps of a model: whole weights, adapters, checkpoints; with FSDP on one rank, in-process."""

import json
import os
import shutil
from itertools import product

import pytest
import torch
from conftest import changed, load_policy, load_weights, make_args
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GPT2Config, GPT2Model

from algos import dpo, grpo, grpo_nano
from data_prep.tiny_model import make_tokenizer
from system import checkpoints
from system.arguments import no_model
from system.batches import token_logps
from system.families import from_files, hf_overrides, to_files
from system.files import cut_file, digests_of_model, steps_in
from system.model import whole_weights
from tests import families


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Directories by family: tied embeddings; and experts with a buffer that is saved."""
    out = tmp_path_factory.mktemp("models")
    families.write("llama", out / "llama", tie_word_embeddings=True)
    families.write("deepseek_v3", out / "deepseek_v3")
    return lambda family: str(out / family)


def load(mesh, model, **flags):
    args = grpo.Args(model=model, train_files=(), attn_implementation="sdpa", **dict(output_dir="") | flags)
    return args, load_policy(grpo, args, mesh)


def logps(policy):
    rows = [dict(prompt_ids=[7, 8, 9], response_ids=[30, 40, 50, 60])]
    return token_logps(policy, rows)[0].detach()


@pytest.mark.parametrize("family", ("llama", "deepseek_v3"))
def test_whole_weights_are_those_of_the_files(mesh, model, family):
    """To the bit, and once each, in every trainer; buffers that no file has are read too."""
    expected = load_weights(model(family))
    _, policy = load(mesh, model(family))
    assert any("bias" in name for name, _ in policy.lm.named_buffers()) == (family == "deepseek_v3")
    for whole, dtype in product((whole_weights, grpo_nano.whole_weights), (torch.float32, torch.bfloat16)):
        found = [*whole(policy.lm, dtype)]
        assert sorted(name for name, _ in found) == sorted(expected)
        for name, x in found:
            kept = x.dtype is torch.float32 and name.endswith("bias")  # a buffer is not cast
            assert torch.equal(x, expected[name] if kept else expected[name].to(dtype)), name
    whole = AutoModelForCausalLM.from_pretrained(model(family))
    for name, buffer in policy.lm.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name)), name


def test_half_precision_is_trained_in_float32_and_saved_as_it_came(mesh, model, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(model("llama"), dtype=torch.bfloat16)
    lm.save_pretrained(half := tmp_path / "half")
    args, policy = load(mesh, str(half), output_dir=str(tmp_path))
    files, optimizer = load_weights(half), torch.optim.AdamW(policy.parameters())
    for name, x in policy.lm.named_parameters():
        assert x.dtype is torch.float32 and torch.equal(x.full_tensor(), files[name].float()), name
    parts = dict(hf=policy.lm), optimizer, make_tokenizer(), whole_weights
    checkpoints.write_checkpoint(tmp_path, args.model, 0, dict(step=1), *parts)
    hf = tmp_path / "checkpoints/latest/hf"
    assert not changed(half, hf) and {x.dtype for x in load_weights(hf).values()} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(hf).dtype is torch.bfloat16
    assert len({path.stat().st_mode for path in hf.iterdir()}) == 1


FAMILIES = "deepseek_v3", "qwen3_next", "falcon_h1", "mistral3"
DTYPES = [*product([grpo], FAMILIES, ("config", "text_config", "nowhere"))]
DTYPES += product([grpo_nano, dpo], FAMILIES, ["text_config"])


@pytest.mark.parametrize(("script", "family", "said"), DTYPES)
def test_each_weight_keeps_the_dtype_of_its_file(family, script, said, mesh, tmp_path):
    """Every third is in float32 among bfloat16 ones; with adapters too, which say nothing yet."""
    half = tmp_path / "half"
    families.write(family, half)
    [file] = half.glob("*.safetensors")
    weights = load_weights(half)
    for i, (name, x) in enumerate(sorted(weights.items())):
        weights[name] = x.bfloat16() if i % 3 else x + 0.01 * torch.randn(x.shape)
    save_file(weights, file, dict(format="pt"))
    config = json.loads((half / "config.json").read_text())
    for part, kind in ((config, "config"), (config.get("text_config", {}), "text_config")):
        part["dtype"] = "bfloat16" if kind == said else None
    (half / "config.json").write_text(json.dumps(config))
    args = make_args(script, model=str(half), **dict(lora_rank=2) if script is dpo else {})
    policy = load_policy(script, args, mesh)
    assert all(x.dtype == torch.float32 for x in policy.parameters() if x.requires_grad)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad])
    parts = dict(hf=policy.lm), optimizer, make_tokenizer(), script.whole_weights
    checkpoints.write_checkpoint(tmp_path, args.model, 0, dict(step=1), *parts)
    found = load_weights(tmp_path / "checkpoints/latest/hf")
    assert found.keys() == weights.keys()
    for name, x in weights.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x), name


@pytest.fixture
def run(mesh, model, tmp_path):
    """A function that saves a checkpoint of adapters, and the directory of checkpoints."""
    args, policy = load(mesh, model("llama"), lora_rank=4)

    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad])
    token_logps(policy, [dict(prompt_ids=[7], response_ids=[30, 40])])[0].sum().backward()
    optimizer.step()

    def save(step):
        parts = dict(hf=policy.lm), optimizer, make_tokenizer(), whole_weights
        checkpoints.write_checkpoint(tmp_path, args.model, 2, dict(step=step), *parts)

    return save, tmp_path / "checkpoints"


def test_latest_is_a_checkpoint_that_is_whole(run, monkeypatch):
    """Whatever fails: shards, weights of hf/, or trainer_state.json, which is the last file."""

    def full(*_, **__):
        raise OSError("no space left")

    save, root = run
    save(1)
    writers = (checkpoints.dcp, "save"), (checkpoints, "save_torch_state_dict"), (grpo.Path, "write_text")
    for place, name in writers:
        with monkeypatch.context() as patch, pytest.raises(SystemExit, match="step_000002 cannot be written"):
            patch.setattr(place, name, full)
            save(2)
        assert os.readlink(root / "latest") == "step_000001"
        assert not (root / "step_000002/trainer_state.json").exists()
    save(2)
    assert os.readlink(root / "latest") == "step_000002"
    assert {path.name for path in (root / "latest").iterdir()} == {"dcp", "hf", "trainer_state.json"}


def test_the_newest_checkpoints_are_kept(run):
    """--keep_checkpoints 2; steps after this one, of a run that was set back, are not counted."""
    save, root = run
    for step in (1, 2, 3):
        save(step)

    def steps():
        return sorted(path.name for path in root.glob("step_*"))

    assert steps() == ["step_000002", "step_000003"]
    shutil.copytree(root / "step_000003", root / "step_000008")
    shutil.copytree(root / "step_000003", root / "step_000009")
    (root / ".latest").symlink_to("step_000003")  # of a kill
    own = "step_000002_best", "step_000003_bf16", "step_notes", "step_000001.tar"  # a user's
    for name in own[:3]:
        (root / name).mkdir()
    (root / own[3]).touch()
    save(4)
    assert steps() == sorted([*own, "step_000003", "step_000004", "step_000008", "step_000009"])
    assert os.readlink(root / "latest") == "step_000004"
    assert [path.name for path in steps_in(root)] == [name for name in steps() if name not in own]


def test_a_half_deleted_checkpoint_is_unfinished(run, monkeypatch):
    """And that it could not be deleted is said."""

    def fails(path):
        raise OSError(f"{path.name} is busy")

    save, root = run
    for step in (1, 2):
        save(step)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", fails)
        with pytest.raises(SystemExit, match="step_000001 is busy"):
            save(3)
    assert not (root / "step_000001/trainer_state.json").exists()


@pytest.mark.parametrize("text", ("", "null", "[]", "{}", '{"step": "x"}', '{"step": 1e400}', '{"step": -3}'))
def test_a_state_that_is_none_is_one_line(text, tmp_path):
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(SystemExit, match=r"is damaged, or of another model \(.+\): point"):
        checkpoints.read_state(tmp_path)


def test_files_are_on_the_disk_before_latest_points_at_them(run, monkeypatch):
    """All of them: a power cut may leave what was not synced empty."""
    save, root = run
    save(1)
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda number: synced.add(os.readlink(f"/proc/self/fd/{number}")))

    def point(path, keep):
        assert os.readlink(root / "latest") == "step_000001"
        assert {str(x) for x in (root, path, *path.rglob("*"))} <= synced

    monkeypatch.setattr(checkpoints, "point_latest_at", point)
    save(2)


def test_a_digest_is_that_of_the_weights(model, tmp_path):
    """Wherever they are; one value less makes another model."""
    moved, other = (shutil.copytree(model("llama"), tmp_path / name) for name in ("moved", "other"))
    lm = AutoModelForCausalLM.from_pretrained(other)
    lm.model.norm.weight.data[0] += 1e-3
    lm.save_pretrained(other)
    expected = digests_of_model(model("llama"))
    assert digests_of_model(str(moved)) == expected != digests_of_model(str(other))


def test_files_with_newer_names_keep_their_dtypes(tmp_path):
    """Those of the model, which transformers reads, and writes as older ones; a norm is not rounded."""
    families.write("mistral3", tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    lm = families.build("mistral3")
    newer = {}
    expected = {}
    for key, x in lm.state_dict().items():
        [name] = to_files(lm)({key: x})
        newer[key] = expected[name] = x + 0.01 * torch.randn(x.shape) if "norm" in key else x.bfloat16()
    assert expected.keys() == load_weights(tmp_path).keys() != newer.keys()
    save_file(newer, file, dict(format="pt"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(dtype="bfloat16")))
    lm = from_files(AutoModelForImageTextToText, str(tmp_path))
    found = dict(whole_weights(lm, torch.float32))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert lm.file_dtypes[name] == x.dtype and torch.equal(found[name], x.float()), name


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_files_of_a_base_model_keep_their_dtypes(file, tmp_path):
    """Their names lack the prefix of the model; a file beside it that nobody loads does not count."""
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    weights = {name: x.bfloat16() for name, x in GPT2Model(config).state_dict().items()}
    wide = weights["h.0.ln_1.weight"] = torch.full([32], 1.0 + 1e-6)
    if file.endswith(".bin"):
        torch.save(weights, tmp_path / file)
    else:
        save_file(weights, tmp_path / file, dict(format="pt"))
        halves = {name: x.half() for name, x in weights.items()}
        save_file(halves, tmp_path / "model_fp16.safetensors", dict(format="pt"))
    lm = from_files(AutoModelForCausalLM, str(tmp_path))
    assert torch.equal(lm.transformer.h[0].ln_1.weight, wide)
    assert lm.file_dtypes["transformer.h.0.ln_1.weight"] == torch.float32
    assert lm.file_dtypes["transformer.wte.weight"] == torch.bfloat16


def test_a_download_that_was_cut_is_named(model, tmp_path):
    directory = shutil.copytree(model("llama"), tmp_path / "model")
    assert cut_file(directory) is None
    whole = (directory / "model.safetensors").read_bytes()
    list_for_header = (2).to_bytes(8, "little") + b"[]"
    for damaged in (b"", whole[:4], whole[:100], whole[:-1], list_for_header):
        (directory / "model.safetensors").write_bytes(damaged)
        assert cut_file(directory) == "model.safetensors"
    line = f"--teacher {directory}: model.safetensors cannot be read whole: copy or download it again"
    assert no_model(dict(teacher=(str(directory),))) == line
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map=dict(x="model-00001-of-00001.safetensors"))))
    assert cut_file(directory) == "model-00001-of-00001.safetensors"
    index.write_text("[")
    assert cut_file(directory) == "the index of its weights"


def test_an_output_layer_of_its_own_is_found(model, tmp_path):
    """The configuration says tied; the sampler must have what the trainer has."""
    directory = shutil.copytree(model("llama"), tmp_path / "model")
    weights = load_weights(directory)
    embedding = weights["model.embed_tokens.weight"]
    found = []
    for head in (None, embedding, embedding + 1):
        more = {} if head is None else {"lm_head.weight": head.clone()}
        save_file(weights | more, directory / "model.safetensors", dict(format="pt"))
        tied = from_files(AutoModelForCausalLM, str(directory)).config.tie_word_embeddings
        config = AutoConfig.from_pretrained(directory)
        change = hf_overrides(config, sees=False)
        found.append((tied, change(config).tie_word_embeddings))
    assert found == [(True, True), (True, True), (False, False)]
