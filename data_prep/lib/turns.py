"""The turns of the assistant in a conversation that are trained, each after what a sampler would see."""

import json
import re
from functools import partial
from itertools import pairwise

import numpy as np

from data_prep.lib.marks import marked, runs
from data_prep.lib.templates import render
from data_prep.lib.thoughts import MARK_OF_THOUGHT, THOUGHTS, answer_after, check_thought, thought_apart
from envs.messages import special_tokens

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that says itself what is trained


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
    if not wanted:
        return []
    texts_of = lambda ids, mask: [tokenizer.decode([ids[j] for j in run]) for run in runs(mask)]
    row = marked(messages, tokenizer, tools, wanted)
    texts = texts_of(*row)
    if len(texts) != len(wanted):  # a turn may be marked in parts
        texts = ["".join(texts)] * len(wanted)
    if not any(left_out(messages[i], text) for i, text in zip(wanted, texts)):
        return [row]
    rows = [marked(messages[: i + 1], tokenizer, tools, [i]) for i in wanted]
    for i, row in zip(wanted, rows):
        if what := left_out(messages[i], "".join(texts_of(*row))):
            raise ValueError(f"the chat template leaves out of message {i} {what}")
    return rows


def says_nothing(reply):
    """Whether an answer, a string or messages, has an empty turn of the assistant: it would train silence."""
    if isinstance(reply, str):
        return not reply.strip()
    if not isinstance(reply, list) or not all(isinstance(message, dict) for message in reply):
        raise ValueError(f"an answer must be a string or messages, not {reply!r:.60}")
    spoken = [x for x in reply if x.get("role") == "assistant" and x.get("train", True)]
    full = lambda x: x["content"].strip() or x.get("tool_calls") or x.get("reasoning_content")
    return not all(map(full, spoken))
