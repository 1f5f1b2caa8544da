"""The attention core: causal attention inside each document of a packed row, exactly.

One call of ``scaled_dot_product_attention`` per document: no mask is built, no document sees another, and the outputs
of a document do not change by a bit when another document does. It runs wherever PyTorch runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["packed_attention"]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: list[int], scale: float | None = None
) -> Tensor:
    """Causal attention per document.

    Args:
        query: ``[1, H, T, D]``, the whole row for some heads.
        key: ``[1, Hkv, T, D]``; ``Hkv`` divides ``H``: query head ``h`` uses key/value head ``h // (H / Hkv)``.
        value: ``[1, Hkv, T, Dv]``.
        bounds: ``cu_seqlens`` of the row as a list: D+1 ints, first 0, last T.
        scale: of the scores; default ``D ** -0.5``.

    Returns:
        ``[1, H, T, Dv]``.

    Example:
        >>> q = torch.randn(1, 2, 6, 4)
        >>> packed_attention(q, q, q, [0, 4, 6]).shape
        torch.Size([1, 2, 6, 4])
    """
    grouped = query.shape[1] != key.shape[1]
    outputs = [
        F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=scale,
            enable_gqa=grouped,
        )
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
