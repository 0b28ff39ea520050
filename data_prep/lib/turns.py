"""What a chat template makes of a conversation: prompts, and the turns of the assistant that are trained."""

import json
import re
from functools import lru_cache, partial
from itertools import groupby, pairwise, product
from pathlib import Path

import numpy as np
from jinja2 import TemplateError, meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from envs import one_line
from envs.messages import RENDER_ERRORS, special_tokens, without_special

THOUGHTS = {  # marks of a thought
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "◁think▷": "◁/think▷",
}
OPENED = THOUGHTS | {"<|channel>": "<channel|>", "<|channel|>analysis": "<|end|>"}  # Gemma 4, gpt-oss
MARK_OF_THOUGHT = re.compile("|".join(map(re.escape, (*THOUGHTS, *THOUGHTS.values()))))
DEVELOPER = re.compile("""['"]developer['"]""")  # in a template that knows this role
TOOL = {  # one of which no text speaks
    "name": "zqtool",
    "description": "zq",
    "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "zq"}}},
}
OURS = {"messages", "tools", "documents", "add_generation_prompt"}  # variables that are given anyway
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that says itself what is trained


def plain(messages, tokenizer):
    """A conversation of a data set as it is rendered: what users and tools say has no special tokens.

    Turns of the assistant keep them, since some models call tools or think with special tokens. Reasoning
    has all names that templates read; a developer is the system for a template that knows none.
    """
    ours = "assistant", "system", "developer"
    found = [m if m["role"] in ours else without_special(m, tokenizer) for m in messages]
    for i, message in enumerate(found):
        if message["role"] == "developer" and not DEVELOPER.search(str(tokenizer.chat_template)):
            found[i] = message | dict(role="system")
        if thought := message.get("reasoning_content"):
            found[i] = message | dict(reasoning=thought, thinking=thought)
    return found


def use_template(tokenizer, args):
    """Take --chat_template and --chat_template_kwargs: both are saved with the tokenizer.

    The values stand at the beginning of the template, so whoever serves the model renders as it was trained,
    and may still give others.
    """
    if args.chat_template:
        try:
            tokenizer.chat_template = text = Path(args.chat_template).read_text("utf-8")
            _compile_jinja_template(text)
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            raise ValueError(f"--chat_template {args.chat_template}: {one_line(error)}") from None
        if text.lstrip().startswith('{"'):
            raise ValueError(f"--chat_template {args.chat_template}: this is JSON; give the template in it")
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        templates = {"": templates}
    read, problem, values = set(), None, {}
    for text in filter(None, templates.values()):
        read |= meta.find_undeclared_variables(_compile_jinja_template(text).environment.parse(text))
    try:
        values = json.loads(args.chat_template_kwargs)
        json.dumps(values, allow_nan=False)
        if not isinstance(values, dict):
            problem = "it is no JSON object"
        elif unread := values.keys() - read | values.keys() & OURS:
            problem = f"the chat template has no variable {min(unread)!r}"
    except ValueError as error:
        problem = f"it is no JSON ({error})"
    if problem:
        example = """write it as '{"enable_thinking": false}'"""
        raise ValueError(f"--chat_template_kwargs {args.chat_template_kwargs}: {problem}; {example}")
    given = [
        f"{{%- if {x} is not defined %}}{{%- set {x} = {y!r} %}}{{%- endif %}}\n" for x, y in values.items()
    ]
    if given:
        templates = {name: "".join(given) + text for name, text in templates.items()}
        tokenizer.chat_template = templates.get("", templates)
    if hasattr(tokenizer, "image_processor"):
        tokenizer.tokenizer.chat_template = tokenizer.chat_template


def render(messages, tokenizer, tools=None, prompted=True):
    """The text of messages, with the generation prompt; tools: JSON schemas that the template shows.

    ValueError, in one line, if the template cannot write them, or leaves out what somebody says or calls.
    """
    return written(shown(messages, tokenizer, tools, prompted), tokenizer, tools, prompted)


