"""The flags of ``longctx report``. It needs no configuration: a run has its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.flags import FlagParser

__all__ = ["ReportOptions", "read_options"]


@dataclass(frozen=True)
class ReportOptions:
    """What to show, and where.

    Attributes:
        runs: directories of runs, each with the files of a logger.
        out: file of the page. Default: ``report.html`` in the run, or beside the first of several runs.
        json: file for facts and curves as numbers; None for none.
    """

    runs: tuple[Path, ...]
    out: Path
    json: Path | None = None


def read_options(words: Sequence[str]) -> ReportOptions:
    """Read the words after ``longctx report``.

    Raises:
        ConfigurationError: no run, an unknown flag, or a page that would not be one.
    """
    parser = FlagParser(
        "report", "Make one self-contained HTML page of a run, or of several runs.", usage="RUN [RUN ...] [options]"
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="directory of a run, with a logger's files")
    parser.add("out", type=Path, help="file of the page (report.html in the run; beside the first of several)")
    parser.add("json", type=Path, help="also write facts and curves to this file")
    found = parser.read_all(words)
    runs = tuple(dict.fromkeys(found["runs"]))
    if not runs:
        raise ConfigurationError("RUN", "must be given", "nothing", "Write `longctx report runs/version_0`.")
    out = found["out"] or (runs[0] if len(runs) == 1 else runs[0].resolve().parent) / "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError("--out", "must name an .html file", repr(str(out)), "Rename it.")
    return ReportOptions(runs, out, found["json"])
