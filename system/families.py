"""What differs between model families.

Of a model with encoders, of images for instance, text trains the language model; all else is saved as it was.
"""

import copy
import inspect
import itertools
import json
import math
import re
import shutil
import sys
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import load_state_dict
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import cached_file

from data_prep.lib.source import Source
from system.arguments import fail
from system.files import ABOUT, files_of

PLAIN = {  # language models that differ only in the positions of images: type, and class in vLLM
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
# language models with layers that carry a state, whose texts may be in one row all the same
STATES = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "jamba", "falcon_h1", "bamba"}
STATES |= {"granitemoehybrid", "nemotron_h", "olmo_hybrid"}
KINDS = dict(linear_attention="mamba", full_attention="attention")  # of layers, as transformers 4 names them
DEQUANTISED = "fp8", "mxfp4", "compressed-tensors"  # what transformers loads as whole weights
# what comes along with a tokenizer; not Mistral's tekken.json, which has a chat template of its own
ALONG = "tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "merges.txt"
ALONG += "added_tokens.json", "special_tokens_map.json", *ABOUT
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


@cache
def takes_images(model, files):
    """Whether a model is shown images: it takes some, and one of these files has some."""
    with suppress(OSError, ValueError):  # whoever reads a file or a model says what is wrong
        if any(not {"images", "image"}.isdisjoint(Source(file).names) for file in files):
            return wrapped(AutoConfig.from_pretrained(model))
    return False


def refuse_images(model, files):
    """Stop a script that trains no images, where a model would be shown some."""
    if takes_images(model, files):
        kind = AutoConfig.from_pretrained(model).model_type
        fail(f"{model} ({kind}) takes images, which only grpo.py and sft.py do")


def check_positions(lm, max_length):
    """Stop if a row may have more tokens than a table of positions has rows."""
    config = lm.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    tables = [x for name, x in (*lm.named_parameters(), *lm.named_buffers()) if re.search("wpe|pos", name)]
    has_table = any(x.dim() == 2 and len(x) in (limit, limit + 2) for x in tables)  # OPT's has two more
    if has_table and max_length > limit:
        name = f"{config.name_or_path} ({config.model_type}) has a table of {limit} positions"
        fail(f"{name}, fewer than --max_length {max_length}")


def unused_weights(lm, sees_images=False):
    """{name: weight} of the encoders of a model that is trained on text alone."""
    if not wrapped(lm.config) or sees_images:
        return {}
    parts = decoder(lm), lm.get_output_embeddings(), getattr(lm, "score", None)
    used = {id(x) for part in parts if part for x in part.state_dict(keep_vars=True).values()}
    return {name: x for name, x in lm.state_dict(keep_vars=True).items() if id(x) not in used}


def auto_class(config, scores=False):
    """What loads a model of text, or of text and images; scores: with a head for a score as output layer.

    Stops with a line if it does not load them whole.
    """
    dequantised(config)
    if scores:
        return auto_classifier(config)
    if "SequenceClassification" in str(config.architectures):
        fail(f"{config.name_or_path} gives scores and no text: take the model that it was trained from")
    return AutoModelForImageTextToText if wrapped(config) else AutoModelForCausalLM


def special_layers(config, one_row=False):
    """What a model has besides attention to all earlier tokens.

    one_row: what keeps its texts from one row. The attention for that knows windows, where the model passes
    them to it, and `states_apart` of attention.py knows layers with a state.
    """
    auto = AutoModelForImageTextToText if wrapped(config) else AutoModelForCausalLM
    model = auto._model_mapping.get(type(config), None)
    text = config.get_text_config()
    names = "sliding_window", "attention_chunk_size", "attn_logit_softcapping", "index_topk"
    special = [name for name in names if getattr(text, name, None)]
    if one_row and "sliding_window" in special and passes_windows(text, model):
        special.remove("sliding_window")
    if one_row and text.model_type in STATES:
        return special
    if recurrent(text):
        special.append("a state")
    if not getattr(model, "_supports_attention_backend", False):
        special.append("attention of its own")
    return special


