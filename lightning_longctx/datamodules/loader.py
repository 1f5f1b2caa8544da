"""The loaders that the data module gives to Lightning: plain iterables.

No ``__len__``: a packed epoch has no length that is known beforehand. No ``state_dict`` or sampler: Lightning's own
loader state is one batch ahead, and the data module owns the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

from lightning_longctx.batch import PackedBatch
from lightning_longctx.datamodules.agreement import RowAgreement
from lightning_longctx.datamodules.balance import planning_depth
from lightning_longctx.datamodules.ledger import ConsumptionLedger
from lightning_longctx.datamodules.policies import BufferPolicy
from lightning_longctx.datamodules.rows import RowBuilder, RowSettings, RowState
from lightning_longctx.datamodules.settings import OnUnevenEnd
from lightning_longctx.errors import DataError
from lightning_longctx.topology import Topology

__all__ = ["EvaluationLoader", "RowPlan", "TrainingLoader"]


@dataclass(frozen=True)
class RowPlan:
    """Everything that a loader needs to start anew.

    Args:
        settings: what to read and how to pack.
        policy: chooses; resolved, and copied for each iterator.
        topology: ranks and groups.
        on_uneven_end: what happens when one rank runs out first.
    """

    settings: RowSettings
    policy: BufferPolicy
    topology: Topology
    on_uneven_end: OnUnevenEnd

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
        self._builder = RowBuilder(settings, deepcopy(plan.policy), state) if topology.is_reader else None

    def __next__(self) -> PackedBatch:
        with self._agreement:
            if self._builder is not None:
                self._builder.plan()
        row = self._agreement.exchange(self._builder)
        if row is None:
            raise StopIteration
        self._rows += 1
        return row

    def state(self) -> RowState:
        """The state after the last row. Ranks that read nothing know only how many rows there were."""
        state = self._start if self._builder is None else self._builder.state()
        return replace(state, rows=self._rows)

    def counters_at_end(self) -> dict[str, int]:
        """The counts once the ranks agreed that no row follows: what waits is left over."""
        return self._start.counters if self._builder is None else self._builder.counters_at_end()

    def reweight(self, weights: Mapping[str, float]) -> int:
        """Mix by other weights from the first row on that nobody plans yet.

        Returns:
            The number of that row.
        """
        row = self._rows + (planning_depth(self._rows) if self._balance else 1)
        if self._builder is not None:
            self._builder.reweight(row, weights)
        return row

    def close(self) -> None:
        """End the worker processes."""
        if self._builder is not None:
            self._builder.close()


class TrainingLoader:
    """Rows for training, from the last one that was used on.

    So iterating again within a pass (a limit on batches, a restart) goes on where training was, and nothing repeats
    before the pass is over.

    Args:
        plan: what to do.
        ledger: knows what was used; gets a ticket for each row.
        use_at_once: called before each row is yielded; without a Trainer it turns in the ticket.
    """

    def __init__(self, plan: RowPlan, ledger: ConsumptionLedger, use_at_once: Callable[[], None] | None = None) -> None:
        self._plan = plan
        self._ledger = ledger
        self._use_at_once = use_at_once
        self._rows: RowIterator | None = None

    def __iter__(self) -> Iterator[PackedBatch]:
        self.close()
        state = self._ledger.begin()
        rows = self._rows = self._plan.rows(state)
        found = state.rows > 0  # a resume may stand right at the end
        for row in rows:
            found = True
            self._ledger.produce(rows.state())
            if self._use_at_once is not None:
                self._use_at_once()
            yield row
        if self._rows is rows:  # not replaced meanwhile by another iterator
            self._ledger.end(rows.counters_at_end())
        if not found:
            fix = "Check limits on lengths, `drop_last`, and that there are as many documents as data-parallel ranks."
            raise DataError("data.sources", "must give at least one row an epoch", "none", fix)

    def reweight(self, weights: Mapping[str, float]) -> None:
        """Mix by other weights, by source name, from the first row on that nobody plans yet; see the ledger's state."""
        self._ledger.reweight(self._ledger.used.rows if self._rows is None else self._rows.reweight(weights), weights)

    def close(self) -> None:
        """End the worker processes; the ledger keeps its place."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None


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
        try:
            yield from rows
        finally:
            rows.close()
