"""``longctx check``: one check after another, and a table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

from lightning_longctx.errors import FieldError
from lightning_longctx.tools.check.length import check_learning_rate, check_length
from lightning_longctx.tools.check.machine import (
    check_devices,
    check_disk,
    check_memory,
    check_port,
    check_versions,
)
from lightning_longctx.tools.check.options import read_options
from lightning_longctx.tools.check.report import Check, CheckReport, Skipped
from lightning_longctx.tools.check.run import (
    check_first_row,
    check_model,
    check_places,
    check_run_sizes,
    check_sources,
    check_start,
)
from lightning_longctx.tools.check.subject import Subject
from lightning_longctx.tools.configuration import ReadConfiguration
from lightning_longctx.tools.output import make_folders, write_json
from lightning_longctx.units import counted

__all__ = ["CHECKS", "main", "run_checks"]

#: In this order: what is cheap and explains more comes first.
CHECKS: Mapping[str, Callable[[Subject], Check]] = {
    "versions": check_versions,
    "model": check_model,
    "sizes": check_run_sizes,
    "sources": check_sources,
    "first row": check_first_row,
    "length": check_length,
    "learning rate": check_learning_rate,
    "start": check_start,
    "folders": check_places,
    "devices": check_devices,
    "memory": check_memory,
    "disk": check_disk,
    "port": check_port,
}


def main(words: Sequence[str], read: ReadConfiguration) -> int:
    """Run the command.

    Args:
        words: what follows ``longctx check``.
        read: reads the words that belong to the configuration.

    Returns:
        0, or 1 if something stands in the way of the run.

    Raises:
        ConfigurationError: an option or a configuration that cannot be read.
    """
    options, rest = read_options(words)
    make_folders({"--json": options.json and options.json.parent})
    report = run_checks(Subject(read(rest), options))
    print(report.to_text())
    write_json(options.json, report.to_plain())
    return 1 if report.findings else 0


def run_checks(subject: Subject) -> CheckReport:
    """Make all checks; one that finds something does not keep the others from being made."""
    trainer = subject.trainer
    model, data = (_class_of(subject.settings.get(section)) for section in ("model", "data"))
    devices = subject.devices
    text = f"{model}, {data}, {_class_of(trainer.get('strategy'))} on"
    text += f" {counted(devices, 'device') if devices else 'all devices'} x {counted(subject.nodes, 'node')}"
    return CheckReport([Check("configuration", "fine", text), *(_made(name, subject) for name in CHECKS)])


def _made(name: str, subject: Subject) -> Check:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of parts that are not going to run
            return CHECKS[name](subject)
    except Skipped as reason:
        return Check(name, "skipped", str(reason))
    except FieldError as error:
        return Check(name, "finding", " ".join(str(error).split()))


def _class_of(value: object) -> str:
    path = value.get("class_path") if isinstance(value, Mapping) else value
    return str(path or "none").rpartition(".")[2]
