"""A drawing of boxes, words and arrows as SVG text: small, sharp at any size, and the same bytes at each run."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

__all__ = ["GREY", "INK", "LIGHT", "RANKS", "SOURCES", "Drawing"]

INK, GREY, LIGHT = "#24323d", "#6b7883", "#e3e7ea"
SOURCES = ("#2a9d8f", "#d68f2c", "#7a6fb0")
RANKS = ("#3d6fa5", "#3f9285", "#b98a2e", "#c05f47")

_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


class Drawing:
    """Collects shapes; ``str()`` is the file. White behind all, so that it can be read on dark pages too.

    Args:
        width: in pixels.
        height: in pixels.
        title: what a screen reader says.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self._size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        self._title = escape(title)
        self._parts: list[str] = []
        self.box(0, 0, width, height, "#ffffff", round_by=8)

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, *, stroke: str = "none", round_by: float = 0
    ) -> None:
        """Add a rectangle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round_by:g}"'
            f' fill="{fill}" stroke="{stroke}"/>'
        )

    def words(
        self, x: float, y: float, text: str, size: float = 13, *, fill: str = INK, at: str = "start", bold: bool = False
    ) -> None:
        """Add a line of text; ``y`` is its base line, ``at`` is ``start``, ``middle`` or ``end``."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{at}"{weight}>'
            f"{escape(text)}</text>"
        )

    def lines(self, x: float, y: float, texts: Sequence[str], size: float = 13, *, fill: str = INK) -> None:
        """Add lines of text under one another."""
        for number, text in enumerate(texts):
            self.words(x, y + number * size * 1.4, text, size, fill=fill)

    def shape(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        """Add a polygon."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polygon points="{path}" fill="{fill}"/>')

    def line(
        self, points: Sequence[tuple[float, float]], *, stroke: str = INK, width: float = 1.5, dash: str = ""
    ) -> None:
        """Add a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashes}/>'
        )

    def arrow(self, points: Sequence[tuple[float, float]], *, stroke: str = GREY) -> None:
        """Add a line with a head at its end, which runs along x or along y."""
        (x0, y0), (x, y) = points[-2:]
        along_x = abs(x - x0) >= abs(y - y0)
        sign = (x > x0) - (x < x0) if along_x else (y > y0) - (y < y0)
        back, half = 8 * sign, 4.5
        base = (x - back, y) if along_x else (x, y - back)
        self.line([*points[:-1], base], stroke=stroke, width=2)
        sides = (
            [(x - back, y - half), (x - back, y + half)] if along_x else [(x - half, y - back), (x + half, y - back)]
        )
        self.shape([(x, y), *sides], stroke)

    def __str__(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self._size} role="img" font-family="{_FONT}">'
        return "\n".join([head, f"<title>{self._title}</title>", *self._parts, "</svg>"]) + "\n"
