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
from functools import cache, partial

from data_prep.lib.templates import (
    GENERATION_TAG,
    MARK,
    THOUGHT_TAG,
    THOUGHTS,
    Conversation,
    lost,
    special_tokens,
    text_only,
)

ELSE = "take a model whose template shows it, or another by --chat_template"


# ---- rows of a conversation


def encode_messages(messages, tokenizer, tools=None, first=0):
    """-> (ids, which are trained) of each row of a conversation, as few as can be.

    A turn is trained after the ids that a sampler is given: those of its prompt's text alone. A template that
    leaves thoughts out of the history needs a row for each turn. first: the first message that is trained.
    """
    wanted = trained_turns(messages, first)
    if hasattr(tokenizer, "image_processor"):
        raise ValueError("a model that takes images reads prompts and completions, no conversations")
    conversation = Conversation(messages, tokenizer, tools)
    pairs = []
    for i in wanted:
        if GENERATION_TAG.search(str(tokenizer.chat_template)):
            pairs += marked_turn(conversation, i)
        else:
            pairs.append(prompt_and_turn(conversation, i))
    if not pairs:
        return []

    rows = []
    ids = []  # of the last row, and which of them are trained
    trained = []
    known = ""  # its prompt up to the last special token, and how many ids that is
    size = 0
    special = special_tokens(tokenizer)
    for prompt, text in pairs:
        if not prompt.startswith(known):
            known = ""
            size = 0
        starts = [match.start() for match in special.finditer(prompt, len(known))]
        last = max(starts, default=0)
        more, end = ids_of([prompt[len(known) : last], prompt[last:]], tokenizer)
        prompt_ids = more + end
        same = shared_size(ids[size:], prompt_ids, tokenizer)
        if ids and not same:
            rows.append((ids, trained))
            ids = ids[:size]
            trained = [False] * size
        response = ids_after(prompt[last:], text, tokenizer)
        ids[size:] = prompt_ids + response
        trained[size + same :] = [False] * (len(prompt_ids) - same) + [True] * len(response)
        known = prompt[:last]
        size += len(more)
    return [*rows, (ids, trained)]


def trained_turns(messages, first=0):
    """Numbers of the turns of the assistant that are trained."""
    turns = [i for i, x in enumerate(messages) if x["role"] == "assistant" and x.get("train", True)]
    if first == 0 and 0 in turns:
        remedy = "drop it, or say that it is not trained by 'train': false"
        raise ValueError(f"message 0 is a turn of the assistant, before which nobody has spoken: {remedy}")
    return [i for i in turns if i >= first]


def check_scored(messages, first, tokenizer, tools):
    """ValueError if turns from `first` on, scored with their conversation, are not shown in full."""
    conversation = Conversation(messages, tokenizer, tools)
    _, text, _ = conversation.rendered_marks(None, False)
    for message, marked in zip(messages[first:], conversation.marked[first:]):
        if not message.get("train", True):
            raise ValueError("a turn is not to be trained, and a reward model scores whole conversations")
        what = text and lost(marked, text, ("assistant",))
        if what:
            raise ValueError(f"the chat template leaves out {what}; {ELSE}")


# ---- the text of a turn, as a template renders it


def prompt_and_turn(conversation, i):
    """Prompt and text of turn i, which ends behind EOS, or the last special token; if it has none: EOS."""
    prompt, text = prompt_and_rest(conversation, i)
    special = special_tokens(conversation.tokenizer)
    eos_token = conversation.tokenizer.eos_token
    last = re.search(rf"(?:(?:{special.pattern})\s*)*$", text).start()
    ends = [match.end() for match in special.finditer(text, last)]
    if not ends:
        return prompt, (text.rpartition(eos_token)[0] or text) + eos_token
    for end in ends:
        if text.endswith(eos_token, 0, end):
            return prompt, text[:end]
    return prompt, text[: ends[-1]]


