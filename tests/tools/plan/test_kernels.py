"""Memory of the attention kernel that stands for a GPU's, by hand."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from lightning_longctx.tools.plan.kernels import FakeAnswers, gpu_attention
from lightning_longctx.tools.plan.storages import StorageCounter

HEADS, TOKENS, WIDTH = 8, 256, 32
QUERY = 2 * HEADS * TOKENS * WIDTH  # bytes in bfloat16
SUMS = 4 * HEADS * TOKENS


@pytest.mark.parametrize(("kv_heads", "wide"), [(8, 0), (2, 2)])
def test_attention_forward_and_backward(kv_heads: int, wide: int) -> None:
    key = QUERY * kv_heads // HEADS
    counter = StorageCounter()
    with FakeTensorMode(), counter, gpu_attention():
        query, *others = (
            torch.empty(1, heads, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS, kv_heads, kv_heads)
        )
        output = functional.scaled_dot_product_attention(query, *others, is_causal=True, enable_gqa=wide > 0)
        inputs = QUERY + 2 * key
        assert output.shape == query.shape
        assert counter.total == pytest.approx(inputs + QUERY + SUMS, abs=64), "output, and a number a query and head"
        counter.mark("backward")
        gradient = torch.empty_like(output)
        output.backward(gradient)
        # float32 sums for the query, one more number a query and head, gradients, and whole ones where heads are shared
        whole = 2 * QUERY * bool(wide)
        kept = inputs + QUERY + SUMS + QUERY
        assert counter.segments[-1].peak == pytest.approx(
            kept + SUMS + QUERY + max(2 * QUERY + 2 * QUERY, whole + 2 * key), abs=64
        )
        assert [tensor.grad.shape for tensor in (query, *others)] == [tensor.shape for tensor in (query, *others)]


def test_attention_is_itself_again_afterwards() -> None:
    real = functional.scaled_dot_product_attention
    with gpu_attention():
        assert functional.scaled_dot_product_attention is not real
    assert functional.scaled_dot_product_attention is real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_groups(dtype: torch.dtype) -> None:
    with FakeTensorMode(), FakeAnswers():
        tokens, weights = torch.empty(64, 32, dtype=dtype), torch.empty(4, 32, 16, dtype=dtype)
        ends = torch.empty(4, dtype=torch.int32)
        output = torch.ops.aten._grouped_mm.default(tokens, weights, ends)
        assert (tuple(output.shape), output.dtype) == ((64, 16), dtype)
