"""LoRA, AdaLoRA: only adapters are trained and saved; a run goes on over two ranks that share rows."""

import shutil

import pytest
import torch
from conftest import ROOT, metrics, run
from peft import AdaLoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from algos import export, sft
from algos.export import read_weights

STEPS = 10  # AdaLoRA chooses in steps 2 to 5: the run that goes on does, too
KINDS = dict(lora=(), adalora=("--lora_kind", "adalora"))


def train(model, data, out, *flags, ranks=0):
    files = "--train_files", data / "train.parquet", "--val_files", data / "val.parquet"
    sizes = "--total_steps", STEPS, "--save_freq", 3, "--test_freq", 0, "--train_batch_size", 16
    rates = "--max_length", 32, "--lr", 1e-2, "--warmup_steps", 1, "--lora_rank", 4, "--keep_checkpoints", 0
    directories = "--model", model, "--output_dir", out
    run(ROOT / "algos/sft.py", *directories, *files, *sizes, *rates, *flags, ranks=ranks)


@pytest.fixture(scope="module", params=KINDS)
def straight(tiny, arithmetic, tmp_path_factory, request):
    out = tmp_path_factory.mktemp(request.param) / request.param
    train(tiny, arithmetic, out, *KINDS[request.param])
    return out


def cut_to_step_3(straight, out):
    shutil.copytree(straight, out, symlinks=True)
    (out / "checkpoints/latest").unlink()
    (out / "checkpoints/latest").symlink_to("step_000003")
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


@pytest.mark.parametrize("straight", ["lora"], indirect=True)
def test_it_goes_on_with_sequences_over_two_ranks_and_merges(straight, tiny, arithmetic, tmp_path):
    half = cut_to_step_3(straight, tmp_path / "half")
    train(tiny, arithmetic, half, "--sp_size", 2, "--packing", "--merge_lora", ranks=2)
    assert "resumed from" in (half / "log.txt").read_text()
    losses = [[m["train/loss"] for s, m in metrics(out).items() if s] for out in (straight, half)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and len(losses[1]) == STEPS
    merged = AutoModelForCausalLM.from_pretrained(half / "checkpoints/latest/hf")
    assert val_loss(merged, arithmetic) == pytest.approx(metrics(straight)[STEPS]["val/loss"], abs=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, base[name])}
    assert changed == {name for name in base if name.endswith("proj.weight")}


@pytest.mark.parametrize("straight", ["adalora"], indirect=True)
def test_adalora_goes_on_to_the_bit_and_is_exported(straight, tiny, arithmetic, tmp_path):
    half = cut_to_step_3(straight, tmp_path / "half")
    train(tiny, arithmetic, half, *KINDS["adalora"])
    wanted, found = (read_weights(out / "checkpoints/latest/dcp") for out in (straight, half))
    assert wanted.keys() == found.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert [m["train/lora_ranks"] for s, m in metrics(half).items() if s] == [84, 67, 59, 56, *[56] * 6]
    export.main(export.Args(str(half), str(tmp_path / "merged"), merge_lora=True))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert val_loss(merged, arithmetic) == pytest.approx(metrics(straight)[STEPS]["val/loss"], abs=1e-5)


def test_adalora_is_that_of_peft(tiny):
    """The same weights and gradients -> the same loss, with its orthogonal term, and the same ranks."""
    lm, args = (
        AutoModelForCausalLM.from_pretrained(tiny),
        dict(model=str(tiny), train_files=(), output_dir=""),
    )
    mine = sft.AdaptiveAdapters(lm, sft.Args(**args, lora_rank=4), total_steps=20)
    sizes = dict(init_r=6, target_r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    schedule = dict(total_step=20, tinit=2, tfinal=10, orth_reg_weight=0.1)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), AdaLoraConfig(**sizes, **schedule))
    name = lambda n: n.removeprefix("base_model.model.").removesuffix(".default").replace(".", "/")
    theirs = {name(n): p for n, p in peft.named_parameters() if p.requires_grad}
    assert len(theirs) == 14 * 3
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 10):
        for key, p in mine.named_parameters():
            other = theirs[key.removesuffix("/weight")]
            p.data.normal_(0, 0.1, generator=generator)
            other.data.copy_(p.data.view_as(other))
            p.grad = torch.randn(p.shape, generator=generator)
            other.grad = p.grad.view_as(other)
        ids = torch.arange(8)[None] + step
        loss = lm(ids, labels=ids).loss + 0.1 * mine.orthogonality()
        assert loss.item() == pytest.approx(peft(input_ids=ids, labels=ids).loss.item(), abs=1e-5)
        mine.allocate(step, True)
        peft.base_model.update_and_allocate(step)
        pattern = peft.peft_config["default"].rank_pattern or {}
        assert bool(pattern) == (step > 2)
        for key, kept in zip(mine.names, mine.lora_kept.tolist()):
            assert kept == pattern.get(f"{key.replace('/', '.')}.lora_E.default", [True] * 6), (step, key)
            e = mine.get_parameter(f"{key}/lora_E")
            assert torch.equal(e, theirs[f"{key}/lora_E"].view(-1))
