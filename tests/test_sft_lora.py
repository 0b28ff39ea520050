"""LoRA, AdaLoRA, QLoRA: only adapters are trained, hf/ is the merged model; runs resume on other ranks."""

import families
import pytest
import torch
from conftest import ROOT, changed, cut_back, flags_of, load_weights, metrics, run
from test_sft import loss_of, make_args
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from algos import sft
from algos.export import read_weights

STEPS = 10  # AdaLoRA chooses in steps 2 to 5: the run that resumes does, too
KINDS = dict(lora=(), adalora=("--lora_kind", "adalora"))


FLAGS = (
    f"--total_steps {STEPS} --save_freq 3 --test_freq 0 --train_batch_size 16 --max_length 32 --lr 1e-2"
    " --warmup_steps 1 --lora_rank 4 --keep_checkpoints 0"
)


def train(model, data, out, *flags, ranks=0):
    run(ROOT / "algos/sft.py", *flags_of(model, data, out, FLAGS), *flags, ranks=ranks)


@pytest.fixture(scope="module", params=KINDS)
def straight(tiny, arithmetic, tmp_path_factory, request):
    out = tmp_path_factory.mktemp(request.param) / request.param
    train(tiny, arithmetic, out, *KINDS[request.param])
    return out


def val_loss(directory, arithmetic):
    lm, tokenizer = (x.from_pretrained(directory) for x in (AutoModelForCausalLM, AutoTokenizer))
    rows, *_ = sft.load_examples([str(arithmetic / "val.parquet")], make_args(), tokenizer)
    return loss_of(lm, rows)


def test_only_adapters_are_trained_and_saved(straight, tiny, arithmetic):
    final, by_step = straight / "checkpoints/latest", metrics(straight)
    names = FileSystemReader(final / "dcp").read_metadata().state_dict_metadata
    assert names and all("lora" in name for name in names if not name.startswith("optimizer.param_groups"))
    assert sum(name.startswith("model.") and name.endswith("lora_A.default.weight") for name in names) == 14
    assert val_loss(tiny, arithmetic) == pytest.approx(by_step[0]["val/loss"], abs=1e-5)
    assert val_loss(final / "hf", arithmetic) == pytest.approx(by_step[STEPS]["val/loss"], abs=1e-5)
    assert by_step[STEPS]["val/loss"] < by_step[0]["val/loss"] - 0.05
    linear = {name for name in load_weights(tiny) if name.endswith("proj.weight")}
    moved = changed(tiny, final / "hf")
    assert moved == linear or (straight.name == "adalora" and moved < linear)  # layers without a rank


