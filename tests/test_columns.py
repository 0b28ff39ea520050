"""What becomes of each column and key that other libraries document for a row: read, named, or refused.

Libraries and their pages: v verl (docs/preparation/prepare_data.rst, verl/utils/dataset/
multiturn_sft_dataset.py), t TRL (docs/source/dataset_formats.md), l LlamaFactory (data/README.md), a axolotl
(docs/dataset-formats/*.qmd, docs/rlhf.qmd), s ms-swift (docs/source_en/Customization/Custom-dataset.md),
o OpenRLHF (README.md, openrlhf/datasets/).
"""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_chats import CALLS, calls, says, tokenizer_with, user

from algos import agent, dapo, distill, dpo, grpo, grpo_nano, rm, sft
from data_prep import preference, sft_chat, tiny_vlm
from data_prep.lib import cache, columns
from data_prep.lib.images import load_processor
from data_prep.lib.schema import load_rows

TEMPLATE = (
    "{%- for t in tools or () -%}{{- t.function.name -}}{%- endfor -%}{{- 'deep' if deep else '' -}}"
    + CALLS.replace("~ m.content -}}", "~ (m.reasoning_content or '') ~ m.content -}}")
)
SCHEMA = dict(name="calculate", parameters=dict(type="object"))
FILE = io.BytesIO()
Image.new("RGB", (32, 32), "red").save(FILE, "PNG")
PICTURE = dict(bytes=FILE.getvalue(), path=None)
RL = dict(
    data_source="arithmetic", reward_model=dict(style="rule", ground_truth="3"), extra_info=dict(index=0)
)
BASE = {  # what a script reads of a row without flags
    "sft": dict(messages=[user("1+2="), says("3")]),
    "dpo": dict(prompt=[user("1+2=")], chosen=[says("3")], rejected=[says("4")]),
    "rl": RL | dict(prompt=[user("1+2=")]),
}
BASE["rm"] = BASE["dpo"]
ALL, SPOKEN = ("sft", "dpo", "rm", "rl"), "<|user|>1+2=<|assistant|>"
NAMED, REFUSED = "named", "is not read: "
BESIDE = {  # columns beside what is trained: the libraries, what becomes of them in all scripts
    "tools": ("v t l a s o", [SCHEMA], f"calculate{SPOKEN}"),
    "tools as text": ("l s", json.dumps([SCHEMA]), f"calculate{SPOKEN}"),
    "tools that are empty": ("l", "", SPOKEN),
    "system": ("l s a", "add", f"<|system|>add{SPOKEN}"),
    "system_prompt": ("s", "add", f"<|system|>add{SPOKEN}"),
    "chat_template_kwargs": ("t s", dict(deep=True), f"deep{SPOKEN}"),
    "chat_template_kwargs as text": ("t", '{"deep": true, "none": null}', f"deep{SPOKEN}"),
    "chat_template_kwargs without effect": ("t", dict(x=1), "the chat template has no variable 'x'"),
    "chat_template_kwargs of transformers": ("t", dict(eos_token="x"), "has no variable 'eos_token'"),
    "enable_thinking": ("v", True, REFUSED + "write it in a column 'chat_template_kwargs'"),
    "images": ("v t l a s o", [PICTURE], "row 0 has images, which are not read here"),
    "image": ("t s", PICTURE, "row 0 has images, which are not read here"),
    "images by path": ("l s o", ["a.png"], "row 0 has images, which are not read here"),
    "videos": ("v l s", ["a.mp4"], REFUSED),
    "audios": ("l s", ["a.wav"], REFUSED),
    "audio": ("t", dict(bytes=b"x", path="a.wav"), REFUSED),
    "photo": ("any", [PICTURE], REFUSED + "name it 'images'"),
    "objects": ("s", dict(ref=["a dog"], bbox=[[1, 2, 3, 4]]), REFUSED),
    "functions": ("any", [SCHEMA], REFUSED + "write them in a column 'tools'"),
    "documents": ("t", [dict(title="a", text="b")], REFUSED),
    "context": ("a", "an article", REFUSED + "write them in the prompt"),
    "article": ("a", "an article", REFUSED + "write them in the prompt"),
    "choices": ("a", ["3", "4"], REFUSED + "write them in the prompt"),
    "history": ("l s", [["1+1=", "2"]], REFUSED + "write the turns in a column 'messages'"),
    "segments": ("a", [dict(label=True, text="b")], REFUSED),
    "label": ("t s", False, REFUSED + "dpo.py --loss kto reads it"),
    "kto_tag": ("l", True, REFUSED),
    "label as a number": ("o", 0, REFUSED + "dpo.py --loss kto reads it"),
    "label of a class": ("s", [1, 3], NAMED),
    "label that is a score": ("s", 0.8, NAMED),
    "labels": ("t", [True, False], NAMED),
    "text": ("t l", "1+2=3", NAMED),
    "reflection": ("a", "So", NAMED),
    "category": ("a", "sums", NAMED),
    "answers": ("a", [dict(answer="3", rank=1)], NAMED),
    "responses": ("any", ["3"], NAMED),
    "data_source": ("v", "arithmetic", SPOKEN),
    "rejected_response": ("s", "4", NAMED),
    "rejected_messages": ("s", [says("4")], NAMED),
    "agent_name": ("v", "tool_agent", NAMED),
    "solution": ("s t", "3", NAMED),
    "channel": ("s", "a", NAMED),
    "completions": ("t", ["3"], NAMED),
    "difficulty": ("any", 3, NAMED),
    "ability": ("v", "sums", SPOKEN),
}
KEYS = {  # of a message of the assistant, whose words are "3"
    "weight": ("a t", 0, ""),
    "loss": ("s", False, ""),
    "loss_scale": ("s", 0.3, "write 'train', 1 or 0"),
    "train_detail": ("a", [dict(begin_offset=0)], "write 'train', 1 or 0"),
    "training_detail": ("a", [dict(begin_offset=0)], "write 'train', 1 or 0"),
    "train": ("a", True, "3<|eos|>"),
    "reasoning_content": ("v t s", "So ", "So 3<|eos|>"),
    "thinking": ("t", "So ", "So 3<|eos|>"),
    "tool_calls": ("v t l a s", [dict(function=dict(name="f", arguments="{}"))], "3[f{}]<|eos|>"),
    "function_call": ("l", dict(name="f", arguments="{}"), "3[f{}]<|eos|>"),
    "name": ("t", "bot", "3<|eos|>"),
    "mood": ("any", "good", "3<|eos|>"),
}
FORMS = {  # a row for SFT as libraries write it: what is trained, and before it the prompt
    "t a s o messages": dict(messages=[user("1+2="), says("3")]),
    "l a conversations": dict(
        conversations=[{"from": "human", "value": "1+2="}, {"from": "gpt", "value": "3"}]
    ),
    "t strings": dict(prompt="1+2=", completion="3"),
    "t messages apart": dict(prompt=[user("1+2=")], completion=[says("3")]),
    "v RL": RL | dict(prompt=[user("1+2=")], extra_info=dict(answer="3")),
    "l a Alpaca": dict(instruction="1+2=", input="", output="3"),
    "l Alpaca with an empty history": dict(instruction="1+2=", input=None, output="3", system="", history=[]),
    "s query": dict(query="1+2=", response="3"),
    "o input": dict(input="1+2=", output="3"),
    "a question": dict(question="1+2=", answer="3"),
    "a instruction": dict(instruction="1+2=", input="", response="3"),
    "o question": dict(question="1+2=", response="3"),
}
PAIRS = {
    "t": dict(prompt="1+2=", chosen="3", rejected="4"),
    "t o conversations": dict(chosen=[user("1+2="), says("3")], rejected=[user("1+2="), says("4")]),
    "l Alpaca": dict(instruction="1+2=", input="", chosen="3", rejected="4"),
    "l ShareGPT": dict(
        conversations=[{"from": "human", "value": "1+2="}],
        chosen={"from": "gpt", "value": "3"}, rejected={"from": "gpt", "value": "4"},
    ),
    "a question": dict(question="1+2=", chosen="3", rejected="4"),
    "a input": dict(input="1+2=", chosen="3", rejected="4"),
    "a instruction": dict(instruction="1+2=", chosen_response="3", rejected_response="4"),
    "text of the question": dict(
        prompt="1+2=", chosen=[user("1+2="), says("3")], rejected=[user("1+2="), says("4")]
    ),
}  # fmt: skip


