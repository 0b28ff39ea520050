r"""1 if the response's final answer equals the ground truth, else 0; the answer needs no box.

- The last \boxed{} counts.
- Without a box the last sentence decides: a label and a value (`The answer is 5.`, `#### 5`, `答案：5`), a
  conclusion and a value (`So x = 5.`, `Hence there are 12 ways.`, `Thus the number of pairs is 5.`), or
  a line that is a value.  Only its unit may follow a value.  How a prompt asks for it: docs/guides/rewards.md
- Fractions need not be reduced, and 600 is not 6, unlike in verl's scorer of NuminaMath.
- A thought gives no answer; without a box, only the last WINDOW characters do.
"""

import re

import regex

from rewards.boxed import LABELLED, last_boxed
from rewards.mathematics.equivalence import judge
from rewards.mathematics.units import NAMES
from system.thoughts import reply_of

WINDOW = 1000
FORMULA = re.compile(
    r"(?<!\\)\$\$([^$]+)(?<!\\)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
MARKUP = re.compile(r"\*\*(?![\d(\\])|(?<![\w)}])\*\*|`|^(?:> ?|#{1,3} )+|</?(?:b|strong)>|</answer>", re.M)
SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])(?!\Z)")
GOES_ON = re.compile(r"([,:，：])\s*\n\s*|([^\W\d_])\s*\n\s*(?![A-Z])")  # a sentence, on another line
SO = r"(?:(?:so|thus|hence|therefore|donc)\b,? ?|(?:所以|因此|故)[,，]? ?)"
# "the number of pairs is", "the smallest $n$ is": a noun, and what it is of, without another number
THING = r"(?:the|its) (?:(?:final|total|\w+st|\w+imum) )?(?!\w*answer)\$?\w+\$?(?: of [^\d,.:;!?]{1,60}?)?"
SAYS = rf"(?:(?:(?:we|they) (?:have|get|obtain|find)|it is|there (?:are|is)|{THING} (?:is|are|equals)) "
SAYS += "|[^\\d,，是为不]{1,20}的[^\\d,，是为不答]{1,4}[是为])"
LEAD = re.compile(rf"{SO}?{LABELLED}|it is |{SO}{SAYS}|(?P<so>{SO})", re.I)
VALUE = regex.compile(
    r"(?:(?:[A-Za-z](?![A-Za-z])|[^\w=]|\d)+= ?)*(?:\$[^$]+\$|[-−+]?(?:\p{Sc} ?)?[-−.\d\\(]\S*)(?: (\S+))?"
)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score, acc, pred}.  A ground truth that is no formula equals only its own spelling."""
    text = reply_of(solution_str)
    if "\\boxed" in text or "\\fbox" in text:
        return judge(last_boxed(text), ground_truth)
    text = MARKUP.sub("", text if len(text) <= WINDOW else "…" + text[-WINDOW:])  # … begins no line
    text = FORMULA.sub(lambda found: f"${' '.join(''.join(filter(None, found.groups())).split())}$", text)
    line = GOES_ON.sub(r"\1\2 ", text.strip()).split("\n")[-1]
    sentence = SENTENCE.split(line)[-1]
    lead = LEAD.match(sentence)
    if lead and not lead["so"]:
        return judge(sentence[lead.end() :], ground_truth)
    value = VALUE.fullmatch(sentence.rstrip(".。"), lead.end() if lead else 0)
    is_value = value and (not value[1] or value[1].rstrip("s") in NAMES)  # x = 5 fails: no unit, a verb
    return judge(value[0] if is_value and (lead or sentence == line) else None, ground_truth)
