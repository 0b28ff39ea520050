"""dapo.py that also reports dapo/idle without --partial_rollout: FLAGS of dapo.py, one rank.

Without it a rollout takes as many steps of the sampler as its longest response has tokens, where all responses
begin at the same time.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import dapo


def measure_places():
    """Add the share of empty places to the metrics of a step, from the lengths of what it sampled."""
    rollout, log, used = dapo.rollout, dapo.Logger.log, [0, 0]

    def measured(engine, args, timing, *rest, **sampling):
        rows = rollout(engine, args, timing, *rest, **sampling)
        if timing:  # validation has no timing of its own
            places = min(len(rows), engine.llm_engine.vllm_config.scheduler_config.max_num_seqs)
            assert places == len(rows), "some responses waited for a place"
            used[0] += sum(row["length"] for row in rows)
            used[1] += places * max(row["length"] for row in rows)
        return rows

    def count(self, metrics, step, **shown):
        if used[1]:
            metrics["dapo/idle"] = 1 - used[0] / used[1]
        used[:] = 0, 0
        log(self, metrics, step, **shown)

    dapo.rollout, dapo.Logger.log = measured, count


if __name__ == "__main__":
    args = dapo.Args(**dapo.parse(dapo.Args))
    if not args.partial_rollout:
        measure_places()
    dapo.main(args)