def written(folder, row, lines=False):
    """A file of parquet, or of lines of JSON."""
    path = folder / ("rows.jsonl" if lines else "rows.parquet")
    if lines:
        path.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row] * 2), path)
    return str(path)


def first(script, path, tokenizer, **flags):
    """The first row that a script makes of a file: its prompt, and what follows."""
    columns.SAID.clear()
    base = dict(model="", train_files=(), output_dir="", **flags)
    if script == "sft":
        row, key = sft.load_examples([path], sft.Args(**base), tokenizer)[0][0], "response_ids"
    elif script == "dpo":
        row, key = dpo.load_pairs([path], dpo.Args(**base), tokenizer)[0][0], "chosen_ids"
    elif script == "rm":
        row, key = rm.read_pairs([path], rm.Args(**base), tokenizer, None)[0][0], "chosen_ids"
        prompt, answer, end = tokenizer.decode(row[key]).partition("<|assistant|>")[:3]
        return prompt + answer, end.removesuffix("\n")
    else:
        row, key = cache.load_prompts([path], tokenizer, 99)[0][0], None
    return tokenizer.decode(row["prompt_ids"]), tokenizer.decode(row[key]) if key else None


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("script", ALL)
def test_columns_beside(script, name, tmp_path, capsys):
    (_, value, outcome), column = BESIDE[name], name.split()[0]
    path = written(tmp_path, BASE[script] | {column: value})
    if outcome == NAMED or outcome.endswith(SPOKEN):
        prompt, _ = first(script, path, tokenizer_with(TEMPLATE))
        assert prompt == (SPOKEN if outcome == NAMED else outcome)
        named = f"note: {path}: not read: {column}\n" in capsys.readouterr().err
        assert named == (outcome == NAMED)
        columns.SAID.clear()
        first(script, path, tokenizer_with(TEMPLATE))  # from the cache
        assert (f"not read: {column}\n" in capsys.readouterr().err) == named
    else:
        with pytest.raises(ValueError, match=r"rows.parquet: (row 0|the column 'photo')[ :]") as error:
            first(script, path, tokenizer_with(TEMPLATE))
        assert outcome in str(error.value) and "\n" not in str(error.value)
        assert str(error.value).endswith("drop the column") or REFUSED not in outcome


