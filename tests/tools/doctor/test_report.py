"""The table: one line a layout, the worst verdict, the parameter by name."""

from __future__ import annotations

from typing import Any

from lightning_longctx.tools.doctor.compare import Finding
from lightning_longctx.tools.doctor.report import DoctorReport

FACTS = {
    "model": "llama",
    "size": "small",
    "parameters": 12345,
    "reference": "the reference",
    "seed": 0,
    "tolerance": 1e-5,
}


def report_of(*findings: Finding) -> DoctorReport:
    return DoctorReport(FACTS, findings, 12.3)


def finding(
    check: str, error: float | None, verdict: Any = "ok", sp: int = 2, where: str = "w", note: str = ""
) -> Finding:
    return Finding(check, 4, sp, 3, 5 if check == "gradients" else 1, error, where, verdict, note)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_for_each_layout() -> None:
    report = report_of(
        finding("loss", 1e-8),
        finding("gradients", 2e-6),
        finding("gradients", 3e-6, sp=4),
        finding("resume", 0.0, sp=4),
    )
    lines = report.to_text().splitlines()
    assert "llama (small, 12,345 parameters)" in lines[0]
    assert "10 random layouts" in lines[2]
    head, _, first, second = (cells(line) for line in lines if line.startswith("|"))
    assert dict(zip(head, first, strict=True)) == {
        "processes": "4",
        "dp": "2",
        "sp": "2",
        "accumulate": "3",
        "layouts": "5",
        "loss": "1.0e-08",
        "gradients": "2.0e-06",
        "evaluation": "-",
        "isolation": "-",
        "causality": "-",
        "resume": "-",
        "verdict": "ok",
    }
    assert second[2] == "4"
    assert lines[-1].startswith("No fault")
    assert report.faults == []


def test_a_fault_names_what_deviates_and_where() -> None:
    report = report_of(finding("gradients", 0.25, "fault", where="layers.1.q"), finding("loss", 1e-8))
    text = report.to_text()
    assert cells([line for line in text.splitlines() if line.startswith("|")][-1])[-1] == "fault"
    assert "- fault: gradients 2.5e-01 at `layers.1.q` (4 processes, sequence_parallel_size 2, accumulate 3)" in text
    assert text.splitlines()[-1] == "1 fault."
    assert report.to_plain()["findings"][0]["where"] == "layers.1.q"


def test_ties_and_what_was_skipped_are_told_and_are_no_faults() -> None:
    report = report_of(
        finding("gradients", 0.25, "tie"), finding("isolation", None, "skipped", note="returns no losses")
    )
    text = report.to_text()
    assert "- skipped: isolation (4 processes, sequence_parallel_size 2, accumulate 3): returns no losses" in text
    assert "1 near-tie of routing counted as such" in text
    assert report.faults == []
