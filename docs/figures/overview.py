"""The way of a step: documents, a packed row, ranks that share it, and what comes out."""

from __future__ import annotations

from svg import GREY, INK, LIGHT, RANKS, SOURCES, Drawing

__all__ = ["draw"]

_NAMES = ("books", "code", "chat")
#: Source and length of the documents of the row, in pixels.
_ROW = ((0, 250), (1, 96), (2, 40), (1, 120), (2, 30), (0, 64))
_X, _WIDTH = 190, 600


def _sources(picture: Drawing) -> None:
    picture.words(24, 66, "documents", 13, bold=True)
    for number, name in enumerate(_NAMES):
        for copy in range(3):
            picture.box(
                24 + copy * 5, 84 + number * 42 - copy * 4, 74, 24, SOURCES[number], stroke="#ffffff", round_by=3
            )
        picture.words(71, 93 + number * 42, name, 12, fill="#ffffff", at="middle")
    picture.arrow([(118, 122), (_X - 8, 122)])


def _row(picture: Drawing) -> None:
    picture.words(_X, 66, "one row: whole documents, 128K to 1M+ tokens", 13, bold=True)
    picture.words(_X + _WIDTH, 66, "DynamicBatchingDataModule", 12, fill=GREY, at="end")
    x = float(_X)
    for source, length in _ROW:
        picture.shape([(x, 136), (x + length, 136), (x, 136 - min(length / 3, 52))], SOURCES[source] + "55")
        picture.box(x, 136, length, 26, SOURCES[source], stroke="#ffffff")
        x += length
    picture.words(_X + _WIDTH, 84, "attention stays inside each document", 12, fill=GREY, at="end")


def _ranks(picture: Drawing) -> None:
    part = _WIDTH / 4
    for rank in range(4):
        x = _X + rank * part
        picture.arrow([(x + part / 2, 166), (x + part / 2, 190)])
        picture.box(x + 4, 192, part - 8, 62, RANKS[rank], round_by=5)
        picture.words(x + part / 2, 216, f"GPU {rank}: a quarter", 12.5, fill="#ffffff", at="middle", bold=True)
        picture.words(x + part / 2, 236, "of tokens and weights", 12, fill="#ffffff", at="middle")
    picture.words(24, 240, "GPUs share a row", 13, bold=True)
    picture.words(24, 258, "or, on a laptop,", 13)
    picture.words(24, 276, "CPU processes do", 13)
    picture.box(_X + 4, 262, _WIDTH - 8, 28, LIGHT, round_by=5)
    picture.words(
        _X + _WIDTH / 2,
        281,
        "Ulysses: heads for sequence and back, so attention is exact - LongContextFSDPStrategy",
        12.5,
        at="middle",
    )


def _results(picture: Drawing) -> None:
    results = (
        ("exact token mean", "the same on any layout", "causal_lm_loss"),
        ("loss by source", "in training and validation", "ChannelLoss"),
        ("load of experts", "each layer, each token once", "MoERouterHeatmap"),
        ("checkpoints", "written behind training", "AsyncDCPCheckpoint"),
    )
    part = _WIDTH / 4
    picture.arrow([(_X + _WIDTH / 2, 292), (_X + _WIDTH / 2, 316)])
    for number, (title, text, name) in enumerate(results):
        x = _X + number * part
        picture.box(x + 4, 318, part - 8, 70, "#ffffff", stroke=GREY, round_by=5)
        picture.words(x + part / 2, 338, title, 12.5, at="middle", bold=True)
        picture.words(x + part / 2, 356, text, 10.5, fill=INK, at="middle")
        picture.words(x + part / 2, 376, name, 11, fill=GREY, at="middle")
    picture.words(24, 346, "each is a plug-in:", 13, bold=True)
    picture.words(24, 364, "take one,", 13)
    picture.words(24, 382, "leave the rest", 13)


def draw() -> str:
    """Return the figure."""
    picture = Drawing(820, 408, "From documents to a packed row, shared by four ranks, to losses and checkpoints")
    picture.words(24, 32, "What happens in a step", 15, bold=True)
    for part in (_sources, _row, _ranks, _results):
        part(picture)
    return str(picture)
