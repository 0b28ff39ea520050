"""A model: made without weights, filled from its files, with adapters, and read as whole weights.

A script shards it in between (`load_model`).
"""

import math
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoConfig, BitsAndBytesConfig
from transformers.utils import logging

from data_prep.lib.images import image_token_ids
from system import families
from system.arguments import fail
from system.attention import packed_attention
from system.gpu import compute_device, send
from system.log_probs import log_probs
from system.ranks import of_first


class TokenLogps(nn.Module):
    """A causal LM whose forward returns log-probs of given tokens: one root module, for FSDP.

    packed: whether its texts are laid out by `one_row`; otherwise by `padded`.
    processor: of a model that is shown images. entropy: False: the forward has no entropy of distributions.
    """

    ranks = 1  # that share a row; see `Slices`

    def __init__(self, lm, packed=False, processor=None, entropy=True):
        super().__init__()
        self.lm = lm
        self.packed = packed
        self.processor = processor
        self.entropy = entropy
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            fail(f"{lm.config.name_or_path}: its output layer has a bias, which log-probs leave out")
        config = lm.config.get_text_config()
        # granite and minicpm3 divide their logits; cohere and falcon-h1 multiply them
        factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1
        self.scale = factor / (getattr(config, "logits_scaling", None) or 1)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.never = image_token_ids(lm.config) if processor else ()  # the sampler writes no images

    def hidden(self, where, inputs):
        """What the output layer reads at flat positions, [L, H]."""
        body = families.decoder(self.lm)
        if "pixel_values" in inputs:
            body = self.lm.base_model
        return body(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]

    def forward(self, where, target, temperature, **inputs):
        """where [L]: flat positions that predict target [L] -> columns of `log_probs`."""
        hidden = self.hidden(where, inputs)
        weight = self.lm.get_output_embeddings().weight
        # CAREFUL: without the temperature the ratio would compare two different distributions
        options = dict(scale=self.scale / temperature, softcap=self.softcap, never=self.never)
        hidden = hidden.to(weight.dtype)  # float32 in Mamba
        return log_probs(hidden, weight, target, **options, entropy=self.entropy)


def read_model(path, attention, set_trained, sees_images=False, packing=True, beside=(), **changes):
    """-> the model without weights, on every rank; with its weights, on rank 0 alone; if texts share a row.

    attention: --attn_implementation. set_trained: decides what of a model is trained. That is float32; the
    rest has the dtype of its files. packing: False: no texts share a row. `beside`: models that read the same
    rows. changes: of the configuration; num_labels: a head for scores.
    """
    config = read_config(path, **changes)
    if packing and not sees_images:
        attention = packed_if_possible(attention, config, beside)
    auto = families.auto_class(config, scores="num_labels" in changes)
    full = None if dist.get_rank() else families.from_files(auto, path, **changes)
    config.tie_word_embeddings = of_first(full and full.config.tie_word_embeddings)
    dtype = of_first(full and full.config.dtype)
    dtypes = of_first(full and {name: x.dtype for name, x in full.state_dict().items()})
    with torch.device("meta"):
        lm = auto.from_config(config, dtype="float32", attn_implementation=attention)
        for x in families.unused_weights(lm, sees_images).values():
            x.requires_grad_(False)
        set_trained(lm)
        for name, p in lm.named_parameters():
            if not p.requires_grad:
                p.data = p.data.to(dtypes[name.replace(".base_layer", "")])
    lm.config.dtype = dtype  # of hf/, where its files do not say another
    if full:
        set_trained(full)
    return lm, full, attention == "packed"


def read_quantized(path, attention, set_trained, dtype, device, packing=True):
    """QLoRA (2305.14314): a model whose frozen weights are in 4 bits (NF4), whole on every rank -> it, and
    if texts share a row.
    """
    config = read_config(path)
    if packing:
        attention = packed_if_possible(attention, config)
    auto = families.auto_class(config)
    original_dtype = config.dtype
    with torch.device("meta"):
        unused = families.unused_weights(auto.from_config(config))
    whole = [f"{name.rpartition('.')[0]}$" for name in unused] + ["lm_head"]
    lm = families.from_files(
        auto,
        path,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        device_map={"": device},
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=whole if unused else None,
        ),
    )
    set_trained(lm.train())
    for p in lm.parameters():  # adapters are equal on all ranks, by the seed
        if p.requires_grad:
            p.data = p.data.float()
    del lm.config.quantization_config  # hf/ has whole weights
    lm.config.dtype = original_dtype or next(iter(lm.file_dtypes.values()), dtype)
    return lm, attention == "packed"


def read_config(path, **changes):
    """The model's configuration, without dropout."""
    logging.disable_progress_bar()  # of transformers
    config = AutoConfig.from_pretrained(path, **changes)
    for part in filter(None, (config, *(getattr(config, name) for name in config.sub_configs))):
        part.__dict__.pop("quantization_config", None)  # trained and saved weights are whole
        for name in part.to_dict():
            if "dropout" in name or name.endswith("_pdrop"):
                setattr(part, name, 0.0)  # CAREFUL: else the first ratio is not 1
    return config


def packed_if_possible(attention, config, beside=()):
    """The attention "packed", for texts that share a row, in place of sdpa, where all models allow it."""
    special = families.special_layers(config, one_row=True)
    for other in beside:
        special += families.special_layers(AutoConfig.from_pretrained(other), one_row=True)
    if attention != "sdpa" or special:
        return attention
    AttentionInterface.register("packed", packed_attention)
    return "packed"


