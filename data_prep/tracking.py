"""Where metrics go beside a run's metrics.jsonl: TensorBoard or Weights & Biases."""

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path


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
