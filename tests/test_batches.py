"""How rows become a batch: deals to ranks, micro-batches, layouts, and the attention of packed rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import varlen

from system import batches
from system.attention import packed_attention, segment_attention
from system.batches import balance, one_row, split_micro_batches

ARGS = SimpleNamespace(model="", train_files=(), val_files=(), temperature=0.7)  # rows without images


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 5))
def test_balance(lengths, ranks):
    parts = balance(lengths, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@pytest.mark.parametrize("packed", (False, True))
def test_micro_batches_by_hand(packed):
    """Best fit, longest first: 9 1, 4 4 2, 3; padded 9, 4 4, 3 2 1."""
    lengths = [3, 9, 1, 4, 4, 2]
    found = [[lengths[i] for i in batch] for batch in split_micro_batches(lengths, 10, packed)]
    assert found == ([[9, 1], [4, 4, 2], [3]] if packed else [[9], [4, 4], [3, 2, 1]])
    assert split_micro_batches([6, 5, 5, 4], 10, True) == [[0, 3], [1, 2]]
    assert split_micro_batches([6, 5, 5, 4], 10, False) == [[0], [1, 2], [3]]
    assert split_micro_batches([], 10, packed) == []
    assert split_micro_batches([12, 3], 10, packed) == [[0], [1]]  # a row over the budget is alone


@given(st.lists(st.integers(1, 100), max_size=60), st.booleans())
def test_every_row_is_in_one_micro_batch_within_the_budget(lengths, packed):
    batches = split_micro_batches(lengths, 100, packed)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        cost = sum(lengths[i] for i in batch) if packed else max(lengths[i] for i in batch) * len(batch)
        assert cost <= 100


def test_micro_batches_are_full_and_cost_little():
    """Within 2 % of the fewest; a row looks at as many others as a bisection does, not at all."""
    lengths = np.random.default_rng(0).integers(1, 101, 20_000).tolist()
    assert len(split_micro_batches(lengths, 100, True)) <= 1.02 * sum(lengths) / 100

    class Compared(int):
        count = 0

        def __lt__(self, other):
            Compared.count += 1
            return int(self) < int(other)

    split_micro_batches([*map(Compared, lengths)], 100, True)
    assert Compared.count < 40 * len(lengths)


def test_a_tree_by_hand():
    """Two responses to prompt 7 8, then one to 9, which is a segment with its prompt."""
    inputs, where = one_row([[7, 8], [7, 8], [9]], [[1, 2], [3], [4]])
    assert inputs["input_ids"].tolist() == [[7, 8, 9, 4, 3, 1, 2]]
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2, 2, 3]]
    assert inputs["shapes"].tolist() == [[2, 2], [2, 2], [1, 3], [2, 4]]
    assert inputs["longest"] == (2, 4)
    assert inputs["cu_seqlens"].tolist() == [[0, 2, 4, 5, 7], [0, 2, 4, 7, 11]]
    kv_index = inputs["kv_index"].split([s for _, s in inputs["shapes"]])
    assert [x.tolist() for x in kv_index] == [[0, 1], [2, 3], [0, 1, 4], [0, 1, 5, 6]]
    assert where.tolist() == [1, 5, 1, 2]  # predict 1, 2, 3 and 4


def flash(query, key, value, cu_seq_q, cu_seq_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
    """In place of varlen_attn, for GPUs: segments by their borders, the last query sees the last key."""
    sizes_q, sizes_k = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert window_size == (-1, 0) and enable_gqa and cu_seq_q.dtype == torch.int32
    assert [longest_q, longest_k] == [max(sizes_q), max(sizes_k)]
    out = []
    for q, k, v in zip(query.split(sizes_q), key.split(sizes_k), value.split(sizes_k), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        bias = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]).bool()
        options = dict(attn_mask=bias, scale=scale, enable_gqa=True)
        out.append(nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], **options)[0])
    return torch.cat([x.transpose(0, 1) for x in out])


class Gpu(torch.Tensor):
    """Says that it is one of bfloat16 on a GPU."""

    is_cuda, dtype = True, torch.bfloat16


def test_attention_in_bfloat16_is_computed_in_float32():
    """Two segments of 8 queries and 16 keys; a CPU's backward pass in bfloat16 takes over twice as long."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, heads, 32).bfloat16() for n, heads in ((16, 4), (32, 2), (32, 2)))
    out = segment_attention(query, key, value, np.array([(8, 16)] * 2), 0.2)
    wide = segment_attention(query.float(), key.float(), value.float(), np.array([(8, 16)] * 2), 0.2)
    assert out.dtype is torch.bfloat16 and wide.dtype is torch.float32
    assert torch.equal(out, wide.bfloat16())


@pytest.mark.parametrize(
    "sizes", ((20, 20), (42, 42), (64, 64), (80, 80), (96, 64), (192, 128), (256, 256), (512, 512))
)
def test_the_gpu_gets_what_its_kernel_takes(sizes, monkeypatch):
    """The checks of mha_varlen_fwd in torch's flash_api.cpp, for sizes of heads of queries and of values."""
    calls = []

    def kernel(query, key, value, *rest, scale, **options):
        assert query.shape[-1] <= 256 and query.shape[-1] % 8 == 0 and query.dtype == torch.bfloat16
        assert key.shape == value.shape and query.shape[1] % key.shape[1] == 0
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        calls.append(sizes)
        return segment_attention(query, key, value, shapes, scale)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    torch.manual_seed(0)
    shapes, index, longest = torch.tensor([[3, 3], [4, 4]]), torch.arange(7), (4, 4)
    size, size_v = sizes
    query, key = torch.randn(2, 1, 4, 7, size).bfloat16(), torch.randn(1, 2, 7, size).bfloat16()
    query, value = query[0], torch.randn(1, 2, 7, size_v).bfloat16()
    cu_seqlens = torch.tensor([[0, 3, 7]] * 2)
    out, _ = packed_attention(None, query, key, value, None, 0.1, index, shapes, longest, cu_seqlens)
    parts = (x[0].transpose(0, 1).float() for x in (query, key, value))
    torch.testing.assert_close(out[0].float(), segment_attention(*parts, shapes, 0.1), atol=0.03, rtol=0.03)
    assert bool(calls) == (size <= 256 and size % 8 == 0)


