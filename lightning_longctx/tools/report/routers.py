"""``moe_router/tokens_per_expert.csv``: tokens of each expert, by window and layer."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.report.rows import read_rows
from lightning_longctx.tools.report.series import Series
from lightning_longctx.units import counted

__all__ = ["TABLE", "ExpertLoad", "load_of_run", "read_expert_load"]

#: The name of the file.
TABLE = "tokens_per_expert.csv"

#: Tokens by window, layer and expert.
_Rows: TypeAlias = dict[tuple[int, int], dict[str, dict[int, int]]]

_COLUMNS = ("first_step", "last_step", "layer", "expert", "tokens")


@dataclass(frozen=True)
class ExpertLoad:
    """Expert load over a run.

    Attributes:
        windows: first and last step of each, in the order of their last steps.
        layers: labels.
        tokens: int64 ``[windows, layers, experts]``; -1 where a layer has no such expert.
    """

    windows: tuple[tuple[int, int], ...]
    layers: tuple[str, ...]
    tokens: NDArray[np.int64]

    @property
    def violations(self) -> NDArray[np.float64]:
        """How far each expert is from its fair share, ``E * P - 1``, float64 ``[windows, layers, experts]``.

        NaN where nothing was counted, and where there is no expert (:attr:`exists` tells these apart).
        """
        exists = self.exists
        counts = np.where(exists, self.tokens, 0)
        total = counts.sum(2, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(exists & (total > 0), exists.sum(2, keepdims=True) * counts / total - 1, np.nan)

    @property
    def exists(self) -> NDArray[np.bool_]:
        """Where there is an expert."""
        return self.tokens >= 0


def read_expert_load(path: Path) -> ExpertLoad | None:
    """Read the table that ``MoERouterHeatmap`` appends to; of a window that comes twice the later counts.

    Args:
        path: the file.

    Returns:
        None if there is no such file, or no whole window in it yet.

    Raises:
        ConfigurationError: a file of another form.
    """
    if not path.is_file():
        return None
    try:
        rows = _read(path)
    except (csv.Error, ValueError) as error:
        fix = "It is what MoERouterHeatmap writes: move the file away if something else changed it."
        raise ConfigurationError(str(path), f"must have the columns {', '.join(_COLUMNS)}", str(error), fix) from error
    return _as_array(rows) if rows else None


def load_of_run(tables: Sequence[Path], most_tokens: Series) -> ExpertLoad | None:
    """Of several tables in a folder that runs share, the one whose numbers the run has logged.

    Args:
        tables: files.
        most_tokens: what the run logged as ``moe/tokens_max``, at the last step of each window.

    Returns:
        None if no window of any table is this run's.
    """
    logged = dict(zip(most_tokens.steps.tolist(), most_tokens.values.tolist(), strict=True))
    found = [load for path in tables if (load := read_expert_load(path)) is not None]
    equal = [_windows_logged(load, logged) for load in found]
    return found[equal.index(max(equal))] if any(equal) else None


def _windows_logged(load: ExpertLoad, logged: dict[int, float]) -> int:
    most = load.tokens.max((1, 2)).tolist()
    return sum(
        math.isclose(logged.get(last - 1, math.nan), count, rel_tol=1e-6)  # loggers count from 0; some keep float32
        for (_, last), count in zip(load.windows, most, strict=True)
    )


def _read(path: Path) -> _Rows:
    rows: _Rows = {}
    chunks = read_rows(path)
    names = next(chunks)[0]
    first, last, layer, expert, tokens = (names.index(name) for name in _COLUMNS)
    highest = lines = 0
    for row in chain.from_iterable(chunks):
        at, count = int(row[expert]), int(row[tokens])
        if at < 0 or not 0 <= count < 2**62:
            raise ValueError(f"expert {at}: {counted(count, 'token')}")
        highest, lines = max(highest, at), lines + 1
        window = rows.setdefault((int(row[first]), int(row[last])), {})
        window.setdefault(row[layer], {})[at] = count
    if highest > lines:  # each expert has its row: the array would be as large as any broken number
        raise ValueError(f"expert {highest} in {counted(lines, 'row')}")
    return rows


def _as_array(rows: _Rows) -> ExpertLoad:
    windows = sorted(rows, key=lambda window: (window[1], window[0]))
    layers = list(dict.fromkeys(layer for window in windows for layer in rows[window]))
    experts = 1 + max(max(counts) for window in rows.values() for counts in window.values())
    array = np.full((len(windows), len(layers), experts), -1, np.int64)
    place = {layer: number for number, layer in enumerate(layers)}
    for number, window in enumerate(windows):
        for layer, counts in rows[window].items():
            array[number, place[layer], list(counts)] = list(counts.values())
    return ExpertLoad(tuple(windows), tuple(layers), array)
