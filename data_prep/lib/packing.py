"""How rows of tokens become a batch: dealt to ranks and micro-batches, padded, or packed in one row.

The attention of packed rows, and layers that carry a state along the row, know where each text ends.
"""

from bisect import bisect_left, insort
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from system import families


def balance(lengths, ranks):
    """Deal rows to ranks, about the same number of tokens to each -> lists of row numbers.

    Longest first to the lightest rank: lengths 5 4 3 3 over two ranks -> [0, 3] and [1, 2].
    """
    parts = [[] for _ in range(ranks)]
    load = [0] * ranks
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        lightest = load.index(min(load))
        parts[lightest].append(i)
        load[lightest] += lengths[i]
    return parts


def split_micro_batches(lengths, budget, one_row):
    """Split rows into micro-batches of at most `budget` tokens, padding included -> lists of row numbers.

    Longest first, each into the fullest that has room (best fit): lengths 6 5 5 4, budget 10 -> 6 4, 5 5.
    Padded to its longest row, a micro-batch has room for budget // longest rows: 6, 5 5, 4.
    """
    batches, room = [], []  # room: what each micro-batch can still take, and its number, sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        cost, size = (lengths[i], budget) if one_row else (1, budget // max(lengths[i], 1))
        found = bisect_left(room, (cost,))
        if found == len(room):
            batches.append([])
            room.append((max(size, cost), len(batches) - 1))
        left, number = room.pop(found)
        batches[number].append(i)
        insort(room, (left - cost, number))
    return batches


def join(parts):
    """Token ids of several lists or arrays as one tensor."""
    return torch.cat([torch.as_tensor(part) for part in parts]).long()


def pad(rows):
    """Rows of numbers as a tensor [rows, longest], with zeros after the shorter ones."""
    return nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)


def padded(prompts, responses):
    """Model inputs with a text a row, padded on the right, and the positions that predict responses.

    Causal attention never looks at padding on the right. Positions are flat: row * width + column.
    """
    input_ids = pad([join(text) for text in zip(prompts, responses)])
    where = []
    # labels are shifted against logits in layouts and nowhere else: position p - 1 predicts token p
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        first = row * input_ids.shape[1] + len(prompt) - 1
        where.append(torch.arange(first, first + len(response)))
    return dict(input_ids=input_ids), torch.cat(where)


def one_row(prompts, responses):
    """As `padded`, but all in one row without padding; neighbours with the same prompt share it.

    A segment of the row is a whole text, a shared prompt, or one response to it. Segments of one shape
    are neighbours. Prompt a b, responses c d, e: segments a b, e, c d at positions 0 1, 2, 2 3; e sees a b e.
    """
    segments = []  # token ids, how many tokens of another segment they see first, which segment
    texts = []  # for each response: its segment, and the length of its prompt
    for prompt, same in groupby(zip(prompts, responses), key=lambda text: list(text[0])):
        answers = [response for _, response in same]
        root = len(segments)
        if len(answers) == 1:
            segments.append((join([prompt, answers[0]]), 0, root))
        else:
            segments.append((prompt, 0, root))
            segments += [(answer, len(prompt), root) for answer in answers]
        texts += [(i, len(prompt)) for i in range(len(segments) - len(answers), len(segments))]
    order = sorted(range(len(segments)), key=lambda i: (segments[i][1], len(segments[i][0])))
    ids = [segments[i][0] for i in order]
    spans = dict(zip(order, torch.arange(sum(map(len, ids))).split([len(x) for x in ids])))
    kv_index, shapes = {}, []
    for i in order:
        part, before, root = segments[i]
        kv_index[i] = torch.cat([spans[root][:before], spans[i]])
        shapes.append((len(part), before + len(part)))
    inputs = dict(
        input_ids=join(ids)[None],
        position_ids=torch.cat([torch.arange(s - t, s) for t, s in shapes])[None],
        kv_index=torch.cat([*kv_index.values()]),
        shapes=np.array(shapes),  # CAREFUL: FSDP would walk through a list in every layer
        longest=tuple(map(max, zip(*shapes))),
        cu_seqlens=torch.tensor([(0, 0), *shapes]).cumsum(0).int().t().contiguous(),
    )
    return inputs, torch.cat([kv_index[i][length - 1 : -1] for i, length in texts])


