"""The exchange on 2 and 4 ranks: the values of one rank, the order of replicated heads, and how many bytes it moves."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_longctx import ulysses_attention
from lightning_longctx.batch import PackedSequence
from lightning_longctx.strategies.ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads
from tests.helpers.pool import run_ranks

pytestmark = pytest.mark.distributed

TOKENS = 24
PACKED = PackedSequence(torch.tensor([0, 5, 6, 17, 24], dtype=torch.int32), 11)

#: Query heads, key/value heads, head width, value width: as many as ranks, fewer, more, and neither dividing the other.
SHAPES = [(8, 8, 4, 4), (8, 2, 4, 4), (8, 1, 4, 4), (4, 4, 4, 4), (12, 6, 4, 4), (24, 6, 2, 2), (8, 2, 4, 6)]


def whole_row(heads, kv_heads, dim, value_dim, dtype=torch.float64):
    generator = torch.Generator().manual_seed(heads + kv_heads)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)]
    return [torch.randn(1, h, TOKENS, d, generator=generator, dtype=dtype) for h, d in shapes]


def attend(parts, group=None, **options):
    """Output and gradients of q, k, v for a given gradient of the output."""
    query, key, value = (part.clone().requires_grad_() for part in parts[:3])
    out = ulysses_attention(query, key, value, PACKED, group, **options)
    out.backward(parts[3])
    return [out.detach(), query.grad, key.grad, value.grad]


def compare_all_shapes():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    part = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    worst = {}
    for shape in SHAPES:
        for window in (None, 4):
            row = whole_row(*shape)
            expected = [tensor[:, :, part] for tensor in attend(row, window=window)]
            got = attend([tensor[:, :, part] for tensor in row], dist.group.WORLD, window=window)
            errors = [float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)]
            worst[(*shape, window)] = max(errors)
    return worst


@pytest.mark.parametrize("size", [2, 4])
def test_values_and_gradients_are_those_of_one_rank(size):
    for rank in run_ranks(compare_all_shapes, size):
        assert len(rank) == 2 * len(SHAPES)
        assert {shape: error for shape, error in rank.items() if error > 1e-12} == {}


def round_trip():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    row = torch.arange(12 * 8 * 3).reshape(12, 8, 3).double()
    shard = row[rank * 12 // size : (rank + 1) * 12 // size]
    (gathered,) = gather_seq_scatter_heads([shard], dist.group.WORLD)
    mine = row[:, rank * 8 // size : (rank + 1) * 8 // size]
    back = gather_heads_scatter_seq(gathered, dist.group.WORLD)
    return torch.equal(gathered, mine) and torch.equal(back, shard)


@pytest.mark.parametrize("size", [2, 4])
def test_the_exchanges_are_each_others_inverse(size):
    assert run_ranks(round_trip, size) == [True] * size


def count_bytes(shapes, dtype, query_dtype):
    """Per shape: bytes that this rank hands to exchanges in forward and in backward, and the number of exchanges."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    part = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    sent = []
    original = dist.all_to_all_single

    def counted(output, tensor, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return original(output, tensor, **kwargs)

    seen = []
    with mock.patch.object(dist, "all_to_all_single", counted):
        for shape in shapes:
            query, key, value, grad = (tensor[:, :, part].to(dtype) for tensor in whole_row(*shape))
            query, key = (tensor.to(query_dtype).requires_grad_() for tensor in (query, key))
            value.requires_grad_()
            sent.clear()
            out = ulysses_attention(query, key, value, PACKED, dist.group.WORLD)
            forward = list(sent)
            sent.clear()
            out.backward(grad)
            seen.append((sum(forward), len(forward), sum(sent), len(sent)))
    return seen


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "query_dtype"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
def test_the_volume_is_that_of_the_theory(size, dtype, query_dtype):
    """4 x T/S x hidden x bytes for as many key/value heads as query heads, less for fewer, in the compute dtype."""
    shapes = [(8, 8, 4, 4), (8, 4, 4, 4), (8, 2, 4, 4), (8, 1, 4, 4)]
    width = dtype.itemsize
    for rank in run_ranks(count_bytes, size, shapes, dtype, query_dtype):
        assert rank[0][0] == 4 * (TOKENS // size) * (8 * 4) * width
        for (heads, kv_heads, dim, _), (forward, calls, backward, backward_calls) in zip(shapes, rank, strict=True):
            moved = max(kv_heads, size)  # replicated up to one for each rank
            assert forward == backward == 2 * (heads + moved) * (TOKENS // size) * dim * width
            assert calls == backward_calls == 2, "q, k and v go together"