def prompt_and_rest(conversation, i):
    """Prompt and text of turn i, with all that the template writes after it."""
    message = conversation.messages[i]
    special = special_tokens(conversation.tokenizer)
    plain = not message.keys() & {"tool_calls", "reasoning_content"}
    as_written = plain and special.search(message["content"])  # by a model, with special tokens: gpt-oss
    views = [conversation, conversation.reasoned]
    template = str(conversation.tokenizer.chat_template)
    has_thoughts = THOUGHT_TAG.search(template)
    if not has_thoughts:  # it may have other marks for the thoughts of the data
        views.reverse()
    for view in views:
        prompt = view.text(i, True)
        where, number, begun, end = locate(view, i)
        if as_written and special.search(THOUGHT_TAG.sub("", begun)):
            return prompt, message["content"] + end
        answer_after(prompt, message["content"])  # ValueError for a thought that cannot be there
        history = partial(view.text, i, False)
        found, text = find_turn(prompt, view.text(i + 1, False), history, number)
        shown = found and found == where
        rendered = view.messages[i]
        two_thoughts = rendered.get("reasoning_content") and THOUGHT_TAG.search(rendered["content"])
        if two_thoughts and (has_thoughts or shown):
            raise ValueError(f"message {i} has a thought in its content and another in a field: keep one")
        if shown:
            return prompt, text
    prompt = conversation.text(i, True)
    *_, end = locate(conversation, i)
    return prompt, untemplated_text(message, i, prompt, template) + end


def locate(conversation, i):
    """-> of turn i in marks: where it begins, see `find_turn`, after which prompt, what is around its words.

    where is None if it is not shown in full there, or a thought twice.
    """
    turn = conversation.marked[i]
    _, prompt, _ = conversation.rendered_marks(i, True)
    _, history, _ = conversation.rendered_marks(i, False)
    _, upto, _ = conversation.rendered_marks(i + 1, False)
    if upto is None:  # the template takes no marks
        return "prompt", 1, "", ""
    prompt = prompt or ""
    history = history or ""
    shown = [mark[0] for mark in MARK.finditer(turn) if mark[0] in upto]
    first = min((upto.find(mark) for mark in shown), default=len(upto))
    last = max((upto.find(mark) + len(mark) for mark in shown), default=len(upto))
    number = 1
    generation = prompt.removeprefix(history)
    nearest = upto.rfind(generation, 0, first)
    if nearest >= 0:
        number = upto.count(generation, nearest)

    where, text = find_turn(prompt, upto, lambda: history, number)
    if where and lost(turn, text):
        where = None
    for closing in THOUGHTS.values():
        if where and text.count(closing) > max(1, turn.count(closing)):
            where = None
    return where, number, upto[:first].removeprefix(prompt), upto[last:]


def find_turn(prompt, upto, history, number):
    """Where the last turn of the rendering `upto` begins, and its text; None, None if nowhere.

    history(): the messages before it without the generation prompt; number: which of the generation prompts
    it follows, from the end.
    """
    if upto.startswith(prompt):
        return "prompt", upto[len(prompt) :]
    end = prompt.rstrip()
    for opening in THOUGHTS:
        before = end.removesuffix(opening)
        if before != end and upto.startswith(before):
            return "thought", answer_after(prompt, upto[len(before) :])
    generation = prompt.removeprefix(history())
    if not generation or upto.count(generation) < number:
        return None, None
    return "history", generation.join(upto.split(generation)[-number:])


def untemplated_text(message, i, prompt, template):
    """The text of a turn that the template does not show as it was said."""
    text = message["content"]
    thought = message.get("reasoning_content")
    known = [opening for opening in THOUGHTS if THOUGHTS[opening] in template]
    if thought and (not known or message.get("tool_calls")):
        raise ValueError(f"the chat template leaves out of message {i} its reasoning; {ELSE}")
    if message.get("tool_calls"):
        what = "what it says beside its calls of tools"
        raise ValueError(f"the chat template leaves out of message {i} {what}; {ELSE}")
    if thought:
        text = f"{known[0]}\n{thought}\n{THOUGHTS[known[0]]}\n\n{text}"
    return answer_after(prompt, text)


def answer_after(prompt, text):
    """What follows a prompt that may have opened a thought: the answer, which opens it only once.

    An answer without a thought has an empty one, as the templates of Qwen have it. ValueError if an answer
    opens a thought and does not close it, or thinks where its prompt does not.
    """
    end = prompt.rstrip()
    for opening, closing in THOUGHTS.items():
        thought, closed, answer = text.partition(closing)
        opens = thought.lstrip().startswith(opening)
        thought = thought.lstrip().removeprefix(opening)
        if opens and not closed:
            raise ValueError(f"the answer opens {opening} and does not close it by {closing}")
        if closed and end.endswith(closing):
            if thought.strip():
                remedy = "let it open one (--chat_template_kwargs), or leave out the thought"
                raise ValueError(f"the answer has a thought and its prompt an empty one: {remedy}")
            return answer.lstrip("\n")
        if not end.endswith(opening):
            continue
        if not closed:
            return f"\n{closing}\n\n" + text.lstrip("\n")
        if opening in thought:
            raise ValueError(f"the answer opens {opening} in its middle, and its prompt has opened it")
        if opens:
            text = text.lstrip().removeprefix(opening)
            if prompt.endswith("\n"):
                text = text.removeprefix("\n")
        return text
    return text


