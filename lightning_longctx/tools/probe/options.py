"""The flags of ``longctx probe``. All other words belong to the configuration and are passed on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_longctx.tools.flags import FlagParser, integer, number

__all__ = ["ProbeOptions", "read_options"]


@dataclass(frozen=True)
class ProbeOptions:
    """What to measure, and where to write it.

    Attributes:
        micro_batches: rows of each rank. Default 200: over 8 seeds of lognormal lengths the steady fill of 4 ranks then
            differs by at most 0.05 points at 512K and 1M, and by up to 1.2 at 32K, where few documents fit a row.
        dp: data-parallel ranks. Default None: those of the configuration, or 1 where it leaves the devices open.
        seeds: of the order of documents. Default empty: the seed of the configuration, which is the run to be started.
        min_fill: least first and steady fill in percent; below it is a finding. Default None: nothing is judged.
        show: packed rows to print, decoded. Default 0: they are long.
        folder: where report, tables and plot go. Default ``runs/probe``, beside the runs.
        json: file for all numbers; None for none.
        plot: file of the plot. Default None: ``probe.png`` in ``folder``.
    """

    micro_batches: int = 200
    dp: int | None = None
    seeds: tuple[int, ...] = ()
    min_fill: float | None = None
    show: int = 0
    folder: Path = Path("runs/probe")
    json: Path | None = None
    plot: Path | None = None


def read_options(words: Sequence[str]) -> tuple[ProbeOptions, list[str]]:
    """Split the words after ``longctx probe`` into the tool's own options and the words of the configuration.

    Raises:
        ConfigurationError: a value that cannot be, or a misspelt flag.
    """
    found, rest = _parser().split(words)
    return ProbeOptions(**{("folder" if name == "out" else name): value for name, value in found.items()}), rest


def _parser() -> FlagParser:
    default = ProbeOptions()
    parser = FlagParser("probe", "Show how the documents of a configuration pack into rows: no model, no accelerator.")
    add = parser.add
    add("micro-batches", type=integer(1), default=default.micro_batches, help="rows of each rank (%(default)s)")
    add("dp", type=integer(1), help="data-parallel ranks (those of the configuration)")
    add("seeds", type=_seeds, default=default.seeds, help="orders of documents, such as 42,43 (loading.seed)")
    add("min-fill", type=_percent, help="exit with 1 if first or steady fill is below this many percent")
    add("show", type=integer(0), default=default.show, help="print this many packed rows, decoded (%(default)s)")
    add("out", type=Path, default=default.folder, help="folder for report, tables and plot (%(default)s)")
    add("json", type=Path, help="also write all numbers to this file")
    add("plot", type=Path, help="file of the plot (probe.png in the folder)")
    return parser


def _seeds(text: str) -> tuple[int, ...]:
    seeds = tuple(integer(0)(part.strip()) for part in text.split(","))
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"must be different seeds but got {text!r}")
    return seeds


def _percent(text: str) -> float:
    # 0.985 is meant as a fraction, and would let anything pass
    return number("a percentage such as 98.5", 1, 100)(text.removesuffix("%"))
