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
from operator import itemgetter

from data_prep.lib.marks import MARKED, in_marks, tried
from data_prep.lib.replies import MARK_OF_THOUGHT, THOUGHTS, answer_after
from data_prep.lib.special import special_tokens
from data_prep.lib.templates import Talk

ELSE = "take a model whose template shows it, or another by --chat_template"


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


@lru_cache(10000)
def place(kinds, *about):
    """Of the last turn, with marks in the place of what is said: where it begins, and after which prompt.

    None: it is not shown in full there, or a thought twice. And what the template writes around it.
    """
    message, marks = in_marks(len(kinds) - 1, kinds[-1])
    prompt = tried(kinds[:-1], *about, True)[1] or ""
    history = tried(kinds[:-1], *about, False)[1] or ""
    upto = tried(kinds, *about, False)[1]
    if upto is None:  # the template takes no marks
        return "prompt", 1, "", ""
    shown = [mark for mark in marks if mark in upto]
    first = min((upto.find(mark) for mark in shown), default=len(upto))
    last = max((upto.find(mark) + len(mark) for mark in shown), default=len(upto))
    number = 1
    generation = prompt.removeprefix(history)
    nearest = upto.rfind(generation, 0, first)
    if nearest >= 0:
        number = upto.count(generation, nearest)

    where, text = find_turn(prompt, upto, lambda: history, number)
    if where and not all(mark in text for mark in marks):
        where = None
    for closing in THOUGHTS.values():
        if where and text.count(closing) > max(1, message["content"].count(closing)):
            where = None
    return where, number, upto[:first].removeprefix(prompt), upto[last:]


def own_text(message, i, prompt, template):
    """The text of a turn that the template does not show as it was said."""
    said = message["content"]
    thought = message.get("reasoning_content")
    opening = next((x for x in THOUGHTS if THOUGHTS[x] in template), None)
    if message.get("tool_calls") or (thought and not opening):
        what = "its reasoning" if thought else "what it says beside its calls of tools"
        raise ValueError(f"the chat template leaves out of message {i} {what}; {ELSE}")
    if thought:
        said = f"{opening}\n{thought}\n{THOUGHTS[opening]}\n\n{said}"
    return answer_after(prompt, said)


def turn(talk, i):
    """Prompt and text of turn i, which ends behind EOS, or the last special token; if it has none: EOS."""
    prompt, text = whole_turn(talk, i)
    special = special_tokens(talk.tokenizer)
    eos_token = talk.tokenizer.eos_token
    last = re.search(rf"(?:(?:{special.pattern})\s*)*$", text).start()
    ends = [match.end() for match in special.finditer(text, last)]
    if not ends:
        return prompt, (text.rpartition(eos_token)[0] or text) + eos_token
    for end in ends:
        if text.endswith(eos_token, 0, end):
            return prompt, text[:end]
    return prompt, text[: ends[-1]]


def whole_turn(talk, i):
    """Prompt and text of turn i, with all that the template writes after it."""
    message = talk.messages[i]
    special = special_tokens(talk.tokenizer)
    template = str(talk.tokenizer.chat_template)
    plain = not message.keys() & {"tool_calls", "reasoning_content"}
    as_written = plain and special.search(message["content"])  # by a model, with special tokens: gpt-oss
    own = MARK_OF_THOUGHT.search(template)  # else it may have other marks for the thoughts of the data
    for apart in (False, True) if own else (True, False):
        said = talk.apart if apart else talk
        prompt = said.text(i, True)
        where, number, begun, end = place(said.kinds[: i + 1], *said.about)
        if as_written and special.search(MARK_OF_THOUGHT.sub("", begun)):
            return prompt, message["content"] + end
        answer_after(prompt, message["content"])  # ValueError for a thought that cannot be there
        history = partial(said.text, i, False)
        found, text = find_turn(prompt, said.text(i + 1, False), history, number)
        shown = found and found == where
        now = said.messages[i]
        if now.get("reasoning_content") and MARK_OF_THOUGHT.search(now["content"]) and (own or shown):
            raise ValueError(f"message {i} has a thought in its content and another in a field: keep one")
        if shown:
            return prompt, text
    prompt = talk.text(i, True)
    *_, end = place(talk.kinds[: i + 1], *talk.about)
    return prompt, own_text(message, i, prompt, template) + end