def passes_windows(text, model):
    """Whether a model passes windows to its attention, and no sinks; in some the mask alone has windows.

    text: its configuration of text; model: the class of the whole model, for a text part without an entry.
    """
    found = AutoModel._model_mapping.get(type(text), None) or model
    source = inspect.getsource(sys.modules[found.__module__]) if found else ""
    return re.search(r"sliding_window=(self|getattr)\b", source) and "s_aux" not in source


def recurrent(config):
    """Whether a layer passes a state along the row, across the borders between texts."""
    text = config.get_text_config()
    model = AutoModelForCausalLM._model_mapping.get(type(text), None)
    kinds = getattr(text, "layer_types", None) or []
    stateful = {"conv", "linear_attention", "hybrid", "hybrid_sliding"}
    return getattr(model, "_is_stateful", False) or not stateful.isdisjoint(kinds)


def to_files(lm):
    """The function from names and weights of a model to those of its files.

    What it needs is found once: transformers would walk through all modules for each weight.
    """
    if getattr(lm, "_weight_conversions", None) is None:
        found = get_model_conversion_mapping(lm, add_legacy=False)
        lm._weight_conversions = [x for x in found if not isinstance(x, PrefixChange)]
    return partial(revert_weight_conversion, lm) if lm._weight_conversions else dict


def rounding_limit(lm, dtype, rollout_quantization=None):
    """The mean |log-prob difference| of sampler and trainer that rounding alone may make.

    In a mixture, rounding chooses experts that nearly tie.
    """
    if rollout_quantization:
        return 0.3
    if dtype == "float32":
        return 1e-4
    if any(type(layer).__name__.endswith("Experts") for layer in lm.modules()):
        return 0.3
    return 0.1


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
    """The whole weights of a model's files -> the model."""
    whole = dequantised(AutoConfig.from_pretrained(model))
    options = dict(dtype="auto") | whole | changes
    with nullcontext() if "quantization_config" in options else own_dtypes(model):
        lm, found = auto.from_pretrained(model, output_loading_info=True, **options)
    if missing := sorted({*found["missing_keys"]} - {"score.weight"}):  # a new critic's head is random
        fail(f"{model}: its files lack weights of the model, {len(missing)} in all, such as {missing[0]}")
    if getattr(options.get("quantization_config"), "quant_method", None) == "compressed-tensors":
        from compressed_tensors.quantization import QuantizationMetadata

        lm.apply(QuantizationMetadata.clear_quantization)  # scales
    correct_ties(lm)
    lm._weight_conversions = None  # the names of hf/, whatever the files have
    lm.file_dtypes = {}
    if not whole:
        found = weights_of_files(model, lm)
        lm.file_dtypes = {name: x.dtype for name, (*_, x) in found.items()}
        say_left_out(lm, model, found)
    return lm


def correct_ties(lm):
    """Its configuration says that weights are tied only if the files have them once.

    That of Mistral Small 3.1 says nothing of its output layer, and transformers takes that for tied.
    """
    if len(lm.all_tied_weights_keys) < len(lm.get_expanded_tied_weights_keys(all_submodels=True)):
        lm.config.tie_word_embeddings = False


def directory_of(model):
    """Where the files of a model are, a directory or a name on the hub."""
    return Path(cached_file(model, "config.json")).parent


def weights_of_files(model, lm):
    """{name in hf/: (name in the model, file, name there, weight on the meta device)} of a model's files.

    Files may have other names, which transformers changes as it loads them: an older or newer version's, or
    those of a base model, as GPT-2's, which lack the model's prefix.
    """
    rules = get_model_conversion_mapping(lm)
    renamings = [x for x in rules if isinstance(x, WeightRenaming)]
    converters = [x for x in rules if not isinstance(x, WeightRenaming)]
    own = lm.state_dict(keep_vars=True)
    convert = to_files(lm)
    empty = partial(torch.empty, device="meta")  # a weight of 4 bits cannot be moved there
    names = {key: [*convert({key: empty(x.shape)})] for key, x in own.items()}
    found = {}
    for file in files_of(directory_of(model)):
        for there, x in load_state_dict(str(file), map_location="meta").items():
            key, _ = rename_source_key(there, renamings, converters, lm.base_model_prefix, own)
            # a weight of the model may be many in files, which share their ends with those of hf/
            name = there
            if key in names and there not in names[key]:
                name = max(names[key], key=partial(shared_end, there))
            found[name] = key, file, there, x
    return found


