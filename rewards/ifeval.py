"""The share of a question's verifiable instructions that the response follows (IFEval, arXiv 2311.07911).

All 25 kinds, checked as IFEval's own code checks them. But no library asks whether a text all in capitals,
or without any, is English. Nothing is followed by an empty response, of which a thought is no part. Three
kinds need packages of requirements-extra.txt.

CAREFUL: linear in the length of the response. What a pattern has looked at in vain it also takes, in a match
whose last group is empty: from each of 16,000 new lines it would look at all that follow.
"""

import inspect
import json
import re
from contextlib import suppress

from rewards import ifeval_parts as parts
from system.thoughts import reply_of


def count(pattern, text):
    """How often a pattern is in a text; lines count one by one."""
    return len(re.findall(pattern, text, re.IGNORECASE | re.MULTILINE))


def compare(n, relation, limit):
    """Whether n is `at least` or `less than` a limit."""
    return n >= limit if relation == "at least" else n < limit


def is_json(text):
    """Whether a text is JSON, perhaps in a markdown block."""
    try:
        json.loads(re.sub(r"^```(json|Json|JSON)?|```$", "", text.strip()).strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_highlights(text, num_highlights):
    """Whether at least so many parts stand between asterisks, one or two on each side."""
    parts = re.findall(r"\*[^\n*]*\*", text) + re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in parts) >= num_highlights


def found(pattern, text):
    """How often a pattern is in a text with something in its group; lines count one by one."""
    return sum(match[1] is not None for match in re.finditer(pattern, text, re.MULTILINE))


def has_title(text):
    """Whether a line has <<a title>>, from its first << to its last >>."""
    titles = [line[line.find("<<") : line.rfind(">>") + 2] for line in text.split("\n") if "<<" in line]
    return any(len(x) > 4 and x.lstrip("<").rstrip(">").strip() for x in titles)


def is_quoted(text):
    """Whether a text stands between two double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


RELATIONS = "at least", "less than"
MARKERS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}  # of a postscript, as IFEval looks for them
CHECKS = {  # instruction -> whether a text follows it; further arguments are the instruction's
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        found(r"\[[^\]\n]*+(\])?", text) >= num_placeholders
    ),
    "detectable_content:postscript": lambda text, postscript_marker: (
        count(MARKERS.get(postscript_marker, re.escape(postscript_marker)), text) > 0
    ),
    "detectable_format:json_format": is_json,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        found(r"^\s*+(\*[^\*].*$)?", text) + found(r"^\s*+(-.*$)?", text) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:title": has_title,
    "keywords:existence": lambda text, keywords: all(count(re.escape(word), text) for word in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(count(rf"\b{re.escape(word)}\b", text) for word in forbidden_words)
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation: compare(
        count(re.escape(keyword), text), relation, frequency
    ),
    "length_constraints:number_words": lambda text, num_words, relation: compare(
        count(r"\w+", text), relation, num_words
    ),
    "punctuation:no_comma": lambda text: "," not in text,
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": is_quoted,
    "length_constraints:number_paragraphs": parts.has_paragraphs,
    "length_constraints:nth_paragraph_first_word": parts.begins_paragraph,
    "detectable_format:multiple_sections": parts.has_sections,
    "detectable_format:constrained_response": parts.is_answer,
    "combination:two_responses": parts.has_two_responses,
    "combination:repeat_prompt": parts.repeats,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: compare(
        parts.capital_words(text), capital_relation, capital_frequency
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: compare(
        len(parts.punkt().tokenize(text)), relation, num_sentences
    ),
    "language:response_language": parts.is_in_language,
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
}


def read(truth):
    """Pairs (instruction, arguments) of a row, in any spelling in which data sets come.

    The row and each part of it: JSON text, a dict or list, or an array of numpy.  The arguments: a dict for
    each instruction, or one dict of columns.  `datasets` gives each dict all keys: a null is no argument.
    """
    truth = loaded(truth)
    names = loaded(truth.get("instruction_id_list")) if isinstance(truth, dict) else None
    if not names:
        raise ValueError(f"the ground truth has no instruction_id_list: {truth!r:.60}")
    kwargs = loaded(truth.get("kwargs")) or [{}] * len(names)
    if isinstance(kwargs, dict):
        columns = {key: plain(column) for key, column in kwargs.items()}
        kwargs = [{key: column[i] for key, column in columns.items()} for i in range(len(names))]
    if not isinstance(names, list | tuple) or len(names) != len(kwargs):
        raise ValueError(f"the ground truth has not as many kwargs as instructions: {truth!r:.60}")
    given = [{key: plain(value) for key, value in (loaded(x) or {}).items()} for x in kwargs]
    given = [{k: v for k, v in x.items() if v is not None and v == v} for x in given]
    return list(zip(names, given, strict=True))


def fits(key, value):
    """Whether an argument is a relation, a number, a list of texts or a text, which follows from its name."""
    if key.endswith("relation"):
        return value in RELATIONS
    if key.startswith(("num_", "nth_")) or key.endswith("frequency"):
        return type(value) in (int, float) and value >= key.startswith("nth_")
    texts = value if key in ("keywords", "forbidden_words") else [value]
    return isinstance(texts, list) and texts != [] and all(isinstance(x, str) and x.strip() for x in texts)


def loaded(value):
    """The value, or what it is JSON text of. CAREFUL: not for an argument, such as a phrase in brackets."""
    with suppress(TypeError, ValueError):
        return json.loads(value)
    return plain(value)


def plain(value):
    """The value, or the list of an array of numpy."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_row(data_source, ground_truth, extra_info=None):
    """The instructions of a row, each with the arguments that it needs.

    Raises ValueError for an instruction that is not known, lacks an argument, or needs a package.
    """
    instructions = []
    for name, given in read(ground_truth):
        if name not in CHECKS:
            raise ValueError(f"unknown instruction {name}; known: {', '.join(CHECKS)}")
        _, *needed = inspect.signature(CHECKS[name]).parameters
        if absent := sorted({*needed} - given.keys()):
            raise ValueError(f"{name} has no {', '.join(absent)}")
        kwargs = {key: given[key] for key in needed}
        if wrong := [f"{key}={x!r:.60}" for key, x in kwargs.items() if not fits(key, x)]:
            raise ValueError(f"{name} cannot have {wrong[0]}: write it as IFEval does")
        try:
            CHECKS[name]("x", **kwargs)
        except ImportError as lacks:
            raise ValueError(
                f"{name} needs {lacks.name}: pip install --no-deps -r requirements-extra.txt"
            ) from None
        instructions.append((name, kwargs))
    return instructions


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score, acc, pred}: the share that is followed, whether all are, and which are not.

    ground_truth: {"instruction_id_list": [...], "kwargs": [{...}, ...]}, as IFEval has it; see `read`.
    Raises ValueError as `check_row` does.
    """
    instructions = check_row(data_source, ground_truth, extra_info)
    reply = reply_of(solution_str)
    missed = []
    for name, kwargs in instructions:
        if not (reply.strip() and CHECKS[name](reply, **kwargs)):
            missed.append(name)
    score = 1 - len(missed) / len(instructions)
    return {"score": score, "acc": float(not missed), "pred": ", ".join(missed) or "all followed"}
