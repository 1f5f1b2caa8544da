"""A run as its directory tells it: curves, expert load, configuration, versions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.report.metrics import read_metrics
from lightning_longctx.tools.report.routers import ExpertLoad, read_expert_load
from lightning_longctx.tools.report.series import Series
from lightning_longctx.units import counted

__all__ = ["Run", "read_runs"]

_METRICS = "metrics.csv"
_VERSION_LINE = re.compile(r"# ([\w.\-]+)==(\S+)")
_NOTHING = Series.empty()


@dataclass(frozen=True)
class Run:
    """What the files of a run say.

    Attributes:
        name: short, and told apart from the other runs of the page.
        path: its directory.
        series: by key.
        written: when ``metrics.csv`` was written last.
        configuration: all sections as plain containers; empty without a readable ``config.yaml``.
        configuration_text: the file; empty without one.
        versions: by package, from the head of ``config.yaml``.
        experts: the windows of ``MoERouterHeatmap``; None without.
    """

    name: str
    path: Path
    series: Mapping[str, Series]
    written: datetime
    configuration: Mapping[str, Any] = field(default_factory=dict)
    configuration_text: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertLoad | None = None

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
        ConfigurationError: a directory without ``metrics.csv``, or one that cannot be read.
    """
    return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _read(path: Path, name: str) -> Run:
    metrics = path / _METRICS
    if not metrics.is_file():
        raise _no_metrics(path)
    written = datetime.fromtimestamp(metrics.stat().st_mtime, UTC)
    text = _text(path / "config.yaml") or _text(path / "hparams.yaml")
    head = [line for line in text.splitlines()[:40] if line.startswith("#")]
    return Run(
        name,
        path,
        read_metrics(metrics),
        written,
        _plain(text),
        text,
        dict(found.groups() for line in head if (found := _VERSION_LINE.match(line))),  # type: ignore[misc]
        read_expert_load(path / "moe_router" / "tokens_per_expert.csv"),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _plain(text: str) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:  # tags of somebody's own classes in hparams.yaml: the text is shown all the same
        return {}
    return found if isinstance(found, Mapping) else {}


def _no_metrics(path: Path) -> ConfigurationError:
    rule = f"must be the directory of a run, with {_METRICS}"
    if not path.is_dir():
        fix = f"Give the directory that holds {_METRICS}." if path.is_file() else "Is it spelt right?"
        return ConfigurationError(str(path), rule, "a file" if path.is_file() else "no such directory", fix)
    below = sorted(_below(path), key=lambda file: file.stat().st_mtime)
    if below:
        return ConfigurationError(
            str(path), rule, f"{counted(len(below), 'run')} below it", f"Did you mean {below[-1].parent}?"
        )
    names = sorted(os.listdir(path))
    got = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "an empty directory"
    fix = "CSVLogger writes it, at `flush_logs_every_n_steps` and at the end; add it to `trainer.logger`."
    return ConfigurationError(str(path), rule, got, fix)


def _below(path: Path) -> Iterator[Path]:
    for pattern in (f"*/{_METRICS}", f"*/*/{_METRICS}"):
        yield from path.glob(pattern)


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [str(path) for path in paths]