def marked_turn(conversation, i):
    """[(text before, text)] of each part of turn i that a template marks by {% generation %}."""
    special = special_tokens(conversation.tokenizer)
    *_, spans = conversation.rendered_marks(i, False)
    before = len(spans)  # marked parts of the turns before
    upto, spans = conversation.rendered(i + 1, False)
    spans = [(begin, end) for begin, end in spans[before:] if upto[begin:end].strip()]
    if not spans:
        raise ValueError("the chat template marks nothing by {% generation %}: put it around the turns")

    _, text, spans_of_marks = conversation.rendered_marks(i + 1, False)
    if text:
        trained = "".join(text[begin:end] for begin, end in spans_of_marks[before:])
        what = lost(conversation.marked[i], trained)
        if what:
            raise ValueError(f"the chat template leaves out {what}; {ELSE}")
    begin, end = spans[-1]
    if not re.search(rf"(?:{special.pattern})\s*$", upto[begin:end]):
        token = conversation.tokenizer.eos_token
        found = special.match(upto[end:].lstrip())
        if found:
            token = found[0]
        remedy = "put what ends a turn in it"
        raise ValueError(f"the chat template's {{% generation %}} ends before {token}: {remedy}")
    return [(upto[:begin], upto[begin:end]) for begin, end in spans]


# ---- ids


def shared_size(before, ids, tokenizer):
    """How many ids of a row a later prompt begins with: all, or up to one of the tokens that end it."""
    size = len(before)
    if ids[:size] == before:
        return size
    special = special_ids(tokenizer)
    while size and (before[size - 1] not in special or ids[:size] != before[:size]):
        size -= 1
    rest = [i for i in before[size:] if i not in special]
    if tokenizer.decode(rest).strip():
        return 0
    return size


def ids_after(prompt, text, tokenizer):
    """Ids of a text that follows a prompt's ids, as a sampler writes it: decoded, prompt and text.

    Tokenised alone a text may begin with a space (SentencePiece), and together a token may lie across the
    place. Special tokens part a text, so the prompt's last one and what follows it are enough.
    """
    tokenizer = text_only(tokenizer)
    starts = [match.start() for match in special_tokens(tokenizer).finditer(prompt)]
    end = prompt[max(starts, default=0) :]
    given, whole = ids_of([end, end + text], tokenizer)
    if whole[: len(given)] == given:
        return whole[len(given) :]
    for before in (end[-1:], "\n", ":", "x", tokenizer.eos_token):
        alone, whole = ids_of([before, before + text], tokenizer)
        found = whole[len(alone) :]
        decoded = tokenizer.decode(given + found)
        if whole[: len(alone)] == alone and decoded == tokenizer.decode(given) + text:
            return found
    return ids_of([text], tokenizer)[0]


def ids_of(texts, tokenizer):
    """Ids of each text: what a template wrote has its BOS."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def answer_ids(prompt_ids, answer, tokenizer):
    """Ids of an answer to a prompt, with EOS; ValueError if it says the token of a picture."""
    decode = text_only(tokenizer)
    end = decode.decode(prompt_ids[-20:])
    ids = ids_after(end, answer_after(end, answer), tokenizer)
    shown = set(ids).intersection(getattr(tokenizer, "image_ids", ()))
    if shown:
        token = decode.convert_ids_to_tokens(min(shown))
        raise ValueError(f"the answer says {token}, which stands for a picture: write it otherwise")
    return [*ids, tokenizer.eos_token_id]


@cache
def special_ids(tokenizer):
    """Ids of the special tokens, EOS among them."""
    tokenizer = text_only(tokenizer)
    ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return ids | {tokenizer.eos_token_id}


def stops(ids, trained, tokenizer):
    """The tokens that end the trained turns of a row: the last special token of each."""
    special = special_ids(tokenizer)
    found = set()
    last = None
    for token, on in zip(ids, trained):
        if not on:
            found.add(last)
            last = None
        elif token in special:
            last = token
    found.add(last)
    return found - {None}
