"""A search engine as a tool: search(query, k) returns passages of a local corpus, ranked by BM25.

SEARCH_CORPUS=FILE, a parquet or JSON-lines file with a column `text`, one passage a row.  The index is made
where the environment is first loaded, before a model is, and kept in a directory next to the file; processes
share its memory.  The library: pip install --no-deps -r requirements-extra.txt
"""

import os
import tempfile
import unicodedata
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import regex

READS = ("SEARCH_CORPUS",)
MAX_PASSAGES = 10  # of one answer
# Letters of scripts without spaces between words (Han, Kana, Thai, Khmer), or with particles in them (Hangul)
JOINED = r"\p{lb=ID}\p{lb=CJ}\p{lb=SA}\p{Hangul}"
WORD = regex.compile(rf"([{JOINED}]+)|[^\W{JOINED}]+")  # a run of them, or any other word
ACCENT = regex.compile(r"(?<=\p{Latin})\p{Mn}+")


def search(query: str, k: int = 3) -> str:
    """Searches a collection of texts and returns the passages that fit best.

    Args:
        query: words to search for
        k: how many passages, at most 10
    """
    index = _index()
    tokens = [token for token in tokens_of(query) if token in index.vocab_dict]
    if not tokens:
        return "nothing was found"
    k = min(max(k, 1), MAX_PASSAGES, index.scores["num_docs"])
    [passages], [scores] = index.retrieve([tokens], k=k, show_progress=False)
    found = [passage["text"] for passage, score in zip(passages, scores, strict=True) if score > 0]
    return "\n".join(f"[{i}] {text}" for i, text in enumerate(found, 1))


def tokens_of(text):
    """The words of a text; of a run of JOINED letters also each letter and each pair."""
    found = []
    plain = ACCENT.sub("", unicodedata.normalize("NFKD", text))
    for word in WORD.finditer(unicodedata.normalize("NFKC", plain).casefold()):
        found.append(word[0])
        if word[1]:
            found += word[1]
            found += map("".join, zip(word[1], word[1][1:]))
    return found


@cache
def _index():
    import bm25s

    return bm25s.BM25.load(INDEX, load_corpus=True, mmap=True, show_progress=False)


def _make_index():
    """Directory of the index, made if it is missing; its name has the time of the corpus."""
    corpus = Path(os.environ.get("SEARCH_CORPUS") or "SEARCH_CORPUS")
    if corpus.suffix not in (".parquet", ".jsonl") or not corpus.is_file():
        raise ValueError(f"{corpus} is not a file: set SEARCH_CORPUS to a .parquet or .jsonl with `text`")
    if find_spec("bm25s") is None:
        raise ValueError("bm25s is not installed; pip install --no-deps -r requirements-extra.txt")
    path = corpus.with_name(f"{corpus.name}.bm25s-words-{corpus.stat().st_mtime_ns}")
    if not path.is_dir():
        import bm25s
        import pyarrow.json
        import pyarrow.parquet

        read = pyarrow.parquet.read_table if corpus.suffix == ".parquet" else pyarrow.json.read_json
        texts = [text for text in read(corpus)["text"].to_pylist() if text is not None]
        index = bm25s.BM25(corpus=[{"text": text} for text in texts])
        index.index([tokens_of(text) for text in texts], show_progress=False)
        with tempfile.TemporaryDirectory(dir=corpus.parent) as scratch:
            index.save(f"{scratch}/index", show_progress=False)
            try:
                os.rename(f"{scratch}/index", path)
            except OSError:
                if not path.is_dir():  # or another rank was faster
                    raise
    return path


INDEX = _make_index()
TOOLS = [search]