def check_model(path, attention, set_trained):
    """Refuse a model that cannot be trained as its authors defined it -> the model, without weights.

    Raises ValueError or ImportError, or stops with one line.
    """
    config = AutoConfig.from_pretrained(path)
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if attention == "sdpa" and softcap:
        name = f"{path} ({config.model_type})"
        raise ValueError(f"{name} caps attention, sdpa cannot: --attn_implementation eager")
    with torch.device("meta"):  # all three refuse what they cannot do, before weights are loaded
        lm = families.auto_class(config).from_config(config, attn_implementation=attention)
        set_trained(lm)
        TokenLogps(lm)
    return lm


def parts_of(lm):
    """What FSDP gathers at a time: layers, and an embedding that is not the output layer; inner first."""
    parts = [m for m in lm.modules() if type(m).__name__ in lm._no_split_modules]
    if not lm.config.tie_word_embeddings:
        parts.append(lm.get_input_embeddings())
    return parts[::-1]


def kept_on_host(lm):
    """The option of FSDP that keeps shards in host memory; a layer is on the GPU while it computes."""
    lm.get_input_embeddings().register_forward_pre_hook(lambda _, x: send(x[0]))  # for Llama 4
    return dict(offload_policy=CPUOffloadPolicy())


def read_weights(lm, full):
    """Give each rank its shard of what rank 0 has read (full, elsewhere None)."""
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(lm, full.state_dict() if full else {}, options=options)
    for name, buffer in lm.named_buffers():  # rotary frequencies and the like are in no state dict
        if full:
            buffer.copy_(full.get_buffer(name))
        dist.broadcast(buffer, 0)
        layer, _, end = name.rpartition(".")
        setattr(lm.get_submodule(layer), end, buffer.to(compute_device()))
    lm.file_dtypes = of_first(full and full.file_dtypes)  # of hf/
    if full and lm.can_generate():  # it may name more EOS tokens
        lm.generation_config = full.generation_config


def freeze(lm):
    """Train nothing."""
    lm.requires_grad_(False)


def train_all(lm):
    """Train every weight that a loss can reach."""


def add_adapters(lm, rank, alpha, seed):
    """LoRA matrices next to the linear layers (2106.09685), and all else frozen; rank 0: train the model.

    All linear layers except experts, routers and the output layer.
    """
    if not rank:
        return
    import peft  # here, because it takes two seconds
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN as renamed

    renamed.clear()  # CAREFUL: peft would give adapters of shared experts to all experts
    body = {*families.decoder(lm).modules()}  # all but the output layer
    left_out = "gate", "router", "mamba.out_proj", "mixer.out_proj"  # Mamba's kernels skip adapters
    targets = []
    for name, layer in lm.named_modules():
        linear = type(layer) is nn.Linear and layer in body
        linear |= type(layer).__name__ == "Linear4bit"  # --qlora, which leaves the output layer whole
        if linear and ".experts." not in name and not name.endswith(left_out):
            targets.append(name)
    torch.manual_seed(seed)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, r=rank, lora_alpha=alpha), lm)


@contextmanager
def without_adapters(lm):
    """The model without its adapters, as it was before training, while the block lasts."""
    layers = [layer for layer in lm.modules() if hasattr(layer, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True  # CAREFUL: peft's enable_adapters(False) also freezes them
    yield
    for layer in layers:
        layer._disable_adapters = False


@torch.no_grad()
def whole_weights(lm, dtype, skipped=()):
    """Names and weights of the sharded model as its files have them, one whole weight at a time.

    Adapters are added to their layers, tied weights come once. A collective: all ranks consume all.
    """
    to_files = families.to_files(lm)
    for name, x in lm.state_dict(keep_vars=True).items():  # persistent buffers too
        if name in lm.all_tied_weights_keys or name in skipped or ".lora_" in name:
            continue
        layer, base, end = name.partition(".base_layer.")
        if base and end == "weight":
            x = merged_weight(lm.get_submodule(layer), x).to(dtype)
        elif isinstance(x, DTensor):
            x = x.to(compute_device(), dtype).full_tensor()  # a shard is cast before it travels
        yield from to_files({name.replace(".base_layer", ""): x}).items()


@torch.no_grad()
def merge_error(lm, dtype=None):
    """What rounding takes from the update of LoRA: the norm of the error over that of the update.

    dtype: of the sampler; none: of hf/, that of each weight in its file. Of about eight layers; {} without
    adapters. A collective.
    """
    layers = [(name, x) for name, x in lm.named_modules() if hasattr(x, "lora_A")]
    layers = [(name, x) for name, x in layers if x.base_layer.weight.is_floating_point()]  # not --qlora
    error = 0.0
    update = 0.0
    for name, layer in layers[:: max(len(layers) // 8, 1)]:
        rounded = dtype or lm.file_dtypes.get(f"{name}.weight", lm.config.dtype)
        weight = layer.base_layer.weight
        if isinstance(weight, DTensor):
            weight = weight.to(compute_device()).full_tensor()
        change = merged_weight(layer, torch.zeros_like(weight))
        merged = merged_weight(layer, weight).to(rounded).float() - weight.to(rounded).float()
        error += (merged - change).square().sum().item()
        update += change.square().sum().item()
    return {"lora/merge_error": math.sqrt(error / update)} if update else {}


def merged_weight(lora, weight):
    """The weight of a layer with its adapters added, W + (alpha / r) B A, in float32."""
    a = lora.lora_A.default.weight.to(compute_device()).full_tensor()
    b = lora.lora_B.default.weight.to(compute_device()).full_tensor()
    if hasattr(lora, "lora_E"):  # AdaLoRA
        a = a * lora.lora_E.full_tensor()[:, None]
    if isinstance(weight, DTensor):  # with --qlora it is whole
        weight = weight.to(compute_device()).full_tensor()
    return weight.float().addmm(b, a, alpha=lora.scaling["default"])  # eq: lora.weights
