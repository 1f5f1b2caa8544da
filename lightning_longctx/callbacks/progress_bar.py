"""What Lightning's two bars get wrong over a stream: an end of epochs that there is not, and the length of the bar.

The Rich bar subtracts 1 from the number of epochs, also from -1, which means "no end". Both compare micro-batches of
the epoch with the steps that are left: with accumulation, or after a resume inside an epoch, a bar runs over its end.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import convert_inf

__all__ = ["hide_unknown_epochs", "restore_epochs", "set_length"]

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


def set_length(trainer: Trainer, module: LightningModule, batch_idx: int, first: bool) -> None:
    """Give the bar the micro-batches of this epoch for a length, and those that were done before a resume for a start.

    Args:
        trainer: whose bar; nothing is done to one of another class.
        module: with optimization by hand the micro-batches of a step are not known, and the bar stays as it is.
        batch_idx: number, in the epoch, of the micro-batch that begins.
        first: whether it is the first of this fit.
    """
    bar: Any = trainer.progress_bar_callback
    if not isinstance(bar, (RichProgressBar, TQDMProgressBar)) or bar.is_disabled or not module.automatic_optimization:
        return
    length = _micro_batches(trainer, batch_idx)
    if isinstance(bar, TQDMProgressBar):
        shown: Any = bar.train_progress_bar
        if first and batch_idx:
            shown.initial = shown.n = batch_idx
            shown.set_description(f"Epoch {trainer.current_epoch}", refresh=False)
        shown.total = convert_inf(length)
        return
    assert bar.progress is not None
    if bar.train_progress_bar_id is None:  # inside an epoch the bar makes none before the first micro-batch is done
        bar._initialize_train_progress_bar_id()
        assert bar.train_progress_bar_id is not None
        bar.progress.reset(bar.train_progress_bar_id, completed=batch_idx)
    if bar.train_progress_bar.total != length:
        bar.progress.update(bar.train_progress_bar_id, total=length)


def _micro_batches(trainer: Trainer, batch_idx: int) -> float:
    """Micro-batches that the epoch will have, as far as one can tell: ``inf`` for a stream without a last step."""
    if trainer.max_steps < 0:
        return trainer.num_training_batches
    accumulate = trainer.accumulate_grad_batches
    begun = batch_idx - batch_idx % accumulate  # where the step that is under way began
    return min(trainer.num_training_batches, begun + (trainer.max_steps - trainer.global_step) * accumulate)


def _description(bar: RichProgressBar, epoch: int) -> str:
    return f"Epoch {epoch}".ljust(len(bar.validation_description))  # one width with the bar of the validation
