"""Where a reader is in one source, and which of the source's records belong to it.

The order of a source depends on its name, the seed, the epoch and the pass, never on ranks or workers. Data-parallel
rank r of n takes records r, r + n, ... of that order. A place in it is a handful of integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.datamodules.bad_record import NamedRecord
from lightning_longctx.datamodules.sources import IndexableSource, RecordStream, Source, StreamingSource, skip
from lightning_longctx.errors import DataError

__all__ = ["Cursor", "Mark", "Order", "Place", "Record", "Share", "Step", "open_cursor"]

#: What a stream gives: a record, or the reason why there is none at this place.
Record = Mapping[str, Any] | DataError

# A stream is asked for its own position once in so many records: often enough for a quick resume (that many records are
# read again at most), and seldom enough to cost nothing where the answer is large.
_MARK_EVERY = 64
_MARKS = 256


@dataclass(frozen=True)
class Order:
    """What the order of an indexable source depends on, beside its name and length.

    Args:
        seed: of the random order.
        shuffle: whether the order is random.
        epoch: changes the order of each epoch.
    """

    seed: int = 42
    shuffle: bool = True
    epoch: int = 0


@dataclass(frozen=True)
class Share:
    """Which data-parallel rank reads."""

    dp_rank: int = 0
    dp_size: int = 1


class Place(NamedTuple):
    """How far a source was gone through.

    Attributes:
        position: records gone through, over all passes and ranks.
        passes: complete passes.
        taken: records gone through in this pass.
        dealt: records that were dealt to ranks; differs from ``position`` by those that an earlier layout had drawn.
        ended: whether nothing follows.
    """

    position: int = 0
    passes: int = 0
    taken: int = 0
    dealt: int = 0
    ended: bool = False


class Mark(NamedTuple):
    """What a stream says of its own position, after ``taken`` records of pass number ``passes``."""

    passes: int
    taken: int
    state: Any


class Step(NamedTuple):
    """One record of the order: its number, the record itself if it came from a stream, and whether it is ours."""

    number: int
    record: Record | None
    mine: bool


class Cursor(ABC):
    """Walks the order of one source.

    Args:
        source: what is walked.
        share: whose records are wanted.
        place: where to start.
        ahead: positions after ``place`` that an earlier layout has drawn: nobody's any more.
    """

    def __init__(self, source: Source, share: Share, place: Place, ahead: Iterable[int]) -> None:
        self.source = source
        self._share = share
        self._ahead = frozenset(ahead)
        self.place = place

    def advance(self) -> Step | None:
        """The next record; None at the end of the pass."""
        found = self._read(self.place.passes, self.place.taken)
        if found is None:
            return None
        position, passes, taken, dealt, _ = self.place
        free = position not in self._ahead
        self.place = Place(position + 1, passes, taken + 1, dealt + free)
        return Step(*found, mine=free and dealt % self._share.dp_size == self._share.dp_rank)

    def advance_own(self, repeat: bool) -> Step | None:
        """The next record that is ours; None at the end, which is noted in the place.

        Args:
            repeat: whether further passes follow.

        Raises:
            DataError: a pass without any record, where passes repeat.
        """
        while not self.place.ended:
            step = self.advance()
            if step is None and repeat:
                self.restart()
            elif step is None:
                self.place = self.place._replace(ended=True)
            elif step.mine:
                return step
        return None

    def restart(self) -> None:
        """Start the next pass.

        Raises:
            DataError: this pass had no record at all.
        """
        if self.place.taken == 0:
            raise DataError(self.source.field, "must have at least one document", "none", "Leave it out.")
        self.place = self.place._replace(passes=self.place.passes + 1, taken=0)

    def drawn_after(self, place: Place) -> list[int]:
        """The positions from ``place`` on that an earlier layout has drawn."""
        return sorted(position for position in self._ahead if position >= place.position)

    @property
    def name(self) -> str:
        """Of the source."""
        return self.source.name

    def mark(self, place: Place) -> Mark | None:
        """What a stream said of its position at or before ``place``."""
        return None

    @abstractmethod
    def _read(self, passes: int, taken: int) -> tuple[int, Record | None] | None:
        """Number, and record if it is a stream's, of the next record; None at the end of the pass."""


