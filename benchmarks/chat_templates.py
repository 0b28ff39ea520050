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
PAGE, RESULTS = ROOT / "docs/reference/chat-templates.md", ROOT / "benchmarks/results/chat_templates.json"


@dataclass(kw_only=True)
class Args:
    names: tuple[str, ...] = ()  # names of templates; none: all
    templates: Path | None = None  # directory of NAME.jinja; None: those of the installed TRL
    page: bool = False  # write the page and benchmarks/results/chat_templates.json


if __name__ == "__main__":
    flags = parse(Args)

import jinja2

from data_prep.lib.templates import RENDER_ERRORS, plain, render, shows_tools
from data_prep.lib.turns import encode_messages, trained_turns
from envs.calls import find_reader
from tests.conversations import SHAPES, TOOLS, ends_of, forms, make_tokenizer, messages_of

READ = "its calls are read"


# ---- one template --------------------------------------------------------------------------------
def encode(messages, tools, tokenizer):
    """-> rows of (context, trained), both texts, one for each turn; ValueError or TemplateError: refused."""
    rows = []
    for ids, trained in encode_messages(messages, tokenizer, tools):
        runs = [[*run] for on, run in groupby(range(len(ids)), key=trained.__getitem__) if on]
        text = lambda begin, end, ids=ids: tokenizer.decode(ids[begin:end])
        rows.append([(text(0, run[0]), text(run[0], run[-1] + 1)) for run in runs])
    return rows


def by_marks(messages, tools, tokenizer):
    """What a template marks in the last turn, without what the generation prompt gives; None: refused."""
    how = dict(tools=tools, return_dict=True)
    silent = [message | dict(reasoning_content="") for message in messages]
    for form in forms(messages):
        try:
            given = tokenizer.apply_chat_template(form[:-1], add_generation_prompt=True, **how)["input_ids"]
            whole = tokenizer.apply_chat_template(form, return_assistant_tokens_mask=True, **how)
        except RENDER_ERRORS:
            continue
        ids, mask = whole["input_ids"], whole["assistant_masks"]
        if not any(mask) or any(lost(message, tokenizer.decode(ids)) for message in silent):
            continue
        begin = next((i for i, (x, y) in enumerate(zip(given, ids)) if x != y), len(given))
        last = [[*run] for on, run in groupby(range(len(ids)), key=mask.__getitem__) if on][-1]
        marked = ids[max(begin, last[0]) : last[-1] + 1]
        if begin < last[0]:  # the history is another one than that of the prompt
            sizes = [n for n in range(len(marked)) if n and given[-n:] == marked[:n]]
            marked = marked[max(sizes, default=0) :]
        return tokenizer.decode(marked).rstrip()
    return None


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
    for function in (x["function"] for x in message.get("tool_calls", ())):
        words += [function["name"], *map(str, function["arguments"].values())]
    words = re.findall(r"\w+", " ".join(words).replace("think>", ""))
    there = re.findall(r"\w+", text)
    return [word for word in words if there.count(word) < words.count(word)]


def defects(messages, turn, context, trained, tools, tokenizer):
    """What is wrong with a turn, whatever the template."""
    heard = [x for x in plain(messages[:turn], tokenizer) if x["role"] != "assistant"]
    ends = "|".join(map(re.escape, ends_of(tokenizer.name_or_path)[1:]))
    wrong = {
        "its prompt is not what a sampler is given": context != render(messages[:turn], tokenizer, tools),
        "its prompt leaves out what was said": any(lost(x, context) for x in heard),
        "a user speaks with special tokens": f"What is {tokenizer.eos_token}?" in context,
        "it leaves out what it says": lost(messages[turn], trained),
        "it has two thoughts": trained.count("</think>") > 1,
        "no token that stops a sampler ends it": not re.search(rf"(?:{ends})\n?$", trained),
    }
    return [what for what, is_so in wrong.items() if is_so]


