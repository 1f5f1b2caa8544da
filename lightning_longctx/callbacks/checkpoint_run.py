"""One fit, as far as its checkpoints go: from the first step to the last byte written."""

from __future__ import annotations

import atexit
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning import __version__ as lightning_version
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_longctx.callbacks.checkpoint_capture import RunState, capture, optimizers_of, weights_of
from lightning_longctx.callbacks.checkpoint_loggers import refer_in_wandb
from lightning_longctx.callbacks.checkpoint_options import CheckpointOptions
from lightning_longctx.callbacks.checkpoint_report import CheckpointReport, shown
from lightning_longctx.callbacks.checkpoint_resume import Resumed
from lightning_longctx.callbacks.checkpoint_schedule import Schedule
from lightning_longctx.callbacks.checkpoint_signals import StopSignals, requeue
from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.checkpoint.discovery import find_latest
from lightning_longctx.checkpoint.export import export_checkpoint
from lightning_longctx.checkpoint.layout import OPTIMIZER, WEIGHTS
from lightning_longctx.checkpoint.retention import Retention
from lightning_longctx.checkpoint.scores import write_score
from lightning_longctx.checkpoint.states import expected_optimizer_tensors
from lightning_longctx.checkpoint.writer import CheckpointWriter, SaveRequest, WriterSettings
from lightning_longctx.errors import CheckpointError
from lightning_longctx.topology import Topology

__all__ = ["CheckpointRun", "RunPlan"]


@dataclass(frozen=True)
class RunPlan:
    """What the user asked for, and where the run is."""

    folder: Folder
    options: CheckpointOptions
    retention: Retention
    schedule: Schedule
    monitor: str | None
    topology: Topology


