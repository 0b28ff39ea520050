"""Several rewards as one: the weighted sum of their scores."""

import math
from dataclasses import dataclass
from inspect import signature

from rewards import compute_score, load_reward_fn
from rewards.manager.calls import EARLIER, check_signature, sees_group


@dataclass
class CombinedReward:
    """Several rewards: `score` is the weighted sum, `score/NAME` the score of each.

    functions: {name: function}.  Of extra keys with one name, the first function's stays.
    weights: none for a single function, whose results stay as they are.
    """

    functions: dict
    weights: list

    def of(self, found, n):
        """The results of n rows from those of each function so far, {name: [result of each row]}."""
        rows = zip(*found.values(), strict=True) if found else [()] * n
        return [self._sum(dict(zip(found, parts, strict=True))) for parts in rows]

    def _sum(self, parts):
        if not self.weights:
            return next(iter(parts.values()), {})
        for part in parts.values():
            if "failure" in part:
                return {"score": 0.0, "failure": part["failure"]}
        extras = {}
        for part in parts.values():
            extras = part | extras
        scores = {f"score/{name}": part["score"] for name, part in parts.items()}
        total = sum(w * score for w, score in zip(self.weights, scores.values(), strict=False))
        if not math.isfinite(total):
            return {"score": 0.0, "failure": f"OverflowError: the weighted sum of the rewards is {total}"}
        return extras | scores | {"score": total}


def parts_of(reward_fn):
    """What `load_rewards` returned as several rewards, of which there may be one."""
    return reward_fn if isinstance(reward_fn, CombinedReward) else CombinedReward({"": reward_fn}, [])


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


def load_rewards(specs, weights, group_size=2):
    """The reward function of the flags --reward_fn and --reward_weights.

    specs: FILE.py:NAME, "rewards" for `compute_score`, or "none" for a 0.  No weights: all 1.
    group_size: responses to a prompt in training.  Raises ValueError, in one line.
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
        function = BUILT_IN[spec] if spec in BUILT_IN else load_reward_fn(spec)
        check_signature(function, spec)
        if sees_group(function) and group_size < 2:
            raise ValueError(f"--reward_fn {spec} compares the responses to a prompt: --group_size above 1")
        if sees_group(function) and EARLIER in signature(function).parameters and not functions:
            raise ValueError(f"--reward_fn {spec} reads the results of others: give one of them before it")
        functions[name] = function
    if len(specs) == 1 and list(weights) == [1.0]:
        return functions[name]
    return CombinedReward(functions, list(weights))
