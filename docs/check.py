"""Whether pages are easy to read: short sentences, few figures, standard words, the same sections.

python docs/check.py              what is wrong, one line each (`make lint`)
python docs/check.py --figures    words, lengths of sentences and figures of every page
"""

import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

RESULTS = sorted(ROOT.glob("docs/results/*.md"))
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
PAGES += [page for page in sorted(ROOT.glob("docs/**/*.md")) if page not in RESULTS]
ALL = PAGES + RESULTS
NAMES = {page: page.relative_to(ROOT).as_posix() for page in ALL}
CODE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
MATH = re.compile(r"\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL)
# what a page may have: mean and longest sentence in words, figures in a hundred words
USER, RESULT = (12, 25, 5), (16, 45, 18)
README_WORDS = 750  # with those of tables
AVOID = {  # pattern: better
    r"\banew\b": "again",
    r"\bbeside\b": "next to, besides",
    r"\bbut for\b": "except",
    r"\bin the mean\b": "on average",
    r"\bsome \d": "about",
    r"\b(stands?|lies) in\b": "is in",
    r"\bgoes on\b": "resumes, continues",
    r"\bused to\b": "no history",
    r"\bthe version before\b": "no history",
    r"\btells?\b": "shows, reports",
    r"\bas it comes\b": "before training",
    r", so that\b": ", so",
    r"\bwhat is not so\b": "name the thing",
    r"\bthe other way round\b": "name the thing",
    r"% right\b|\bright (answer|response|one)s?\b": "correct",
    r"\bhalf right\b|\ball right\b": "correct",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\b(bytes|FLOPs|pages|process|rank|responses|seconds|tokens) a (GPU|rank|second|step)\b": "per",
    r"(?<![\w.*])[+-]?\.\d": "0.05, not .05",
}
SECTIONS = [
    "Summary",
    "When to use it",
    "Command",
    "Key flags",
    "Equations",
    "Differences from the paper, verl and TRL",
    "Read the code",
    "What a run looks like",
    "Metrics to watch",
    "When it goes wrong",
]


def plain(text):
    """A page without blocks of code, comments, formulas, images and addresses; backticks become `code`."""
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", CODE.sub("\n\n", text), flags=re.DOTALL)
    text = MATH.sub(" formula ", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"``.*?``|`[^`\n]*`", "code", text)


def blocks(text):
    """Headings, paragraphs and list items of a page; no tables."""
    found = []
    for line in plain(text).splitlines():
        line = line.strip()
        new = not line or not found or re.match(r"#|\||[-*] |\d+\. ", line)
        if new or found[-1].startswith(("#", "|")):
            found.append(line)
        else:
            found[-1] += " " + line
    return [re.sub(r"^(#+|[-*]|\d+\.) |\*\*", "", x) for x in found if x and not x.startswith("|")]


def sentences(text):
    ends = r"(?<=[.!?])(?<!\beq\.)(?<!\bDr\.)[\"')]*\s+"
    return [x for block in blocks(text) for x in re.split(ends, block) if re.search(r"\w", x)]


def words(sentence):
    return re.findall(r"[\w'.,%/+-]*\w[\w'.,%/+-]*", sentence)


def figures(sentence):
    """Numbers, but no papers (2402.03300) and names such as H100, 7B or FSDP2."""
    sentence = re.sub(r"\b\d{4}\.\d{5}\b", "", sentence)
    return [x for x in words(sentence) if re.fullmatch(r"[+-]?\.?\d[\d.,e+-]*%?[.,]?", x)]


def measure(text):
    """Words, mean and longest sentence, figures in a hundred words."""
    found = [sentence for sentence in sentences(text) if len(words(sentence)) > 1]
    lengths = [len(words(sentence)) for sentence in found] or [0]
    count = sum(len(figures(sentence)) for sentence in found)
    return sum(lengths), sum(lengths) / len(lengths), max(lengths), 100 * count / max(sum(lengths), 1)


# ---- what is wrong with a page -----------------------------------------------------------------------------
def long_sentences(page, text):
    _, mean, longest, count = measure(text)
    most = RESULT if page in RESULTS else USER
    if mean > most[0]:
        yield f"sentences have {mean:.1f} words on average, over {most[0]}"
    if count > most[2]:
        yield f"{count:.1f} figures in a hundred words, over {most[2]}"
    if longest > most[1]:
        sentence = max(sentences(text), key=lambda x: len(words(x)))
        yield f"a sentence of {longest} words, over {most[1]}: {sentence}"


def crowded_sentences(page, text):
    """Two figures at most, on a user page: ranges and lists of values are in tables."""
    for sentence in sentences(text) if page not in RESULTS else ():
        if len(figures(sentence)) > 2:
            yield f"over two figures: {sentence}"


def words_to_avoid(page, text):
    for pattern, better in AVOID.items():
        for found in re.finditer(pattern, plain(text)):
            yield f"{found[0]!r}: {better}"


def tables_without_head(page, text):
    """A row without one is shown as text, with its bars."""
    for table in re.findall(r"(?:^ *\|.*\n)+", CODE.sub("", text), re.MULTILINE):
        if not re.match(r".*\n *\|[-:| ]+\|\n", table):
            yield f"a table without a head: {table.splitlines()[0]}"


def long_items(page, text):
    """At most three lines of a hundred and twenty characters."""
    items = r"^ *(?:[-*]|\d+\.) .*(?:\n {2,}\S.*)*"
    for item in re.findall(items, CODE.sub("", text), re.MULTILINE) if page not in RESULTS else ():
        if len(plain(item)) > 360:
            yield f"an item of over three lines: {item[:60]}"


def sections(page, text):
    """Pages about algorithms have the same sections and a curve; those about results begin alike."""
    if page.name == "README.md":
        return
    if page.parent.name == "algorithms":
        if re.findall(r"^## (.*)", text, re.MULTILINE) != SECTIONS:
            yield f"its sections are not {', '.join(SECTIONS)}"
        if "](../images/" not in text:
            yield "it has no curve"
    if page in RESULTS:
        if re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)[:3] != ["Question", "Answer", "Measured"]:
            yield "it does not begin with Question, Answer and Measured"
        if "## Caveats" not in text:
            yield "it has no caveats"


