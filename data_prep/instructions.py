"""Small writing tasks with an instruction that a rule can check (IFEval, arXiv 2311.07911). No network.

    python data_prep/instructions.py --local_save_dir data/instructions

"Write a slogan about owls. Include the word owls. Wrap your entire response with double quotation marks."
The subjects of val and test differ from the subjects of train.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # CAREFUL: its math, code and inspect would hide Python's
sys.path[:] = [os.path.dirname(HERE), *(path for path in sys.path if os.path.realpath(path) != HERE)]

import json
import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data_prep import prepare
from data_prep.lib.schema import write_parquet

SUBJECTS = """
    the sea, a rainy day, bread, old maps, a lost cat, the moon, bicycles, a small garden, winter, honey
    bees, libraries, trains, coffee, tea, a birthday, mountains, a quiet village, the desert, clocks, kites,
    a lighthouse, football, chess, a robot, the forest, rivers, a market, music, dancing, volcanoes,
    penguins, elephants, a holiday, letters, stars, spring, autumn, summer, a bridge, painting, a museum,
    cooking, cheese, apples, potatoes, a farm, horses, dogs, owls, whales, sailing, camping, fishing, shoes,
    hats, umbrellas, windows, doors, paper, glass, gold, iron, salt, sugar, chocolate, soup, rice, noodles,
    a picnic, a storm, snow, fog, sunshine, rainbows, thunder, the wind, islands, caves, a castle, pirates,
    knights, dragons, a wizard, a school, teachers, doctors, firefighters, astronauts, a rocket, planets,
    telescopes, computers, telephones, radio, newspapers, photographs, films, a theatre, a circus, balloons,
    toys, puzzles, a playground, swimming, running, skating, skiing, tennis, basketball, a race, a parade,
    candles, lamps, fire, ice, mirrors, roses, sunflowers, oak trees, mushrooms, butterflies, spiders, ants,
    frogs, turtles, sharks, eagles, parrots, wolves, bears, foxes, rabbits, sheep, goats, cows, chickens,
    ducks, a barn, a windmill, a harbour, a ferry, airplanes, helicopters, buses, taxis, streets, a hotel, a
    bakery, a kitchen, a sofa, blankets, pillows, dreams, sleep, friendship, kindness, courage, patience,
    laughter
