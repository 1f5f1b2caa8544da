"""What the data module changes on a Trainer for the length of a run, and puts back."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_longctx.datamodules.ledger import ConsumptionLedger
from lightning_longctx.datamodules.open_window import OpenWindow
from lightning_longctx.datamodules.row_state import RowState
from lightning_longctx.datamodules.sizes import check_one_accumulation
from lightning_longctx.units import counted

__all__ = ["TrainerSettings", "begins_epoch", "end_fit", "model_vocabulary", "rows_to_overfit", "warn_of_cut_epoch"]

# Lightning asks the loader alone. Ours has no state on purpose: the data module has it.
_NOT_RESUMABLE = ".*your dataloader is not resumable"
# Asked before anybody tells that there is nothing to validate on, of every module without a `validation_step`.
_NO_VALIDATION_STEP = "You passed in a `val_dataloader` but have no `validation_step`"


class TrainerSettings:
    """What of a Trainer depends on the data: whether a fit validates, micro-batches of a step, and its batch count.

    Args:
        validates: whether there is data for validation; without, Lightning's advice about it is not true.
    """

    def __init__(self, validates: bool = True) -> None:
        if not validates:
            warnings.filterwarnings("ignore", message=_NO_VALIDATION_STEP)
        self._window = OpenWindow()
        # The Trainer's own values, while others stand in for them.
        self._limit_val_batches: int | float | None = None
        self._accumulate: int | None = None
        self._silenced: Any = None  # a filter of warnings, for the length of a resumed run

    def allow_validation(self, trainer: pl.Trainer, allowed: bool) -> None:
        """Switch validation off during a fit without data for it: an empty loader would make Lightning warn."""
        if not allowed and self._limit_val_batches is None:
            self._limit_val_batches = trainer.limit_val_batches
            trainer.limit_val_batches = 0
        elif allowed and self._limit_val_batches is not None:
            trainer.limit_val_batches = self._limit_val_batches
            self._limit_val_batches = None

    def accumulate(self, trainer: pl.Trainer, micro_batches: int) -> None:
        """Set the micro-batches of a step that ``global_batch_tokens`` asks for.

        Raises:
            ConfigurationError: the Trainer or a callback sets them too.
        """
        check_one_accumulation(micro_batches, trainer.accumulate_grad_batches, trainer.callbacks)  # type: ignore[attr-defined]
        if self._accumulate is None:  # a fit that was interrupted has not put it back
            self._accumulate = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = micro_batches

    def rewind(self, trainer: pl.Trainer, rows: int) -> None:
        """Take rows of an unfinished accumulation window, which come again, off the Trainer's count of batches.

        And for the length of the run let Lightning not say that the data cannot go on where it was.
        """
        if self._silenced is None:
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            self._silenced = warnings.filters[0]
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self._window not in callbacks:
            callbacks.append(self._window)
        self._window.rows = rows

    def restore(self, trainer: pl.Trainer) -> None:
        """Put all back: the next fit may bring other data."""
        with suppress(ValueError):  # somebody has reset the filters
            warnings.filters.remove(self._silenced)  # type: ignore[attr-defined]  # a list
        self._silenced = None
        self.allow_validation(trainer, True)
        if self._accumulate is not None:
            trainer.accumulate_grad_batches = self._accumulate
            self._accumulate = None


def model_vocabulary(trainer: pl.Trainer | None) -> int | None:
    """Number of token ids of the model, if it says so (``vocab_size``), so that a bad id names its document."""
    module = None if trainer is None else trainer.lightning_module
    vocabulary = getattr(module, "vocab_size", None)
    return vocabulary if isinstance(vocabulary, int) else None


def begins_epoch(trainer: pl.Trainer | None) -> bool:
    """Whether Lightning has no batch of its epoch yet, or all that a limit allows: then the next epoch begins."""
    if trainer is None:
        return False
    taken = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    limit = trainer.limit_train_batches
    return taken == 0 or (isinstance(limit, int) and taken >= limit)


def end_fit(trainer: pl.Trainer | None, ledger: ConsumptionLedger | None) -> None:
    """Tell the ledger that a fit ended or broke off, if this is one."""
    if trainer is not None and ledger is not None and trainer.state.fn == TrainerFn.FITTING:
        ledger.end_fit(trainer.global_step)


def rows_to_overfit(trainer: pl.Trainer | None) -> int | None:
    """How many rows ``Trainer(overfit_batches=...)`` wants to see in every epoch; None without it."""
    if trainer is None or not trainer.overfit_batches:  # type: ignore[attr-defined]  # a connector sets it
        return None
    limit = trainer.limit_train_batches
    return limit if isinstance(limit, int) else sys.maxsize


def warn_of_cut_epoch(trainer: pl.Trainer | None, state: RowState) -> None:
    """Say that a fit will train nothing: Lightning counts an epoch that ``max_steps`` ended as a whole one.

    Args:
        trainer: its fit begins; None for none.
        state: of the data, after the last row that was used.
    """
    if trainer is None or not state.rows or state.finished or trainer.limit_train_batches != 1.0:
        return
    progress: Any = trainer.fit_loop.epoch_progress.current
    most, epochs = trainer.max_epochs, progress.processed
    if most is not None and 0 <= most <= epochs:
        rank_zero_warn(
            f"Nothing will be trained: Lightning counts {counted(epochs, 'whole epoch')} (max_epochs={most}), though"
            f" `max_steps` or a stop ended the last one after {counted(state.rows, 'row')}. Leave `max_epochs` out or"
            " raise it to go on.",
            category=UserWarning,
        )
