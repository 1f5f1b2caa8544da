"""What the data module changes on a Trainer for the length of a run, and puts back."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_longctx.datamodules.open_window import OpenWindow
from lightning_longctx.datamodules.sizes import check_one_accumulation

__all__ = ["TrainerSettings"]


class TrainerSettings:
    """What of a Trainer depends on the data: whether a fit validates, micro-batches of a step, and its batch count."""

    def __init__(self) -> None:
        self._window = OpenWindow()
        # The Trainer's own values, while others stand in for them.
        self._limit_val_batches: int | float | None = None
        self._accumulate: int | None = None

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
        """Take rows of an unfinished accumulation window, which come again, off the Trainer's count of batches."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self._window not in callbacks:
            callbacks.append(self._window)
        self._window.rows = rows

    def restore(self, trainer: pl.Trainer) -> None:
        """Put both back: the next fit may bring other data."""
        self.allow_validation(trainer, True)
        if self._accumulate is not None:
            trainer.accumulate_grad_batches = self._accumulate
            self._accumulate = None