class _IndexCursor(Cursor):
    """Walks the record numbers of an indexable source, in a new order on each pass."""

    def __init__(self, source: IndexableSource, order: Order, share: Share, place: Place, ahead: Iterable[int]) -> None:
        super().__init__(source, share, place, ahead)
        self._source = source
        self._length = len(source)
        # By name, so that adding a source does not change the order within the others.
        self._key = (order.seed, crc32(source.name.encode()), order.epoch)
        self._shuffle = order.shuffle
        self._numbers: tuple[int, NDArray[np.int64]] | None = None  # of that pass; made when first needed

    def _read(self, passes: int, taken: int) -> tuple[int, None] | None:
        if taken >= self._length:
            return None
        if not self._shuffle:
            return taken, None
        if self._numbers is None or self._numbers[0] != passes:
            self._numbers = (
                passes,
                _shuffled(self._length, self._source.blocks, np.random.default_rng((*self._key, passes))),
            )
        return int(self._numbers[1][taken]), None


class _StreamCursor(Cursor):
    """Reads a stream on. A resume starts at the stream's last mark, or lets the source skip what was taken."""

    def __init__(
        self, source: StreamingSource, share: Share, place: Place, ahead: Iterable[int], mark: Mark | None
    ) -> None:
        super().__init__(source, share, place, ahead)
        self._source = source
        self._records: RecordStream | None = None
        # An old mark that is lost costs a longer skip, and nothing else.
        self._marks: deque[Mark] = deque([] if mark is None else [mark], maxlen=_MARKS)

    def restart(self) -> None:
        super().restart()
        self._records = None

    def mark(self, place: Place) -> Mark | None:
        while len(self._marks) > 1 and self._marks[1][:2] <= (place.passes, place.taken):
            self._marks.popleft()
        found = self._marks[0] if self._marks else None
        usable = found is not None and found.passes == place.passes and found.taken <= place.taken
        return found if usable else None

    def _read(self, passes: int, taken: int) -> tuple[int, Record] | None:
        if self._records is None:
            self._records = self._open(passes, taken)
        if taken and taken % _MARK_EVERY == 0:
            self._note(passes, taken)
        try:
            with NamedRecord(lambda: self.source.describe(taken)):
                return taken, next(self._records)
        except StopIteration:
            return None
        except DataError as error:  # a bad record takes its place in the order, and may be skipped there
            return taken, error

    def _open(self, passes: int, taken: int) -> RecordStream:
        mark = self.mark(self.place)
        if mark is None:
            return self._source.open(taken)
        return skip(self._source.open(mark.taken, mark.state), taken - mark.taken, self._source.field)

    def _note(self, passes: int, taken: int) -> None:
        assert self._records is not None
        state = self._records.state()
        if state is not None:
            self._marks.append(Mark(passes, taken, state))


def open_cursor(
    source: Source, order: Order, share: Share, place: Place, ahead: Iterable[int] = (), mark: Mark | None = None
) -> Cursor:
    """The cursor of a source, indexable or not, at ``place``."""
    if isinstance(source, IndexableSource):
        return _IndexCursor(source, order, share, place, ahead)
    assert isinstance(source, StreamingSource)
    return _StreamCursor(source, share, place, ahead, mark)


def _shuffled(length: int, blocks: Sequence[int] | None, random: np.random.Generator) -> NDArray[np.int64]:
    """A random order of ``range(length)``: of blocks that are cheap to read together, and inside each of them."""
    if blocks is None:
        return random.permutation(length)
    stops = np.cumsum(blocks, dtype=np.int64)
    assert stops[-1] == length
    order = random.permutation(len(blocks))
    return np.concatenate([stops[block] - blocks[block] + random.permutation(blocks[block]) for block in order])
