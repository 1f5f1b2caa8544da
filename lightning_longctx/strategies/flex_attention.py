"""The core on FlexAttention: one compiled kernel with a mask of documents, causality and window.

GPUs only: on a CPU FlexAttention has no backward. The block mask is made once a row and kept with the row's bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.batch import PackedSequence

__all__ = ["FlexAttention", "document_mask"]


class FlexAttention:
    """``flex_attention``, compiled; only used when it is asked for by name."""

    def refuses(self, query: Tensor, value: Tensor, window: int | None) -> str | None:
        """CPUs: there is no backward."""
        return None if query.is_cuda else "FlexAttention has no backward on a CPU"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequence, scale: float, window: int | None
    ) -> Tensor:
        """Attend; see :class:`~lightning_longctx.strategies.attention.AttentionCore`."""
        # [T, heads, D] -> [1, heads, T, D]
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        attend = _function("flex_attention", query.is_cuda)
        out: Tensor = attend(
            query,
            key,
            value,
            block_mask=_block_mask(packed, window, query),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


def document_mask(cu_seqlens: Tensor, tokens: int, window: int | None) -> Callable[..., Tensor]:
    """The rule who sees whom, in the form that FlexAttention takes.

    Args:
        cu_seqlens: int32 ``[D+1]``.
        tokens: of the row.
        window: see :class:`~lightning_longctx.strategies.attention.AttentionCore`.

    Returns:
        A function of (batch, head, query, key) indices that gives booleans.
    """
    places = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.bucketize(places, cu_seqlens[1:], right=True)  # [T]

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed: Tensor = (document[query] == document[key]) & (key <= query)
        return allowed if window is None else allowed & (query - key < window)

    return sees


def _block_mask(packed: PackedSequence, window: int | None, query: Tensor) -> Any:
    key = ("flex", window, query.device)
    derived = {} if packed.host is None else packed.host.derived
    if key not in derived:
        rule, tokens = document_mask(packed.cu_seqlens, query.shape[2], window), query.shape[2]
        make = _function("create_block_mask", query.is_cuda)  # compiled, or a mask of T x T booleans would exist
        derived[key] = make(rule, None, None, tokens, tokens, device=query.device)
    return derived[key]


@lru_cache(maxsize=4)
def _function(name: str, compiled: bool) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module("torch.nn.attention.flex_attention"), name)
    return torch.compile(function, dynamic=True) if compiled else function
