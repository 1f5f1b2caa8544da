"""What a tool gets of the configuration of a run, and the layout that follows from it. The command line provides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import counted

__all__ = ["Layout", "ReadConfiguration", "RunConfiguration", "check_division", "device_count", "layout_of"]


class RunConfiguration(Protocol):
    """A configuration that was parsed as ``longctx fit`` parses it."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """All sections as plain containers: ``trainer``, ``model``, ``data``."""

    def build(self, part: str) -> Any:
        """Build ``data``, ``model``, ``strategy`` or ``trainer``, without the others."""


#: Reads the words of the command line that a tool has no use for itself: configuration files and flags.
ReadConfiguration = Callable[[Sequence[str]], RunConfiguration]


class Layout(NamedTuple):
    """How a run divides its processes.

    Attributes:
        dp_size: number of data-parallel ranks; None where the configuration leaves the number of devices open.
        sp_size: sequence-parallel size.
    """

    dp_size: int | None
    sp_size: int


def layout_of(settings: Mapping[str, Any]) -> Layout:
    """The layout that a configuration asks for, without building a Trainer (which needs the accelerator).

    Args:
        settings: all sections.

    Raises:
        ConfigurationError: the sequence-parallel size does not divide the number of processes.

    Example:
        >>> strategy = {"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": 2}}
        >>> layout_of({"trainer": {"devices": 8, "strategy": strategy}})
        Layout(dp_size=4, sp_size=2)
    """
    trainer = settings.get("trainer") or {}
    strategy = trainer.get("strategy")
    arguments = (strategy.get("init_args") or {}) if isinstance(strategy, Mapping) else {}
    sp_size = int(arguments.get("sequence_parallel_size", 1))
    devices, nodes = device_count(trainer.get("devices")), int(trainer.get("num_nodes") or 1)
    if devices is None:
        return Layout(None, sp_size)
    check_division(devices, nodes, sp_size)
    return Layout(devices * nodes // sp_size, sp_size)


def check_division(devices: int, nodes: int, sp_size: int) -> None:
    """Check that the processes can be divided into rows, of whatever strategy.

    Raises:
        ConfigurationError: they cannot, with the arithmetic.
    """
    processes = devices * nodes
    if sp_size < 1 or processes % sp_size:
        got = f"{sp_size} for {counted(devices, 'device')} x {counted(nodes, 'node')} = {counted(processes, 'process')}"
        fix = f"Use one of {[size for size in range(1, processes + 1) if processes % size == 0]}, or other `devices`."
        rule = "must divide the number of processes"
        raise ConfigurationError("trainer.strategy.sequence_parallel_size", rule, got, fix)


def device_count(value: object) -> int | None:
    """Number of devices a node: as Lightning reads ``2``, ``"2"``, ``"0,1"`` and ``[0, 1]``; None for all there are."""
    if isinstance(value, (list, tuple)):
        return len(value)
    text = str(value)
    if "," in text:
        return len([part for part in text.split(",") if part.strip()])
    return int(text) if text.isdigit() else None
