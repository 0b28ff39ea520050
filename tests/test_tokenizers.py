"""Whatever class transformers takes for a tokenizer, it makes the ids of the model's tokenizer.json."""

import json
import os
import shutil
from itertools import groupby, pairwise, product

import pytest
from conftest import golden
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from data_prep.lib.cache import load_prompts
from data_prep.lib.images import load_processor, load_tokenizer
from data_prep.lib.schema import write_parquet
from data_prep.lib.templates import render
from data_prep.lib.turns import answer_ids, encode_messages, ids_after
from system.families import save_tokenizer

TEXT = "Pay 12,345.67 for hello world (x+1) 1234... HELLO\n\n  two  don't <|end|>\nÜber é"
# model type, and the class that its tokenizer_config.json names, as published models have them
NAMED = [(case["model_type"], case["tokenizer_class"]) for case in golden("named_tokenizers")]
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
    own, words = bytes_of(False)
    words.vocab_size = 400
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


# model type, class in tokenizer_config.json, and whether hf/ has it: not if transformers has rules of its own
ALONG = [
    ("llama", "LlamaTokenizer", False, pieces),
    ("phi3", "LlamaTokenizer", True, pieces),
    ("llama", "PreTrainedTokenizerFast", True, lambda: bytes_of(False)[0]),
    ("llama", "GPT2Tokenizer", False, lambda: bytes_of(False)[0]),
    ("phi3", "GPT2Tokenizer", True, lambda: bytes_of(False)[0]),
]


@pytest.mark.parametrize(("kind", "name", "kept", "make"), ALONG)
def test_files_of_a_tokenizer_come_along(kind, name, kept, make, tmp_path):
    """As they are, for converters that read others than tokenizer.json; with another chat template, too."""
    own, start = make(), tmp_path / "start"
    own.add_special_tokens([AddedToken(x, special=True) for x in ("<unk>", "<s>", "<|end|>", "<|added|>")])
    start.mkdir()
    (start / "config.json").write_text(json.dumps(dict(model_type=kind, vocab_size=1000)))
    (start / "tokenizer.json").write_text(own.to_str())  # all in one line
    ids = {x: own.token_to_id(x) for x in ("<unk>", "<s>", "<|end|>", "<|added|>")}
    added = {str(i): dict(content=x, special=True) for x, i in ids.items()}
    about = dict(eos_token="<|end|>", unk_token="<unk>", bos_token="<s>", add_eos_token=False)
    about |= dict(
        added_tokens_decoder=added, tokenizer_class=name, chat_template="old", local_files_only=True
    )
    (start / "tokenizer_config.json").write_text(json.dumps(about))
    (start / "added_tokens.json").write_text(json.dumps(ids))
    (start / "special_tokens_map.json").write_text(json.dumps(dict(eos_token="<|end|>")))
    others = "tokenizer.model", "vocab.json", "merges.txt", "README.md", "LICENSE.txt"
    for other in (*others, "adapter_config.json", "model.safetensors.index.json", "notes.txt"):
        (start / other).write_text(f"{other} é")
    tokenizer = load_processor(str(start))
    tokenizer.chat_template = "new"
    stages = start, tmp_path / "first", tmp_path / "second"
    for before, after in pairwise(stages):
        save_tokenizer(tokenizer, str(before), after)
        for file in (*others, "tokenizer.json", "added_tokens.json", "special_tokens_map.json"):
            assert (after / file).read_bytes() == (start / file).read_bytes(), file
        made = {"tokenizer_config.json", "chat_template.jinja"}
        assert {x.name for x in after.iterdir()} - made < {x.name for x in start.iterdir()}
        assert not {"adapter_config.json", "model.safetensors.index.json", "notes.txt"} & {*os.listdir(after)}
        assert (after / "chat_template.jinja").read_text() == "new"
        found = json.loads((after / "tokenizer_config.json").read_text())
        assert found["tokenizer_class"] == (name if kept else "PreTrainedTokenizerFast")
        assert found["added_tokens_decoder"].keys() == added.keys() and found["add_eos_token"] is False
        assert not {"local_files_only", "chat_template"} & found.keys()
        (after / "config.json").write_text((start / "config.json").read_text())
        tokenizer = load_processor(str(after))
        assert tokenizer.chat_template == "new"
        assert (
            tokenizer.encode(TEXT, add_special_tokens=False) == own.encode(TEXT, add_special_tokens=False).ids
        )
    save_tokenizer(tokenizer, str(tmp_path / "gone"), tmp_path / "third")  # a checkpoint that was deleted
    assert load_tokenizer(str(tmp_path / "third")).encode(TEXT) == tokenizer.encode(TEXT)