def shared_end(one, other):
    """How many characters the ends of two names share."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other)))
    return len([*same])


def say_left_out(lm, model, found):
    """Say which weights of the files transformers does not load; buffers, which it makes itself, are none."""
    patterns = lm._keys_to_ignore_on_load_unexpected or ()
    matrices = [name for _, _, name, x in found.values() if x.dim() > 1]
    lost = [name for name in matrices if any(re.search(pattern, name) for pattern in patterns)]
    if lost:
        print(f"{model}: {len(lost)} weights are neither trained nor saved: {lost[0]} ...", file=sys.stderr)


@contextmanager
def own_dtypes(model):
    """Load weights in the dtypes of their files while the block lasts, where these are wider than its own."""
    usual = PreTrainedModel._get_dtype_plan

    def plan(lm, dtype):
        found = usual(lm, dtype)
        for key, *_, x in weights_of_files(model, lm).values():
            if torch.promote_types(x.dtype, dtype) != dtype:
                found[f"^{re.escape(key)}$"] = x.dtype
        return found

    PreTrainedModel._get_dtype_plan = plan
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = usual


def wider_weights(found, dtype):
    """Yield names in hf/ and weights that files have in a wider dtype. found: of `weights_of_files`."""
    wide = {}
    for name, (_, file, there, x) in found.items():
        if torch.promote_types(x.dtype, dtype) != dtype:
            wide.setdefault(file, {})[name] = there
    for file, names in wide.items():
        weights = load_state_dict(str(file))
        for name, there in names.items():
            yield name, weights[there]


def vllm_options(config, sees):
    """Options of an engine that depend on whether the model sees images."""
    hf = hf_overrides(config, sees)
    options = dict(hf_overrides=hf, language_model_only=not sees, skip_tokenizer_init=not sees)
    # CAREFUL: the processor normalises pixels, because no sync brings the buffers that would do it
    return options | dict(mm_device_do_normalize=False, mm_hasher_algorithm="sha256")


def hf_overrides(config, sees):
    """For vLLM: a model that sees no images is its language model, where vLLM has a class for that."""
    from vllm import ModelRegistry

    auto_class(config)  # stops on a model without text
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
    untied = text.tie_word_embeddings and has_own_head(config.name_or_path)
    alone = not sees and wrapped(config) and architecture in ModelRegistry.get_supported_archs()

    def change(given):
        changed = text if alone else given
        for part in (changed, changed.get_text_config()):
            part.__dict__.pop("quantization_config", None)  # a sync brings whole weights
            if untied:
                part.tie_word_embeddings = False
        changed.head_dtype = "float32"  # of the output layer, as in the trainer
        return changed

    return change


def has_own_head(model):
    """Whether files have an output layer that is not the embedding, whatever the configuration says."""
    found = {}
    for file in files_of(directory_of(model)):
        if file.suffix != ".safetensors" or not file.is_file():  # torch's have both names, of one weight
            return False
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dict
                for end in ("lm_head.weight", "embed_tokens.weight"):
                    if name.endswith(end):
                        found[end] = weights.get_tensor(name)
    return len(found) == 2 and not torch.equal(*found.values())


def vllm_names(weights, config, vllm_config):
    """Weights as vLLM loads them; where it has the language model alone, those of it, under its names."""
    for name, x in weights:
        if not wrapped(config) or wrapped(vllm_config):
            yield name, x
        elif INSIDE.match(name):
            yield WRAPPER.sub("", name), x


def score_text(lm, *inputs, **options):
    """The forward of a classifier, by its decoder alone: the model around Llama 4's gives logits."""

    # Mamba's output has no key `past_key_values`
    def body(*inputs, **options):
        return BaseModelOutputWithPast(decoder(lm)(*inputs, **options)[0])

    text = SimpleNamespace(model=body, base_model_prefix="model", score=lm.score, config=lm.config)
    return GenericForSequenceClassification.forward(text, *inputs, **options)


