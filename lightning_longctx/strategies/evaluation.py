"""Evaluation on shards: whole rows on request, and what cannot work is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology

__all__ = ["allow_generate", "gather_row", "refuse_generate", "without_inference_mode"]


def gather_row(local: Tensor, topology: Topology, dim: int = 1) -> Tensor:
    """Put the shards of a row together again: logits, losses or hidden states in the order of the tokens.

    Args:
        local: this rank's part, any dtype, ``[1, T/S, ...]`` for the default ``dim``. The same shape on every rank of
            the row.
        topology: ``topology_of(trainer)``.
        dim: the dimension of the tokens.

    Returns:
        ``[1, T, ...]``, on every rank of the row, without a gradient. At sp 1 it is ``local`` itself, detached.

    Example:
        >>> from lightning_longctx import topology_of
        >>> gather_row(torch.zeros(1, 8), topology_of(None)).shape
        torch.Size([1, 8])
    """
    local = local.detach()
    if topology.sp_group is None:
        return local
    parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(topology.sp_size)]
    with torch.profiler.record_function("longctx::gather"):
        dist.all_gather(parts, local.contiguous(), group=topology.sp_group)
    return torch.cat(parts, dim=dim)


def without_inference_mode(trainer: Any) -> None:
    """Let evaluation and prediction loops use ``no_grad`` alone.

    FSDP2 saves and restores version counters of its parameters, which inference tensors do not have. It fails on GPUs
    only, so no CPU run would show it.
    """
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop)
    for loop in loops:
        loop.inference_mode = False


def refuse_generate(module: nn.Module, allowed: Iterable[str]) -> None:
    """Let calls of ``generate`` fail with a message, on the module and its submodules.

    Generation takes one token at a time, which cannot be cut over ranks; a rank that ends early would leave the others
    waiting for its parameters.

    Args:
        module: the sharded module.
        allowed: ``forward_methods``; with ``generate`` among them the user takes it upon himself.
    """
    if "generate" in allowed:
        return
    for child in module.modules():
        if callable(getattr(type(child), "generate", None)):
            child.__dict__["generate"] = _refused


def allow_generate(module: nn.Module) -> None:
    """Undo :func:`refuse_generate`."""
    for child in module.modules():
        if child.__dict__.get("generate") is _refused:
            del child.__dict__["generate"]


def _refused(*args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigurationError(
        "generate",
        "is not supported while LongContextFSDPStrategy runs (one token cannot be cut over ranks)",
        "a call",
        "Save a checkpoint and generate from it on one device, without this strategy.",
    )
