"""dapo.py that reports dapo/sampler_steps too, and dapo/idle in every run: FLAGS of dapo.py, one rank."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import dapo


def count_steps():
    """Count the steps of the sampler in training, and the places that its responses leave empty."""
    log, counts = dapo.Run.log, dict(steps=0, used=0, room=0)

    def counted(rollout):
        def measured(engine, *rest, temperature, **sampling):
            before = counts["steps"]
            step = type(engine).step

            def one_more():
                counts["steps"] += 1
                return step(engine)

            engine.step = one_more
            found = rollout(engine, *rest, temperature=temperature, **sampling)
            del engine.step
            if not temperature:  # validation is greedy
                counts["steps"] = before
            elif isinstance(found, list):
                places = min(len(found), engine.vllm_config.scheduler_config.max_num_seqs)
                counts["used"] += sum(row["length"] for row in found)
                counts["room"] += places * (counts["steps"] - before)
            return found

        return measured

    def report(self, metrics, **shown):
        if self.step:
            metrics["dapo/sampler_steps"] = counts["steps"]
        if counts["room"]:
            metrics["dapo/idle"] = 1 - counts["used"] / counts["room"]
        counts.update(steps=0, used=0, room=0)
        log(self, metrics, **shown)

    dapo.rollout, dapo.partial_rollout = counted(dapo.rollout), counted(dapo.partial_rollout)
    dapo.Run.log = report


if __name__ == "__main__":
    args = dapo.Args(**dapo.parse(dapo.Args))
    count_steps()
    dapo.main(args)
