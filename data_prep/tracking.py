"""The log of a run: terminal, log.txt, metrics.jsonl, and TensorBoard or Weights & Biases."""

import json
import shutil
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from data_prep.atomic import replacing


def check_tracker(args):
    """Raise ValueError if --tracker cannot work, before anything is loaded."""
    if args.tracker != "none" and not find_spec(args.tracker):
        how = "pip install --no-deps -r requirements-extra.txt"
        raise ValueError(f"--tracker {args.tracker} is not installed: {how}")
    if args.wandb_project and args.tracker != "wandb":
        raise ValueError(f"--wandb_project {args.wandb_project} needs --tracker wandb, not {args.tracker}")


def open_tracker(args, step):
    """-> a function of (metrics, step). What TensorBoard has of steps after `step` goes: they come again."""
    out = Path(args.output_dir)
    if args.tracker == "wandb":  # WANDB_MODE=offline: without a network
        import wandb

        about = dict(project=args.wandb_project, name=out.name, config=asdict(args))
        return wandb.init(dir=out, **about).log
    if args.tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out / "tensorboard", purge_step=step + 1)

        def track(metrics, step):
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()  # it writes every two minutes, and not at exit

        return track
    return lambda metrics, step: None


class Logger:
    """Terminal, log.txt, metrics.jsonl and the tracker of rank 0; the other ranks are silent."""

    def __init__(self, args, step, total_steps):
        self.out, self.rank0 = Path(args.output_dir), dist.get_rank() == 0
        self.bar = tqdm(total=total_steps, initial=step, desc="step", disable=not self.rank0)
        if not self.rank0:
            return
        for unfinished in self.out.glob("checkpoints/.step_*"):
            shutil.rmtree(unfinished)
        self.metrics = self.out / "metrics.jsonl"
        lines = self.metrics.read_text().splitlines() if step and self.metrics.exists() else []
        # steps after the checkpoint, without one all steps, are done again: their lines go, and one cut short
        keep = lambda line: line.endswith("}") and json.loads(line)["training/global_step"] <= step
        kept = "".join(f"{line}\n" for line in filter(keep, lines))
        for name, text in (("metrics.jsonl", kept), ("args.json", json.dumps(asdict(args), indent=2))):
            with replacing(self.out / name) as new:
                new.write_text(text)
        self.track = open_tracker(args, step)

    def say(self, message):
        """A line for people, in the terminal and in log.txt."""
        if self.rank0:
            self.bar.write(message)
            with (self.out / "log.txt").open("a") as file:
                file.write(message + "\n")

    def log(self, metrics, step, **shown):
        """One dict a step; shown: metrics at the progress bar, under shorter names."""
        metrics = {name: float(value) for name, value in metrics.items()}
        if self.rank0:
            with self.metrics.open("a") as file:
                file.write(json.dumps(metrics) + "\n")
            self.bar.set_postfix({k: f"{metrics[name]:.4g}" for k, name in shown.items()}, refresh=False)
            self.bar.update(step - self.bar.n)
            self.track(metrics, step)

    def close(self, args):
        """Say where everything lies, and what to do next."""
        self.bar.close()
        done = "done" if self.bar.n == self.bar.total else "stopped; the same command goes on"
        weights = f"{self.out}/checkpoints/latest/{'hf' if args.save_hf else 'dcp'}"
        self.say(f"step {self.bar.n} of {self.bar.total}, {done}\nweights: {weights}")
        self.say(f"report:  python algos/report.py {self.out} --output report.html")