def test_all_trainers_with_a_sampler_read_as_one():
    assert all(
        x.load_prompt_files is cache.load_prompt_files for x in (grpo, grpo_nano, dapo, agent, distill)
    )


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_a_message(key, tmp_path, capsys):
    _, value, outcome = KEYS[key]
    said = [user("1+2="), says("3") | {key: value}, user("x"), says("y")]
    path = written(tmp_path, dict(messages=said), lines=True)
    if "write" in outcome:
        with pytest.raises(ValueError, match=outcome):
            first("sft", path, tokenizer_with(TEMPLATE))
        return
    prompt, text = first("sft", path, tokenizer_with(TEMPLATE))
    assert (prompt + text).endswith("y<|eos|>") and text.startswith(outcome or "y")
    assert ("have a field 'mood'" in capsys.readouterr().err) == (key == "mood")


@pytest.mark.parametrize("lines", (False, True))
@pytest.mark.parametrize("form", FORMS | {f"pair {name}": row for name, row in PAIRS.items()})
def test_forms_are_read_without_a_flag(form, lines, tmp_path, capsys):
    """And said in the first lines, unless they are the script's own; the data scripts read them too."""
    row, out = (FORMS | {f"pair {name}": row for name, row in PAIRS.items()})[form], tmp_path / "out"
    path, paired = written(tmp_path, row, lines), "pair" in form
    for script in ("dpo", "rm") if paired else ("sft",):
        assert first(script, path, tokenizer_with(TEMPLATE)) == (SPOKEN, "3<|eos|>")
        said = f"note: {path}: rows of " in capsys.readouterr().err
        assert said == (form not in ("v RL", "pair t", "pair text of the question"))
    module, key = (preference, "chosen") if paired else (sft_chat, "messages")
    module.main(module.Args(str(out), path))
    found = load_rows(out / "train.parquet", [key])[0][key]
    assert found == [*([] if paired else [user("1+2=")]), says("3")]
    if "Alpaca" in form:
        path = written(tmp_path, row | dict(input="2+2="), lines)
        assert first(script, path, tokenizer_with(TEMPLATE))[0] == "<|user|>1+2=\n2+2=<|assistant|>"


@pytest.mark.parametrize("form", [*sorted(FORMS.keys() - {"v RL"}), *(f"pair {name}" for name in PAIRS)])
def test_kto_reads_labels_and_pairs(form, tmp_path):
    """All that SFT reads, with a label; a pair is two rows, of one response each."""
    args, tokenizer = dpo.Args(model="", train_files=(), output_dir="", loss="kto"), tokenizer_with(TEMPLATE)
    read = lambda row: dpo.load_pairs([written(tmp_path, row)], args, tokenizer)[0]
    label = "kto_tag" if form[0] == "l" else "label"
    if form[5:] in PAIRS:
        good, bad = read(PAIRS[form[5:]])[:2]
    else:
        good, bad = (read(FORMS[form] | {label: x})[0] for x in (True, 0))
        for x, problem in ((0.8, f"'{label}' must be true or false, not 0.8"), (None, "missing or null")):
            with pytest.raises(ValueError, match=problem):
                read(FORMS[form] | {label: x})
    said = [[tokenizer.decode(x[f"{name}_ids"]) for name in BASE["dpo"]] for x in (good, bad)]
    assert said == [[SPOKEN, "3<|eos|>", ""], [SPOKEN, "", f"{4 if 'pair' in form else 3}<|eos|>"]]
    assert [good["tokens"], bad["tokens"]] == [[2, 0], [0, 2]]


