"""Expert load as pictures: one pixel an expert, blown up by the browser, with labels as text beside them.

A fair share is clear, less is blue and more is orange, so the pictures suit a light and a dark page.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lightning_longctx.callbacks.router_picture import FULL
from lightning_longctx.tools.report.html import Markup, tag
from lightning_longctx.tools.report.numbers import pleasant_ticks, whole
from lightning_longctx.tools.report.routers import ExpertLoad

__all__ = ["load_by_window", "load_over_time"]

_BLUE, _ORANGE, _GREY = (47, 128, 205), (232, 119, 24), (128, 128, 128)
_SHADES = 100  # of each colour; then one place of the palette for what was not counted and one for what is not there
_NO_DATA, _NOTHING = 2 * _SHADES + 1, 2 * _SHADES + 2
_PIXELS = 600_000  # of all windows together
_HIGHEST = 12_000  # pixels that a picture may be high in every browser
_COLUMNS = 400  # of the picture over time
_ROW = 17  # height of a layer on the page, where there is room
_TALLEST = 560
_WIDE = 32  # experts that half of the page has room for


def load_by_window(load: ExpertLoad, name: str = "") -> Markup:
    """Layers x experts, one window at a time; the last one where no script runs.

    Args:
        load: all windows.
        name: of the run, where there are several.
    """
    layers, experts = load.tokens.shape[1:]
    most = max(1, min(len(load.windows), _PIXELS // (layers * experts), _HIGHEST // layers))
    chosen = np.unique(np.linspace(0, len(load.windows) - 1, most).round().astype(int)) if most > 1 else [-1]
    values, exists = load.violations[chosen], load.exists[chosen]
    captions = [f"steps {whole(first)} to {whole(last)}" for first, last in (load.windows[number] for number in chosen)]
    picture = _picture(values.reshape(-1, experts), exists.reshape(-1, experts))
    canvas = tag(
        "div",
        class_="heat",
        role="img",
        aria_label=f"Expert load, layers by experts, {captions[-1]}",
        style=f"height:{_height(layers)}px;background-size:100% {100 * len(captions)}%;background-image:url({picture})",
    )
    slider = tag(
        "label",
        "window ",
        tag(
            "input",
            type="range",
            min=0,
            max=len(captions) - 1,
            value=len(captions) - 1,
            data_captions="|".join(captions),
        ),
        class_="slider",
        hidden=True,
    )
    title = f"Tokens of each expert{f': {name}' if name else ''}"
    return tag(
        "figure",
        tag("figcaption", tag("h3", title), tag("p", tag("output", captions[-1]), class_="note"), _scale()),
        slider if len(captions) > 1 else None,
        tag("div", canvas, *_row_labels(load.layers), class_="heatbox"),
        *_columns([str(number) for number in range(experts)], "expert"),
        class_="wide" if experts > _WIDE else None,
    )


def load_over_time(load: ExpertLoad, busiest: bool, name: str = "") -> Markup:
    """Layers x windows: the busiest expert of each layer, or the one with the fewest tokens.

    Args:
        load: all windows.
        busiest: which of the two.
        name: of the run, where there are several.
    """
    filled = np.where(np.isnan(load.violations), -np.inf if busiest else np.inf, load.violations)
    values = (filled.max(2) if busiest else filled.min(2)).T  # [layers, windows]
    starts = np.unique(np.linspace(0, values.shape[1], _COLUMNS, endpoint=False).astype(int))
    values = (np.maximum if busiest else np.minimum).reduceat(values, starts, axis=1)
    values[np.isinf(values)] = np.nan
    what = "Busiest expert" if busiest else "Expert with the fewest tokens"
    picture = _picture(values, np.ones(values.shape, bool))
    canvas = tag(
        "div",
        class_="heat",
        role="img",
        aria_label=f"{what} of each layer over time",
        style=f"height:{_height(len(load.layers))}px;background-size:100% 100%;background-image:url({picture})",
    )
    steps = [whole(load.windows[number][1]) for number in starts]
    title = f"{what} of each layer{f': {name}' if name else ''}"
    return tag(
        "figure",
        tag("figcaption", tag("h3", title), tag("p", "a column is a window of steps", class_="note"), _scale()),
        tag("div", canvas, *_row_labels(load.layers), class_="heatbox"),
        *_columns(steps, "until step"),
    )


def _picture(values: NDArray[np.float64], exists: NDArray[np.bool_]) -> str:
    """A data URL of violations ``[rows, columns]``: a palette, whose fair share is clear."""
    share = np.where(values < 0, np.clip(values, -1, 0), np.clip(values / FULL, 0, 1))
    index = np.where(np.isnan(values), _NO_DATA, _SHADES + np.nan_to_num(share * _SHADES).round())
    image = Image.fromarray(np.where(exists, index, _NOTHING).astype(np.uint8), "L")
    palette = [_BLUE] * _SHADES + [_ORANGE] * (_SHADES + 1) + [_GREY, _GREY]
    image.putpalette([part for colour in palette for part in colour])
    clear = [round(255 * abs(place - _SHADES) / _SHADES) for place in range(2 * _SHADES + 1)] + [110, 0]
    file = io.BytesIO()
    image.save(file, "PNG", transparency=bytes(clear), optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _height(rows: int) -> int:
    return max(72, min(_ROW * rows, _TALLEST))


def _row_labels(labels: Sequence[str]) -> list[Markup]:
    every = -(-len(labels) * 13 // _height(len(labels)))  # a label is 13 pixels high
    places = range(0, len(labels), max(1, every))
    return [
        tag(
            "span",
            labels[place].removeprefix("layer_"),
            class_="row",
            style=f"top:{100 * (place + 0.5) / len(labels):.2f}%",
        )
        for place in places
    ]


def _columns(labels: Sequence[str], axis: str) -> list[Markup]:
    most = 6 if len(labels[-1]) > 3 else 9
    ticks_at = pleasant_ticks(0, len(labels) - 1, min(most, len(labels))) if len(labels) > 1 else [0.0]
    places = sorted({round(tick) for tick in ticks_at})
    ticks = [
        tag("span", labels[place], class_="tick", style=f"left:{100 * (place + 0.5) / len(labels):.2f}%")
        for place in places
    ]
    return [tag("div", *ticks, class_="columns"), tag("p", axis, class_="axis")]


def _scale() -> Markup:
    ends = (tag("span", text) for text in ("no token", "fair share", f"{FULL + 1:g} x and more"))
    return tag("p", tag("i", class_="scale"), tag("span", *ends, class_="ends"), class_="legend scaled")
