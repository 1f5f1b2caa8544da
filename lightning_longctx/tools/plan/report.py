"""The plan as text and as plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning_longctx.tools.output import markdown_table
from lightning_longctx.tools.plan.peaks import Peaks
from lightning_longctx.tools.plan.search import MARGIN_BYTES, MARGIN_SHARE, with_margin
from lightning_longctx.tools.plan.storages import CATEGORIES
from lightning_longctx.units import GIB, counted

__all__ = ["PlanReport", "Variant"]

#: Raised when a key of the JSON form changes its name or meaning.
JSON_VERSION = 1


_NOT_MODELLED = (
    "Not simulated: rounding and fragmentation of the allocator, NCCL's buffers, the CUDA context, workspaces of"
    " kernels, memory of compiled code, callbacks. The margin stands for them."
)


@dataclass(frozen=True)
class Variant:
    """One row of the table of switches.

    Attributes:
        name: what is changed.
        peaks: at the configured length.
        fits: whether that fits.
        longest: tokens of the longest row that fits; None if it was not looked for.
    """

    name: str
    peaks: Peaks
    fits: bool
    longest: int | None


@dataclass(frozen=True)
class PlanReport:
    """Everything that was found.

    Attributes:
        facts: what was planned: sizes, switches, limits.
        variants: as configured first, then with one switch each, then with all.
        advice: what to write, or that nothing helps.
        notes: limits, and what was left out.
    """

    facts: dict[str, Any]
    variants: list[Variant]
    advice: str
    notes: list[str]

    @property
    def fits(self) -> bool:
        """Whether the configured run fits."""
        return self.variants[0].fits

    def to_plain(self) -> dict[str, Any]:
        """All numbers, for ``--json``: bytes and tokens."""
        variants = [
            {
                "name": variant.name,
                "fits": variant.fits,
                "longest_tokens": variant.longest,
                "peak_bytes": variant.peaks.peak,
                "with_margin_bytes": with_margin(variant.peaks.peak),
                "host_bytes_per_node": variant.peaks.host * self.facts["ranks_per_node"],
                "binding_phase": variant.peaks.binding,
                "largest_tensor": list(variant.peaks.largest[1]),
                "phases": [asdict(phase) for phase in variant.peaks.phases],
            }
            for variant in self.variants
        ]
        return {
            "version": JSON_VERSION,
            "facts": self.facts,
            "variants": variants,
            "advice": self.advice,
            "notes": self.notes,
        }

    def to_text(self) -> str:
        """The report as Markdown that is readable in a terminal."""
        facts, configured = self.facts, self.variants[0]
        needed, device = with_margin(configured.peaks.peak) / GIB, facts["device_gib"]
        verdict = "fits" if self.fits else "does not fit"
        lines = [
            "# longctx plan",
            "",
            f"{counted(facts['parameters'], 'parameter')}, rows of {counted(facts['tokens'], 'token')},"
            f" {counted(facts['world_size'], 'device')} of {device:g} GiB,"
            f" sequence_parallel_size {facts['sequence_parallel_size']}, {facts['precision']}.",
            f"Switched on: {', '.join(facts['switched_on']) or 'nothing'}.",
            "",
            f"It {verdict}: {needed:.1f} GiB with margin of {device:g} GiB, set by the {configured.peaks.binding}."
            f" Margin: {MARGIN_SHARE:.0%} and {MARGIN_BYTES / GIB:g} GiB.",
            self.advice,
            "",
            "## One device at the peak of each phase, in GiB",
            "",
            *markdown_table(("phase", *CATEGORIES, "peak"), map(_phase_row, configured.peaks.phases)),
            "",
            "## Switches",
            "",
            *markdown_table(_VARIANT_HEAD, (self._variant_row(variant) for variant in self.variants)),
            "",
            *(f"- {note}" for note in (*self.notes, _NOT_MODELLED)),
        ]
        return "\n".join(lines) + "\n"

    def _variant_row(self, variant: Variant) -> tuple[str, ...]:
        first, peak = self.variants[0].peaks.peak, variant.peaks.peak
        return (
            variant.name,
            f"{peak / GIB:.1f}",
            "" if variant is self.variants[0] else f"{(peak - first) / GIB:+.1f}",
            f"{with_margin(peak) / GIB:.1f}",
            "yes" if variant.fits else "no",
            variant.peaks.binding,
            f"{variant.peaks.host * self.facts['ranks_per_node'] / GIB:.1f}",
            "-" if variant.longest is None else f"{variant.longest:,}",
        )


_VARIANT_HEAD = ("change", "peak", "against", "with margin", "fits", "set by", "host/node", "longest row")


def _phase_row(phase: Any) -> tuple[str, ...]:
    parts = [phase.parts.get(name, 0) for name in CATEGORIES]
    return (phase.name, *(f"{value / GIB:.2f}" for value in parts), f"{phase.peak / GIB:.2f}")
