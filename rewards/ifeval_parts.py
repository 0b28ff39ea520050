"""The kinds of IFEval's instructions that look at paragraphs, sections, letters and words; see ifeval.py."""

import re

PUNCTUATION = re.compile(r"[.,?!'\"]")
# Where NLTK's NLTKWordTokenizer parts a text, after Punkt has parted it into sentences
OPENING = re.compile(r"(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", re.IGNORECASE)
FULL_STOP = re.compile(r"(?<!\.)\.(?=[])}>\"';*:@({[‘’“”«»?!]|\s|$)")
BETWEEN = re.compile(r"[][(){}<>«»“”‘’„`\"?!;@#$%&*\u2012-\u2015]|''|--|\.{2,}|[:,](?!\d)")
CLITICS = r"(?<=[^' ])('[smd]?|'S|'M|'D) ", r"(?<=[^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) "
JOINED = r"(can)(not)|(d)('ye)|(gim)(me)|(gon)(na)|(got)(ta)|(lem)(me)|(more)('n)|(wan)(na)(?=\s)"


def has_paragraphs(text, num_paragraphs):
    """Whether so many paragraphs stand between lines of ***."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner, ends = parts[1:-1], [part for part in (parts[0], parts[-1]) if part.strip()]
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


def capital_words(text):
    """How many words of a text have all their letters in capitals; IT'S and CANNOT are two each."""
    text = BETWEEN.sub("  ", FULL_STOP.sub(" . ", OPENING.sub("' ", text)))
    text = f" {' '.join(text.split())} "
    for clitic in CLITICS:
        text = re.sub(clitic, r" \1 ", text)
    text = re.sub(
        rf"(?i)\b(?:{JOINED})\b", lambda word: " ".join(["", *filter(None, word.groups()), ""]), text
    )
    return sum(map(str.isupper, text.split()))
