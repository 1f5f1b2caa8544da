"""Loggers over a resume: the same run of W&B, the same folder of CSV and TensorBoard, one curve."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lightning_longctx.callbacks.checkpoint_report import STALL
from lightning_longctx.checkpoint.address import Folder

__all__ = ["continue_loggers", "logger_identities", "refer_in_wandb"]


def logger_identities(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Class, name and version (W&B: id of the run) of each logger."""
    return [
        {"class": type(logger).__name__, "name": str(logger.name), "version": _plain(logger.version)}
        for logger in trainer.loggers
    ]


def continue_loggers(trainer: pl.Trainer, saved: Sequence[Mapping[str, Any]], step: int) -> None:
    """Make the loggers go on where those of a checkpoint were, each where the next of its class was.

    Files under another name are those of other runs: a logger that was renamed begins anew.

    Args:
        trainer: whose loggers; best before they have opened anything.
        saved: what :func:`logger_identities` gave.
        step: steps done, as loggers number them; what CSV and TensorBoard have of later ones is dropped.
    """
    left = list(saved)
    for logger in trainer.loggers:
        identity = next((each for each in left if _is_of(each, logger)), None)
        if identity is None:
            continue
        left.remove(identity)
        version = identity["version"]
        if version is None:
            continue
        if isinstance(logger, CSVLogger):
            _continue_csv(logger, version, step)
        elif isinstance(logger, TensorBoardLogger):
            _continue_tensorboard(logger, version, step)
        elif type(logger).__name__ == "WandbLogger":
            _continue_wandb(logger, str(version))


def refer_in_wandb(trainer: pl.Trainer, checkpoint: Folder) -> None:
    """Note a checkpoint in W&B as an artifact that refers to its path or address; nothing is uploaded."""
    local = isinstance(checkpoint, Path)
    place = f"file://{checkpoint.resolve()}" if local else str(checkpoint)
    runs: list[Any] = [logger for logger in trainer.loggers if type(logger).__name__ == "WandbLogger"]
    for logger in runs:
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{logger.version}", type="model")
        try:
            artifact.add_reference(place, name=None if local else checkpoint.name, checksum=False)
        except wandb.Error as error:  # for some stores it wants a package more
            rank_zero_warn(f"W&B has no reference to {place}: {error}", category=UserWarning)
            continue
        logger.experiment.log_artifact(artifact, aliases=[checkpoint.name])


def _is_of(identity: Mapping[str, Any], logger: Logger) -> bool:
    if identity["class"] != type(logger).__name__:
        return False
    return not isinstance(logger, (CSVLogger, TensorBoardLogger)) or identity["name"] == str(logger.name)


def _plain(version: object) -> int | str | None:
    return version if isinstance(version, int) or version is None else str(version)


@rank_zero_only
def _continue_csv(logger: CSVLogger, version: int | str, step: int) -> None:
    logger._experiment, logger._version = None, version
    files, path = logger._fs, f"{logger.log_dir}/{ExperimentWriter.NAME_METRICS_FILE}"
    aside, new = f"{path}.before", f"{path}.new"
    if files.isfile(path):
        # Lightning's writer would remove it.
        files.mv(path, aside)
    with warnings.catch_warnings():  # not true here: what was logged before the checkpoint is written again below
        warnings.filterwarnings("ignore", message=r"Experiment logs directory .* exists and is not empty")
        experiment = logger.experiment
    if not files.isfile(aside):
        return
    with files.open(aside, "r", newline="") as file:
        reader = csv.DictReader(_whole_lines(file))
        rows = _rows_until(list(reader), step)
    if rows:
        # The writer appends to the file that it finds, with the columns that it knows.
        experiment.metrics_keys = list(reader.fieldnames or [])
        with files.open(new, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=experiment.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)
        files.mv(new, path)
    files.rm_file(aside)


def _whole_lines(file: Iterable[str]) -> Iterator[str]:
    """Lines but a last one that was cut short: a killed process may have left half of a number."""
    return (line for line in file if line.endswith("\n"))


@rank_zero_only
def _continue_tensorboard(logger: TensorBoardLogger, version: int | str, step: int) -> None:
    if logger._experiment is not None:
        logger._experiment.close()
    logger._experiment, logger._version = None, version
    # Its files are never written again: readers leave out what is before this mark and of that step or a later one.
    # The numbers of the save itself are logged at `step`, and are not logged again.
    logger._kwargs["purge_step"] = step + 1


def _rows_until(rows: Sequence[dict[str, str]], step: int) -> list[dict[str, str]]:
    """Rows that were logged before a save.

    A row of that very number is one of the validation before the save, or of the step after it, which comes again: the
    row in which the save itself was logged is between them.
    """
    saves = [at for at, row in enumerate(rows) if _step_of(row) == step and _is_save(row)]
    until = saves[-1] if saves else len(rows)
    return [row for at, row in enumerate(rows) if _step_of(row) < step or (_step_of(row) == step and at <= until)]


def _is_save(row: Mapping[str, str]) -> bool:
    return any(key.startswith(STALL) and value for key, value in row.items())


def _step_of(row: Mapping[str, str]) -> int:
    text = row.get("step", "")
    return int(float(text)) if text else 0


def _continue_wandb(logger: Logger, run_id: str) -> None:
    settings: dict[str, Any] = getattr(logger, "_wandb_init", {})
    if getattr(logger, "_experiment", None) is not None and logger.version != run_id:
        rank_zero_warn(
            f"W&B started a new run before the checkpoint of run {run_id} was read. With `ckpt_path: last` it goes on"
            " in that one.",
            category=UserWarning,
        )
        return
    settings.update(id=run_id, resume="allow")
    logger._id = run_id  # type: ignore[attr-defined]
