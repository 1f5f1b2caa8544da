"""What of a run decides its memory, and what to switch on next when that is too much.

The planner and the message after running out of memory give the same advice: it stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_longctx.strategies.activation_checkpointing import ActivationCheckpointing, checkpoints_itself
from lightning_longctx.strategies.activation_offload.settings import ActivationOffload
from lightning_longctx.strategies.settings import ShardingSettings
from lightning_longctx.strategies.shard import find_blocks
from lightning_longctx.strategies.tiled_mlp import TiledMLP, find_mlps

__all__ = ["MemorySettings", "Switch", "next_switches", "possible_sp_sizes", "settings_of", "switches_of_weights"]

_STRATEGY = "trainer.strategy.init_args"
# Below this the chunks of the loss are so short that the head's gradient is read and written more often than computed.
_MIN_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class MemorySettings:
    """The settings of a run that memory depends on.

    Attributes:
        world_size: processes.
        sequence_parallel_size: ranks that share a row.
        data_parallel_replicate_size: copies of the sharded parameters.
        activation_checkpointing: what is computed again.
        sharding: units, gathering, reduction.
        activation_offload: what moves to the host.
        tiled_mlp: which MLPs run in tiles.
        heads: query heads; None if unknown.
        loss_chunk_tokens: tokens whose logits exist at a time; None for the default.
        has_loss_chunks: whether the model has that setting.
        refused_by_module: settings that would be an error with this module: it has nothing that they act on.
    """

    world_size: int = 1
    sequence_parallel_size: int = 1
    data_parallel_replicate_size: int = 1
    activation_checkpointing: ActivationCheckpointing = field(default_factory=lambda: ActivationCheckpointing("none"))
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    activation_offload: ActivationOffload = field(default_factory=lambda: ActivationOffload("none"))
    tiled_mlp: TiledMLP = field(default_factory=lambda: TiledMLP("none"))
    heads: int | None = None
    loss_chunk_tokens: int | None = None
    has_loss_chunks: bool = False
    refused_by_module: frozenset[str] = frozenset()

    @property
    def is_offloaded(self) -> bool:
        """Whether saved activations move to the host."""
        return self.activation_offload.mode != "none"

    @property
    def is_tiled(self) -> bool:
        """Whether some MLPs run in tiles."""
        return self.tiled_mlp.modules != "none"

    def switched_on(self) -> list[str]:
        """The switches that are on, as they are written in YAML."""
        found = []
        for name in ("activation_checkpointing", "activation_offload"):
            mode = getattr(getattr(self, name), "mode", "none")
            found += [f"{name}: {mode}"] if mode != "none" else []
        if self.is_tiled:
            found.append(f"tiled_mlp: {self.tiled_mlp.modules}")
        if self.sequence_parallel_size > 1:
            found.append(f"sequence_parallel_size: {self.sequence_parallel_size}")
        if self.loss_chunk_tokens is not None:
            found.append(f"loss_chunk_tokens: {self.loss_chunk_tokens}")
        if self.sharding.offload_parameters:
            found.append("sharding.offload_parameters: true")
        return found


def settings_of(strategy: Any, module: nn.Module | None, world_size: int) -> MemorySettings:
    """Read them from a strategy and a module.

    Args:
        strategy: a ``LongContextFSDPStrategy``.
        module: the LightningModule; None if unknown.
        world_size: processes.
    """
    configs = [getattr(child, "config", None) for child in (module.modules() if module is not None else ())]
    heads = [count for config in configs if isinstance(count := getattr(config, "num_attention_heads", None), int)]
    return MemorySettings(
        world_size,
        strategy.sequence_parallel_size,
        strategy.data_parallel_replicate_size,
        activation_checkpointing=strategy.activation_checkpointing,
        sharding=strategy.sharding,
        activation_offload=strategy.activation_offload,
        tiled_mlp=strategy.tiled_mlp,
        heads=heads[0] if heads else None,
        loss_chunk_tokens=getattr(module, "loss_chunk_tokens", None),
        has_loss_chunks=hasattr(module, "loss_chunk_tokens"),
        refused_by_module=frozenset() if module is None else frozenset(_refused(module, strategy.sharding)),
    )


def _refused(module: nn.Module, sharding: ShardingSettings) -> Iterator[str]:
    has_blocks = bool(sharding.blocks or find_blocks(module))  # named ones were found, or the strategy had refused them
    if not has_blocks:
        yield "activation_offload"
    if not has_blocks or checkpoints_itself(module):
        yield "activation_checkpointing"
    if not find_mlps(module):  # all its MLPs are experts, say
        yield "tiled_mlp"


@dataclass(frozen=True)
class Switch:
    """One change that needs less memory.

    Attributes:
        name: as it is written in YAML.
        changes: values by dotted key of the configuration.
        settings: with the change made.
    """

    name: str
    changes: Mapping[str, Any]
    settings: MemorySettings


def next_switches(settings: MemorySettings) -> list[Switch]:
    """Return the changes that need less memory, the one to try first in front; alternatives of one setting in a row.

    Their order is that of their price at long context: recompute costs a third of the computation and frees most of the
    activations; a higher sequence-parallel size costs an exchange in each layer and fewer rows at a time; offload costs
    copies that long rows hide; tiles cost one more forward of the MLPs and pay only once the rest is gone.
    """
    return [
        switch
        for name, make in _SWITCHES.items()
        if name not in settings.refused_by_module
        for switch in make(settings)
    ]


def possible_sp_sizes(world_size: int, heads: int | None, replicate_size: int = 1) -> list[int]:
    """Sequence-parallel sizes that divide processes (of one replica) and query heads.

    Example:
        >>> possible_sp_sizes(8, 12)
        [1, 2, 4]
    """
    ranks = world_size // replicate_size
    return [size for size in range(1, ranks + 1) if ranks % size == 0 and (heads or size) % size == 0]


def _checkpointing(settings: MemorySettings) -> Iterator[Switch]:
    if settings.activation_checkpointing.mode != "full":
        changed = replace(settings, activation_checkpointing=ActivationCheckpointing("full"))
        yield _of_strategy("activation_checkpointing", "full", changed)


def _sequence_parallel(settings: MemorySettings) -> Iterator[Switch]:
    sizes = possible_sp_sizes(settings.world_size, settings.heads, settings.data_parallel_replicate_size)
    for size in sizes:
        if size > settings.sequence_parallel_size:
            yield _of_strategy("sequence_parallel_size", size, replace(settings, sequence_parallel_size=size))


def _offload(settings: MemorySettings) -> Iterator[Switch]:
    if not settings.is_offloaded:
        changed = replace(settings, activation_offload=replace(settings.activation_offload, mode="async"))
        yield _of_strategy("activation_offload", "async", changed)


def _tiles(settings: MemorySettings) -> Iterator[Switch]:
    if not settings.is_tiled:
        changed = replace(settings, tiled_mlp=replace(settings.tiled_mlp, modules="auto"))
        yield _of_strategy("tiled_mlp", "auto", changed)


def _loss_chunk(settings: MemorySettings) -> Iterator[Switch]:
    tokens = settings.loss_chunk_tokens
    if settings.has_loss_chunks and tokens is not None and tokens > _MIN_CHUNK_TOKENS:
        changed = replace(settings, loss_chunk_tokens=_MIN_CHUNK_TOKENS)
        yield Switch(f"loss_chunk_tokens: {_MIN_CHUNK_TOKENS}", {"model.loss_chunk_tokens": _MIN_CHUNK_TOKENS}, changed)


def _one_copy(settings: MemorySettings) -> Iterator[Switch]:
    if settings.data_parallel_replicate_size > 1:
        yield _of_strategy("data_parallel_replicate_size", 1, replace(settings, data_parallel_replicate_size=1))


def _early_reduction(settings: MemorySettings) -> Iterator[Switch]:
    if settings.sharding.reduce_gradients == "last_micro_batch":
        sharding = replace(settings.sharding, reduce_gradients="every_micro_batch")
        yield _of_strategy("sharding.reduce_gradients", "every_micro_batch", replace(settings, sharding=sharding))


def _resharding(settings: MemorySettings) -> Iterator[Switch]:
    if not settings.sharding.reshard_after_forward:
        sharding = replace(settings.sharding, reshard_after_forward=True)
        yield _of_strategy("sharding.reshard_after_forward", True, replace(settings, sharding=sharding))


def switches_of_weights(settings: MemorySettings) -> list[Switch]:
    """Of :func:`next_switches` those that make parameters, gradients and optimizer states smaller."""
    return [*_one_copy(settings)]


#: By the setting that each changes.
_SWITCHES: dict[str, Callable[[MemorySettings], Iterator[Switch]]] = {
    "reduce_gradients": _early_reduction,
    "reshard_after_forward": _resharding,
    "loss_chunk_tokens": _loss_chunk,
    "activation_checkpointing": _checkpointing,
    "data_parallel_replicate_size": _one_copy,
    "sequence_parallel_size": _sequence_parallel,
    "activation_offload": _offload,
    "tiled_mlp": _tiles,
}


def _of_strategy(name: str, value: object, settings: MemorySettings) -> Switch:
    shown = str(value).lower() if isinstance(value, bool) else value
    return Switch(f"{name}: {shown}", {f"{_STRATEGY}.{name}": value}, settings)
