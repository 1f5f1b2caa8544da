"""What every benchmark reports in the end: figures of ours next to a named peer's, with the bar where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Figure", "figure_table"]

#: Ratios closer to 1 than this are called even: medians of turns on a shared machine differ by as much.
_EVEN = 0.02


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        what: what was measured.
        ours: our number, in ``unit``.
        unit: such as ``ms``, or ``x memcpy`` for a ratio to a floor.
        peer: whose number stands beside it; empty where a bar alone judges.
        theirs: the peer's number, in the same unit.
        bar: what ours must not exceed (must reach, if more is better); None where nothing is judged.
        more_is_better: for throughput, fill and the like.
    """

    what: str
    ours: float
    unit: str
    peer: str = ""
    theirs: float | None = None
    bar: float | None = None
    more_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's; None without a peer, or where the peer's is 0."""
        return self.ours / self.theirs if self.theirs else None

    @property
    def against_peer(self) -> str:
        """``better``, ``even`` or ``worse`` than the peer; empty without one."""
        if self.theirs is None:
            return ""
        gain = self.ours - self.theirs if self.more_is_better else self.theirs - self.ours
        if abs(gain) <= _EVEN * abs(self.theirs):
            return "even"
        return "better" if gain > 0 else "worse"

    @property
    def bar_verdict(self) -> str:
        """``PASS`` or ``FAIL``; empty without a bar."""
        if self.bar is None:
            return ""
        passed = self.ours >= self.bar if self.more_is_better else self.ours <= self.bar
        return "PASS" if passed else "FAIL"


def figure_table(figures: Sequence[Figure]) -> str:
    """The figures as a markdown table."""
    lines = ["| what | ours | peer | peer's | ours / peer's | | bar | |", "|---|---|---|---|---|---|---|---|"]
    for figure in figures:
        cells = [
            figure.what,
            _with_unit(figure.ours, figure.unit),
            figure.peer,
            "" if figure.theirs is None else _with_unit(figure.theirs, figure.unit),
            "" if figure.ratio is None else _short(figure.ratio),
            figure.against_peer,
            "" if figure.bar is None else f"{'>=' if figure.more_is_better else '<='} {_short(figure.bar)}",
            figure.bar_verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_unit(value: float, unit: str) -> str:
    return f"{_short(value)} {unit}".strip()


def _short(value: float) -> str:
    """Three digits, or the whole number where it has more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
