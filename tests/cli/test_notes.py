"""What the command line adds to the end of a fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_longctx.cli.notes import ClosingNotes
from lightning_longctx.tools.doctor.compare import Finding
from lightning_longctx.tools.doctor.report import DoctorReport, parity_line
from tests.cli.test_app import TOYS, build


class _Module:
    """Stands for a Hugging Face model."""

    class config:  # noqa: N801
        model_type = "tiny"


def finding(check: str, error: float | None, **changes: Any) -> Finding:
    settings: dict[str, Any] = {"world_size": 2, "sp_size": 2, "accumulate": 1, "layouts": 4, "where": "w"}
    return Finding(check=check, error=error, **{**settings, "verdict": "ok", "note": "", **changes})


def write(path: Path, findings: list[Finding], model: str = "tiny") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    report = DoctorReport({"model": model, "size": "small"}, findings, 1.0)
    path.write_text(json.dumps(report.to_plain()))


def test_the_parity_of_a_report() -> None:
    path = Path("doctor.json")
    assert parity_line(path, "tiny") is None
    write(path, [finding("loss", 0.5), finding("gradients", 1e-7), finding("gradients", 3.2e-6)])
    line = "Doctor: tiny (small) in 8 layouts: no fault, largest gradient error 3.2e-06 (doctor.json)."
    assert parity_line(path, "tiny") == line
    write(path, [finding("gradients", 0.1, verdict="fault"), finding("resume", 0.1, verdict="fault")])
    assert "2 faults, largest gradient error 1.0e-01" in (parity_line(path, "tiny") or "")


def test_a_report_of_something_else_says_nothing() -> None:
    path = Path("doctor.json")
    write(path, [finding("gradients", 1e-7)], model="other")
    assert parity_line(path, "tiny") is None
    for content in ("{", "{}", "[]", '{"version": 0, "facts": {"model": "tiny", "size": "small"}, "findings": []}'):
        path.write_text(content)
        assert parity_line(path, "tiny") is None


class _Trainer:
    """At the start of training."""

    loggers = ("one",)
    log_dir = "runs/version_0"
    world_size = 2


def test_files_and_the_way_to_the_doctor() -> None:
    found = ClosingNotes()
    assert found.closing_lines() == []
    folder = Path(_Trainer.log_dir)
    folder.mkdir(parents=True)
    for name in ("metrics.csv", "config.yaml"):
        (folder / name).touch()
    found.on_train_start(_Trainer(), _Module())  # type: ignore[arg-type]
    doctor, files = found.closing_lines()
    assert "`longctx doctor --config runs/version_0/config.yaml`" in doctor
    page = "`longctx report runs/version_0` makes a page of them"
    assert files == f"Files: config.yaml, metrics.csv in runs/version_0; {page}"
    (folder / "metrics.csv").rename(
        folder / "events.out.tfevents.1700000000.host.7.0"
    )  # what TensorBoard's logger leaves
    assert (
        found.closing_lines()[1]
        == f"Files: config.yaml, events.out.tfevents.1700000000.host.7.0 in runs/version_0; {page}"
    )
    (folder / "events.out.tfevents.1700000000.host.7.0").unlink()
    files = "Files: config.yaml in runs/version_0"
    assert found.closing_lines()[1] == files
    write(Path("runs/doctor/doctor.json"), [finding("gradients", 1e-7)])
    assert found.closing_lines() == [parity_line(Path("runs/doctor/doctor.json"), "tiny"), files]


def test_a_run_of_one_process_is_not_sent_to_the_doctor() -> None:
    found, trainer = ClosingNotes(), _Trainer()
    trainer.world_size = 1
    Path(_Trainer.log_dir).mkdir(parents=True)
    (Path(_Trainer.log_dir) / "config.yaml").touch()
    found.on_train_start(trainer, _Module())  # type: ignore[arg-type]
    assert found.closing_lines() == ["Files: config.yaml in runs/version_0"]


def test_every_run_of_the_command_line_has_them_and_no_configuration_shows_it() -> None:
    cli = build(TOYS)
    assert sum(isinstance(callback, ClosingNotes) for callback in cli.trainer.callbacks) == 1
