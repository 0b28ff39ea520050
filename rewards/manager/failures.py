"""Rewards that fail: what they count, when a run says so, and when it ends."""

import logging
import re

from system.arguments import fail

LOG = logging.getLogger("rewards")  # of a run: its terminal and log.txt; else stderr
PASSING = re.compile(r"\w*(timeout|connect)", re.IGNORECASE)  # exceptions of a server that may come back
OUTAGE = 3  # steps in a row without a single score, all for such reasons, that a run waits for


class Failures:
    """Looks at the rewards of each step, or at the environments."""

    def __init__(self, what):
        self.what = what
        self.said = set()  # kinds of failures
        self.has_worked = False
        self.lost = 0  # steps in a row without a single score

    def check(self, failures, total):
        """Say the first failure of each kind; stop if nothing else came. All ranks call this alike."""
        if len(failures) < total:
            self.lost = 0
            self.has_worked = True
        elif failures:
            self.lost += 1
            passing = self.has_worked and self.lost < OUTAGE and all(map(PASSING.match, failures))
            if not passing:
                stop(f"the {self.what} failed for all {total} responses, the first with {failures[0]}")
        for failure in failures:
            kind = failure.partition(":")[0]
            if kind not in self.said:
                self.said.add(kind)
                text = f"the {self.what} failed for {len(failures)} of {total} responses, one with {failure}"
                LOG.warning(f"warning: {text}; more such failures are only counted")


REWARDS = Failures("reward")  # of this process
ENVIRONMENTS = Failures("environment")


def stop(message):
    """End the run; the line is also in its log.txt."""
    text = f"{message}: fix it, and start again; with another reward or environment by --resume elsewhere"
    LOG.info(f"error: {text}")
    fail(text)


def check_failures(rows):
    """Say which rewards and environments failed, of the rows of all ranks; stop if each did."""
    check_environments(rows)
    check_results([row["reward"] for row in rows])


def check_environments(rows):
    """Say which environments failed; stop if each did."""
    ENVIRONMENTS.check([row["failure"] for row in rows if row.get("failure")], len(rows))


def check_results(results):
    """The results of a file of responses; stop if every reward failed."""
    REWARDS.check(failures_of(results), len(results))
    return results


def failures_of(results):
    return [result["failure"] for result in results if "failure" in result]


def demote_failures(rows):
    """Rows, with `group` and `reward`, in which a failed reward counts as the lowest of its group.

    A failure says nothing about the response. As a 0 it would beat the wrong ones of a reward of +1 and -1.
    Where all of a group failed, they stay as they are.
      scores  1  -1  0 failed | 1  0.5  0 failed | 0 failed  0 failed
      become  1  -1 -1        | 1  0.5  0        | 0         0
    """
    lowest = {}  # of each group, of those that did not fail
    for row in rows:
        if "failure" not in row["reward"]:
            known = lowest.setdefault(row["group"], row["reward"])
            lowest[row["group"]] = min(known, row["reward"], key=lambda result: result["score"])

    demoted = []
    for row in rows:
        floor = lowest.get(row["group"])
        if "failure" in row["reward"] and floor:
            low = {}
            for name in floor:
                if name in ("score", "acc"):
                    low[name] = min(row["reward"].get(name, 0.0), floor[name])
                elif name.startswith("score/"):  # of the lowest response, because weights may be negative
                    low[name] = floor[name]
            row = row | dict(reward=row["reward"] | low)
        demoted.append(row)
    return demoted
