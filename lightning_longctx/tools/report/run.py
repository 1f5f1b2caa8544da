"""A run as its directory tells it: curves, expert load, configuration, versions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from lightning_longctx.tools.report.logs.find import Log, read_log
from lightning_longctx.tools.report.routers import TABLE, ExpertLoad, load_of_run, read_expert_load
from lightning_longctx.tools.report.series import Series

__all__ = ["Run", "read_runs"]

_VERSION_LINE = re.compile(r"# ([\w.\-]+)==(\S+)")
_NOTHING = Series.empty()


@dataclass(frozen=True)
class Run:
    """What the files of a run say.

    Attributes:
        name: short, and told apart from the other runs of the page.
        path: its directory.
        series: by key.
        written: when its logger wrote last.
        configuration: all sections as plain containers; empty without a readable ``config.yaml``.
        configuration_text: the file; empty without one.
        versions: by package, from the head of ``config.yaml``.
        experts: the windows of ``MoERouterHeatmap``; None without.
        logger: the class of the logger whose files were read.
        aside: loggers whose files are there too.
        start: where the run was started, as far as names tell.
    """

    name: str
    path: Path
    series: Mapping[str, Series]
    written: datetime
    configuration: Mapping[str, Any] = field(default_factory=dict)
    configuration_text: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertLoad | None = None
    logger: str = ""
    aside: tuple[str, ...] = ()
    start: Path = Path()

    def get(self, key: str) -> Series:
        """The curve of a key; one without points where the run has none."""
        return self.series.get(key, _NOTHING)

    def under(self, prefix: str) -> dict[str, Series]:
        """The curves whose keys start so, by the rest of the key."""
        return {key.removeprefix(prefix): series for key, series in self.series.items() if key.startswith(prefix)}

    def setting(self, *path: str) -> Any:
        """A setting by its place, read through ``init_args``; None where there is none."""
        found: Any = self.configuration
        for name in path:
            if isinstance(found, Mapping) and name not in found:
                found = found.get("init_args")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def callback(self, name: str) -> Mapping[str, Any] | None:
        """The settings of a configured callback by the name of its class; None if it is not listed."""
        callbacks = self.setting("trainer", "callbacks")
        for entry in callbacks if isinstance(callbacks, list) else [callbacks]:
            given = entry if isinstance(entry, Mapping) else {"class_path": entry}
            if str(given.get("class_path")).rpartition(".")[2] == name:
                return given.get("init_args") or {}
        return None


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs.

    Args:
        paths: their directories.

    Raises:
        ConfigurationError: a directory without the files of a logger, or one that cannot be read.
    """
    return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _read(path: Path, name: str) -> Run:
    log = read_log(path)
    text = _configuration(log)
    return Run(
        name,
        path,
        log.series,
        log.written,
        _plain(text),
        text,
        dict(found.groups() for line in text.splitlines()[:40] if (found := _VERSION_LINE.match(line))),  # type: ignore[misc]
        _experts(log),
        log.logger,
        log.aside,
        log.start,
    )


def _configuration(log: Log) -> str:
    """``config.yaml`` of the run; in a folder that runs share it is that of the newest, or a file of somebody else."""
    text = _text(log.home / "config.yaml")
    if log.is_shared:
        return text if log.is_newest and _VERSION_LINE.match(text) else ""
    return text or _text(log.home / "hparams.yaml")


def _experts(log: Log) -> ExpertLoad | None:
    if not log.is_shared:
        return read_expert_load(log.home / "moe_router" / TABLE)
    tables = sorted(log.home.glob(f"moe_router*/{TABLE}"))
    return load_of_run(tables, log.series.get("moe/tokens_max", _NOTHING))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _plain(text: str) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(text)
        json.dumps(found, default=str, skipkeys=True)  # refuses what holds itself
    except (yaml.YAMLError, ValueError, RecursionError):  # somebody's own classes, a date that is none: text is shown
        return {}
    return found if isinstance(found, Mapping) else {}


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [str(path) for path in paths]
