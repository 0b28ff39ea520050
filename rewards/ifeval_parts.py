"""The kinds of IFEval's instructions that look at paragraphs, words and languages; see ifeval.py."""

import functools
import os
import re
from collections import Counter
from dataclasses import replace

PUNCTUATION = re.compile(r"[.,?!'\"]")


def has_paragraphs(text, num_paragraphs):
    """Whether so many paragraphs stand between lines of ***."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1:-1]
    ends = [part for part in (parts[0], parts[-1]) if part.strip()]
    number = len(inner) + len(ends) if len(parts) > 1 else len(ends) - 1
    return all(part.strip() for part in inner) and number == num_paragraphs


def begins_paragraph(text, num_paragraphs, nth_paragraph, first_word):
    parts = text.split("\n\n")
    if sum(bool(part.strip()) for part in parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    words = parts[int(nth_paragraph) - 1].split()
    word = PUNCTUATION.split(words[0].lstrip("'\""))[0] if words else ""
    return word.lower() == first_word.lower()


def has_sections(text, section_spliter, num_sections):
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d", text)) >= num_sections


def has_two_responses(text):
    """Whether ****** parts two different responses."""
    parts = [part.strip() for part in text.split("******")]
    found = [part for part in parts if part]
    return all(parts[1:-1]) and len(found) == 2 and found[0] != found[1]


def is_answer(text):
    return any(f"My answer is {x}." in text for x in ("yes", "no", "maybe"))


def repeats(text, prompt_to_repeat):
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def is_in_language(text, language):
    """Whether langdetect takes a text for one in this language; a text without letters is in any."""
    import langdetect

    if language not in (known := sorted(os.listdir(langdetect.PROFILES_DIRECTORY))):
        raise ValueError(f"the language is {language!r}; langdetect knows {', '.join(known)}")
    langdetect.DetectorFactory.seed = 0  # else the same text may have several languages
    try:
        return langdetect.detect(text) == language
    except langdetect.LangDetectException:
        return True


@functools.cache
def punkt():
    """NLTK's splitter of sentences, with its English model: NLTK itself would load that over the network."""
    from nltk.tokenize.punkt import PunktSentenceTokenizer
    from punkt import load_model

    model = load_model("english")
    return PunktSentenceTokenizer(replace(model, ortho_context=Counter(model.ortho_context)))


def capital_words(text):
    """How many words of a text have all their letters in capitals; IT'S and CANNOT are two each."""
    from nltk.tokenize import NLTKWordTokenizer

    parts = map(NLTKWordTokenizer().tokenize, punkt().tokenize(text))
    return sum(word.isupper() for words in parts for word in words)
