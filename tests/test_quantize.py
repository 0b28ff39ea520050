"""quantize.py: GPTQ by hand, what transformers and vLLM compute from the files, errors."""

import subprocess
import sys
from pathlib import Path

import families
import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from conftest import ROOT, golden, run
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from algos import quantize
from data_prep.arithmetic import make_row
from data_prep.lib.schema import write_parquet
from data_prep.tiny_model import make_tokenizer

QUANTIZE = ROOT / "algos/quantize.py"
LOADED = """
import sys, types, torch, vllm
from unittest import mock
from algos import generate
ids, (eight, four) = [*range(3, 19)], sys.argv[1:]
sizes = dict(enforce_eager=True, max_model_len=32, kv_cache_memory_bytes=1 << 26)
args = generate.Args(model=four, data="", output="", max_prompt_length=24, max_response_length=8)
try:
    with mock.patch.object(vllm, "LLMEngine"):
        generate.build_engine(args)
except ValueError as error:
    print(error)
print("kernels of this processor:", hasattr(torch.ops._C, "silu_and_mul"))
dtype = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"  # AMX: no other for 8 bits
options = vllm.EngineArgs(eight, skip_tokenizer_init=True, dtype=dtype, **sizes)
engines = [lambda: vllm.LLMEngine.from_engine_args(options)]
if hasattr(torch.ops._C, "cpu_gemm_wna16"):
    engines.append(lambda: generate.build_engine(args))  # which leaves the dtype to the model
for make in engines:
    params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    engine, done = make(), []
    engine.add_request("0", dict(prompt_token_ids=ids), params)
    while not done:
        done = engine.step()
    print("logps", *[at[i].logprob for i, at in zip(ids[1:], done[0].prompt_logprobs[1:])])
    del engine  # its end, which ends the process group too
torch.ops._C = types.SimpleNamespace()  # as where a processor has no AVX-512
try:
    generate.build_engine(args)
except ValueError as error:
    print(error)
"""


def four_bits(group_size):
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights.group_size = group_size
    return scheme.weights


def test_gptq_by_hand():
    """One output, scale 1 (the largest weight, 7.5, becomes 7). Inputs 2 and 3 are alike: what one lost the
    other makes good, .4 -> 0, .4 + .4 -> 1; uncorrelated ones are rounded each by itself."""
    weight = torch.tensor([[7.5, 0.4, 0.4, -2.2]])
    alone, scales = quantize.gptq(weight, torch.eye(4), four_bits(4))
    assert scales.tolist() == [[1.0]] and alone.tolist() == [[7.0, 0.0, 0.0, -2.0]]
    together = torch.eye(4)
    together[1, 2] = together[2, 1] = 0.999
    assert quantize.gptq(weight, together, four_bits(4))[0].tolist() == [[7.0, 0.0, 1.0, -2.0]]
    assert quantize.nearest(weight, four_bits(2)).flatten().tolist() == pytest.approx([1, 2.2 / 7.5])


def test_gptq_over_several_blocks():
    """Its outputs are nearer to the true ones than those of the nearest values; it changes no argument."""
    torch.manual_seed(0)
    weight = torch.randn(16, 320)
    x = torch.randn(1000, 40) @ torch.randn(40, 320)
    x += 0.1 * torch.randn_like(x)
    before = weight.clone()
    args = four_bits(32)
    rounded, scales = quantize.gptq(weight, x.T @ x, args)
    assert scales.shape == (16, 10) and torch.equal(weight, before)
    steps = rounded.unflatten(1, (10, 32)) / scales[..., None]
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    assert steps.round().min() >= -8 and steps.round().max() <= 7
    by_itself = quantize.nearest(weight, args)[..., None]
    plain = (weight.unflatten(1, (10, 32)) / by_itself).round().clamp(-8, 7) * by_itself
    loss = lambda w: ((x @ (w - weight).T) ** 2).sum()
    assert loss(rounded) < 0.5 * loss(plain.flatten(1))


def test_awq_by_hand():
    """Scale 1 (7.5 becomes 7): .4 becomes 0, and 8 times .4 becomes 3, the weight of an input of size 10."""
    weight = torch.tensor([[7.5, 0.4]])
    hessian = torch.diag(torch.tensor([1.0, 100]))
    error = lambda scale: quantize.scaled_error(weight, torch.tensor(scale), hessian, four_bits(2))
    assert error([1.0, 1.0]) == pytest.approx(0.5**2 + 0.4**2 * 100)
    assert error([1.0, 8.0]) == pytest.approx(0.5**2 + 0.025**2 * 100)


# what is changed: up_proj is also the source of down_proj. Gemma's norms add 1 to their weight; the norm
# before experts has their router as another reader, and a norm follows k_proj of qwen3
AWQ = [
    ("llama", torch.float32, (), "q k v gate up down"),
    ("phi", torch.float32, (), "q k v fc1"),  # a norm with a bias
    ("gemma2", torch.float32, (), "up down"),
    ("glm4_moe", torch.float32, (), "q k v up down"),
    ("qwen3", torch.float32, ("re:.*k_proj",), "gate up down"),
    ("qwen3", torch.bfloat16, ("re:.*k_proj",), "gate up down"),
    ("gemma3_text", torch.bfloat16, (), "up down"),
]


