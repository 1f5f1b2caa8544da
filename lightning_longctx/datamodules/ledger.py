"""Which rows the training loop has really used: the source of truth of a resume.

Lightning fetches one batch ahead of any loader without a length, and gradients of an unfinished accumulation window are
not in a checkpoint. So what was produced says nothing; a ticket for each row is turned in when training takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from lightning_longctx.datamodules.row_state import RowState

__all__ = ["ConsumptionLedger"]


class ConsumptionLedger:
    """Keeps the state after each row that was produced, used, and trained on.

    Args:
        state: where the run starts.
    """

    def __init__(self, state: RowState) -> None:
        self.reset(state)

    def reset(self, state: RowState) -> None:
        """Forget everything and start from ``state``."""
        self._produced: deque[RowState] = deque()
        self._used = state  # after the last row that training took
        self._safe = state  # after the last row whose optimizer step is done
        self._step: int | None = None  # the optimizer step in which the last row was taken
        self._ended = False  # whether the fit that took it is over

    @property
    def has_produced(self) -> bool:
        """Whether rows are on their way that training has not taken."""
        return bool(self._produced)

    @property
    def used(self) -> RowState:
        """The state after the last row that training took."""
        return self._used

    def begin_fit(self) -> None:
        """Note that a fit begins: rows that an earlier one took and did not train on come again.

        The steps that are counted from now on may have the numbers of an earlier one's.
        """
        if self._ended:
            self._used = self._safe
        self._safe, self._step, self._ended = self._used, None, False

    def end_fit(self, step: int) -> None:
        """Note that a fit ended or broke off.

        Args:
            step: number of optimizer steps done in it.
        """
        self._settle(step)
        self._ended = True

    def reweight(self, row: int, weights: Mapping[str, float]) -> None:
        """Note other weights of sources in every state that a run may resume from."""
        kept = self._safe is self._used
        self._produced = deque(state.reweighted(row, weights) for state in self._produced)
        self._used = self._used.reweighted(row, weights)
        self._safe = self._used if kept else self._safe.reweighted(row, weights)

    def begin(self, same_rows: int | None = None) -> RowState:
        """Where a new iterator must start: after the last row used, or at the next epoch if this one has no more.

        Args:
            same_rows: how many rows every epoch repeats. Default None: none does.
        """
        self._produced.clear()
        if same_rows is not None and (self._used.finished or self._used.rows >= same_rows):
            self.reset(RowState(dp_rank=self._used.dp_rank, dp_size=self._used.dp_size))
        elif self._used.finished:
            self._used = self._used.next_epoch()
        return self._used

    def produce(self, state: RowState) -> None:
        """Note the state after a row that is about to be yielded."""
        self._produced.append(state)

    def end(self, counters: dict[str, int]) -> None:
        """Note that the epoch has no row after the last one produced."""
        if self._produced:
            self._produced[-1] = self._produced[-1].at_end(counters)
            return
        finished = self._used.at_end(counters)
        if self._safe is self._used:
            self._safe = finished
        self._used = finished

    def use(self, step: int) -> None:
        """Turn in the ticket of the oldest row produced.

        Args:
            step: number of optimizer steps done so far.
        """
        self._settle(step)
        self._step = step
        self._used = self._produced.popleft()

    def state(self, step: int) -> RowState:
        """The state to save: after the last row whose optimizer step is done.

        Inside an accumulation window that is the state at its first row: its gradients are lost with the process, so
        its rows must come again.

        Args:
            step: number of optimizer steps done so far.
        """
        self._settle(step)
        return self._safe

    def open_rows(self, step: int) -> int:
        """How many rows training took since the state to save: those of an unfinished accumulation window.

        Args:
            step: number of optimizer steps done so far.
        """
        self._settle(step)
        return self._used.rows - self._safe.rows if self._used.epoch == self._safe.epoch else 0

    def _settle(self, step: int) -> None:
        if step != self._step:
            self._safe = self._used
