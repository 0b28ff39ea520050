"""Rows shared by several ranks: Ulysses (2309.14509) and ring attention (2310.01889)."""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface

from system.attention import packed_attention
from system.model import TokenLogps


class Slices(TokenLogps):
    """TokenLogps of one row, of which each rank of a group computes a slice.

    attention: of transformers, for a slice; it gets the group besides what `packed_attention` gets.
    """

    def __init__(self, lm, packed, group, attention, entropy=True):
        super().__init__(lm, packed, entropy=entropy)
        self.group = group
        self.ranks = group.size()
        AttentionInterface.register("slices", partial(attention, group=group))
        lm.set_attn_implementation("slices")

    def forward(self, where, target, temperature, **inputs):
        """As TokenLogps, on every rank for the whole row; the gradient is that of this rank's slice."""
        rank = self.group.rank()
        size = self.group.size()
        tokens = inputs["input_ids"].shape[1]
        width = -(-tokens // size)
        for name in ("input_ids", "position_ids"):
            row = nn.functional.pad(inputs[name], (0, width * size - tokens))
            inputs[name] = row[:, rank * width :][:, :width]
        # labels were shifted before this cut: a slice's last position predicts what the next begins with
        own = where // width == rank
        columns = super().forward(where[own] - rank * width, target[own], temperature, **inputs)
        part = torch.stack([x.new_zeros(len(where)).masked_scatter(own, x) for x in columns])
        whole = part.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return part + (whole - part.detach())


def sequence_group(sp_size, device):
    """The group of this rank and its neighbours, which share rows."""
    shape = dist.get_world_size() // sp_size, sp_size
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
    return mesh["sequence"].get_group()


def ulysses(module, query, key, value, mask, group, **layout):
    """Trade a slice of all heads for the whole row of a few, attend, and trade back (2309.14509)."""
    size = group.size()
    tokens = int(layout["shapes"][:, 0].sum())
    row = []
    for x in (query, key, value):  # [1, H, T / size, D]
        # each rank needs a key/value head
        x = x[0].repeat_interleave(size // math.gcd(size, x.shape[1]), 0)
        # [H / size, T, D]
        x = trade(x.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)
        row.append(x[None, :, :tokens])
    out, _ = packed_attention(module, *row, mask, **layout)  # [1, T, H / size, D]
    out = nn.functional.pad(out[0], (0, 0, 0, 0, 0, -tokens % size))
    return trade(out.unflatten(0, (size, -1)), group).transpose(0, 1).flatten(1, 2)[None], None


def trade(x, group):
    """Give block i of the first axis to rank i of the group."""
    ops = dist._functional_collectives
    # CAREFUL: gloo writes into freed memory while several are on their way: one after the other
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), None, None, group))


RING_ROWS = 128  # positions whose attention scores the ring holds at the same time


def ring(module, query, key, value, mask, group, scaling, kv_index, shapes, **_):
    """Ring attention (2310.01889): no rank ever holds the keys and values of the whole row."""
    heads = query.shape[1] // key.shape[1]  # of queries to one of keys: rows of one matrix
    rows = query[0].unflatten(0, (-1, heads)).transpose(1, 2).flatten(1, 2)
    spans = visible_spans(kv_index.cpu(), shapes, key.shape[2] * group.size())
    out = Ring.apply(rows, torch.cat([key[0], value[0]], -1), spans, group, scaling)
    out = out.unflatten(1, (-1, heads)).transpose(0, 1).flatten(1, 2)  # [T / size, H, D]
    return out[None], None


def visible_spans(kv_index, shapes, tokens):
    """What each token of a row by `one_row` sees [tokens, 3]: start and end of a span, and more.

    The span is the prompt that its segment follows, or empty. The third number is where its segment
    begins: the token sees all from there up to itself. Prompt a b with responses c d and e, in the row
    a b, e, c d: 0 0 0 for a and b, 0 2 2 for e, 0 2 3 for c and d.
    """
    spans = []
    sizes = []
    start = first = 0  # of a segment, and of what it sees
    for queries, keys in shapes.tolist():
        root = kv_index[first].item()
        spans.append((root, root + keys - queries, start))
        sizes.append(queries)
        start += queries
        first += keys
    spans.append((start, start, start))  # padding
    sizes.append(tokens - start)
    return torch.tensor(spans).repeat_interleave(torch.tensor(sizes), 0)