def test_every_rank_runs_as_many_micro_batches(monkeypatch):
    """Another rank has three: the third is empty here, and the last one reduces over HSDP's replicas."""
    monkeypatch.setattr(batches, "all_reduce", lambda values, op: [max(3.0, *values)])
    asked = []
    model = SimpleNamespace(set_requires_all_reduce=asked.append)
    assert list(batches.on_every_rank(model, [[0, 3], [1, 2]])) == [[0, 3], [1, 2], []]
    assert asked == [False, False, True]
    monkeypatch.setattr(batches, "all_reduce", lambda values, op: values)
    assert list(batches.on_every_rank(model, [])) == [[]]  # no rank has any: the step still runs


def make_rows():
    """Four prompts with three responses each."""
    lengths = [1, 4, 2, 3, 1, 1, 2, 2, 4, 1, 3, 4]
    rows = []
    for i, length in enumerate(lengths):
        mask_t = np.arange(length) != 1  # the second token is an environment's
        rows.append(dict(number=i, group=i // 3, prompt_length=2 + i // 3, length=length, mask_t=mask_t))
    rows[5]["mask_t"][:] = False
    return rows


def deal(monkeypatch, rows, ranks, updates=2):
    """What each rank gets."""
    monkeypatch.setattr(batches.dist, "get_world_size", lambda: ranks)
    dealt = []
    for rank in range(ranks):
        monkeypatch.setattr(batches.dist, "get_rank", lambda rank=rank: rank)
        dealt.append(batches.distribute(rows, updates, 28, packed=True))
    return dealt


def test_rows_are_dealt_once_each_in_their_own_mini_batch(monkeypatch):
    """Two ranks, two mini-batches of two prompts; 7 tokens share a sequence."""
    rows = make_rows()
    dealt = deal(monkeypatch, rows, ranks=2)
    for step, (first, second) in enumerate(zip(dealt[0][0], dealt[1][0], strict=True)):
        sequences = first[0] + second[0]
        numbers = sorted([row["number"] - 6 * step for row in sequence] for sequence in sequences)
        assert numbers == ([[0, 1], [2], [3, 4], [5]], [[i] for i in range(6)])[step]
        assert first[0] and second[0]
        assert first[1] == second[1] == [(8, 5), (11, 6)][step]  # tokens and responses that are trained
    for rank, (mini_batches, own_rows, load) in enumerate(dealt):
        sequences = [sequence for own, _ in mini_batches for sequence in own]
        assert own_rows == [row for sequence in sequences for row in sequence]
        assert load[rank] == sum(map(batches.token_count, sequences))
    assert dealt[0][2] == dealt[1][2]
    assert batches.token_count(rows[3:5]) == 3 + 3 + 1


@pytest.mark.parametrize(
    ("without", "left"), (((0,), {1, 2, 3}), ((0, 1), {0, 2, 3}), ((0, 1, 2, 3), {0, 2}))
)
def test_groups_without_a_gradient_are_left_out(monkeypatch, without, left):
    """One stays for the check of the sampler where all have none."""
    rows = [row | dict(no_grad=row["group"] in without) for row in make_rows()]
    [(mini_batches, own_rows, _)] = deal(monkeypatch, rows, ranks=1)
    assert {row["group"] for row in own_rows} == left
    assert [totals for _, totals in mini_batches] == [(8, 5), (11, 6)]  # all count
    rows = [row | dict(no_grad=row["number"] == 0) for row in rows]  # one response, at the mean
    assert len(deal(monkeypatch, rows, ranks=1)[0][1]) == 12


def test_rows_that_are_added_are_no_further_step(monkeypatch):
    """A replay of old rows: as many optimizer steps, each with more rows."""
    rows = make_rows()
    old = [row | dict(group=row["group"] + 4) for row in rows[:6]]
    [(mini_batches, own_rows, _)] = deal(monkeypatch, rows + old, ranks=1)
    assert len(mini_batches) == 2 and len(own_rows) == 18
    assert [sum(len(sequence) for sequence in own) for own, _ in mini_batches] == [9, 9]
    [(mini_batches, _, _)] = deal(monkeypatch, rows, ranks=1, updates=3)  # whole groups
    assert [sum(len(sequence) for sequence in own) for own, _ in mini_batches] == [3, 3, 6]
    [(mini_batches, _, _)] = deal(monkeypatch, rows, ranks=1, updates=9)  # no step without a row
    assert len(mini_batches) == 4


def test_a_column_that_some_rows_lack_is_one_line(monkeypatch):
    rows = make_rows()
    rows[7]["old_logp_t"] = np.zeros(2)
    line = "1 of 12 rows have old_logp_t: give it to all rows of a step, or to none"
    with pytest.raises(SystemExit, match=line):
        deal(monkeypatch, rows, ranks=1)
    with pytest.raises(SystemExit, match=line):
        batches.collate(rows, "cpu")
    assert not batches.collate([], "cpu")["anything_nt"].numel()
