"""Attention in a simulation: the memory of the kernel that a GPU would run.

On tensors without memory ``scaled_dot_product_attention`` takes the path of this machine's processor. A flash kernel on
a GPU keeps the output and one number a query and head, and its backward needs float32 sums of the query's gradient and
whole copies of keys' and values' gradients where heads are shared (FlashAttention-2, arXiv 2307.08691, and PyTorch's
call of it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeAnswers", "gpu_attention"]


@contextmanager
def gpu_attention() -> Iterator[None]:
    """Answer ``scaled_dot_product_attention`` with shapes and memory of a flash kernel, and without values."""
    # Not a mode of torch functions: those rest in backward, where recompute calls attention again.
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention):
        yield


class FakeAnswers(TorchDispatchMode):
    """What tensors without memory cannot answer by themselves.

    Products by groups (of experts' tokens) in any dtype: PyTorch infers their shapes for bfloat16 alone. And a fraction
    that a step reads, such as ``loss.item()`` for a log: 1. Shapes follow from integers, which stay unknown.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return func(*args, **kwargs)
        first, second, *rest = args
        like = func(first.bfloat16(), second.bfloat16(), *rest, **kwargs)
        return torch.empty_strided(like.shape, like.stride(), dtype=first.dtype, device=like.device)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    output: Tensor = _FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output


class _FlashAttention(torch.autograd.Function):
    """Query ``[B, H, T, D]``, key ``[B, Hkv, T, D]``, value ``[B, Hkv, T, Dv]`` to ``[B, H, T, Dv]``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if value.shape[3] == query.shape[3]:
            # By its name, which recompute that keeps attention's outputs knows it by.
            output, sums = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[:2]
        else:
            output = _like(query, (*query.shape[:3], value.shape[3]))
            sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, sums)
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, sums = ctx.saved_tensors
        heads = query.shape[1]
        gradient, dots = grads[0].contiguous(), torch.empty_like(sums)
        totals = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        for_query = _like(query, tuple(query.shape))
        wide = [_like(part, (part.shape[0], heads, *part.shape[2:])) for part in (key, value)]
        del totals, dots, gradient
        if key.shape[1] == heads:
            return for_query, wide[0], wide[1]
        return for_query, _like(key, tuple(key.shape)), _like(value, tuple(value.shape))


def _like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    # Kernels take and give [B, T, H, D]; the caller sees it transposed.
    batch, heads, tokens, width = shape
    return torch.empty(batch, tokens, heads, width, dtype=tensor.dtype, device=tensor.device).transpose(1, 2)
