"""When a save is due, and whether the optimizer's state belongs to it."""

from __future__ import annotations

import time
from datetime import timedelta

from lightning_longctx.callbacks.checkpoint_options import check_interval
from lightning_longctx.units import check_whole

__all__ = ["DEFAULT_STEPS", "Schedule"]

#: Steps between saves where nothing else is said: at the aim of 1 % of the time, half a step.
DEFAULT_STEPS = 50


class Schedule:
    """When to save.

    Args:
        every_n_train_steps: optimizer steps between saves; None: :data:`DEFAULT_STEPS` if nothing else is given.
        every_n_epochs: epochs between saves.
        train_time_interval: time between saves.
        optimizer_every_n_saves: the first of so many saves holds the optimizer's state, the others weights only.

    Raises:
        ConfigurationError: no whole number, or one below 1; no length of time.
    """

    def __init__(
        self,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        train_time_interval: timedelta | None,
        optimizer_every_n_saves: int,
    ) -> None:
        numbers = {
            "every_n_train_steps": every_n_train_steps,
            "every_n_epochs": every_n_epochs,
            "optimizer_every_n_saves": optimizer_every_n_saves,
        }
        for name, number in numbers.items():
            if number is not None:
                check_whole(f"callbacks.AsyncDCPCheckpoint.{name}", number, 1)
        if train_time_interval is not None:
            check_interval("train_time_interval", train_time_interval)
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_train_steps = DEFAULT_STEPS
        self.steps, self.epochs, self.interval = every_n_train_steps, every_n_epochs, train_time_interval
        self._optimizer_every = optimizer_every_n_saves
        self._saves = 0
        self._last_step = 0
        self._last_time = time.monotonic()

    def start(self, step: int) -> None:
        """Begin to count at a step; the first save of each fit holds the optimizer's state."""
        self._saves, self._last_step, self._last_time = 0, step, time.monotonic()

    def step_is_due(self, step: int) -> bool:
        """Whether a multiple of the interval was reached since the last call; a step may count more than one."""
        last, self._last_step = self._last_step, step
        return self.steps is not None and step // self.steps > last // self.steps

    def time_is_due(self) -> bool:
        """Whether the time is up, by this process's clock."""
        return self.interval is not None and time.monotonic() - self._last_time >= self.interval.total_seconds()

    def epoch_is_due(self, epoch: int) -> bool:
        """Whether the end of this epoch, counted from 0, is one to save at."""
        return self.epochs is not None and (epoch + 1) % self.epochs == 0

    def optimizer_is_due(self) -> bool:
        """Whether the next save holds the optimizer's state."""
        return self._saves % self._optimizer_every == 0

    def saved(self, with_optimizer: bool) -> None:
        """Count a save; one with the optimizer's state begins a new round."""
        self._saves = 1 if with_optimizer else self._saves + 1
        self._last_time = time.monotonic()
