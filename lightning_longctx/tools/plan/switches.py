"""The memory settings of a run put into effect on a module without memory, in the order of the strategy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lightning_longctx.strategies.activation_checkpointing import apply_checkpointing
from lightning_longctx.strategies.memory import MemorySettings

__all__ = ["prepare_blocks"]

_OFFLOAD = "lightning_longctx.strategies.activation_offload"
_GIB = 2**30


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
        import_module("lightning_longctx.strategies.tiled_mlp").apply_tiles(module, settings.tiled_mlp)
    if not settings.is_offloaded:
        apply_checkpointing(module, blocks, settings.activation_checkpointing)
        return
    offloader = _offloader(settings.activation_offload)
    extra: dict[str, Any] = {}
    if settings.activation_offload.level == "policy":
        contexts = import_module(f"{_OFFLOAD}.policy").checkpoint_contexts
        extra["offloading"] = lambda policy: partial(contexts, policy, offloader)
    apply_checkpointing(module, blocks, settings.activation_checkpointing, **extra)
    names = settings.activation_offload.modules
    if names is not None:
        match = import_module("lightning_longctx.strategies.matching").match_modules
        blocks = match(module, names, "strategy.activation_offload.modules")
    import_module(f"{_OFFLOAD}.blocks").attach(module, blocks, offloader)


def _offloader(settings: Any) -> Any:
    """The offloader of training, over memory that is only counted. This machine's host memory is not asked for."""
    backend = _CountedCopies()
    limit = sys.maxsize if settings.host_limit_gib is None else int(settings.host_limit_gib * _GIB)
    arena = import_module(f"{_OFFLOAD}.arena").HostArena(backend, limit)
    return import_module(f"{_OFFLOAD}.offloader").Offloader(settings, backend, arena)


class _CountedCopies:
    """A device backend whose copies allocate where they would, take no time and move nothing; ``meta`` is the host."""

    device = torch.device("cpu")

    def empty_host(self, nbytes: int) -> tuple[Tensor, bool]:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta"), True

    def copy_out(self, source: Tensor, host: Tensor, after: Sequence[Any]) -> str:
        return "done"

    def copy_in(self, host: Tensor, after: Sequence[Any]) -> tuple[Tensor, str]:
        return torch.empty(host.numel(), dtype=torch.uint8, device=self.device), "done"

    def is_done(self, event: object) -> bool:
        return True

    def waited_seconds(self) -> float:
        return 0.0

    def _nothing(self, *_: object) -> None:
        """No bytes are there to be moved or waited for."""

    free_host = wait = finish = abandon = allocated = peak_allocated = _nothing
