"""Loggers over a resume: no row twice, none lost, each logger in its own folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_longctx.callbacks.checkpoint_loggers import _rows_until, continue_loggers, logger_identities


def test_rows_of_the_saved_step_are_those_before_the_save() -> None:
    """The first row of the step after the save has the number of the save, and was kept: it came twice."""
    rows = [
        {"step": "1", "loss": "3.0"},
        {"step": "2", "val/loss": "2.5"},  # the validation before the save
        {"step": "2", "checkpoint/stall_s/weights": "0.1"},
        {"step": "1", "lr": "0.1"},  # of the step before, written late
        {"step": "2", "loss": "2.0"},  # the next step
        {"step": "2", "checkpoint/write_s/weights": "0.2"},
        {"step": "3", "loss": "1.0"},
    ]
    assert _rows_until(rows, 2) == rows[:4]


def test_without_a_row_of_the_save_all_of_its_step_stay() -> None:
    rows = [{"step": "1", "loss": "3.0"}, {"step": "2", "val/loss": "2.5"}, {"step": "3", "loss": "1.0"}]
    assert _rows_until(rows, 2) == rows[:2]


def _run(loggers: list[Any]) -> Any:
    return SimpleNamespace(loggers=loggers)


@pytest.mark.parametrize("opened", [False, True])
def test_what_tensorboard_has_of_steps_that_come_again_is_left_out(opened: bool) -> None:
    """A run that was killed after its last save: the curve went back, and had the steps in between twice."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed = TensorBoardLogger(".", name="events")
    for step in range(8):
        killed.log_metrics({"loss": 1.0}, step)
    killed.save()
    killed.experiment.close()
    resumed = TensorBoardLogger(".", name="events")
    if opened:
        assert resumed.experiment is not None
    continue_loggers(_run([resumed]), logger_identities(_run([killed])), step=4)
    for step in range(5, 10):
        resumed.log_metrics({"loss": 1.0}, step)
    resumed.save()
    resumed.experiment.close()
    assert Path(resumed.log_dir) == Path(killed.log_dir)
    events = accumulator.EventAccumulator(killed.log_dir, {"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(10))


def test_a_logger_that_is_new_at_a_resume_changes_nothing_for_the_others() -> None:
    old = [CSVLogger("here", version=3), CSVLogger("there", version=5)]
    resumed = [TensorBoardLogger("events", version=1), CSVLogger("here"), CSVLogger("there"), CSVLogger("new")]
    continue_loggers(_run(resumed), logger_identities(_run(old)), step=4)
    assert [logger.version for logger in resumed] == [1, 3, 5, 0]
