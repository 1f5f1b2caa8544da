"""Ulysses sequence parallelism: exchange sequence for heads around the attention core.

Each of S ranks holds T/S tokens of every head. Attention needs all tokens of a head, so one all-to-all turns the row
into T tokens of H/S heads, the core runs on whole documents, and a second all-to-all turns its output back. Paper:
DeepSpeed Ulysses (arXiv 2309.14509). A rank hands 2 x (H + Hkv) x T/S x D elements to the exchanges of a layer's
forward and as many to those of its backward, whatever S; where S does not divide Hkv, their least common multiple
counts in place of Hkv. The share (S - 1) / S of it leaves the rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.batch import PackedSequence, model_inputs
from lightning_longctx.errors import BatchContractError, ConfigurationError
from lightning_longctx.strategies.attention import AUTO, choose_core
from lightning_longctx.units import counted

__all__ = [
    "Exchange",
    "check_heads",
    "gather_heads_scatter_seq",
    "gather_seq_scatter_heads",
    "running_exchange",
    "set_running_exchange",
    "ulysses_attention",
    "untraced",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
        self.rank = 0 if group is None else dist.get_rank(group)
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
            f"{sp_size} for {counted(heads, 'head')} ({heads} / {sp_size} leaves {heads % sp_size})",
            f"Use one of {possible}.",
        )


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compiler.disable``, which would hide the types of what it decorates from users."""
    return cast("Callable[_P, _R]", torch.compiler.disable(function))


# Documents and collectives differ from row to row: a compiled block breaks its graph here.
@untraced
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Mapping[str, Any] | PackedSequence,
    group: dist.ProcessGroup | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    core: str = AUTO,
) -> Tensor:
    """Causal per-document attention over the whole row, from the shards of it that the ranks hold.

    Stands in the place of ``scaled_dot_product_attention(q, k, v, is_causal=True)`` in a user's own model; without
    sequence parallelism it is the per-document attention of a packed row. Rotary embeddings come before it, from
    ``position_ids``. There is no dropout: ranks would have to draw the same numbers for the heads they exchange.

    Args:
        query: ``[1, H, T/S, D]``, local.
        key: ``[1, Hkv, T/S, D]``, local; ``Hkv`` divides ``H``. Fewer heads than ranks are replicated.
        value: ``[1, Hkv, T/S, Dv]``, local. Its dtype is the one that is exchanged and computed in.
        batch: the packed batch or its :class:`PackedSequence`: document bounds of the WHOLE row.
        group: the ranks that share the row; None for the running strategy's.
        scale: of the scores; default ``D ** -0.5``.
        window: a token sees itself and the ``window - 1`` tokens before it; default: its whole document up to itself.
        core: ``flash_attn``, ``varlen``, ``flex``, ``documents``, or ``auto`` for the fastest one that can.

    Returns:
        ``[1, H, T/S, Dv]``, local, in the dtype of ``value``.

    Raises:
        ConfigurationError: ``H`` is not a multiple of the group's size, or ``core`` cannot run here.
        BatchContractError: more than one row, heads that do not divide, or bounds that do not fit the tokens.

    Example:
        >>> q = torch.randn(1, 2, 6, 4)
        >>> ulysses_attention(q, q, q, PackedSequence(torch.tensor([0, 4, 6], dtype=torch.int32), 4)).shape
        torch.Size([1, 2, 6, 4])
    """
    exchange = _running if group is None else Exchange(group)
    size = 1 if exchange is None else exchange.size
    packed = batch if isinstance(batch, PackedSequence) else model_inputs(batch)["packed_sequence"]
    _check(query, key, packed, size, window)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings may have left float32 behind
    if exchange is None or exchange.group is None:
        parts = [part[0].transpose(0, 1) for part in (query, key, value)]  # [T, heads, D]
        output = _attend(parts, packed, scale, window, core)
    else:
        check_heads(query.shape[1], size)
        exchange.count += 1
        with torch.profiler.record_function("longctx::exchange"):
            parts = _exchange_heads(query, key, value, exchange.group, size)  # [T, heads/S, D]
        output = _attend(parts, packed, scale, window, core)  # [T, H/S, Dv]
        with torch.profiler.record_function("longctx::exchange"):
            output = gather_heads_scatter_seq(output, exchange.group)  # [T/S, H, Dv]
        exchange.done += 1
    return output.transpose(0, 1).unsqueeze(0)


