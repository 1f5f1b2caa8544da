"""The norm of gradients that are spread over ranks, as a share that each rank can compute without asking the others.

A clip that runs anyway computes a norm too, but only when clipping is on, and per rank group. The share here joins the
one reduction of a step instead: no collective of its own, also for sharded gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["gradient_squares"]


@torch.no_grad()
def gradient_squares(parameters: Iterable[Tensor], ranks: int, into: Tensor) -> None:
    """Write this rank's share of the squared gradient norm; the sum over ``ranks`` ranks is the squared norm.

    A gradient that each rank holds whole counts ``1 / ranks`` on each; one sharded over S ranks and replicated over the
    others counts ``S / ranks``. Sums run in float32 inside a tensor (as wide as the gradient if that is wider) and in
    the dtype of ``into`` across tensors.

    Args:
        parameters: local or sharded (``DTensor``) parameters; those without a gradient are passed over.
        ranks: how many ranks the shares are summed over. They must contain each parameter's mesh.
        into: 0-d, where the share goes. Not a finite number if a gradient is not.
    """
    groups: defaultdict[tuple[float, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            local, copies = _local_gradient(parameter.grad, ranks)
            groups[copies, local.dtype, local.device].append(local)
    into.zero_()
    for (copies, dtype, _), gradients in groups.items():
        wide = torch.promote_types(dtype, torch.float32)
        # As a scalar per tensor in one launch for hundreds of tensors; the squares of norms beyond 1e19 need `into`'s
        # range.
        norms = torch.stack(torch._foreach_norm(gradients, 2.0, wide))
        into += norms.to(into).square().sum() / copies


def _local_gradient(gradient: Tensor, ranks: int) -> tuple[Tensor, float]:
    """Return what this rank holds of a gradient, and how many of the ranks hold each of its elements."""
    if not isinstance(gradient, DTensor):
        return (gradient.coalesce().values() if gradient.is_sparse else gradient), float(ranks)
    if any(placement.is_partial() for placement in gradient.placements):
        return gradient.full_tensor(), float(ranks)
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return gradient.to_local(), ranks / prod(size for placement, size in sizes if not placement.is_replicate())