def shown(messages, tokenizer, tools, prompted):
    """Messages in the form in which the template shows them."""
    if tokenizer.chat_template is None:
        raise ValueError("the model has no chat template; give one by --chat_template FILE")
    messages = plain(messages, tokenizer)
    about = []
    for m in messages:
        fields = sorted({"reasoning_content", "name"} & m.keys())
        about.append(
            (m["role"], type(m["content"]), bool(m["content"]), len(m.get("tool_calls") or ()), *fields)
        )
    form = form_of(tuple(about), tokenizer, str(tokenizer.chat_template), bool(tools), prompted)
    return [formed(message, *form) for message in messages]


def written(messages, tokenizer, tools, prompted):
    """What the template writes; Unwritten where it cannot."""
    options = dict(tools=tools or None, tokenize=False, add_generation_prompt=prompted)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except RENDER_ERRORS as error:
        name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise Unwritten(one_line(f"the chat template: {name}{error}")) from None


class Unwritten(ValueError):
    """A template cannot write messages."""


def formed(message, parts, text, none):
    """A message in a form that some templates want.

    parts: its content is a list. Calls are as OpenAI has them; text: their arguments are JSON text; none: no
    content is None where there are calls.
    """
    if parts and isinstance(message["content"], str):
        message = message | dict(content=[dict(type="text", text=message["content"])])
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if text:
            function = function | dict(arguments=json.dumps(function["arguments"], ensure_ascii=False))
        calls.append(dict(type="function") | call | dict(function=function))
    return message | dict(tool_calls=calls, content=message["content"] or (None if none else ""))


@lru_cache(10000)
def form_of(about, tokenizer, template, tools, prompted):
    """The form in which a template shows messages like these: tried on marks in their place.

    All but the assistant's words must be shown, which a template may rewrite; see `turn`.
    """
    marks, messages = {}, []
    for i, (role, kind, said, calls, *more) in enumerate(about):
        mark = f"zq{i}said"
        message = dict(role=role, content=mark if said else "", **dict.fromkeys(more, f"zq{i}more"))
        if kind is list and said:
            message["content"] = [dict(type="image"), dict(type="text", text=mark)]
        if said and role != "assistant":
            marks[mark] = f"what message {i} ({role}) says"
        for j in range(calls):
            name, value = f"zq{i}name{j}z", f"zq{i}value{j}z"
            call = dict(function=dict(name=name, arguments=dict(x=value)))
            message.setdefault("tool_calls", []).append(call)
            marks[name] = marks[value] = f"tool calls: number {j} of message {i}"
        messages.append(message)
    # a list only where text will not do, and other calls only where there are any
    forms, problem = [*product((False, True), repeat=3)], None
    for form in forms if any(calls for _, _, _, calls, *_ in about) else forms[::4]:
        try:
            text = written(
                [formed(x, *form) for x in messages],
                tokenizer,
                tools and [dict(type="function", function=TOOL)],
                prompted,
            )
        except Unwritten:
            continue
        lost = [what for mark, what in marks.items() if mark not in text]
        if not lost:
            return form
        problem = problem or f"the chat template leaves out {lost[0]}; take a model whose template shows it"
    if problem:
        raise ValueError(problem)
    return (False,) * 3  # the messages themselves may say why


def shown_tools(own, given, tokenizer):
    """The tools that a template shows: those in the column of a row, or those that a script gives to all."""
    if own and given:
        raise ValueError("it has tools in its column 'tools', and --env has others: drop the column")
    probe = [dict(role="user", content="zq")], tokenizer, [dict(type="function", function=TOOL)]
    if own and TOOL["name"] not in render(*probe):
        raise ValueError("it has tools in its column 'tools', and the chat template shows none")
    return given or own or None


def left_out(message, text):
    """What of a turn a text does not have, white space aside; None: nothing."""
    bare = "".join(text.split())
    called = "".join(json.dumps(message.get("tool_calls", []), ensure_ascii=False).split())
    thought = message.get("reasoning_content", "")
    parts = {
        f"what it says, {part.strip()!r:.40}": part for part in MARK_OF_THOUGHT.split(message["content"])
    }
    for what, part in {f"its reasoning, {thought!r:.40}": thought, **parts}.items():
        part = "".join(part.split())
        if part and bare.count(part) <= called.count(part):  # what a call says is not what the turn says
            return what
    return None


