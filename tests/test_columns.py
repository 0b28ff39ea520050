"""What each script reads of a row, in the forms that libraries document: read, named in a note, or refused.

golden/columns.jsonl has a case a line, whose name begins with the libraries: v verl (docs/preparation/
prepare_data.rst, verl/utils/dataset/multiturn_sft_dataset.py), t TRL (docs/source/dataset_formats.md),
l LlamaFactory (data/README.md), a axolotl (docs/dataset-formats/*.qmd, docs/rlhf.qmd), s ms-swift
(docs/source_en/Customization/Custom-dataset.md), o OpenRLHF (README.md, openrlhf/datasets/). It has a row, or
columns beside those that a script reads; and what each script makes of it: the prompt, the text that is
trained, and of a pair the other text; or the rows; or why it is refused. Some have a template, flags, or
other rows in the file than this one twice.
"""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, make_args
from PIL import Image
from test_sft import CONVERSATION, conversation_tokenizer

from algos import agent, dapo, distill, dpo, generate, grpo, grpo_nano, quantize, rm, sft
from data_prep import inspect, preference, sft_chat, tiny_vlm
from data_prep.lib import cache, conversations
from data_prep.lib.images import load_processor

CALLS = CONVERSATION.replace(
    "~ m.content -}}",
    "~ m.content -}}{%- for c in m.tool_calls or () -%}{%- set f = c.function or c -%}"
    "{{- '[' ~ f.name ~ f.arguments | tojson ~ ']' -}}{%- endfor -%}",
)
TEMPLATE = (
    "{%- for t in tools or () -%}{{- t.function.name -}}{%- endfor -%}{{- 'deep' if deep else '' -}}"
    + CALLS.replace("~ m.content -}}", "~ (m.reasoning_content or '') ~ m.content -}}")
)
CASES = [json.loads(line) for line in (ROOT / "tests/golden/columns.jsonl").open()]
WRITERS = dict(sft=sft_chat, dpo=preference)


def tokenizer_with(template=CALLS):
    tokenizer = conversation_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def user(text="hi"):
    return dict(role="user", content=text)


def says(text):
    return dict(role="assistant", content=text)


BASE = {  # what a script reads of a row without flags
    "sft": dict(messages=[user("1+2="), says("3")]),
    "dpo": dict(prompt=[user("1+2=")], chosen=[says("3")], rejected=[says("4")]),
    "rl": dict(
        data_source="arithmetic",
        reward_model=dict(style="rule", ground_truth="3"),
        extra_info=dict(index=0),
        prompt=[user("1+2=")],
    ),
}
BASE |= dict(rm=BASE["dpo"], kto=BASE["dpo"], generate=BASE["rl"], quantize=BASE["sft"])


def written(path, rows):
    """A file of parquet, or of lines of JSON."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def read(script, path, tokenizer, **flags):
    """The rows that a script makes of files, each as its texts; a reward model has no prompt apart."""
    conversations.note.cache_clear()
    paths = [path] if isinstance(path, str) else path
    if script == "sft":
        rows, *_ = sft.load_examples(paths, make_args(sft, **flags), tokenizer)
        keys = "prompt_ids", "response_ids"
    elif script == "rm":
        rows, _ = rm.read_pairs(paths, make_args(rm, **flags), tokenizer, None)
        keys = "chosen_ids", "rejected_ids"
    elif script == "rl":
        rows, _ = cache.load_prompts(paths, tokenizer, flags.get("max_prompt_length", 99))
        keys = ("prompt_ids",)
    elif script == "generate":
        args = generate.Args(model="none", data=paths[-1], output="none", **flags)
        prompts, *_ = generate.load_prompts(args, tokenizer, None)
        rows = prompts.values()
        keys = ("prompt_ids",)
    elif script == "quantize":
        limit = flags.pop("limit", None)
        found = quantize.read_texts(paths[-1], tokenizer, quantize.Args("", "", **flags), limit)
        rows = [dict(ids=ids[0]) for ids, _ in found]
        keys = ("ids",)
    else:
        loss = "kto" if script == "kto" else "sigmoid"
        rows, _ = dpo.load_pairs(paths, make_args(dpo, loss=loss, **flags), tokenizer)
        keys = "prompt_ids", "chosen_ids", "rejected_ids"
        if script == "kto":
            assert rows[0]["tokens"] == [len(rows[0][key]) for key in keys[1:]]
    return [[tokenizer.decode(row[key]) for key in keys] for row in rows]


def expected(case, script):
    """The texts of a case's rows, as `read` has them."""
    if "rows" in case:
        return case["rows"]
    texts = [case[name] for name in ("prompt", "text", "other") if name in case]
    if script == "rm":
        prompt, *replies = texts
        return [[f"{prompt}{reply}\n" for reply in replies]]
    return [texts[: dict(rl=1, sft=2, dpo=3)[script]]]


READ = [(case, kind) for case in CASES for kind in case["files"]]


