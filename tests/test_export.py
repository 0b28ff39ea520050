"""export.py: the model of hf/ in another dtype, and LoRA adapters as peft loads them."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, load_weights, metrics, run
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from algos import export

EXPORT = ROOT / "algos/export.py"
# without do_sample transformers reads this and would not write it
SAMPLING = dict(eos_token_id=[1, 2], pad_token_id=0, temperature=0.9, top_p=0.6)


def train(model, arithmetic, out, *flags, ranks):
    files = "--train_files", arithmetic / "train.parquet", "--max_length", 32, "--total_steps", 1
    files += "--train_batch_size", 16
    run(ROOT / "algos/sft.py", "--model", model, "--output_dir", out, *files, *flags, ranks=ranks)
    return out / "checkpoints/step_000001"


@pytest.fixture(scope="module")
def full(tiny, arithmetic, tmp_path_factory):
    """A checkpoint of two ranks, with weights in hf/, of a model whose responses end with two tokens."""
    model = tmp_path_factory.mktemp("model") / "two_ends"
    shutil.copytree(tiny, model)
    (model / "generation_config.json").write_text(json.dumps(SAMPLING))
    return train(model, arithmetic, tmp_path_factory.mktemp("full"), ranks=2)


@pytest.fixture(scope="module")
def lora(tiny, arithmetic, tmp_path_factory):
    """A checkpoint of two ranks with adapters, whose hf/ has them in its weights."""
    return train(tiny, arithmetic, tmp_path_factory.mktemp("lora"), "--lora_rank", 4, "--lr", 0.1, ranks=2)


def equal(*paths):
    """Whether two models, or directories, have the same weights in the same dtype."""
    a, b = (x if isinstance(x, torch.nn.Module) else AutoModelForCausalLM.from_pretrained(x) for x in paths)
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return a.dtype == b.dtype and all(x == y and torch.equal(v, w) for (x, v), (y, w) in pairs)


def test_a_model(full, tmp_path):
    run(EXPORT, full.parents[1], tmp_path / "out")
    assert equal(tmp_path / "out", full / "hf")
    assert (tmp_path / "out/config.json").read_text() == (full / "hf/config.json").read_text()
    for path in (full / "hf", tmp_path / "out"):
        assert SAMPLING.items() <= json.loads((path / "generation_config.json").read_text()).items()
        modes = {file.stat().st_mode for file in path.iterdir()}
        assert len(modes) == 1  # others can read the weights, if they can read the configuration
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    config = json.loads((tmp_path / "out/config.json").read_text())
    tokens = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]  # of transformers 4, as the next
    assert tokens["tokenizer_class"] == "PreTrainedTokenizerFast"
    run(EXPORT, full, tmp_path / "half", "--save_dtype", "bfloat16")
    assert equal(tmp_path / "half", AutoModelForCausalLM.from_pretrained(full / "hf").bfloat16())


def test_a_model_of_several_files(tiny, tmp_path):
    """Its index names the file of each weight, and how large they are together."""
    lm = AutoModelForCausalLM.from_pretrained(tiny)
    lm.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    count = export.save_model(tmp_path / "hf", "bfloat16", tmp_path / "half")
    assert len([*(tmp_path / "half").glob("*.safetensors")]) > 1
    assert equal(tmp_path / "half", lm.bfloat16())
    index = json.loads((tmp_path / "half/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * count == 2 * sum(p.numel() for p in lm.parameters())


def test_another_dtype_is_for_weights_of_the_models_own(tiny, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(tiny).bfloat16()
    lm.model.norm.weight.data = torch.randn(lm.model.norm.weight.shape)
    lm.save_pretrained(tmp_path / "hf")
    config = tmp_path / "hf/config.json"
    config.write_text(config.read_text().replace('"dtype": "bfloat16"', '"dtype": "float32"'))  # as some are
    export.save_model(tmp_path / "hf", "float16", tmp_path / "out")
    found = load_weights(tmp_path / "out")
    for name, x in lm.named_parameters():  # tied ones once
        assert torch.equal(found[name], x if name == "model.norm.weight" else x.half())


def test_a_checkpoint_goes_on_with_other_replicas(full, arithmetic, tmp_path):
    """Two shards become two copies, or one rank: the next step is the same."""
    model = json.loads((full.parents[1] / "args.json").read_text())["model"]
    losses = []
    for ranks, replicas in ((2, 1), (2, 2), (1, 1)):
        out = tmp_path / f"{ranks}_{replicas}"
        shutil.copytree(full.parents[1], out, symlinks=True)
        train(model, arithmetic, out, "--total_steps", 2, "--hsdp_replicas", replicas, ranks=ranks)
        losses.append([metrics(out)[2][name] for name in ("train/loss", "train/grad_norm")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_adapters(lora, tiny, tmp_path):
    run(EXPORT, lora, tmp_path / "adapters", "--adapters")
    lm = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "adapters")
    ids, merged = torch.arange(8)[None], AutoModelForCausalLM.from_pretrained(lora / "hf")
    torch.testing.assert_close(lm(ids).logits, merged(ids).logits, atol=1e-4, rtol=0)
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "adapters" / name).read_bytes() == (lora / "hf" / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "adapters").chat_template
    assert not (tmp_path / "adapters/config.json").exists()
    assert len({path.stat().st_mode for path in (tmp_path / "adapters").iterdir()}) == 1
    base = AutoModelForCausalLM.from_pretrained(tiny)
    assert (base(ids).logits - merged(ids).logits).abs().max() > 1e-2


def test_the_base_of_adapters_may_be_a_checkpoint(full, lora, tmp_path):
    """It is named by its step, and whoever exports hears that its run may delete it."""
    run_of = shutil.copytree(lora.parents[1], tmp_path / "run", symlinks=True)
    flags = json.loads((run_of / "args.json").read_text())
    flags["model"] = str(full.parent / "latest/hf")
    (run_of / "args.json").write_text(json.dumps(flags))
    done = run(EXPORT, run_of, tmp_path / "adapters", "--adapters")
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(full / "hf") and str(full / "hf") in done.stderr


def test_errors_are_one_line(full, lora, tmp_path):
    (tmp_path / "there").mkdir()
    shutil.copytree(lora.parents[1], tmp_path / "broken", symlinks=True)
    checkpoint = tmp_path / "broken/checkpoints/step_000001"
    for file in (*checkpoint.glob("dcp/*.distcp"), checkpoint / "hf/model.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    for arguments, part in [
        ([tmp_path, tmp_path / "out"], "no checkpoint"),
        ([full, tmp_path / "there"], "exists: choose another"),
        ([full, tmp_path / "out", "--adapters"], "has none"),
        ([tmp_path / "broken", tmp_path / "out"], "error: "),
        ([tmp_path / "broken", tmp_path / "out", "--adapters"], "broken"),
    ]:
        done = run(EXPORT, *arguments, check=False)
        assert done.returncode == 1 and part in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not (tmp_path / "out").exists() and not any(tmp_path.glob(".out*"))
    command = f"ulimit -f 64; exec {sys.executable} {EXPORT} {full} {tmp_path}/out"  # files of at most 64 KiB
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1 and "error: " in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists() and not any(tmp_path.glob(".out*"))
