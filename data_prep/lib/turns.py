"""The turns of the assistant in a conversation that are trained, each after what a sampler would see.

messages[:i]    --render--> the prompt of turn i, as a sampler is given it    --> its ids, the context
messages[:i+1]  --render--> the same with the turn, which begins              --> what is trained
                    after the prompt
                    after the prompt without the <think> that it opens
                    or, if the history is another one, after the last generation prompt
                    or nowhere: its own words, with <think> around its reasoning

Which of them, is seen on marks in the place of what is said: all parts of the turn are shown (templates.py).
Turns share a row as long as the ids of the next prompt begin with it. {% generation %} marks count instead.
"""

import re
from functools import cache, lru_cache, partial
from itertools import groupby

from data_prep.lib.marks import MARKED, in_marks, tried
from data_prep.lib.replies import MARK_OF_THOUGHT, THOUGHTS, answer_after
from data_prep.lib.special import special_tokens
from data_prep.lib.templates import Talk

ELSE = "take a model whose template shows it, or another by --chat_template"


def places(prompt, upto, history, last):
    """{where a turn may begin: its text}, of the rendering `upto` that ends with it.

    history(): the messages before it without the generation prompt; last: which of these, from the end.
    """
    end = prompt.rstrip()
    opened = next((x for x in THOUGHTS if end.endswith(x)), None)
    if upto.startswith(prompt):
        return dict(prompt=upto[len(prompt) :])
    if opened and upto.startswith(end.removesuffix(opened)):
        return dict(thought=answer_after(prompt, upto[len(end.removesuffix(opened)) :]))
    given = prompt.removeprefix(history())
    parts = upto.split(given) if given else ()
    return dict(history=given.join(parts[-last:])) if len(parts) > last else {}


@lru_cache(10000)
def place(kinds, *about):
    """Of the last turn, with marks in the place of what is said: where it begins, and after which prompt.

    None: it is not shown in full there, or a thought twice. And what the template writes around it.
    """
    turn, own = in_marks(len(kinds) - 1, kinds[-1])
    prompt, history = (tried(kinds[:-1], *about, x)[1] or "" for x in (True, False))
    upto = tried(kinds, *about, False)[1]
    if upto is None:  # the template takes no marks
        return "prompt", 1, "", ""
    shown = sorted((upto.find(mark), mark) for mark in own if mark in upto) or [(len(upto), "")]
    (first, _), (last, mark) = shown[0], shown[-1]
    given = prompt.removeprefix(history)
    number = upto.count(given, upto.rfind(given, 0, first)) if given in upto[:first] else 1
    begun, end = upto[:first].removeprefix(prompt), upto[last + len(mark) :]
    for where, text in places(prompt, upto, lambda: history, number).items():
        twice = any(text.count(x) > max(1, turn["content"].count(x)) for x in THOUGHTS.values())
        if not twice and all(mark in text for mark in own):
            return where, number, begun, end
    return None, number, begun, end


def own_text(message, i, prompt, template):
    """The text of a turn that the template does not show as it was said."""
    said, thought = message["content"], message.get("reasoning_content")
    opening = next((x for x in THOUGHTS if THOUGHTS[x] in template), None)
    if message.get("tool_calls") or (thought and not opening):
        what = "its reasoning" if thought else "what it says beside its calls of tools"
        raise ValueError(f"the chat template leaves out of message {i} {what}; {ELSE}")
    said = f"{opening}\n{thought}\n{THOUGHTS[opening]}\n\n{said}" if thought else said
    return answer_after(prompt, said)


