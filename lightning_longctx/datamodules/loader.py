"""The loaders that the data module gives to Lightning: plain iterables.

No ``__len__``: a packed epoch has no length that is known beforehand. No ``state_dict`` or sampler: Lightning's own
loader state is one batch ahead, and the data module owns the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from time import perf_counter

from lightning_longctx.batch import PackedBatch
from lightning_longctx.datamodules.agreement import RowAgreement
from lightning_longctx.datamodules.balance import planning_depth
from lightning_longctx.datamodules.ledger import ConsumptionLedger
from lightning_longctx.datamodules.policies import BufferPolicy
from lightning_longctx.datamodules.row_process import RowProcess
from lightning_longctx.datamodules.row_state import Reweight
from lightning_longctx.datamodules.rows import RowSettings, RowState
from lightning_longctx.datamodules.runtime import ROWS_AHEAD, BackgroundRows, LocalRows
from lightning_longctx.datamodules.settings import OnUnevenEnd, Runtime
from lightning_longctx.errors import DataError
from lightning_longctx.topology import Topology

__all__ = ["EvaluationLoader", "RowPlan", "TrainingLoader"]

# Waits that are kept where nobody asks for them.
_WAITS_KEPT = 10_000


@dataclass(frozen=True)
class RowPlan:
    """Everything that a loader needs to start anew.

    Args:
        settings: what to read and how to pack.
        policy: chooses; resolved, and copied for each iterator.
        topology: ranks and groups.
        on_uneven_end: what happens when one rank runs out first.
        runtime: where rows are made: a thread of this process, or one process of its own.
    """

    settings: RowSettings
    policy: BufferPolicy
    topology: Topology
    on_uneven_end: OnUnevenEnd
    runtime: Runtime = "main"

    def rows(self, state: RowState) -> RowIterator:
        """Start at ``state``."""
        return RowIterator(self, state)


class RowIterator(Iterator[PackedBatch]):
    """Whole rows on every rank, until the agreed end.

    Args:
        plan: what to do.
        state: where to start.
    """

    def __init__(self, plan: RowPlan, state: RowState) -> None:
        settings, topology = plan.settings, plan.topology
        self._start = state
        self._rows = state.rows
        self._balance = settings.balance
        self._agreement = RowAgreement(
            topology, plan.on_uneven_end, settings.budget.counted, settings.pad_to_multiple_of, settings.balance
        )
        self._background: BackgroundRows | None = None
        if topology.is_reader:
            kind = RowProcess if plan.runtime == "worker" else LocalRows
            maker = kind(settings, deepcopy(plan.policy), state)
            self._background = BackgroundRows(maker, state, 0 if settings.balance else ROWS_AHEAD)

    def __next__(self) -> PackedBatch:
        with self._agreement:
            if self._background is not None:
                self._background.plan()
        row = self._agreement.exchange(self._background)
        if row is None:
            raise StopIteration
        self._rows += 1
        return row

    def state(self) -> RowState:
        """The state after the last row. Ranks that read nothing know only how many rows there were."""
        state = self._start if self._background is None else self._background.state()
        return replace(state, rows=self._rows)

    def counters_at_end(self) -> dict[str, int]:
        """The counts once the ranks agreed that no row follows: what waits is left over."""
        return self._start.counters if self._background is None else self._background.counters_at_end()

    def reweight(self, weights: Mapping[str, float]) -> int:
        """Mix by other weights from the first row on that nobody plans yet.

        Returns:
            The number of that row.
        """
        # Rows that wait packed and the one that is planned; under `balance` all that are planned.
        ahead = planning_depth(self._rows) if self._balance else ROWS_AHEAD + 1
        row = self._rows + ahead
        if self._background is not None:
            self._background.reweight(Reweight(row, dict(weights)))
        return row

    def close(self) -> None:
        """End the thread and the processes."""
        if self._background is not None:
            self._background.close()


class TrainingLoader:
    """Rows for training, from the last one that was used on.

    So iterating again within a pass (a limit on batches, a restart) goes on where training was, and nothing repeats
    before the pass is over.

    Args:
        plan: what to do.
        ledger: knows what was used; gets a ticket for each row.
        use_at_once: called before each row is yielded; without a Trainer it turns in the ticket.
        same_rows: how many rows every iteration repeats, the first ones of all. Default None: none does.
        begins_epoch: whether a pass that has nothing left is followed by the next one at once: nobody has taken a row
            of this iteration. Default None: never, since a resume may stand right at the end.
    """

    def __init__(
        self,
        plan: RowPlan,
        ledger: ConsumptionLedger,
        use_at_once: Callable[[], None] | None = None,
        same_rows: int | None = None,
        begins_epoch: Callable[[], bool] | None = None,
    ) -> None:
        self._plan = plan
        self._ledger = ledger
        self._use_at_once = use_at_once
        self._same_rows = same_rows
        self._begins_epoch = begins_epoch
        self._rows: RowIterator | None = None
        self._waits: deque[float] = deque(maxlen=_WAITS_KEPT)

    def __iter__(self) -> Iterator[PackedBatch]:
        self.close()
        while True:
            state = self._ledger.begin(self._same_rows)
            if (yield from self._pass(state)):
                return
            if not state.rows:
                fix = (
                    "Check limits on lengths, `drop_last`, and that there are as many documents as data-parallel ranks."
                )
                raise DataError("data.sources", "must give at least one row an epoch", "none", fix)
            # A limit on batches ended the epoch before with the last row of the pass.
            if self._begins_epoch is None or not self._begins_epoch():
                return

    def _pass(self, state: RowState) -> Generator[PackedBatch, None, bool]:
        """The rows of a pass after ``state``; whether there was one."""
        rows = self._rows = self._plan.rows(state)
        found = False
        with closing(rows):
            while (row := self._timed(rows)) is not None:
                found = True
                self._ledger.produce(rows.state())
                if self._use_at_once is not None:
                    self._use_at_once()
                yield row
            if self._rows is rows:  # not replaced meanwhile by another iterator
                self._ledger.end(rows.counters_at_end())
        return found

    def reweight(self, weights: Mapping[str, float]) -> None:
        """Mix by other weights, by source name, from the first row on that nobody plans yet; see the ledger's state."""
        self._ledger.reweight(self._ledger.used.rows if self._rows is None else self._rows.reweight(weights), weights)

    def wait_seconds(self) -> list[float]:
        """How long each row since the last call was waited for."""
        waits = list(self._waits)
        self._waits.clear()
        return waits

    def close(self) -> None:
        """End the thread and the processes; the ledger keeps its place."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def _timed(self, rows: RowIterator) -> PackedBatch | None:
        start = perf_counter()
        row = next(rows, None)
        if row is not None:
            self._waits.append(perf_counter() - start)
        return row


class EvaluationLoader:
    """Rows for validation and test: one pass in order, started anew each time, every document once on any layout.

    Args:
        plan: what to do.
    """

    def __init__(self, plan: RowPlan) -> None:
        self._plan = replace(plan, on_uneven_end="pad")

    def __iter__(self) -> Iterator[PackedBatch]:
        topology = self._plan.topology
        rows = self._plan.rows(RowState(dp_rank=topology.dp_rank, dp_size=topology.dp_size))
        with closing(rows):
            yield from rows
