"""What the doctor found, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_longctx.tools.doctor.compare import Finding
from lightning_longctx.tools.output import markdown_table
from lightning_longctx.units import counted

__all__ = ["REPORT", "DoctorReport", "model_name", "parity_line"]

#: Raised when a key of the JSON form changes its name or meaning.
JSON_VERSION = 1

#: Name of the file with all numbers.
REPORT = "doctor.json"

_CHECKS = ("loss", "gradients", "evaluation", "isolation", "causality", "resume")
_HEAD = ("processes", "dp", "sp", "accumulate", "layouts", *_CHECKS, "verdict")


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
            f"# longctx doctor: {facts['model']} ({facts['size']}, {counted(facts['parameters'], 'parameter')})",
            "",
            f"Reference: {facts['reference']}. {counted(layouts, 'random layout')}, seed {facts['seed']}, "
            f"tolerance {facts['tolerance']:g}, float32, {self.seconds:.0f} s.",
            "",
            *markdown_table(_HEAD, map(_row, self._fits())),
        ]
        worst = max((f for f in self.findings if f.check == "gradients"), key=_size, default=None)
        if worst is not None:
            lines += ["", f"The largest gradient error, {worst.error:.1e}, is that of `{worst.where}`."]
        others = [_sentence(finding) for finding in self.findings if finding.verdict != "ok"]
        lines += ["", *others] if others else []
        return "\n".join([*lines, "", self._verdict()])

    def _fits(self) -> list[list[Finding]]:
        """Findings by world and ranks of a row."""
        fits: dict[tuple[int, int], list[Finding]] = {}
        for finding in self.findings:
            fits.setdefault((finding.world_size, finding.sp_size), []).append(finding)
        return list(fits.values())

    def _verdict(self) -> str:
        ties = sum(finding.verdict == "tie" for finding in self.findings)
        tied = f" {counted(ties, 'near-tie')} of routing counted as such." if ties else ""
        if not self.faults:
            return f"No fault: every layout gives what the reference gives.{tied}"
        return f"{counted(len(self.faults), 'fault')}.{tied}"


def model_name(module: Any) -> str:
    """What a report calls a module: the family of its configuration, or its class."""
    return str(getattr(getattr(module, "config", None), "model_type", None) or type(module).__name__)


def parity_line(path: Path, model: str) -> str | None:
    """What a report on disk says of a model, in one line; None if there is no readable report of it.

    Args:
        path: of the JSON form.
        model: see :func:`model_name`.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        facts, findings = plain["facts"], [Finding(**found) for found in plain["findings"]]
    except (OSError, ValueError, TypeError, KeyError):  # none, or another program's
        return None
    if plain["version"] != JSON_VERSION or facts["model"] != model:
        return None
    gradients = [finding for finding in findings if finding.check == "gradients"]
    worst = max(gradients, key=_size, default=None)
    faults = len(DoctorReport(facts, findings, 0.0).faults)
    error = "" if worst is None or worst.error is None else f", largest gradient error {worst.error:.1e}"
    found = counted(faults, "fault") if faults else "no fault"
    layouts = sum(finding.layouts for finding in gradients)
    return f"Doctor: {model} ({facts['size']}) in {counted(layouts, 'layout')}: {found}{error} ({path})."


def _row(findings: Sequence[Finding]) -> tuple[str, ...]:
    """One fit: its sizes, the largest error of each check, and the worst verdict."""
    first = next((finding for finding in findings if finding.check == "gradients"), findings[0])
    errors = []
    for check in _CHECKS:
        found = [finding for finding in findings if finding.check == check]
        worst = max(found, key=_size, default=None)
        errors.append("-" if worst is None or worst.error is None else f"{worst.error:.1e}")
    sizes = (first.world_size, first.world_size // first.sp_size, first.sp_size, first.accumulate, first.layouts)
    verdicts = [finding.verdict for finding in findings]
    worst_verdict = next(verdict for verdict in ("fault", "tie", "ok", "skipped") if verdict in verdicts)
    return (*map(str, sizes), *errors, worst_verdict)


def _sentence(finding: Finding) -> str:
    place = f"{counted(finding.world_size, 'process')}, sequence_parallel_size {finding.sp_size}"
    error = "" if finding.error is None else f" {finding.error:.1e} at `{finding.where}`"
    note = f": {finding.note}" if finding.note else ""
    return f"- {finding.verdict}: {finding.check}{error} ({place}, accumulate {finding.accumulate}){note}"


def _size(finding: Finding) -> float:
    """Errors in order; what is not a number is the worst."""
    error = -1.0 if finding.error is None else finding.error
    return float("inf") if error != error else error