def turn(talk, i):
    """Prompt and text of turn i, which ends behind EOS, or the last special token; if it has none: EOS."""
    message, special, ends = talk.messages[i], special_tokens(talk.tokenizer), {}
    eos_token, template = talk.tokenizer.eos_token, str(talk.tokenizer.chat_template)
    alone = not message.keys() & {"tool_calls", "reasoning_content"} and special.search(message["content"])
    own = MARK_OF_THOUGHT.search(template)  # else it may have other marks for the thoughts of the data
    for apart in (False, True) if own else (True, False):
        said = talk.apart if apart else talk
        prompt, now = said.text(i, True), said.messages[i]
        where, last, begun, end = place(said.kinds[: i + 1], *said.about)
        ends[apart] = prompt, end
        if alone and special.search(MARK_OF_THOUGHT.sub("", begun)):  # as a model wrote it: gpt-oss
            text = message["content"] + end
            break
        answer_after(prompt, message["content"])  # ValueError for a thought that cannot be there
        text = places(prompt, said.text(i + 1, False), partial(said.text, i, False), last).get(where)
        twice = now.get("reasoning_content") and MARK_OF_THOUGHT.search(now["content"])
        if twice and (own or text is not None):
            raise ValueError(f"message {i} has a thought in its content and another in a field: keep one")
        if text is not None:
            break
    else:
        prompt, end = ends[False]
        text = own_text(message, i, prompt, template) + end
    last = re.compile(rf"(?:(?:{special.pattern})\s*)*$")
    ends = [match.end() for match in special.finditer(text, last.search(text).start())]
    if not ends:
        return prompt, (text.rpartition(eos_token)[0] or text) + eos_token
    eos = [end for end in ends if text.endswith(eos_token, 0, end)]
    return prompt, text[: eos[0] if eos else ends[-1]]


def marked_turn(talk, i):
    """[(text before, text)] of each part of turn i that a template marks by {% generation %}."""
    special = special_tokens(talk.tokenizer)
    _, _, past = talk.marked(i, False)
    _, text, own = talk.marked(i + 1, False)
    upto, spans = talk.written(i + 1, False)
    spans = [(a, b) for a, b in spans[len(past) :] if upto[a:b].strip()]
    if not spans:
        raise ValueError("the chat template marks nothing by {% generation %}: put it around the turns")
    trained = "".join(text[a:b] for a, b in own[len(past) :]) if text else upto
    lost = [what for mark, what in in_marks(i, talk.kinds[i])[1].items() if text and mark not in trained]
    if lost:
        raise ValueError(f"the chat template leaves out {lost[0]}; {ELSE}")
    begin, end = spans[-1]
    if not re.search(rf"(?:{special.pattern})\s*$", upto[begin:end]):
        token = special.match(upto[end:].lstrip())
        token = token[0] if token else talk.tokenizer.eos_token
        remedy = "put what ends a turn in it"
        raise ValueError(f"the chat template's {{% generation %}} ends before {token}: {remedy}")
    return [(upto[:a], upto[a:b]) for a, b in spans]


def trained_turns(messages, first=0):
    """Numbers of the turns of the assistant that are trained."""
    told = [m["role"] == "assistant" and m.get("train", True) for m in messages]
    if told[0] and not first:
        remedy = "drop it, or say that it is not trained by 'train': false"
        raise ValueError(f"message 0 is a turn of the assistant, before which nobody has spoken: {remedy}")
    return [i for i in range(first, len(messages)) if told[i]]


def encode_messages(messages, tokenizer, tools=None, first=0):
    """-> (ids, which are trained) of each row of a conversation, as few as can be.

    A turn is trained after the ids that a sampler is given: those of its prompt's text alone. A template that
    leaves thoughts out of the history needs a row for each turn. first: the first message that is trained.
    """
    wanted = trained_turns(messages, first)
    if hasattr(tokenizer, "image_processor"):
        raise ValueError("a model that takes images reads prompts and completions, no conversations")
    talk = Talk(messages, tokenizer, tools)
    if MARKED.search(str(tokenizer.chat_template)):
        pairs = [pair for i in wanted for pair in marked_turn(talk, i)]
    else:
        pairs = [turn(talk, i) for i in wanted]
    rows, prompts = [], ids_of([prompt for prompt, _ in pairs], tokenizer) if pairs else []
    for ids, (prompt, text) in zip(prompts, pairs):
        trained = []
        if rows and (size := shared(rows[-1][0], ids, tokenizer)):
            trained = rows.pop()[1][:size]
        trained += [False] * (len(ids) - len(trained))
        response = ids_after(prompt, text, tokenizer)
        rows.append((ids + response, trained + [True] * len(response)))
    return rows


