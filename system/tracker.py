"""W&B and TensorBoard, for those who want them next to metrics.jsonl."""

from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from uuid import uuid4

TEXTS = ["prompt_str", "solution_str", "ground_truth", "score"]  # what a tracker has of a row


def open_tracker(args, step):
    """-> a function of ({name: number or rows of TEXTS}, step). Those after `step` go: they come again."""
    if args.tracker == "wandb":
        return wandb_tracker(args)
    if args.tracker == "tensorboard":
        return tensorboard_tracker(args, step)
    return lambda metrics, step: None


def wandb_tracker(args):
    """W&B reads WANDB_PROJECT, and WANDB_MODE=offline for no network."""
    import wandb

    out = Path(args.output_dir)
    name = out / "wandb.id"  # a resumed run continues in the same one
    if not (name.exists() and name.read_text()):  # empty: a kill, as it was written
        name.write_text(uuid4().hex[:8])
    run = wandb.init(dir=out, name=out.name, id=name.read_text(), resume="allow", config=asdict(args))

    def track(metrics, step):
        values = {}
        for name, value in metrics.items():
            if isinstance(value, list):
                value = wandb.Table(columns=TEXTS, data=value)
            values[name] = value
        run.log(values, step)

    return track


def tensorboard_tracker(args, step):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(Path(args.output_dir) / "tensorboard", purge_step=step + 1)

    def track(metrics, step):
        for name, value in metrics.items():
            if isinstance(value, list):  # of texts: as Markdown has code
                texts = "\n\n".join(cell for row in value for cell in row)
                writer.add_text(name, indent(texts, "    "), step)
            else:
                writer.add_scalar(name, value, step)
        writer.flush()  # it writes every two minutes, and not at exit

    return track
