"""``longctx report``: read, draw, write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.configuration import ReadConfiguration
from lightning_longctx.tools.output import human_bytes
from lightning_longctx.tools.report.facts import facts_of, findings_of, plain_number
from lightning_longctx.tools.report.missing import missing_parts
from lightning_longctx.tools.report.options import read_options
from lightning_longctx.tools.report.page import page_of
from lightning_longctx.tools.report.run import Run, read_runs
from lightning_longctx.tools.report.series import thinned
from lightning_longctx.tools.versions import installed_versions

__all__ = ["main"]

_JSON_BUCKETS = 500  # of each curve


def main(words: Sequence[str], read: ReadConfiguration) -> int:
    """Run the command.

    Args:
        words: what follows ``longctx report``.
        read: not needed: a run has its own configuration.

    Returns:
        0, or 1 if the loss of a run is no number somewhere.

    Raises:
        ConfigurationError: no run there, or a file that cannot be read or written.
    """
    options = read_options(words)
    runs = read_runs(options.runs)
    text = _sayable(page_of(runs, installed_versions().get("lightning-longctx", "(a source tree)")))
    _write(options.out, "--out", text)
    names = ", ".join(run.name for run in runs)
    print(_sayable(f"Report of {names}: {options.out} ({human_bytes(len(text.encode()))})."))
    for run in runs:
        if run.aside:
            print(_sayable(f"{run.name}: read from the files of {run.logger}; also there: {', '.join(run.aside)}."))
    findings = [f"{run.name}: {found}" for run in runs for found in findings_of(run)]
    for line in findings:
        print(_sayable(line))
    if options.json is not None:
        content = {"runs": [_plain(run) for run in runs], "findings": findings}
        _write(options.json, "--json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    return 1 if findings else 0


def _sayable(text: str) -> str:
    """The text with ``?`` for bytes of a path that are no text in any encoding of ours."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _write(path: Path, flag: str, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            flag, "must be a file that can be written", f"{path} ({error})", "Name another."
        ) from error


def _plain(run: Run) -> dict[str, Any]:
    curves = {key: thinned(series, _JSON_BUCKETS) for key, series in run.series.items()}
    return {
        "name": run.name,
        "path": str(run.path),
        "logger": run.logger,
        "facts": {fact.key: plain_number(fact.value) for fact in facts_of(run)},
        "versions": dict(run.versions),
        "missing": missing_parts([run]),
        "curves": {
            key: {"step": curve.steps.tolist(), "value": curve.middle.tolist()}
            | ({} if curve.whole else {"least": curve.low.tolist(), "most": curve.high.tolist()})
            for key, curve in curves.items()
        },
    }
