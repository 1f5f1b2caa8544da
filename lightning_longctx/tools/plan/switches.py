"""The memory settings of a run put into effect on a module without memory, in the order of the strategy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_longctx.strategies.activation_checkpointing import apply_checkpointing
from lightning_longctx.strategies.activation_offload import ActivationOffload
from lightning_longctx.strategies.activation_offload.arena import HostArena
from lightning_longctx.strategies.activation_offload.backend import DeviceBackend
from lightning_longctx.strategies.activation_offload.blocks import attach
from lightning_longctx.strategies.activation_offload.offloader import Offloader
from lightning_longctx.strategies.activation_offload.policy import checkpoint_contexts
from lightning_longctx.strategies.matching import match_modules
from lightning_longctx.strategies.memory import MemorySettings
from lightning_longctx.strategies.tiled_mlp import apply_tiles
from lightning_longctx.units import GIB

__all__ = ["prepare_blocks"]


def prepare_blocks(module: nn.Module, blocks: Sequence[nn.Module], settings: MemorySettings) -> None:
    """Let MLPs run in tiles, and blocks recompute and offload, before they are sharded.

    Args:
        module: the whole module.
        blocks: its repeated blocks.
        settings: the switches.

    Raises:
        ConfigurationError: a switch that does not fit the module.
    """
    if settings.is_tiled:
        apply_tiles(module, settings.tiled_mlp)
    if not settings.is_offloaded:
        apply_checkpointing(module, blocks, settings.activation_checkpointing)
        return
    offloader = _offloader(settings.activation_offload)
    extra: dict[str, Any] = {}
    if settings.activation_offload.level == "policy":
        extra["offloading"] = lambda policy: partial(checkpoint_contexts, policy, offloader)
    apply_checkpointing(module, blocks, settings.activation_checkpointing, **extra)
    names = settings.activation_offload.modules
    if names is not None:
        blocks = match_modules(module, names, "strategy.activation_offload.modules")
    attach(module, blocks, offloader)


def _offloader(settings: ActivationOffload) -> Offloader:
    """The offloader of training, over memory that is only counted. This machine's host memory is not asked for."""
    backend = _CountedCopies(torch.device("cpu"))
    limit = sys.maxsize if settings.host_limit_gib is None else int(settings.host_limit_gib * GIB)
    return Offloader(settings, backend, HostArena(backend, limit))


class _CountedCopies(DeviceBackend):
    """A device backend whose copies allocate where they would, take no time and move nothing; ``meta`` is the host."""

    @override
    def empty_host(self, nbytes: int) -> tuple[Tensor, bool]:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta"), True

    @override
    def free_host(self, buffer: Tensor) -> None:
        """Nothing was pinned."""

    @override
    def copy_out(self, source: Tensor, host: Tensor, after: Sequence[Any]) -> str:
        return "done"

    @override
    def copy_in(self, host: Tensor, after: Sequence[Any]) -> tuple[Tensor, str]:
        return torch.empty(host.numel(), dtype=torch.uint8, device=self.device), "done"

    @override
    def is_done(self, event: object) -> bool:
        return True

    @override
    def wait(self, event: object) -> None:
        """It has happened."""

    @override
    def finish(self, event: object) -> None:
        """It has happened."""

    @override
    def abandon(self, memory: Tensor, event: object) -> None:
        """Nothing copies."""
