"""A game of several turns without tools: guess a number between bounds, which the prompt gives.

The last integer of a turn is the guess; a user's message answers "higher" or "lower".  The reward is 1 for
the number at once, and a tenth of it less for each turn before.  extra_info of a row: low, high, number.
"""

import re

from system.thoughts import reply_of


class Guess:
    def __init__(self, extra_info):
        self.low, self.high, self.number = (int(extra_info[key]) for key in ("low", "high", "number"))
        self.turns = 0
        self.found = False

    def step(self, text):
        self.turns += 1
        guesses = re.findall(r"(?<!\d)-?\d+", reply_of(text))
        guess = int(guesses[-1]) if guesses and len(guesses[-1]) < 20 else None  # int() refuses long texts
        self.found = guess == self.number
        if self.found:
            return None
        if guess is None or not self.low <= guess <= self.high:
            answer = f"Guess a number from {self.low} to {self.high}."
        else:
            answer = "higher" if guess < self.number else "lower"
        return [{"role": "user", "content": answer}]

    def reward(self):
        return 0.9 ** (self.turns - 1) if self.found else 0.0
