"""The one global sequence of documents: which record of which source is document i.

It depends on the sources, their weights, the seed and the epoch alone, never on ranks or workers. So every worker of
every rank walks the same sequence (a step costs a microsecond and reads nothing from indexable sources) and picks its
own part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.datamodules.settings import StopMode
from lightning_longctx.datamodules.sources import IndexableSource, Source, StreamingSource
from lightning_longctx.errors import DataError

__all__ = ["GlobalSequence", "Position", "SequenceSettings"]


@dataclass(frozen=True)
class SequenceSettings:
    """What the global sequence depends on, beside the sources.

    Args:
        seed: of the random order.
        shuffle: whether indexable sources are read in random order.
        stop_mode: when an epoch ends.
        epoch: changes the order of each epoch.
        limit: end after so many documents; None for no limit.
    """

    seed: int = 42
    shuffle: bool = True
    stop_mode: StopMode = "all_exhausted"
    epoch: int = 0
    limit: int | None = None


class Position(NamedTuple):
    """One element of the sequence: a source, a record number, and the record itself if it came from a stream."""

    source_id: int
    number: int
    record: Mapping[str, Any] | None


class _IndexCursor:
    """Walks the record numbers of an indexable source, in a new order on each pass."""

    def __init__(self, source: IndexableSource, settings: SequenceSettings) -> None:
        self._length = len(source)
        # By name, so that adding a source does not change the order within the others.
        self._key = (settings.seed, crc32(source.name.encode()), settings.epoch)
        self._shuffle = settings.shuffle
        self.start(0, 0)

    def start(self, passes: int, taken: int) -> None:
        self.passes, self.taken = passes, taken
        self._order: NDArray[np.int64] | None = None  # made when first needed: a resume starts at once where it was

    def advance(self) -> tuple[int, None] | None:
        if self.taken == self._length:
            return None
        self.taken += 1
        if not self._shuffle:
            return self.taken - 1, None
        if self._order is None:
            self._order = np.random.default_rng((*self._key, self.passes)).permutation(self._length)
        return int(self._order[self.taken - 1]), None


class _StreamCursor:
    """Reads a stream on. A resume reads from the start of the pass to where it was."""

    def __init__(self, source: StreamingSource) -> None:
        self._source = source
        self._records: Iterator[Mapping[str, Any]] | None = None
        self.passes, self.taken = 0, 0

    def start(self, passes: int, taken: int) -> None:
        self.passes, self.taken = passes, taken
        self._records = islice(self._source.open(), taken, None)

    def advance(self) -> tuple[int, Mapping[str, Any]] | None:
        if self._records is None:
            self.start(self.passes, self.taken)
        assert self._records is not None
        for record in self._records:
            self.taken += 1
            return self.taken - 1, record
        return None


class GlobalSequence(Iterator[Position]):
    """Iterates over the global sequence of one epoch.

    Sources are mixed by a deterministic rule: each step gives every source its share of credit (weight over the weights
    of those not exhausted), and the one with the most credit pays one document. So the counts are never further than
    one document from the weights, from the first document on, without randomness.

    Args:
        sources: by source id.
        settings: seed, order, end.

    Raises:
        DataError: a source has nothing at all under ``stop_mode: forever``.
    """

    def __init__(self, sources: Sequence[Source], settings: SequenceSettings) -> None:
        self._settings = settings
        self._names = [source.name for source in sources]
        self._weights = [source.weight for source in sources]
        self._credits = [0.0] * len(sources)
        self._exhausted = [False] * len(sources)
        self._count = 0
        self._cursors = [
            _IndexCursor(source, settings) if isinstance(source, IndexableSource) else _StreamCursor(_stream(source))
            for source in sources
        ]

    def __next__(self) -> Position:
        if self._count == self._settings.limit:
            raise StopIteration
        while not all(self._exhausted):
            credits = self._next_credits()
            chosen = max(range(len(credits)), key=credits.__getitem__)  # the first of equals
            found = self._advance(chosen)
            if found is not None:
                credits[chosen] -= 1.0
                self._credits = credits
                self._count += 1
                return Position(chosen, *found)
            if self._settings.stop_mode == "first_exhausted":
                self._exhausted = [True] * len(self._exhausted)
            self._exhausted[chosen] = True
        raise StopIteration

    def _next_credits(self) -> list[float]:
        active = sum(weight for weight, gone in zip(self._weights, self._exhausted, strict=True) if not gone)
        return [
            -float("inf") if gone else credit + weight / active
            for credit, weight, gone in zip(self._credits, self._weights, self._exhausted, strict=True)
        ]

    def _advance(self, chosen: int) -> tuple[int, Mapping[str, Any] | None] | None:
        cursor = self._cursors[chosen]
        found = cursor.advance()
        if found is None and self._settings.stop_mode == "forever":
            cursor.start(cursor.passes + 1, 0)
            found = cursor.advance()
            if found is None:
                field = f"data.sources.{self._names[chosen]}"
                raise DataError(field, "must have at least one document", "none", "Leave the source out.")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Where the sequence is: plain lists, small whatever the sources hold."""
        return {
            "credits": list(self._credits),
            "exhausted": list(self._exhausted),
            "count": self._count,
            "cursors": [[cursor.passes, cursor.taken] for cursor in self._cursors],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, taken with the same sources and settings."""
        self._credits = list(state["credits"])
        self._exhausted = list(state["exhausted"])
        self._count = state["count"]
        for cursor, (passes, taken), gone in zip(self._cursors, state["cursors"], self._exhausted, strict=True):
            if not gone:
                cursor.start(passes, taken)
            else:
                cursor.passes, cursor.taken = passes, taken


def _stream(source: Source) -> StreamingSource:
    assert isinstance(source, StreamingSource)
    return source