def check_scored(reply, text):
    """ValueError if a text, of a conversation that is scored as a whole, is not all of a reply."""
    for message in reply:
        if not message.get("train", True):
            raise ValueError("a turn is not to be trained, and a reward model scores whole conversations")
        if what := left_out(message | dict(content=""), text):
            raise ValueError(f"the chat template leaves out {what}")


def opens_only(text, prompt=""):
    """Whether a response does not close a thought that it, or its prompt, has opened."""
    begins, end = text.lstrip(), prompt.rstrip()
    opened = [y for x, y in OPENED.items() if begins.startswith(x) or end.endswith(x)]
    return any(closing not in text for closing in opened)


def whole_thought(text):
    """A response whose prompt opened its thought, with the opening."""
    for opening, closing in THOUGHTS.items():
        if closing in text and opening not in text.partition(closing)[0]:
            return f"{opening}\n{text}"
    return text


def answer_after(prompt, text):
    """What follows a prompt that may have opened a thought: the answer, which opens it only once.

    An answer without a thought has an empty one, as the templates of Qwen have it.
    """
    check_thought(text, prompt)
    end, begins = prompt.rstrip(), text.lstrip()
    for opening, closing in THOUGHTS.items():
        if end.endswith(opening) and begins.startswith(opening):
            return begins.removeprefix(opening).removeprefix("\n" * prompt.endswith("\n"))
        if end.endswith(opening) and closing not in text:
            return f"\n{closing}\n\n" + text.lstrip("\n")
        if end.endswith(closing) and closing in text:
            return text.partition(closing)[2].lstrip("\n")
    return text


def check_thought(text, prompt):
    """ValueError if an answer opens a thought and does not close it, or thinks where its prompt does not."""
    end = prompt.rstrip()
    for opening, closing in THOUGHTS.items():
        before, closed, _ = text.partition(closing)
        thought = before.lstrip().removeprefix(opening)
        if text.lstrip().startswith(opening) and not closed:
            raise ValueError(f"the answer opens {opening} and does not close it by {closing}")
        if end.endswith(opening) and closed and opening in thought:
            raise ValueError(f"the answer opens {opening} in its middle, and its prompt has opened it")
        if end.endswith(closing) and closed and thought.strip():
            remedy = "let it open one (--chat_template_kwargs), or leave out the thought"
            raise ValueError(f"the answer has a thought and its prompt an empty one: {remedy}")


def own_text(message, number, prompt, template):
    """The text of a turn that the template does not show as it was said."""
    said, thought = message["content"], message.get("reasoning_content")
    opening = next((x for x in THOUGHTS if THOUGHTS[x] in template), None)
    if message.get("tool_calls") or (thought and not opening):
        what = "its reasoning" if thought else "what it says beside its calls of tools"
        remedy = "take a model whose template shows it, or another by --chat_template"
        raise ValueError(f"the chat template leaves out of message {number} {what}; {remedy}")
    said = f"{opening}\n{thought}\n{THOUGHTS[opening]}\n\n{said}" if thought else said
    return answer_after(prompt, said)


def as_written(messages, i, prompt, tokenizer, tools):
    """The text of turn i if a model wrote it, with special tokens that the template would write once more.

    gpt-oss: <|channel|>analysis<|message|>It is.<|end|><|start|>assistant<|channel|>final<|message|>Yes.
    """
    said, special = messages[i]["content"], special_tokens(tokenizer)
    if not special.search(said) or messages[i].keys() & {"tool_calls", "reasoning_content"}:
        return None
    upto = render([*messages[:i], dict(role="assistant", content="zq")], tokenizer, tools, prompted=False)
    begun, _, end = upto.removeprefix(prompt).rpartition("zq")
    again = upto.startswith(prompt) and special.search(MARK_OF_THOUGHT.sub("", begun))
    return said + end if again else None


def thought_apart(message):
    """A message of which a thought at the beginning is its reasoning."""
    for opening, closing in THOUGHTS.items():
        thought, closed, said = message["content"].partition(closing)
        if closed and thought.lstrip().startswith(opening) and not message.get("reasoning_content"):
            thought = thought.lstrip().removeprefix(opening).strip("\n")
            return message | dict(content=said.lstrip("\n"), reasoning_content=thought)
    return message


