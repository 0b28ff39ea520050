"""A reward model whose score is known: a tenth of the digit that ends the response, 0 if none does."""

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from data_prep.tiny_model import CHARACTERS

TOKENS = ["<pad>", "<unk>", "<user>", "<bot>", *reversed(CHARACTERS)]  # not the order of the actor's
TEMPLATE = "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}{{ m.content }}{% endfor %}"


def score(response):
    return int(response[-1]) / 10 if response[-1:].isdigit() else 0.0


def write_reward_model(out, **config):
    """No attention, no MLP, one-hot embeddings: the score is the head's weight for the last token."""
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    special = dict(pad_token="<pad>", unk_token="<unk>", additional_special_tokens=TOKENS[2:4])
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **special).save_pretrained(out)
    size = len(TOKENS) + len(TOKENS) % 2
    sizes = dict(hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config = dict(num_labels=1, pad_token_id=0, vocab_size=size, rms_norm_eps=1e-12) | sizes | config
    model = LlamaForSequenceClassification(LlamaConfig(**config))
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        weights = torch.tensor([score(token) if len(token) == 1 else 0.0 for token in TOKENS])
        # the norm makes a one-hot size**.5 long
        model.score.weight.zero_()[:, : len(TOKENS)] = weights / size**0.5
    model.save_pretrained(out)
