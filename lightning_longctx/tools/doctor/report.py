"""What the doctor found, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_longctx.tools.doctor.compare import Finding

__all__ = ["DoctorReport"]

#: Raised when a key of the JSON form changes its name or meaning.
JSON_VERSION = 1

_HEAD = ("check", "processes", "dp", "sp", "accumulate", "layouts", "largest error", "at", "verdict")


@dataclass(frozen=True)
class DoctorReport:
    """Everything that was found.

    Attributes:
        facts: what was examined: model, size, reference, tolerance, seed.
        findings: in the order in which they were made.
        seconds: the whole examination.
    """

    facts: dict[str, Any]
    findings: Sequence[Finding]
    seconds: float

    @property
    def faults(self) -> list[Finding]:
        """What is wrong."""
        return [finding for finding in self.findings if finding.verdict == "fault"]

    def to_plain(self) -> dict[str, Any]:
        """All numbers, for ``--json``."""
        findings = [asdict(finding) for finding in self.findings]
        return {"version": JSON_VERSION, "facts": self.facts, "findings": findings, "seconds": round(self.seconds, 1)}

    def to_text(self) -> str:
        """The report as Markdown that is readable in a terminal."""
        facts = self.facts
        layouts = sum(finding.layouts for finding in self.findings if finding.check == "gradients")
        lines = [
            f"# longctx doctor: {facts['model']} ({facts['size']}, {facts['parameters']:,} parameters)",
            "",
            f"Reference: {facts['reference']}. {layouts} random layouts, seed {facts['seed']}, "
            f"tolerance {facts['tolerance']:g}, float32, {self.seconds:.0f} s.",
            "",
            *_table([_HEAD, *(_row(finding) for finding in self.findings)]),
        ]
        notes = dict.fromkeys(f"{finding.check}: {finding.note}." for finding in self.findings if finding.note)
        lines += ["", *notes] if notes else []
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        ties = sum(finding.verdict == "tie" for finding in self.findings)
        tied = f" {ties} near-tie(s) of routing were counted as such." if ties else ""
        if not self.faults:
            return f"No fault: every layout gives what the reference gives.{tied}"
        worst = max(self.faults, key=lambda finding: finding.error or 0.0)
        error = "" if worst.error is None else f" ({worst.error:.1e})"
        place = f"{worst.world_size} processes, sequence_parallel_size {worst.sp_size}"
        return f"{len(self.faults)} fault(s). The worst: {worst.check} at {place}: {worst.where}{error}.{tied}"


def _row(finding: Finding) -> tuple[str, ...]:
    error = "-" if finding.error is None else f"{finding.error:.1e}"
    sizes = (finding.world_size, finding.world_size // finding.sp_size, finding.sp_size, finding.accumulate)
    return (finding.check, *map(str, sizes), str(finding.layouts), error, finding.where or "-", finding.verdict)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
