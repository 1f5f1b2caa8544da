"""Where one rank is between two rows: everything that a resume needs, small and without behaviour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from lightning_longctx.datamodules.cursors import Mark, Place
from lightning_longctx.datamodules.mixing import SourceState
from lightning_longctx.datamodules.pool import Candidate, candidates_from_state, candidates_to_state

__all__ = ["COUNTERS", "PlannedRow", "Reweight", "RowState", "left_over", "packed_of"]

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


def packed_of(source: str) -> str:
    """The counter of packed tokens of a source."""
    return f"tokens_packed/{source}"


def left_over(candidates: Sequence[Candidate]) -> Counter[str]:
    """The counts of documents that wait and will not be given."""
    tokens = sum(candidate.length for candidate in candidates)
    return Counter(documents_left_over=len(candidates), tokens_left_over=tokens)


class PlannedRow(NamedTuple):
    """A row that was chosen: before which row of the epoch, and its documents in order of packing."""

    row: int
    candidates: tuple[Candidate, ...]

    @property
    def cost(self) -> float:
        """Work of causal attention, up to a constant: the sum of squared document lengths."""
        return float(sum(candidate.length**2 for candidate in self.candidates))


class Reweight(NamedTuple):
    """Other weights of sources, by name, from the documents on that are read for row number ``row``."""

    row: int
    weights: dict[str, float]


@dataclass(frozen=True)
class RowState:
    """Where one rank is, between two rows. Holds references; :meth:`to_plain` makes the containers that are saved.

    Attributes:
        epoch: of the data: how many passes are complete.
        finished: whether the epoch has no further row.
        exhausted: whether the mix has ended (the pool may still hold documents).
        rows: given in this epoch; the same on every rank.
        earlier_rows: given in earlier epochs; what a warm-up counts on.
        dp_rank: whose state this is.
        dp_size: the layout it was taken in.
        sources: where the reader is in each source, by name; those that are not named start anew.
        count: documents that the mix has given in this epoch, over all ranks where it is one sequence.
        candidates: the pool, oldest first.
        planned: rows that were chosen and wait for their turn under ``balance``, oldest first.
        weights: that were set during the run, in order of their rows; none where those of the sources hold.
        drawn: tokens of all documents that came into the pool in this epoch, by source name.
        policy: what the policy is and remembers.
        counters: what was read, packed, dropped since the run began; packed tokens by source too.
    """

    epoch: int = 0
    finished: bool = False
    exhausted: bool = False
    rows: int = 0
    earlier_rows: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    sources: dict[str, SourceState] = field(default_factory=dict)
    count: int = 0
    candidates: tuple[Candidate, ...] = ()
    planned: tuple[PlannedRow, ...] = ()
    weights: tuple[Reweight, ...] = ()
    drawn: dict[str, int] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def waiting(self) -> tuple[Candidate, ...]:
        """Every document that was read and not given: planned rows first, then the pool."""
        return (*chain.from_iterable(planned.candidates for planned in self.planned), *self.candidates)

    def at_end(self, counters: dict[str, int]) -> RowState:
        """This state, once it is known that no row follows. What is left over is counted, and not kept."""
        return replace(self, finished=True, candidates=(), planned=(), sources={}, drawn={}, counters=counters)

    def next_epoch(self) -> RowState:
        """The start of the following epoch; only the counters go on."""
        return RowState(
            self.epoch + 1,
            earlier_rows=self.earlier_rows + self.rows,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            weights=tuple(entry._replace(row=0) for entry in self.weights),
            counters=self.counters,
        )

    def reweighted(self, row: int, weights: Mapping[str, float]) -> RowState:
        """This state, with other weights from row number ``row`` on."""
        return replace(self, weights=(*self.weights, Reweight(row, dict(weights))))

    def to_plain(self, by_value: Sequence[bool]) -> dict[str, Any]:
        """Plain containers and tensors.

        Args:
            by_value: for each source id, whether waiting documents are stored whole.
        """
        plain = {**vars(self), "counters": dict(self.counters)}
        plain["sources"] = {name: _source_to_plain(state) for name, state in self.sources.items()}
        plain["weights"] = [list(entry) for entry in self.weights]
        plain["candidates"] = candidates_to_state(self.waiting, by_value)
        plain["planned"] = [[planned.row, len(planned.candidates)] for planned in self.planned]
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RowState:
        """The inverse of :meth:`to_plain`."""
        sources = {name: _source_from_plain(state) for name, state in plain["sources"].items()}
        waiting, planned = candidates_from_state(plain["candidates"]), []
        for row, count in plain["planned"]:
            planned.append(PlannedRow(row, waiting[:count]))
            waiting = waiting[count:]
        weights = tuple(Reweight(row, dict(entry)) for row, entry in plain["weights"])
        found = {"sources": sources, "planned": tuple(planned), "candidates": waiting, "weights": weights}
        return cls(**{**plain, **found})


def _source_to_plain(state: SourceState) -> dict[str, Any]:
    return {
        "place": list(state.place),
        "credit": state.credit,
        "ahead": list(state.ahead),
        "mark": None if state.mark is None else list(state.mark),
    }


def _source_from_plain(plain: Mapping[str, Any]) -> SourceState:
    mark = None if plain["mark"] is None else Mark(*plain["mark"])
    return SourceState(Place(*plain["place"]), plain["credit"], tuple(plain["ahead"]), mark)
