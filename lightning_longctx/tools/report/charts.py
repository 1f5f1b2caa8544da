"""Line charts as inline SVG: the picture stretches with the page, and labels are text that a phone can read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.tools.report.html import Markup, join, tag
from lightning_longctx.tools.report.numbers import decades, pleasant_ticks, short, whole
from lightning_longctx.tools.report.series import Curve, Series, thinned
from lightning_longctx.units import counted

__all__ = ["COLOURS", "Line", "chart", "sparkline"]

#: Number of colours of lines in ``report.css``; further lines are grey.
COLOURS = 8

_UNIT = 1000.0  # the drawing's own width and height, whatever the screen has
_POINTS = 6000  # of all lines of a chart
_FEWEST, _MOST = 40, 500  # buckets of one line
_DOTTED = 40  # up to so many points each gets a dot
_LOG_RATIO = 200.0  # from here on small values would lie on the axis
_MARKS = 200  # of values that are no number


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: in the legend.
        series: its points.
        colour: number of its colour; from :data:`COLOURS` on grey.
        dashed: told apart from another line of the same colour.
        dots: only dots, for what happens now and then.
    """

    name: str
    series: Series
    colour: int
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool = False

    def place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """From 0 to 1."""
        if self.log:
            values, low, high = np.log10(values), math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        return np.asarray((values - low) / (high - low), np.float64)

    def ticks(self, most: int) -> list[float]:
        return decades(self.low, self.high) if self.log else pleasant_ticks(self.low, self.high, most)


