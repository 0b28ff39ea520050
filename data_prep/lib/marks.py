"""What a chat template marks as trained by {% generation %}, and the tokens that end a turn."""

from itertools import groupby

from data_prep.lib.templates import shown


def marked(messages, tokenizer, tools, wanted):
    """Ids of a conversation, and transformers' mask of them; of some turns only: the runs of these."""
    how = dict(tools=tools or None, return_dict=True, return_assistant_tokens_mask=True)
    encoded = tokenizer.apply_chat_template(shown(messages, tokenizer, tools, prompted=False), **how)
    ids, mask = encoded["input_ids"], [bool(x) for x in encoded["assistant_masks"]]
    check_marks(ids, mask, tokenizer)
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if wanted != spoken:
        found = runs(mask)
        if len(found) != len(spoken):
            raise ValueError(f"the chat template marks {len(found)} turns of {len(spoken)}: all or none")
        kept = {j for i, run in zip(spoken, found) if i in wanted for j in run}
        mask = [j in kept for j in range(len(mask))]
    return ids, mask


def runs(mask):
    """The places of each run of True."""
    return [[*run] for on, run in groupby(range(len(mask)), key=mask.__getitem__) if on]


def check_marks(ids, mask, tokenizer):
    """ValueError if a template marks no turn, or no end of one: a model would learn to go on."""
    if True not in mask:
        raise ValueError("the chat template marks nothing by {% generation %}: put it around the turns")
    end, special = len(mask) - mask[::-1].index(True), special_ids(tokenizer)
    if special.isdisjoint(x for x, on in zip(ids[:end][-3:], mask[:end][-3:]) if on):  # "\n" may follow it
        token = next((x for x in ids[end : end + 2] if x in special), tokenizer.eos_token_id)
        token = tokenizer.convert_ids_to_tokens(token)
        raise ValueError(
            f"the chat template's {{% generation %}} ends before {token}: put what ends a turn in it"
        )


def special_ids(tokenizer):
    """Ids of the special tokens, EOS among them."""
    text = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor of images
    return {i for i, x in text.added_tokens_decoder.items() if x.special} | {text.eos_token_id}


def stops(ids, trained, tokenizer):
    """The tokens that end the trained turns of a row: the last special token of each."""
    special = special_ids(tokenizer)
    last = [[ids[j] for j in run if ids[j] in special][-1:] for run in runs(trained)]
    return {*sum(last, [])}
