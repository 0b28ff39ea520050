"""Rows with images: their pictures, their ids, and what a model takes of them besides the ids.

A row has as many <image> marks in its messages as it has `images`, {bytes, path}. In the ids that the sampler
is given, an image is one token; in those that a model runs, as many as the image has features.
"""

import math
from contextlib import suppress
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.utils import cached_file

from data_prep.lib.conversations import IMAGE
from data_prep.lib.templates import render

FORMATS = (  # those that vLLM reads, in its order; not EPS, which PIL hands to Ghostscript
    "AVIF BLP BMP CUR DCX DDS DIB FITS FLI FTEX GBR GIF ICNS ICO IM IMT IPTC JPEG JPEG2000 MCIDAS MSP PCD PCX"
    " PIXAR PNG PPM PSD QOI SGI SPIDER SUN TGA TIFF WEBP XBM XPM XVTHUMB"
).split()


class Unfit(ValueError):
    """A row whose images cannot be shown to a model."""


@cache
def load_tokenizer(model):
    """The tokenizer of a model; a ValueError of transformers does not name the model."""
    try:
        return as_in_its_file(AutoTokenizer.from_pretrained(model), model)
    except ValueError as error:
        remedy = "copy tokenizer.json and tokenizer_config.json of its family there"
        raise ValueError(f"{model}: its tokenizer cannot be read: {remedy} ({error})") from None


def as_in_its_file(tokenizer, model):
    """A tokenizer that makes the ids of the model's tokenizer.json.

    CAREFUL: some classes of transformers 5 put rules of their own in place of the file's: Llama's takes all
    spaces out of a byte-level text (transformers 45488), GPT-2's joins digits that the file keeps apart.
    """
    quiet = dict(_raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    if tokenizer.is_fast and (file := cached_file(model, "tokenizer.json", **quiet)):
        own = Tokenizer.from_file(file)
        for part in ("model", "normalizer", "pre_tokenizer", "decoder"):
            setattr(tokenizer.backend_tokenizer, part, getattr(own, part))
    return tokenizer


def load_processor(model, sees=False):
    """The tokenizer of a model, or the processor of one that sees images: both encode, decode and save."""
    config = AutoConfig.from_pretrained(model)
    if sees:
        loaded = AutoProcessor.from_pretrained(model)
        if not hasattr(loaded, "image_processor"):
            raise ValueError(f"{model}: it has no image processor (preprocessor_config.json)")
        loaded.eos_token_id = as_in_its_file(loaded.tokenizer, model).eos_token_id
        loaded.image_ids = image_token_ids(config)
    else:
        loaded = load_tokenizer(model)
    if loaded.eos_token_id is None:
        raise ValueError(f"{model}: the tokenizer has no EOS token")
    getattr(loaded, "tokenizer", loaded).clean_up_tokenization_spaces = False  # decoded as it was sampled
    loaded.known_ids = config.get_text_config().vocab_size  # a tokenizer may have more
    check_known(loaded.eos_token_id, loaded)
    return loaded


def check_known(largest, tokenizer):
    """ValueError if the model's embedding has no row for a token, as with the tokenizer of another model."""
    if largest >= getattr(tokenizer, "known_ids", math.inf):
        text = getattr(tokenizer, "tokenizer", tokenizer)
        token = f"token {text.convert_ids_to_tokens(largest)!r} has number {largest}"
        problem = f"{token}, and the model knows {tokenizer.known_ids} tokens"
        raise ValueError(f"{text.name_or_path}: {problem}: take its own tokenizer, or resize its embedding")


def image_token_ids(config):
    """The ids that stand for images and videos. They are never sampled: nothing would be shown there."""
    ids = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
    return [i for i in ids if i is not None]


@lru_cache(8)  # the responses to a prompt share its pictures
def open_image(data, path):
    """The picture in bytes, or in a file, with the pixels of vLLM's loader; Unfit if there is none."""
    try:
        with Image.open(BytesIO(data or Path(path).read_bytes()), formats=FORMATS) as image:
            with suppress(Exception):  # a damaged EXIF turns nothing
                image = ImageOps.exif_transpose(image)
            if image.mode in ("LA", "PA", "RGBA") or (image.mode != "RGB" and "transparency" in image.info):
                image = image.convert("RGBA")
                white = Image.new("RGB", image.size, "white")
                white.paste(image, mask=image.getchannel("A"))
                return white
            return image.convert("RGB")
    except Exception as error:  # PIL's readers raise anything on a damaged file
        raise Unfit(f"an image cannot be read: {error}") from None


def open_images(row):
    """The pictures of a row. They are decoded where they are needed, and never all of a step."""
    return [open_image(image.get("bytes"), image.get("path")) for image in row.get("images", ())]


def encode_prompt(row, processor, tools=None):
    """prompt_ids of a row; of a processor also sampler_ids, in which an image is one token."""
    if not hasattr(processor, "image_processor"):
        text = render(row["prompt"], processor, tools)
        ids = processor(text, add_special_tokens=False)["input_ids"]
        check_known(max(ids, default=0), processor)
        return dict(prompt_ids=ids)
    chat, pictures, marks = [], open_images(row), 0
    for message in row["prompt"]:
        texts = message["content"].split(IMAGE)
        parts = [[dict(type="image"), dict(type="text", text=text)] for text in texts]
        content = [part for part in sum(parts, [])[1:] if part["type"] == "image" or part["text"]]
        chat, marks = [*chat, message | dict(content=content)], marks + len(texts) - 1
    if marks != len(pictures):
        raise Unfit(f"it has {len(pictures)} images, and {marks} {IMAGE} marks in its messages")
    text = render(chat, processor, tools)
    sampler_ids = processor.tokenizer.encode(text, add_special_tokens=False)
    if (shown := sum(map(sampler_ids.count, processor.image_ids))) != len(pictures):
        raise Unfit(f"it has {len(pictures)} images, and {shown} tokens that stand for images in its text")
    [ids] = processor(text=[text], images=pictures or None, add_special_tokens=False)["input_ids"]
    return dict(prompt_ids=ids, sampler_ids=sampler_ids)


def request(row, ids=()):
    """What vLLM answers: the prompt of a row, and ids that follow it."""
    prompt = dict(prompt_token_ids=[*row.get("sampler_ids", row["prompt_ids"]), *ids])
    return prompt | (dict(multi_modal_data=dict(image=open_images(row))) if row.get("images") else {})


@cache
def dummy_row(processor):
    """Prompt, response and images of a row that has an image and nothing else."""
    file = BytesIO()
    Image.new("RGB", (32, 32)).save(file, "PNG")
    row = dict(prompt=[dict(role="user", content=IMAGE)], images=[dict(bytes=file.getvalue())])
    return encode_prompt(row, processor)["prompt_ids"], [0], row["images"]


def show_images(layout, rows, processor):
    """A layout that adds the pixels of the images of rows, and the rows, of which one has images.

    rows: prompt, response and images of each. CAREFUL: forward and backward of the vision tower are
    collectives: where no row has an image, a dummy runs too, the last one, of which nothing is used.
    """
    rows = rows if any(images for *_, images in rows) else [*rows, dummy_row(processor)]

    def with_images(prompts, responses):
        inputs, where = layout(prompts, responses)
        pictures = [picture for *_, images in rows for picture in open_images(dict(images=images))]
        inputs |= processor.image_processor(pictures, return_tensors="pt")
        if "mm_token_type_ids" in processor.model_input_names:  # else Qwen's positions are those of text
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == processor.image_token_id).int()
        return inputs, where

    return with_images, rows
