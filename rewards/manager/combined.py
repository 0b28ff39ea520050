"""Several rewards as one: the weighted sum of their scores."""

import math
from dataclasses import dataclass

from rewards import compute_score, load_reward_fn


@dataclass
class CombinedReward:
    """A reward function of several: `score` is the weighted sum, `score/NAME` the score of each.

    functions: {name: function}.  Of extra keys with one name, the first function's stays.
    """

    functions: dict
    weights: list

    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        extras, scores = {}, {}
        for name, function in self.functions.items():
            result = function(
                data_source=data_source,
                solution_str=solution_str,
                ground_truth=ground_truth,
                extra_info=extra_info,
            )
            result = result if isinstance(result, dict) else {"score": result}
            scores[f"score/{name}"] = result["score"]
            extras = result | extras
        total = sum(weight * score for weight, score in zip(self.weights, scores.values(), strict=True))
        return extras | scores | {"score": total}


def score_parts(reward_fn, rows):
    """(weight, [score of each row]) of each function of `load_rewards`; 0 where all of a group failed."""
    results = [row["reward"] for row in rows]
    if not isinstance(reward_fn, CombinedReward):
        return [(1.0, [result["score"] for result in results])]
    parts = zip(reward_fn.weights, reward_fn.functions, strict=True)
    return [(weight, [result.get(f"score/{name}", 0.0) for result in results]) for weight, name in parts]


def no_rule(**_):
    """Beside another judge: 0 for every response."""
    return 0.0


BUILT_IN = {"rewards": compute_score, "none": no_rule}


def load_rewards(specs, weights):
    """The reward function of the flags --reward_fn and --reward_weights.

    specs: FILE.py:NAME, "rewards" for `compute_score`, or "none" for a 0.  No weights: all 1.
    Raises ValueError, in one line.
    """
    weights = weights or [1.0] * len(specs)
    if not specs:
        raise ValueError("--reward_fn: give at least one")
    if len(weights) != len(specs):
        raise ValueError(f"{len(weights)} --reward_weights for {len(specs)} --reward_fn: give one for each")
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"--reward_weights {' '.join(map(str, weights))}: give numbers")
    functions = {}
    for spec in specs:
        name = spec.replace("\\", "/").rpartition("/")[2].replace(".py:", ".")
        if name in functions:
            raise ValueError(f"two --reward_fn have the name {name}: rename a file or a function")
        functions[name] = BUILT_IN[spec] if spec in BUILT_IN else load_reward_fn(spec)
    if len(specs) == 1 and list(weights) == [1.0]:
        return functions[name]
    return CombinedReward(functions, list(weights))