"""
TASKS = (
    "Write a short paragraph about {}.",
    "Write two sentences about {}.",
    "Write a tiny story about {}.",
    "Tell me something interesting about {}.",
    "Describe {} to a child.",
    "Write a slogan about {}.",
    "Write a short poem about {}.",
    "Give a short piece of advice about {}.",
    "Write a short message to a friend about {}.",
    "Explain why people like {}.",
)
WORDS = (
    "happy light time water people bright small home world good day new green old long heart hand road story"
).split()
COMMON = "the and is of a to in with for it".split()
ENDINGS = (
    "That is all you need to know.",
    "Is there anything else I can help with?",
    "Any other questions?",
    "Peace!",
    "And so it ends.",
    "Thank you for reading.",
)
CAPITALS = "Your entire response should be in English, and in all capital letters."
LOWERCASE = (
    "Your entire response should be in English, and in all lowercase letters. No capital letters are allowed."
)
PLACEHOLDERS = (
    "The response must contain at least {num_placeholders} placeholders represented by square brackets, such"
    " as [address]."
)
BULLETS = (
    "Your answer must contain exactly {num_bullets} bullet points. Use the markdown bullet points such as:\n"
    "* This is point 1.\n* This is point 2."
)
HIGHLIGHTS = (
    "Highlight at least {num_highlights} sections in your answer with markdown, i.e. *highlighted section*."
)
TITLE = "Your answer must contain a title, wrapped in double angular brackets, such as <<poem of joy>>."
ENDING = "Finish your response with this exact phrase {end_phrase} No other words should follow this phrase."
POSTSCRIPT = (
    "At the end of your response, please explicitly add a postscript starting with {postscript_marker}"
)
QUOTED = "Wrap your entire response with double quotation marks."
NO_COMMA = "In your entire response, refrain from the use of any commas."
FREQUENCY = "In your response, the word {keyword} should appear {relation} {frequency} times."
SIZES = (10, 15, 20, 30)
ATLEAST = "at least"
# IFEval's name of an instruction: its words, and what a generator of random numbers makes of its arguments
INSTRUCTIONS = {
    "change_case:english_capital": (CAPITALS, lambda rng: {}),
    "change_case:english_lowercase": (LOWERCASE, lambda rng: {}),
    "detectable_content:number_placeholders": (
        PLACEHOLDERS,
        lambda rng: dict(num_placeholders=rng.randint(1, 3)),
    ),
    "detectable_content:postscript": (POSTSCRIPT, lambda rng: dict(postscript_marker="P.S.")),
    "detectable_format:json_format": ("Entire output should be wrapped in JSON format.", lambda rng: {}),
    "detectable_format:number_bullet_lists": (BULLETS, lambda rng: dict(num_bullets=rng.randint(2, 4))),
    "detectable_format:number_highlighted_sections": (
        HIGHLIGHTS,
        lambda rng: dict(num_highlights=rng.randint(1, 3)),
    ),
    "detectable_format:title": (TITLE, lambda rng: {}),
    "keywords:existence": (
        "Include keywords {keywords} in the response.",
        lambda rng: dict(keywords=rng.sample(WORDS, rng.randint(1, 3))),
    ),
    "keywords:forbidden_words": (
        "Do not include keywords {forbidden_words} in the response.",
        lambda rng: dict(forbidden_words=rng.sample(COMMON, 2)),
    ),
    "keywords:frequency": (
        FREQUENCY,
        lambda rng: dict(keyword=rng.choice(WORDS), frequency=rng.randint(2, 4), relation=ATLEAST),
    ),
    "length_constraints:number_words": (
        "Answer with {relation} {num_words} words.",
        lambda rng: dict(num_words=rng.choice(SIZES), relation=rng.choice((ATLEAST, "less than"))),
    ),
    "punctuation:no_comma": (NO_COMMA, lambda rng: {}),
    "startend:end_checker": (ENDING, lambda rng: dict(end_phrase=rng.choice(ENDINGS))),
    "startend:quotation": (QUOTED, lambda rng: {}),
}


SUBJECT = "keywords:existence"  # of its subject: an instruction of every question


@dataclass
class Args:
    local_save_dir: str = "data/instructions"
    """Directory for train.parquet, val.parquet and test.parquet."""
    train_size: int = 4000
    """Questions in train."""
    val_size: int = 200
    """Questions in val."""
    test_size: int = 500
    """Questions in test."""
    seed: int = 0
    """Seed of the questions."""


def make_rows(split, subjects, rng):
    """Rows of the schema without end, no question twice."""
    seen = set()
    while True:
        name = rng.choice([*INSTRUCTIONS])
        text, draw = INSTRUCTIONS[name]
        kwargs = draw(rng)
        said = {key: ", ".join(x) if isinstance(x, list) else x for key, x in kwargs.items()}
        task = rng.choice(TASKS)
        subject = rng.choice(subjects)
        word = subject.split()[-1]
        question = f"{task.format(subject)} Include the word {word}. {text.format(**said)}"
        if question in seen:
            continue
        truth = dict(instruction_id_list=[SUBJECT, name], kwargs=[dict(keywords=[word]), kwargs])
        about = dict(split=split, index=len(seen))
        seen.add(question)
        yield {
            "data_source": "ifeval",
            "prompt": [{"role": "user", "content": question}],
            "ability": "instructions",
            "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
            "extra_info": about | dict(question=question, answer="", instruction=name),
        }


def main(args):
    """Write the files and say how many rows each has."""
    for name in ("train_size", "val_size", "test_size"):
        if not 1 <= getattr(args, name) <= 5000:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be from 1 to 5000")
    rng = random.Random(args.seed)
    subjects = [" ".join(subject.split()) for subject in SUBJECTS.split(",")]
    rng.shuffle(subjects)
    half = len(subjects) // 2
    rest = 3 * len(subjects) // 4
    parts = dict(train=subjects[:half], val=subjects[half:rest], test=subjects[rest:])
    for split, part in parts.items():
        path = Path(args.local_save_dir) / f"{split}.parquet"
        rows = islice(make_rows(split, part, rng), getattr(args, f"{split}_size"))
        print(f"{path}: {write_parquet(rows, path)} rows")


if __name__ == "__main__":
    prepare.run(main, Args)
