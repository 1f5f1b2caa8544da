"""Pictures of expert load: one heat map of a window, and one strip over a run.

Drawn with PIL: a figure library takes longer to draw 61 x 256 cells than many a training step. The colours do not
depend on the data: white is a fair share, blue less, orange more, which people with any colour vision can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from lightning_longctx.callbacks.router_metrics import RouterLoad, violations

__all__ = ["colours", "draw_heatmap", "draw_history"]

#: Violation at which the colour is full: an expert with three times its fair share. Below 0 the scale ends at -1.
FULL = 2.0
_BLUE, _WHITE, _ORANGE, _NO_DATA = (33, 102, 172), (247, 247, 247), (179, 88, 6), (160, 160, 160)
_LEFT, _TOP, _BOTTOM, _SCALE = 90, 34, 40, 110  # pixels around the cells
_WIDEST, _HIGHEST = 1024, 732  # pixels that the cells may take
_LARGEST_CELL = 48
_LABEL_PITCH = 14  # pixels between labels of an axis, at least


def colours(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """RGB uint8 ``[..., 3]`` of violations ``[...]``; grey where a value is NaN."""
    base, low, high = (np.array(colour, np.float64) for colour in (_WHITE, _BLUE, _ORANGE))
    below = np.clip(-values, 0, 1)[..., None]
    above = np.clip(values / FULL, 0, 1)[..., None]
    mixed = base + below * (low - base) + above * (high - base)
    mixed[np.isnan(values)] = _NO_DATA
    return mixed.round().astype(np.uint8)


def draw_heatmap(load: RouterLoad) -> Image.Image:
    """Layers x experts of one window. Layers with fewer experts than others end earlier."""
    widest = max(len(counts) for counts in load.tokens)
    values = np.full((len(load.tokens), widest), np.nan)
    exists = np.zeros(values.shape, bool)
    for row, counts in enumerate(load.tokens):
        values[row, : len(counts)] = violations(counts).numpy()
        exists[row, : len(counts)] = True
    title = f"Expert load, {load.caption}"
    return _draw(values, exists, title, "expert", load.labels, [str(number) for number in range(widest)])


def draw_history(loads: Sequence[RouterLoad]) -> Image.Image:
    """Layers x windows over a run: above the busiest expert of each layer, below the one with the fewest tokens."""
    busiest = np.array([[violations(counts).max().item() for counts in load.tokens] for load in loads]).T
    fewest = np.array([[violations(counts).min().item() for counts in load.tokens] for load in loads]).T
    steps = [str(load.last_step) for load in loads]
    exists = np.ones(busiest.shape, bool)
    above = _draw(busiest, exists, "Busiest expert of each layer", "until step", loads[0].labels, steps)
    below = _draw(fewest, exists, "Expert with the fewest tokens", "until step", loads[0].labels, steps)
    both = Image.new("RGB", (max(above.width, below.width), above.height + below.height), "white")
    both.paste(above, (0, 0))
    both.paste(below, (0, above.height))
    return both


def _draw(
    values: NDArray[np.float64],
    exists: NDArray[np.bool_],
    title: str,
    axis: str,
    rows: Sequence[str],
    columns: Sequence[str],
) -> Image.Image:
    height, width = (_cell(count, most) for count, most in zip(values.shape, (_HIGHEST, _WIDEST), strict=True))
    cells = colours(values)
    cells[~exists] = 255
    across, down = width * values.shape[1], height * values.shape[0]
    picture = Image.new("RGB", (max(_LEFT + across + _SCALE, 360), max(_TOP + down + _BOTTOM, 170)), "white")
    picture.paste(Image.fromarray(cells).resize((across, down), Image.Resampling.NEAREST), (_LEFT, _TOP))
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(12)
    draw.rectangle((_LEFT - 1, _TOP - 1, _LEFT + across, _TOP + down), outline="black")
    draw.text((_LEFT, 8), title, "black", font)
    for row in _labelled(len(rows), height):
        middle = _TOP + row * height + height // 2
        draw.text((_LEFT - 6, middle), rows[row], "black", font, anchor="rm")
    for column in _labelled(len(columns), width / max(len(columns[-1]) / 2, 1)):
        middle = _LEFT + column * width + width // 2
        draw.text((middle, _TOP + down + 4), columns[column], "black", font, anchor="ma")
    draw.text((_LEFT + across // 2, _TOP + down + 20), axis, "black", font, anchor="ma")
    _draw_scale(draw, font, _LEFT + across + 24)
    return picture


def _cell(count: int, most: int) -> int:
    return max(1, min(_LARGEST_CELL, most // count))


def _labelled(count: int, pitch: float) -> range:
    """Which of ``count`` places get a label, so that labels do not touch."""
    step = 1
    while step * pitch < _LABEL_PITCH:
        step *= 2
    return range(0, count, step)


def _draw_scale(draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, left: int) -> None:
    high, low = _TOP + 4, _TOP + 94
    values = np.linspace(FULL, -1.0, low - high)
    for offset, colour in enumerate(colours(values)):
        draw.line((left, high + offset, left + 14, high + offset), tuple(int(part) for part in colour))
    marks = {FULL: f"{FULL + 1:g} x fair", 1.0: "2 x", 0.0: "fair", -1.0: "none"}
    for value, text in marks.items():
        middle = high + round((FULL - value) / (FULL + 1) * (low - high - 1))
        draw.text((left + 20, middle), text, "black", font, anchor="lm")
