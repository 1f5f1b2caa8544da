"""A run in MLflow's store of files: ``metrics/<name>`` with a line for each value, beside ``meta.yaml``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.report.logs.columns import Columns
from lightning_longctx.tools.report.series import Series

__all__ = ["files_in", "is_newest", "read"]

_START = re.compile(r"^start_time: (\d+)", re.MULTILINE)


def files_in(path: Path) -> list[Path]:
    """The files of a run's directory, one a key; ``meta.yaml`` alone before the first value."""
    meta, metrics = path / "meta.yaml", path / "metrics"
    if not (meta.is_file() and metrics.is_dir()):
        return []
    return [meta, *sorted(file for file in metrics.rglob("*") if file.is_file() and not file.name.startswith("."))]


def is_newest(path: Path) -> bool:
    """Whether none of the runs in the store was started later."""
    return _started(path / "meta.yaml") >= max(map(_started, path.resolve().parent.parent.glob("*/*/meta.yaml")))


def read(files: Sequence[Path]) -> dict[str, Series]:
    """Read all keys.

    A last line that is still being written is left out.

    Args:
        files: ``meta.yaml``, and those of the keys.

    Returns:
        By key; empty without a value yet.

    Raises:
        ConfigurationError: a file of another form.
    """
    found = Columns()
    meta, *metrics = files
    for file in metrics:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        try:
            fields = [line.split() for line in lines if line.strip()]  # milliseconds, value, step; then a data set's
            steps = [int(parts[2]) if len(parts) > 2 else 0 for parts in fields]
            found.add(file.relative_to(meta.parent / "metrics").as_posix(), steps, [parts[1] for parts in fields])
        except (IndexError, ValueError, OverflowError) as error:
            rule, fix = "must have lines of time, value and step", "It is what MLflow writes: move the file away."
            raise ConfigurationError(str(file), rule, str(error), fix) from error
    return found.series()


def _started(meta: Path) -> int:
    match = _START.search(meta.read_text(encoding="utf-8", errors="replace"))
    return int(match[1]) if match else 0
