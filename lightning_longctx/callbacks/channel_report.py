"""What a run shows people about its sources: the history of their losses, a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.callbacks.channel_values import ChannelValue

__all__ = ["ChannelHistory", "save_plot", "summary_table"]

# Points of the history before every second one is dropped: enough for any screen, small in a checkpoint.
_MAX_POINTS = 1000

# Told apart also by those who see few colours (the palette of Okabe and Ito), and by their line styles.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLES = ("-", "--", "-.", ":")


class ChannelHistory:
    """Losses by source over the logged steps of a run, thinned out evenly when there are many.

    Attributes:
        steps: logged steps, rising.
        losses: by source, one value for each step; NaN where the source had no target.
        last: by source, the loss of the last step in which it had a target.
        targets: by source, the targets of all logged windows.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: dict[str, list[float]] = {}
        self.last: dict[str, float] = {}
        self.targets: dict[str, int] = {}
        self._every, self._seen = 1, 0

    def add(self, step: int, values: Mapping[str, ChannelValue]) -> None:
        """Add one logged step."""
        for name, value in values.items():
            self.targets[name] = self.targets.get(name, 0) + value.targets
            self.last[name] = value.loss
            self.losses.setdefault(name, [math.nan] * len(self.steps))
        self._seen += 1
        if (self._seen - 1) % self._every:
            return
        self.steps.append(step)
        for name, losses in self.losses.items():
            losses.append(values[name].loss if name in values else math.nan)
        if len(self.steps) > _MAX_POINTS:
            self.steps = self.steps[::2]
            self.losses = {name: losses[::2] for name, losses in self.losses.items()}
            self._every *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists and tensors."""
        rows = torch.tensor(list(self.losses.values()), dtype=torch.float64)
        return {
            "steps": torch.tensor(self.steps, dtype=torch.int64),
            "losses": rows,
            "names": list(self.losses),
            "last": dict(self.last),
            "targets": dict(self.targets),
            "every": self._every,
            "seen": self._seen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue an earlier run's history."""
        steps, rows = state["steps"], state["losses"]
        assert isinstance(steps, Tensor)
        self.steps = steps.tolist()
        self.losses = dict(zip(state["names"], rows.tolist(), strict=True))
        self.last, self.targets = dict(state["last"]), dict(state["targets"])
        self._every, self._seen = int(state["every"]), int(state["seen"])


def summary_table(history: ChannelHistory) -> str:
    """Return a table for a terminal: each source's loss at the start and at the end, its targets and its share.

    Example:
        >>> history = ChannelHistory()
        >>> history.add(1, {"code": ChannelValue(4.0, 3.0, 30), "web": ChannelValue(5.0, 1.25, 10)})
        >>> history.add(2, {"code": ChannelValue(2.0, 2.0, 40)})
        >>> print(summary_table(history))
        source  first loss  last loss  change  targets  share
        code         4.000      2.000  -2.000       70  87.5%
        web          5.000      5.000  +0.000       10  12.5%
    """
    total = sum(history.targets.values())
    lines = [("source", "first loss", "last loss", "change", "targets", "share")]
    for name, losses in history.losses.items():
        last, count = history.last[name], history.targets[name]
        first = next((loss for loss in losses if not math.isnan(loss)), last)
        lines.append(
            (name, f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}", f"{count:,}", f"{count / total:.1%}")
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
    return "  ".join([line[0].ljust(widths[0]), *cells])


def save_plot(path: Path, history: ChannelHistory, title: str) -> Path:
    """Draw the loss of each source over the steps; return the path. No global state of matplotlib is used.

    Args:
        path: a ``.png``, ``.pdf`` or ``.svg`` file; its folder is made.
        history: what to draw.
        title: above the picture.
    """
    from matplotlib.figure import Figure  # here, since it takes a second to import

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, losses) in enumerate(history.losses.items()):
        known = [(step, loss) for step, loss in zip(history.steps, losses, strict=True) if not math.isnan(loss)]
        axes.plot(
            [step for step, _ in known],
            [loss for _, loss in known],
            label=name,
            color=_COLOURS[number % len(_COLOURS)],
            linestyle=_STYLES[number // len(_COLOURS) % len(_STYLES)],
            linewidth=1.5,
            marker="o" if len(known) == 1 else None,
        )
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if history.losses:
        axes.legend(loc="upper right", ncols=1 + len(history.losses) // 12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
