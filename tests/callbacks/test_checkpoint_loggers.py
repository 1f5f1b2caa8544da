"""Loggers over a resume: no row twice, none lost, each logger in its own folder."""

from __future__ import annotations

import csv
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


def _csv(folder: str, steps: range = range(0)) -> CSVLogger:
    logger = CSVLogger(folder, name="", version="a")
    for step in steps:
        logger.log_metrics({"loss": step + 0.25}, step)
    if steps:
        logger.save()
    return logger


def _goes_on(folder: str) -> str:
    """The file after a resume at step 2 that goes on to step 3."""
    logger = _csv(folder)
    continue_loggers(_run([logger]), logger_identities(_run([logger])), step=2)
    logger.log_metrics({"loss": 3.5}, 3)
    logger.save()
    files = logger._fs
    assert [Path(str(name)).name for name in files.ls(logger.log_dir, detail=False)] == ["metrics.csv"]
    return str(files.cat_file(f"{logger.log_dir}/metrics.csv").decode())


@pytest.mark.parametrize("folder", ["runs", "memory://of-a-resumed-csv"])
def test_a_csv_goes_on_wherever_it_is(folder: str) -> None:
    """At an address, Lightning's writer removed what was there."""
    _csv(folder, range(5))
    assert _goes_on(folder).split() == ["loss,step", "0.25,0", "1.25,1", "2.25,2", "3.5,3"]


def test_a_line_of_a_csv_that_was_cut_short_is_no_number() -> None:
    _csv("runs", range(3))
    file = Path("runs/a/metrics.csv")
    file.write_bytes(file.read_bytes()[:-5])  # of `2.25,2`
    assert _goes_on("runs").split() == ["loss,step", "0.25,0", "1.25,1", "3.5,3"]


@pytest.mark.parametrize("change", range(4))
def test_a_csv_outlives_a_kill_while_it_is_read(change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each change of a file, this process is gone; the next one has what was there."""

    class Killed(BaseException):
        pass

    _csv("runs", range(3))
    dying = _csv("runs")
    changes = iter(range(100))

    def dies(function: Any) -> Any:
        def instead(*args: Any, **options: Any) -> Any:
            if next(changes) == change:
                raise Killed
            return function(*args, **options)

        return instead

    with monkeypatch.context() as patch:
        for name in ("mv", "rm_file"):
            patch.setattr(dying._fs, name, dies(getattr(dying._fs, name)))
        patch.setattr(csv.DictWriter, "writerows", dies(csv.DictWriter.writerows))
        with pytest.raises(Killed):
            continue_loggers(_run([dying]), logger_identities(_run([dying])), step=2)
    assert _goes_on("runs").split() == ["loss,step", "0.25,0", "1.25,1", "2.25,2", "3.5,3"]


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


def test_a_renamed_logger_leaves_the_files_of_other_runs_alone() -> None:
    """It took the old version under the new name, and dropped the rows of the run that has it."""
    other = CSVLogger("runs", name="other")
    for step in range(6):
        other.log_metrics({"loss": 1.0}, step)
    other.save()
    before = Path(other.log_dir, "metrics.csv").read_text()
    renamed = CSVLogger("runs", name="other")
    continue_loggers(_run([renamed]), logger_identities(_run([CSVLogger("runs", name="mine", version=0)])), step=2)
    assert Path(other.log_dir, "metrics.csv").read_text() == before
    assert renamed.version == 1


def test_a_logger_that_is_new_at_a_resume_changes_nothing_for_the_others() -> None:
    old = [CSVLogger("here", version=3), CSVLogger("there", version=5)]
    resumed = [TensorBoardLogger("events", version=1), CSVLogger("here"), CSVLogger("there"), CSVLogger("new")]
    continue_loggers(_run(resumed), logger_identities(_run(old)), step=4)
    assert [logger.version for logger in resumed] == [1, 3, 5, 0]
