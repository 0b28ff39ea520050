"""Pages are easy to read: short sentences, few figures, standard words, the same sections.

`python tests/test_prose.py` prints the figures of every page.
"""

import re
import tokenize

import pytest
from conftest import ROOT

RESULTS = sorted(ROOT.glob("docs/results/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
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


@pytest.mark.parametrize("page", ALL, ids=NAMES.get)
def test_sentences_are_short_and_figures_few(page):
    _, mean, longest, count = measure(page.read_text())
    most = RESULT if page in RESULTS else USER
    assert mean <= most[0] and count <= most[2]
    assert longest <= most[1], max(sentences(page.read_text()), key=lambda x: len(words(x)))


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_a_sentence_has_few_figures(page):
    """Two at most, on a user page: ranges and lists of values are in tables."""
    crowded = [x for x in sentences(page.read_text()) if len(figures(x)) > 2]
    assert not crowded


@pytest.mark.parametrize("page", ALL, ids=NAMES.get)
def test_words(page):
    text = plain(page.read_text())
    found = [f"{m[0]!r}: {better}" for bad, better in AVOID.items() for m in re.finditer(bad, text)]
    assert not found


@pytest.mark.parametrize("folder", ("algos", "rewards", "envs", "data_prep", "system"))
def test_words_of_comments(folder):
    """And of docstrings and help texts, which are the strings of three quotes."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        with path.open("rb") as file:
            tokens = list(tokenize.tokenize(file.readline))
        for token in tokens:
            text = token.string
            if token.type == tokenize.COMMENT or token.type == tokenize.STRING and re.match(r'r?"""', text):
                text = re.sub(r"``.*?``|`[^`\n]*`", "code", text)
                words = [m[0] for bad in AVOID for m in re.finditer(bad, text)]
                found += [f"{path.relative_to(ROOT)}:{token.start[0]}: {word!r}" for word in words]
    assert not found


@pytest.mark.parametrize("page", ALL, ids=NAMES.get)
def test_tables_have_a_head(page):
    """A row without one is shown as text, with its bars."""
    tables = re.findall(r"(?:^ *\|.*\n)+", CODE.sub("", page.read_text()), re.MULTILINE)
    assert not [table for table in tables if not re.match(r".*\n *\|[-:| ]+\|\n", table)]


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_list_items_are_short(page):
    """At most three lines of a hundred and twenty characters."""
    items = re.findall(r"^ *(?:[-*]|\d+\.) .*(?:\n {2,}\S.*)*", CODE.sub("", page.read_text()), re.MULTILINE)
    assert not [item for item in items if len(plain(item)) > 360]


def test_pages_about_algorithms_have_the_same_sections():
    for page in sorted(ROOT.glob("docs/algorithms/*.md")):
        if page.name != "README.md":
            assert re.findall(r"^## (.*)", page.read_text(), re.MULTILINE) == SECTIONS, page.name
            assert "](../images/" in page.read_text(), f"{page.name} has no curve"


def test_pages_about_results_begin_alike():
    for page in RESULTS:
        if page.name != "README.md":
            said = re.findall(r"^\*\*(\w+)\.\*\*", page.read_text(), re.MULTILINE)
            assert said[:3] == ["Question", "Answer", "Measured"], page.name
            assert "## Caveats" in page.read_text(), page.name


def test_every_page_is_in_an_index():
    for folder in ("algorithms", "guides", "reference", "results", "start"):
        index = ROOT / "docs" / (f"{folder}/README.md" if folder == "results" else "README.md")
        for page in (ROOT / "docs" / folder).glob("*.md"):
            link = page.name if folder == "results" else f"{folder}/{page.name}"
            assert page == index or f"]({link})" in index.read_text(), f"{page.name} is not in {index}"


def test_the_readme_is_short():
    text = plain((ROOT / "README.md").read_text())
    assert len(words(re.sub(r"[|-]{3,}", " ", text))) <= README_WORDS


if __name__ == "__main__":
    print(f"{'page':44}{'words':>8}{'mean':>8}{'longest':>9}{'figures in 100 words':>23}")
    for page in ALL:
        total, mean, longest, count = measure(page.read_text())
        print(f"{NAMES[page]:44}{total:8}{mean:8.1f}{longest:9}{count:23.1f}")
