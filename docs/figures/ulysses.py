"""Ulysses: from a part of the row with all heads to the whole row with some heads, and back."""

from __future__ import annotations

from svg import GREY, INK, LIGHT, RANKS, Drawing

__all__ = ["draw"]

_CELL, _TOKENS, _HEADS, _SP = 17, 12, 8, 4
_BOUNDS = (5, 9)  # where documents end, in cells


def _grid(picture: Drawing, x: float, y: float, by_heads: bool) -> None:
    """Tokens across, heads downwards; the colour is the rank that holds the cell."""
    for token in range(_TOKENS):
        for head in range(_HEADS):
            rank = head * _SP // _HEADS if by_heads else token * _SP // _TOKENS
            picture.box(x + token * _CELL, y + head * _CELL, _CELL, _CELL, RANKS[rank], stroke="#ffffff")
    for bound in _BOUNDS:
        at = x + bound * _CELL
        picture.line([(at, y - 6), (at, y + _HEADS * _CELL + 6)], stroke=INK, width=2, dash="4 3")


def draw() -> str:
    """Return the figure."""
    picture = Drawing(860, 372, "Ulysses sequence parallelism on four ranks")
    width, height, top = _TOKENS * _CELL, _HEADS * _CELL, 100
    places = (28.0, 328.0, 628.0)
    titles = ("embedding, norms, q, k, v", "attention", "output projection, MLP, loss")
    below = (
        "a quarter of the row, all heads",
        "the whole row, a quarter of the heads",
        "a quarter of the row, all heads",
    )
    picture.words(28, 32, "One row of three documents on four ranks; each colour is a rank", 14, bold=True)
    picture.words(
        28, 54, "Across: the tokens of the row. Down: attention heads. Dashed: where a document ends.", 12, fill=GREY
    )
    for number, (x, title, what) in enumerate(zip(places, titles, below, strict=True)):
        picture.words(x + width / 2, top - 14, title, 13, at="middle", bold=True)
        _grid(picture, x, top, by_heads=number == 1)
        picture.words(x + width / 2, top + height + 26, what, 12, at="middle")
    for number, x in enumerate(places[:2]):
        picture.arrow([(x + width + 12, top + height / 2), (places[number + 1] - 12, top + height / 2)], stroke=INK)
        picture.words(x + width + 48, top + height / 2 - 12, "all-to-all", 12, at="middle")
    for rank in range(_SP):
        picture.box(28 + rank * 74, 290, 14, 14, RANKS[rank], round_by=2)
        picture.words(46 + rank * 74, 302, f"rank {rank}", 12)
    picture.box(28, 318, 804, 38, LIGHT, round_by=6)
    picture.words(
        40,
        342,
        "In the middle each rank sees whole documents, so the attention is exact, with any kernel. The more"
        " ranks, the fewer bytes each sends.",
        12.5,
    )
    return str(picture)
