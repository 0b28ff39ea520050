"""Tiny random models of many families, as Hugging Face directories: what a script assumes of a model.

    write("gemma2", directory)

Each has every kind of layer of its family, and whatever the family does to its logits or its attention scores
is set so that leaving it out shows: soft caps, scales, biases, windows of 4 tokens. Heads of
128 in linear attention: vLLM has no others on a CPU.
"""

import json
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from data_prep.tiny_model import make_tokenizer
from system.families import auto_class, decoder
from tests.conftest import golden


def table(name):
    """{family: configuration class, and what differs from its defaults} of a table in tests/golden."""
    return {case["family"]: (case["config"], case["fields"]) for case in golden(name)}


FAMILIES = table("families")
ATTENTION = FAMILIES["llama"][1]
WRAPPED = "mistral3 qwen3_vl gemma3 gemma4 llama4 qwen3_5 qwen3_5_moe".split()


def build(family, **changes):
    """The model of a family with seeded random weights, large enough for every part of it to matter."""
    name, fields = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**fields | changes)
    torch.manual_seed(0)
    lm = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in [*lm.named_parameters(), *lm.named_buffers()]:
            if name.endswith(("A_log", "dt_bias", "D", "scalar")) or "rotary" in name:
                continue  # these keep a state-space layer stable, or are computed
            if name.endswith(("bias", "sinks")):
                nn.init.normal_(weight, std=0.5)
            elif weight.dim() > 1 and weight.is_floating_point():
                nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
        *_, norm = [module for name, module in decoder(lm).named_children() if "norm" in name]
        # logits of standard deviation 3; an addition, for the families whose norms multiply by 1 + weight
        norm.weight.add_(3 / lm.eval()(input_ids=torch.arange(8, 40)[None]).logits.std() - 1)
    lm.generation_config = transformers.GenerationConfig(eos_token_id=1, pad_token_id=0)
    return lm


def fp8(weight):
    """Blocks of 32 by 32 have a scale each -> {ending of the name: tensor}, and the whole weight."""
    blocks = weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    packed = (blocks / scale).to(torch.float8_e4m3fn)
    whole = (packed.float() * scale).view_as(weight)
    return {"": packed.view_as(weight), "_scale_inv": scale[:, 0, :, 0].contiguous()}, whole


def mxfp4(weight):
    """32 inputs share a power of 2; a number has a sign, 2 bits of exponent and 1 of mantissa."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.mT.unflatten(-1, (-1, 32))  # [experts, outputs, groups, 32]
    exponent = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    scaled = groups / 2**exponent
    code = (scaled.abs()[..., None] - sizes).abs().argmin(-1)
    whole = (sizes[code] * scaled.sign() * 2**exponent).flatten(-2).mT
    code = code + 8 * (scaled < 0)
    blocks = code[..., ::2] + 16 * code[..., 1::2]
    return dict(_blocks=blocks.byte(), _scales=(exponent[..., 0] + 127).byte()), whole


def int4(weight):
    """32 inputs share a scale; eight numbers, each plus 8, are in an int32, the first in its low bits."""
    groups = weight.unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    number = (groups / scale).round()
    code = (number + 8).flatten(-2).unflatten(-1, (-1, 8)).long()
    packed = (code << 4 * torch.arange(8)).sum(-1)
    packed = packed.where(packed < 2**31, packed - 2**32).int()
    shape = torch.tensor(weight.shape)
    return dict(_packed=packed, _scale=scale[..., 0], _shape=shape), (number * scale).flatten(-2)


GROUP = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
PACKED = dict(quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed")
PACKED |= dict(config_groups=dict(group_0=dict(targets=["Linear"], weights=GROUP)))
WHOLE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
QUANTISED = {  # family, how its `_proj` weights are packed, and its quantization_config
    "qwen3_fp8": ("qwen3", fp8, dict(quant_method="fp8", weight_block_size=[32, 32], fmt="e4m3")),
    "gpt_oss_mxfp4": ("gpt_oss", mxfp4, dict(quant_method="mxfp4", modules_to_not_convert=WHOLE)),
    "qwen3_moe_int4": ("qwen3_moe", int4, PACKED | dict(ignore=["lm_head", "re:.*mlp.gate$"])),
    # of the forms that are refused: a configuration, and whole weights, which nobody reads
    "qwen3_awq": ("qwen3", None, dict(quant_method="awq", bits=4, group_size=128, zero_point=True)),
    "qwen3_gptq": ("qwen3", None, dict(quant_method="gptq", bits=4, group_size=128)),
    "qwen3_bitsandbytes": ("qwen3", None, dict(quant_method="bitsandbytes", load_in_4bit=True)),
}
MORE = table("families_of_models")  # for benchmarks/models.py


def write(family, directory, **changes):
    """Save the model and the tokenizer of data_prep/tiny_model.py, whose tokens all fit.

    Of one in QUANTISED -> {name: weight} that its packed weights stand for.
    """
    family, pack, form = QUANTISED.get(family, (family, None, None))
    build(family, **changes).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    if not form:
        return {}
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | dict(quantization_config=form)))
    weights, whole = load_file(directory / "model.safetensors"), {}
    ending = "_proj" if pack is mxfp4 else "_proj.weight"  # the former are experts alone
    for name in [name for name in weights if name.endswith(ending) and pack]:
        packed, whole[name] = pack(weights.pop(name))
        weights |= {f"{name}{end}": x for end, x in packed.items()}
    save_file(weights, directory / "model.safetensors", dict(format="pt"))
    return whole