def packed_attention(module, query, key, value, mask, scaling, kv_index, shapes, longest, cu_seqlens, **more):
    """Attention as transformers calls it, for `one_row`: query [1, H, T, D] -> [1, T, H, D].

    kv_index: positions that each segment sees, one segment after the other. shapes: (queries, keys) of
    each segment; its last query sees its last key. cu_seqlens, longest: their sums and maxima.
    """
    from torch.nn.attention.varlen import varlen_attn

    window = more.get("sliding_window")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    if len(kv_index) > len(key):  # shared prompts; indexing is slow in backward
        key, value = key.index_select(0, kv_index), value.index_select(0, kv_index)
    size, size_v = query.shape[-1], value.shape[-1]
    # flash attention has half precision, heads up to 256 by eights, and values as wide as queries
    if query.is_cuda and query.dtype != torch.float32 and size <= 256 and size % 8 == 0:
        options = dict(scale=scaling, window_size=((window or 0) - 1, 0), enable_gqa=True)
        if size_v < size:
            value = nn.functional.pad(value, (0, size - size_v))
        out = varlen_attn(query, key, value, *cu_seqlens, *longest, **options)
        out = out[..., :size_v] if size_v < size else out
    else:
        out = segment_attention(query, key, value, shapes, scaling, window)
    return out[None], None


AttentionInterface.register("packed", packed_attention)  # for attn_implementation="packed"


def segment_attention(query, key, value, shapes, scaling, window=None):
    """Causal SDPA in each segment, to the last `window` keys: [T, H, D], twice [S, KV, D] -> [T, H, D]."""
    dtype = query.dtype
    if not query.is_cuda:  # a CPU's backward pass is slow in bfloat16
        query, key, value = query.float(), key.float(), value.float()
    runs = [(len(list(same)), *shape) for shape, same in groupby(shapes.tolist())]
    keys = [n * s for n, _, s in runs]
    parts = zip(query.split([n * t for n, t, _ in runs]), key.split(keys), value.split(keys))
    outputs = []
    for (n, t, s), part in zip(runs, parts):
        part = [x.unflatten(0, (n, -1)).transpose(1, 2) for x in part]  # [n, H, t or s, D]
        options = dict(scale=scaling, enable_gqa=True, is_causal=t == s and not window)
        if not options["is_causal"]:
            at = torch.arange(s, device=query.device)
            behind = at[s - t :, None] - at
            options["attn_mask"] = (behind >= 0) & (behind < (window or s))
        out = nn.functional.scaled_dot_product_attention(*part, **options)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).to(dtype)


def states_apart(lm):
    """Let what carries a state along the row run on each text apart -> the layers that have such a thing."""
    found = []
    for layer in lm.modules() if lm.config.get_text_config().model_type in families.STATES else ():
        mixers = [m for m in layer.modules() if any(isinstance(x, nn.Conv1d) for x in m.children())]
        if isinstance(layer, GradientCheckpointingLayer) and mixers:
            found.append(layer)
            layer.forward = partial(knows_texts, mixers, layer.forward)
            for mixer in mixers:
                mixer.forward = partial(each_text, mixer, mixer.forward)
    return found


def knows_texts(mixers, run, *inputs, **named):
    """A layer's forward pass, after its mixers have the layout of the row."""
    for mixer in mixers:
        mixer.texts = [named.get(name) for name in ("shapes", "kv_index", "cu_seqlens")]
    return run(*inputs, **named)


def each_text(mixer, run, hidden_states, *inputs, **named):
    """Hidden states [1, T, H] of a row as `one_row` lays it out -> those after a layer with a state.

    A call has whole texts padded on the right, none twice as long as another, and at most twice the tokens of
    the row. Where all have more, as each brings the prompt that it shares, the backward pass repeats them.
    """
    shapes, kv_index, cu_seqlens = mixer.texts
    if shapes is None:
        return run(hidden_states, *inputs, **named)

    def call(row, index, shapes):
        out = run(row.index_select(0, index.flatten()).unflatten(0, index.shape))
        return torch.cat([x[s - t : s] for x, (t, s) in zip(out, shapes.tolist())])

    parts, first, most = [], 0, 2 * hidden_states.shape[1]
    if len(kv_index) > most:
        call = partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)
    for last in range(1, len(shapes) + 1):
        lengths = shapes[first : last + 1, 1]  # the next one's too
        if last < len(shapes) and lengths.max() <= min(2 * lengths.min(), most / len(lengths)):
            continue
        columns = torch.arange(shapes[first:last, 1].max(), device=kv_index.device)
        index = kv_index[(cu_seqlens[1, first:last, None] + columns).clamp(max=len(kv_index) - 1)]
        parts.append(call(hidden_states[0], index, shapes[first:last]))
        first = last
    return torch.cat(parts)[None]
