"""The contract of a mixer, which decides which document of which source comes next.

The order is decided in one place for each reader. Reading and tokenizing run ahead of it in any number of processes:
``request`` says what to read next, ``arrived`` takes the results in the order of the requests, and ``head`` and
``take`` give them in the order of the mix. The state is that of the last document taken: nothing read ahead is in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_longctx.datamodules.cursors import Cursor, Mark, Order, Place, Record, Share, open_cursor
from lightning_longctx.datamodules.documents import Draw
from lightning_longctx.datamodules.settings import Mixing, StopMode
from lightning_longctx.datamodules.sources import Source

__all__ = ["Drawn", "MixPlace", "Mixer", "Request", "SequenceSettings", "SourceState"]


@dataclass(frozen=True)
class SequenceSettings:
    """What the order of documents depends on, beside the sources.

    Args:
        seed: of the random order.
        shuffle: whether indexable sources are read in random order.
        stop_mode: when an epoch ends.
        mixing: what weights count.
        epoch: changes the order of each epoch.
        limit: end after so many documents over all ranks; None for no limit. Needs ``mixing: sample``.
    """

    seed: int = 42
    shuffle: bool = True
    stop_mode: StopMode = "all_exhausted"
    mixing: Mixing = "token"
    epoch: int = 0
    limit: int | None = None


@dataclass(frozen=True)
class SourceState:
    """Where one reader is in one source, after the last document taken.

    Attributes:
        place: in the source's order.
        credit: what the source is owed: documents or tokens, as ``mixing`` says.
        ahead: positions after ``place`` that an earlier layout has drawn already, ascending.
        mark: what a stream said of its own position at or before ``place``.
    """

    place: Place = Place()
    credit: float = 0.0
    ahead: tuple[int, ...] = ()
    mark: Mark | None = None


class Request(NamedTuple):
    """What a worker needs to make a draw: plain, since it travels to another process."""

    source_id: int
    number: int
    record: Record | None


class Drawn(NamedTuple):
    """A draw in the order of the mix, and where it came from."""

    source_id: int
    passes: int
    draw: Draw


class MixPlace(NamedTuple):
    """Where the mix is, after one of its documents: places and credits by source, and how many documents there were."""

    places: tuple[Place, ...]
    credits: tuple[float, ...]
    documents: int


class Mixer(ABC):
    """Decides the order for one reader.

    Args:
        sources: by source id.
        settings: seed, order, end.
        share: whose documents.
        states: of each source, where to start.
        count: documents that the whole sequence has given so far; only ``limit`` asks.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        settings: SequenceSettings,
        share: Share,
        states: Sequence[SourceState],
        count: int = 0,
    ) -> None:
        self._sources = sources
        self._settings = settings
        self._share = share
        self._weights = [source.weight for source in sources]
        self._cursors = self._open_cursors(states)
        self._count = count
        self._begin(states)

    def reweight(self, weights: Sequence[float]) -> None:
        """Mix by other weights, by source id, from the next document on that is taken."""
        self._weights = list(weights)

    @abstractmethod
    def _begin(self, states: Sequence[SourceState]) -> None:
        """Make what a way of mixing keeps beside its cursors."""

    @abstractmethod
    def request(self) -> Request | None:
        """What to read next, ahead of what is taken; None if there is nothing more, now or later.

        Raises:
            DataError: a source has nothing at all under ``stop_mode: forever``.
        """

    @abstractmethod
    def arrived(self, draw: Draw) -> None:
        """Take the result of the oldest request that is open."""

    @abstractmethod
    def head(self) -> Drawn | None:
        """The next draw of the mix, which stays; None if it has not arrived, or none follows."""

    @abstractmethod
    def take(self) -> None:
        """Take the head: the state is now that after it."""

    @property
    @abstractmethod
    def ahead(self) -> int:
        """How many draws were asked for and are not taken."""

    @property
    @abstractmethod
    def exhausted(self) -> bool:
        """Whether nothing follows the last draw that was taken."""

    @abstractmethod
    def _after(self) -> MixPlace:
        """Places, credits and count after the last draw taken."""

    def _open_cursors(self, states: Sequence[SourceState]) -> list[Cursor]:
        order = Order(self._settings.seed, self._settings.shuffle, self._settings.epoch)
        return [
            open_cursor(source, order, self._share, state.place, state.ahead, state.mark)
            for source, state in zip(self._sources, states, strict=True)
        ]

    def state(self) -> tuple[list[SourceState], int]:
        """States of the sources, and the count, after the last draw taken."""
        places, credits, count = self._after()
        found = [
            SourceState(place, credit, tuple(cursor.drawn_after(place)), cursor.mark(place))
            for cursor, place, credit in zip(self._cursors, places, credits, strict=True)
        ]
        return found, count
