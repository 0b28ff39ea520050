"""A small random Idefics3, which sees pictures, with its processor, as a Hugging Face directory; no network.

    python data_prep/tiny_vlm.py --local_save_dir models/tiny_vlm

Chat format: <|user|>, for each picture <image>, which the processor makes 16 of, and then as tiny_model.py.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass

from system.arguments import parse


@dataclass
class Args:
    local_save_dir: str = "models/tiny_vlm"
    """Directory for the model and the processor; an old model there is replaced."""
    hidden_size: int = 128
    """Width of the residual stream; heads are 32 wide."""
    layers: int = 2
    """Number of layers of the language model, and of the vision tower."""
    image_size: int = 32
    """Height and width to which pictures are brought, in pixels; a token stands for 8 by 8 of them."""
    max_positions: int = 1024
    """Longest sequence, in tokens."""
    seed: int = 0
    """Seed of the weights."""


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import torch
from transformers import GenerationConfig, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.utils import logging

from data_prep.tiny_model import CHAT_TEMPLATE, make_tokenizer
from system.files import replacing

PATCH, SCALE = 4, 2  # pixels of a patch, and patches of a token, along one side
PICTURE_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
TEMPLATE = CHAT_TEMPLATE.replace(
    "'|>' ~ message.content -}}",
    """'|>' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}{{- '<image>' if part.type == 'image' else part.text -}}{%- endfor -%}
{%- endif -%}""",
)


def make_processor(args):
    """The tokenizer of tiny_model.py with the tokens of pictures, and what cuts pictures to size."""
    tokenizer = make_tokenizer()
    special = [*tokenizer.extra_special_tokens, *PICTURE_TOKENS]
    tokenizer.add_special_tokens(dict(additional_special_tokens=special))
    edge = dict(longest_edge=args.image_size)
    pictures = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    tokens = (args.image_size // PATCH // SCALE) ** 2
    return Idefics3Processor(pictures, tokenizer, image_seq_len=tokens, chat_template=TEMPLATE)


def make_model(args, processor):
    """An Idefics3 with seeded random weights; ValueError for sizes that do not fit together."""
    if args.hidden_size % 32 or args.image_size % (PATCH * SCALE):
        sizes = f"--hidden_size {args.hidden_size}, --image_size {args.image_size}"
        raise ValueError(f"{sizes}: they must be multiples of 32 and of {PATCH * SCALE}")
    tokenizer = processor.tokenizer
    sizes = dict(hidden_size=args.hidden_size)
    sizes |= dict(num_hidden_layers=args.layers, num_attention_heads=args.hidden_size // 32)
    text = sizes | dict(model_type="llama", vocab_size=len(tokenizer), intermediate_size=4 * args.hidden_size)
    text |= dict(max_position_embeddings=args.max_positions, pad_token_id=tokenizer.pad_token_id)
    text |= dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True)
    vision = sizes | dict(image_size=args.image_size, patch_size=PATCH)
    vision |= dict(intermediate_size=2 * args.hidden_size)
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=SCALE,
        image_token_id=processor.image_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(args.seed)
    model = Idefics3ForConditionalGeneration(config)
    ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.generation_config = GenerationConfig(**ids)
    return model


def main(args):
    """Write the directory and say how large the model is."""
    processor = make_processor(args)
    model = make_model(args, processor)
    logging.disable_progress_bar()
    with replacing(args.local_save_dir) as new:
        model.save_pretrained(new)
        processor.save_pretrained(new)
    print(f"{args.local_save_dir}: {model.num_parameters():,} parameters, {len(processor.tokenizer)} tokens")


if __name__ == "__main__":
    try:
        main(Args(**flags))
    except ValueError as error:
        sys.exit(f"tiny_vlm.py: {error}")
