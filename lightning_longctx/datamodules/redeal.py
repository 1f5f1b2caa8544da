"""What remains of a run on some data-parallel ranks, dealt anew to another number of them: none lost, none twice.

Ranks stop at different places in a source. From the least of them on, what the others have drawn is noted by position:
few, since ranks stay close. Nothing else of the earlier layout is needed, so layouts may change again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, zip_longest

from lightning_longctx.datamodules.mixing import SourceState
from lightning_longctx.datamodules.row_state import RowState
from lightning_longctx.datamodules.settings import Mixing

__all__ = ["redeal"]


def redeal(states: Sequence[RowState], dp_rank: int, dp_size: int, mixing: Mixing) -> RowState:
    """The state of one rank of the new layout.

    Args:
        states: of all former data-parallel ranks, by rank.
        dp_rank: the present rank.
        dp_size: the present number.
        mixing: of the run that was stopped: by documents all ranks share one sequence, by tokens each has its own.
    """
    first = states[0]
    last = min(states, key=lambda state: state.count)
    names = dict.fromkeys(chain.from_iterable(state.sources for state in states))
    sources = {name: remains([state.sources.get(name, SourceState()) for state in states]) for name in names}
    for name, state in sources.items():
        if mixing == "sample":
            credit = last.sources.get(name, SourceState()).credit
        else:  # what all ranks owe together
            credit = sum(state.sources[name].credit for state in states if name in state.sources) / dp_size
        sources[name] = SourceState(state.place, credit, state.ahead, state.mark)
    waiting = chain.from_iterable(zip_longest(*(state.waiting for state in states)))  # the oldest of each first
    candidates = [candidate for candidate in waiting if candidate is not None]
    counters = sum((Counter(state.counters) for state in states), Counter[str]()) if dp_rank == 0 else {}
    return RowState(
        epoch=first.epoch,
        finished=first.finished,
        exhausted=all(state.exhausted for state in states),
        rows=first.rows,
        earlier_rows=first.earlier_rows,
        dp_rank=dp_rank,
        dp_size=dp_size,
        sources=sources,
        count=last.count,
        candidates=tuple(candidates[dp_rank::dp_size]),
        weights=first.weights,
        drawn=dict(sum((Counter(state.drawn) for state in states), Counter[str]())),
        counters=dict(counters),
    )


def remains(states: Sequence[SourceState]) -> SourceState:
    """What no rank has drawn of a source: from the place of the rank furthest behind, without what others drew.

    Args:
        states: of the source, by rank.
    """
    start = min(states, key=lambda state: state.place.position)
    stop = max(state.place.position for state in states)
    ahead = {position for state in states for position in state.ahead if position >= start.place.position}
    drawn, dealt = set(ahead), start.place.dealt
    for position in range(start.place.position, stop):
        if position in ahead:
            continue
        if position < states[dealt % len(states)].place.position:
            drawn.add(position)
        dealt += 1
    # One rank may have stopped where others would read on.
    place = start.place._replace(ended=all(state.place.ended for state in states))
    return SourceState(place, 0.0, tuple(sorted(drawn)), start.mark)
