"""Gradients of parameters that every rank holds whole, and the norm over both kinds."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longctx.topology import Topology

__all__ = ["average_unsharded", "by_kind", "clip_by_norm"]


def average_unsharded(parameters: Iterable[Tensor], topology: Topology) -> None:
    """Average the gradients of parameters outside sharding over all ranks, as FSDP2 does with the others.

    One all-reduce in float32 for all of them. A parameter that this rank did not use counts with zero, so that every
    rank sends the same.

    Args:
        parameters: those of the optimizer, in the same order on every rank; sharded ones are passed over.
        topology: the run's.
    """
    whole = [value for value in parameters if value.requires_grad and not isinstance(value, DTensor)]
    if not whole or topology.token_group is None:
        return
    for parameter in whole:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in whole if parameter.grad is not None]
    with torch.no_grad():
        flat = torch.cat([gradient.float().flatten() for gradient in gradients])
        dist.all_reduce(flat, group=topology.token_group)
        flat /= topology.ranks_averaged
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def by_kind(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the parameters that have gradients in groups of one kind, sharded or whole: PyTorch mixes them nowhere."""
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in parameters:
        if parameter.grad is not None:
            kinds[isinstance(parameter.grad, DTensor)].append(parameter)
    return [members for members in kinds.values() if members]


def clip_by_norm(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale the gradients down to a norm of ``limit`` if it is larger, sharded and whole ones together.

    Args:
        parameters: sharded (``DTensor``) or whole; whole ones have equal gradients on every rank.
        limit: largest 2-norm.

    Returns:
        The norm before, 0-d. Every rank must call it: the norm of sharded gradients is summed over ranks.
    """
    kinds = by_kind(parameters)
    norms = []
    for members in kinds:
        norm = torch.nn.utils.get_total_norm([value.grad for value in members if value.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum().sqrt()
    if not math.isinf(limit):
        for members in kinds:
            torch.nn.utils.clip_grads_with_norm_(members, limit, total)
    return total