def chart(title: str, note: str, lines: Sequence[Line], percent: bool = False, wide: bool = False) -> Markup | None:
    """A chart with its title, legend and axes; where each line has one point, the values as text.

    Args:
        title: what is shown.
        note: its unit, and what a value is over.
        lines: those without a number are left out.
        percent: values are shares.
        wide: over the whole width of the page.

    Returns:
        None if there is nothing to draw.
    """
    shown = [line for line in lines if len(line.series.finite)]
    if not shown:
        return None
    if all(len(line.series.finite) == 1 for line in shown):
        return _values(title, note, shown, percent)
    buckets = int(min(_MOST, max(_FEWEST, _POINTS // len(shown))))
    curves = [thinned(line.series, buckets) for line in shown]
    across = _steps_axis(shown)
    up = _values_axis(curves, percent)
    # Grey lines first, so that they do not lie on the coloured ones.
    drawn = sorted(zip(shown, curves, strict=True), key=lambda pair: pair[0].colour < COLOURS)
    picture = tag(
        "svg",
        *(_draw(line, curve, across, up) for line, curve in drawn),
        viewBox=f"0 0 {_UNIT:.0f} {_UNIT:.0f}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title}: {', '.join(line.name for line in shown[:COLOURS])}",
    )
    scale = "logarithmic scale" if up.log else ""
    band = "" if all(curve.whole for curve in curves) else "line: mean, shade: smallest to largest"
    bad = sum(len(line.series.bad_steps) for line in shown)
    lost = f"{counted(bad, 'value')} no number (red)" if bad else ""
    small = "; ".join(part for part in (note, scale, band, lost) if part)
    return tag(
        "figure",
        tag("figcaption", tag("h3", title), tag("p", small, class_="note"), _legend(shown)),
        tag(
            "div",
            *_grid(up, percent),
            tag("div", picture, tag("div", class_="cursor"), class_="canvas"),
            *_step_labels(across, 9 if wide else 6),
            class_="plot",
            data_x=f"{across.low:.10g} {across.high:.10g}",
            data_y=f"{up.low:.10g} {up.high:.10g} {'log' if up.log else 'percent' if percent else 'linear'}",
        ),
        tag("p", "step", class_="axis"),
        class_="wide" if wide else None,
    )


def _values(title: str, note: str, lines: Sequence[Line], percent: bool) -> Markup:
    found = []
    for line in lines:
        value = line.series.finite.last
        text = f"{100 * value:.4g} %" if percent else short(value)
        name = line.name if len(lines) > 1 else f"at step {whole(int(line.series.finite.steps[-1]))}"
        found.append(tag("div", tag("dd", text, tag("small", name))))
    head = tag("figcaption", tag("h3", title), tag("p", note, class_="note") if note else None)
    return tag("figure", head, tag("dl", *found, class_="values"))


def sparkline(series: Series, colour: int, across: tuple[int, int]) -> Markup:
    """A small line without axes.

    Args:
        series: its points.
        colour: as in :class:`Line`.
        across: first and last step of all lines that it stands beside.
    """
    curve = thinned(series, 60)
    if not len(curve.steps):
        return Markup("")
    line = Line("", series, colour)
    parts = _draw(line, curve, _widened(*map(float, across)), _values_axis([curve], percent=False), most=1)
    return tag(
        "svg",
        parts,
        class_="spark",
        viewBox=f"0 0 {_UNIT:.0f} {_UNIT:.0f}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _steps_axis(lines: Sequence[Line]) -> _Axis:
    low = min(int(line.series.steps[0]) for line in lines)
    high = max(int(line.series.steps[-1]) for line in lines)
    return _widened(float(low), float(high))


def _widened(low: float, high: float) -> _Axis:
    return _Axis(low, high) if high > low else _Axis(low - 1, high + 1)


def _values_axis(curves: Sequence[Curve], percent: bool) -> _Axis:
    low = min(float(curve.low.min()) for curve in curves)
    high = max(float(curve.high.max()) for curve in curves)
    if low > 0 and high / low > _LOG_RATIO:
        return _Axis(low / 1.2, high * 1.2, log=True)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    least = 0.0 if low >= 0 else -math.inf
    most = 1.0 if percent and high <= 1 else math.inf
    # Where zero is near, it is the bottom: the eye compares heights.
    bottom = 0.0 if 0 <= low <= 0.25 * high else max(low - room, least)
    return _Axis(bottom, max(min(high + room, most), high) if high > bottom else bottom + 1.0)


def _draw(line: Line, curve: Curve, across: _Axis, up: _Axis, most: int = _DOTTED) -> Markup:
    """The paths of a line, with dots for up to ``most`` points."""
    x = _UNIT * across.place(curve.steps)
    y = _UNIT * (1 - up.place(curve.middle))
    kind = f"c{min(line.colour, COLOURS)}"
    parts: list[Markup | None] = []
    if not curve.whole:
        low, high = (_UNIT * (1 - up.place(values)) for values in (curve.low, curve.high))
        outline = _path(np.append(x, x[::-1]), np.append(high, low[::-1]))
        parts.append(tag("path", d=f"{outline}Z", class_=f"band {kind}"))
    dots = "".join(f"M{px:.1f},{py:.1f}h0" for px, py in zip(x, y, strict=True)) if line.dots or len(x) <= most else ""
    name = line.name or None
    dashed = " dashed" if line.dashed else ""
    if not line.dots:
        parts.append(tag("path", d=_path(x, y), class_=f"line {kind}{dashed}", data_name=name))
    if dots:
        parts.append(tag("path", d=dots, class_=f"dots {kind}{dashed}", data_name=name if line.dots else None))
    bad = line.series.bad_steps[:_MARKS].astype(np.float64)
    marks = "".join(f"M{px:.1f},{_UNIT:.0f}v-60" for px in _UNIT * across.place(bad))
    parts.append(tag("path", d=marks, class_="bad") if marks else None)
    return join(*parts)


def _path(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    return "M" + "L".join(f"{px:.1f},{py:.1f}" for px, py in zip(x.tolist(), y.tolist(), strict=True))


def _legend(lines: Sequence[Line]) -> Markup | None:
    if len(lines) == 1 and not lines[0].dots:
        return None
    coloured = [line for line in lines if line.colour < COLOURS]
    entries = [
        tag(
            "span",
            tag("i", class_=f"key c{line.colour}{' dashed' if line.dashed else ''}"),
            line.name,
            class_="entry",
        )
        for line in coloured
    ]
    if len(coloured) < len(lines):
        grey = tag("i", class_=f"key c{COLOURS}")
        entries.append(tag("span", grey, f"{len(lines) - len(coloured)} more", class_="entry"))
    return tag("p", *entries, class_="legend")


def _grid(up: _Axis, percent: bool) -> list[Markup]:
    found = []
    for tick in up.ticks(5):
        place = 100 * float(up.place(np.array([tick]))[0])
        text = f"{100 * tick:.4g} %" if percent else short(tick)
        found.append(tag("div", tag("span", text), class_="rule", style=f"--at:{place:.2f}"))
    return found


def _step_labels(across: _Axis, most: int) -> list[Markup]:
    ticks = [tick for tick in across.ticks(most) if tick == round(tick)]
    places = [(tick, 100 * float(across.place(np.array([tick]))[0])) for tick in ticks]
    # On a narrow screen every second one has room.
    return [
        tag("span", short(tick), class_=f"tick{' odd' if number % 2 else ''}", style=f"left:{place:.2f}%")
        for number, (tick, place) in enumerate(places)
    ]
