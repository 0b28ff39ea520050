"""The reward of the environment itself: what its `reward()` gave after the last step (--env of agent.py).

--reward_fn rewards/env.py:compute_score, alone or besides others:
--reward_fn rewards rewards/env.py:compute_score --reward_weights 1 0.5
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """extra_info["env_reward"]: a number, or a dict with `score`.  Raises ValueError where there is none."""
    reward = (extra_info or {}).get("env_reward")
    if reward is None:
        raise ValueError(
            "the environment gave no reward: it has no method `reward`, failed at its first step, or was not"
            " asked, because the first turn was cut off"
        )
    return reward
