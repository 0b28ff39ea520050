"""Tiny random models of many families, as Hugging Face directories: what a script assumes of a model.

    write("gemma2", directory)

Each has every kind of layer of its family, and whatever the family does to its logits or its attention scores
is set so that leaving it out shows: soft caps, scales, biases, windows of WINDOW tokens.
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

WINDOW = 4
COMMON = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, max_position_embeddings=512)
COMMON |= dict(pad_token_id=0, bos_token_id=None, eos_token_id=1)
HEADS = COMMON | dict(num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)
ATTENTION = HEADS | dict(head_dim=32)
MIXED = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2)
SHARED = EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=32)
DELTA = dict(linear_key_head_dim=128, linear_value_head_dim=128)  # vLLM's kernel for a CPU needs 128
DELTA |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
DELTA |= dict(layer_types=["linear_attention", "full_attention"])
LATENT = dict(num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32)
LATENT |= dict(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32)
MAMBA = COMMON | dict(state_size=16)
SSM = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_chunk_size=4)
GRANITE = dict(logits_scaling=8.0, embedding_multiplier=3.0, residual_multiplier=0.7)
GRANITE |= dict(attention_multiplier=0.3)
GEMMA2 = dict(query_pre_attn_scalar=16, final_logit_softcapping=5.0, attn_logit_softcapping=1.0)
DEEPSEEK = EXPERTS | dict(first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1)
DEEPSEEK |= LATENT | dict(num_mtp_layers=0, topk_method="noaux_tc")
LFM2 = dict(block_multiple_of=32, conv_dim=64, block_dim=64, layer_types=["conv", "full_attention"])
JAMBA = dict(attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_dt_rank=8)
HYBRID = SSM | GRANITE | dict(layer_types=DELTA["layer_types"], num_local_experts=4)
HYBRID |= dict(shared_intermediate_size=32, mamba_n_groups=1)
NEMOTRON = dict(layers_block_type=["linear_attention", "moe", "full_attention", "mlp"])
NEMOTRON |= dict(mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16, n_groups=1, chunk_size=4)
NEMOTRON |= EXPERTS | dict(n_routed_experts=4, moe_shared_expert_intermediate_size=32)

# family -> configuration class and what differs from its defaults
FAMILIES = {
    "llama": ("Llama", ATTENTION),
    "qwen2": ("Qwen2", ATTENTION),
    "qwen2_window": ("Qwen2", ATTENTION | MIXED | dict(use_sliding_window=True)),
    "qwen3": ("Qwen3", ATTENTION),
    "mistral": ("Mistral", ATTENTION | dict(sliding_window=WINDOW)),
    "phi": ("Phi", HEADS | dict(num_key_value_heads=2)),
    "gemma2": ("Gemma2", ATTENTION | MIXED | GEMMA2),
    "gemma3_text": ("Gemma3Text", ATTENTION | MIXED | dict(query_pre_attn_scalar=16)),
    "granite": ("Granite", ATTENTION | GRANITE),
    "cohere": ("Cohere", ATTENTION | dict(logit_scale=0.0625)),
    "cohere2": ("Cohere2", ATTENTION | MIXED | dict(logit_scale=0.0625)),
    "minicpm3": ("MiniCPM3", ATTENTION | LATENT | dict(head_dim=32, dim_model_base=8)),
    "gpt_oss": ("GptOss", ATTENTION | MIXED | dict(num_local_experts=4, num_experts_per_tok=2)),
    "mixtral": ("Mixtral", ATTENTION | dict(num_local_experts=4)),
    "qwen3_moe": ("Qwen3Moe", ATTENTION | EXPERTS | dict(num_experts=4, norm_topk_prob=True)),
    "glm4_moe": ("Glm4Moe", ATTENTION | EXPERTS | dict(n_routed_experts=4, num_mtp_layers=0)),
    "deepseek_v3": ("DeepseekV3", HEADS | DEEPSEEK),
    "qwen3_next": ("Qwen3Next", ATTENTION | DELTA | SHARED),
    "qwen3_5_text": ("Qwen3_5Text", ATTENTION | DELTA),
    "lfm2": ("Lfm2", HEADS | LFM2),
    "mamba": ("Mamba", MAMBA),
    "falcon_mamba": ("FalconMamba", MAMBA),
    "mamba2": ("Mamba2", MAMBA | dict(num_heads=4, head_dim=32, n_groups=1, chunk_size=4)),
    "jamba": ("Jamba", HEADS | JAMBA),
    "falcon_h1": ("FalconH1", ATTENTION | SSM | dict(lm_head_multiplier=0.125, mamba_d_ssm=128)),
    "bamba": ("Bamba", HEADS | SSM | dict(attn_layer_indices=[1])),
    "granitemoehybrid": ("GraniteMoeHybrid", HEADS | HYBRID),
    "nemotron_h": ("NemotronH", ATTENTION | NEMOTRON),
}
del FAMILIES["nemotron_h"][1]["num_hidden_layers"]  # its blocks count


def wrap(text, tower, **fields):
    return dict(text_config=ATTENTION | text, vision_config=tower) | fields


# Checkpoints with a vision tower. Heads of 128 in linear attention: vLLM has no others on a CPU.
TOWER = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, patch_size=4)
PIXTRAL = TOWER | dict(model_type="pixtral", image_size=16, head_dim=32)
OF_GEMMA4 = TOWER | dict(head_dim=32, num_key_value_heads=2, position_embedding_size=64)
OF_LLAMA4 = TOWER | dict(image_size=16, vision_output_dim=64)
OF_LLAMA4 |= dict(projector_input_dim=64, projector_output_dim=64)
OF_QWEN = dict(depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=64)
OF_QWEN |= dict(patch_size=4, temporal_patch_size=2, num_position_embeddings=64)
IMAGE = dict(image_token_index=120)
MARKS = IMAGE | dict(boi_token_index=121, eoi_token_index=122)
QWEN_MARKS = dict(image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123)
GEMMA4_MARKS = dict(image_token_id=120, audio_token_id=119, video_token_id=118)
GEMMA4_MARKS |= dict(audio_config=None, boi_token_id=121, eoi_token_id=122)
ROPE = dict(rope_type="default", rope_theta=10000.0, mrope_interleaved=True)
QWEN3_VL = dict(rope_parameters=ROPE | dict(mrope_section=[8, 4, 4]))
WIDE = ATTENTION | DELTA
WIDE["rope_parameters"] = ROPE | dict(mrope_section=[2, 1, 1], partial_rotary_factor=0.25)
GEMMA3 = MIXED | dict(query_pre_attn_scalar=16)
GEMMA4 = MIXED | dict(global_head_dim=32, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
GEMMA4 |= dict(final_logit_softcapping=5.0, vocab_size_per_layer_input=128)
LLAMA4 = dict(intermediate_size_mlp=64, num_local_experts=4, interleave_moe_layer_step=1)
LLAMA4 |= dict(num_experts_per_tok=1, attention_chunk_size=64, no_rope_layers=[1, 0])
FAMILIES |= {
    "mistral3": (
        "Mistral3",
        wrap(dict(model_type="ministral3"), PIXTRAL, tie_word_embeddings=False, **IMAGE),
    ),
    "qwen3_vl": ("Qwen3VL", wrap(QWEN3_VL, OF_QWEN | dict(deepstack_visual_indexes=[0]), **QWEN_MARKS)),
    "gemma3": ("Gemma3", wrap(GEMMA3, TOWER | dict(image_size=16), mm_tokens_per_image=4, **MARKS)),
    "gemma4": ("Gemma4", wrap(GEMMA4, OF_GEMMA4, **GEMMA4_MARKS)),
    "llama4": ("Llama4", wrap(LLAMA4, OF_LLAMA4, **MARKS)),
    "qwen3_5": ("Qwen3_5", wrap(WIDE, OF_QWEN, **QWEN_MARKS)),
    "qwen3_5_moe": ("Qwen3_5Moe", wrap(WIDE | SHARED, OF_QWEN, **QWEN_MARKS)),
}
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
NO_SIZE = {name: value for name, value in ATTENTION.items() if name != "head_dim"}
TWO_OF_FOUR = dict(num_local_experts=4, num_experts_per_tok=2)
MORE = {  # for benchmarks/models.py
    "phi3": ("Phi3", NO_SIZE),
    "smollm3": ("SmolLM3", NO_SIZE),
    "glm4": ("Glm4", ATTENTION),
    "olmo3": ("Olmo3", NO_SIZE | MIXED),
    "ministral3": ("Ministral3", ATTENTION),
    "seed_oss": ("SeedOss", ATTENTION),
    "exaone4": ("Exaone4", NO_SIZE | MIXED),
    "minimax": (
        "MiniMax",
        ATTENTION | TWO_OF_FOUR | dict(layer_types=["linear_attention", "full_attention"]),
    ),
    "minimax_m2": (
        "MiniMaxM2",
        ATTENTION | TWO_OF_FOUR | dict(rotary_dim=32, scoring_func="sigmoid", use_qk_norm=True),
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        NO_SIZE | EXPERTS | dict(layer_types=["conv", "full_attention"], num_experts=4, num_dense_layers=1),
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        NO_SIZE
        | LATENT
        | EXPERTS
        | dict(n_routed_experts=4, n_group=1, topk_group=1, mlp_layer_types=["dense", "sparse"])
        | dict(index_topk=64, index_head_dim=32, index_n_heads=2),
    ),
}


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