def gather_seq_scatter_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange shards of all heads for some heads of the whole row, in one all-to-all. Differentiable.

    Args:
        tensors: each ``[T/S, H_i, D]``; the group's size divides ``H_i``. One ``D`` and dtype for all.
        group: the ranks that share the row.

    Returns:
        Each as ``[T, H_i/S, D]``, views of one tensor.
    """
    size = dist.get_world_size(group)
    tokens, _, dim = tensors[0].shape
    counts = [tensor.shape[1] // size for tensor in tensors]
    # [T/S, H, D] -> [S, T/S, H/S, D]: the first dimension says who gets it, and afterwards who sent it
    dealt = [tensor.reshape(tokens, size, -1, dim).transpose(0, 1) for tensor in tensors]
    received: Tensor = _AllToAll.apply(torch.cat(dealt, dim=2), group)  # type: ignore[no-untyped-call]
    return list(torch.split(received.flatten(0, 1), counts, dim=1))


def gather_heads_scatter_seq(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange ``[T, H/S, D]`` for ``[T/S, H, D]``: the inverse of :func:`gather_seq_scatter_heads`. Differentiable."""
    size = dist.get_world_size(group)
    tokens, heads, dim = tensor.shape
    sent = tensor.reshape(size, tokens // size, heads, dim).contiguous()
    received: Tensor = _AllToAll.apply(sent, group)  # type: ignore[no-untyped-call]  # [S, T/S, H/S, D]: heads of rank s
    return received.transpose(0, 1).reshape(tokens // size, size * heads, dim)


def _exchange_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, size: int) -> list[Tensor]:
    """``[1, heads, T/S, D]`` to ``[T, heads/S, D]`` for q, k and v: one exchange, two where v has another width."""
    # Each key/value head is repeated in place until the ranks divide their number; query head h of rank r then finds
    # its own, since consecutive copies go to consecutive ranks just as consecutive query heads do.
    copies = math.lcm(key.shape[1], size) // key.shape[1]
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))  # [T/S, heads, D]
    if value.shape[-1] == query.shape[-1]:
        return gather_seq_scatter_heads([query, key, value], group)
    return [*gather_seq_scatter_heads([query, key], group), *gather_seq_scatter_heads([value], group)]


def _attend(parts: Sequence[Tensor], packed: PackedSequence, scale: float, window: int | None, core: str) -> Tensor:
    query, key, value = parts
    with torch.profiler.record_function("longctx::attention"):
        return choose_core(core, query, value, window)(query, key, value, packed, scale, window)


def _check(query: Tensor, key: Tensor, packed: PackedSequence, size: int, window: int | None) -> None:
    if query.dim() != 4 or query.shape[0] != 1:
        fix = "Pack documents into one row; use `micro_batch_size` for longer rows."
        raise BatchContractError("query", "must be one row [1, H, T/S, D]", list(query.shape), fix)
    if query.shape[1] % key.shape[1]:
        got = f"{counted(query.shape[1], 'query head')} and {key.shape[1]}"
        raise BatchContractError("key", "must have a number of heads that divides the query's", got, "Check the model.")
    if window is not None and window < 1:
        raise ConfigurationError("window", "must be positive", window, "Leave it out to see the whole document.")
    if packed.host is None and packed.cu_seqlens.device.type != "cpu":
        return  # reading the bounds would wait for the device in every layer
    last = packed.bounds()[-1]
    if last != query.shape[2] * size:
        raise BatchContractError(
            "cu_seqlens",
            f"must end at the row's length, {counted(query.shape[2], 'local token')} x {counted(size, 'rank')}",
            last,
            "Bounds come from the unsharded row, and the row is sharded once: by LongContextFSDPStrategy.",
        )


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
        with torch.profiler.record_function("longctx::exchange"):
            gradient = grads[0].contiguous()
            output = torch.empty_like(gradient)
            dist.all_to_all_single(output, gradient, group=ctx.group)
        return output, None
