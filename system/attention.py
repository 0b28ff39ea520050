"""Attention of rows that hold several texts, and layers that carry a state along such a row.

The layout of the row, `one_row` of batches.py, says where each text begins and what it sees.
"""

from functools import partial
from itertools import groupby, pairwise

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from system import families


def packed_attention(module, query, key, value, mask, scaling, kv_index, shapes, longest, cu_seqlens, **more):
    """Attention as transformers calls it, for `one_row`: query [1, H, T, D] -> [1, T, H, D].

    kv_index: positions that each segment sees, one segment after the other. shapes: (queries, keys) of
    each segment; its last query sees its last key. cu_seqlens, longest: their sums and maxima.
    """
    from torch.nn.attention.varlen import varlen_attn

    window = more.get("sliding_window")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    if len(kv_index) > len(key):  # shared prompts; indexing is slow in backward
        key = key.index_select(0, kv_index)
        value = value.index_select(0, kv_index)
    size = query.shape[-1]
    size_v = value.shape[-1]
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


def segment_attention(query, key, value, shapes, scaling, window=None):
    """Causal SDPA in each segment, to the last `window` keys: [T, H, D], twice [S, KV, D] -> [T, H, D]."""
    dtype = query.dtype
    if not query.is_cuda:  # a CPU's backward pass is slow in bfloat16
        query = query.float()
        key = key.float()
        value = value.float()
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
        mixer.shapes = named.get("shapes")
        mixer.kv_index = named.get("kv_index")
        mixer.cu_seqlens = named.get("cu_seqlens")
    return run(*inputs, **named)


def each_text(mixer, run, hidden_states, *inputs, **named):
    """Hidden states [1, T, H] of a row as `one_row` lays it out -> those after a layer with a state.

    A call has whole texts padded on the right, none twice as long as another, and at most twice the tokens of
    the row. Where all have more, as each brings the prompt that it shares, the backward pass repeats them.
    """
    if mixer.shapes is None:
        return run(hidden_states, *inputs, **named)
    row = hidden_states[0]
    most = 2 * len(row)
    call = partial(run_texts, run)
    if len(mixer.kv_index) > most:  # texts bring the prompts that they share
        call = partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)

    lengths = mixer.shapes[:, 1]
    starts = [0]  # of the calls
    for i in range(1, len(lengths)):
        together = lengths[starts[-1] : i + 1]
        if together.max() > 2 * together.min() or together.max() * len(together) > most:
            starts.append(i)

    kv_index = mixer.kv_index
    outputs = []
    for first, last in pairwise([*starts, len(lengths)]):
        columns = torch.arange(lengths[first:last].max(), device=kv_index.device)
        places = mixer.cu_seqlens[1, first:last, None] + columns
        # the padding of a text is what follows it in the row: nothing in the text sees it
        index = kv_index[places.clamp(max=len(kv_index) - 1)]
        outputs.append(call(row, index, mixer.shapes[first:last]))
    return torch.cat(outputs)[None]


def run_texts(run, row, index, shapes):
    """What a layer makes of texts; index: places of their tokens in the row, [texts, longest]."""
    out = run(row.index_select(0, index.flatten()).unflatten(0, index.shape))
    own = [text[keys - queries : keys] for text, (queries, keys) in zip(out, shapes.tolist())]
    return torch.cat(own)
