"""``longctx fit --config run.yaml --print_layout``: which rank does what, without starting any of them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_longctx.cli.errors import CommandLineError
from lightning_longctx.cli.parts import read_words
from lightning_longctx.strategies import LongContextFSDPStrategy
from lightning_longctx.strategies.mesh import describe_layout
from lightning_longctx.tools.configuration import device_count

__all__ = ["print_layout"]


def print_layout(words: Sequence[str]) -> None:
    """Print the rank-to-group map of a configuration; the machine that it is for need not be this one.

    Args:
        words: configuration files and flags.

    Raises:
        CommandLineError: another strategy, or a number of devices that only the machine itself knows.
        ConfigurationError: sizes that do not divide.
    """
    strategy, settings = read_words(list(words), "strategy")
    if strategy == "longctx_fsdp":
        strategy = LongContextFSDPStrategy()
    if not isinstance(strategy, LongContextFSDPStrategy):
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise CommandLineError(f"--print_layout shows the layout of LongContextFSDPStrategy, not of {name!r}")
    devices = device_count(given := settings["trainer"].get("devices"))
    if not devices:
        raise CommandLineError(f"--print_layout needs `trainer.devices` as a number, not {given!r}")
    nodes = int(settings["trainer"].get("num_nodes") or 1)
    sizes = (strategy.sequence_parallel_size, strategy.data_parallel_replicate_size)
    print(describe_layout(devices * nodes, *sizes, devices))
