"""The flags of ``longctx plan``. All other words belong to the configuration and are passed on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import parse_token_count

__all__ = ["PlanOptions", "read_options"]


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for, and where to write it.

    Attributes:
        device_gb: memory of one device in GiB, as the driver shows it.
        host_gb: memory of one node in GiB, for activation offload. Default None: host use is shown and not judged.
        devices: of a node. Default None: those of the configuration.
        max_seq_len: tokens of a document. Default None: that of the configuration.
        write: file for the smallest set of switches that fits; None for none.
        folder: where table and plot go. Default ``runs/plan``, beside the runs.
        json: file for all numbers; None for none.
        plot: file of the plot. Default None: ``plan.png`` in ``folder``.
        brief: leave out the longest sequences, which take most of the time.
    """

    device_gb: float
    host_gb: float | None = None
    devices: int | None = None
    max_seq_len: int | None = None
    write: Path | None = None
    folder: Path = Path("runs/plan")
    json: Path | None = None
    plot: Path | None = None
    brief: bool = False


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise the error with its flag as the field."""
        field, _, text = message.removeprefix("argument ").partition(": ")
        rule, _, got = text.partition(" but got ")
        raise ConfigurationError(field.split("/")[0], rule or "must be valid", got or message, "See `longctx plan -h`.")


def read_options(words: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """Split the words after ``longctx plan`` into the tool's own options and the words of the configuration.

    Raises:
        ConfigurationError: a value that cannot be, a misspelt flag, or no ``--device-gb``.
    """
    found, rest = _parser().parse_known_args(list(words))
    known = [f"--{name.replace('_', '-')}" for name in vars(found)]
    for word in rest:
        flag = word.partition("=")[0]
        near = get_close_matches(flag, known, n=1, cutoff=0.75) if flag.startswith("--") and "." not in flag else []
        if near:
            raise ConfigurationError(
                flag, "must be a flag of longctx plan", "an unknown one", f"Did you mean {near[0]}?"
            )
    values: dict[str, Any] = {("folder" if name == "out" else name): value for name, value in vars(found).items()}
    if values["device_gb"] is None:
        raise ConfigurationError("--device-gb", "must be given", "nothing", "Write `--device-gb 80` for an 80 GB GPU.")
    return PlanOptions(**values), rest


def _parser() -> _Parser:
    parser = _Parser(
        prog="longctx plan",
        usage="longctx plan --config FILE --device-gb 80 [--SECTION.KEY VALUE ...] [options]",
        description="Tell whether a model at a length fits a device, and what to switch on: no GPU, no weights.",
        allow_abbrev=False,
    )

    def add(name: str, **settings: Any) -> None:
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        parser.add_argument(*spellings, **settings)

    add("device-gb", type=_gib, help="memory of one device in GiB")
    add("host-gb", type=_gib, help="memory of one node in GiB, for activation offload (not judged)")
    add("devices", type=_positive, help="devices of a node (those of the configuration)")
    add("max-seq-len", type=_tokens, help="tokens of a document, such as 512K (that of the configuration)")
    add("write", type=Path, help="write the smallest set of switches that fits to this file, as a second --config")
    add("out", type=Path, default=Path("runs/plan"), help="folder for table and plot (%(default)s)")
    add("json", type=Path, help="also write all numbers to this file")
    add("plot", type=Path, help="file of the plot (plan.png in the folder)")
    add("brief", action="store_true", help="without the longest sequences that fit")
    return parser


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 2**20:
        raise argparse.ArgumentTypeError(f"must be a number of GiB such as 80 but got {text!r}")
    return value


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer but got {text!r}")
    return int(text)


def _tokens(text: str) -> int:
    return parse_token_count(text, "--max-seq-len")
