"""The flags of ``longctx doctor``. All other words belong to the configuration and are passed on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_longctx.tools.flags import FlagParser, integer, number

__all__ = ["FOLDER", "DoctorOptions", "read_options"]

#: Where the last report is.
FOLDER = Path("runs/doctor")

_SHARE = number("a number between 0 and 1 such as 1e-5", 0, 1)


@dataclass(frozen=True)
class DoctorOptions:
    """What to compare, and how strictly.

    Attributes:
        full: examine the model whole. Default False: two small layers of the same family, in seconds.
        layouts: random layouts, over all worlds. Default 24: four of each pair of processes and ranks of a row.
        seed: of the layouts. Default 0: the same ones each time.
        tolerance: largest relative error of a gradient or loss. Default 1e-5: ten times what the order of fp32 sums
            gives in small models. Deep ones need more.
        row_tokens: tokens of a row. Default 48: 4 ranks divide it, and attention over it takes no time.
        processes: the largest world. Default 4.
        timeout: seconds that the processes of one world may take. Default 600.
        folder: where ``doctor.md`` and ``doctor.json`` go. Default ``runs/doctor``, beside the runs, which look there.
        json: another file for all numbers; None for none.
        as_rank: set in the processes that the doctor starts: the file with what to do.
    """

    full: bool = False
    layouts: int = 24
    seed: int = 0
    tolerance: float = 1e-5
    row_tokens: int = 48
    processes: int = 4
    timeout: int = 600
    folder: Path = FOLDER
    json: Path | None = None
    as_rank: Path | None = None


def read_options(words: Sequence[str]) -> tuple[DoctorOptions, list[str]]:
    """Split the words after ``longctx doctor`` into the tool's own options and the words of the configuration.

    Raises:
        ConfigurationError: a value that cannot be, or a misspelt flag.
    """
    found, rest = _parser().split(words)
    return DoctorOptions(**{("folder" if name == "out" else name): value for name, value in found.items()}), rest


def _parser() -> FlagParser:
    default = DoctorOptions()
    parser = FlagParser("doctor", "Prove on CPU processes that a model trains alike in every layout.")
    add = parser.add
    add("full", action="store_true", help="the whole model, not a small one of its family")
    add("layouts", type=integer(1), default=default.layouts, help="random layouts (%(default)s)")
    add("seed", type=integer(0), default=default.seed, help="of the layouts (%(default)s)")
    add("tolerance", type=_SHARE, default=default.tolerance, help="largest relative error (%(default)s)")
    add("row-tokens", type=_tokens, default=default.row_tokens, help="tokens of a row (%(default)s)")
    add("processes", type=int, choices=(1, 2, 4), default=default.processes, help="of the largest world (%(default)s)")
    add("timeout", type=integer(1), default=default.timeout, help="seconds for each world (%(default)s)")
    add("out", type=Path, default=default.folder, help="folder for the report (%(default)s)")
    add("json", type=Path, help="also write all numbers to this file")
    add("as-rank", type=Path, help=argparse.SUPPRESS)
    return parser


def _tokens(text: str) -> int:
    value = integer(24)(text)
    if value % 4:
        raise argparse.ArgumentTypeError(f"must be a multiple of 4, the most ranks of a row, but got {text!r}")
    return value
