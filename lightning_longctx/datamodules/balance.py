"""Ranks take rows of like cost together, without moving a document between them.

Attention work is the sum of squared document lengths, so full rows differ by a factor of several, and each step waits
for the dearest. Each rank plans a few rows ahead; at each step all ranks know what the others could give (a few numbers
in the reduction that they make anyway) and pick the row nearest in cost to the one that has waited longest anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PLANNED_ROWS", "pick_rows", "planning_depth"]

#: Rows planned ahead by each rank. With 16 the dearest of 8 ranks costs about 1.25 times the mean at 1M tokens on a
#: wide stream, with 8 about 1.4, and untreated 2.7 (benchmarks/packing). They wait as token ids, 4 bytes a token.
PLANNED_ROWS = 16


def planning_depth(row: int) -> int:
    """How many rows to plan before row number ``row``: one more every second row, so that the first is not delayed."""
    return min(PLANNED_ROWS, 1 + row // 2)


def pick_rows(offers: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
    """Choose one planned row of each rank.

    Args:
        offers: of each rank, oldest first: (row number at which it was planned, cost). Ranks may have none.

    Returns:
        Indices by rank; 0 where there is no offer.

    Example:
        >>> pick_rows([[(0, 9.0), (1, 2.0)], [(1, 3.0), (1, 8.0)]])
        [0, 1]
    """
    # The row that has waited longest sets the cost (the dearest of equals), so that none waits for ever.
    oldest = min((rank for rank in offers if rank), key=lambda rank: (rank[0][0], -rank[0][1]), default=None)
    if oldest is None:
        return [0] * len(offers)
    target = oldest[0][1]
    return [
        min(range(len(rank)), key=lambda index: (abs(rank[index][1] - target), index)) if rank else 0 for rank in offers
    ]
