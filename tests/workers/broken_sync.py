"""GRPO with a weight sync that does nothing."""

import sys

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import grpo

grpo.sync_weights = lambda *_: None
grpo.main(grpo.Args(**grpo.parse(grpo.Args)))