@pytest.mark.parametrize(("family", "dtype", "ignore", "changed"), AWQ)
def test_awq_scales_what_may_be_scaled_and_changes_no_output(family, dtype, ignore, changed, monkeypatch):
    torch.manual_seed(0)
    lm = families.build(family).eval().to(dtype)
    args = four_bits(32)
    for name, weight in lm.named_parameters():
        if "gemma3" in family and name.endswith("norm.weight"):
            weight.data.zero_()  # as it is at first: only the 1 that is added would be missed
    linears = dict(quantize.match_named_modules(lm, ["Linear"], ("lm_head", *ignore)))
    for linear in linears.values():
        linear.weight.data *= 4
    for name, bias in lm.named_parameters():
        if name.endswith("norm.bias"):
            bias.data.normal_()
    texts = [(torch.randint(2, 100, (1, 12)), None) for _ in range(3)]
    old = {name: linear.weight.clone() for name, linear in linears.items()}

    def keep(weight, hessian, _):
        """Do not round; it would be to the nearest."""
        assert torch.equal(hessian, torch.eye(len(hessian)))
        return weight.data, None

    monkeypatch.setattr(quantize, "gptq", keep)
    monkeypatch.setattr(quantize, "scaled_error", lambda weight, scale, *_: -scale.max().item())
    with torch.no_grad():
        before = lm(texts[0][0]).logits
        quantize.round_layers(lm, linears, texts, args, "awq")
        change = (lm(texts[0][0]).logits - before).float().norm()
        assert change < before.float().norm() * (1e-4 if dtype is torch.float32 else 0.05)
    scaled = [name for name, linear in linears.items() if not torch.equal(linear.weight, old[name])]
    last = [name.rpartition(".")[2].removesuffix("_proj") for name in scaled if "layers.1." in name]
    assert last == changed.split()


def test_awq_keeps_what_large_inputs_need(model, arithmetic, tmp_path):
    """Every eighth channel after a norm is 100 times as large, and its weights 1/100: nearest loses them."""
    lm = AutoModelForCausalLM.from_pretrained(model)
    for name, layer in lm.model.layers.named_modules():
        if name.endswith("layernorm"):
            layer.weight.data[::8] *= 100
        elif name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            layer.weight.data[:, ::8] /= 100
    lm.generation_config = GenerationConfig()
    lm.save_pretrained(tmp_path / "large")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "large")
    true = logps(AutoModelForCausalLM.from_pretrained(model))
    torch.testing.assert_close(logps(AutoModelForCausalLM.from_pretrained(tmp_path / "large")), true)
    data = dict(calibration=str(arithmetic / "train.parquet"), calibration_rows=16)
    off = {}
    for name, more in dict(nearest={}, gptq=data, awq=data | dict(method="awq")).items():
        quantize.main(quantize.Args(str(tmp_path / "large"), str(tmp_path / name), scheme="w4a16", **more))
        off[name] = (logps(AutoModelForCausalLM.from_pretrained(tmp_path / name)) - true).abs().mean()
    assert off["awq"] < 0.92 * off["nearest"] and off["awq"] != off["gptq"]


@pytest.mark.parametrize("family", ("qwen3_next", "falcon_h1", "mamba"))
def test_layers_of_other_families(family):
    """Mixed layers, layers that return a tuple; mamba reads a weight without calling its layer: one line."""
    torch.manual_seed(0)
    lm = families.build(family).eval()
    args = preset_name_to_scheme("W8A8", ["Linear"]).weights
    linears = dict(quantize.match_named_modules(lm, ["Linear"], ("lm_head",)))
    texts = [(torch.randint(2, 100, (1, 12)), None) for _ in range(3)]
    if family == "mamba":
        line = "dt_proj: no calibration row reaches it as a layer, so --ignore it"
        with pytest.raises(ValueError, match=line):
            quantize.round_layers(lm, linears, texts, args)
        return
    with torch.no_grad():
        before = lm(texts[0][0]).logits
        scales = quantize.round_layers(lm, linears, texts, args)
        after = lm(texts[0][0]).logits
    assert 0 < (after - before).abs().max() < 0.1 * before.abs().max()
    for name, linear in linears.items():
        steps = linear.weight / scales[name]
        torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """The tiny model with larger weights, so that its log-probs are not all alike."""
    out = tmp_path_factory.mktemp("model") / "model"
    lm = AutoModelForCausalLM.from_pretrained(tiny)
    for linear in lm.model.modules():
        if isinstance(linear, torch.nn.Linear):
            linear.weight.data *= 4
    AutoTokenizer.from_pretrained(tiny).save_pretrained(out)
    lm.save_pretrained(out)
    # without do_sample transformers reads this and would not write it
    (out / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.9}')
    return out