def said_in(upto, prompt, history, previous):
    """Yield what may be the text of the last turn in `upto`, the best first.

    history: gives the text of the messages before the turn, without the generation prompt; previous: what the
    last of them says. A prompt that opens a thought may do so where the history does not.
    """
    end = prompt.rstrip()
    opened = next((x for x in THOUGHTS if end.endswith(x)), None)
    if upto.startswith(prompt):
        yield upto[len(prompt) :]
    if opened and upto.startswith(end.removesuffix(opened)):
        yield answer_after(prompt, upto[len(end.removesuffix(opened)) :])
    given, at = prompt.removeprefix(history()), len(upto)
    while given and (at := upto.rfind(given, 0, at)) >= 0 and (previous in upto[:at] or previous not in upto):
        yield upto[at + len(given) :]


def shows(text, said, message):
    """Whether a text has all of a turn, and its thought once."""
    twice = any(text.count(x) > max(1, message["content"].count(x)) for x in THOUGHTS.values())
    return not twice and not left_out(said, text)


def turn(messages, i, tokenizer, tools):
    """Prompt and text of turn i, and where the turn may end: behind each of its last special tokens.

    The text ends behind EOS, or the last special token; without any EOS follows.
    """
    if not i:
        remedy = "drop it, or say that it is not trained by 'train': false"
        raise ValueError(f"message 0 is a turn of the assistant, before which nobody has spoken: {remedy}")
    template, special = str(tokenizer.chat_template), special_tokens(tokenizer)
    reads = "reasoning_content" in template or "thinking" in template
    for said in (messages, [*map(thought_apart, messages)])[: 2 if reads else 1]:
        prompt = render(said[:i], tokenizer, tools)
        text = as_written(said, i, prompt, tokenizer, tools)
        if text is not None:
            break
        check_thought(messages[i]["content"], prompt)
        if said[i].get("reasoning_content") and any(x in said[i]["content"] for x in THOUGHTS.values()):
            raise ValueError(f"message {i} has a thought in its content and another in a field: keep one")
        upto = render(said[: i + 1], tokenizer, tools, prompted=False)
        history = partial(render, said[:i], tokenizer, tools, prompted=False)
        found = said_in(upto, prompt, history, said[i - 1]["content"].strip())
        text = next((text for text in found if shows(text, said[i], messages[i])), None)
        if text is not None:
            break
    last = re.compile(rf"(?:(?:{special.pattern})\s*)*$")
    if text is None:
        begun = last.search(MARK_OF_THOUGHT.sub("", prompt[-80:]).rstrip())[0]  # the tokens of its role
        end = last.search(upto)[0].removeprefix(last.search(messages[i]["content"])[0])
        text = own_text(messages[i], i, prompt, template) + (end.removeprefix(begun).strip() or end)
    ends = [match.end() for match in special.finditer(text, last.search(text).start())]
    if not ends:
        text = text.rpartition(tokenizer.eos_token)[0] or text
        text += tokenizer.eos_token
        return prompt, text, [len(text)]
    eos = [end for end in ends if text.endswith(tokenizer.eos_token, 0, end)]
    text = text[: eos[0] if eos else ends[-1]]
    return prompt, text, [end for end in ends if end <= len(text)]


def turns(messages, tokenizer, tools=None, first=0):
    """-> (text, [(begin, end) of each trained turn]), as few as can be: what a sampler would read and write.

    A turn is trained after the prompt that a sampler is given: the messages before it and the generation
    prompt. Turns share a text as long as the next prompt begins with it; a template that leaves thoughts out
    of the history needs one for each.  first: the number of the first message that is trained.
    """
    rows = []
    for i in trained_turns(messages, first):
        prompt, text, ends = turn(messages, i, tokenizer, tools)
        spans = [(len(prompt), len(prompt) + len(text))]
        if rows:
            before, earlier, last_ends = rows[-1]
            kept = [end for end in last_ends if prompt.startswith(before[:end])]
            if kept:
                rows.pop()
                spans = [*earlier[:-1], (earlier[-1][0], kept[-1]), *spans]
        rows.append((prompt + text, spans, [len(prompt) + end for end in ends]))
    return [row[:2] for row in rows]


