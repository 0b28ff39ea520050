"""Scores of responses, dispatched by `data_source`.  A score module has one function `compute_score`."""

import importlib
import importlib.util
import json
import os
import sys
from contextlib import suppress
from fnmatch import fnmatchcase
from math import isfinite  # CAREFUL: by name, as `math` is a module of this package

from rewards.boxed import NO_TRUTH, answer_of
from system.plugins import load_from

SCORERS = {  # module of this package -> its data_sources, which may end in *
    "gsm8k": ["openai/gsm8k", "arithmetic"],
    "exact": ["shapes"],
    "math": ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"],
    "math_dapo": ["math_dapo*", "aime*"],
    "math_verify": ["numina_*"],
    "geo3k": ["hiyouga/geometry3k"],
    "ifeval": ["ifeval"],
    "kk": ["kk", "kk_logic"],
    "prime_code": ["codecontests", "apps", "codeforces", "taco", "mbpp", "openai_humaneval", "quixbugs"],
    "reasoning_gym": ["reasoning_gym/*"],
}
SOURCES = {source: module for module, sources in SCORERS.items() for source in sources}
HELD = {  # how a response holds the answer, for the scorers that compare with one
    "gsm8k": "#### {}",
    "exact": "{}",
    "math": "\\boxed{{{}}}",
    "math_dapo": "Answer: {}",
    "math_verify": "\\boxed{{{}}}",
    "geo3k": "\\boxed{{{}}}",
}


def _scorer(source):
    """Module name for a data_source, or None."""
    return next((SOURCES[pattern] for pattern in SOURCES if fnmatchcase(str(source), pattern)), None)


def check_sources(sources):
    """Raise ValueError, in one line, if one of `sources` (iterable of data_source) cannot be scored here.

    It has no scorer, its library is not installed, or its programs have no sandbox.  Says which sandbox is in
    use.
    """
    scorers = {str(source): _scorer(source) for source in sources}
    unknown = sorted(source for source, scorer in scorers.items() if scorer is None)
    if unknown:
        raise ValueError(
            f"no reward for data_source {', '.join(map(repr, unknown))}; known: {', '.join(SOURCES)};"
            " for your own give --reward_fn FILE.py:NAME"
        )
    if "reasoning_gym" in scorers.values():
        from rewards.reasoning_gym import check_installed

        check_installed()
    if "prime_code" in scorers.values():
        from rewards.sandbox import tier

        name = tier()
        if os.environ.get("RANK", "0") == "0":
            print(f"programs run in a sandbox of the tier {name!r}", flush=True)


def row_check(function):
    """`check_row` of the module of a reward, or None.

    It is called with data_source, ground_truth and extra_info, and raises ValueError for a row that the
    reward cannot read, or that no response can meet.
    """
    module = sys.modules.get(function.__module__)
    return check_row if function is compute_score else getattr(module, "check_row", None)


def check_row(data_source, ground_truth, extra_info):
    """ValueError for a row that its scorer cannot read, or whose answer as a response does not score."""
    module, truths = _read(data_source, ground_truth)
    held = HELD.get(_scorer(data_source))
    if held is None:
        return module.check_row(data_source, ground_truth, extra_info)
    for truth in truths:
        response = held.format(" ".join(truth.split()))
        result = module.compute_score(data_source, response, truth, extra_info)
        if truth.lower() in NO_TRUTH or not result["acc"]:
            raise ValueError(f"no response can meet the ground truth {truth!r:.60}")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score one response: a float, or a dict with `score` and extra keys that are logged and dumped.

    A ground truth that is a list of answers, or JSON text of a list of strings, is met by each of them.
    Raises ValueError for an unknown data_source, and for a ground truth that its scorer cannot read.
    """
    module, truths = _read(data_source, ground_truth)
    results = [module.compute_score(data_source, solution_str, truth, extra_info) for truth in truths]
    return max(results, key=lambda result: result["acc"]) if len(results) > 1 else results[0]


def _read(data_source, ground_truth):
    """The module that scores rows of a data_source, and the ground truths that it is given."""
    scorer = _scorer(data_source)
    if scorer is None:
        check_sources([data_source])
    module = importlib.import_module(f"{__name__}.{scorer}")
    return module, answers(ground_truth) if scorer in HELD else [ground_truth]


def answers(ground_truth):
    """The correct answers that a ground truth names; of a solution its answer, after #### or in its box."""
    truth = ground_truth
    if isinstance(truth, str) and truth.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            found = json.loads(truth)
            if found and all(isinstance(x, str) for x in found):  # [1, 2] is an interval
                truth = found
    truths = truth if isinstance(truth, list) else [truth]
    if not truths or not all(map(_is_answer, truths)):
        raise ValueError(f"the ground truth must be an answer or a list of answers, not {ground_truth!r:.60}")
    return [*map(answer_of, map(str, truths))]


def _is_answer(truth):
    if isinstance(truth, float):
        return isfinite(truth)  # a gap of a table of pandas is NaN
    return isinstance(truth, str | int) and str(truth).strip() != ""


def load_reward_fn(spec):
    """Load the function of `--reward_fn FILE.py:NAME`; it takes the arguments of `compute_score` by name.

    Raises ValueError, in one line, as `load_from` does, and when it is not callable.
    """
    function = load_from(spec, "--reward_fn")
    if not callable(function):
        name = spec.rpartition(":")[2]
        raise ValueError(f"--reward_fn {spec}: {name!r} is a {type(function).__name__}, not a function")
    return function
