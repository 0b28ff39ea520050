"""How the rows of a step become batches: dealt to ranks, cut into micro-batches, laid out, run and padded.

A row is a dict of one response. Its keys: the table in CONTRIBUTING.md.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from heapq import heapreplace
from itertools import chain, groupby
from operator import itemgetter

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from data_prep.lib.images import show_images
from system.arguments import fail
from system.gpu import send
from system.ranks import all_reduce


def balance(lengths, ranks):
    """Deal rows to ranks, about the same number of tokens to each -> lists of row numbers.

    Longest first to the lightest rank: lengths 5 4 3 3 over two ranks -> [0, 3] and [1, 2].
    """
    parts = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, lightest = load[0]
        parts[lightest].append(i)
        heapreplace(load, (tokens + lengths[i], lightest))
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


@dataclass(eq=False)
class Segment:
    """A part of a row: a whole text, a prompt that responses share, or a response to such a prompt."""

    ids: torch.Tensor
    prompt: "Segment | None" = None  # of a response
    seen: torch.Tensor | None = None  # positions in the row of the prompt and of itself


def one_row(prompts, responses):
    """As `padded`, but all in one row without padding; neighbours with the same prompt share it.

    Segments of one shape are neighbours. Prompt a b, responses c d, e: segments a b, e, c d at positions
    0 1, 2, 2 3; e sees a b e.
    """
    segments = []
    texts = []  # of each response: the segment that ends with it, and its length
    for prompt, same in groupby(zip(prompts, responses), key=lambda text: list(text[0])):
        answers = [response for _, response in same]
        shared = None
        if len(answers) > 1:
            shared = Segment(prompt)
            segments.append(shared)
        for answer in answers:
            segment = Segment(answer, shared) if shared else Segment(join([prompt, answer]))
            segments.append(segment)
            texts.append((segment, len(answer)))

    # prompts come before the responses that see them
    segments.sort(key=lambda x: (len(x.prompt.ids) if x.prompt else 0, len(x.ids)))
    start = 0
    for segment in segments:
        end = start + len(segment.ids)
        segment.seen = torch.arange(start, end)
        if segment.prompt:
            segment.seen = torch.cat([segment.prompt.seen, segment.seen])
        start = end

    shapes = [(len(segment.ids), len(segment.seen)) for segment in segments]
    positions = [torch.arange(keys - queries, keys) for queries, keys in shapes]
    inputs = dict(
        input_ids=join([segment.ids for segment in segments])[None],
        position_ids=torch.cat(positions)[None],
        kv_index=torch.cat([segment.seen for segment in segments]),
        shapes=np.array(shapes),  # CAREFUL: FSDP would walk through a list in every layer
        longest=tuple(map(max, zip(*shapes))),
        cu_seqlens=torch.tensor([(0, 0), *shapes]).cumsum(0).int().t().contiguous(),
    )
    where = [segment.seen[-length - 1 : -1] for segment, length in texts]
    return inputs, torch.cat(where)


def distribute(rows, steps, budget, packed, sharing=1):
    """Deal the rows of each optimizer step to the ranks, balanced by tokens.

    rows: of all ranks, those to one prompt next to each other. steps: number of optimizer steps, over which
    the groups are spread; there is a group for each. budget: tokens of a micro-batch. sharing: ranks that
    share a row.

    A sequence is a row, or packed rows that share their prompt, up to a quarter of a micro-batch: longer
    ones would leave them half empty. Returns this rank's sequences for each optimizer step, with the
    (tokens, responses) of all ranks; this rank's rows; and the number of tokens of every rank.
    Rows with a true `no_grad` are left out; the totals count them.
    """
    columns_of(rows)
    rank = dist.get_rank() // sharing
    ranks = dist.get_world_size() // sharing
    longest = budget // 4 if packed else 0
    mini_batches = []
    own_rows = []
    load = [0] * ranks
    groups = [list(group) for _, group in groupby(rows, key=itemgetter("group"))]
    steps = min(steps, len(groups))
    for step in range(steps):
        step_groups = groups[len(groups) * step // steps : len(groups) * (step + 1) // steps]
        step_rows = list(chain(*step_groups))
        sequences = []
        for group in step_groups:
            sequence = []
            for row in group:
                if sequence and token_count([*sequence, row]) > longest:
                    sequences.append(sequence)
                    sequence = []
                sequence.append(row)
            sequences.append(sequence)

        # one stays for `check_sampler` where no row has a gradient
        trained = [x for x in sequences if not all(row.get("no_grad") for row in x)]
        sequences = trained or sequences[:1]
        lengths = [token_count(sequence) for sequence in sequences]
        parts = balance(lengths, ranks)
        for i, part in enumerate(parts):
            load[i] += sum(lengths[k] for k in part)
        own = [sequences[i] for i in parts[rank]]
        own_rows += chain(*own)

        tokens = [int(row["mask_t"].sum()) for row in step_rows]
        responses = sum(n > 0 for n in tokens)
        mini_batches.append((own, (sum(tokens), responses)))
    return mini_batches, own_rows, load


def token_count(sequence):
    """Tokens of rows that share their prompt."""
    return sequence[0]["prompt_length"] + sum(row["length"] for row in sequence)


def on_every_rank(model, batches):
    """This rank's micro-batches, and empty ones after them: every rank has as many."""
    # CAREFUL: forward and backward are collectives; a rank that ran fewer would hang the others
    [largest] = all_reduce([max(len(batches), 1)], dist.ReduceOp.MAX)
    for number in range(int(largest)):
        model.set_requires_all_reduce(number == largest - 1)  # over the replicas of HSDP
        yield batches[number] if number < len(batches) else []


