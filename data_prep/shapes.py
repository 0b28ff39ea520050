"""Small pictures of coloured shapes and a question about each: train, val and test parquet. No network.

    python data_prep/shapes.py --local_save_dir data/shapes
    python data_prep/shapes.py --task count --images 2 --local_save_dir data/counts

The prompt is <image>What colour is it? and the answer, say, blue; or <image>How many are red? and a number.
extra_info.guess is an answer drawn blindly: it shows what one looks like, and nothing of the picture.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import random
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal

from PIL import Image, ImageDraw

from data_prep.lib.schema import write_parquet
from data_prep.prepare import run

COLORS = ("red", "green", "blue", "yellow", "purple", "black")
KINDS = ("circle", "square", "triangle")
SIDE, CELLS = 32, 3  # pixels of a picture, and places for small shapes along one side of it
MOST = 4  # shapes of the colour that is asked for, and of others


@dataclass
class Args:
    local_save_dir: str = "data/shapes"
    """Directory for the files."""
    task: Literal["name", "count"] = "name"
    """What is asked: the colour of one large shape, or how many small ones have a colour."""
    images: int = 1
    """With --task count: pictures of a question, which asks for the number in all of them."""
    train_size: int = 4000
    """Questions in train."""
    val_size: int = 128
    """Questions in val."""
    test_size: int = 512
    """Questions in test."""
    seed: int = 0
    """Seed of the questions and pictures."""


def draw(shapes):
    """A PNG of shapes: colour, kind, left, top and size of each."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    canvas = ImageDraw.Draw(image)
    for color, kind, x, y, size in shapes:
        if kind == "triangle":
            canvas.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=color)
        else:
            shape = canvas.ellipse if kind == "circle" else canvas.rectangle
            shape((x, y, x + size, y + size), fill=color)
    file = BytesIO()
    image.save(file, "PNG")
    return dict(bytes=file.getvalue(), path=None)


def one_shape(rng):
    """A question about one shape -> question, answer, a guess, pictures."""
    color = rng.choice(COLORS)
    kind = rng.choice(KINDS)
    size = rng.randint(14, 22)
    x, y = (rng.randrange(SIDE - size) for _ in range(2))
    return "What colour is it?", color, rng.choice(COLORS), [draw([(color, kind, x, y, size)])]


def some_shapes(rng, images):
    """A question about small shapes, as one_shape."""
    colors = COLORS[:3]
    total = 0
    pictures = []
    color = rng.choice(colors)
    for _ in range(images):
        number = rng.randint(0, MOST)
        others = rng.randint(0, MOST)
        names = [color] * number + rng.choices([c for c in colors if c != color], k=others)
        places = rng.sample(range(CELLS * CELLS), len(names))
        shapes = []
        for name, place in zip(names, places):
            size = rng.randint(6, 8)
            x, y = (1 + 10 * i + rng.randrange(10 - size) for i in divmod(place, CELLS))
            shapes.append((name, rng.choice(KINDS), x, y, size))
        total = total + number
        pictures = [*pictures, draw(shapes)]
    return f"How many are {color}?", str(total), str(rng.randint(0, MOST * images)), pictures


def make_row(split, index, args, rng):
    """One row of the schema."""
    task = one_shape(rng) if args.task == "name" else some_shapes(rng, args.images)
    question, answer, guess, pictures = task
    about = {"split": split, "index": index, "question": question, "answer": answer, "guess": guess}
    return {
        "data_source": "shapes",
        "prompt": [{"role": "user", "content": "<image>" * len(pictures) + question}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": about,
        "images": pictures,
    }


def main(args):
    """Write the files and say how many rows each has."""
    for name in ("train_size", "val_size", "test_size", "images"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    rng = random.Random(args.seed)
    for split in ("train", "val", "test"):
        path = Path(args.local_save_dir) / f"{split}.parquet"
        rows = (make_row(split, i, args, rng) for i in range(getattr(args, f"{split}_size")))
        print(f"{path}: {write_parquet(rows, path)} rows")


if __name__ == "__main__":
    run(main, Args)
