"""Two slots: what training waits for in a save, and what is written behind it."""

from __future__ import annotations

from svg import GREY, INK, LIGHT, RANKS, Drawing

__all__ = ["draw"]

_STEP, _LEFT, _STALL = 30, 150, 9
_SAVES = {4: True, 9: False, 14: True}  # after which step; with the optimizer or not
_WRITE = {"weights": 2.6, "optimizer": 7.2}  # in steps


def _commit(picture: Drawing, x: float, y: float) -> None:
    picture.shape([(x, y - 7), (x + 7, y), (x, y + 7), (x - 7, y)], INK)


def _side(slots: tuple[str, ...]) -> str:
    """Labels of neighbours stand on different sides."""
    return "start" if slots == ("weights",) else "end"


def draw() -> str:
    """Return the figure."""
    picture = Drawing(860, 340, "Checkpoints in two slots behind training")
    picture.words(24, 32, "A save stops training for a copy in memory; two slots write behind it", 14, bold=True)
    rows = {"training": 78.0, "weights": 138.0, "optimizer": 188.0}
    for name, y in rows.items():
        picture.words(24, y + 5, name if name == "training" else f"slot: {name}", 13)
    x, killed = float(_LEFT), _LEFT + 18.5 * _STEP + len(_SAVES) * _STALL  # in the middle of a step
    for step in range(1, 20):
        picture.box(x, rows["training"] - 14, min(_STEP - 3, killed - x), 28, RANKS[0], round_by=3)
        x += _STEP
        if step not in _SAVES:
            continue
        picture.box(x - 1, rows["training"] - 18, _STALL, 36, RANKS[3], round_by=2)
        slots = ("weights", "optimizer") if _SAVES[step] else ("weights",)
        for slot in slots:
            start, end = x + _STALL, min(x + _STALL + _WRITE[slot] * _STEP, killed)
            picture.box(start, rows[slot] - 12, end - start, 24, RANKS[1 if slot == "weights" else 2], round_by=3)
            picture.words(start + 6, rows[slot] + 4, f"step {step}", 11, fill="#ffffff")
        done = x + _STALL + max(_WRITE[slot] for slot in slots) * _STEP
        if done < killed:
            _commit(picture, done, 232)
            picture.words(done + 10 if slots == ("weights",) else done - 10, 236, f"step {step}", 11, at=_side(slots))
            picture.line([(done, rows["weights"] + 14), (done, 224)], stroke=GREY, width=1, dash="3 3")
        x += _STALL
    picture.words(24, 237, "complete", 13)
    picture.line([(killed, 56), (killed, 252)], stroke=RANKS[3], width=2, dash="5 4")
    picture.words(
        killed - 6,
        52,
        "killed here: a resume finds step 9 for evaluation, step 4 to train on",
        12,
        fill=RANKS[3],
        at="end",
    )
    picture.box(24, 276, 812, 60, LIGHT, round_by=6)
    legend = (
        (RANKS[0], "a step"),
        (RANKS[3], "training waits: agreement and copy"),
        (RANKS[1], "weights are written"),
        (RANKS[2], "optimizer is written"),
    )
    at = 40.0
    for colour, what in legend:
        picture.box(at, 286, 14, 14, colour, round_by=2)
        picture.words(at + 20, 298, what, 12)
        at += 40 + 6 * len(what)
    _commit(picture, at + 6, 293)
    picture.words(at + 20, 298, "complete: it can be found", 12)
    picture.words(
        40,
        324,
        "A long write of the optimizer (here in each second save) does not hold up the next weights."
        " A sketch, not to scale.",
        12,
    )
    return str(picture)
