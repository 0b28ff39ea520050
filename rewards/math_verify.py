r"""1 if the response's final answer equals the ground truth, else 0; the answer needs no box.

- The last \boxed{} counts.
- Without: the clause after the last "answer is" or "answer:" (in any language of LABEL); or else after the
  last "is", "get", "so" or start of a line.  The whole clause must be the answer: "not 5", "5 or 6" and
  "half of 5" are none.  It ends with its sentence, or where a reason begins: "5, because 2+3 = 5".
- What is asked, supposed or denied before the clause, or taken back behind it, is no answer.
- Thoughts (all up to the last `</think>`) give no answer; without a box, only the last WINDOW characters do.
"""

import re

from rewards.mathematics.equivalence import equal, judge
from rewards.mathematics.latex import LABEL, last_boxed

WINDOW = 1000
FORMULA = re.compile(r"(?<!\\)\$\$?([^$]+)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
MARKUP = re.compile(  # of **5**, `5`, <b>5</b>, > 5; but 2*3 and 2**3 are products
    r"(?<![0-9A-Za-z*`)}$])[*`]+(?=\S)|(?<=\S)[*`]+(?=[^\w(\\$*`]|[\u4e00-\u9fff]|$)|^(?:> ?|#+ )+"
    r"|</?(?:answer|b|strong)>",
    re.M,
)
ADVERB = (
    r"(?:\s*(?:(?:therefore|thus|hence|then|simply|just|exactly|indeed|definitely|equal to"
    r"|a total of|in total|donc)\b|[,:：，]))*\s*"
)
ANSWER = re.compile(
    rf"{LABEL}(?:(?: final\w*)? (?:is|ist|lautet|est|es|è|é)\b|[是为]|\s*[:：]|\s*\n)|^{LABEL}\.(?=\s)",
    re.I | re.M,
)
ADVERBS = re.compile(ADVERB, re.I)
# The words before it: no "half of the answer" and no "a wrong answer"
CALLED = re.compile(
    r"(?:^|[^\w\s'’-]|[\u4e00-\u9fff]|\b(?:so|thus|hence|therefore|and|but|then|that|donc))\s*"
    r"(?:(?:the|our|my|die|la|a)\s+)?(?:(?:final|correct|right|required|desired|only|richtige)\s+)*\Z",
    re.I | re.M,
)
THE_ANSWER = r"(?:the|our) (?:(?:final|correct|only|required) )?(?:answer|solution)\b"
STATED = re.compile(
    rf"(?:^|(?<!which )\b(?:is(?! {THE_ANSWER})|are|be|equals?|gets?|have|has|obtain|find|so|thus|hence"
    r"|therefore|then|that|needs?|takes?|gives|giving|yields|means|implies|(?:comes|simplifies|evaluates) to"
    r"|a total of|(?:total|result|solution|value|ans):)(?=[\s,])"
    rf"|(?:[为是有共得]|因此|所以)(?=[，,]?\s?[\d$\\a-z])){ADVERB}(?=[^\n]*[\d$\\])",
    re.I | re.M,
)
REASON = (
    r"because|since|so (?:we are )?done|and we are done|as (?:required|desired|shown|claimed)|with equality"
    r"|attained|achieved|obtained|by (?:the\b|symmetry)|when divided|rather than|instead of"
    r"|(?:and )?not (?=more\b|less\b|[\d$\\-])"
)
CLAUSE = re.compile(
    r"(?P<clause>[^\n]*?)(?:$|\.?\n|(?<!\n\d)\.(?=\s|$)|。"
    rf"|\s(?:is {THE_ANSWER}|(?:of (?:them|these|those)|only)(?=[.\n]|$))|(?=,? which\b)"
    rf"|(?:,?\s\(?(?:{REASON})|, as\b)[^\n.?]*)"
)
UNSURE = re.compile(  # in the words before an answer
    r"(?:n['’]t|\b(?:not?|never|nobody|wrong|incorrect|if|whether|suppose|assume|think|thought|doubt|maybe|perhaps"
    r"|possibly|can|cannot|could|might|may|reject|discard|exclude|let|try|consider|given|told|states?|says?"
    r"|claims?|show|prove|check|case|naively|for (?:instance|example|\$?[a-z]\s*\Z)))\b[^.,:;!?\n]*\Z"
    r"|[不错设若约少多][^。，\n]*\Z",
    re.I,
)
TAKEN_BACK = re.compile(  # in the words behind it
    r"\?|n['’]t\b|[不吗或错]|\b(?:not?|cannot|could|or|but|too|wait|let me(?! know)|hmm|oops|actually|wrong"
    r"|false|mistaken?|error|incorrect|impossible|correction|instead|should|doubt|however|maybe|perhaps|possibly"
    r"|alternatively|contradict\w+|approx\w*|round\w*)\b",
    re.I,
)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score, acc, pred}.  A ground truth that is no formula equals only its own spelling."""
    text = solution_str.rpartition("</think>")[2]
    if "\\boxed" in text or "\\fbox" in text:
        return judge(last_boxed(text), ground_truth)
    text = text if len(text) <= WINDOW else "…" + text[-WINDOW:]  # which begins no line
    text = FORMULA.sub(lambda match: " ".join(match[0].split()), MARKUP.sub("", text.strip()))
    start = next(reversed([*ANSWER.finditer(text)] or [*STATED.finditer(text)]), None)
    if start is None or (start.re is ANSWER and not CALLED.search(text[: start.start()])):
        return judge(None, ground_truth)
    match = CLAUSE.match(text, ADVERBS.match(text, start.end()).end())
    clause = match["clause"]
    name, _, _ = clause.rpartition("=")
    is_sure = not UNSURE.search(text[: start.start()]) and not UNSURE.search(name) and ":" not in name
    if not is_sure or TAKEN_BACK.search(text, match.end()):
        return judge(None, ground_truth)
    values = re.split(r"\s+or\s+", clause)  # 1/2 or 0.5
    if all(equal(value, str(ground_truth)) for value in values):
        clause = values[0]
    return judge(clause, ground_truth)
