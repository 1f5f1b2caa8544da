"""Which logger wrote into a directory, and what it says of the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.report.logs import csv_file, event_files, mlflow_store, wandb_file
from lightning_longctx.tools.report.series import Series
from lightning_longctx.units import counted

__all__ = ["Log", "is_run", "read_log"]

_DEPTH = 3  # how far below runs are looked for: mlruns/<experiment>/<run>


@dataclass(frozen=True)
class _Reader:
    """How to find and read what a logger leaves.

    Attributes:
        logger: its class.
        trace: what lies in the directory of a run.
        files_in: finds the files, of which the first must be there.
        read: reads them.
        home: folders up from the run to where the other files of a run go (``trainer.log_dir``).
        start: folders up from the run to where it was started, as far as names tell.
        is_newest: where runs share a home: whether the files in it may be this run's.
    """

    logger: str
    trace: str
    files_in: Callable[[Path], list[Path]]
    read: Callable[[Sequence[Path]], dict[str, Series]]
    home: int = 0
    start: int = 2
    is_newest: Callable[[Path], bool] | None = None


#: The first that has values is read: CSV has all digits and needs no package.
_READERS = (
    _Reader("CSVLogger", "metrics.csv", csv_file.files_in, csv_file.read),
    _Reader("TensorBoardLogger", "events.out.tfevents.*", event_files.files_in, event_files.read),
    _Reader("WandbLogger", "run-*.wandb", wandb_file.files_in, wandb_file.read, home=2, is_newest=wandb_file.is_newest),
    _Reader(
        "MLFlowLogger",
        "meta.yaml beside metrics/",
        mlflow_store.files_in,
        mlflow_store.read,
        home=2,
        start=3,
        is_newest=mlflow_store.is_newest,
    ),
)


@dataclass(frozen=True)
class Log:
    """What a logger wrote of a run.

    Attributes:
        series: by key.
        logger: the class of the logger.
        aside: loggers whose files are there too and were not read, with the reason if there is one.
        written: when the last of the files was.
        home: where the run's other files are: the run itself, or a folder that runs share.
        is_shared: whether other runs may have files there.
        is_newest: whether what only the last run leaves in a shared folder may be this run's.
        start: where the run was started, as far as names tell.
    """

    series: Mapping[str, Series]
    logger: str
    aside: tuple[str, ...]
    written: datetime
    home: Path
    is_shared: bool
    is_newest: bool
    start: Path


def is_run(path: Path) -> bool:
    """Whether a logger has left files of a run in a directory."""
    return any(reader.files_in(path) for reader in _READERS)


def read_log(path: Path) -> Log:
    """Read what a logger left in the directory of a run.

    Args:
        path: of the run.

    Raises:
        ConfigurationError: no logger's files, no values in them yet, or a package that is missing.
    """
    found = [(reader, files) for reader in _READERS if (files := reader.files_in(path))]
    if not found:
        raise _no_run(path)
    failures: list[ConfigurationError] = []
    for number, (reader, files) in enumerate(found):
        try:
            series = _values(reader, files)
        except ConfigurationError as error:
            failures.append(error)
            continue
        failed = [f"{one.logger} ({error})" for (one, _), error in zip(found, failures, strict=False)]
        return _log(path, reader, files, series, (*failed, *(one.logger for one, _ in found[number + 1 :])))
    raise failures[0]


def _values(reader: _Reader, files: Sequence[Path]) -> dict[str, Series]:
    series = reader.read(files)
    if not series:
        fix = "Try later: a logger writes now and then (CSVLogger each `flush_logs_every_n_steps`), and at the end."
        raise ConfigurationError(str(files[0]), "must have values", "none yet", fix)
    return series


def _log(path: Path, reader: _Reader, files: Sequence[Path], series: dict[str, Series], aside: tuple[str, ...]) -> Log:
    above = (path.resolve(), *path.resolve().parents)
    return Log(
        series,
        reader.logger,
        aside,
        datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC),
        above[min(reader.home, len(above) - 1)] if reader.home else path,
        reader.is_newest is not None,
        reader.is_newest is None or reader.is_newest(path),
        above[min(reader.start, len(above) - 1)],
    )


def _no_run(path: Path) -> ConfigurationError:
    traces = [f"{reader.trace} ({reader.logger})" for reader in _READERS]
    rule = f"must be the directory of a run, with {', '.join(traces[:-1])} or {traces[-1]}"
    if not path.is_dir():
        fix = "Give the directory that it lies in." if path.is_file() else "Is it spelt right?"
        return ConfigurationError(str(path), rule, "a file" if path.is_file() else "no such directory", fix)
    below = sorted(_below(path), key=lambda run: (_changed(run), str(run)))
    if below:
        got = f"{counted(len(below), 'run')} below it"
        return ConfigurationError(str(path), rule, got, f"Did you mean {below[-1]}?")
    names = sorted(os.listdir(path))
    got = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "an empty directory"
    fix = "Write `logger: [CSVLogger]` under `trainer`, or `Trainer(logger=CSVLogger('runs'))`: it writes such files."
    return ConfigurationError(str(path), rule, got, fix)


def _below(path: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(path):
        here = Path(folder)
        if here != path and is_run(here):
            yield here
            names.clear()
        elif len(here.relative_to(path).parts) == _DEPTH:
            names.clear()
        names[:] = [name for name in names if not name.startswith(".")]


def _changed(run: Path) -> float:
    return max(file.stat().st_mtime for reader in _READERS for file in reader.files_in(run))