def marked_turn(talk, i):
    """[(text before, text)] of each part of turn i that a template marks by {% generation %}."""
    special = special_tokens(talk.tokenizer)
    before = len(talk.marked(i, False)[2])  # marked parts of the turns before
    upto, spans = talk.written(i + 1, False)
    spans = [(begin, end) for begin, end in spans[before:] if upto[begin:end].strip()]
    if not spans:
        raise ValueError("the chat template marks nothing by {% generation %}: put it around the turns")

    _, text, own = talk.marked(i + 1, False)
    if text:  # of marks in the place of what is said
        trained = "".join(text[begin:end] for begin, end in own[before:])
        for mark, what in in_marks(i, talk.kinds[i])[1].items():
            if mark not in trained:
                raise ValueError(f"the chat template leaves out {what}; {ELSE}")
    begin, end = spans[-1]
    if not re.search(rf"(?:{special.pattern})\s*$", upto[begin:end]):
        found = special.match(upto[end:].lstrip())
        token = found[0] if found else talk.tokenizer.eos_token
        remedy = "put what ends a turn in it"
        raise ValueError(f"the chat template's {{% generation %}} ends before {token}: {remedy}")
    return [(upto[:begin], upto[begin:end]) for begin, end in spans]


def trained_turns(messages, first=0):
    """Numbers of the turns of the assistant that are trained."""
    turns = [i for i, x in enumerate(messages) if x["role"] == "assistant" and x.get("train", True)]
    if turns and turns[0] == 0 and first == 0:
        remedy = "drop it, or say that it is not trained by 'train': false"
        raise ValueError(f"message 0 is a turn of the assistant, before which nobody has spoken: {remedy}")
    return [i for i in turns if i >= first]


def encode_messages(messages, tokenizer, tools=None, first=0):
    """-> (ids, which are trained) of each row of a conversation, as few as can be.

    A turn is trained after the ids that a sampler is given: those of its prompt's text alone. A template that
    leaves thoughts out of the history needs a row for each turn. first: the first message that is trained.
    """
    wanted = trained_turns(messages, first)
    if hasattr(tokenizer, "image_processor"):
        raise ValueError("a model that takes images reads prompts and completions, no conversations")
    talk = Talk(messages, tokenizer, tools)
    pairs = []
    for i in wanted:
        if MARKED.search(str(tokenizer.chat_template)):
            pairs += marked_turn(talk, i)
        else:
            pairs.append(turn(talk, i))
    if not pairs:
        return []

    rows = []
    prompts = ids_of([prompt for prompt, _ in pairs], tokenizer)
    for ids, (prompt, text) in zip(prompts, pairs):
        trained = []
        size = shared(rows[-1][0], ids, tokenizer) if rows else 0
        if size:
            trained = rows.pop()[1][:size]
        response = ids_after(prompt, text, tokenizer)
        trained += [False] * (len(ids) - size) + [True] * len(response)
        rows.append((ids + response, trained))
    return rows


def shared(before, ids, tokenizer):
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
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor of images
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
    text_only = getattr(tokenizer, "tokenizer", tokenizer)
    end = text_only.decode(prompt_ids[-20:])
    ids = ids_after(end, answer_after(end, answer), tokenizer)
    shown = set(ids).intersection(getattr(tokenizer, "image_ids", ()))
    if shown:
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
    special = special_ids(tokenizer)
    found = set()
    for on, run in groupby(zip(ids, trained), key=itemgetter(1)):
        ends = [token for token, _ in run if token in special]
        if on and ends:
            found.add(ends[-1])
    return found


def check_scored(messages, first, tokenizer, tools):
    """ValueError if turns from `first` on, scored with their conversation, are not shown in full."""
    _, text, _ = Talk(messages, tokenizer, tools).marked(None, False)
    for i, message in enumerate(messages[first:], first):
        if not message.get("train", True):
            raise ValueError("a turn is not to be trained, and a reward model scores whole conversations")
        mark = f"zq{i}reasoning_contentz"
        if message.get("reasoning_content") and text and mark not in text:
            raise ValueError(f"the chat template leaves out of message {i} its reasoning; {ELSE}")


def says_nothing(reply):
    """Whether an answer, a string or messages, has an empty turn of the assistant: it would train silence."""
    if isinstance(reply, str):
        return not reply.strip()
    if not isinstance(reply, list) or not all(isinstance(message, dict) for message in reply):
        raise ValueError(f"an answer must be a string or messages, not {reply!r:.60}")
    for message in reply:
        if message.get("role") != "assistant" or not message.get("train", True):
            continue
        if not (message["content"].strip() or message.keys() & {"tool_calls", "reasoning_content"}):
            return True
    return False