class CheckpointRun:
    """Saves of one fit.

    Args:
        trainer: at the start of training.
        module: what is trained.
        plan: what to do.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, plan: RunPlan) -> None:
        self._trainer = trainer
        self._module = module
        self._plan = plan
        settings = WriterSettings(
            timeout=plan.options.timeout,
            pin=trainer.strategy.root_device.type == "cuda",
            stage_dir=None if plan.options.stage_dir is None else Path(plan.options.stage_dir),
            retention=plan.retention,
        )
        versions = {"torch": str(torch.__version__), "lightning": lightning_version}
        self._writer = CheckpointWriter(plan.folder, settings, versions=versions)
        self._signals = StopSignals(trainer)
        self._report = CheckpointReport()
        self._step = trainer.global_step
        self._saved = (-1, False)  # step of the last save, and whether it can be resumed
        self._saved_name = ""
        self._deferred: bool | None = None  # a save that waits for a validation; whether it must be resumable
        self._scored = False

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def open(self, run: str | None, resumed: Resumed | None) -> str:
        """Make groups and buffers; return the id of the run."""
        self._writer.open(run)
        if resumed is not None:
            self._writer.protected.add(resumed.path.name)
            if resumed.path.parent == self._plan.folder and resumed.commit.step == self._step:
                self._saved = (self._step, resumed.commit.resumable)  # it is there already
        self._plan.schedule.start(self._step)
        self._prepare_buffers()
        self._signals.install()
        atexit.register(self._at_exit)
        return self._writer.run

    def hang_report(self) -> str:
        """The writes under way and their ages. Called from another thread; waits for nothing."""
        ages = ", ".join(f"{slot} for {age:.0f} s" for slot, age in self._writer.pending.items())
        return f"writing {ages}" if ages else "no write is under way"

    def after_batch(self) -> None:
        """Once a step is complete: hear of writes, obey signals, save if it is due."""
        step = self._trainer.global_step
        if step == self._step:
            return
        self._step = step
        signals, schedule = self._signals, self._plan.schedule
        time_is_due = self._plan.topology.rank == 0 and schedule.time_is_due()
        flags = [signals.stop, signals.requeue, signals.interrupt, time_is_due, self._writer.has_failed]
        stop, wants_queue, interrupt, time_due, failed = self._writer.agree_on(flags)
        self._hear()
        self._report.pending(self._trainer, self._module, self._writer.pending)
        if failed:
            self._drain()
        if stop or interrupt:
            self._stop(interrupt, wants_queue)
        last = _is_last_step(self._trainer)
        if not (schedule.step_is_due(step) or time_due or last or self._deferred is not None):
            return
        if self._deferred is None and _validation_follows(self._trainer):
            # After it, random numbers are those that the next step begins with, and the monitored metric is new.
            self._deferred = last
            return
        self._save(must_resume=last or bool(self._deferred))

    def after_validation(self) -> None:
        """Save what waited for the validation, and note its score."""
        monitor = self._plan.monitor
        score = self._trainer.callback_metrics.get(monitor) if monitor else None
        # One rank alone may have logged it, and a save takes all of them.
        is_known = bool(monitor) and self._writer.agree_on([score is not None])[0]
        if self._deferred is not None or is_known:
            self._save(must_resume=bool(self._deferred))
        if score is None:
            self._miss_score()
        self._scored = True
        if score is not None and self._trainer.is_global_zero and self._saved_name:
            self._note_score(float(score))

    def _note_score(self, score: float) -> None:
        """On the first rank, which must not end alone over it: what is wrong with the store shows in the save."""
        try:
            write_score(self._writer.filesystem, self._plan.folder, self._saved_name, score)
        except OSError as error:
            rank_zero_warn(
                f"AsyncDCPCheckpoint: the score of {self._saved_name} could not be noted ({error.strerror}), so it is"
                " never the best.",
                category=UserWarning,
            )

    def _miss_score(self) -> None:
        """Say once that the monitored metric is not there."""
        monitor = self._plan.monitor
        if monitor and not self._scored:
            self._scored = True
            known = sorted(self._trainer.callback_metrics)
            rank_zero_warn(
                f"AsyncDCPCheckpoint: `monitor` {monitor!r} was not logged by a validation, so `best` is the newest"
                f" checkpoint. Logged are {known}.",
                category=UserWarning,
            )

    def after_epoch(self) -> None:
        """Save at the end of an epoch."""
        trainer = self._trainer
        last = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
        if last or self._plan.schedule.epoch_is_due(trainer.current_epoch):
            self._save(must_resume=last)

    def finish(self) -> None:
        """Save the end of the run, wait for all writes, and export if asked."""
        if self._trainer.global_step:
            self._save(must_resume=True)
        self._drain()
        if not self._trainer.enable_validation:
            self._miss_score()
        self._report.summarize()
        self._export()
        self._close()
        self._writer.close()

    def abandon(self, exception: BaseException) -> None:
        """After an error: wait for writes under way, within a bound, and keep the error on top."""
        self._writer.drain(self._plan.options.drain_timeout.total_seconds())
        self._hear()
        try:
            self._writer.raise_failure()
        except CheckpointError as error:
            exception.add_note(f"Besides, a checkpoint was not written: {error}")
        self._close()

    # -- saving --------------------------------------------------------------------------------------------------------

    def _save(self, must_resume: bool) -> None:
        """Save unless this step is saved already, as completely as is asked now."""
        step, schedule = self._trainer.global_step, self._plan.schedule
        with_optimizer = must_resume or schedule.optimizer_is_due()
        self._deferred = None
        if self._saved[0] == step and (self._saved[1] or not with_optimizer):
            return
        begin = time.monotonic()
        receipt = self._writer.save(self._request(step, with_optimizer))
        self._saved, self._saved_name = (step, receipt.resumable), receipt.name
        schedule.saved(receipt.resumable)
        self._report.began(self._trainer, time.monotonic() - begin, receipt.waited, receipt.blocked)

    def _request(self, step: int, with_optimizer: bool) -> SaveRequest:
        error, state = None, RunState({}, None, {})
        trainable_only, topology = self._plan.options.trainable_only, self._plan.topology
        try:
            state = capture(self._trainer, self._module, trainable_only, self._plan.options.trust_pickle)
        except CheckpointError as problem:
            error = str(problem)
        slots = {WEIGHTS: state.weights} if state.weights else {}
        if state.weights and state.optimizer is not None and with_optimizer:
            slots[OPTIMIZER] = state.optimizer
        resumable = state.optimizer is None or OPTIMIZER in slots or not state.weights
        place = (topology.dp_rank, topology.sp_rank)
        accumulate = self._trainer.accumulate_grad_batches
        return SaveRequest(step, slots, state.extra, resumable, trainable_only, place, accumulate, error)

    def _prepare_buffers(self) -> None:
        """Allocate and touch the buffers before the first step, as far as is known what they will hold."""
        slots = self._writer.slots
        try:
            slots[WEIGHTS].buffers.prepare(weights_of(self._module, self._plan.options.trainable_only))
            expected = expected_optimizer_tensors(self._module, optimizers_of(self._trainer))
            slots[OPTIMIZER].buffers.prepare(expected, tied=False)
        except CheckpointError:
            return  # the first save tells, on all ranks

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Tell people and loggers what was committed: not before it is."""
        outcomes = self._writer.outcomes()
        self._report.ended(self._trainer, outcomes)
        for outcome in outcomes:
            if outcome.checkpoint is not None:
                self._tell(outcome.checkpoint, outcome.step)

    def _tell(self, checkpoint: Folder, step: int) -> None:
        trainer = self._trainer
        rank_zero_info(f"Saved step {step}: {shown(checkpoint)}")
        callback = trainer.checkpoint_callback
        if not trainer.is_global_zero or callback is None:
            return
        if self._plan.options.wandb_reference:
            refer_in_wandb(trainer, checkpoint)
        for logger in trainer.loggers:
            if type(logger).__name__ != "WandbLogger":  # it would try to upload a directory as one file
                logger.after_save_checkpoint(callback)  # type: ignore[arg-type]

    def _drain(self) -> None:
        """Wait for all writes; a failure on any rank is raised on every rank."""
        self._writer.drain()
        (failed,) = self._writer.agree_on([self._writer.has_failed])
        self._hear()
        self._writer.raise_failure()
        if failed:
            fix = "See the message of that rank; earlier checkpoints are untouched."
            raise CheckpointError(str(self._plan.folder), "must be written on every rank", "an error on one", fix)

    def _export(self) -> None:
        output = self._plan.options.export_hf_at_end
        found = find_latest(self._plan.folder, resumable=False, deep_bytes=0) if output else None
        if output and found is not None and self._trainer.is_global_zero:
            export_checkpoint(found.path, output)
            rank_zero_info(f"Exported {found.path.name} to {output}")

    def _stop(self, interrupt: bool, wants_queue: bool) -> None:
        """Save, wait for the commit, and end the run: on all ranks at the same step."""
        self._save(must_resume=True)
        self._drain()
        rank_zero_info(f"Stopped after step {self._step}. The same command with `ckpt_path: last` goes on from there.")
        if wants_queue and self._signals.is_slurm and self._trainer.is_global_zero and requeue():
            rank_zero_info("The job is queued again.")
        self._log_last_step()
        if interrupt:
            raise KeyboardInterrupt
        raise SIGTERMException

    def _log_last_step(self) -> None:
        """Hand the metrics of the last step to the loggers: Lightning does it after this hook, and will not come to."""
        connector = self._trainer._logger_connector
        connector.on_batch_end()
        connector.update_train_step_metrics()

    def _close(self) -> None:
        self._signals.remove()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """The process ends without Lightning's hooks: nothing that failed may pass as success."""
        if not self._writer.drain(self._plan.options.drain_timeout.total_seconds()):
            try:
                self._writer.raise_failure()
            except CheckpointError as error:
                print(f"A checkpoint was not written: {error}", file=sys.stderr, flush=True)
            os._exit(1)


def _is_last_step(trainer: pl.Trainer) -> bool:
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def _validation_follows(trainer: pl.Trainer) -> bool:
    """Whether Lightning validates before the next batch. By its own judgement, which depends on a dozen settings."""
    fetcher, by_clock = trainer.fit_loop._data_fetcher, getattr(trainer, "_val_check_time_interval", None)
    if fetcher is None or by_clock is not None:  # by the clock ranks could differ
        return False
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
