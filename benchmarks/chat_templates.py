"""What is trained of a conversation under each published chat template: docs/reference/chat-templates.md.

    python benchmarks/chat_templates.py --page              # all templates, ten seconds; writes the page
    python benchmarks/chat_templates.py --names qwen3 gptoss

The templates are files of TRL (requirements-bench.txt), which is not imported. Most have a twin,
NAME_training.jinja, which marks what to train: each turn is compared with the marks. A tokenizer here has a
token for each byte and each mark of the template, and the EOS of its family.
"""

import json
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from system.arguments import parse

MARK = "<!-- python benchmarks/chat_templates.py --page -->"
PAGE = ROOT / "docs/reference/chat-templates.md"
RESULTS = ROOT / "benchmarks/results/chat_templates.json"


@dataclass(kw_only=True)
class Args:
    names: tuple[str, ...] = ()  # names of templates; none: all
    page: bool = False  # write the page and benchmarks/results/chat_templates.json


if __name__ == "__main__":
    flags = parse(Args)

import jinja2

from benchmarks.lib.workload import markdown
from data_prep.lib.templates import RENDER_ERRORS, plain, render, shows_tools
from data_prep.lib.turns import encode_messages, trained_turns
from envs.calls import find_reader
from tests.conversations import SHAPES, TOOLS, ends_of, forms, make_tokenizer, messages_of

READ = "its calls are read"


# ---- one template --------------------------------------------------------------------------------
def spans(mask):
    """(begin, end) of each run of true values."""
    found = []
    for on, run in groupby(range(len(mask)), key=mask.__getitem__):
        places = list(run)
        if on:
            found.append((places[0], places[-1] + 1))
    return found


def encode(messages, tools, tokenizer):
    """-> rows of (context, trained), both texts, one for each turn; ValueError or TemplateError: refused."""
    rows = []
    for ids, trained in encode_messages(messages, tokenizer, tools):
        texts = []
        for begin, end in spans(trained):
            texts.append((tokenizer.decode(ids[:begin]), tokenizer.decode(ids[begin:end])))
        rows.append(texts)
    return rows


def by_marks(messages, tools, tokenizer):
    """What a template marks in the last turn, without what the generation prompt gives; None: refused."""
    silent = [message | dict(reasoning_content="") for message in messages]
    for form in forms(messages):
        try:
            given, _ = apply(form[:-1], tools, tokenizer, add_generation_prompt=True)
            ids, mask = apply(form, tools, tokenizer, return_assistant_tokens_mask=True)
        except RENDER_ERRORS:
            continue
        text = tokenizer.decode(ids)
        if not any(mask) or any(lost(message, text) for message in silent):
            continue
        begin = 0
        while begin < min(len(given), len(ids)) and given[begin] == ids[begin]:
            begin += 1
        first, end = spans(mask)[-1]
        marked = ids[max(begin, first) : end]
        if begin < first:  # the history is another one than that of the prompt
            sizes = [n for n in range(1, len(marked)) if given[-n:] == marked[:n]]
            marked = marked[max(sizes, default=0) :]
        return tokenizer.decode(marked).rstrip()
    return None


def apply(messages, tools, tokenizer, **how):
    """-> ids, and which of them the template marks."""
    found = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, **how)
    return found["input_ids"], found.get("assistant_masks")


def reason(context, trained, marked, tokenizer):
    """Why a turn differs from its marks, where the turn is as it has to be; None: nobody knows."""
    eos = tokenizer.eos_token
    if context.endswith("<think>\n") and "</think>" not in marked and trained.endswith(marked.lstrip()):
        return "The prompt opens a thought, and the marked text neither shows nor closes it."
    if trained == f"{marked}<|tool_response>":
        return "Calls end with the token at which samplers of the family stop."
    if trained == f"<|turn>model\n{marked}":
        return "After a result the generation prompt opens no turn, and the history does."
    if f"{trained}\n{eos}" == marked:
        return "The template writes EOS after the last turn alone."
    if trained == re.sub(r"<\|(user|observation)\|>$", "", marked) + eos:
        return "The template ends no turn: EOS is added, and the twin marks the token of the next role."
    if trained == f"{marked}\n" and "endgeneration" in tokenizer.chat_template:
        return "The template marks by itself what is trained, with a newline after the turn."
    return None


def lost(message, text):
    """Words of a message that a text does not have as often."""
    words = [message["content"]]
    if message["role"] == "assistant":
        words.append(message.get("reasoning_content", ""))
    for call in message.get("tool_calls", ()):
        words.append(call["function"]["name"])
        words += map(str, call["function"]["arguments"].values())
    words = re.findall(r"\w+", " ".join(words).replace("think>", ""))
    there = re.findall(r"\w+", text)
    return [word for word in words if there.count(word) < words.count(word)]


def defects(messages, turn, context, trained, tools, tokenizer):
    """What is wrong with a turn, whatever the template."""
    heard = [x for x in plain(messages[:turn], tokenizer) if x["role"] != "assistant"]
    ends = "|".join(re.escape(end) for end in ends_of(tokenizer.name_or_path)[1:])
    wrong = {
        "its prompt is not what a sampler is given": context != render(messages[:turn], tokenizer, tools),
        "its prompt leaves out what was said": any(lost(x, context) for x in heard),
        "a user speaks with special tokens": f"What is {tokenizer.eos_token}?" in context,
        "it leaves out what it says": lost(messages[turn], trained),
        "it has two thoughts": trained.count("</think>") > 1,
        "no token that stops a sampler ends it": not re.search(rf"(?:{ends})\n?$", trained),
    }
    return [what for what, is_so in wrong.items() if is_so]


