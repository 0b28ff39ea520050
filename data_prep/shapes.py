"""Pictures of coloured shapes and how many are of one colour: train, val and test parquet. No network.

    python data_prep/shapes.py --local_save_dir data/shapes

The prompt is <image>How many are red?, the answer a number. Every picture is another one.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import random
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import tyro
from PIL import Image, ImageDraw

from data_prep.schema import write_parquet

COLORS = ("red", "green", "blue")
CELL, SIDE = 10, 3  # pixels of a cell, which has at most one shape, and cells along one side


@dataclass
class Args:
    local_save_dir: str = "data/shapes"
    """Directory for train.parquet, val.parquet and test.parquet."""
    train_size: int = 4000
    """Questions in train."""
    val_size: int = 128
    """Questions in val."""
    test_size: int = 512
    """Questions in test."""
    images: int = 1
    """Pictures of a question, which asks for the number in all of them."""
    most: int = 4
    """Largest answer of one picture, at most 9; from 0 to it all are equally frequent."""
    seed: int = 0
    """Seed of the questions and pictures."""


def draw(colors, rng):
    """A PNG with a shape of each of these colours, in random places."""
    image = Image.new("RGB", (CELL * SIDE + 2,) * 2, "white")
    canvas = ImageDraw.Draw(image)
    for color, cell in zip(colors, rng.sample(range(SIDE * SIDE), len(colors)), strict=True):
        size, (y, x) = rng.randint(6, 8), divmod(cell, SIDE)
        x, y = (1 + CELL * i + rng.randint(0, CELL - size - 1) for i in (x, y))
        box = x, y, x + size, y + size
        kind = rng.choice(("ellipse", "rectangle", "triangle"))
        if kind == "triangle":
            canvas.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=color)
        else:
            getattr(canvas, kind)(box, fill=color)
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_row(split, index, args, rng):
    """One row of the schema."""
    color, counts, images = rng.choice(COLORS), [], []
    for _ in range(args.images):
        counts.append(rng.randint(0, args.most))
        others = rng.randint(0, min(3, SIDE * SIDE - counts[-1]))
        colors = [color] * counts[-1] + rng.choices([c for c in COLORS if c != color], k=others)
        images.append(dict(bytes=draw(colors, rng), path=None))
    question, answer = f"How many are {color}?", str(sum(counts))
    about = {"split": split, "index": index, "question": question, "answer": answer}
    return {
        "data_source": "shapes",
        "prompt": [{"role": "user", "content": "<image>" * args.images + question}],
        "ability": "counting",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": about | {"method": "flexible"},  # of the reward: the last number is the answer
        "images": images,
    }


def main(args):
    """Write the files and say how many rows each has."""
    for name in ("train_size", "val_size", "test_size", "images"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if not 1 <= args.most <= SIDE * SIDE:
        raise ValueError(f"--most is {args.most}; it must be from 1 to {SIDE * SIDE}")
    rng = random.Random(args.seed)
    for split in ("train", "val", "test"):
        path = Path(args.local_save_dir) / f"{split}.parquet"
        rows = (make_row(split, i, args, rng) for i in range(getattr(args, f"{split}_size")))
        print(f"{path}: {write_parquet(rows, path)} rows")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except ValueError as error:
        sys.exit(f"shapes.py: {error}")