@pytest.mark.parametrize(("case", "kind"), READ, ids=[f"{case['case']}, {kind}" for case, kind in READ])
def test_what_a_row_is_read_as(case, kind, tmp_path, capsys):
    """By each script, also from the cache, and of what a data script writes of the row."""
    tokenizer = tokenizer_with(case.get("template", TEMPLATE))
    flags = case.get("flags", {})
    for script in case["scripts"]:
        row = case["row"] if "row" in case else BASE[script] | case.get("beside", {})
        path = written(tmp_path / f"rows.{kind}", case.get("given", [row, row]))
        if "refused" in case:
            paths = [path]
            if case["refused"].startswith("row"):  # its number in this file, not over all files
                paths.insert(0, written(tmp_path / "first.jsonl", [BASE[script]]))
            with pytest.raises((ValueError, SystemExit)) as error:
                read(script, paths, tokenizer, **flags)
            line = str(error.value).removeprefix("error: ")
            assert line.startswith(f"{path}: {case['refused']}") and "\n" not in line
            continue
        wanted = expected(case, script) * (1 if "given" in case else 2)
        notes = [note.replace("FILE", path) for note in case.get("notes", ())]
        if "beside" in case and script == "sft":
            notes.insert(0, f"note: {path}: rows of messages")
        assert read(script, path, tokenizer, **flags) == wanted
        said = capsys.readouterr().err.splitlines()
        assert said == notes
        assert read(script, path, tokenizer, **flags) == wanted
        again = capsys.readouterr().err.splitlines()
        assert again == [note for note in said if path in note]
        if "row" in case and script in WRITERS:
            module = WRITERS[script]
            module.main(module.Args(str(tmp_path / "out"), path))
            assert read(script, str(tmp_path / "out/train.parquet"), tokenizer)[0] == wanted[0]
            capsys.readouterr()


def test_all_trainers_with_a_sampler_read_as_one():
    for script in (grpo, grpo_nano, dapo, agent, distill):
        assert script.load_prompt_files is cache.load_prompt_files


def test_a_picture_of_any_name_and_an_answer_that_says_its_token(tmp_path):
    tiny_vlm.main(tiny_vlm.Args(str(tmp_path / "vlm"), hidden_size=64))
    processor = load_processor(str(tmp_path / "vlm"), sees=True)
    token = processor.image_token
    file = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(file, "PNG")
    picture = dict(bytes=file.getvalue(), path=None)
    row = dict(prompt="<image>What?", completion="red")
    prompts = set()
    for more in (dict(images=[picture]), dict(image=picture), dict(image=picture["bytes"])):
        [[prompt, _]] = read("sft", written(tmp_path / "rows.parquet", [row | more]), processor)
        prompts.add(prompt)
    assert len(prompts) == 1 and token in prompts.pop()
    says_token = "row 0: the answer says .*, which stands for a picture"
    no_conversation = "a model that takes images reads prompts and completions, no"
    for bad, line in (
        (row | dict(completion=f"red {token}"), says_token),
        (row | dict(completion=token), says_token),
        (dict(messages=[user("<image>?"), says("3")]), no_conversation),
    ):
        with pytest.raises(ValueError, match=line):
            read("sft", written(tmp_path / "rows.parquet", [bad | dict(image=picture)]), processor)


def test_what_data_scripts_do_not_read_is_named(tmp_path, capsys):
    row = BASE["sft"] | dict(system="add", chat_template_kwargs=dict(deep=True), difficulty=3, source="x")
    sft_chat.main(sft_chat.Args(str(tmp_path), written(tmp_path / "rows.jsonl", [row])))
    assert "train.parquet: not read: difficulty, source\n" in capsys.readouterr().out
    [[prompt, _]] = read("sft", str(tmp_path / "train.parquet"), tokenizer_with(TEMPLATE))
    assert prompt == "deep<|system|>add<|user|>1+2=<|assistant|>"
    row = BASE["dpo"] | dict(videos=["a.mp4"])
    with pytest.raises(ValueError, match=r"no rows for train.parquet: 1 left out: broken"):
        preference.main(preference.Args(str(tmp_path), written(tmp_path / "rows.parquet", [row])))
    assert "row 0 is broken: ValueError: the column 'videos' is not read" in capsys.readouterr().err


LIBRARIES = [json.loads(line) for line in (ROOT / "tests/golden/rows_of_libraries.jsonl").open()]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("case", LIBRARIES, ids=lambda case: case["case"])
def test_rows_of_six_libraries(case, kind, tmp_path, capsys):
    """Which scripts read them, what a reward gets, and that inspect.py names their kind and passes them."""
    tokenizer = tokenizer_with()
    path = written(tmp_path / f"rows.{kind}", [case["row"], case["row"]])
    verdicts = {}
    for script in ("sft", "dpo", "rm", "kto", "rl", "generate"):
        try:
            verdicts[script] = len(read(script, path, tokenizer))
        except (ValueError, SystemExit) as error:
            assert "\n" not in str(error)
    assert list(verdicts) == [script for script in verdicts if script in case["scripts"]]
    assert {*verdicts} == {*case["scripts"]}
    with pytest.raises(SystemExit) as end:
        inspect.main(inspect.Args((path,)))
    assert not end.value.code and f"{path}: {case['kind']}, 2 rows" in capsys.readouterr().out
    if "rl" in case["scripts"]:
        [row, _] = cache.load_prompts([path], tokenizer, 99)[0]
        assert row["reward_model"]["ground_truth"] == case["truth"]
        assert row["data_source"] == case["row"].get("data_source", f"rows.{kind}")
        assert row["prompt"][-1] == user("1+2=")
        further = {"difficulty": 2, "dataset": "math"}.items() & case["row"].items()
        assert further <= row["extra_info"].items()
