"""Tasks of reasoning-gym with a second and a third attempt: rows of data_prep/reasoning_gym.py.

The model answers in <answer>...</answer>; the library scores it.  One without full marks is answered by a
user's message that says so.  The reward is the score of the last answer, halved for each one before it.
"""

import ast

from rewards.reasoning_gym import check_installed, score

ATTEMPTS = 3
check_installed()


class Retry:
    def __init__(self, extra_info):
        self.entry = extra_info["entry"]
        self.task = ast.literal_eval(self.entry)["metadata"]["source_dataset"]
        self.attempts = 0
        self.score = 0.0

    def step(self, text):
        self.attempts += 1
        self.score = score(self.task, self.entry, text)["score"]
        if self.score >= 1 or self.attempts == ATTEMPTS:
            return None
        return [{"role": "user", "content": "This is not correct. Think again, and give another <answer>."}]

    def reward(self):
        return self.score * 0.5 ** (self.attempts - 1)
