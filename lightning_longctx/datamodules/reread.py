"""What a resume reads again: the records of waiting documents of which the state holds only the place.

A record is read once, however many of its pieces wait, and the pieces stay here until they are packed. The candidates
of the pool get no tokens before that, so how far was read ahead is never part of a plan or a state.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from lightning_longctx.datamodules.documents import Document, Pieces
from lightning_longctx.datamodules.pool import Candidate
from lightning_longctx.datamodules.row_state import RowState

__all__ = ["Reread", "Rereads"]


class Reread(NamedTuple):
    """What a worker needs to read a record again: plain, since it travels to another process."""

    source_id: int
    number: int
    spans: tuple[tuple[int, int], ...]


class Rereads:
    """Which records are read again, in the order in which they are likely to be packed, and what came of them.

    Args:
        state: whose waiting documents may have no tokens. Those of planned rows are wanted first, then those of the
            pool in its order, or in one that is :meth:`expected <expect>`.
    """

    def __init__(self, state: RowState | None = None) -> None:
        self._spans: OrderedDict[tuple[int, int], list[tuple[int, int]]] = OrderedDict()  # of what was not asked for
        self._left: Counter[tuple[int, int]] = Counter()  # tokens of each record that wait
        self._read: dict[tuple[int, int], Pieces] = {}
        self._wanted: set[tuple[int, int]] = set()
        for candidate in state.waiting if state is not None else ():
            if candidate.document is None:
                spans = self._spans.setdefault(_record(candidate), [])
                spans.append((candidate.start, candidate.start + candidate.length))
                self._left[_record(candidate)] += candidate.length
        for planned in state.planned if state is not None else ():
            self._want(planned.candidates)

    @property
    def open(self) -> bool:
        """Whether there is something that was not asked for."""
        return bool(self._spans)

    @property
    def awaited(self) -> bool:
        """Whether something that a row needs was not read yet."""
        return bool(self._wanted)

    @property
    def urgent(self) -> bool:
        """Whether what is asked for next is needed by a row."""
        return next(iter(self._spans), None) in self._wanted

    def expect(self, candidates: Iterable[Candidate]) -> None:
        """Candidates that will probably be needed first, in this order."""
        self._move_to_front(_records(candidates))

    def want(self, candidates: Iterable[Candidate]) -> None:
        """Candidates of a row, which waits for them: what was not asked for yet comes first."""
        self._move_to_front(self._want(candidates))

    def request(self) -> Reread | None:
        """What to read next; None if there is nothing more."""
        if not self._spans:
            return None
        record, spans = self._spans.popitem(last=False)
        return Reread(*record, tuple(dict.fromkeys(spans)))

    def arrived(self, pieces: Pieces) -> None:
        """Keep what came of a request."""
        self._read[pieces.source_id, pieces.number] = pieces
        self._wanted.discard((pieces.source_id, pieces.number))

    def take(self, candidate: Candidate) -> Document | str:
        """The tokens of a candidate that was wanted and is read; or what is wrong with them."""
        record = _record(candidate)
        pieces = self._read[record]
        self._left[record] -= candidate.length
        if self._left[record] <= 0:
            del self._left[record], self._read[record]
        return pieces.part(candidate.start, candidate.start + candidate.length, candidate.record_tokens)

    def _want(self, candidates: Iterable[Candidate]) -> list[tuple[int, int]]:
        records = _records(candidates)
        self._wanted.update(record for record in records if record not in self._read)
        return records

    def _move_to_front(self, records: list[tuple[int, int]]) -> None:
        for record in reversed(records):
            if record in self._spans:
                self._spans.move_to_end(record, last=False)


def _records(candidates: Iterable[Candidate]) -> list[tuple[int, int]]:
    return list(dict.fromkeys(_record(candidate) for candidate in candidates if candidate.document is None))


def _record(candidate: Candidate) -> tuple[int, int]:
    return candidate.source_id, candidate.number
