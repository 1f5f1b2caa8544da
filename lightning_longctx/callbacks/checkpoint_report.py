"""What a run says about its checkpoints: metrics, lines, a note in the progress bar."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.checkpoint.writer import Outcome
from lightning_longctx.units import counted

__all__ = ["STALL", "CheckpointReport", "logged_steps", "shown"]

#: Key of the metric that is logged with each save, before the name of the slot.
STALL = "checkpoint/stall_s/"

# Waits for earlier writes, in all, above which people should hear of it.
_NOTICEABLE_SECONDS = 1.0


def shown(path: Folder) -> str:
    """A path as people read it: from where they are, if it is below."""
    below = isinstance(path, Path) and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if isinstance(path, Path) and below else str(path)


def logged_steps(trainer: pl.Trainer) -> int:
    """Steps done as loggers number them: with optimization by hand Lightning counts micro-batches."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


class CheckpointReport:
    """Collects what saves cost.

    =============================== ================================================================================
    key                             value
    =============================== ================================================================================
    ``checkpoint/stall_s/<slot>``   seconds that training waited for a save: for the slot's last write, and the copy
    ``checkpoint/write_s/<slot>``   seconds from the start of a save until the slot was written
    ``checkpoint/bytes/<slot>``     bytes that the first rank wrote
    ``checkpoint/pending_age_s/<slot>`` seconds that a write has been under way, at each logged step
    =============================== ================================================================================
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._lost = self._blocked = 0.0
        self._saves = 0
        self._warned = False
        self._shown = False

    def began(self, trainer: pl.Trainer, seconds: float, waited: Mapping[str, float], blocked: float) -> None:
        """A save began.

        Args:
            trainer: the run.
            seconds: that training waited in all.
            waited: of these, by slot.
            blocked: of these, for earlier writes.
        """
        self._lost += seconds
        self._saves += 1
        self._log(trainer, {f"{STALL}{slot}": value for slot, value in waited.items()})
        self._blocked += blocked
        if self._blocked > _NOTICEABLE_SECONDS and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"Training waited {self._blocked:.1f} s for checkpoints before: writing takes longer than the interval."
                " Save less often, or raise `optimizer_every_n_saves`.",
                category=UserWarning,
            )

    def ended(self, trainer: pl.Trainer, outcomes: Iterable[Outcome]) -> None:
        """Writes ended."""
        for outcome in outcomes:
            values = {"write_s": outcome.seconds, "bytes": float(outcome.size)}
            self._log(trainer, {f"checkpoint/{key}/{outcome.slot}": value for key, value in values.items()})

    def pending(self, trainer: pl.Trainer, module: pl.LightningModule, ages: Mapping[str, float]) -> None:
        """Writes are under way, or none is."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # a connector sets it, out of mypy's sight
        if ages and every and trainer.global_step % every == 0:
            self._log(trainer, {f"checkpoint/pending_age_s/{slot}": age for slot, age in ages.items()})
        if trainer.progress_bar_callback is not None and (ages or self._shown):
            self._shown = bool(ages)
            module.log("saving_s", max(ages.values(), default=0.0), prog_bar=True, logger=False)

    def summarize(self) -> None:
        """Say what all saves cost."""
        elapsed = time.monotonic() - self._begin
        if self._saves:
            share = 100 * self._lost / elapsed
            rank_zero_info(
                f"{counted(self._saves, 'checkpoint')} took {self._lost:.2f} s of {elapsed:.0f} s ({share:.1f} %)."
            )

    @staticmethod
    def _log(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        if not metrics or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logged_steps(trainer))