class Ring(torch.autograd.Function):
    """query [KV, rows, D], kv [KV, T / size, 2 D]: keys next to values -> [KV, rows, D].

    Keys and values travel from rank to rank; each softmax is put together from its parts on the way.
    """

    @staticmethod
    def pass_on(x, group, hops=1):
        """Begin to send x that far around the ring -> what comes from behind when the works are done."""
        new = torch.empty_like(x)
        ranks = group.size()
        rank = group.rank()
        send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + hops) % ranks)
        receive = dist.P2POp(dist.irecv, new, group=group, group_peer=(rank - hops) % ranks)
        return new, dist.batch_isend_irecv([send, receive])

    @staticmethod
    def arrived(new, works):
        """What comes from behind, now that it is here."""
        for work in works:
            work.wait()
        return new

    @staticmethod
    def rounds(query, kv, spans, group, scaling):
        """Each slice of keys and values that passes by, this rank's first, and its blocks of scores."""
        width = kv.shape[1]
        rank = group.rank()
        # the first slice that each rank has to see
        first = [part[:, 0].min().item() // width for part in spans.split(width)]
        hops = max(i - other for i, other in enumerate(first))  # as far as any rank has to see
        for back in range(hops + 1):
            following = Ring.pass_on(kv, group) if back < hops else (kv, ())  # while this rank computes
            yield kv, Ring.blocks(query, kv, spans, scaling, rank * width, (rank - back) * width)
            kv = Ring.arrived(*following)

    @staticmethod
    def blocks(query, kv, spans, scaling, start, other):
        """Of queries from position `start` on, keys from `other` on -> rows, columns and scores."""
        width = kv.shape[1]
        heads = query.shape[1] // kv.shape[1]
        for a in range(start, start + width, RING_ROWS):
            b = min(a + RING_ROWS, start + width)
            c = max(spans[a:b, 0].min().item(), other)
            d = min(b, other + width)
            if c >= d:
                continue
            span_start, span_end, own_start = spans[a:b].to(kv.device)[..., None].unbind(1)
            token, key = (torch.arange(*x, device=kv.device) for x in ((a, b), (c, d)))
            visible = (span_start <= key) & (key < span_end)
            visible |= (own_start <= key) & (key <= token[:, None])
            rows = slice((a - start) * heads, (b - start) * heads)
            columns = slice(c - other, d - other)
            scores = (query[:, rows] @ kv[:, columns, : query.shape[-1]].mT).float() * scaling
            yield rows, columns, scores.masked_fill(~visible.repeat_interleave(heads, 0), -math.inf)

    @staticmethod
    def forward(ctx, query, kv, *row):
        size = query.shape[-1]
        # log of the sum of e^scores so far
        lse = torch.full(query.shape[:2], -math.inf, device=query.device)
        out = torch.zeros(*lse.shape, kv.shape[-1] - size, device=query.device)
        for other, blocks in Ring.rounds(query, kv, *row):
            for rows, columns, scores in blocks:
                new = torch.logaddexp(lse[:, rows], scores.logsumexp(-1))
                weights = (scores - new[..., None]).exp().to(kv.dtype)
                out[:, rows] *= (lse[:, rows] - new).exp()[..., None]
                out[:, rows] += weights @ other[:, columns, size:]  # eq: sequence.ring
                lse[:, rows] = new
        ctx.save_for_backward(query, kv, out, lse)
        ctx.row = row
        return out.to(query.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        """p the softmax: d score = p (d out . value - d out . out); d_kv travels with kv, then home."""
        query, kv, out, lse = ctx.saved_tensors
        _, group, scaling = ctx.row
        size = query.shape[-1]
        inner = (d_out * out).sum(-1, keepdim=True)
        d_query, d_kv = (torch.zeros_like(x, dtype=torch.float32) for x in (query, kv))
        for hops, (other, blocks) in enumerate(Ring.rounds(query, kv, *ctx.row)):
            if hops:
                d_kv = Ring.arrived(*Ring.pass_on(d_kv, group))
            for rows, columns, scores in blocks:
                key, value = other[:, columns].tensor_split([size], -1)
                weights = (scores - lse[:, rows, None]).exp()
                d_scores = weights * (d_out[:, rows] @ value.mT - inner[:, rows]) * scaling
                weights = weights.to(kv.dtype)
                d_scores = d_scores.to(kv.dtype)
                d_query[:, rows] += d_scores @ key
                parts = d_scores.mT @ query[:, rows], weights.mT @ d_out[:, rows]
                d_kv[:, columns] += torch.cat(parts, -1)
        if hops:
            d_kv = Ring.arrived(*Ring.pass_on(d_kv, group, -hops))
        return d_query.to(query.dtype), d_kv.to(kv.dtype), None, None, None
