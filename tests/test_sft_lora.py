"""LoRA: only adapters are trained and saved; a run goes on over two ranks that share each sequence."""

import shutil

import pytest
import torch
from conftest import ROOT, metrics, run
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from algos import sft

STEPS = 6


def train(model, data, out, *flags, ranks=0):
    files = "--train_files", data / "train.parquet", "--val_files", data / "val.parquet"
    sizes = "--total_steps", STEPS, "--save_freq", STEPS // 2, "--test_freq", 0, "--train_batch_size", 16
    rates = "--max_length", 32, "--lr", 1e-2, "--warmup_steps", 1, "--lora_rank", 4, "--keep_checkpoints", 0
    directories = "--model", model, "--output_dir", out
    run(ROOT / "algos/sft.py", *directories, *files, *sizes, *rates, *flags, ranks=ranks)


@pytest.fixture(scope="module")
def straight(tiny, arithmetic, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "straight"
    train(tiny, arithmetic, out)
    return out


def val_loss(lm, arithmetic):
    tokenizer = AutoTokenizer.from_pretrained(lm.name_or_path)
    args = sft.Args(model="", train_files=(), output_dir="")
    rows, *_ = sft.load_examples([str(arithmetic / "val.parquet")], args, tokenizer)
    prompts, responses = ([row[name] for row in rows] for name in ("prompt_ids", "response_ids"))
    logp_nt, _ = sft.token_logps(sft.TokenLogps(lm), prompts, responses, 1.0, sft.padded)
    return sft.sft_loss(logp_nt, 1, sum(sum(row["trained"]) for row in rows)).item()


def test_only_adapters_are_trained_and_saved(straight, tiny, arithmetic):
    final = straight / "checkpoints/latest"
    names = FileSystemReader(final / "dcp").read_metadata().state_dict_metadata
    assert names and all("lora" in name for name in names if not name.startswith("optimizer.param_groups"))
    assert not (final / "hf/model.safetensors").exists()
    lm = AutoModelForCausalLM.from_pretrained(tiny)
    before, peft = val_loss(lm, arithmetic), PeftModel.from_pretrained(lm, final / "hf")
    assert len(peft.peft_config["default"].target_modules) == 2 * 7  # layers x linear layers of one
    by_step = metrics(straight)
    assert before == pytest.approx(by_step[0]["val/loss"], abs=1e-5)
    assert val_loss(lm, arithmetic) == pytest.approx(by_step[STEPS]["val/loss"], abs=1e-5)
    assert by_step[STEPS]["val/loss"] < before - 0.1


def test_it_goes_on_with_sequences_over_two_ranks_and_merges(straight, tiny, arithmetic, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(straight, half, symlinks=True)
    shutil.rmtree(half / f"checkpoints/step_{STEPS:06d}")
    (half / "checkpoints/latest").unlink()
    (half / "checkpoints/latest").symlink_to(f"step_{STEPS // 2:06d}")
    train(tiny, arithmetic, half, "--sp_size", 2, "--packing", "--merge_lora", ranks=2)
    assert "resumed from" in (half / "log.txt").read_text()
    losses = [[m["train/loss"] for s, m in metrics(out).items() if s] for out in (straight, half)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and len(losses[1]) == STEPS
    merged = AutoModelForCausalLM.from_pretrained(half / "checkpoints/latest/hf")
    assert val_loss(merged, arithmetic) == pytest.approx(metrics(straight)[STEPS]["val/loss"], abs=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, base[name])}
    assert changed == {name for name in base if name.endswith("proj.weight")}
