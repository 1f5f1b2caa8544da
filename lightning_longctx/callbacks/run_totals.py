"""What a fit did in all, from the sums that logged steps read anyway: the first of its closing lines."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_longctx.callbacks.step_sums import Field
from lightning_longctx.units import counted

__all__ = ["RunTotals", "duration"]


class RunTotals:
    """Sums of a fit up to its last logged step, on the host.

    Args:
        devices: over which the sums are joined.
        sp_size: ranks that hold one row.
        step: optimizer steps done before.

    Attributes:
        validation_loss: the last one; None before.

    Example:
        >>> totals, sums = RunTotals(devices=1, sp_size=1, step=0), [0.0] * len(Field)
        >>> sums[Field.TOKENS], sums[Field.BUDGET], sums[Field.SECONDS] = 6000.0, 8000.0, 75.0
        >>> totals.add(sums, 2, 5.5)
        >>> totals.line()
        'Run: 2 steps, 6,000 tokens in 1 min 15 s (80 a second), rows filled to 75.0%; loss 5.500.'
    """

    def __init__(self, devices: int, sp_size: int, step: int) -> None:
        self.validation_loss: float | None = None
        self._devices, self._sp_size = devices, sp_size
        self._first = self._last = step
        self._sums = [0.0] * len(Field)
        self._any_logged = False
        self._losses: list[float] = []  # of the first logged step and of the last

    def add(self, sums: Sequence[float], step: int, loss: float | None = None, logged: bool = True) -> None:
        """Add steps.

        Args:
            sums: ``[len(Field)]``, over all ranks, of the steps since the last call.
            step: optimizer steps done so far.
            loss: of the last of these steps; None if it has none.
            logged: whether the last of these steps was logged.
        """
        self._sums = [old + new for old, new in zip(self._sums, sums, strict=True)]
        self._last = step
        self._any_logged |= logged
        if loss is not None:
            self._losses = [*self._losses[:1], loss]

    def line(self) -> str | None:
        """One sentence for people; None before the first step."""
        steps, sums = self._last - self._first, self._sums
        if not steps:
            return None
        seconds = sums[Field.SECONDS] / self._devices  # the mean of the ranks' clocks
        parts = [f"Run: {counted(steps, 'step')}"]
        if sums[Field.TOKENS] and seconds:
            rate = sums[Field.TOKENS] / seconds
            parts.append(f", {counted(sums[Field.TOKENS], 'token')} in {duration(seconds)} ({rate:,.0f} a second)")
        if sums[Field.BUDGET]:
            parts.append(f", rows filled to {sums[Field.TOKENS] * self._sp_size / sums[Field.BUDGET]:.1%}")
        if self._losses:
            parts.append(f"; loss {' -> '.join(f'{loss:.3f}' for loss in self._losses)}")  # nan too: never hidden
        elif not self._any_logged:
            parts.append("; no loss was logged: see `log_every_n_steps`")
        if self.validation_loss is not None:
            parts.append(f"{', ' if self._losses else '; loss '}in validation {self.validation_loss:.3f}")
        return "".join([*parts, "."])


def duration(seconds: float) -> str:
    """A time as people say it.

    Example:
        >>> duration(3.14159), duration(59.9), duration(3600 + 125)
        ('3.1 s', '1 min 0 s', '1 h 2 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
