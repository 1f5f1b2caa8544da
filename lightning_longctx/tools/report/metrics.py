"""``metrics.csv`` of Lightning's CSVLogger as curves, also while the run still writes it."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.report.rows import read_rows
from lightning_longctx.tools.report.series import Series

__all__ = ["read_metrics"]

_STEP = "step"


def read_metrics(path: Path) -> dict[str, Series]:
    """Read all keys.

    A last line that is still being written is left out. Where a step comes twice (a run that went back), the later row
    counts. Cells that are no numbers are left out.

    Args:
        path: the file.

    Returns:
        By key, without ``step`` and ``epoch``; only those with a value.

    Raises:
        ConfigurationError: no row yet, no column ``step``, or no CSV.
    """
    fix = "Give the directory of a run that CSVLogger wrote."
    try:
        chunks = read_rows(path)
        names = next(chunks)[0]
        if _STEP not in names:
            got = f"columns {', '.join(names[:5])}" if names else "an empty file"
            raise ConfigurationError(str(path), "must have a column `step`", got, fix)
        columns = _read(chunks, names)
    except (csv.Error, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(str(path), "must be the CSV of CSVLogger", str(error), fix) from error
    if not columns:
        got, fix = "none", "The logger writes at `flush_logs_every_n_steps` and at the end of the run: try again later."
        raise ConfigurationError(str(path), "must have rows with values", got, fix)
    return columns


def _read(chunks: Iterator[list[list[str]]], names: Sequence[str]) -> dict[str, Series]:
    steps = {name: array("q") for name in names}
    values = {name: array("d") for name in names}
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
            if name not in (_STEP, "epoch"):
                _add(steps[name], values[name], of_rows, cells)
    return {name: _series(steps[name], values[name]) for name in names if steps[name]}


def _add(steps: array[int], values: array[float], of_rows: Sequence[int], cells: Sequence[str]) -> None:
    for step, cell in zip(of_rows, cells, strict=True):
        if not cell:
            continue
        try:
            values.append(float(cell))
        except ValueError:  # a text that somebody logged
            continue
        steps.append(step)


def _series(steps: array[int], values: array[float]) -> Series:
    at: NDArray[np.int64] = np.frombuffer(steps, dtype=np.int64)
    found: NDArray[np.float64] = np.frombuffer(values, dtype=np.float64)
    if len(at) > 1 and (np.diff(at) <= 0).any():
        at, back = np.unique(at[::-1], return_index=True)  # of equal steps the first from the end
        found = found[::-1][back]
    return Series(at, found)
