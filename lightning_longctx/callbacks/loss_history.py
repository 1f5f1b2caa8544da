"""The losses of the last steps, and whether one of them stands out. Read on the host only when somebody looks."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from lightning_longctx.callbacks.step_sums import Field

__all__ = ["LossHistory", "Trouble"]

# How many steps the median is taken over, and how many it needs: the first losses of a run fall fast.
_KEPT, _NEEDED = 100, 20


@dataclass(frozen=True)
class Trouble:
    """A step whose loss stands out.

    Attributes:
        step: its number.
        place: among the steps that were added since the last look, from their end: -1 is the last.
        loss: its token mean.
        usual: the median of the steps before it.
    """

    step: int
    place: int
    loss: float
    usual: float

    @property
    def is_nan(self) -> bool:
        """Whether the loss is not a finite number."""
        return not math.isfinite(self.loss)

    def __str__(self) -> str:
        return f"is {self.loss}" if self.is_nan else f"is {self.loss:.4g}, where {self.usual:.4g} is usual"


class LossHistory:
    """Collects reduced sums of steps; :meth:`look` finds the first without a number, else the highest spike.

    Args:
        spike_factor: how far above the median of the steps before it a loss stands out.
    """

    def __init__(self, spike_factor: float) -> None:
        self._factor = spike_factor
        self._known: deque[float] = deque(maxlen=_KEPT)
        self._new: list[tuple[int, Tensor]] = []
        self._told = False

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._new.clear()
        self._told = False

    def add(self, step: int, sums: Tensor) -> None:
        """Note a step, without reading it.

        Args:
            step: its number.
            sums: ``[len(Field)]``, over all ranks.
        """
        means = sums[Field.MEANS] / sums[Field.MEANS_COUNT].clamp(min=1)
        targets = sums[Field.TARGETS] - sums[Field.SILENT]
        exact = sums[Field.LOSS] / targets.clamp(min=1)
        counted = targets + sums[Field.MEANS_COUNT]
        self._new.append((step, torch.stack([torch.where(sums[Field.MEANS_COUNT] > 0, means, exact), counted])))

    def look(self) -> Trouble | None:
        """Read the steps since the last look, and return the one to tell of. A loss without a number is told once."""
        if not self._new:
            return None
        values = torch.stack([value for _, value in self._new]).tolist()
        found: list[Trouble] = []
        for place, ((step, _), (loss, counted)) in enumerate(zip(self._new, values, strict=True), -len(values)):
            if not counted:  # a step without targets, or without a loss
                continue
            usual = median(self._known) if self._known else math.nan
            if not math.isfinite(loss):
                found.append(Trouble(step, place, loss, usual))
                continue
            if len(self._known) >= _NEEDED and loss > self._factor * usual:
                found.append(Trouble(step, place, loss, usual))
            self._known.append(loss)
        self._new = []
        without_number = [trouble for trouble in found if trouble.is_nan]
        if without_number and not self._told:
            self._told = True
            return without_number[0]
        spikes = [trouble for trouble in found if not trouble.is_nan]
        return max(spikes, key=lambda trouble: trouble.loss / trouble.usual, default=None)
