"""Environments for the tests: each answers whatever the model says."""

import os
import signal
import time
import zlib

SLOW = float(os.environ.get("TALK_DELAY_S", 0))


class Talk:
    """Four answers, one for each turn of five; with TALK_DELAY_S after a time that looks like chance."""

    def __init__(self, extra_info):
        self.index, self.said = extra_info["index"], []

    def step(self, text):
        time.sleep(SLOW * (zlib.crc32(f"{self.index} {text} {time.time()}".encode()) % 8))
        self.said.append(text)
        answer = f"{len(self.said)}: {zlib.crc32(text.encode()) % 100}"
        return [dict(role="user", content=answer)] if len(self.said) < 5 else None

    def reward(self):
        return sum(text.count(x) for text in self.said for x in "aeiou")  # none of which ends a turn


class Trouble(Talk):
    """Of seven conversations one hangs, one raises, one ends its process, one answers with a megabyte."""

    def step(self, text):
        kind = zlib.crc32(f"{self.index} {text}".encode()) % 7
        if kind == 0:
            time.sleep(1000)
        if kind == 1:
            raise RuntimeError("no\nidea")
        if kind == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = super().step(text)
        return [dict(role="user", content="7 " * 500_000)] if kind == 3 and answer else answer


def score(data_source, solution_str, ground_truth, extra_info):
    """What the environment gave, if the last turn is what was said last."""
    said = [message["content"] for message in extra_info["messages"] if message["role"] == "assistant"]
    assert said[-1] == solution_str and len(said) == extra_info["turns"]
    return extra_info["env_reward"] or 0.0


def equal(**_):
    return 1.0
