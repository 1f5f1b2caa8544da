"""Rows of a CSV over a resume: none twice, none lost."""

from __future__ import annotations

from lightning_longctx.callbacks.checkpoint_loggers import _rows_until


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