@torch.no_grad()
def logps(lm):
    ids = torch.arange(3, 19)
    return lm(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def test_what_is_written_computes_as_it_should(model, arithmetic, tmp_path, capsys):
    """8 bits are near the model, 4 bits less so; vLLM and transformers compute the same from a directory.

    Without AVX-512 vLLM has no kernel for 4 bits: there transformers is compared with the model alone.
    Without VNNI oneDNN cuts sums of two products at 16 bits: there 8 bits are as far from transformers as 4
    bits from the model. With AMX vLLM's 8 bits take bfloat16 alone.
    """
    data = dict(calibration=str(arithmetic / "train.parquet"), calibration_rows=16)
    true = logps(AutoModelForCausalLM.from_pretrained(model))
    bounds = dict(w8a8=0.1, w4a16=0.6, fp8=0.3)
    for name, bound, more in [
        ("w8a8", bounds["w8a8"], data),
        ("w4a16", bounds["w4a16"], data | dict(scheme="w4a16")),
        ("awq", bounds["w4a16"], data | dict(scheme="w4a16", method="awq")),
        ("fp8", bounds["fp8"], dict(scheme="fp8")),
    ]:
        held_out = str(arithmetic / "val.parquet")
        quantize.main(quantize.Args(str(model), str(tmp_path / name), held_out=held_out, **more))
        mb, loss = capsys.readouterr().out.rstrip().split("; ")[1].split(", ")
        (before, after), (large, small) = ([float(x) for x in y.split()[1::2]] for y in (loss, mb))
        assert abs(before - after) < bound and small < large
        assert '"temperature": 0.9' in (tmp_path / name / "generation_config.json").read_text()
        assert '\n  "rope_theta": ' in (tmp_path / name / "config.json").read_text()  # for transformers 4
        assert len({file.stat().st_mode for file in (tmp_path / name).iterdir()}) == 1
    awq = logps(AutoModelForCausalLM.from_pretrained(tmp_path / "awq"))
    assert (awq - true).abs().mean() < bounds["w4a16"]
    paths = tmp_path / "w8a8", tmp_path / "w4a16"
    done = run("-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{LOADED}", *paths)
    theirs = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("logps")]
    cpuinfo = Path("/proc/cpuinfo").read_text()
    refused = f"{paths[1]}: vLLM needs AVX-512 for 4 bits on a CPU"
    assert (len(theirs), done.stdout.count(refused)) == ((2, 1) if "avx512" in cpuinfo else (1, 2))
    assert "kernels of this processor: True" in done.stdout  # were loaded before one was missed
    for i, path in enumerate(paths):
        ours = logps(AutoModelForCausalLM.from_pretrained(path))
        assert (ours - true).abs().mean() < bounds[path.name]
        if theirs[i:]:
            logp = torch.tensor([float(x) for x in theirs[i]])
            assert (logp - true).abs().mean() < bounds[path.name]
            exact = "vnni" in cpuinfo
            torch.testing.assert_close(logp, ours, atol=(0.1 if exact else 3) * bounds[path.name], rtol=0)


def test_a_directory_that_cannot_be_loaded_again(model, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(model)
    del lm.model.layers[0].mlp.up_proj
    lm.generation_config = GenerationConfig()
    lm.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be loaded again: 1 weights, such as .*mlp.up_proj.weight"):
        quantize.read_back(tmp_path)


def test_errors_are_one_line(model, arithmetic, tmp_path):
    sizes = dict(vocab_size=9, num_attention_heads=2, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    odd = tmp_path / "odd"
    out = tmp_path / "out"
    train = str(arithmetic / "train.parquet")
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(odd)
    AutoTokenizer.from_pretrained(model).save_pretrained(odd)
    families.write("mixtral", tmp_path / "experts")
    families.write("gemma3", tmp_path / "tower")
    for case in golden("quantize_errors"):
        source = model if case["model"] == "model" else tmp_path / case["model"]
        flags = {name: train if x == "TRAIN" else x for name, x in case["flags"].items()}
        with pytest.raises(SystemExit) as error:
            quantize.main(quantize.Args(str(source), str(tmp_path / case["output"]), **flags))
        assert str(error.value).startswith("error: ") and case["line"] in str(error.value)
        assert "\n" not in str(error.value) and not out.exists()
    command = f"ulimit -f 64; exec {sys.executable} {QUANTIZE} {model} {out}"  # files of at most 64 KiB
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1 and "error: " in done.stderr and "Traceback" not in done.stderr
    assert not out.exists() and not any(tmp_path.glob(".out*"))


def test_prompts_alone_are_texts_without_a_generation_prompt(tmp_path):
    tokenizer = make_tokenizer()
    row = make_row("train", 0, 1, 2)
    write_parquet([row], tmp_path / "rows.parquet")
    args = quantize.Args("", "", response_key=None)
    [(ids, spoken)] = quantize.read_texts(str(tmp_path / "rows.parquet"), tokenizer, args)
    assert ids[0].tolist() == tokenizer.apply_chat_template(row["prompt"], return_dict=False)
    assert not spoken.any()
