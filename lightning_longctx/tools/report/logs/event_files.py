"""Event files of TensorBoard, all of one directory: each start of a run writes one of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.report.logs.columns import Columns
from lightning_longctx.tools.report.series import Series

__all__ = ["files_in", "read"]

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*?(?:\.(\d+))?")  # seconds, host, process, number in the process


def files_in(path: Path) -> list[Path]:
    """The event files of a run's directory, the oldest first."""
    named = [(match, file) for file in path.glob("events.out.tfevents.*") if (match := _NAME.fullmatch(file.name))]
    return [file for match, file in sorted(named, key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)))]


def read(files: Sequence[Path]) -> dict[str, Series]:
    """Read all scalars.

    An event that is still being written is left out, with all behind it in its file. So is what a run had logged beyond
    the checkpoint that it went back to, where its logger left a mark.

    Args:
        files: the oldest first.

    Returns:
        By key; empty without a value yet.

    Raises:
        ConfigurationError: no package ``tensorboard``.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    except ImportError as error:
        got, fix = f"no such package ({error})", "Run `pip install tensorboard`, or use CSVLogger, which needs nothing."
        raise ConfigurationError(str(files[0]), "needs the package tensorboard", got, fix) from error
    found = Columns()
    for file in files:
        for data in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(data)
            if event.session_log.status == SessionLog.START:  # `purge_step`: as TensorBoard itself reads it
                found.drop_from(event.step)
            for key, value in _scalars(event):
                found.add(key, [event.step], [value])
    return found.series()


def _scalars(event: Any) -> Iterator[tuple[str, float]]:
    for value in event.summary.value:
        if value.HasField("simple_value"):
            yield value.tag, value.simple_value
        elif value.metadata.plugin_data.plugin_name == "scalars":  # as TensorFlow 2 writes them
            yield value.tag, _number(value.tensor)


def _number(tensor: Any) -> float:
    from tensorboard.util.tensor_util import make_ndarray

    return float(make_ndarray(tensor).item())
