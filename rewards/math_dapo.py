r"""DAPO-Math and AIME: +1 if the text after the last `Answer:` equals the ground truth, else -1.

- The marker may be in another language, as `答案：` (LABEL of rewards/boxed.py).
- The rest of the marker's line counts, or else the next line that is not blank.  Words next to a box in
  that line are a part of the answer, except "the sum is".
- A response with a box but without the marker has no answer: the prompt asks for `Answer:`.
- A thought gives no answer; only the last WINDOW characters do.  (verl looks at the last 300, which a short
  remark after the answer fills.)
"""

import re

from rewards.boxed import LABEL, LABELLED, last_boxed
from rewards.mathematics.equivalence import judge
from system.thoughts import reply_of

WINDOW = 1000
NO_PART = re.compile(r"(?:the )?(?:final )?(?:answer|sum|value|result) is", re.IGNORECASE)
SENTENCE = re.compile(rf"\A{LABELLED}", re.IGNORECASE)
MARKER = re.compile(rf"{LABEL}\**\s?[:：]", re.IGNORECASE)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return {score: 1 | -1, acc, pred}.  A ground truth that is no formula equals only its own spelling."""
    text = reply_of(solution_str)[-WINDOW:]
    _, *answers = MARKER.split(text)
    lines = answers[-1].replace("\n>", "\n").split("\n") if answers else ()  # > quotes a line
    lines = (SENTENCE.sub("", line.strip(" \r*`")).strip(" *`") for line in lines)
    answer = next((line for line in lines if line.strip("$[\\")), None)
    box = answer and last_boxed(answer)
    others = box and answer.replace(f"\\boxed{{{box}}}", "", 1).strip(" $()=.")  # "57" of 57 (\\boxed{57})
    is_alone = box and (others == box or NO_PART.fullmatch(others))
    result = judge(box if is_alone else answer, ground_truth)
    return {**result, "score": 1.0 if result["acc"] else -1.0}
