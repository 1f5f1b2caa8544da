"""The flags of ``longctx plan``. All other words belong to the configuration and are passed on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.flags import FlagParser, gib, integer
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


def read_options(words: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """Split the words after ``longctx plan`` into the tool's own options and the words of the configuration.

    Raises:
        ConfigurationError: a value that cannot be, a misspelt flag, or no ``--device-gb``.
    """
    found, rest = _parser().split(words)
    if found["device_gb"] is None:
        raise ConfigurationError("--device-gb", "must be given", "nothing", "Write `--device-gb 80` for an 80 GB GPU.")
    return PlanOptions(**{("folder" if name == "out" else name): value for name, value in found.items()}), rest


def _parser() -> FlagParser:
    parser = FlagParser(
        "plan",
        "Tell whether a model at a length fits a device, and what to switch on: no GPU, no weights.",
        "--device-gb 80 ",
    )
    add = parser.add
    add("device-gb", type=gib, help="memory of one device in GiB")
    add("host-gb", type=gib, help="memory of one node in GiB, for activation offload (not judged)")
    add("devices", type=integer(1), help="devices of a node (those of the configuration)")
    add("max-seq-len", type=_tokens, help="tokens of a document, such as 512K (that of the configuration)")
    add("write", type=Path, help="write the smallest set of switches that fits to this file, as a second --config")
    add("out", type=Path, default=Path("runs/plan"), help="folder for table and plot (%(default)s)")
    add("json", type=Path, help="also write all numbers to this file")
    add("plot", type=Path, help="file of the plot (plan.png in the folder)")
    add("brief", action="store_true", help="without the longest sequences that fit")
    return parser


def _tokens(text: str) -> int:
    try:
        return parse_token_count(text, "--max-seq-len")
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(f"{error.rule} but got {text!r}") from None
