"""``metrics.csv`` of Lightning's CSVLogger, also while the run still writes it."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.report.logs.columns import Columns
from lightning_longctx.tools.report.rows import read_rows
from lightning_longctx.tools.report.series import Series

__all__ = ["files_in", "read"]

_STEP = "step"
_TOLD = 80  # characters of a file that may be of any kind


def files_in(path: Path) -> list[Path]:
    """The file of a run's directory; none where it is not there."""
    file = path / "metrics.csv"
    return [file] if file.is_file() else []


def read(files: Sequence[Path]) -> dict[str, Series]:
    """Read all keys.

    A last line that is still being written is left out, and so are cells that are no numbers.

    Args:
        files: the one file.

    Returns:
        By key; empty without a row yet.

    Raises:
        ConfigurationError: no column ``step``, or no CSV.
    """
    (path,) = files
    fix = "Give the directory of a run that CSVLogger wrote."
    try:
        chunks = read_rows(path)
        names = next(chunks)[0]
        if _STEP not in names:
            told = "".join(char if char.isprintable() else "?" for char in ", ".join(names[:5]))[:_TOLD]
            got = f"columns {told}" if names else "an empty file"
            raise ConfigurationError(str(path), "must have a column `step`", got, fix)
        return _read(chunks, names)
    except (csv.Error, ValueError, OverflowError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(str(path), "must be the CSV of CSVLogger", str(error), fix) from error


def _read(chunks: Iterator[list[list[str]]], names: Sequence[str]) -> dict[str, Series]:
    found = Columns()
    step = 0
    for rows in chunks:
        columns = list(zip(*rows, strict=True))
        if not columns:
            continue
        of_rows = []
        for cell in columns[names.index(_STEP)]:
            step = int(float(cell)) if cell else step
            of_rows.append(step)
        for name, cells in zip(names, columns, strict=True):
            found.add(name, of_rows, cells)
    return found.series()
