"""Settings of a variant put into effect on a module, as the strategy puts them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_longctx.strategies.activation_checkpointing import apply_checkpointing
from lightning_longctx.strategies.memory import MemorySettings

__all__ = ["prepare_blocks"]


def prepare_blocks(
    module: nn.Module, blocks: Sequence[nn.Module], settings: MemorySettings, ranks_per_node: int
) -> None:
    """Let blocks compute their activations again.

    Args:
        module: the whole module.
        blocks: its repeated blocks.
        settings: which.
        ranks_per_node: processes that share a host.
    """
    apply_checkpointing(module, blocks, settings.activation_checkpointing)
