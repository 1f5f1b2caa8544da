"""Where one rank is between two rows: everything that a resume needs, small and without behaviour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from lightning_longctx.datamodules.pool import Candidate, candidates_from_state, candidates_to_state
from lightning_longctx.datamodules.stream import Deal

__all__ = ["COUNTERS", "PlannedRow", "RowState"]

#: Everything that is counted. tokens_read = tokens packed + dropped + truncated + left over + waiting in the pool.
COUNTERS = (
    "rows",
    "rows_closed_by_cap",
    "documents_read",
    "documents_packed",
    "documents_split",
    "documents_cut",
    "documents_truncated",
    "documents_without_tokens",
    "documents_below_min_tokens",
    "documents_above_max_tokens",
    "documents_longer_than_window_dropped",
    "documents_left_over",
    "tokens_read",
    "tokens_packed",
    "tokens_padding",
    "tokens_dropped",
    "tokens_truncated",
    "tokens_left_over",
    "bad_records_skipped",
)


class PlannedRow(NamedTuple):
    """A row that was chosen: before which row of the epoch, and its documents in order of packing."""

    row: int
    candidates: tuple[Candidate, ...]

    @property
    def cost(self) -> float:
        """Work of causal attention, up to a constant: the sum of squared document lengths."""
        return float(sum(candidate.length**2 for candidate in self.candidates))


@dataclass(frozen=True)
class RowState:
    """Where one rank is, between two rows. Holds references; :meth:`to_plain` makes the containers that are saved.

    Attributes:
        epoch: of the data: how many passes are complete.
        finished: whether the epoch has no further row.
        exhausted: whether the stream has ended (the pool may still hold documents).
        rows: given in this epoch; the same on every rank.
        earlier_rows: given in earlier epochs; what a warm-up counts on.
        dp_rank: whose state this is.
        dp_size: the layout it was taken in.
        deals: of earlier layouts in this epoch.
        drawn: how many documents of its share this rank has taken from the stream.
        num_workers: of the stream's snapshot.
        stream: snapshot of the loader; None if there is none for this layout.
        candidates: the pool, oldest first.
        planned: rows that were chosen and wait for their turn under ``balance``, oldest first.
        policy: what the policy remembers.
        counters: what was read, packed, dropped since the run began.
    """

    epoch: int = 0
    finished: bool = False
    exhausted: bool = False
    rows: int = 0
    earlier_rows: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    deals: tuple[Deal, ...] = ()
    drawn: int = 0
    num_workers: int = 0
    stream: dict[str, Any] | None = None
    candidates: tuple[Candidate, ...] = ()
    planned: tuple[PlannedRow, ...] = ()
    policy: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def waiting(self) -> tuple[Candidate, ...]:
        """Every document that was read and not given: planned rows first, then the pool."""
        return (*chain.from_iterable(planned.candidates for planned in self.planned), *self.candidates)

    def at_end(self, counters: dict[str, int]) -> RowState:
        """This state, once it is known that no row follows. What is left over is counted, and not kept."""
        return replace(self, finished=True, candidates=(), planned=(), stream=None, counters=counters)

    def next_epoch(self) -> RowState:
        """The start of the following epoch; only the counters go on."""
        return RowState(
            self.epoch + 1,
            earlier_rows=self.earlier_rows + self.rows,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            counters=self.counters,
        )

    def to_plain(self, by_value: Sequence[bool]) -> dict[str, Any]:
        """Plain containers and tensors.

        Args:
            by_value: for each source id, whether waiting documents are stored whole.
        """
        plain = {**vars(self), "deals": [list(deal.drawn) for deal in self.deals], "counters": dict(self.counters)}
        plain["candidates"] = candidates_to_state(self.waiting, by_value)
        plain["planned"] = [[planned.row, len(planned.candidates)] for planned in self.planned]
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RowState:
        """The inverse of :meth:`to_plain`."""
        deals = tuple(Deal(tuple(drawn)) for drawn in plain["deals"])
        waiting, planned = candidates_from_state(plain["candidates"]), []
        for row, count in plain["planned"]:
            planned.append(PlannedRow(row, waiting[:count]))
            waiting = waiting[count:]
        return cls(**{**plain, "deals": deals, "planned": tuple(planned), "candidates": waiting})

    @staticmethod
    def redeal(states: Sequence[RowState], dp_rank: int, dp_size: int) -> RowState:
        """What remains of a run on ``len(states)`` ranks, for one rank of another number: none lost, none twice.

        Args:
            states: of all former data-parallel ranks, by rank.
            dp_rank: the present rank.
            dp_size: the present number.
        """
        first = states[0]
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
            deals=(*first.deals, Deal(tuple(state.drawn for state in states))),
            candidates=tuple(candidates[dp_rank::dp_size]),
            counters=dict(counters),
        )
