"""Rows made in the background: the next ones are planned and packed while the training step computes.

One loop serves both runtimes. It runs in one thread of this process, and the maker that it drives is either here
(``main``) or the only content of a child process (``worker``); so rows and states are equal by construction. The loop
takes part in no collective: what ranks agree on is agreed on by the thread that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol, TypeAlias

from lightning_longctx.batch import PackedBatch
from lightning_longctx.datamodules.policies import BufferPolicy
from lightning_longctx.datamodules.row_state import Reweight
from lightning_longctx.datamodules.rows import RowBuilder, RowSettings, RowState

__all__ = ["ROWS_AHEAD", "BackgroundRows", "GivenRow", "LocalRows", "Plan", "RowMaker"]

#: Rows that wait packed, beside the one that is planned. Two even out rows of many and of few documents; a row of a
#: million tokens takes 32 MB. Under ``balance`` none: which planned row is given is known only once ranks agreed.
ROWS_AHEAD = 2
# How long a wait may keep signal handlers from running (seconds).
_LOOK = 0.5


class Plan(NamedTuple):
    """What may be given next.

    Attributes:
        offers: of each planned row: when it was planned, and what it costs. Empty at the end of the epoch.
        counters: the counts if the epoch ended here: what waits is left over.
        state: at the end of the epoch, the state there.
    """

    offers: list[tuple[int, float]]
    counters: dict[str, int]
    state: RowState | None


class GivenRow(NamedTuple):
    """A row, and the state after it."""

    row: PackedBatch
    state: RowState


class RowMaker(Protocol):
    """Makes rows in turn: a plan, a row of that plan, the next plan."""

    def open(self) -> None:
        """Start processes. Called in the main thread, whose signal handlers notice their death."""

    def plan(self) -> Plan:
        """Plan ahead."""

    def give(self, index: int) -> GivenRow:
        """Pack one of the planned rows."""

    def reweight(self, row: int, weights: Mapping[str, float]) -> None:
        """Mix by other weights from the documents on that are read for row number ``row``."""

    def stop(self) -> None:
        """Make a call that is under way in another thread fail soon."""

    def close(self) -> None:
        """End processes, once no call is under way."""


class LocalRows:
    """Makes rows in the thread, or process, that calls it.

    Args:
        settings: what to read and how to pack.
        policy: chooses; owned by this object.
        state: where to start.
    """

    def __init__(self, settings: RowSettings, policy: BufferPolicy, state: RowState) -> None:
        self._builder = RowBuilder(settings, policy, state)
        self.open, self.stop, self.close = self._builder.open, self._builder.stop, self._builder.close
        self.reweight = self._builder.reweight

    def plan(self) -> Plan:
        """Choose rows and read again what they lack; everything that can fail for a row fails here."""
        builder = self._builder
        builder.plan()
        offers = builder.offers()
        return Plan(offers, builder.counters_at_end(), None if offers else builder.state())

    def give(self, index: int) -> GivenRow:
        """Pack a planned row. The state is taken before anything is done for the next one."""
        return GivenRow(self._builder.give(index), self._builder.state())


_Made: TypeAlias = "Plan | GivenRow | BaseException"


class BackgroundRows:
    """The rows of a maker, made ahead by one thread; each state is that after the row that was taken last.

    Args:
        maker: makes rows.
        state: where it starts.
        ahead: how many rows it may pack before they are asked for; 0 where each row must be picked.
    """

    def __init__(self, maker: RowMaker, state: RowState, ahead: int = ROWS_AHEAD) -> None:
        self._maker = maker
        self._state = state
        self._ahead = ahead
        self._plan: Plan | None = None
        self._error: BaseException | None = None
        self._given = 0
        self._reweights: list[tuple[int, Reweight]] = []  # and how many rows are picked before each
        self._picks: SimpleQueue[int | Reweight | None] = SimpleQueue()
        self._made: SimpleQueue[_Made] = SimpleQueue()
        self._thread: Thread | None = None

    def plan(self) -> None:
        """Wait until the next row is planned.

        Raises:
            DataError: a bad record, or whatever else the maker failed with.
        """
        if self._thread is None:
            self._start()
        if self._plan is None:
            plan = self._receive()
            assert isinstance(plan, Plan)
            self._plan = plan

    def offers(self) -> list[tuple[int, float]]:
        """Of each planned row, oldest first: when it was planned, and what it costs. Empty at the end of the epoch."""
        assert self._plan is not None
        return self._plan.offers

    def give(self, index: int = 0) -> PackedBatch:
        """Take a planned row. The next ones are planned from here on, whatever the caller does meanwhile."""
        assert index == 0 or not self._ahead
        if not self._ahead:
            self._picks.put(index)
        given = self._receive()
        assert isinstance(given, GivenRow)
        if self._ahead:  # after the row is here: the thread that wakes up would compete for the interpreter
            self._picks.put(0)
        self._plan, self._state = None, self._reweighted(given.state, self._given)
        self._given += 1
        return given.row

    def reweight(self, entry: Reweight) -> None:
        """Mix by other weights from a row on that is not planned yet. Rows that are packed already wait on."""
        self._picks.put(entry)  # in line: the thread may be in the middle of a plan
        self._reweights.append((self._given + self._ahead, entry))
        self._state = self._state.reweighted(*entry)

    def _reweighted(self, state: RowState, picked: int) -> RowState:
        """A state with the weights of which the thread had not heard when it made it."""
        for before, entry in self._reweights:
            state = state.reweighted(*entry) if picked < before else state
        return state

    def state(self) -> RowState:
        """The state after the last row that was taken; after the last row of all, the state at the end."""
        at_end = None if self._plan is None else self._plan.state
        return self._state if at_end is None else self._reweighted(at_end, self._given - 1)

    def counters_at_end(self) -> dict[str, int]:
        """The counts if the epoch ends here, with what was planned and not given as left over."""
        assert self._plan is not None
        return self._plan.counters

    def close(self) -> None:
        """End the thread and the processes. Waits for the document that is being read, if any."""
        self._maker.stop()
        if self._thread is not None:
            self._picks.put(None)
            self._thread.join()
        self._maker.close()
        self._error = self._error or InterruptedError("these rows were closed; iterate anew")

    def _start(self) -> None:
        self._maker.open()
        for _ in range(self._ahead):
            self._picks.put(0)
        # A daemon: an interpreter that ends must not wait for a document that takes minutes.
        self._thread = Thread(target=self._work, name="longctx-rows", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while True:
                plan = self._maker.plan()
                self._made.put(plan)
                if not plan.offers or (index := self._picked()) is None:
                    return
                self._made.put(self._maker.give(index))
        except BaseException as error:  # raised again by the thread that waits for the row
            self._made.put(error)

    def _picked(self) -> int | None:
        while isinstance(pick := self._picks.get(), Reweight):
            self._maker.reweight(*pick)
        return pick

    def _receive(self) -> Plan | GivenRow:
        while self._error is None:
            try:
                made = self._made.get(timeout=_LOOK)
            except Empty:
                continue  # Python runs signal handlers here: an interrupt, or the death of a reading process
            if not isinstance(made, BaseException):
                return made
            self._error = made
        raise self._error
