"""Losses by source, by position and the like, as ``ChannelLoss`` logs them under any prefix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_longctx.tools.report.run import Run
from lightning_longctx.tools.report.series import Series

__all__ = ["Group", "Member", "groups_of"]

_COVERAGE = re.compile(r"(?!val_|test_)(\w+)_loss/coverage")
_RANGE = re.compile(r"(over-)?(\d+)([KMG]?)")
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Member:
    """One source.

    Attributes:
        name: as in the keys.
        loss: in training; without points where only validation has the source.
        validation: in validation; without points where it is not logged.
        targets: of all logged steps.
    """

    name: str
    loss: Series
    validation: Series
    targets: float


@dataclass(frozen=True)
class Group:
    """What one ``ChannelLoss`` logged.

    Attributes:
        prefix: of its keys: ``channel``, ``position``.
        members: those with most targets first; ranges of positions in their order.
    """

    prefix: str
    members: tuple[Member, ...]

    @property
    def title(self) -> str:
        """For people."""
        known = {"channel": "Loss by source", "position": "Loss by position in the document"}
        return known.get(self.prefix, f"Loss by {self.prefix}")


def groups_of(runs: Sequence[Run]) -> list[str]:
    """The prefixes that any of the runs has, ``channel`` first."""
    found = {match[1] for run in runs for key in run.series if (match := _COVERAGE.fullmatch(key))}
    return sorted(found, key=lambda prefix: (prefix != "channel", prefix))


def group_of(run: Run, prefix: str) -> Group:
    """What a run has under a prefix; without members where it has nothing."""
    training, validation = run.under(f"{prefix}_loss/"), run.under(f"val_{prefix}_loss/")
    found = [
        Member(
            name,
            training.get(name, Series.empty()),
            validation.get(name, Series.empty()),
            float(run.get(f"{prefix}_tokens/{name}").finite.values.sum()),
        )
        for name in training | validation
        if name != "coverage"
    ]
    ranges = all(_RANGE.match(member.name) for member in found)
    key = (
        (lambda member: _start(member.name))
        if ranges
        else (lambda member: (not len(member.loss), -member.targets, member.name))
    )
    return Group(prefix, tuple(sorted(found, key=key)))


def _start(name: str) -> tuple[int, int]:
    match = _RANGE.match(name)
    assert match is not None
    return int(match[2]) * _FACTORS[match[3]], int(bool(match[1]))
