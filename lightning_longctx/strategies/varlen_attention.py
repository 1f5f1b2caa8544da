"""Cores on variable-length kernels: flash-attn's, and the one that comes with PyTorch. GPUs only, half precision only.

Both take the row as it is, with ``cu_seqlens`` on the device: one launch for all documents, and nothing is read back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.batch import PackedSequence

__all__ = ["FlashAttention", "TorchVarlenAttention"]

# What both kernels are written for.
_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = (8, 0)
_HEAD_DIM_STEP = 8
# Arguments of `varlen_attn` that this core needs; earlier releases of PyTorch lack some.
_NEEDED = {"scale", "window_size", "enable_gqa"}


class FlashAttention:
    """``flash_attn_varlen_func`` of the package flash-attn, where it is installed."""

    def refuses(self, query: Tensor, value: Tensor, window: int | None) -> str | None:
        """What the kernel cannot do, or that the package is missing."""
        missing = find_spec("flash_attn") is None
        return _refuses(query, value) or ("the package `flash-attn` is not installed" if missing else None)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequence, scale: float, window: int | None
    ) -> Tensor:
        """Attend; see :class:`~lightning_longctx.strategies.attention.AttentionCore`."""
        attend: Callable[..., Tensor] = import_module("flash_attn").flash_attn_varlen_func
        bounds, longest = packed.cu_seqlens, packed.max_seqlen
        return attend(
            *(query, key, value, bounds, bounds, longest, longest),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window),
        )


class TorchVarlenAttention:
    """``torch.nn.attention.varlen.varlen_attn``."""

    def refuses(self, query: Tensor, value: Tensor, window: int | None) -> str | None:
        """What the kernel cannot do, or that this PyTorch has no such function."""
        if (reason := _refuses(query, value)) is not None:
            return reason
        if query.shape[-1] % _HEAD_DIM_STEP:  # the package flash-attn pads them itself
            return f"the kernel takes heads whose width is a multiple of {_HEAD_DIM_STEP}"
        missing = "this release of PyTorch has no `varlen_attn` with grouped heads and windows"
        return None if _torch_varlen() is not None else missing

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequence, scale: float, window: int | None
    ) -> Tensor:
        """Attend; see :class:`~lightning_longctx.strategies.attention.AttentionCore`."""
        attend = _torch_varlen()
        assert attend is not None
        bounds, longest = packed.cu_seqlens, packed.max_seqlen
        out: Tensor = attend(
            *(query, key, value, bounds, bounds, longest, longest),
            scale=scale,
            window_size=_window(window),  # nothing to the right: causal
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out


def _window(window: int | None) -> tuple[int, int]:
    """Tokens to the left, beside the token itself, and to the right; -1 for all."""
    return (-1 if window is None else window - 1, 0)


def _refuses(query: Tensor, value: Tensor) -> str | None:
    if not query.is_cuda:
        return "the kernel needs a CUDA device"
    if query.dtype not in _DTYPES:
        return "the kernel computes in float16 or bfloat16"
    if query.shape[-1] > _MAX_HEAD_DIM or query.shape[-1] != value.shape[-1]:
        return f"the kernel takes heads of at most {_MAX_HEAD_DIM}, alike for queries and values"
    if torch.cuda.get_device_capability(query.device) < _MIN_CAPABILITY:
        return "the kernel needs compute capability 8.0"
    return None


@lru_cache(maxsize=1)
def _torch_varlen() -> Callable[..., Any] | None:
    try:
        attend: Callable[..., Any] = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return None
    return attend if inspect.signature(attend).parameters.keys() >= _NEEDED else None
