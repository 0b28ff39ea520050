"""Score the responses of parquet files: mean@n, pass@k and maj@k over the prompts, per data source and in all.

1. pass@k is the unbiased estimator of HumanEval (arXiv 2107.03374), 1 - C(n-c, k) / C(n, k).
2. maj@k is the exact expectation over all subsets of k responses, not one draw of them.

Command:    python algos/eval.py --data before.parquet after.parquet --output runs/eval
Docs: docs/eval.md
"""

import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.atomic import replacing
from data_prep.schema import load_rows
from rewards import check_sources, compute_score, load_reward_fn
from rewards.manager import RewardManager

BOOTSTRAPS = 1000  # resamplings of the prompts behind a standard error


@dataclass
class Args:
    data: tuple[str, ...]
    """Parquet files with responses, as generate.py writes them; each is a column of the table."""
    output: str
    """Directory of results.json."""
    response_key: str = "responses"
    """Column of the responses to a prompt: a list of strings, or one string."""
    k: tuple[int, ...] = ()
    """Numbers of responses of pass@k and maj@k; none: the powers of two up to the responses of a prompt."""
    reward_manager: Literal["naive"] = "naive"
    """How rewards are computed; naive: in process, one by one."""
    reward_fn: str | None = None
    """Own reward as FILE.py:NAME; None: chosen by each row's data_source."""
    seed: int = 1
    """Seed of the bootstrap."""


# ------------------------------------------------------------------------------------------------------------
# The mathematics
# ------------------------------------------------------------------------------------------------------------
def pass_at_k(n, c, k):
    """Probability that k of n responses, c of them correct, hold a correct one: 1 - C(n-c, k) / C(n, k).

    pass_at_k(4, 2, 2) = 1 - 1/6.  The quotient is taken as a product of k factors below 1: nothing overflows.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}): it needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k) if n - c >= k) * (n - c >= k)  # eq: eval.pass


def maj_at_k(answers, correct, k):
    """Expected correctness of the most frequent answer among k responses, over all subsets of size k.

    answers, correct: n answers and whether (or how far) each response is correct.  Tied answers share the vote
    evenly: a a b with a correct, k = 2 -> subsets aa ab ab -> (1 + 1/2 + 1/2) / 3 = 2/3.
    Exact at any n: subsets are counted by how many of each answer they hold, not listed.
    """
    n, votes, total = len(answers), Counter(answers), Counter()
    if not 1 <= k <= n or len(correct) != n:
        raise ValueError(f"maj_at_k: {n} answers, {len(correct)} verdicts, k {k}; it needs n = n and 1 <= k <= n")
    for answer, value in zip(answers, correct):
        total[answer] += float(value)
    return sum(
        total[a] / votes[a] * win_probability(votes[a], tuple(sorted((votes - {a: votes[a]}).values())), k)
        for a in votes
        if total[a]
    )