def micro_batches(policy, sequences, budget):
    """Cut sequences into micro-batches of at most `budget` tokens per rank -> the rows of each."""
    lengths = [token_count(sequence) for sequence in sequences]
    batches = split_micro_batches(lengths, budget * policy.ranks, policy.packed)
    for batch in on_every_rank(policy, batches):
        yield [row for i in batch for row in sequences[i]]


def run_rows(model, rows, temperature=1.0, **more):
    """A model's forward over the responses of rows -> its columns, one response after the other; lengths.

    more: what the forward takes besides.
    """
    layout = one_row if model.packed else padded
    texts = [(row["prompt_ids"], row["response_ids"]) for row in rows]
    if model.processor:
        texts = [(*text, row.get("images", ())) for text, row in zip(texts, rows)]
        layout, texts = show_images(layout, texts, model.processor)
    texts = texts or [([0], [0])]  # a dummy: forward and backward are collectives
    prompts = [text[0] for text in texts]
    responses = [text[1] for text in texts]
    inputs, where = layout(prompts, responses)
    inputs = {name: send(x) for name, x in inputs.items()}
    columns = model(send(where), send(join(responses)), temperature, **inputs, **more)
    return columns, [len(response) for response in responses]


def token_logps(policy, rows, temperature=1.0, **more):
    """Columns [N, T] of the response tokens of rows, 0 after a response's end; see `run_rows`.

    logp_nt: log-probs of the tokens.
    entropy_nt: entropy of the distributions that predict them.
    A critic has values in their place.
    """
    columns, lengths = run_rows(policy, rows, temperature, **more)
    return [pad(column.split(lengths))[: len(rows)] for column in columns]


@torch.no_grad()
def layout_gap(policy, rows):
    """Mean |difference| of the log-probs of short rows, in the layout that trains, from the model's own.

    The model's own are those of its logits, row by row under eager attention. rows: equal on all ranks.
    """
    lm = policy.lm
    logp_nt = token_logps(policy, rows)[0]
    kernel = lm.config._attn_implementation
    lm.set_attn_implementation("eager")
    policy.unshard()
    own = []
    for row in rows:
        ids = send(torch.tensor([row["prompt_ids"] + row["response_ids"]]))
        logits = lm(input_ids=ids, use_cache=False).logits[0].float()
        logits[:, list(policy.never)] = -1e4
        logp = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        own.append(logp[len(row["prompt_ids"]) - 1 :])
    policy.reshard()
    lm.set_attn_implementation(kernel)
    tokens = sum(len(row["response_ids"]) for row in rows)
    gap = (logp_nt - pad(own)).abs().sum() / tokens
    return all_reduce([gap / dist.get_world_size()])[0]


@torch.no_grad()
def store_logps(policy, mini_batches, name, temperature, budget):
    """Store the log-probs of this rank's rows under `name`."""
    sequences = [sequence for sequences, _ in mini_batches for sequence in sequences]
    for rows in micro_batches(policy, sequences, budget):
        logp_nt = token_logps(policy, rows, temperature)[0]
        for row, logp_t in zip(rows, logp_nt):
            row[name] = logp_t[: row["length"]]


def columns_of(rows):
    """Names of what rows have per token (ending in _t); stops where some rows have it and others do not."""
    names = set().union(*rows)
    columns = sorted(name for name in names if name.endswith("_t"))
    for name in columns:
        having = sum(name in row for row in rows)
        if having < len(rows):
            fail(f"{having} of {len(rows)} rows have {name}: give it to all rows of a step, or to none")
    return columns


def collate(rows, device):
    """A batch of rows: adv_t of each row -> adv_nt, padded, and so for all that is per token."""
    if not rows:
        return defaultdict(lambda: torch.zeros(0, 1, device=device))  # all columns are empty
    batch = {}
    for name in columns_of(rows):
        column = pad([row[name] for row in rows])
        batch[f"{name[:-1]}nt"] = send(column, device)
    return batch
