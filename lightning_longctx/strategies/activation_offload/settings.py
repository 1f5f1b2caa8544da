"""Settings of activation offload, checked one by one: no number is reinterpreted, and the modes exclude each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.settings import as_settings
from lightning_longctx.units import MIB

__all__ = ["ActivationOffload", "OffloadLevel", "OffloadMode", "as_offload"]

OffloadMode = Literal["none", "sync", "async"]
OffloadLevel = Literal["boundary", "all", "policy"]

_FIELD = "strategy.activation_offload"
_MAX_GIB = 2**16  # 64 TiB: more is a mistaken unit
_MAX_BLOCKS = 2**12


@dataclass(frozen=True)
class ActivationOffload:
    """Which saved activations go to host memory, when, and how much of either memory they may take. All per rank.

    Args:
        mode: ``sync``: each copy is waited for at once; the plain choice, and the one to compare with. ``async``
            (default of this class): copies run beside the computation, and come back before they are needed.
            ``none``: nothing moves.
        level: ``boundary`` (default): the inputs of the chosen blocks and nothing inside them, which is what activation
            checkpointing keeps; least traffic. ``all``: everything that the chosen blocks save. ``policy``: block
            inputs and what ``activation_checkpointing: selective`` keeps (outputs of attention kernels).
        modules: class names or path patterns of the modules whose activations move; in a pattern a star stands for one
            part of a dotted path (``model.layers.*``), and what comes before it may be left out. Default None: the
            repeated blocks.
        device_limit_gib: GiB of saved activations that stay on the device: the newest, since backward needs them first.
            Default 0.
        host_limit_gib: GiB of host memory that copies may take, idle buffers included. Default None: four fifths of
            what the machine or its container has left, shared by the ranks of the node.
        min_tensor_mib: smaller tensors stay, since each copy has a fixed cost. Default 1 MiB.
        prefetch_mib: of ``async``: MiB of copies under way, each way, beyond those of one block; at least one tensor
            is always fetched ahead unless this is 0. Default 1024 MiB: one block input of 131,072 tokens x 4,096.
        keep_last_blocks: calls of blocks whose activations stay on the device until a later block runs. Default 1:
            backward starts with the last block, and its copies would only come back.
        strict: raise where host memory runs out or cannot be pinned. Default false: what does not fit stays on the
            device, and one warning says so.

    Raises:
        ConfigurationError: an unknown choice, or a number that is negative, not finite or absurdly large.

    Example:
        >>> ActivationOffload(mode="sync", host_limit_gib=64).level
        'boundary'
    """

    mode: OffloadMode = "async"
    level: OffloadLevel = "boundary"
    modules: list[str] | None = None
    device_limit_gib: float = 0.0
    host_limit_gib: float | None = None
    min_tensor_mib: float = 1.0
    prefetch_mib: float = 1024.0
    keep_last_blocks: int = 1
    strict: bool = False

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, get_args(OffloadMode))
        _check_choice("level", self.level, get_args(OffloadLevel))
        _check_size("device_limit_gib", self.device_limit_gib, _MAX_GIB)
        if self.host_limit_gib is not None:
            _check_size("host_limit_gib", self.host_limit_gib, _MAX_GIB)
            if self.host_limit_gib == 0:
                fix = "Leave it out for what the machine has, or write `activation_offload: none`."
                raise ConfigurationError(f"{_FIELD}.host_limit_gib", "must be positive", 0, fix)
        _check_size("min_tensor_mib", self.min_tensor_mib, _MAX_GIB * 1024)
        _check_size("prefetch_mib", self.prefetch_mib, _MAX_GIB * 1024)
        if self.mode == "sync" and self.prefetch_mib != type(self).prefetch_mib:
            fix = "Leave it out, or use `mode: async`."
            raise ConfigurationError(f"{_FIELD}.prefetch_mib", "acts in mode async only", "mode sync", fix)
        blocks = self.keep_last_blocks
        if isinstance(blocks, bool) or not isinstance(blocks, int) or not 0 <= blocks <= _MAX_BLOCKS:
            rule = f"must be a whole number from 0 to {_MAX_BLOCKS}"
            raise ConfigurationError(f"{_FIELD}.keep_last_blocks", rule, repr(blocks), "1 is the default.")
        if not isinstance(self.strict, bool):
            raise ConfigurationError(f"{_FIELD}.strict", "must be true or false", repr(self.strict), "Write `false`.")
        named = isinstance(self.modules, (list, tuple)) and all(isinstance(entry, str) for entry in self.modules)
        if self.modules is not None and not (named and self.modules):
            fix = "Write a list such as [LlamaDecoderLayer] or [model.layers.*]."
            raise ConfigurationError(
                f"{_FIELD}.modules", "must be a list of names or patterns", repr(self.modules), fix
            )

    @property
    def prefetch_bytes(self) -> int:
        """``prefetch_mib`` in bytes; 0 in mode sync, where nothing runs ahead."""
        return int(self.prefetch_mib * MIB) if self.mode == "async" else 0


def as_offload(value: OffloadMode | ActivationOffload | Mapping[str, Any]) -> ActivationOffload:
    """Turn a mode, a mapping or settings into settings.

    Raises:
        ConfigurationError: an unknown mode or key, or both modes at once.
    """
    if isinstance(value, str):
        return ActivationOffload(mode=value)
    asked = [entry for entry in get_args(OffloadMode) if isinstance(value, (Mapping, list, tuple)) and entry in value]
    modes = value.get("mode") if isinstance(value, Mapping) else None
    if asked or isinstance(modes, (list, tuple)):
        got = asked or list(modes or ())
        fix = "Choose one: `activation_offload: sync` or `activation_offload: async`; limits go beside `mode:`."
        raise ConfigurationError(_FIELD, "takes one mode", got, fix)
    return as_settings(ActivationOffload, value, "activation_offload")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            f"{_FIELD}.{name}", f"must be one of {list(choices)}", repr(value), f"`{choices[1]}` is the common choice."
        )


def _check_size(name: str, value: object, largest: float) -> None:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or not 0 <= number <= largest:
        rule = f"must be a finite number from 0 to {largest:g}"
        fix = "The unit is in the name; 0 is the smallest limit, and no number means `unlimited`."
        raise ConfigurationError(f"{_FIELD}.{name}", rule, repr(value), fix)
