"""Models that take more than text: a language model, wrapped together with a vision tower, say.

Trained on text alone, their language model runs and learns; all else is frozen, and is saved as it was.
"""

import copy
import re
import shutil
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import cached_file

from common.run import fail

PLAIN = {  # language models that differ only in the positions of images: type, and class in vLLM
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
DEQUANTISED = "fp8", "mxfp4", "compressed-tensors"  # what transformers loads as whole weights
WRAPPER = re.compile(r"(language|text)_model\.")
INSIDE = re.compile(r"(model\.)?(language_model|text_model|layers|embed_tokens|norm|lm_head)\.")


def wrapped(config):
    """Whether a model has more than a language model."""
    return config.get_text_config() is not config


def decoder(lm):
    """The part of a model that makes hidden states of token ids."""
    if not wrapped(lm.config):
        return lm.base_model
    inner = lm.get_decoder()
    return getattr(inner, "model", inner)  # Llama 4's is a whole causal LM


def freeze_towers(lm):
    """Freeze the weights of a model that text does not meet -> their names."""
    if not wrapped(lm.config):
        return set()
    parts = decoder(lm), lm.get_output_embeddings(), getattr(lm, "score", None)
    used = {id(x) for part in parts if part for x in part.state_dict(keep_vars=True).values()}
    unused = {name: x for name, x in lm.state_dict(keep_vars=True).items() if id(x) not in used}
    for x in unused.values():
        x.requires_grad_(False)
    return {*unused}


def dequantised(config):
    """How transformers makes a model's weights of 8 or 4 bits whole when it loads them; otherwise {}."""
    parts = config, config.get_text_config()
    form = next(filter(None, (getattr(part, "quantization_config", None) for part in parts)), None)
    if form is None:
        return {}
    if (method := form.get("quant_method")) not in DEQUANTISED:
        problem = f"{config.name_or_path} has weights in {method}, which cannot be trained"
        fail(f"{problem}: take the checkpoint that it was made of, in bfloat16")
    return dict(quantization_config=AutoQuantizationConfig.from_dict(form | dict(dequantize=True)))


def from_files(auto, model, **changes):
    """The whole weights of a model's files -> the model.

    Its attribute `untied`: whether the files have weights apart that its configuration ties. That of Mistral
    Small 3.1 says nothing of its output layer, and transformers takes that for tied.
    """
    options = dict(dtype="auto") | dequantised(AutoConfig.from_pretrained(model)) | changes
    lm, found = auto.from_pretrained(model, output_loading_info=True, **options)
    if missing := sorted({*found["missing_keys"]} - {"score.weight"}):  # a new critic's head is random
        fail(f"{model}: its files lack weights of the model, {len(missing)} in all, such as {missing[0]}")
    if getattr(options.get("quantization_config"), "quant_method", None) == "compressed-tensors":
        from compressed_tensors.quantization import QuantizationMetadata

        lm.apply(QuantizationMetadata.clear_quantization)  # scales
    tied = lm.get_expanded_tied_weights_keys(all_submodels=True)
    lm.untied = len(lm.all_tied_weights_keys) < len(tied)
    if lm.untied:
        lm.config.tie_word_embeddings = False
    return lm


def flatten_rotary(ops):
    """CAREFUL: vLLM's rotary kernel for a CPU reads LFM2's [tokens, heads, size] at wrong positions."""
    kernel = ops.rotary_embedding

    def flat(positions, query, key, *options):
        tokens = positions.numel()
        key = None if key is None else key.view(tokens, -1)
        kernel(positions, query.view(tokens, -1), key, *options)  # in place

    ops.rotary_embedding = kernel if torch.cuda.is_available() else flat


def hf_overrides(config, sees):
    """For vLLM: a model that sees no images is its language model, where vLLM has a class for that."""
    from vllm import ModelRegistry, _custom_ops

    flatten_rotary(_custom_ops)
    text = copy.deepcopy(config).get_text_config()
    if text.model_type.startswith("qwen3_5") and not find_spec("torchvision"):
        need = f"vLLM needs torchvision: install the build for torch {torch.__version__}"
        fail(f"{config.name_or_path} ({config.model_type}): {need}")
    architecture = getattr(AutoModelForCausalLM._model_mapping.get(type(text), None), "__name__", None)
    if text.model_type in PLAIN:
        architecture = PLAIN[text.model_type]
        for name in ("mrope_section", "mrope_interleaved"):  # a token of text has one position
            text.rope_parameters.pop(name, None)
    text.architectures = [architecture]
    text.tie_word_embeddings = getattr(text, "tie_word_embeddings", config.tie_word_embeddings)
    alone = not sees and wrapped(config) and architecture in ModelRegistry.get_supported_archs()

    def change(given):
        changed = text if alone else given
        for part in (changed, changed.get_text_config()):
            part.__dict__.pop("quantization_config", None)  # a sync brings whole weights
        changed.head_dtype = "float32"  # of the output layer, as in the trainer
        return changed

    return change


def vllm_names(weights, config, vllm_config):
    """Weights as vLLM loads them; where it has the language model alone, those of it, under its names."""
    for name, x in weights:
        if not wrapped(config) or wrapped(vllm_config):
            yield name, x
        elif INSIDE.match(name):
            yield WRAPPER.sub("", name), x


def score_text(lm, *inputs, **options):
    """The forward of a classifier, by its decoder alone: the model around Llama 4's gives logits."""
    text = SimpleNamespace(model=decoder(lm), base_model_prefix="model", score=lm.score, config=lm.config)
    return GenericForSequenceClassification.forward(text, *inputs, **options)


def auto_classifier(config):
    """AutoModelForSequenceClassification, which also knows wrapped models that transformers leaves out."""
    method = getattr(dequantised(config).get("quantization_config"), "quant_method", None)
    if method == "compressed-tensors" and "SequenceClassification" not in str(config.architectures):
        problem = f"{config.name_or_path} has weights in {method}, to which no head for scores is added"
        fail(f"{problem}: take the checkpoint that it was made of, in bfloat16")
    known, kind = AutoModelForSequenceClassification._model_mapping, type(config)
    if wrapped(config) and known.get(kind, None) is None:
        base = AutoModel._model_mapping[kind]
        name = base.__name__.removesuffix("Model").removesuffix("ForConditionalGeneration")
        parents = GenericForSequenceClassification, base.__mro__[1]
        # of the family's module: so its files have the family's names
        fields = dict(__module__=base.__module__, forward=score_text)
        made = type(f"{name}ForSequenceClassification", parents, fields)
        AutoModelForSequenceClassification.register(kind, made, exist_ok=True)
    return AutoModelForSequenceClassification


def copy_processor(lm, model, directory):
    """Copy what a run on text alone does not load: the files of what makes inputs of images."""
    if not lm.towers:
        return
    quiet = dict(_raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        if path := cached_file(model, name, **quiet):
            shutil.copyfile(path, directory / name)
