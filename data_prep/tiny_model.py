"""A small random Llama with a character tokenizer, as a Hugging Face directory; needs no network.

    python data_prep/tiny_model.py --local_save_dir models/tiny

Chat format: <|user|>37+85=<|assistant|>122<|eos|>
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

from dataclasses import dataclass

from system.arguments import parse


@dataclass
class Args:
    local_save_dir: str = "models/tiny"
    """Directory for the model and the tokenizer; an old model there is replaced."""
    hidden_size: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of layers."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 4
    """Key and value heads; a divisor of heads."""
    intermediate_size: int = 512
    """Width of the MLP."""
    max_positions: int = 2048
    """Longest sequence, in tokens."""
    tie_embeddings: bool = True
    """Use the input embedding as the output layer too."""
    tool_role: bool = False
    """Give the answers of tools a role and a special token: <|tool|>3145."""
    init_std: float = 0.02
    """Standard deviation of the random weights; a model this small learns sooner with 0.05."""
    seed: int = 0
    """Seed of the weights."""


if __name__ == "__main__":
    flags = parse(Args)  # before torch is loaded: a wrong flag is answered at once

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from system.files import replacing

HEAD_DIMS = (32, 64, 80, 96, 112, 128)  # of vLLM's CPU attention
SPECIAL = ("<|pad|>", "<|eos|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role ' ~ message.role) -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>' ~ message.content -}}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def make_tokenizer(tool_role=False):
    """One token a character (printable ASCII and newline), the special tokens around them, no BOS."""
    tool = ("<|tool|>",) * tool_role  # at the end: the ids of the others do not depend on it
    vocab = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS, *tool))}
    template = CHAT_TEMPLATE.replace("'assistant']", "'assistant', 'tool']") if tool_role else CHAT_TEMPLATE
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|eos|>",  # CAREFUL: not the pad token, or masking padding would mask it too
        unk_token="<|unk|>",
        additional_special_tokens=[*SPECIAL[3:], *tool],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def make_model(args, tokenizer):
    """A LlamaForCausalLM with seeded random weights; ValueError for sizes that do not fit together."""
    if args.hidden_size % args.heads or args.hidden_size // args.heads not in HEAD_DIMS:
        raise ValueError(
            f"--hidden_size {args.hidden_size} / --heads {args.heads}: vLLM on CPU takes head sizes"
            f" {', '.join(map(str, HEAD_DIMS))} only"
        )
    if args.heads % args.kv_heads:
        raise ValueError(f"--kv_heads {args.kv_heads} does not divide --heads {args.heads}")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.max_positions,
        tie_word_embeddings=args.tie_embeddings,
        initializer_range=args.init_std,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def main(args):
    """Write the directory and say how large the model is."""
    tokenizer = make_tokenizer(args.tool_role)
    model = make_model(args, tokenizer)
    logging.disable_progress_bar()
    with replacing(args.local_save_dir) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
    print(f"{args.local_save_dir}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    try:
        main(Args(**flags))
    except ValueError as error:
        sys.exit(f"tiny_model.py: {error}")
