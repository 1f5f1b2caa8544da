"""Signals that ask a run to stop: noted when they come, agreed on at the next step, obeyed after a save.

Lightning's own handlers broadcast or save inside the handler, at whatever point the process is: with a signal to one
rank both sides wait for each other.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

__all__ = ["StopSignals", "requeue"]


class StopSignals:
    """Handlers of SIGTERM, Ctrl-C and the requeue signal for the length of a fit.

    Args:
        trainer: its launcher's children get SIGTERM too.

    Attributes:
        stop: SIGTERM or the requeue signal came.
        requeue: the requeue signal came, and the job should be queued again.
        interrupt: Ctrl-C came. A second one ends the run at once.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.stop = self.requeue = self.interrupt = False
        self._before: dict[int, Any] = {}
        self._environment = _slurm_environment(trainer)

    def install(self) -> None:
        """Put the handlers in place; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        requeue_signal = getattr(self._environment, "requeue_signal", None) or signal.SIGUSR1
        wanted = {signal.SIGTERM: self._on_stop, requeue_signal: self._on_requeue}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # somebody else's handler stays
            wanted[signal.SIGINT] = self._on_interrupt
        for number, handler in wanted.items():
            self._before[number] = signal.signal(number, handler)

    def remove(self) -> None:
        """Put back what was there. Safe to call twice."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    @property
    def is_slurm(self) -> bool:
        """Whether SLURM started the run and is to queue it again."""
        return self._environment is not None

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if not self.stop and (launcher := self._trainer.strategy.launcher) is not None:
            launcher.kill(number)
        self.stop = True

    def _on_requeue(self, number: int, frame: FrameType | None) -> None:
        self.stop = self.requeue = True

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupt:
            raise KeyboardInterrupt
        self.interrupt = True
        rank_zero_info("\nSaving after this step, then stopping. Press Ctrl-C again to stop at once.")


def requeue() -> bool:
    """Ask SLURM to queue this job again, once; whether it did."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9_]+", job):
        return False
    try:
        code = subprocess.call(["scontrol", "requeue", job])  # noqa: S603, S607 - found as every SLURM tool is
    except OSError as error:
        rank_zero_warn(f"Job {job} could not be queued again: {error}", category=UserWarning)
        return False
    if code:
        rank_zero_warn(f"`scontrol requeue {job}` ended with code {code}", category=UserWarning)
    return code == 0


def _slurm_environment(trainer: pl.Trainer) -> SLURMEnvironment | None:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None and SLURMEnvironment.detect():
        environment = SLURMEnvironment()
    return environment if isinstance(environment, SLURMEnvironment) and environment.auto_requeue else None
