"""Rows with images: their pictures, their ids, and what a model takes of them besides the ids.

A row has as many <image> marks in its messages as it has `images`, {bytes, path}. In the ids that the sampler
is given, an image is one token; in those that a model runs, as many as the image has features.
"""

import math
from functools import cache, lru_cache
from io import BytesIO

from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from data_prep.lib.schema import open_parquet
from data_prep.lib.towers import auto_classifier, dequantised, wrapped
from data_prep.lib.turns import MARK, check_calls, plain

BROKEN = (OSError, SyntaxError, Image.DecompressionBombError)  # what PIL raises on a file that is no picture


class Unfit(ValueError):
    """A row whose images cannot be shown to a model."""


def takes_images(args):
    """Whether the model is shown images: it takes some, and a file of rows has a column `images`."""
    files = (args.data,) if hasattr(args, "data") else (*args.train_files, *args.val_files)
    return have_images(args.model, files)


@cache
def have_images(model, files):
    """Whether a model takes images, and one of these parquet files has some."""
    there = [file for file in filter(None, files) if open_parquet(file, ["images"])[1]]
    return bool(there) and wrapped(AutoConfig.from_pretrained(model))


@cache
def load_processor(model, tokenizer=None, sees=False):
    """The tokenizer of a model, or the processor of one that sees images: both encode, decode and save."""
    config, name = AutoConfig.from_pretrained(model), tokenizer or model
    if sees:
        loaded = AutoProcessor.from_pretrained(name)
        if not hasattr(loaded, "image_processor"):
            raise ValueError(f"{name}: it has no image processor (preprocessor_config.json)")
        loaded.eos_token_id = loaded.tokenizer.eos_token_id
    else:
        loaded = AutoTokenizer.from_pretrained(name)
    if loaded.eos_token_id is None:
        raise ValueError(f"{name}: the tokenizer has no EOS token")
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


def auto_class(config, scores=False):
    """What loads a model of text, or of text and images; scores: with a head for a score as output layer.

    Stops with a line if it does not load them whole.
    """
    dequantised(config)
    if scores:
        return auto_classifier(config)
    return AutoModelForImageTextToText if wrapped(config) else AutoModelForCausalLM


def never_sampled(config):
    """The ids that stand for images and videos: in a response there would be nothing to be seen."""
    ids = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
    return [i for i in ids if i is not None]


@lru_cache(8)  # the responses to a prompt share its pictures
def open_image(data, path):
    """The picture in bytes, or in a file; Unfit if there is none."""
    try:
        with Image.open(BytesIO(data) if data else path) as image:
            return image.convert("RGB")
    except BROKEN as error:
        raise Unfit(f"an image cannot be read: {error}") from None


def open_images(row):
    """The pictures of a row. They are decoded where they are needed, and never all of a step."""
    return [open_image(image.get("bytes"), image.get("path")) for image in row.get("images", ())]


def encode_prompt(row, processor, tools=None):
    """prompt_ids of a row; of a processor also sampler_ids, in which an image is one token."""
    messages = plain(row["prompt"], processor)
    if not hasattr(processor, "image_processor"):
        options = dict(tools=tools, add_generation_prompt=True, return_dict=False)
        ids = processor.apply_chat_template(messages, **options)
        if any("tool_calls" in message for message in messages):
            check_calls(messages, processor.decode(ids))
        check_known(max(ids, default=0), processor)
        return dict(prompt_ids=ids)
    chat, pictures, marks = [], open_images(row), 0
    for message in messages:
        texts = message["content"].split(MARK)
        parts = [[dict(type="image"), dict(type="text", text=text)] for text in texts]
        content = [part for part in sum(parts, [])[1:] if part["type"] == "image" or part["text"]]
        chat, marks = [*chat, message | dict(content=content)], marks + len(texts) - 1
    if marks != len(pictures):
        raise Unfit(f"it has {len(pictures)} images, and {marks} {MARK} marks in its messages")
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tools=tools, tokenize=False)
    check_calls(messages, text)
    [ids] = processor(text=[text], images=pictures or None, add_special_tokens=False)["input_ids"]
    return dict(prompt_ids=ids, sampler_ids=processor.tokenizer.encode(text, add_special_tokens=False))


def request(row, ids=()):
    """What vLLM answers: the prompt of a row, and ids that follow it."""
    prompt = dict(prompt_token_ids=[*row.get("sampler_ids", row["prompt_ids"]), *ids])
    return prompt | (dict(multi_modal_data=dict(image=open_images(row))) if row.get("images") else {})


@cache
def dummy_row(processor):
    """Prompt, response and images of a row that has an image and nothing else."""
    file = BytesIO()
    Image.new("RGB", (32, 32)).save(file, "PNG")
    row = dict(prompt=[dict(role="user", content=MARK)], images=[dict(bytes=file.getvalue())])
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
