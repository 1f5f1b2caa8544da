"""Which of the waiting documents make a row: ordered greedy, and an exact repair where greedy leaves a gap.

Pure functions of lengths, without randomness or memory: the same pool gives the same row before and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Budget", "PoolView", "Selection", "best_row", "ordered_greedy", "subset_sum"]

#: Sums are told apart to 1/65,536 of a window (16 tokens at 1M). A coarser grid left more of the window empty than the
#: whole fill target allows.
_GRID = 2**16

#: Candidates of a repair: enough for the best sum to lie within the grid, and few enough for a millisecond. 32 and less
#: lose fill on streams of few long and many short documents; 1,024 gain nothing (benchmarks/packing).
REPAIR_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Budget:
    """What a row may hold.

    Attributes:
        counted: tokens, or targets under ``count_mode: effective``; a row is full when it holds so many.
        physical: most tokens of a row, whatever is counted.
        documents: most documents of a row.
    """

    counted: int
    physical: int
    documents: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a policy may know of the waiting documents: oldest first, and fair to the sources where there are several.

    Attributes:
        lengths: tokens of each.
        counts: what the budget counts of each: the same as ``lengths``, or its targets.
        arrivals: how many rows had been given when each arrived.
        row: how many rows have been given.
        tokens: sum of ``lengths``.
        counted: sum of ``counts``.
    """

    lengths: Sequence[int]
    counts: Sequence[int]
    arrivals: Sequence[int]
    row: int
    tokens: int
    counted: int

    @property
    def oldest(self) -> int:
        """Index of the document that came first."""
        return min(range(len(self.arrivals)), key=self.arrivals.__getitem__)


class Selection(NamedTuple):
    """A row: indices into the pool, and the part of the budget that it fills (of the fuller of the two budgets)."""

    indices: list[int]
    fill: float


def ordered_greedy(view: PoolView, budget: Budget, first: Sequence[int] = ()) -> Selection:
    """Take ``first``, then each document that still fits, oldest first.

    Args:
        view: the pool; not empty.
        budget: of the row.
        first: indices that are taken before the others; they fit together.

    Example:
        >>> view = PoolView([5, 6, 2], [5, 6, 2], [0, 0, 0], 0, 13, 13)
        >>> ordered_greedy(view, Budget(8, 8, 4096)).indices
        [0, 2]
    """
    chosen, taken = list(first), set(first)
    counted = budget.counted - sum(view.counts[index] for index in first)
    physical = budget.physical - sum(view.lengths[index] for index in first)
    for index, (length, count) in enumerate(zip(view.lengths, view.counts, strict=True)):
        if counted <= 0 or physical <= 0 or len(chosen) >= budget.documents:
            break
        if length <= physical and count <= counted and index not in taken:
            chosen.append(index)
            counted -= count
            physical -= length
    if not chosen:  # a budget that still grows, and a document that is longer: it goes alone
        return Selection([0], 1.0)
    return Selection(chosen, max(1 - counted / budget.counted, 1 - physical / budget.physical))


def best_row(view: PoolView, budget: Budget, target: float, first: Sequence[int], longest_first: bool) -> Selection:
    """Choose a row that is as full as ``target`` if the pool has one, with the oldest documents that allow it.

    Ordered greedy where that is full enough. Otherwise a bounded subset sum over at most 256 candidates: all of a small
    pool; of a larger one the oldest and a sample by length, beside the first documents that greedy took.

    Args:
        view: the pool; not empty.
        budget: of the row.
        target: fill that is good enough, up to 1.
        first: indices that must be part of it.
        longest_first: prefer long documents to old ones, which pays where few short ones are left to close gaps.
    """
    greedy = ordered_greedy(view, budget, first)
    if greedy.fill >= target:
        return greedy
    kept, candidates = _repair_candidates(view, greedy.indices, first)
    room = budget.counted - sum(view.counts[index] for index in kept)
    order = sorted(candidates, key=lambda index: -view.counts[index]) if longest_first else candidates
    low = round(target * budget.counted) - (budget.counted - room)
    picked = subset_sum([view.counts[index] for index in order], max(low, 0), room)
    base = kept + [order[position] for position in picked]
    if sum(view.lengths[index] for index in base) > budget.physical or len(base) > budget.documents:
        return greedy
    repaired = ordered_greedy(view, budget, base)
    return repaired if repaired.fill > greedy.fill else greedy


def subset_sum(sizes: Sequence[int], low: int, high: int) -> list[int]:
    """Find a subset whose sum lies in ``[low, high]``, or else comes as near to ``high`` from below as any does.

    Among those it prefers the first: it takes a size if and only if the later ones can still complete such a sum.
    Reachability as bit sets: one shift of at most 65,536 bits for each size. Sums are counted in steps of
    ``high / 65,536``, rounded up, so they never exceed ``high``.

    Args:
        sizes: positive or zero, in order of preference.
        low: sum that is good enough.
        high: sum that must not be exceeded.

    Returns:
        Positions in ``sizes``, ascending.

    Example:
        >>> subset_sum([6, 5, 4, 3], low=8, high=8)
        [1, 3]
    """
    grain = max(1, -(-high // _GRID))
    top = high // grain
    steps = [-(-size // grain) for size in sizes]
    mask = (1 << (top + 1)) - 1
    reachable = [1] * (len(sizes) + 1)  # bit s of reachable[i]: some of sizes[i:] have the sum s
    for position in reversed(range(len(sizes))):
        later = reachable[position + 1]
        reachable[position] = (later | later << steps[position]) & mask
    best = reachable[0].bit_length() - 1
    floor = min(-(-low // grain), best)
    chosen, total = [], 0
    for position, step in enumerate(steps):
        after = total + step
        if after > top:
            continue
        missing = max(floor - after, 0)
        window = (1 << (top - after - missing + 1)) - 1  # sums of the later ones that end between floor and top
        if reachable[position + 1] >> missing & window:
            chosen.append(position)
            total = after
    return chosen


def _repair_candidates(view: PoolView, greedy: Sequence[int], first: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split the pool into documents that stay and the candidates of the repair, oldest first."""
    mandatory = set(first)
    free = [index for index in range(len(view.lengths)) if index not in mandatory]
    if len(free) <= REPAIR_CANDIDATES:
        return list(first), free
    # Greedy's own choice is nearly full: keep it but for its last quarter of candidates, and repair around that.
    prefix = [index for index in greedy if index not in mandatory]
    kept = list(first) + prefix[: max(0, len(prefix) - REPAIR_CANDIDATES // 4)]
    taken = set(kept)
    rest = [index for index in free if index not in taken]
    half = REPAIR_CANDIDATES // 2
    oldest, others = rest[:half], sorted(rest[half:], key=view.counts.__getitem__)
    count = min(half, len(others))
    strata = [others[(2 * number + 1) * len(others) // (2 * count)] for number in range(count)]
    return kept, sorted(oldest + strata)