def trained_turns(messages, first=0):
    """Numbers of the turns of the assistant that are trained."""
    roles = [(i, m) for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
    return [i for i, message in roles if message.get("train", True)]


def encode_messages(messages, tokenizer, tools=None, first=0):
    """-> (ids, which are trained) of each row of a conversation, as `turns` has them.

    Where a template marks what is trained by {% generation %}, transformers' mask counts.
    """
    if MARKED.search(str(tokenizer.chat_template)):
        return encode_marked(messages, tokenizer, tools, first)
    rows = []
    for text, spans in turns(messages, tokenizer, tools, first):
        ids, starts, ends = tokens(text, (), tokenizer)
        # a sampler's prompt ends where the turn begins, so no token lies across that place
        cuts = [begin for begin, _ in spans if np.any((starts < begin) & (begin < ends))]
        if cuts:
            ids, starts, _ = tokens(text, cuts, tokenizer)
        trained = sum([(begin <= starts) & (starts < end) for begin, end in spans]) > 0
        rows.append((ids, trained.tolist()))
    return rows


def tokens(text, cuts, tokenizer):
    """Ids of a text of which no token lies across a cut, and where each begins and ends."""
    ids, places = [], []
    for begin, end in pairwise([0, *cuts, len(text)]):
        encoded = tokenizer(text[begin:end], add_special_tokens=False, return_offsets_mapping=True)
        ids += encoded["input_ids"]
        places += [(begin + a, begin + b) for a, b in encoded["offset_mapping"]]
    return ids, *np.array(places or [(0, 0)])[: len(ids)].T


def encode_marked(messages, tokenizer, tools, first):
    """As `encode_messages`, by the template's marks; one row if all turns are shown in one text."""
    wanted = trained_turns(messages, first)
    text = render(messages, tokenizer, tools, prompted=False)
    if all(not left_out(messages[i], text) for i in wanted):
        return [marked(messages, tokenizer, tools, wanted)] if wanted else []
    rows = []
    for i in wanted:
        text = render(messages[: i + 1], tokenizer, tools, prompted=False)
        if what := left_out(messages[i], text):
            raise ValueError(f"the chat template leaves out of message {i} {what}")
        rows.append(marked(messages[: i + 1], tokenizer, tools, [i]))
    return rows


def marked(messages, tokenizer, tools, wanted):
    """Ids of a conversation, and transformers' mask of them; of some turns only: the runs of these."""
    how = dict(tools=tools or None, return_dict=True, return_assistant_tokens_mask=True)
    encoded = tokenizer.apply_chat_template(shown(messages, tokenizer, tools, prompted=False), **how)
    ids, mask = encoded["input_ids"], [bool(x) for x in encoded["assistant_masks"]]
    spoken = trained_turns([dict(role=m["role"]) for m in messages])
    if wanted != spoken:
        runs = [[*run] for on, run in groupby(range(len(mask)), key=mask.__getitem__) if on]
        if len(runs) != len(spoken):
            raise ValueError(f"the chat template marks {len(runs)} turns of {len(spoken)}: all or none")
        kept = {j for i, run in zip(spoken, runs) if i in wanted for j in run}
        mask = [j in kept for j in range(len(mask))]
    return ids, mask


def stops(ids, trained, tokenizer):
    """The tokens that end the trained turns of a row: the last special token of each."""
    special = {i for i, x in tokenizer.added_tokens_decoder.items() if x.special} | {tokenizer.eos_token_id}
    runs = [[*run] for on, run in groupby(range(len(ids)), key=trained.__getitem__) if on]
    last = [[ids[j] for j in run if ids[j] in special][-1:] for run in runs]
    return {*sum(last, [])}


def says_nothing(reply):
    """Whether an answer, a string or messages, has an empty turn of the assistant: it would train silence."""
    if isinstance(reply, str):
        return not reply.strip()
    if not isinstance(reply, list) or not all(isinstance(message, dict) for message in reply):
        raise ValueError(f"an answer must be a string or messages, not {reply!r:.60}")
    spoken = [x for x in reply if x.get("role") == "assistant" and x.get("train", True)]
    full = lambda x: x["content"].strip() or x.get("tool_calls") or x.get("reasoning_content")
    return not all(map(full, spoken))
