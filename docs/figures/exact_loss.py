"""The exact token mean: four micro-batches of one step with unequal numbers of targets."""

from __future__ import annotations

from svg import GREY, LIGHT, RANKS, Drawing

__all__ = ["draw"]

#: Rank, micro-batch, number of targets and summed loss of each.
STEP = ((0, 0, 6, 12.0), (0, 1, 1, 5.0), (1, 0, 8, 12.0), (1, 1, 3, 9.0))
TOKENS = 10  # of each micro-batch: its budget, a constant


def draw() -> str:
    """Return the figure."""
    picture = Drawing(760, 400, "The exact token mean of a step")
    picture.words(24, 32, "One step: two ranks, two micro-batches each, ten tokens a micro-batch", 14, bold=True)
    picture.words(
        24, 52, "Filled: a target. Empty: no target (a prompt, padding, the end of a document).", 12, fill=GREY
    )
    for number, (rank, micro, targets, total) in enumerate(STEP):
        y = 74 + number * 44
        picture.words(24, y + 17, f"rank {rank}, micro-batch {micro}", 12)
        for token in range(TOKENS):
            filled = token >= TOKENS - targets
            picture.box(160 + token * 22, y, 20, 24, RANKS[rank] if filled else LIGHT, round_by=3)
        picture.words(400, y + 17, f"sum {total:g} of {targets} target{'s' if targets > 1 else ''}", 12)
        picture.words(540, y + 17, f"mean {total / targets:.2f}", 12, fill=GREY)
        picture.words(640, y + 17, f"loss {total / TOKENS:.2f}", 12, bold=True)
    picture.words(640, 66, "sum / budget", 11, fill=GREY)
    targets, total = sum(item[2] for item in STEP), sum(item[3] for item in STEP)
    means = sum(item[3] / item[2] for item in STEP) / len(STEP)
    picture.box(24, 262, 344, 116, "#fbeeea", stroke=RANKS[3], round_by=6)
    picture.words(40, 286, "Mean of means: what averaging gives", 13, bold=True, fill=RANKS[3])
    each = " + ".join(f"{item[3] / item[2]:.2f}" for item in STEP)
    picture.lines(
        40,
        310,
        [
            f"({each}) / {len(STEP)} = {means:.2f}",
            "The one target of the second line counts",
            "as much as the eight of the third.",
        ],
        13,
    )
    picture.box(392, 262, 344, 116, "#eaf5f3", stroke=RANKS[1], round_by=6)
    picture.words(408, 286, "Token mean: what is trained here", 13, bold=True, fill=RANKS[1])
    sums = " + ".join(f"{item[3]:g}" for item in STEP)
    picture.lines(
        408,
        310,
        [
            f"({sums}) / {targets} = {total / targets:.2f}",
            "The 18 is one integer, summed over ranks after the",
            "last backward. Then gradients are scaled once.",
        ],
        13,
    )
    return str(picture)
