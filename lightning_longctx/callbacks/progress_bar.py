"""Lightning's Rich bar over a stream: it subtracts 1 from the number of epochs, also from -1, which means "no end"."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar

__all__ = ["hide_unknown_epochs", "restore_epochs"]

_METHOD = "_get_train_description"


def hide_unknown_epochs(trainer: Trainer) -> None:
    """Let the bar show ``Epoch 0`` where it would show ``Epoch 0/-2``, as the TQDM bar does."""
    bar: Any = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar) and (trainer.max_epochs or 0) < 0:
        vars(bar)[_METHOD] = partial(_description, bar)


def restore_epochs(trainer: Trainer) -> None:
    """Give the bar back what it had."""
    bar: Any = trainer.progress_bar_callback
    if bar is not None:
        vars(bar).pop(_METHOD, None)


def _description(bar: RichProgressBar, epoch: int) -> str:
    return f"Epoch {epoch}".ljust(len(bar.validation_description))  # one width with the bar of the validation
