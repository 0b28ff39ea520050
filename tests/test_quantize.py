"""quantize.py: what transformers and vLLM compute from the files, errors."""

import subprocess
import sys
from pathlib import Path

import families
import pytest
import torch
from conftest import ROOT, environment, golden, load_weights, quantize, run
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompressedTensorsConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from algos.quantize import read_back

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


def test_what_is_written_computes_as_it_should(model, arithmetic, tmp_path):
    """8 bits are near the model, 4 bits less so; vLLM and transformers compute the same from a directory.

    Without AVX-512 vLLM has no kernel for 4 bits: there transformers is compared with the model alone.
    Without VNNI oneDNN cuts sums of two products at 16 bits: there 8 bits are as far from transformers as 4
    bits from the model. With AMX vLLM's 8 bits take bfloat16 alone.
    """
    data = dict(calibration=arithmetic / "train.parquet", calibration_rows=16)
    bounds = dict(w8a8=0.1, w4a16=0.6, fp8=0.3)
    flags = dict(
        w8a8=data | dict(response_key=None),  # prompts alone
        w4a16=data | dict(scheme="w4a16"),
        fp8=dict(scheme="fp8"),
    )
    runs = []
    for name, more in flags.items():
        held_out = None if name == "w8a8" else arithmetic / "val.parquet"
        runs.append(dict(model=model, output=tmp_path / name, held_out=held_out) | more)
    lm = AutoModelForCausalLM.from_pretrained(model).bfloat16()
    lm.generation_config = GenerationConfig()
    lm.model.norm.weight.data = torch.randn(lm.model.norm.weight.shape)
    lm.save_pretrained(tmp_path / "mixed")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "mixed")
    mixed = [dict(model=tmp_path / "mixed", output=tmp_path / x, scheme=x) for x in ("w8a8", "w4a16")]
    mixed = [dict(flags, output=f"{flags['output']}_mixed") for flags in mixed]
    *said, _, _ = quantize(*runs, *mixed)
    for flags_of_run in mixed:
        found = load_weights(flags_of_run["output"])
        assert torch.equal(found["model.norm.weight"], lm.model.norm.weight)  # in float32, as it was
        assert found["model.embed_tokens.weight"].dtype == torch.bfloat16
    for name, text in zip(flags, said, strict=True):
        words = text.partition("MB ")[2].replace(",", "").split()
        assert float(words[2]) < float(words[0])
        if name != "w8a8":
            assert abs(float(words[4]) - float(words[6])) < bounds[name]
        assert '"temperature": 0.9' in (tmp_path / name / "generation_config.json").read_text()
        assert '\n  "rope_theta": ' in (tmp_path / name / "config.json").read_text()  # for transformers 4
        assert len({file.stat().st_mode for file in (tmp_path / name).iterdir()}) == 1
    true = logps(AutoModelForCausalLM.from_pretrained(model))
    ours = {}
    for name in ("w8a8", "w4a16"):
        whole = CompressedTensorsConfig(run_compressed=False)
        lm = AutoModelForCausalLM.from_pretrained(tmp_path / name, quantization_config=whole)
        ours[name] = logps(lm)
        assert (ours[name] - true).abs().mean() < bounds[name]

    paths = tmp_path / "w8a8", tmp_path / "w4a16"
    done = run("-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{LOADED}", *paths)
    theirs = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("logps")]
    cpuinfo = Path("/proc/cpuinfo").read_text()
    refused = f"{paths[1]}: vLLM needs AVX-512 for 4 bits on a CPU"
    assert (len(theirs), done.stdout.count(refused)) == ((2, 1) if "avx512" in cpuinfo else (1, 2))
    assert "kernels of this processor: True" in done.stdout  # were loaded before one was missed
    for name, found in zip(("w8a8", "w4a16"), theirs):
        logp = torch.tensor([float(x) for x in found])
        assert (logp - true).abs().mean() < bounds[name]
        exact = "vnni" in cpuinfo
        torch.testing.assert_close(logp, ours[name], atol=(0.1 if exact else 3) * bounds[name], rtol=0)

    weights = load_weights(paths[0])
    del weights["model.norm.weight"]
    save_file(weights, paths[0] / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"cannot be loaded again: 1 weights, such as model.norm.weight"):
        read_back(paths[0])


def test_errors_are_one_line(model, arithmetic, tmp_path):
    sizes = dict(vocab_size=9, num_attention_heads=2, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    odd = tmp_path / "odd"
    out = tmp_path / "out"
    train = str(arithmetic / "train.parquet")
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(odd)
    AutoTokenizer.from_pretrained(model).save_pretrained(odd)
    families.write("mixtral", tmp_path / "experts")
    families.write("gemma3", tmp_path / "tower")
    families.write("mamba", tmp_path / "mamba")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "mamba")
    cases = golden("quantize_errors")
    runs = []
    for case in cases:
        source = model if case["model"] == "model" else tmp_path / case["model"]
        flags = {name: train if x == "TRAIN" else x for name, x in case["flags"].items()}
        runs.append(dict(model=str(source), output=str(tmp_path / case["output"])) | flags)
    for case, text in zip(cases, quantize(*runs), strict=True):
        assert text.startswith("error: ") and case["line"] in text and "\n" not in text
    assert not out.exists()
    command = f"ulimit -f 64; exec {sys.executable} {QUANTIZE} {model} {out}"  # files of at most 64 KiB
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment())
    assert done.returncode == 1 and "error: " in done.stderr and "Traceback" not in done.stderr
    assert not out.exists() and not any(tmp_path.glob(".out*"))