def test_two_that_say_different_things(tmp_path):
    talk = [dict(role="system", content="add"), user("1+2="), says("3")]
    assert (
        first("sft", written(tmp_path, dict(messages=talk, system="add ")), tokenizer_with(TEMPLATE))[0][:13]
        == "<|system|>add"
    )
    for row, problem in (
        (dict(messages=talk, system="subtract"), "the system, said twice, differ: keep one"),
        (dict(messages=talk, system="add", system_prompt="subtract"), "'system' and 'system_prompt' differ"),
        (dict(instruction="Add.", question="1+2=", answer="3"), "'instruction' lacks what 'question' says"),
        (dict(prompt="Add.", input="1+2=", response="3"), "'prompt' lacks what 'input' says: join them"),
        (dict(messages=talk, images=[PICTURE], image=PICTURE), "pictures in 'images' and in 'image'"),
        (dict(messages=[user("<image>What?"), says("3")]), "has the mark <image>, and no picture"),
        (dict(messages=[user("What?\n<image>"), says("3")]), "has the mark <image>, and no picture"),
        (dict(text="1+2=3"), "no column 'prompt'; it has text; plain texts: --text_key text"),
        (dict(prompt="1+2=", chosen="3"), "no column 'extra_info'; it has prompt, chosen"),
        (dict(prompt="1+2=", generation="3"), "no column 'extra_info'; it has prompt, generation"),
        (dict(conversation=[dict(human="1+2=", assistant="3")]), "no column 'prompt'; it has conversation"),
        (dict(messages=[user("1+2="), dict(role="tool_call", content="{}")]), "role' is 'tool_call'; use"),
    ):
        with pytest.raises(ValueError, match=problem):
            first("sft", written(tmp_path, row), tokenizer_with(TEMPLATE))
    pair = {name: [talk[0], user("1+2="), says(x)] for name, x in dict(chosen="3", rejected="4").items()}
    with pytest.raises(ValueError, match="the system, said twice, differ: keep one"):
        first("dpo", written(tmp_path, pair | dict(prompt="1+2=", system="subtract")), tokenizer_with())
    rows = dict(prompt="Add. 1+2=", question="1+2="), dict(instruction=talk[:2], input="x")
    rows = [row | dict(output="3") for row in rows]
    prompts = [first("sft", written(tmp_path, row), tokenizer_with(TEMPLATE))[0] for row in rows]
    assert prompts == ["<|user|>Add. 1+2=<|assistant|>", "<|system|>add<|user|>1+2=\nx<|assistant|>"]
    said = [user("docker run <image> and <image></image>"), says("3")]
    assert "<image>" in first("sft", written(tmp_path, dict(messages=said)), tokenizer_with(TEMPLATE))[0]


def test_a_picture_of_any_name_and_an_answer_that_says_its_token(tmp_path):
    tiny_vlm.main(tiny_vlm.Args(str(tmp_path / "vlm"), hidden_size=64))
    processor, prompts = load_processor(str(tmp_path / "vlm"), sees=True), []
    row = dict(prompt="<image>What?", completion="red")
    forms = dict(images=[PICTURE]), dict(image=PICTURE), dict(image=PICTURE["bytes"])
    prompts += [first("sft", written(tmp_path, row | more), processor)[0] for more in forms]
    assert len({*prompts}) == 1 and processor.image_token in prompts[0]
    for said in (f"red {processor.image_token}", processor.image_token):
        path = written(tmp_path, row | dict(completion=said, image=PICTURE))
        with pytest.raises(ValueError, match=r"row 0: the answer says .*, which stands for a picture"):
            first("sft", path, processor)
    with pytest.raises(ValueError, match="a model that takes images reads prompts and completions, no"):
        first(
            "sft", written(tmp_path, dict(messages=[user("<image>?"), says("3")], image=PICTURE)), processor
        )


def test_what_data_scripts_do_not_read_is_named(tmp_path, capsys):
    row = BASE["sft"] | dict(system="add", chat_template_kwargs=dict(deep=True), difficulty=3, source="x")
    sft_chat.main(sft_chat.Args(str(tmp_path / "out"), written(tmp_path, row, lines=True)))
    assert "train.parquet: not read: difficulty, source\n" in capsys.readouterr().out
    path = str(tmp_path / "out/train.parquet")
    assert first("sft", path, tokenizer_with(TEMPLATE))[0] == f"deep<|system|>add{SPOKEN}"
    made = calls("f", dict(x=1))
    row = dict(chosen=[user("?"), made], rejected=[user("?"), says("4")], videos=["a.mp4"])
    with pytest.raises(ValueError, match=r"no rows for train.parquet: 2 left out: broken"):
        preference.main(preference.Args(str(tmp_path / "out"), written(tmp_path, row)))
    assert "row 0 is broken: ValueError: the column 'videos' is not read" in capsys.readouterr().err