@pytest.mark.parametrize("straight", ["lora"], indirect=True)
def test_it_resumes_with_rows_over_two_ranks(straight, tiny, arithmetic, tmp_path):
    half = cut_back(straight, tmp_path / "half", 3)
    train(tiny, arithmetic, half, "--sp_size", 2, ranks=2)
    assert "resumed from" in (half / "log.txt").read_text()
    losses = [[m["train/loss"] for s, m in metrics(out).items() if s] for out in (straight, half)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and len(losses[1]) == STEPS
    wanted = metrics(straight)[STEPS]["val/loss"]
    assert val_loss(half / "checkpoints/latest/hf", arithmetic) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("straight", ["adalora"], indirect=True)
def test_adalora_resumes_to_the_bit(straight, tiny, arithmetic, tmp_path):
    half = cut_back(straight, tmp_path / "half", 3)
    train(tiny, arithmetic, half, *KINDS["adalora"])
    wanted, found = (read_weights(out / "checkpoints/latest/dcp") for out in (straight, half))
    assert wanted.keys() == found.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert [m["train/lora_ranks"] for s, m in metrics(half).items() if s] == [84, 67, 59, 56, *[56] * 6]


@pytest.mark.parametrize("ranks", (0, 2))
def test_adalora_is_that_of_peft(tiny, ranks):
    run(ROOT / "tests/workers/sft_adalora.py", tiny, ranks=ranks)


def test_qlora(tiny, arithmetic, tmp_path):
    """On two ranks as on one, also where it resumes; hf/ is the model that was trained."""
    pytest.importorskip("bitsandbytes")
    outs = one, two = tmp_path / "one", tmp_path / "two"
    train(tiny, arithmetic, one, "--qlora")
    cut_back(one, two, 3)
    train(tiny, arithmetic, two, "--qlora", ranks=2)
    losses = [[m["train/loss"] for s, m in metrics(out).items() if s] for out in outs]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and losses[0][-1] < losses[0][0] - 0.1
    for out in outs:
        expected = metrics(out)[STEPS]["val/loss"]
        assert val_loss(out / "checkpoints/latest/hf", arithmetic) == pytest.approx(expected, abs=1e-5)


def test_qlora_of_a_model_with_a_vision_tower(arithmetic, tmp_path):
    """All linear layers of the language model learn; the tower is neither rounded nor trained."""
    pytest.importorskip("bitsandbytes")
    families.write("mistral3", tmp_path / "base")
    train(tmp_path / "base", arithmetic, tmp_path / "run", "--qlora")
    steps, hf = metrics(tmp_path / "run"), tmp_path / "run/checkpoints/latest/hf"
    assert steps[STEPS]["train/loss"] < steps[1]["train/loss"] - 0.1
    names = load_weights(hf)
    linear = {name for name in names if "language_model.model.layers" in name and "_proj" in name}
    assert changed(tmp_path / "base", hf) == linear
    lm, tokenizer = AutoModelForImageTextToText.from_pretrained(hf), AutoTokenizer.from_pretrained(hf)
    rows, *_ = sft.load_examples([str(arithmetic / "val.parquet")], make_args(), tokenizer)
    assert loss_of(lm, rows) == pytest.approx(steps[STEPS]["val/loss"], abs=1e-5)


def test_all_linear_are_those_in_4_bits_too(tiny):
    """bitsandbytes has a class of its own for them, which a test without it would miss."""
    kind = type("Linear4bit", (torch.nn.Linear,), {})
    lm = AutoModelForCausalLM.from_pretrained(tiny)
    for name, layer in lm.named_modules():
        if name.endswith("_proj"):
            layer.__class__ = kind
    sft.add_adapters(lm, rank=2, alpha=16, seed=1)
    assert sum(name.endswith("lora_A.default.weight") for name, _ in lm.named_parameters()) == 14


@pytest.mark.parametrize("family", ("falcon_h1", "nemotron_h", "granitemoehybrid"))
def test_the_output_layer_of_mamba_has_no_adapters(family):
    """Its kernels on a GPU read the weight past them, and peft refuses it in some families."""
    lm = families.build(family)
    layers = {name: type(layer) for name, layer in lm.named_modules()}
    sft.add_adapters(lm, rank=2, alpha=16, seed=1)
    adapted = {name for name, layer in lm.named_modules() if hasattr(layer, "lora_A")}
    states = {name for name in layers if name.endswith(("mamba.in_proj", "mixer.in_proj"))}
    attention = {name for name in layers if name.endswith(("q_proj", "o_proj"))}
    assert states and attention and adapted >= states | attention
    assert not any(name.endswith("out_proj") for name in adapted)


OF_ALL = {"q_proj", "k_proj", "v_proj", "o_proj"}
OF_MIXTURES = dict(qwen3_moe=set(), qwen3_next={"in_proj_qkvz", "out_proj"}, glm4_moe=set())


@pytest.mark.parametrize("family", OF_MIXTURES)
def test_all_linear_of_a_mixture_of_experts(family, arithmetic, tmp_path):
    """Attention, states and shared experts have adapters; experts, routers and the output layer stay.

    glm4_moe and qwen3_next have shared experts, whose names peft takes for those of all experts.
    """
    families.write(family, tmp_path / "base")
    train(tmp_path / "base", arithmetic, tmp_path / "run", "--total_steps", 2)
    before, after = (
        AutoModelForCausalLM.from_pretrained(x).state_dict()
        for x in (tmp_path / "base", tmp_path / "run/checkpoints/latest/hf")
    )
    moved = {name.rpartition(".")[0] for name, x in after.items() if not torch.equal(x, before[name])}
    shared = {"gate_proj", "up_proj", "down_proj"} if family != "qwen3_moe" else set()
    assert {name.rpartition(".")[2] for name in moved} >= OF_ALL | OF_MIXTURES[family] | shared
    frozen = ("mlp.experts", "mlp.gate", "shared_expert_gate", "lm_head", "embed_tokens", "norm")
    assert not any(name.endswith(part) or f"{part}." in name for name in moved for part in frozen)