def auto_classifier(config):
    """AutoModelForSequenceClassification, which also knows models that transformers leaves out."""
    method = getattr(dequantised(config).get("quantization_config"), "quant_method", None)
    if method == "compressed-tensors" and "SequenceClassification" not in str(config.architectures):
        problem = f"{config.name_or_path} has weights in {method}, to which no head for scores is added"
        fail(f"{problem}: take the checkpoint that it was made of, in bfloat16")
    known = AutoModelForSequenceClassification._model_mapping
    kind = type(config)
    if known.get(kind, None) is None:
        base = AutoModel._model_mapping[kind]
        name = base.__name__.removesuffix("Model").removesuffix("ForConditionalGeneration")
        parents = GenericForSequenceClassification, base.__mro__[1]
        # of the family's module: so its files have the family's names
        fields = dict(__module__=base.__module__, base_model_prefix=base.base_model_prefix)
        made = type(f"{name}ForSequenceClassification", parents, fields | dict(forward=score_text))
        AutoModelForSequenceClassification.register(kind, made, exist_ok=True)
    return AutoModelForSequenceClassification


def add_older_names(file):
    """Add to a config.json what transformers 4 reads, which knows no `rope_parameters`."""

    def add(config):
        family = config.get("model_type", "")
        rope = dict(config.get("rope_parameters") or {})
        if family.startswith("gemma3") and rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        if family == "modernbert-decoder" and rope:
            config["global_rope_theta"] = rope["full_attention"]["rope_theta"]
            config["local_rope_theta"] = rope["sliding_attention"]["rope_theta"]
        if family.startswith(("gemma3", "olmo3")):  # by kind of layer
            rope = dict(rope.get("full_attention", rope))
        if "rope_theta" in rope:
            for name in {"rope_theta", "partial_rotary_factor"} & rope.keys():
                config[name] = rope.pop(name)
            if rope["rope_type"] == "longrope":  # as Phi-3 has it
                config["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
                rope["type"] = rope.pop("rope_type")
            config["rope_scaling"] = rope if len(rope) > 1 else None
        if family.startswith("gpt_neox") and rope:
            config |= dict(rotary_pct=config["partial_rotary_factor"], rotary_emb_base=config["rope_theta"])
        if family.startswith(("qwen3_moe", "qwen3_vl_moe_text")):
            config["num_experts"] = config["num_local_experts"]
        for name in {"granitemoehybrid": ["layer_types"], "zamba2": ["layers_block_type"]}.get(family, ()):
            config[name] = [KINDS.get(kind, kind) for kind in config[name]]
        return float(config["__float__"]) if "__float__" in config else config

    config = json.loads(file.read_text(), object_hook=add)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_tokenizer(tokenizer, model, directory):
    """Save a tokenizer, or a processor with one, with what its model's directory has of it.

    transformers 4 too makes the same ids of a text.
    """
    tokenizer.save_pretrained(directory)
    text = getattr(tokenizer, "tokenizer", tokenizer)
    start = Path(model)
    if not start.is_dir():  # it may be gone: a checkpoint that its run has deleted
        with suppress(OSError):
            start = directory_of(model)
    # what a run on text alone does not load: the files of what makes inputs of images
    for name in (*ALONG, "*processor_config.json") if text is tokenizer else ALONG:
        for path in filter(Path.is_file, start.glob(name)):
            shutil.copyfile(path, directory / path.name)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    given = {}
    with suppress(FileNotFoundError):
        given = json.loads((start / file.name).read_text("utf-8"))
    generic = "TokenizersBackend"  # transformers 5's class that takes tokenizer.json as it is
    named = given.get("tokenizer_class", generic)
    if type(text).__name__ == generic and named != generic:
        config = given  # converters may want this class, of which transformers 5 takes no rules here
    elif text.is_fast:
        for old, new in ("additional", "extra"), ("extra", "model_specific"):
            given.pop(f"{new}_special_tokens", None)
            if f"{new}_special_tokens" in config:
                config[f"{old}_special_tokens"] = config.pop(f"{new}_special_tokens")
        config = given | config | dict(tokenizer_class="PreTrainedTokenizerFast")
        config |= dict(padding_side=text.padding_side, model_input_names=text.model_input_names)
    spaces = "clean_up_tokenization_spaces"  # `load_processor` changes it
    if spaces in given:
        config[spaces] = given[spaces]
    for name in ("local_files_only", "is_local", "chat_template"):  # the template has a file
        config.pop(name, None)
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