def try_shape(shape, tokenizer, twin):
    """-> dict(rows, differs, wrong, compared) of a shape, or dict(refused)."""
    messages, tools = messages_of(shape, tokenizer)
    try:
        rows = encode(messages, tools, tokenizer)
    except (ValueError, jinja2.TemplateError) as error:
        return dict(refused=str(error))
    found = dict(rows=len(rows), compared=0, differs=[], wrong=[])
    turns = [pair for row in rows for pair in row]
    if len(turns) != len(trained_turns(messages)):
        found["wrong"].append("turns are missing")
    for i, (context, trained) in zip(trained_turns(messages), turns):
        found["wrong"] += defects(messages, i, context, trained, tools, tokenizer)
        marked = twin and by_marks(plain(messages[: i + 1], tokenizer), tools, twin)
        found["compared"] += marked is not None
        if marked not in (None, trained):
            why = reason(context, trained, marked, tokenizer)
            thought = re.fullmatch(r"<think>\n(.*)\n</think>\n\n(.*)", messages[i]["content"], re.DOTALL)
            if thought:
                apart = messages[i] | dict(reasoning_content=thought[1], content=thought[2])
                if trained == by_marks(plain([*messages[:i], apart], tokenizer), tools, twin):
                    why = "A thought in the content is shown as the template shows reasoning."
            found["differs"].append(dict(reason=why) | ({} if why else dict(trained=trained, marked=marked)))
    return found


def try_template(name, directory):
    """-> what `try_shape` finds, by shape."""
    template, twin = ((directory / f"{name}{end}.jinja") for end in ("", "_training"))
    template = template.read_text()
    twin = twin.read_text() if twin.exists() else template if "endgeneration" in template else None
    tokenizer = make_tokenizer(name, template, twin or "")
    marker = twin and make_tokenizer(name, twin, template)
    return {shape: try_shape(shape, tokenizer, marker) for shape in SHAPES}


# ---- the page ------------------------------------------------------------------------------------
def table(head, lines):
    """Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def read_by(name, directory):
    """The parser that reads what a template calls, or why --env is refused."""
    tokenizer = make_tokenizer(name, (directory / f"{name}.jinja").read_text())
    if not shows_tools(tokenizer):
        return dict(refused="--env has tools, and the chat template shows none")
    try:
        return dict(rows=f"by {find_reader(tokenizer, TOOLS)[0]}", wrong=[])
    except ValueError as error:
        return dict(refused=str(error))


def tables(found):
    """Markdown: templates by shapes, the lines that refuse, and why turns differ from their marks."""
    cells, notes, reasons = {}, {}, {}
    for name, shapes in found.items():
        for column, shape in shapes.items():
            text = "wrong" if shape.get("wrong") else f"{shape.get('rows')}"
            if "refused" in shape:
                text = f"no ({notes.setdefault(shape['refused'], len(notes) + 1)})"
            cells.setdefault(column, []).append(text)
            for turn in shape.get("differs", ()):
                reasons.setdefault(turn["reason"] or "Unknown.", {})[name] = None
    columns, rows = {}, {}  # equal columns are one, and so are equal rows
    for column, texts in cells.items():
        columns.setdefault(tuple(texts), []).append(column)
    for name, texts in zip(found, zip(*columns)):
        rows.setdefault(texts, []).append(name)
    head = ["Template", *("; ".join(titles) for titles in columns.values())]
    lines = [[", ".join(names), *texts] for texts, names in rows.items()]
    why = [[str(number), f"`` {note[:200]} ``"] for note, number in notes.items()]
    differs = [[why, ", ".join(names)] for why, names in reasons.items()]
    parts = (head, lines), (["Note", "Line"], why), (["Difference", "Templates"], differs)
    return "\n\n".join(table(head, lines) for head, lines in parts)


def main(args):
    trl = find_spec("trl")
    if not (args.templates or trl):
        raise SystemExit("error: no templates: pass --templates, or install requirements-bench.txt")
    directory = args.templates or Path(trl.submodule_search_locations[0]) / "chat_templates"
    names = sorted(path.stem for path in directory.glob("*.jinja") if not path.stem.endswith("_training"))
    found = {
        name: try_template(name, directory) | {READ: read_by(name, directory)} for name in args.names or names
    }
    rows = [(f"{name}, {shape}", row) for name, shapes in found.items() for shape, row in shapes.items()]
    unknown = [f"{where}: {what}" for where, row in rows for what in row.get("wrong", ())]
    unknown += [f"{where}: {x}" for where, row in rows for x in row.get("differs", ()) if not x["reason"]]
    if args.page:
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        before, _, _ = PAGE.read_text().partition(f"{MARK}\n")
        PAGE.write_text(f"{before}{MARK}\n{tables(found)}\n")
    else:
        print(tables(found))
    print(sum(row.get("compared", 0) for _, row in rows), "turns compared with marks")
    if unknown:
        raise SystemExit("\n".join(unknown))


if __name__ == "__main__":
    main(Args(**flags))