def thought_apart(message):
    """A message whose thought is not in its content, or None."""
    thought = re.fullmatch(r"<think>\n(.*)\n</think>\n\n(.*)", message["content"], re.DOTALL)
    if not thought:
        return None
    return message | dict(reasoning_content=thought[1], content=thought[2])


def try_shape(shape, tokenizer, twin):
    """-> dict(rows, differs, wrong, compared) of a shape, or dict(refused)."""
    messages, tools = messages_of(shape, tokenizer)
    try:
        rows = encode(messages, tools, tokenizer)
    except (ValueError, jinja2.TemplateError) as error:
        return dict(refused=str(error))
    found = dict(rows=len(rows), compared=0, differs=[], wrong=[])
    texts = sum(rows, [])
    turns = trained_turns(messages)
    if len(texts) != len(turns):
        found["wrong"].append("turns are missing")
    for turn, (context, trained) in zip(turns, texts):
        found["wrong"] += defects(messages, turn, context, trained, tools, tokenizer)
        if not twin:
            continue
        marked = by_marks(plain(messages[: turn + 1], tokenizer), tools, twin)
        if marked is None:
            continue
        found["compared"] += 1
        if marked == trained:
            continue
        why = reason(context, trained, marked, tokenizer)
        apart = thought_apart(messages[turn])
        if apart and trained == by_marks(plain(messages[:turn] + [apart], tokenizer), tools, twin):
            why = "A thought in the content is shown as the template shows reasoning."
        if why:
            found["differs"].append(dict(reason=why))
        else:
            found["wrong"].append(f"it differs from its marks: {trained!r}, {marked!r}")
    return found


def try_template(name, directory):
    """-> what `try_shape` finds, by shape."""
    template = (directory / f"{name}.jinja").read_text()
    marking = ""
    if (directory / f"{name}_training.jinja").exists():
        marking = (directory / f"{name}_training.jinja").read_text()
    elif "endgeneration" in template:
        marking = template
    tokenizer = make_tokenizer(name, template, marking)
    twin = None
    if marking:
        twin = make_tokenizer(name, marking, template)
    return {shape: try_shape(shape, tokenizer, twin) for shape in SHAPES}


# ---- the page ------------------------------------------------------------------------------------
def read_by(name, directory):
    """The parser that reads what a template calls, or why --env is refused."""
    tokenizer = make_tokenizer(name, (directory / f"{name}.jinja").read_text())
    if not shows_tools(tokenizer):
        return dict(refused="--env has tools, and the chat template shows none")
    try:
        return dict(rows=f"by {find_reader(tokenizer, TOOLS)[0]}", wrong=[])
    except ValueError as error:
        return dict(refused=str(error))


def alike(items):
    """(name, texts) -> {texts: names}: equal ones are one."""
    found = {}
    for name, texts in items:
        found.setdefault(tuple(texts), []).append(name)
    return found


def tables(found):
    """Markdown: templates by shapes, the lines that refuse, and why turns differ from their marks."""
    cells = {}
    notes = {}
    reasons = {}
    for name, shapes in found.items():
        for column, shape in shapes.items():
            if "refused" in shape:
                text = f"no ({notes.setdefault(shape['refused'], len(notes) + 1)})"
            elif shape["wrong"]:
                text = "wrong"
            else:
                text = str(shape["rows"])
            cells.setdefault(column, []).append(text)
            for turn in shape.get("differs", ()):
                reasons.setdefault(turn["reason"], {})[name] = None
    columns = alike(cells.items())
    rows = alike(zip(found, zip(*columns)))
    head = ["Template"] + ["; ".join(titles) for titles in columns.values()]
    lines = [[", ".join(names)] + list(texts) for texts, names in rows.items()]
    why = [[str(number), f"`` {note[:200]} ``"] for note, number in notes.items()]
    differs = [[why, ", ".join(names)] for why, names in reasons.items()]
    tables = markdown(head, lines), markdown(["Note", "Line"], why)
    return "\n\n".join([*tables, markdown(["Difference", "Templates"], differs)])


def main(args):
    trl = find_spec("trl")
    if not trl:
        raise SystemExit("error: no templates: install requirements-bench.txt")
    directory = Path(trl.submodule_search_locations[0]) / "chat_templates"
    names = sorted(path.stem for path in directory.glob("*.jinja") if not path.stem.endswith("_training"))
    found = {}
    compared = 0
    wrong = []
    for name in args.names or names:
        found[name] = try_template(name, directory)
        for shape, row in found[name].items():
            compared += row.get("compared", 0)
            wrong += [f"{name}, {shape}: {what}" for what in row.get("wrong", ())]
        found[name][READ] = read_by(name, directory)
    if args.page:
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        before, _, _ = PAGE.read_text().partition(f"{MARK}\n")
        PAGE.write_text(f"{before}{MARK}\n{tables(found)}\n")
    else:
        print(tables(found))
    print(compared, "turns compared with marks")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main(Args(**flags))
