"""Pictures of expert load: one heat map of a window, and one strip over a run.

Drawn with PIL: a figure library takes longer to draw 61 x 256 cells than many a training step. The colours do not
depend on the data: white is a fair share, blue less, orange more, which people with any colour vision can tell apart.
They follow the logarithm of the share, so that half of a fair share is as far from white as twice of it and a router of
256 experts, whose busiest takes many times its share, does not end in one flat orange.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from lightning_longctx.callbacks.router_history import RouterHistory
from lightning_longctx.callbacks.router_metrics import RouterLoad, violations

__all__ = ["colours", "draw_heatmap", "draw_history"]

#: How many times its fair share an expert takes where the colour is full; below, one part in so many.
FULL = 8
_BLUE, _WHITE, _ORANGE, _NO_DATA = (67, 137, 200), (247, 247, 247), (166, 75, 4), (160, 160, 160)
_NONE = (8, 29, 70)  # an expert without any token: not only the end of the blues, it is to be seen at a glance
_LEFT, _TOP, _BOTTOM, _SCALE = 90, 34, 40, 130  # pixels around the cells
_WIDEST, _HIGHEST = 1024, 732  # pixels that the cells may take
_LARGEST_CELL = 48
_LABEL_PITCH = 14  # pixels between labels of an axis, at least


def colours(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """RGB uint8 ``[..., 3]`` of violations ``[...]``; grey where a value is NaN."""
    base, low, high = (np.array(colour, np.float64) for colour in (_WHITE, _BLUE, _ORANGE))
    share = np.clip(1 + values, 1 / FULL, FULL)
    scaled = (np.log2(share) / np.log2(FULL))[..., None]  # -1 .. 1
    mixed: NDArray[np.float64] = base + np.maximum(-scaled, 0) * (low - base) + np.maximum(scaled, 0) * (high - base)
    mixed[values <= -1] = _NONE
    mixed[np.isnan(values)] = _NO_DATA
    return np.asarray(mixed.round(), np.uint8)


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


def draw_history(history: RouterHistory) -> Image.Image:
    """Layers x windows over a run: above the busiest expert of each layer, below the one with the fewest tokens."""
    busiest, fewest = (np.stack([part.numpy() for part in parts], 1) for parts in zip(*history.extremes, strict=True))
    steps = [str(step) for step in history.steps]
    exists = np.ones(busiest.shape, bool)
    above = _draw(busiest, exists, "Busiest expert of each layer", "until step", history.labels, steps)
    below = _draw(fewest, exists, "Expert with the fewest tokens", "until step", history.labels, steps)
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
    across, down = width * values.shape[1], height * values.shape[0]
    picture = Image.new("RGB", (max(_LEFT + across + _SCALE, 360), max(_TOP + down + _BOTTOM, 170)), "white")
    pixels = cells.repeat(height, 0).repeat(width, 1)
    if not exists.all():  # hatched, since white is a fair share
        y, x = np.indices((down, across))
        pixels[~exists.repeat(height, 0).repeat(width, 1)] = 255
        pixels[~exists.repeat(height, 0).repeat(width, 1) & ((x + y) % 8 == 0)] = _NO_DATA
    picture.paste(Image.fromarray(pixels), (_LEFT, _TOP))
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
    powers = np.linspace(np.log2(FULL), -np.log2(FULL), low - high)
    for offset, colour in enumerate(colours(2**powers - 1)):
        draw.line((left, high + offset, left + 14, high + offset), tuple(int(part) for part in colour))
    marks = {FULL: f"{FULL} x and more", 2: "2 x", 1: "fair share", 1 / 2: "half", 1 / FULL: f"1/{FULL}"}
    for share, text in marks.items():
        middle = high + round((1 - np.log2(share) / np.log2(FULL)) / 2 * (low - high - 1))
        draw.text((left + 20, middle), text, "black", font, anchor="lm")
    draw.rectangle((left, low + 6, left + 13, low + 16), _NONE)
    draw.text((left + 20, low + 11), "no token", "black", font, anchor="lm")
