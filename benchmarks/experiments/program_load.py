"""The same programs while other processes are busy, by both managers: are the verdicts the same?

    python benchmarks/experiments/program_load.py      # half an hour on two cores

Writes runs/program_load/results.json.
"""

import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.stages import ROOT
from rewards import prime_code
from rewards.manager import RewardManager
from rewards.manager.combined import load_rewards
from rewards.programs import checks
from system.arguments import command_line

TIMEOUT_S = 0.5  # of a processor for a test, in place of 4
WORK = "import time\nn = int(input())\nwhile time.process_time() < {}: pass\nprint(n + {})"
PROGRAMS = {
    "correct": WORK.format(TIMEOUT_S / 10, 1),
    "wrong": WORK.format(TIMEOUT_S / 10, 2),
    "correct, 3/4 of the limit": WORK.format(TIMEOUT_S * 3 / 4, 1),
    "sleeps": "import time\ntime.sleep(99)",
}
TRUTH = json.dumps(dict(inputs=["1\n"], outputs=["2\n"]))


@dataclass
class Args:
    output: Path = ROOT / "runs/program_load/results.json"  # file of the results
    loads: tuple[int, ...] = (1, 4, 16)  # busy processes for each core
    programs: int = 64  # of a run, in equal shares of each kind


def score(**row):
    checks.TIMEOUT_S = TIMEOUT_S
    return prime_code.compute_score(**row)


def spin():
    os.setsid()  # Linux may share its cores by session, and each program has one
    parent = os.getppid()
    while os.getppid() == parent:  # it may be killed
        pass


def main(args):
    kinds = [list(PROGRAMS)[i % len(PROGRAMS)] for i in range(args.programs)]
    texts = [f"```python\n{PROGRAMS[kind]}\n```{' ' * i}" for i, kind in enumerate(kinds)]
    row, found = dict(data_source="taco", ground_truth=TRUTH, extra_info={}), []
    reward, cores = load_rewards([f"{__file__}:score"], []), len(os.sched_getaffinity(0))
    for load in args.loads:
        others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(load * cores)]
        for process in others:
            process.start()
        for mode in ("prime", "naive"):
            begin = time.time()
            results = RewardManager(mode, reward).score([dict(row, solution_str=text) for text in texts])
            said = [x.get("failure", str(x["score"])).partition(":")[0] for x in results]
            verdicts = {kind: dict(Counter(y for x, y in zip(kinds, said) if x == kind)) for kind in PROGRAMS}
            found.append(dict(load=load, manager=mode, seconds=round(time.time() - begin)) | verdicts)
            print(found[-1], flush=True)
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(found, indent=2) + "\n")
        for process in others:
            process.kill()


if __name__ == "__main__":
    main(command_line(Args))
