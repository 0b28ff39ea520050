"""Models that take images: what they see, what they learn from it, and what is refused."""

import io
import itertools
import random
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, healthy, load_weights, run
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from algos import grpo, sft
from data_prep.lib import images
from data_prep.lib.cache import load_prompts
from data_prep.lib.schema import load_rows, write_parquet


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    out = tmp_path_factory.mktemp("vlm") / "model"
    run(ROOT / "data_prep/tiny_vlm.py", "--local_save_dir", out, "--hidden_size", 64)
    return str(out)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Rows with two images; every third row of train has none."""
    out = tmp_path_factory.mktemp("shapes")
    sizes = "--task count --train_size 24 --val_size 6 --test_size 6 --images 2".split()
    run(ROOT / "data_prep/shapes.py", "--local_save_dir", out, *sizes)
    rows = pq.read_table(out / "train.parquet").to_pylist()
    for row in rows[::3]:
        row["images"], row["prompt"][0]["content"] = [], row["extra_info"]["question"]
    write_parquet(rows, out / "train.parquet")
    return out


@pytest.fixture(scope="module")
def gradients(vlm, shapes, tmp_path_factory):
    out = tmp_path_factory.mktemp("gradients")
    for ranks in (1, 2):
        run(
            ROOT / "tests/workers/image_gradients.py",
            vlm,
            shapes / "train.parquet",
            out / f"{ranks}.pt",
            ranks=ranks,
        )
    return {ranks: torch.load(out / f"{ranks}.pt") for ranks in (1, 2)}


@pytest.mark.parametrize("kind", ("grpo", "sft"))
@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("budget", (10, 170, 100_000))
def test_gradients_are_those_of_plain_code(gradients, kind, ranks, budget):
    for step, plain in enumerate(gradients[1][kind, "naive"]):
        found = gradients[ranks][kind, budget][step]
        whole = torch.stack([x.norm() for x in plain.values()]).norm()
        seen = {name: x for name, x in plain.items() if "vision" in name and x.any()}
        assert bool(seen) == (step != 1)  # the second step has no image
        for name, x in found.items():
            assert (x - plain.get(name, torch.zeros_like(x))).norm() < 1e-5 * whole, (step, name)


def test_sampler_and_trainer_agree(vlm, shapes):
    print(run(ROOT / "tests/workers/image_sync.py", vlm, shapes / "train.parquet").stdout)


def test_it_runs_on_two_ranks_and_is_answered_by(vlm, shapes, tmp_path):
    files = "--train_files", shapes / "train.parquet", "--val_files", shapes / "val.parquet"
    sizes = "--train_batch_size 8 --ppo_mini_batch_size 4 --group_size 4 --max_response_length 8".split()
    rest = "--max_prompt_length 80 --max_tokens_per_microbatch 300 --lr 1e-3 --total_steps 2".split()
    flags = *files, *sizes, *rest, "--use_kl_loss", "--reward_fn", f"{ROOT}/tests/digit_reward.py:digits"
    run(ROOT / "algos/grpo.py", "--model", vlm, "--output_dir", tmp_path, *flags, ranks=2)
    assert list(healthy(tmp_path)) == [0, 1, 2]
    hf = tmp_path / "checkpoints/latest/hf"
    before, after = load_weights(vlm), load_weights(hf)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    AutoModelForImageTextToText.from_pretrained(hf), AutoProcessor.from_pretrained(hf)
    out, limits = tmp_path / "answers.parquet", "--max_prompt_length 80 --max_response_length 8".split()
    files = "--model", tmp_path, "--data", shapes / "val.parquet", "--output", out
    run(ROOT / "algos/generate.py", *files, *limits)
    answers = load_rows(out, ["responses", "extra_info"])
    assert len(answers) == 6 and all(len(row["responses"]) == 1 for row in answers)


def test_a_prompt_is_as_its_processor_has_it(vlm, shapes):
    """An image is one token for the sampler, for the trainer 16 and their frame; where it stands is kept."""
    processor = images.load_processor(vlm, sees=True)
    rows, dropped = load_prompts([str(shapes / "train.parquet")], processor, 80)
    one = processor.image_token_id
    assert not dropped and len(rows[0]["images"]) == 0 and len(rows[1]["images"]) == 2
    assert rows[0]["prompt_ids"] == rows[0]["sampler_ids"]
    assert rows[1]["sampler_ids"].count(one) == 2 and rows[1]["prompt_ids"].count(one) == 32
    assert len(rows[1]["prompt_ids"]) == len(rows[1]["sampler_ids"]) + 2 * (16 + 3 - 1)
    row = dict(prompt=[dict(role="user", content="a<image>b<image>")], images=rows[1]["images"])
    assert processor.decode(images.encode_prompt(row, processor)["sampler_ids"]) == (
        "<|user|>a<image>b<image><|assistant|>"
    )
    kept, dropped = load_prompts([str(shapes / "train.parquet")], processor, 40)
    assert len(kept) == dropped / 2 == 8  # those without images


def test_what_cannot_be_seen_is_one_line(vlm, tiny, shapes, tmp_path):
    processor, rows = (
        images.load_processor(vlm, sees=True),
        pq.read_table(shapes / "train.parquet").to_pylist(),
    )
    whole = rows[4]["images"]

    def refused(processor, problem, **changes):
        write_parquet([*rows[:4], rows[4] | changes], path := tmp_path / "bad.parquet")
        with pytest.raises(ValueError, match=problem) as caught:
            load_prompts([str(path)], processor, 80)
        assert "\n" not in str(caught.value)

    cut = dict(bytes=whole[0]["bytes"][:60], path=None)
    refused(processor, r"bad.parquet: row 4: an image cannot be read: ", images=[cut, whole[1]])
    gone = dict(bytes=None, path=str(tmp_path / "gone.png"))
    refused(processor, "bad.parquet: row 4: an image cannot be read: .*gone.png", images=[gone, whole[1]])
    refused(processor, "bad.parquet: row 4: it has 3 images, and 2 <image> marks", images=[*whole, whole[0]])
    refused(processor, "bad.parquet: row 4: it has the mark <image>, and no picture", images=[])
    refused(
        images.load_processor(tiny), "row 1 has images, which are not read here: take a model with a vision"
    )
    with pytest.raises(ValueError, match=r"row 0: 'images\[0\]' must be {bytes, path}"):
        write_parquet([rows[4] | dict(images=[dict(bytes=None, path=None)])], tmp_path / "bad.parquet")
    Image.open(io.BytesIO(whole[0]["bytes"])).save(tmp_path / "there.png")
    there = dict(bytes=None, path=str(tmp_path / "there.png"))
    assert images.open_images(dict(images=[there])) == images.open_images(dict(images=whole[:1]))


@pytest.mark.parametrize(
    "script, flags, problem",
    (
        (grpo, dict(lora_rank=4), "takes images, which are trained without --lora_rank"),
        (sft, dict(lora_rank=4), "takes images, which --text_key, --messages_key, --lora_rank, --liger"),
    ),
)
def test_what_images_do_not_go_with(vlm, shapes, tmp_path, script, flags, problem):
    files = dict(model=vlm, train_files=(str(shapes / "train.parquet"),), output_dir=str(tmp_path))
    with pytest.raises(SystemExit, match=problem):
        script.load_data(script.Args(**files, **flags))


MODES = "1 L P RGB RGBA RGBX RGBa CMYK YCbCr LAB HSV I F LA La PA I;16 I;16L I;16B I;16N".split()


def picture(mode):
    """Pixels of all shades and degrees of transparency, 13 x 7."""
    shades = np.random.default_rng(0).integers(0, 256, (7, 13, 4), np.uint8)
    shades[0, :, 3], shades[1, :, 3], shades[2, 0, :3] = 0, 255, (1, 2, 3)
    image = Image.fromarray(shades)
    if mode.startswith("I;"):
        return Image.frombytes(mode, (13, 7), shades[..., :2].tobytes())
    if mode == "P":
        image = image.convert("L")
        image.putpalette(np.random.default_rng(1).integers(0, 256, 768, np.uint8).tobytes())
    for between in dict(La=["LA"], LAB=["RGB"], PA=["P"], HSV=["RGB"], F=["L"]).get(mode, []):
        image = image.convert(between)
    return image.convert(mode)


def files():
    """{bytes: mode and format}: each mode in each format that takes it, with transparency, turned by EXIF."""
    Image.init()
    found = {}

    def save(mode, kind, turn=0, **options):
        """Whether this is a new file."""
        if turn:
            exif = options["exif"] = Image.Exif()
            exif[0x0112] = turn
        try:
            picture(mode).save(file := io.BytesIO(), kind, speed=10, **options)
        except Exception:  # a format has few modes, and each writer has an error of its own
            return False
        return found.setdefault(file.getvalue(), made := (mode, kind)) is made

    save("RGBA", "ICNS")  # once, because it is enlarged to a megabyte
    for mode, kind in itertools.product(MODES, sorted(Image.SAVE.keys() - {"ICNS"})):
        if save(mode, kind):
            for transparency in (0, 3, (1, 2, 3), b"\0\x40\x80"):
                save(mode, kind, transparency=transparency)
            if save(mode, kind, turn=6):
                [save(mode, kind, turn=turn) for turn in range(1, 9)]
                save(mode, kind, turn=6, transparency=0)
    for kind in ("GIF", "PNG", "WEBP", "TIFF", "AVIF"):
        more = [picture("RGBA").rotate(180), picture("RGBA").rotate(90, expand=False)]
        save("RGBA", kind, save_all=True, append_images=more, duration=100)
    # a palette with alpha, which PIL takes for no transparency
    head = bytes([0, 1, 1, 0, 0, 4, 0, 32, 0, 0, 0, 0, 2, 0, 2, 0, 8, 0x20])
    found[head + bytes(range(100, 116)) + bytes([0, 1, 2, 3])] = "palette with alpha", "TGA"
    return found


def damaged(files, count):
    chance = random.Random(0)
    for _ in range(count):
        data = bytearray(chance.choice(files))
        if chance.random() < 0.3:
            del data[chance.randrange(1, len(data)) :]
        for _ in range(chance.choice((1, 2, 5))):
            data[chance.randrange(min(len(data), chance.choice((40, 200, 10000))))] = chance.randrange(256)
        yield bytes(data)


@pytest.mark.filterwarnings("ignore")  # of PIL, about what is damaged or large
def test_pixels_are_those_of_vllms_loader(tmp_path, capfd):
    """Of what comes in over its API: what is served sees what was trained on."""
    from vllm.multimodal.image import ALLOWED_IMAGE_FORMATS
    from vllm.multimodal.media.image import ImageMediaIO

    assert list(ALLOWED_IMAGE_FORMATS) == images.FORMATS
    path, loader = tmp_path / "picture", ImageMediaIO()

    def pixels(problems, load, *args):
        try:
            image = load(*args)
        except problems as error:
            assert "\n" not in str(error)
            return None
        return image.mode, image.size, image.tobytes()

    def same(data):
        """What both see; None if both refuse."""
        theirs = pixels(Exception, lambda: loader.load_bytes(data).media)
        path.write_bytes(data)
        for where in ((data, None), (None, str(path))):
            images.open_image.cache_clear()
            assert pixels(images.Unfit, images.open_image, *where) == theirs, made.get(data)
        return theirs

    made = files()
    seen = {data: same(data) for data in made}
    read = {made[data] for data, found in seen.items() if found}
    assert {*MODES} - {mode for mode, _ in read} == {"La", "I;16N"}  # no format has them
    assert {kind for _, kind in made.values()} - {kind for _, kind in read} == {"EPS", "PALM", "PDF"}
    eps = next(data for data, (_, kind) in made.items() if kind == "EPS")
    with pytest.raises(images.Unfit, match="cannot identify image file"):  # not: Ghostscript is missing
        images.open_image(eps, None)
    turned = {made[data][1] for data, found in seen.items() if found and found[1] == (7, 13)}
    assert turned == {"AVIF", "JPEG", "PNG", "TIFF", "WEBP"}
    timeless = [data for data, (_, kind) in made.items() if kind != "PDF"]  # which has its time in it
    refused = [same(data) for data in damaged(timeless, 1000)].count(None)
    assert 300 < refused < 800

    drawing = Image.new("RGBA", (2, 1))  # black, and nothing of it is to be seen
    drawing.putpixel((1, 0), (0, 0, 0, 255))
    drawing.save(file := io.BytesIO(), "PNG")
    assert same(file.getvalue())[2] == bytes([255, 255, 255, 0, 0, 0])


def test_one_place_opens_pictures():
    opens = re.compile(r"Image\.open|load_image|decode_image|read_image|imread")
    folders = "algos", "benchmarks", "system", "data_prep", "envs", "rewards"
    found = [
        path for name in folders for path in (ROOT / name).rglob("*.py") if opens.search(path.read_text())
    ]
    assert found == [ROOT / "data_prep/lib/images.py"]


def test_an_answer_to_images_is_trained_to_its_end(vlm, shapes):
    """Its prompt is grpo.py's; too long ones are cut on the right, which leaves the images whole."""
    flags = dict(model=vlm, train_files=(str(shapes / "train.parquet"),), output_dir="", max_length=80)
    processor = images.load_processor(vlm, sees=True)
    table = pq.read_table(shapes / "train.parquet").to_pylist()
    prompts, _ = load_prompts([*flags["train_files"]], processor, 80)
    answer = next(key for key in table[0]["extra_info"] if key == "answer")
    rows, ends, truncated, dropped = sft.load_examples(flags["train_files"], sft.Args(**flags), processor)
    assert len(rows) == len(table) and (truncated, dropped) == (0, 0) and ends == {processor.eos_token_id}
    for row, prompt, source in zip(rows, prompts, table, strict=True):
        assert row["prompt_ids"] == prompt["prompt_ids"] and row["images"] == prompt["images"]
        assert all(row["trained"]) and row["response_ids"][-1] == processor.eos_token_id
        assert processor.decode(row["response_ids"][:-1]) == source["extra_info"][answer]
