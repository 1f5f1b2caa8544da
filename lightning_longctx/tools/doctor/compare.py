"""How far two sets of gradients are apart, and what that means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

__all__ = ["Difference", "Finding", "Verdict", "judge", "largest_difference", "worst_of"]

Verdict = Literal["ok", "fault", "tie", "skipped"]

#: Gap between the last chosen and the first rejected expert's probability below which fp32 sums may choose otherwise.
TIE = 1e-6


class Difference(NamedTuple):
    """The largest relative error, and where it is."""

    error: float
    where: str


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: ``gradients``, ``loss``, ``isolation``, ``causality``, ``evaluation`` or ``resume``; ``refused`` where an
            error of this package ended the layout.
        world_size: processes.
        sp_size: ranks of a row.
        accumulate: micro-batches of a step.
        layouts: how many were compared.
        error: the largest relative error of them; None if nothing could be compared.
        where: the parameter or token that it was found at.
        verdict: what it means.
        note: why something was skipped or refused.
    """

    check: str
    world_size: int
    sp_size: int
    accumulate: int
    layouts: int
    error: float | None
    where: str
    verdict: Verdict
    note: str = ""


def largest_difference(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 0.0) -> Difference:
    """Compare tensors by name: the largest ``max|got - expected| / max|expected|``.

    Args:
        got: what a layout gave. A missing one counts as zeros.
        expected: what the reference gave; likewise.
        floor: a tensor whose values are all below this part of the largest of all tensors is measured against that: a
            gradient that is zero but for rounding (of a key's bias, say) has no relative error of its own.

    Example:
        >>> import torch
        >>> ones = torch.ones(2)
        >>> largest_difference({"a": ones, "b": ones * 1.25}, {"a": ones, "b": ones})
        Difference(error=0.25, where='b')
    """
    largest = max((float(value.abs().max()) for value in expected.values()), default=0.0)
    worst = Difference(0.0, "")
    for name in sorted(got.keys() | expected.keys()):
        error = _error(got.get(name), expected.get(name), floor * largest)
        if error > worst.error:
            worst = Difference(error, name)
    return worst


def _error(got: Tensor | None, expected: Tensor | None, least: float) -> float:
    if got is None or expected is None:
        present = got if expected is None else expected
        return float(present is not None and bool(present.any()))
    distance = float((got - expected).abs().max())
    if math.isnan(distance):
        return math.inf  # so that it is the largest of all
    return distance if distance == 0 else distance / max(float(expected.abs().max()), least, 1e-30)


def judge(error: float, limit: float, margin: float = float("inf")) -> Verdict:
    """Say what an error means.

    Args:
        error: relative.
        limit: up to which summation order explains it.
        margin: smallest gap between the last chosen and the first rejected expert in the reference. Where it is next to
            nothing, another order of summation chooses another expert, and both are right.
    """
    if error <= limit:
        return "ok"
    return "tie" if margin < TIE else "fault"


def worst_of(steps: Iterable[tuple[Difference, float]], limit: float) -> tuple[Difference, Verdict]:
    """The step that says most of a layout: the largest error of a fault, which no tie of another step hides.

    Args:
        steps: what each differs by, and its margin.
        limit: up to which summation order explains an error.

    Example:
        >>> worst_of([(Difference(0.5, "a"), 1e-9), (Difference(0.1, "b"), 1.0)], 1e-5)
        (Difference(error=0.1, where='b'), 'fault')
    """
    judged = [(difference, judge(difference.error, limit, margin)) for difference, margin in steps]
    order = ("ok", "tie", "fault")
    return max(judged, key=lambda pair: (order.index(pair[1]), pair[0].error))
