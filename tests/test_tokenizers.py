"""Whatever class transformers takes for a tokenizer, it makes the ids of the model's tokenizer.json."""

import json
from itertools import product

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from common.families import save_tokenizer
from data_prep.lib.images import load_processor, load_tokenizer

TEXT = "Pay 12,345.67 for hello world (x+1) 1234... HELLO\n\n  two  don't <|end|>\nÜber é"
NAMED = [  # model type, and the class that its tokenizer_config.json names, as published models have them
    ("llama", "LlamaTokenizerFast"),  # deepseek-math-7b, DeepSeek-R1-Distill-Llama
    ("llama", "LlamaTokenizer"),
    ("llama", "PreTrainedTokenizerFast"),  # Llama 3
    ("llama", "GPT2Tokenizer"),  # SmolLM2
    ("starcoder2", "GPT2Tokenizer"),
    ("gpt2", "GPT2Tokenizer"),
    ("granite", "GPT2Tokenizer"),
    ("olmo2", "GPT2Tokenizer"),
    ("phi", "CodeGenTokenizer"),
    ("gpt_neox", "GPTNeoXTokenizer"),
    ("qwen2", "LlamaTokenizerFast"),  # DeepSeek-R1-Distill-Qwen
    ("qwen2", "Qwen2Tokenizer"),
    ("qwen3", "Qwen2TokenizerFast"),
    ("mistral", "LlamaTokenizer"),
    ("cohere", "CohereTokenizerFast"),
    ("deepseek_v3", "LlamaTokenizerFast"),
    ("bloom", "BloomTokenizerFast"),
]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])
THREES = [pre_tokenizers.Split(Regex(r"\d{1,3}(?=(\d{3})*\b)"), "isolated"), BYTES]
SPLITS = {"plain": BYTES, "digits": DIGITS, "threes": pre_tokenizers.Sequence(THREES)}


def pieces():
    """As Llama 2 has it: a word begins with ▁, and what no piece has is bytes; no splits."""
    alphabet = sorted({*TEXT.replace(" ", "▁")} - {"Ü"})
    vocab = ["<unk>", "<s>", "<|end|>", *(f"<0x{i:02X}>" for i in range(256)), *alphabet, "el", "▁w", "▁▁"]
    merges = [("e", "l"), ("▁", "w"), ("▁", "▁")]
    own = Tokenizer(
        models.BPE({x: i for i, x in enumerate(vocab)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    own.decoder = decoders.Sequence([*parts])
    own.add_special_tokens([AddedToken(x, special=True) for x in vocab[:3]])
    return own


@pytest.fixture(scope="module", params=product(SPLITS, (None, normalizers.NFC(), normalizers.Lowercase())))
def file(request):
    """A byte-level tokenizer, of pieces that some of the splits do not allow."""
    splits, normalizer = request.param
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = BYTES, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    own.train_from_iterator([TEXT.replace("<|end|>", "12 34 56 123 345 67")] * 50, words)
    own.pre_tokenizer, own.normalizer = SPLITS[splits], normalizer or own.normalizer
    own.add_special_tokens([AddedToken(x, special=True) for x in ("<unk>", "<s>", "<|end|>")])
    return own


@pytest.mark.parametrize("family", NAMED, ids="-".join)
def test_ids_are_those_of_the_file(family, file, tmp_path):
    check(*family, file, tmp_path)


@pytest.mark.parametrize(
    "family", [("llama", "LlamaTokenizer"), ("mistral", "LlamaTokenizerFast"), *NAMED[5:7]]
)
def test_ids_of_pieces(family, tmp_path):
    check(*family, pieces(), tmp_path)


def check(kind, name, file, tmp_path):
    """Read from the model's directory, and from hf/ of a run."""
    file.save(str(tmp_path / "tokenizer.json"))
    about = dict(tokenizer_class=name, eos_token="<|end|>", unk_token="<unk>", bos_token="<s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    numbers = dict(vocab_size=1000, bos_token_id=None, eos_token_id=None)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type=kind) | numbers))
    ids = file.encode(TEXT, add_special_tokens=False).ids
    saved = tmp_path / "hf"
    save_tokenizer(load_processor(str(tmp_path)), str(tmp_path), saved)
    (saved / "config.json").write_text((tmp_path / "config.json").read_text())
    readers = [load_tokenizer(str(tmp_path)), load_tokenizer(str(saved))]
    if kind != "qwen2":  # for which transformers takes a class of its own whatever a directory names
        readers.append(AutoTokenizer.from_pretrained(saved))
    for tokenizer in readers:
        assert tokenizer.encode(TEXT, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == file.decode(ids, skip_special_tokens=False)
