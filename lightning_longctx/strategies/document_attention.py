"""The exact core: one call of ``scaled_dot_product_attention`` per document, wherever PyTorch runs.

No mask over the row is built and no document sees another, so the outputs of a document do not change by a bit when
another one does. Every other core is compared with this one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_longctx.batch import PackedSequence

__all__ = ["DocumentAttention"]

# Queries of one call where a window cuts a document: with the keys they see, a mask of at most 1,024 x (window + 1,023)
# booleans exists at a time, and short windows still make matrix products that are worth a call.
_MIN_BLOCK, _MAX_BLOCK = 128, 1024


class DocumentAttention:
    """Attention document by document; sliding windows block by block inside a document.

    Example:
        >>> q = torch.randn(6, 2, 4)
        >>> packed = PackedSequence(torch.tensor([0, 4, 6], dtype=torch.int32), 4)
        >>> DocumentAttention()(q, q, q, packed, 0.5, None).shape
        torch.Size([6, 2, 4])
    """

    def refuses(self, query: Tensor, value: Tensor, window: int | None) -> str | None:
        """Nothing is refused."""
        return None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequence, scale: float, window: int | None
    ) -> Tensor:
        """Attend; see :class:`~lightning_longctx.strategies.attention.AttentionCore`."""
        bounds = packed.bounds()
        # [T, heads, D] -> [1, heads, T, D]
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        outputs = []
        for start, end in zip(bounds, bounds[1:], strict=False):
            part = slice(start, end)
            arguments = query[:, :, part], key[:, :, part], value[:, :, part]
            if window is None or end - start <= window:
                outputs.append(_attend(*arguments, scale, None))
            else:
                outputs += _windowed(*arguments, scale, window)
        row = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return row[0].transpose(0, 1)


def _windowed(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> list[Tensor]:
    """One document ``[1, heads, L, D]`` longer than the window: blocks of queries with the keys that they see."""
    length = query.shape[2]
    block = min(max(window, _MIN_BLOCK), _MAX_BLOCK)
    outputs = []
    for start in range(0, length, block):
        end, first = min(start + block, length), max(0, start - window + 1)
        behind = torch.arange(start, end, device=query.device)[:, None] - torch.arange(first, end, device=query.device)
        mask = (behind >= 0) & (behind < window)  # [queries, keys]
        seen = slice(first, end)
        outputs.append(_attend(query[:, :, start:end], key[:, :, seen], value[:, :, seen], scale, mask))
    return outputs


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    copies = query.shape[1] // key.shape[1]
    if copies > 1 and query.device.type != "cpu":
        # Grouped heads leave PyTorch's GPU kernels for float32 and for masks, and with them a whole matrix of scores.
        key, value, copies = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1), 1
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=copies > 1
    )
