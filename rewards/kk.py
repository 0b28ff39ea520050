"""Knights and knaves (Logic-RL, arXiv 2502.14768): the sum of a format and an answer score.

3 = format +1, all correct +2; -0.5 = format +1, wrong -1.5; -1 = format +1, unreadable -2; -3 = wrong format.
- Format: each of `<think>`, `</think>`, `<answer>`, `</answer>` once, in this order; other text around them
  is tolerated.  The opening `<think>` may be missing, since many prompts end with it.  For `<think>` other
  models have other marks.
- A prompt before the response (ChatML, or lines `User:` and `Assistant:`) is cut off: its tags are examples.
  (Logic-RL needs the prompt and fails on a response alone; it also cuts at an `Assistant:` in the thoughts.)
- Answer: for every person once `NAME is a knight` or `NAME: knave`, in any order and case, numbered or not,
  separated by new lines, punctuation or `and`, with any markup.  More or fewer roles, other people, words
  before a statement (`I deny that NAME is a knight`) make it unreadable.
"""

import re

from system.thoughts import CLOSING, OPENING, reply_of

TAGS = OPENING, CLOSING, re.compile("<answer>"), re.compile("</answer>")  # each is there once at most
ANSWER = re.compile("<answer>(.*)</answer>", re.DOTALL)
USER = re.compile(r"^User:", re.MULTILINE)
ASSISTANT = re.compile(r"^Assistant:", re.MULTILINE)
MARKUP = re.compile(r"\\[A-Za-z]+|</?[A-Za-z]+>|[*_`#$~{}\\\"“”]")  # of Markdown, TeX, HTML, JSON
ROLE = re.compile(r"\b(?:knight|knave)\b", re.IGNORECASE)
# What may stand before a statement: remarks that end with a colon or a line, `and`, punctuation, a number.
LEAD = re.compile(r"(?:[^:\n]*[:\n])*(?:and\b|[^\w(¬])*(?:\(\d+\)|\d+[.)])?\s*", re.IGNORECASE)
# What stands between a name and a role; a line may break in it
TAIL = re.compile(
    r"(?<![\s:：=|(–—→>-])(?:\s++is\b|['’]s\b|\s*+[:：=|(–—→>-]++)\s*+(?:an?\b|the\b)?\s*+(knight|knave)\Z",
    re.IGNORECASE,
)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score, acc, pred}.

    ground_truth: {"solution_text_format": "(1) Ann is a knight\\n(2) ..."}, or that text alone.
    Raises ValueError for a ground truth that names nobody.
    """
    truth = check_row(data_source, ground_truth, extra_info)
    answer = _answer(_response(solution_str))
    if answer is None:
        return {"score": -3.0, "acc": 0.0, "pred": ""}
    roles = _roles(answer, len(truth))
    if roles is None or roles.keys() != truth.keys():
        return {"score": -1.0, "acc": 0.0, "pred": ""}
    pred = ", ".join(f"{name} {roles[name]}" for name in sorted(roles))
    return {"score": 3.0 if roles == truth else -0.5, "acc": float(roles == truth), "pred": pred}


def check_row(data_source, ground_truth, extra_info):
    text = ground_truth["solution_text_format"] if isinstance(ground_truth, dict) else str(ground_truth)
    if truth := _roles(text):
        return truth
    raise ValueError(f"ground truth {text!r} is no list of 'NAME is a knight' or 'NAME is a knave'")


def _response(text):
    """What follows the prompt, if `text` begins with one."""
    head = text.lstrip()
    if head.startswith("<|im_start|>"):
        return text.partition("<|im_start|>assistant")[2]
    if OPENING.match(head):
        return text
    user = USER.search(head)
    assistant = user and ASSISTANT.search(head, user.end())
    if not assistant:
        return text
    return head[assistant.end() :]


def _answer(response):
    """The text between the answer tags; None if the format is wrong."""
    reply = reply_of(response)
    if reply == response or any(len(tag.findall(response)) > 1 for tag in TAGS):
        return None
    found = ANSWER.search(reply)
    return found and found[1]


def _roles(text, n=None):
    """{name: role}, lower case; None if it is not n statements on n people."""
    text = MARKUP.sub("", text)
    ends = [match.end() for match in ROLE.finditer(text)]
    if n is not None and len(ends) != n:
        return None
    roles = {}
    begin = 0
    for end in ends:
        tail = TAIL.search(text, begin, end)
        if not tail:
            return None
        name = text[LEAD.match(text, begin, tail.start()).end() : tail.start()]
        if not name:
            return None
        roles[" ".join(name.lower().split())] = tail[1].lower()
        begin = end
    if len(roles) < len(ends):  # two roles of one person
        return None
    return roles