def bytes_of(trim):
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim)
    own.decoder, own.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=trim)
    kind = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    return own, kind


def sentencepiece(model, kind):
    own = Tokenizer(model)
    own.pre_tokenizer, own.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return own, kind(show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])


def wordpiece():
    own = Tokenizer(models.WordPiece(unk_token="<unk>"))
    own.pre_tokenizer, own.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    return own, trainers.WordPieceTrainer(show_progress=False, special_tokens=["<unk>"])


KINDS = {
    "byte-level": lambda: bytes_of(False),
    "byte-level, trim_offsets": lambda: bytes_of(True),
    "SentencePiece": lambda: sentencepiece(models.BPE(unk_token="<unk>"), trainers.BpeTrainer),
    "Unigram": lambda: sentencepiece(models.Unigram(), trainers.UnigramTrainer),
    "WordPiece": wordpiece,
}
ENDS = " ", "\n", ":", "<|a|>", "four"  # of a generation prompt: a space, a line end, a mark, a letter
TURNS = (
    "{%- for m in messages -%}{{- '### ' ~ m.role ~ ':' ~ END ~ m.content -}}"
    "{%- if m.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '### assistant:' ~ END -}}{%- endif -%}"
)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_turns_follow_the_ids_that_a_sampler_is_given(kind, end, tmp_path):
    """Those of the prompt's text alone, in every trainer; what follows decodes to what was said."""
    own, trainer = KINDS[kind]()
    text = "### user: what is four\n### assistant: four is the answer\n### user:four\nfour four\n"
    own.train_from_iterator([text, "four fourfour is\nis four", "what\n\nfour"] * 50, trainer)
    own.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in ("<|end|>", "<|a|>")])
    t = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|end|>", unk_token="<unk>")
    t.chat_template = TURNS.replace("END", repr(end))
    user, says = (
        [dict(role=x, content=y) for y in z]
        for x, z in (
            ("user", ("what is four", "and what")),
            ("assistant", ("four is", " the answer", "\nfour", "is")),
        )
    )
    for first, second in product(says, says):
        talk = [user[0], first, user[1], second]
        given = [t(render(talk[:i], t), add_special_tokens=False)["input_ids"] for i in (1, 3)]
        starts = []
        for ids, trained in encode_messages(talk, t):
            runs = [[*run] for on, run in groupby(range(len(ids)), key=trained.__getitem__) if on]
            starts += [ids[: run[0]] for run in runs]
            for run, message in zip(runs, (first, second)[len(starts) - len(runs) :]):
                whole = t.decode(ids[: run[-1]], clean_up_tokenization_spaces=False)
                said = f":{end}{message['content']}"
                if kind == "WordPiece":
                    said, whole = ("".join(x.split()) for x in (said, whole))
                together = t(f"{t.decode(ids[: run[0]])}{message['content']}", add_special_tokens=False)
                assert whole.endswith(said) or ids[: run[-1]] == together["input_ids"]
        assert starts == given
        row = dict(prompt=user[:1], data_source="x", reward_model=dict(style="model"), extra_info=dict(i=1))
        write_parquet([row], tmp_path / "x.parquet")
    [prompt] = load_prompts([tmp_path / "x.parquet"], t, 99)[0]
    assert prompt["prompt_ids"] == given[0]
    assert answer_ids(given[0], "four", t)[:-1] == ids_after(render(user[:1], t), "four", t)


def test_a_tokenizer_in_plain_python():
    t = ByT5Tokenizer()
    t.chat_template = TURNS.replace("END", "' '")
    [(ids, trained)] = encode_messages(
        [dict(role="user", content="hi"), dict(role="assistant", content="yo")], t
    )
    assert t.decode([x for x, on in zip(ids, trained) if on]) == "yo</s>"


def test_a_clean_up_of_spaces_is_saved_as_it_came(tiny, tmp_path):
    """Responses are decoded without it: a reward sees what was sampled."""
    start = shutil.copytree(tiny, tmp_path / "start")
    config = json.loads((start / "tokenizer_config.json").read_text())
    (start / "tokenizer_config.json").write_text(json.dumps(config | dict(clean_up_tokenization_spaces=True)))
    tokenizer = load_processor(str(start))
    assert not tokenizer.clean_up_tokenization_spaces
    out = tmp_path / "out"
    save_tokenizer(tokenizer, str(start), out)
    assert json.loads((out / "tokenizer_config.json").read_text())["clean_up_tokenization_spaces"]
