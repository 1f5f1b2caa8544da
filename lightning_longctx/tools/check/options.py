"""The flags of ``longctx check``. All other words belong to the configuration and are passed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_longctx.tools.flags import FlagParser, gib, integer

__all__ = ["CheckOptions", "read_options"]


@dataclass(frozen=True)
class CheckOptions:
    """For which machine to check, and where to write it.

    Attributes:
        device_gb: memory of one device in GiB, of a machine that is not this one. Default None: of this one's.
        devices: of a node. Default None: those of the configuration.
        json: file for all of it; None for none.
    """

    device_gb: float | None = None
    devices: int | None = None
    json: Path | None = None


def read_options(words: Sequence[str]) -> tuple[CheckOptions, list[str]]:
    """Split the words after ``longctx check`` into the tool's own options and the words of the configuration.

    Raises:
        ConfigurationError: a value that cannot be, or a misspelt flag.
    """
    parser = FlagParser("check", "Do all of a start but train: no process is started, no accelerator is used.")
    parser.add("device-gb", type=gib, help="memory of one device in GiB, where training runs on another machine")
    parser.add("devices", type=integer(1), help="devices of a node (those of the configuration)")
    parser.add("json", type=Path, help="also write all of it to this file")
    found, rest = parser.split(words)
    return CheckOptions(**found), rest
