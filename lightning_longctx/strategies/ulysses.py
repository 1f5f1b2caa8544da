"""Ulysses sequence parallelism: exchange sequence for heads around the attention core.

Each of S ranks holds T/S tokens of every head. Attention needs all tokens of a head, so one all-to-all turns the row
into T tokens of H/S heads, the core runs on whole documents, and a second all-to-all turns its output back. Paper:
DeepSpeed Ulysses (arXiv 2309.14509). Communication per layer and rank is 2 x (H + Hkv) x T/S x D elements, whatever
S.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.batch import PackedSequence
from lightning_longctx.errors import BatchContractError, ConfigurationError
from lightning_longctx.strategies.attention import packed_attention

__all__ = [
    "Exchange",
    "check_heads",
    "gather_heads_scatter_seq",
    "gather_seq_scatter_heads",
    "running_exchange",
    "set_running_exchange",
    "ulysses_attention",
]


class Exchange:
    """The sequence-parallel group of a running strategy, and how often it was used.

    Args:
        group: the ranks that share a row; None for one rank.

    Attributes:
        count: attention calls that went through it; the strategy reads it in the first step, since a model that never
            exchanges would train on fragments of documents, silently.
        done: how many of those calls have both of their exchanges behind them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.count = 0
        self.done = 0


# The running strategy's exchange. The group is the same for the whole run, also when activation recompute calls the
# attention again in backward, so a module variable is safe here; facts about a batch are not kept this way.
_running: Exchange | None = None


def set_running_exchange(exchange: Exchange | None) -> None:
    """Make ``exchange`` the one that :func:`ulysses_attention` uses without a ``group``; None when no strategy runs."""
    global _running
    _running = exchange


def running_exchange() -> Exchange | None:
    """The exchange of the running strategy, if one runs."""
    return _running


