"""The two ways of mixing sources: by documents, and by the tokens that they have given."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_longctx.datamodules.cursors import Cursor, Place, Share
from lightning_longctx.datamodules.documents import Draw
from lightning_longctx.datamodules.mixing import Drawn, Mixer, MixPlace, Request, SequenceSettings, SourceState
from lightning_longctx.datamodules.sources import Source

__all__ = ["open_mixer"]


class SampleMixer(Mixer):
    """Mixes by documents: one sequence for all ranks, of which this one takes its part.

    Each step gives every source its share of credit (weight over the weights of those that have not ended), and the one
    with the most credit pays one document. So counts follow the weights from the first document on, without randomness.
    Of each source rank r takes documents r, r + n, ...: were the positions of the mixed sequence dealt instead, two
    ranks and two sources in turn would give each rank one source.
    """

    def _begin(self, states: Sequence[SourceState]) -> None:
        self._credits = [state.credit for state in states]
        self._taken = self._walk()
        self._open: deque[tuple[int, MixPlace]] = deque()  # requests without result
        self._ready: deque[tuple[Drawn, MixPlace]] = deque()
        self._asked_all = False
        self._stale = 0  # requests whose results are wanted no more

    def reweight(self, weights: Sequence[float]) -> None:
        # What was read ahead follows the old weights: it is asked for again, in the new order.
        super().reweight(weights)
        states, self._count = self.state()
        self._cursors = self._open_cursors(states)
        self._credits = [state.credit for state in states]
        self._taken = self._walk()
        self._stale += len(self._open)
        self._open.clear()
        self._ready.clear()
        self._asked_all = False

    def request(self) -> Request | None:
        while self._count != self._settings.limit and not all(cursor.place.ended for cursor in self._cursors):
            credits = self._next_credits()
            chosen = max(range(len(credits)), key=credits.__getitem__)  # the first of equals
            cursor = self._cursors[chosen]
            step = cursor.advance()
            if step is None and self._settings.stop_mode == "forever":
                cursor.restart()
                step = cursor.advance()
            if step is None:
                self._end(chosen)
                continue
            credits[chosen] -= 1.0
            self._credits = credits
            self._count += 1
            if step.mine:
                self._open.append((chosen, self._walk()))
                return Request(chosen, step.number, step.record)
        self._asked_all = True
        return None

    def arrived(self, draw: Draw) -> None:
        if self._stale:
            self._stale -= 1
            return
        chosen, walk = self._open.popleft()
        self._ready.append((Drawn(chosen, walk.places[chosen].passes, draw), walk))

    def head(self) -> Drawn | None:
        return self._ready[0][0] if self._ready else None

    def take(self) -> None:
        self._taken = self._ready.popleft()[1]

    @property
    def ahead(self) -> int:
        return len(self._open) + len(self._ready)

    @property
    def exhausted(self) -> bool:
        last = self._after()
        return last.documents == self._settings.limit or all(place.ended for place in last.places)

    def _after(self) -> MixPlace:
        if self._asked_all and not self._open and not self._ready:
            return self._walk()
        return self._taken

    def _end(self, chosen: int) -> None:
        ended = range(len(self._cursors)) if self._settings.stop_mode == "first_exhausted" else [chosen]
        for index in ended:
            self._cursors[index].place = self._cursors[index].place._replace(ended=True)

    def _walk(self) -> MixPlace:
        return MixPlace(tuple(cursor.place for cursor in self._cursors), tuple(self._credits), self._count)

    def _next_credits(self) -> list[float]:
        active = _active(self._weights, [cursor.place for cursor in self._cursors])
        return [
            -float("inf") if cursor.place.ended else credit + weight / active
            for credit, weight, cursor in zip(self._credits, self._weights, self._cursors, strict=True)
        ]


@dataclass
class _Lane:
    """What runs ahead in one source: requests without result, and draws that wait for their turn."""

    cursor: Cursor
    credit: float  # tokens
    place: Place  # after the last draw that was taken
    open: deque[Place] = field(default_factory=deque)
    ready: deque[tuple[Drawn, Place]] = field(default_factory=deque)
    records: int = 0  # that arrived, and their tokens: what a record gives on average
    tokens: int = 0

    @property
    def waits(self) -> int:
        return len(self.open) + len(self.ready)

    @property
    def ended(self) -> bool:
        """Whether nothing of this source follows the last draw that was taken."""
        return self.place.ended or (self.cursor.place.ended and not self.waits)


class TokenMixer(Mixer):
    """Mixes by tokens: the next document comes from the source that is furthest behind its weight in tokens.

    Each document gives every source its share of its tokens as credit, and its own source pays all of them. So no
    source is ever owed more than about one document. Documents that were dropped pay nothing.

    Lengths are known only after tokenizing, so each reader mixes what it really drew. What is read ahead waits in one
    lane for each source: the order depends on lengths alone, never on how far or in which order was read ahead.
    """

    def _begin(self, states: Sequence[SourceState]) -> None:
        assert self._settings.limit is None
        self._lanes = [
            _Lane(cursor, state.credit, state.place) for cursor, state in zip(self._cursors, states, strict=True)
        ]
        self._requests: deque[int] = deque()  # source of each request without result

    def request(self) -> Request | None:
        # The lane that would run dry first; of equals the one that is asked for next.
        for index in sorted(range(len(self._lanes)), key=self._supply):
            lane = self._lanes[index]
            step = lane.cursor.advance_own(repeat=self._settings.stop_mode == "forever")
            if step is not None:
                lane.open.append(lane.cursor.place)
                self._requests.append(index)
                return Request(index, step.number, step.record)
        return None

    def arrived(self, draw: Draw) -> None:
        index = self._requests.popleft()
        lane = self._lanes[index]
        place = lane.open.popleft()
        lane.ready.append((Drawn(index, place.passes, draw), place))
        lane.records += 1
        lane.tokens += _tokens(draw)

    def head(self) -> Drawn | None:
        index = self._next()
        ready = None if index is None else self._lanes[index].ready
        return ready[0][0] if ready else None

    def take(self) -> None:
        index = self._next()
        assert index is not None
        chosen = self._lanes[index]
        drawn, chosen.place = chosen.ready.popleft()
        tokens = _tokens(drawn.draw)
        active = _active(self._weights, [lane.place for lane in self._lanes])
        for lane, weight in zip(self._lanes, self._weights, strict=True):
            if not lane.place.ended:
                lane.credit += tokens * weight / active
        chosen.credit -= tokens

    @property
    def ahead(self) -> int:
        return sum(lane.waits for lane in self._lanes)

    @property
    def exhausted(self) -> bool:
        return self._next() is None

    def _after(self) -> MixPlace:
        return MixPlace(
            tuple(lane.place for lane in self._lanes), tuple(lane.credit for lane in self._lanes), self._count
        )

    def _next(self) -> int | None:
        """The source whose turn it is; None once nothing follows."""
        while active := [index for index, lane in enumerate(self._lanes) if not lane.place.ended]:
            chosen = max(active, key=lambda index: (self._lanes[index].credit, self._weights[index], -index))
            if not self._lanes[chosen].ended:
                return chosen
            gone = active if self._settings.stop_mode == "first_exhausted" else [chosen]
            for index in gone:
                lane = self._lanes[index]
                lane.place = lane.place._replace(ended=True) if index != chosen else lane.cursor.place
        return None

    def _supply(self, index: int) -> tuple[float, float, float]:
        lane = self._lanes[index]
        # One record and one token are added, so that a source without any record so far is asked for.
        need = self._weights[index] * (lane.records + 1) / (lane.tokens + 1)
        return lane.waits / need, -lane.credit, -self._weights[index]


def open_mixer(
    sources: Sequence[Source],
    settings: SequenceSettings,
    share: Share,
    states: Sequence[SourceState] | None = None,
    count: int = 0,
) -> Mixer:
    """The mixer of a reader, at the start or at ``states`` (of each source, in order)."""
    found = [SourceState()] * len(sources) if states is None else states
    kind = SampleMixer if settings.mixing == "sample" else TokenMixer
    return kind(sources, settings, share, states=found, count=count)


def _active(weights: Sequence[float], places: Sequence[Place]) -> float:
    return sum(weight for weight, place in zip(weights, places, strict=True) if not place.ended)


def _tokens(draw: Draw) -> int:
    return sum(len(document) for document in draw.documents)
