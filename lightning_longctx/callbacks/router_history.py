"""What a run remembers of windows that are over: the extremes of each layer, for the strip, and experts that starve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.callbacks.router_metrics import RouterLoad, violations
from lightning_longctx.units import counted

__all__ = ["RouterHistory", "StarvedExperts"]

# Windows before every second one is dropped: as many columns as fit a screen, small in a checkpoint and on every rank.
_MAX_WINDOWS = 512


class RouterHistory:
    """The busiest and the emptiest expert of each layer, window by window, thinned out evenly when there are many.

    Args:
        labels: of the layers.

    Attributes:
        windows: windows so far, dropped ones too.
        first_step: first step counted; None before the first window.
        steps: last step of each window that is kept.
        extremes: for each of them float64 ``[2, layers]``: violations of the busiest and of the emptiest expert; NaN
            for a silent layer.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self.windows = 0
        self.first_step: int | None = None
        self.steps: list[int] = []
        self.extremes: list[Tensor] = []
        self._every = 1

    def add(self, load: RouterLoad) -> None:
        """Add a window."""
        self.first_step = load.first_step if self.first_step is None else self.first_step
        self.windows += 1
        if (self.windows - 1) % self._every:
            return
        values = [violations(counts) for counts in load.tokens]
        self.steps.append(load.last_step)
        self.extremes.append(torch.stack([torch.stack([value.max(), value.min()]) for value in values], 1))
        if len(self.steps) > _MAX_WINDOWS:
            self.steps, self.extremes = self.steps[::2], self.extremes[::2]
            self._every *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists and tensors."""
        return {
            "windows": self.windows,
            "first_step": self.first_step,
            "steps": list(self.steps),
            "extremes": torch.stack(self.extremes) if self.extremes else torch.zeros(0, 2, len(self.labels)),
            "every": self._every,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue an earlier run's history."""
        self.windows, self.first_step, self._every = state["windows"], state["first_step"], state["every"]
        self.steps, self.extremes = list(state["steps"]), list(state["extremes"].unbind(0))


class StarvedExperts:
    """Notices experts that get no token for some windows in a row.

    Args:
        limit: how many windows; None never notices.
        experts: number of experts of each layer.
    """

    def __init__(self, limit: int | None, experts: Sequence[int]) -> None:
        self._limit = limit
        self._windows = [torch.zeros(count, dtype=torch.int64) for count in experts]

    def add(self, load: RouterLoad) -> str | None:
        """Add a window; returns what to tell, once for each time that experts starve."""
        found = []
        for label, windows, counts in zip(load.labels, self._windows, load.tokens, strict=True):
            if not bool(counts.sum()):
                continue  # a silent layer says nothing about its experts
            windows[:] = torch.where(counts == 0, windows + 1, 0)
            # Only when the limit is reached, not in each window after it.
            dead = (windows == self._limit).nonzero().flatten().tolist() if self._limit is not None else ()
            if dead:
                found.append(f"{label} {dead}")
        if not found:
            return None
        assert self._limit is not None
        return (
            f"MoERouterHeatmap: no token for {counted(self._limit, 'window')}, until step {load.last_step}, for the"
            f" experts {', '.join(found[:8])} ({counted(len(found), 'layer')} in all)."
        )

    def state_dict(self) -> list[Tensor]:
        """Return for each layer the windows without a token, by expert."""
        return [windows.clone() for windows in self._windows]

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        """Go on counting."""
        for windows, saved in zip(self._windows, state, strict=True):
            windows.copy_(saved)