def index(page, text):
    """Every page is in an index."""
    folder = page.parent
    if folder.parent != ROOT / "docs":
        return
    place, link = ROOT / "docs/README.md", f"{folder.name}/{page.name}"
    if folder.name == "results":
        place, link = folder / "README.md", page.name
    if page != place and f"]({link})" not in place.read_text():
        yield f"it is not in {place.relative_to(ROOT)}"


def length(page, text):
    if page == ROOT / "README.md":
        count = len(words(re.sub(r"[|-]{3,}", " ", plain(text))))
        if count > README_WORDS:
            yield f"{count} words, over {README_WORDS}"


CHECKS = (
    long_sentences,
    crowded_sentences,
    words_to_avoid,
    tables_without_head,
    long_items,
    sections,
    index,
    length,
)


def words_of_code():
    """Words to avoid in comments, docstrings and help texts, which are the strings of three quotes."""
    for folder in ("algos", "rewards", "envs", "data_prep", "system"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            with path.open("rb") as file:
                tokens = list(tokenize.tokenize(file.readline))
            for token in tokens:
                text = token.string
                if (
                    token.type == tokenize.COMMENT
                    or token.type == tokenize.STRING
                    and re.match(r'r?"""', text)
                ):
                    text = re.sub(r"``.*?``|`[^`\n]*`", "code", text)
                    for pattern, better in AVOID.items():
                        for found in re.finditer(pattern, text):
                            yield f"{path.relative_to(ROOT)}:{token.start[0]}: {found[0]!r}: {better}"


def main():
    if "--figures" in sys.argv:
        print(f"{'page':44}{'words':>8}{'mean':>8}{'longest':>9}{'figures in 100 words':>23}")
        for page in ALL:
            total, mean, longest, count = measure(page.read_text())
            print(f"{NAMES[page]:44}{total:8}{mean:8.1f}{longest:9}{count:23.1f}")
        return
    wrong = [
        f"{NAMES[page]}: {line}" for page in ALL for check in CHECKS for line in check(page, page.read_text())
    ]
    wrong += words_of_code()
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
