"""One curve: its values by step, and what is left of it when there are more points than a screen can show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Curve", "Series", "thinned"]

_LARGEST = 1e300  # beyond it there is nothing but overflow, and no axis has room for it


@dataclass(frozen=True)
class Series:
    """Values of one key.

    Attributes:
        steps: int64 ``[n]``, rising.
        values: float64 ``[n]``; may hold NaN and infinities.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @staticmethod
    def empty() -> Series:
        """A series without points."""
        return Series(np.zeros(0, np.int64), np.zeros(0, np.float64))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> Series:
        """Only the numbers."""
        known = np.abs(self.values) < _LARGEST
        return self if known.all() else Series(self.steps[known], self.values[known])

    @property
    def bad_steps(self) -> NDArray[np.int64]:
        """Steps whose value is no number."""
        return self.steps[~(np.abs(self.values) < _LARGEST)]

    @property
    def last(self) -> float:
        """The last value; NaN without any."""
        return float(self.values[-1]) if len(self) else float("nan")

    @property
    def first(self) -> float:
        """The first value; NaN without any."""
        return float(self.values[0]) if len(self) else float("nan")


@dataclass(frozen=True)
class Curve:
    """What is drawn of a series: all of its points, or one of each bucket of steps with what the bucket spans.

    Attributes:
        steps: float64 ``[n]``.
        middle: float64 ``[n]``: the values, or means of buckets.
        low: float64 ``[n]``: smallest value of the bucket.
        high: float64 ``[n]``: largest value of the bucket.
        whole: whether all points are there.
    """

    steps: NDArray[np.float64]
    middle: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    whole: bool


def thinned(series: Series, buckets: int) -> Curve:
    """Thin a series out, so that the smallest and the largest value of every bucket stay.

    Args:
        series: any length; what is no number is left out.
        buckets: equal spans of steps; a series of up to twice as many points stays whole.

    Example:
        >>> peak = np.zeros(10_000)
        >>> peak[1234] = 9.0
        >>> curve = thinned(Series(np.arange(10_000), peak), 100)
        >>> len(curve.steps), float(curve.high.max()), curve.whole
        (100, 9.0, False)
    """
    known = series.finite
    steps, values = known.steps.astype(np.float64), known.values
    if len(known) <= 2 * buckets:
        return Curve(steps, values, values, values, whole=True)
    edges = np.linspace(steps[0], steps[-1], buckets, endpoint=False)
    starts = np.unique(np.searchsorted(steps, edges))  # a bucket without a point has none
    counts = np.diff(np.append(starts, len(steps)))
    return Curve(
        np.add.reduceat(steps, starts) / counts,
        np.add.reduceat(values, starts) / counts,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
        whole=False,
    )
