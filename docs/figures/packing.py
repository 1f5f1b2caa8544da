"""Documents in rows: one a row, in order, and as the default policy chooses; and the attention of one row."""

from __future__ import annotations

import random
from collections.abc import Sequence

from svg import GREY, LIGHT, SOURCES, Drawing

from lightning_longctx.datamodules import FixedBufferPolicy, simulate_packing

__all__ = ["draw"]

WINDOW, ROWS = 32_768, 5
_WIDTH, _HEIGHT, _GAP = 300, 20, 6  # of a row, in pixels


def _lengths(number: int) -> list[int]:
    draws = random.Random(11)  # noqa: S311  # a picture, no secret
    return [min(WINDOW, int(draws.lognormvariate(9.2, 0.9))) for _ in range(number)]


def _rows(way: str, lengths: Sequence[int]) -> list[list[int]]:
    """The documents of the first rows, by number."""
    if way == "alone":
        return [[number] for number in range(ROWS)]
    policy = "adaptive" if way == "adaptive" else FixedBufferPolicy(size=1)
    return simulate_packing(lengths, policy, max_tokens_per_batch=WINDOW, micro_batches=ROWS).selected


def _panel(picture: Drawing, top: float, title: str, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
    fill = sum(lengths[number] for row in rows for number in row) / (WINDOW * len(rows))
    picture.words(24, top - 10, title, 14, bold=True)
    picture.words(24 + _WIDTH, top - 10, f"{fill:.1%} full", 14, at="end", bold=True)
    for index, row in enumerate(rows):
        y, x = top + index * (_HEIGHT + _GAP), 24.0
        picture.box(x, y, _WIDTH, _HEIGHT, LIGHT)
        for place, number in enumerate(row):  # colours tell neighbours apart, and nothing else
            width = _WIDTH * lengths[number] / WINDOW
            picture.box(x, y, width, _HEIGHT, SOURCES[place % len(SOURCES)], stroke="#ffffff")
            if width > 18:
                picture.words(x + width / 2, y + 15, str(number + 1), 11, fill="#ffffff", at="middle")
            x += width


def _mask(picture: Drawing, x: float, y: float, row: Sequence[int], lengths: Sequence[int]) -> None:
    """Who sees whom in a row: a triangle for each document."""
    size, start = 300.0, 0
    named = ", ".join(str(number + 1) for number in row[:-1])
    picture.words(x, y - 32, f"Attention in the row of documents {named} and {row[-1] + 1}", 14, bold=True)
    picture.words(x, y - 12, "A token (down) sees earlier ones (across) of its own document.", 12, fill=GREY)
    picture.box(x, y, size, size, LIGHT)
    total = sum(lengths[number] for number in row)
    bounds = [0]
    for place, number in enumerate(row):
        a, b = (x + size * start / total, y + size * start / total), size * lengths[number] / total
        picture.shape([a, (a[0], a[1] + b), (a[0] + b, a[1] + b)], SOURCES[place % len(SOURCES)])
        if b > 26:
            picture.words(a[0] + b * 0.3, a[1] + b * 0.78, str(number + 1), 12, fill="#ffffff", at="middle")
        start += lengths[number]
        bounds.append(start)
    below = y + size + 24
    facts = {
        "cu_seqlens": ", ".join(map(str, bounds)),
        "position_ids": "0, 1, 2, ... and again from 0 in each document",
        "shift_labels": "the next token; none at the end of a document",
    }
    for number, (name, text) in enumerate(facts.items()):
        picture.words(x, below + 22 * number, name, 12, bold=True)
        picture.words(x + 92, below + 22 * number, text, 12)


def draw() -> str:
    """Return the figure."""
    lengths = _lengths(40)
    picture = Drawing(800, 560, "Packing: documents in rows, and the attention of one row")
    picture.words(24, 32, "The first five rows of 32K tokens, from the same documents (numbered as they arrive)", 13)
    for number, (way, title) in enumerate(
        [("alone", "one document a row"), ("order", "in order, next fit"), ("adaptive", "adaptive (the default)")]
    ):
        rows = _rows(way, lengths)
        _panel(picture, 78 + number * 164, title, rows, lengths)
    _mask(picture, 400, 110, max(rows, key=len), lengths)
    return str(picture)
