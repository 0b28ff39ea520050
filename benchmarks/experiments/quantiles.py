"""A critic that learns quantiles of the return, not its mean, on chains of sums: what does it do to PPO?

    python data_prep/tiny_model.py --local_save_dir runs/sums/model
    python benchmarks/experiments/quantiles.py      # a quarter of an hour on one core

Writes runs/quantiles as vapo.py does.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.experiments import vapo
from benchmarks.lib.stages import ROOT
from system.arguments import command_line

vapo.KEYS["standard deviation of the quantiles"] = "critic/values_std/mean"
MEAN = "--critic_lam 1"  # what a quantile is of
QUANTILES = f"{MEAN} --value_quantiles 8"
RUNS = {
    "the mean": MEAN,
    "8 quantiles": QUANTILES,
    "8 quantiles and a bonus": f"{QUANTILES} --uncertainty_bonus .5",
}


@dataclass
class Args(vapo.Args):
    output_dir: Path = ROOT / "runs/quantiles"
    """Directory of the runs."""


if __name__ == "__main__":
    vapo.compare(command_line(Args), RUNS)
