"""The flags of ``longctx doctor``. All other words belong to the configuration and are passed on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from lightning_longctx.errors import ConfigurationError

__all__ = ["DoctorOptions", "read_options"]


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
        json: file for all numbers; None for none.
        as_rank: set in the processes that the doctor starts: the file with what to do.
    """

    full: bool = False
    layouts: int = 24
    seed: int = 0
    tolerance: float = 1e-5
    row_tokens: int = 48
    processes: int = 4
    timeout: int = 600
    json: Path | None = None
    as_rank: Path | None = None


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise the error with its flag as the field."""
        field, _, text = message.removeprefix("argument ").partition(": ")
        rule, _, got = text.partition(" but got ")
        fix = "See `longctx doctor -h`."
        raise ConfigurationError(field.split("/")[0], rule or "must be valid", got or message, fix)


def read_options(words: Sequence[str]) -> tuple[DoctorOptions, list[str]]:
    """Split the words after ``longctx doctor`` into the tool's own options and the words of the configuration.

    Raises:
        ConfigurationError: a value that cannot be, or a misspelt flag.
    """
    found, rest = _parser().parse_known_args(list(words))
    known = [f"--{name.replace('_', '-')}" for name in vars(found)]
    for word in rest:
        flag = word.partition("=")[0]
        near = get_close_matches(flag, known, n=1, cutoff=0.75) if flag.startswith("--") and "." not in flag else []
        if near:
            fix = f"Did you mean {near[0]}?"
            raise ConfigurationError(flag, "must be a flag of longctx doctor", "an unknown one", fix)
    return DoctorOptions(**vars(found)), rest


def _parser() -> _Parser:
    default = DoctorOptions()
    parser = _Parser(
        prog="longctx doctor",
        usage="longctx doctor --config FILE [--SECTION.KEY VALUE ...] [options]",
        description="Prove on CPU processes that a model trains alike in every layout.",
        allow_abbrev=False,
    )

    def add(name: str, **settings: Any) -> None:
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        parser.add_argument(*spellings, **settings)

    add("full", action="store_true", help="the whole model, not a small one of its family")
    add("layouts", type=_positive, default=default.layouts, help="random layouts (%(default)s)")
    add("seed", type=_count, default=default.seed, help="of the layouts (%(default)s)")
    add("tolerance", type=_small, default=default.tolerance, help="largest relative error (%(default)s)")
    add("row-tokens", type=_tokens, default=default.row_tokens, help="tokens of a row (%(default)s)")
    add("processes", type=int, choices=(1, 2, 4), default=default.processes, help="of the largest world (%(default)s)")
    add("timeout", type=_positive, default=default.timeout, help="seconds for each world (%(default)s)")
    add("json", type=Path, help="also write all numbers to this file")
    add("as-rank", type=Path, help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    return _integer(text, 1)


def _count(text: str) -> int:
    return _integer(text, 0)


def _tokens(text: str) -> int:
    value = _integer(text, 24)
    if value % 4:
        raise argparse.ArgumentTypeError(f"must be a multiple of 4, the most ranks of a row, but got {text!r}")
    return value


def _integer(text: str, least: int) -> int:
    digits = text.replace("_", "")
    if not (digits.isascii() and digits.isdigit()) or int(digits) < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least} but got {text!r}")
    return int(digits)


def _small(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1 such as 1e-5 but got {text!r}")
    return value