def shared(before, ids, tokenizer):
    """How many ids of a row a later prompt begins with: all, or up to one of the tokens that end it."""
    if ids[: len(before)] == before:
        return len(before)
    special = special_ids(tokenizer)
    ends = (size for size in range(len(before), 0, -1) if before[size - 1] in special)
    size = next((size for size in ends if ids[:size] == before[:size]), 0)
    rest = [i for i in before[size:] if i not in special]
    return 0 if tokenizer.decode(rest).strip() else size


def ids_after(prompt, text, tokenizer):
    """Ids of a text that follows a prompt's ids, as a sampler writes it: decoded, prompt and text.

    Tokenised alone a text may begin with a space (SentencePiece), and together a token may lie across the
    place. Special tokens part a text, so the prompt's last one and what follows it are enough.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor of images
    parts = [match.start() for match in special_tokens(tokenizer).finditer(prompt)]
    end = prompt[parts[-1] if parts else 0 :]
    given, whole = ids_of([end, end + text], tokenizer)
    if whole[: len(given)] == given:
        return whole[len(given) :]
    for before in (end[-1:], "\n", ":", "x", tokenizer.eos_token):
        alone, whole = ids_of([before, before + text], tokenizer)
        found = whole[len(alone) :]
        if whole[: len(alone)] == alone and tokenizer.decode(given + found) == tokenizer.decode(given) + text:
            return found
    return ids_of([text], tokenizer)[0]


def ids_of(texts, tokenizer):
    """Ids of each text: what a template wrote has its BOS."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def answer_ids(prompt_ids, answer, tokenizer):
    """Ids of an answer to a prompt, with EOS; ValueError if it says the token of a picture."""
    text_only = getattr(tokenizer, "tokenizer", tokenizer)
    end = text_only.decode(prompt_ids[-20:])
    ids = ids_after(end, answer_after(end, answer), tokenizer)
    if shown := {*ids} & {*getattr(tokenizer, "image_ids", ())}:
        token = text_only.convert_ids_to_tokens(min(shown))
        raise ValueError(f"the answer says {token}, which stands for a picture: write it otherwise")
    return [*ids, tokenizer.eos_token_id]


@cache
def special_ids(tokenizer):
    """Ids of the special tokens, EOS among them."""
    text = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor of images
    return {i for i, x in text.added_tokens_decoder.items() if x.special} | {text.eos_token_id}


def stops(ids, trained, tokenizer):
    """The tokens that end the trained turns of a row: the last special token of each."""
    special, found = special_ids(tokenizer), set()
    for on, run in groupby(range(len(ids)), key=trained.__getitem__):
        found |= {*[ids[j] for j in run if on and ids[j] in special][-1:]}
    return found


def check_scored(messages, first, tokenizer, tools):
    """ValueError if turns from `first` on, scored with their conversation, are not shown in full."""
    _, text, _ = Talk(messages, tokenizer, tools).marked(None, False)
    for i, message in enumerate(messages[first:], first):
        if not message.get("train", True):
            raise ValueError("a turn is not to be trained, and a reward model scores whole conversations")
        mark = f"zq{i}reasoning_contentz"
        if message.get("reasoning_content") and mark not in (text or mark):
            raise ValueError(f"the chat template leaves out of message {i} its reasoning; {ELSE}")


def says_nothing(reply):
    """Whether an answer, a string or messages, has an empty turn of the assistant: it would train silence."""
    if isinstance(reply, str):
        return not reply.strip()
    if not isinstance(reply, list) or not all(isinstance(message, dict) for message in reply):
        raise ValueError(f"an answer must be a string or messages, not {reply!r:.60}")
    spoken = [x for x in reply if x.get("role") == "assistant" and x.get("train", True)]
    return not all(x["content"].strip() or {"tool_calls", "reasoning_content"} & x.keys() for x in spoken)