def check_heads(heads: int, sp_size: int) -> None:
    """Check that query heads can be dealt to the ranks of a sequence-parallel group.

    Raises:
        ConfigurationError: ``heads`` is not a multiple of ``sp_size``; shows the arithmetic.
    """
    if heads % sp_size:
        possible = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ConfigurationError(
            "strategy.sequence_parallel_size",
            "must divide the number of query heads",
            f"{sp_size} for {heads} heads ({heads} / {sp_size} leaves {heads % sp_size})",
            f"Use one of {possible}.",
        )


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Mapping[str, Any] | PackedSequence,
    group: dist.ProcessGroup | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Causal per-document attention over the whole row, from the shards of it that the ranks hold.

    Stands in the place of ``scaled_dot_product_attention(q, k, v, is_causal=True)`` in a user's own model; without
    sequence parallelism it is the per-document attention of a packed row. Rotary embeddings come before it, from
    ``position_ids``.

    Args:
        query: ``[1, H, T/S, D]``, local.
        key: ``[1, Hkv, T/S, D]``, local; ``Hkv`` divides ``H``. Fewer heads than ranks are replicated.
        value: ``[1, Hkv, T/S, D]``, local.
        batch: the packed batch or its :class:`PackedSequence`: document bounds of the WHOLE row.
        group: the ranks that share the row; None for the running strategy's.
        scale: of the scores; default ``D ** -0.5``.

    Returns:
        ``[1, H, T/S, D]``, local.

    Raises:
        ConfigurationError: ``H`` is not a multiple of the group's size.
        BatchContractError: more than one row, or bounds that do not fit the tokens.

    Example:
        >>> q = torch.randn(1, 2, 6, 4)
        >>> ulysses_attention(q, q, q, PackedSequence(torch.tensor([0, 4, 6], dtype=torch.int32), 4)).shape
        torch.Size([1, 2, 6, 4])
    """
    exchange = _running if group is None else Exchange(group)
    size = 1 if exchange is None else exchange.size
    bounds = _bounds(query, batch, size)
    if exchange is None or exchange.group is None:
        return packed_attention(query, key, value, bounds, scale)
    check_heads(query.shape[1], size)
    exchange.count += 1
    with torch.profiler.record_function("longctx::exchange"):
        query, key, value = _exchange_heads(query, key, value, exchange.group, size)
    with torch.profiler.record_function("longctx::attention"):
        output = packed_attention(query, key, value, bounds, scale)  # [1, H/S, T, D]
    with torch.profiler.record_function("longctx::exchange"):
        local = gather_heads_scatter_seq(output[0].transpose(0, 1), exchange.group)  # [T/S, H, D]
    exchange.done += 1
    return local.transpose(0, 1).unsqueeze(0)


def gather_seq_scatter_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange ``[T/S, H, D]`` (a shard of all heads) for ``[T, H/S, D]`` (some heads of the row). Differentiable."""
    size = dist.get_world_size(group)
    tokens, heads, dim = tensor.shape
    # [T/S, S, H/S, D] -> [S, T/S, H/S, D]: the first dimension says who gets it, and afterwards who sent it
    sent = tensor.reshape(tokens, size, heads // size, dim).transpose(0, 1).contiguous()
    received: Tensor = _AllToAll.apply(sent, group)  # type: ignore[no-untyped-call]
    return received.reshape(size * tokens, heads // size, dim)


def gather_heads_scatter_seq(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange ``[T, H/S, D]`` for ``[T/S, H, D]``: the inverse of :func:`gather_seq_scatter_heads`. Differentiable."""
    size = dist.get_world_size(group)
    tokens, heads, dim = tensor.shape
    sent = tensor.reshape(size, tokens // size, heads, dim).contiguous()
    received: Tensor = _AllToAll.apply(sent, group)  # type: ignore[no-untyped-call]  # [S, T/S, H/S, D]: heads of rank s
    return received.transpose(0, 1).reshape(tokens // size, size * heads, dim)


def _exchange_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One all-to-all for q, k and v: ``[1, H, T/S, D]`` to ``[1, H/S, T, D]``."""
    # Each key/value head is repeated in place until the ranks divide their number; query head h of rank r then finds
    # its own, since consecutive copies go to consecutive ranks just as consecutive query heads do.
    copies = math.lcm(key.shape[1], size) // key.shape[1]
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    parts = [part[0].transpose(0, 1) for part in (query, key, value)]  # [T/S, heads, D]
    if value.shape[-1] != query.shape[-1]:
        gathered = tuple(gather_seq_scatter_heads(part, group) for part in parts)
    else:
        tokens, _, dim = parts[0].shape
        counts = [part.shape[1] // size for part in parts]
        # [T/S, S, (H + 2 Hkv)/S, D]: for each rank its query, key and value heads side by side
        fused = torch.cat([part.reshape(tokens, size, -1, dim) for part in parts], dim=2).flatten(1, 2)
        gathered = torch.split(gather_seq_scatter_heads(fused, group), counts, dim=1)
    first, second, third = (part.transpose(0, 1).unsqueeze(0) for part in gathered)
    return first, second, third


def _bounds(query: Tensor, batch: Mapping[str, Any] | PackedSequence, size: int) -> list[int]:
    cu_seqlens = batch.cu_seqlens if isinstance(batch, PackedSequence) else batch["cu_seqlens"]
    if query.dim() != 4 or query.shape[0] != 1:
        fix = "Pack documents into one row; use `micro_batch_size` for longer rows."
        raise BatchContractError("query", "must be one row [1, H, T/S, D]", list(query.shape), fix)
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[-1] != query.shape[2] * size:
        raise BatchContractError(
            "cu_seqlens",
            f"must end at the row's length, {query.shape[2]} local tokens x {size} ranks",
            bounds[-1],
            "Bounds come from the unsharded row, and the row is sharded once: by LongContextFSDPStrategy.",
        )
    return bounds


class _AllToAll(torch.autograd.Function):
    """All-to-all of equal parts along the first dimension. Its transpose is itself: what came from s goes back to s."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        output = torch.empty_like(tensor)
        dist.all_to_all_single(output, tensor, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].contiguous()
        output = torch.empty_like(gradient)
        dist.all_to_all_single(output, gradient, group=ctx.group)
        return output, None
