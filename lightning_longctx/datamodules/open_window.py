"""Lightning's count of batches after a resume from inside an accumulation window.

The gradients of an unfinished window are in no checkpoint, so its rows come again. Lightning's own count would go on
behind them: the first step would get fewer rows, and every later window would begin in the wrong place.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["OpenWindow"]


class OpenWindow(Callback):
    """Takes the rows of the unfinished window off Lightning's count, once, before the first batch after a resume.

    Attributes:
        rows: how many come again.
    """

    def __init__(self) -> None:
        self.rows = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rewind. The loop's counters are restored by now, and not used yet."""
        rows, self.rows = self.rows, 0
        loop = trainer.fit_loop.epoch_loop
        if rows and loop.restarting:  # else only the data was resumed, and Lightning counts from 0
            _rewind(loop, rows)


def _rewind(loop: Any, rows: int) -> None:
    for progress in (loop.batch_progress.total, loop.batch_progress.current):
        progress.ready -= rows
        progress.started -= rows
        progress.processed -= rows
        progress.completed -= rows
    # On a restart Lightning counts the step at whose end a checkpoint was taken once more, since it had not done so
    # when it was taken. It takes this for such a checkpoint, but the step before the window was counted.
    if not loop._should_accumulate() and (loop.restarted_on_train_batch_end or not loop.restarted_on_last):
        loop._batches_that_stepped -= 1
