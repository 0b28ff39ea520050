r"""Where the answer is in a response or a ground truth: the last box, or what follows a label."""

import re

BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s{0,9}|\\(?!\\?(?:boxed|fbox)).|[{}]", re.DOTALL)
BARE_ANSWER = re.compile(r"[^\s${}]{1,99}(?:\{[^{}$]{0,99}\}){0,2}")  # of \boxed 5, \boxed\frac{1}{2}
# Ground truths that no answer equals: what tables have for a gap
NO_TRUTH = "", "nan", "inf", "-inf", "none", "null", "n/a", "[invalid]"
# What introduces an answer, in the languages of the data
LABEL = "(?:answer|答案|答|故选|antwort|réponse|respuesta|risposta|resposta|odpowiedź|ответ)"

LABELLED = (  # Answer: The answer is
    rf"(?:(?:####|<answer>|(?:(?:the|our|my|die|la) )?(?:(?:final|correct|richtige) )*{LABEL}(?: finale)?"
    r"(?:\s*[:：]|,? (?:is|ist|lautet|est|es|è|é)\b:?|[是为]| (?=[-−.\d$\\])))\s*)+"
)


def last_boxed(text):
    r"""Content of the \boxed{} or \fbox{} that is closed last (of nested ones the outer one), or None.

    `\boxed 5` counts too.  A box that is never closed does not.
    """
    best = None
    opens = -1
    stack = []
    for token in BOX_TOKEN.finditer(text):
        if token[0] == "{":
            stack.append(token.end() if token.start() == opens else None)
        elif token[0] == "}":
            start = stack.pop() if stack else None
            best = (start, token.start()) if start else best
        elif token[0].startswith(("\\boxed", "\\fbox")):
            opens = token.end()
            bare = BARE_ANSWER.match(text, opens)
            best = bare.span() if bare else best
    return best and text[slice(*best)]


def answer_of(truth):
    """The answer of a ground truth, which may be a whole solution, as GSM8K and MATH publish it."""
    _, mark, answer = f"\n{truth}".rpartition("\n####")
    if mark:
        return answer.strip()
    before, *boxes = truth.split("\\boxed")
    if len(boxes) == 1 or " " in before.strip():  # several boxes and no words: a list
        return last_boxed(truth) or truth
    return truth
