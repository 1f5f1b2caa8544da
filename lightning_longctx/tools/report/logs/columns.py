"""Values by key as a logger's files tell them, one after another."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.tools.report.series import Series

__all__ = ["Columns"]

#: What loggers add on their own; the steps are read beside the values.
_OWN = frozenset({"step", "epoch", "hp_metric", "trainer/global_step"})


class Columns:
    """Collects values in the order in which they were logged.

    Where a step comes twice (a run that went back to a checkpoint), the later value counts.

    Example:
        >>> columns = Columns()
        >>> columns.add("loss", [0, 1, 1], ["3", "2", "1.5"])
        >>> columns.series()["loss"].values.tolist()
        [3.0, 1.5]
    """

    def __init__(self) -> None:
        self._found: defaultdict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))

    def add(self, key: str, steps: Iterable[int], values: Iterable[str | float]) -> None:
        """Add values of a key; empty ones and texts that are no numbers are left out.

        Raises:
            OverflowError: a step that has more than 64 bits.
        """
        if key in _OWN:
            return
        to_steps, to_values = self._found[key]
        for step, value in zip(steps, values, strict=True):
            if value == "":
                continue
            try:
                number = float(value)
            except (ValueError, OverflowError):  # a text that somebody logged, or 400 digits
                continue
            to_steps.append(step)
            to_values.append(number)

    def drop_from(self, first: int) -> None:
        """Leave out what was added of a step and of all later ones: the run went back behind it."""
        for key, (steps, values) in self._found.items():
            kept = [place for place, step in enumerate(steps) if step < first]
            if len(kept) < len(steps):
                self._found[key] = (array("q", (steps[at] for at in kept)), array("d", (values[at] for at in kept)))

    def series(self) -> dict[str, Series]:
        """The curves, only those with a value."""
        return {key: _series(*found) for key, found in self._found.items() if found[0]}


def _series(steps: array[int], values: array[float]) -> Series:
    at: NDArray[np.int64] = np.frombuffer(steps, dtype=np.int64)
    found: NDArray[np.float64] = np.frombuffer(values, dtype=np.float64)
    if len(at) > 1 and (np.diff(at) <= 0).any():
        at, back = np.unique(at[::-1], return_index=True)  # of equal steps the first from the end
        found = found[::-1][back]
    return Series(at, found)
