"""What was checked, as lines for people and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_longctx.units import counted

__all__ = ["Check", "CheckReport", "Skipped", "Verdict"]

#: ``finding``: the run would fail, or be in vain. ``warning``: it runs, and hardly as it is meant.
Verdict = Literal["fine", "warning", "finding", "skipped"]

#: Raised when a key of the JSON form changes its name or meaning.
JSON_VERSION = 1


class Skipped(Exception):  # noqa: N818  (no error: there is nothing to judge)
    """A check that says nothing here, and why."""


@dataclass(frozen=True)
class Check:
    """One line.

    Attributes:
        name: what was looked at.
        verdict: what came of it.
        text: what was found, or why it was skipped.
        facts: numbers behind it, for the JSON form.
    """

    name: str
    verdict: Verdict
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckReport:
    """All lines, in the order in which they were made."""

    checks: Sequence[Check]

    @property
    def findings(self) -> list[Check]:
        """What stands in the way of the run."""
        return [check for check in self.checks if check.verdict == "finding"]

    @property
    def warnings(self) -> list[Check]:
        """What is odd."""
        return [check for check in self.checks if check.verdict == "warning"]

    def to_plain(self) -> dict[str, Any]:
        """Everything, for ``--json``."""
        checks = [
            {"name": check.name, "verdict": check.verdict, "text": check.text, **check.facts} for check in self.checks
        ]
        numbers = {"findings": len(self.findings), "warnings": len(self.warnings)}
        return {"version": JSON_VERSION, **numbers, "checks": checks}

    def to_text(self) -> str:
        """A line a check, and a last one with the sum."""
        rows = [("check", "verdict", "what was found"), *((c.name, c.verdict, c.text) for c in self.checks)]
        first, second = (max(len(row[column]) for row in rows) + 2 for column in range(2))
        lines = [f"{name:{first}}{verdict:{second}}{text}" for name, verdict, text in rows]
        skipped = sum(check.verdict == "skipped" for check in self.checks)
        found = counted(len(self.findings), "finding") if self.findings else "Nothing stands in the way"
        found += f", {counted(len(self.warnings), 'warning')}" if self.warnings else ""
        return "\n".join([*lines, "", f"{found}; {skipped} of {counted(len(self.checks), 'check')} skipped."])
